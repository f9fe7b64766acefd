//! Who may do what at the API's socket, and how much of it.

mod common;

use common::{
    Daemon,
    http::{Watch, ask, ask_again, client},
    vms::{VcpuThread, describe},
    wait_for,
};
use nix::{libc, unistd::Group};
use serde_json::{Value, json};
use std::{
    fs::{Permissions, set_permissions},
    io::Write,
    os::unix::{fs::MetadataExt, fs::PermissionsExt, net::UnixStream},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};
use vnuma_client::blocking::Connection;

/// Nobody's, on every system.
const STRANGER: u32 = 65534;

/// Runs `act` as another user. The raw system calls change one thread only.
fn as_user<T: Send>(uid: u32, groups: &[u32], act: impl FnOnce() -> T + Send) -> T {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test takes another user's id, for which it has to run as root"
    );
    let body = move || {
        let ok = |result: libc::c_long| assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the kernel reads as many groups as it is told that there are.
        ok(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) });
        // SAFETY: no memory is involved.
        ok(unsafe { libc::syscall(libc::SYS_setresgid, STRANGER, STRANGER, STRANGER) });
        // SAFETY: no memory is involved.
        ok(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) });
        act()
    };
    thread::scope(|scope| scope.spawn(body).join().expect("no panic"))
}

/// As an operator would with a group; other users do not get past the socket's mode.
fn open_to_all(socket: &Path) {
    set_permissions(socket, Permissions::from_mode(0o666)).expect("changed");
    set_permissions(socket.parent().expect("a parent"), Permissions::from_mode(0o755)).expect("changed");
}

fn busy(answer: &(u16, Value), text: &str) {
    assert_eq!((answer.0, &answer.1["error"]), (503, &json!("busy")), "{}", answer.1);
    let message = answer.1["message"].as_str().unwrap_or_default();
    assert!(message.contains(text), "{message:?} should say {text:?}");
}

#[test]
fn a_user_has_so_many_connections_and_takes_none_from_others() {
    let daemon = Daemon::start_with(None, |config| config.connections_per_user = 3);
    open_to_all(&daemon.socket);
    let list = || ask(&daemon.socket, "GET", "/v1/vms", "");
    // The one that was made to see that the daemon is there may not be gone yet.
    wait_for("the daemon to have no connection", || list().0 == 200);
    let connect =
        || (0..3).map(|_| UnixStream::connect(&daemon.socket).expect("connected")).collect::<Vec<_>>();
    let held = as_user(STRANGER, &[], connect);
    let refused = as_user(STRANGER, &[], list);
    busy(
        &refused,
        "user 65534 has 3 connections to vnumad, the most that one may have (api.connections_per_user)",
    );
    assert_eq!(list().0, 200, "root is another user");
    drop(held);
    wait_for("there to be room again", || as_user(STRANGER, &[], list).0 == 200);
}

#[test]
fn a_user_has_so_many_watchers() {
    let daemon = Daemon::start_with(None, |config| config.watchers_per_user = 2);
    open_to_all(&daemon.socket);
    let watch = || Watch::start(&daemon.socket);
    let held = [watch(), watch()];
    let refused = ask(&daemon.socket, "GET", "/v1/watch", "");
    busy(&refused, "user 0 has 2 watchers, the most that one may have (api.watchers_per_user)");
    assert_eq!(ask(&daemon.socket, "GET", "/v1/vms", "").0, 200, "reading is something else");
    drop(as_user(STRANGER, &[], watch));
    drop(held);
    wait_for("them to be gone", || ask(&daemon.socket, "GET", "/v1/daemon", "").1["watchers"] == 0);
    drop(watch());
}

#[test]
fn a_group_may_act_if_one_is_named() {
    let group = Group::from_gid(1.into()).expect("read").expect("every system has a group 1");
    let (id, name) = (group.gid.as_raw(), group.name.clone());
    let daemon = Daemon::start_with(None, |config| config.act_group = Some(name.clone()));
    assert_eq!(std::fs::metadata(&daemon.socket).expect("there").gid(), id, "its members can connect");
    open_to_all(&daemon.socket);
    let attach = || ask(&daemon.socket, "POST", "/v1/vms/nobody/attach", "");
    let (status, answer) = as_user(STRANGER, &[], attach);
    assert_eq!((status, &answer["error"]), (403, &json!("forbidden")));
    let message = answer["message"].as_str().unwrap_or_default();
    let expected = format!(
        "attach needs root, the user that vnumad runs as, or a member of group `{name}` (api.act_group); the peer is user 65534"
    );
    assert!(message.starts_with(&expected), "{message}");
    assert_eq!(as_user(STRANGER, &[7, id], attach).0, 404, "allowed, but there is no such VM");
    // It would get the memory of any VM by that.
    let body = r#"{"destination": "tcp:b:1"}"#;
    let migrate = || ask(&daemon.socket, "POST", "/v1/vms/nobody/migrate", body);
    let (status, answer) = as_user(STRANGER, &[7, id], migrate);
    let message = answer["message"].as_str().unwrap_or_default();
    assert!(
        message.starts_with("migrate needs root or the user that vnumad runs as; the peer is"),
        "{message}"
    );
    assert_eq!((status, migrate().0), (403, 404));
    let cancel = || ask(&daemon.socket, "POST", "/v1/vms/nobody/migrate/cancel", "");
    assert_eq!(as_user(STRANGER, &[7, id], cancel).0, 404);
    // More groups than are looked for at first.
    let many: Vec<u32> = (1000..1100).chain([id]).collect();
    assert_eq!(as_user(STRANGER, &many, attach).0, 404);
    assert_eq!(as_user(STRANGER, &many[..100], attach).0, 403);
}

#[test]
fn readers_without_pause_keep_no_move_from_being_published() {
    let daemon = Daemon::start();
    open_to_all(&daemon.socket);
    let threads = [VcpuThread::start(), VcpuThread::start()];
    threads.iter().enumerate().for_each(|(cpu, thread)| thread.pin(cpu));
    let tids = threads.each_ref().map(|thread| thread.tid);
    daemon.add("web", describe("web", std::process::id().cast_signed(), &[0, 1], &tids));
    wait_for("the VM", || ask(&daemon.socket, "POST", "/v1/vms/web/attach", "").0 == 200);
    let guest = daemon.guest("web");
    let stop = AtomicBool::new(false);
    let read = |mut connection: Connection| {
        let mut answers = 0;
        while !stop.load(Ordering::Relaxed) {
            for path in ["/v1/vms", "/v1/vms/web"] {
                let (status, body) = ask_again(&mut connection, path);
                assert!(status == 200 && body.contains("\"web\""), "{status}: {body}");
                answers += 1;
            }
        }
        answers
    };
    let connect = || {
        let connections = (0..daemon.config.connections_per_user).map(|_| client(&daemon.socket).connect());
        connections.collect::<Result<Vec<_>, _>>().expect("connected")
    };
    let connections = as_user(STRANGER, &[], connect);
    assert_eq!(connections.len(), 64);
    let answers: Vec<u32> = thread::scope(|scope| {
        let readers: Vec<_> =
            connections.into_iter().map(|connection| scope.spawn(|| read(connection))).collect();
        let mut last = guest.read().expect("published").generation;
        // Unwinding would wait for the readers.
        let moves = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 1..=20 {
                let node = round % 2;
                threads[0].pin(node as usize);
                wait_for(&format!("move {round} to be published"), || {
                    guest.read().is_ok_and(|found| found.generation > last && found.vcpus[0].node == node)
                });
                let found = guest.read().expect("published");
                assert_eq!((found.vcpus[0].node, found.vcpus[1].node), (node, 1));
                last = found.generation;
            }
        }));
        stop.store(true, Ordering::Relaxed);
        let answers = readers.into_iter().map(|reader| reader.join().expect("answered")).collect();
        moves.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        answers
    });
    println!("{} answers", answers.iter().sum::<u32>());
    assert!(answers.iter().all(|&answers| answers > 0), "{answers:?}");
}

#[test]
fn a_user_who_asks_and_goes_keeps_no_other_user_waiting() {
    let daemon = Daemon::start();
    open_to_all(&daemon.socket);
    let stop = AtomicBool::new(false);
    let ask_and_go = || {
        while !stop.load(Ordering::Relaxed) {
            let mut stream = UnixStream::connect(&daemon.socket).expect("connected");
            // It may be refused.
            let _ = stream.write_all(b"GET /v1/capacity HTTP/1.1\r\nHost: x\r\n\r\n");
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> = (0..2).map(|_| scope.spawn(|| as_user(STRANGER, &[], ask_and_go))).collect();
        // Unwinding would wait for the others.
        let answers = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..50 {
                assert_eq!(ask(&daemon.socket, "GET", "/v1/capacity", "").0, 200);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        others.into_iter().for_each(|other| other.join().expect("no panic"));
        answers.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    let limited = ask(&daemon.socket, "GET", "/v1/daemon", "").1["limited"].clone();
    assert!(
        limited.as_array().is_some_and(|all| all.iter().all(|of| of["party"] == "user 65534")),
        "{limited}"
    );
}
