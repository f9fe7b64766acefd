//! The server, with a core that takes requests when the test says so.

use super::{
    context::{Asker, Client, Context},
    exposition::Metrics,
    listener::ApiListener,
    rights::{Peer, Rights},
    router,
};
use crate::{
    config::Config,
    core::Refusal,
    fair::{Permits, ROOT, Room},
    shell::inbox::{ApiRequest, Asked, Inbox},
};
use nix::libc;
use std::{
    fs::{Permissions, set_permissions},
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Instant,
};
use tokio::sync::oneshot;
use vnuma_model::Party;
use vnuma_process::panic_message;
use vnuma_test_kit::{HANG_LIMIT, wait_for};

/// Nobody's, on every system.
const STRANGER: u32 = 65534;

/// A server without a core.
struct Served {
    inbox: Arc<Inbox>,
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Served {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("changed");
        let socket = directory.path().join("api.sock");
        let (root, records) = (directory.path().to_owned(), directory.path().join("channels"));
        let config = Config { root, records, socket: socket.clone(), ..Config::default() };
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let (context, (stop, stopped)) = (Context::new(Arc::clone(&inbox), &config), oneshot::channel());
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
        set_permissions(&socket, Permissions::from_mode(0o666)).expect("changed");
        listener.set_nonblocking(true).expect("changed");
        let serve = async move {
            let listener = tokio::net::UnixListener::from_std(listener).expect("listens");
            let rights = Rights { uid: 0, group: None };
            let listener =
                ApiListener::new(listener, rights, config.connections_per_user, context.tolls.clone());
            let service = router(context).into_make_service_with_connect_info::<Client>();
            tokio::select! {
                _ = axum::serve(listener, service) => {}
                _ = stopped => {}
            }
        };
        let thread = thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(serve);
        });
        Self { inbox, socket, stop: Some(stop), thread: Some(thread), _directory: directory }
    }

    fn send(&self, request: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).expect("connected");
        stream.set_read_timeout(Some(HANG_LIMIT)).expect("a limit");
        // One that is refused may be closed by now.
        let _ = write!(stream, "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream
    }

    /// Takes the next request that is served, within so many turns.
    fn take(&self, turns: usize) -> Option<ApiRequest> {
        let requests = (0..turns).filter_map(|_| self.inbox.take(Instant::now(), &[]).expect("open").request);
        requests.map(|Asked { request, .. }| request).next()
    }

    fn wait_for_requests(&self, waited_for: usize, gone: usize) {
        wait_for("requests to come and to be left", || self.inbox.requests() == (waited_for, gone));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().map(JoinHandle::join);
    }
}

/// Runs `act` as another user. The raw system calls change one thread only.
fn as_stranger<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test takes another user's id, for which it has to be root"
    );
    let body = || {
        // SAFETY: no memory is involved.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, STRANGER, STRANGER, STRANGER) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        act()
    };
    thread::scope(|scope| scope.spawn(body).join().expect("no panic"))
}

#[test]
fn a_user_who_asks_and_goes_takes_no_turn_of_another_one() {
    let served = Served::start();
    as_stranger(|| (0..4000).for_each(|_| drop(served.send("GET /v1/capacity"))));
    let mut root = served.send("GET /v1/vms/nobody");
    let taken = thread::scope(|scope| {
        let (answer, answered) = mpsc::channel();
        scope.spawn(move || {
            let mut text = String::new();
            root.read_to_string(&mut text).expect("an answer");
            answer.send(text).expect("it is waited for");
        });
        let mut others = 0;
        loop {
            if let Ok(text) = answered.try_recv() {
                break (text, others);
            }
            match served.take(1) {
                Some(ApiRequest::Show(name, reply)) => drop(reply.send(Err(Refusal::NoVm(name)))),
                Some(_) => others += 1,
                None => thread::yield_now(),
            }
        }
    });
    assert!(taken.0.starts_with("HTTP/1.1 404"), "{}", taken.0);
    // Those that were left a moment ago may not be known to be.
    assert!(taken.1 < 64, "{} requests of the other user were served", taken.1);
}

#[test]
fn what_a_client_wanted_is_not_done_once_it_has_gone() {
    let served = Served::start();
    let (gone, here) = (served.send("POST /v1/vms/web/detach"), served.send("POST /v1/vms/db/detach"));
    served.wait_for_requests(2, 0);
    drop(gone);
    served.wait_for_requests(1, 1);
    let taken = served.take(2);
    let is_of_db =
        matches!(&taken, Some(ApiRequest::Act(crate::core::event::Request::Detach(vm, _))) if vm == "db");
    assert!(is_of_db, "{taken:?}");
    drop(here);
}

#[test]
fn metrics_that_are_gathered_for_several_clients_do_not_end_with_the_first() {
    let served = Served::start();
    drop(served.send("GET /metrics"));
    served.wait_for_requests(1, 0);
    assert!(matches!(served.take(1), Some(ApiRequest::Daemon(_))));
}

#[test]
fn a_panic_of_what_a_handler_has_done_elsewhere_is_one_of_the_handler() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let context = Context::new(Arc::new(Inbox::new().expect("an inbox")), &Config::default());
    let (asker, metrics) = (Asker::own(context), Metrics::default());
    let reads = async {
        let job = asker.job().await;
        asker.run(job, || panic!("reading")).await.map(|()| "read")
    };
    let gathers = async {
        let gathered = metrics.get::<Refusal>(async { panic!("gathering") });
        gathered.await.map(|_| "gathered")
    };
    let why = |outcome: thread::Result<Result<&str, Refusal>>| match outcome {
        Ok(answered) => format!("{answered:?}"),
        Err(panic) => panic_message(&*panic),
    };
    // The layer around all handlers does the same.
    assert_eq!(why(catch_unwind(AssertUnwindSafe(|| runtime.block_on(reads)))), "reading");
    assert_eq!(why(catch_unwind(AssertUnwindSafe(|| runtime.block_on(gathers)))), "gathering");
    let after = runtime.block_on(async { asker.run(asker.job().await, || 7).await });
    assert!(matches!(after, Ok(7)), "{after:?}");
}

#[test]
fn files_are_not_read_for_a_client_that_has_gone_and_its_connection_counts_until_then() {
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build();
    let (began, ran) = (mpsc::channel::<()>(), Arc::new(AtomicBool::new(false)));
    let permits = Permits::new(Room::for_parties_of(1));
    let user = Party::User(STRANGER);
    runtime.expect("a runtime").block_on(async {
        // The only thread is in use.
        let busy = tokio::task::spawn_blocking(move || began.1.recv());
        let peer = Peer { uid: STRANGER, may_act: false, may_send: false };
        let client = Client { peer, held: Arc::new(permits.take(user).expect("the first")) };
        let context = Context::new(Arc::new(Inbox::new().expect("an inbox")), &Config::default());
        let asker = Asker::new(context, client);
        let (lane, runs) = (asker.job().await, Arc::clone(&ran));
        let mut asked =
            Box::pin(async move { asker.run(lane, move || runs.store(true, Ordering::Relaxed)).await });
        let mut no_task = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(asked.as_mut().poll(&mut no_task).is_pending());
        drop(asked);
        assert_eq!(permits.take(user).err(), Some(1), "it is not over");
        drop(began.0);
        assert!(busy.await.expect("no panic").is_err());
    });
    wait_for("the permit to come back", || permits.take(user).is_ok());
    assert!(!ran.load(Ordering::Relaxed));
    assert!(permits.take(ROOT).is_ok());
}
