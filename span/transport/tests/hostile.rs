//! Peers that break the rules: each ends its own connection, with an error that names it and the field.

mod common;

use common::{Authority, HANG, Meeting, Transport, anywhere, ending, hello, meet, pair};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, HEADER, encode};
use vnuma_dsm_transport::{Fault, Lane, Limits, Listener, Place, TransportError, accept, dial, mesh};

fn short() -> Limits {
    let limit = Duration::from_millis(300);
    Limits { stall: limit, silence: 4 * limit, connect: limit, ..Limits::default() }
}

fn frame(body: &Body<'_>, sequence: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(body, 0, sequence, &mut bytes);
    bytes
}

/// What node 0 says to a caller that sends these bytes first.
fn greeted_with(bytes: &[u8]) -> TransportError {
    let meeting = Meeting::new(Transport::Tcp);
    let mut stream = TcpStream::connect(meeting.address()).expect("connected");
    stream.write_all(bytes).expect("sent");
    accept(&meeting.listener, &hello(0, 0), short()).expect_err("refused")
}

/// Node 0 connected to a socket of which the test writes every byte.
fn connected() -> (Lane, TcpStream) {
    let meeting = Meeting::new(Transport::Tcp);
    let mut stream = TcpStream::connect(meeting.address()).expect("connected");
    stream.write_all(&frame(&Body::Hello(hello(1, 0)), 0)).expect("sent");
    let lane = accept(&meeting.listener, &hello(0, 0), short()).expect("accepted");
    let mut answer = [0; HEADER + 60];
    stream.read_exact(&mut answer).expect("a hello");
    (lane, stream)
}

/// How node 0 ends the connection to node 1 when that sends these bytes; and other connections go on.
#[track_caller]
fn told_by(bytes: &[u8]) -> String {
    let (mut other, mut third) = pair(Transport::Tcp, Limits::default());
    let (mut lane, mut stream) = connected();
    stream.write_all(bytes).expect("sent");
    let text = ending(&mut lane).to_string();
    assert!(matches!(lane.flush(), Err(error) if matches!(error.fault, Fault::Ended)));
    other.send(&Body::Opaque(&[1]), 0).expect("another connection goes on");
    let mut seen = 0;
    let start = Instant::now();
    while seen == 0 {
        assert!(start.elapsed() < HANG, "another connection is disturbed");
        third.receive(|_, _| seen += 1).expect("another connection goes on");
    }
    let (peer, reason) = text.split_once("): ").expect("a peer and a reason");
    assert!(peer.starts_with("node 1, lane 0 (tcp 127.0.0.1:"), "{text}");
    reason.to_owned()
}

#[test]
fn garbage_instead_of_a_hello() {
    let error = greeted_with(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n");
    assert!(
        error.to_string().contains("): header.kind: 0x2f is not a kind")
            || error.to_string().contains(": header.kind: 0x2f is not a kind"),
        "{error}"
    );
    let error = greeted_with(&[0xff; 4096]);
    assert!(error.to_string().contains("header.kind: 0xff is not a kind (1 to 7)"), "{error}");
    let mut bytes = frame(&Body::Hello(hello(1, 0)), 0);
    bytes[HEADER] = b'W';
    let error = greeted_with(&bytes);
    assert!(error.to_string().contains("hello.magic: 0x574e554d4144534d is not VNUMADSM"), "{error}");
}

#[test]
fn something_else_before_the_hello() {
    let error = greeted_with(&frame(&Body::Opaque(&[0; 1 << 20]), 0)[..HEADER]);
    assert!(error.to_string().ends_with("header.kind: Opaque before the hello"), "{error}");
    let error = greeted_with(&frame(&Body::Ping(1), 0));
    assert!(error.to_string().ends_with("header.kind: Ping before the hello"), "{error}");
}

#[test]
fn a_caller_that_says_nothing_or_half() {
    for part in [0, 1, HEADER, HEADER + 59] {
        let error = greeted_with(&frame(&Body::Hello(hello(1, 0)), 0)[..part]);
        assert!(error.to_string().ends_with(": no connection within 300ms"), "{part} bytes: {error}");
    }
}

#[test]
fn garbage_later() {
    assert_eq!(told_by(&[0xab; 100]), "header.kind: 0xab is not a kind (1 to 7)");
    let mut bytes = frame(&Body::Ping(1), 1);
    bytes[5] = 9;
    assert_eq!(told_by(&bytes), "header.reserved: 0x9 is not 0");
    let mut bytes = frame(&Body::Opaque(&[16, 1]), 1);
    bytes[4] = 6;
    assert_eq!(told_by(&bytes), "message: 0x10 is not a message (1 to 15)");
}

#[test]
fn a_length_beyond_the_limit() {
    let mut bytes = frame(&Body::Opaque(&[]), 1);
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(told_by(&bytes), "header.length: 4294967295, and at most 1048576 are allowed");
}

#[test]
fn frames_out_of_order_again_or_missing() {
    let text = |found: u64| format!("header.sequence: {found}, expected 1");
    assert_eq!(told_by(&frame(&Body::Ping(1), 0)), text(0));
    assert_eq!(told_by(&frame(&Body::Ping(1), 2)), text(2));
    let hello = Body::Hello(hello(1, 0));
    assert_eq!(told_by(&frame(&hello, 1)), "header.kind: Hello after the beginning");
    let refusal = Body::Refusal(vnuma_abi_dsm_wire::Refusal::Peer);
    assert_eq!(told_by(&frame(&refusal, 1)), "header.kind: Refusal after the beginning");
}

#[test]
fn a_frame_that_is_never_finished() {
    let bytes = frame(&Body::Opaque(&[0; 1000]), 1);
    assert_eq!(told_by(&bytes[..500]), "slow: a frame is incomplete after 300ms (500 bytes of it came)");
    // Behind a whole one.
    let both = [frame(&Body::Opaque(&[1]), 1), frame(&Body::Opaque(&[0; 1000]), 2)].concat();
    assert_eq!(told_by(&both[..125]), "slow: a frame is incomplete after 300ms (100 bytes of it came)");
}

/// A byte now and then is not progress.
#[test]
fn a_frame_that_comes_byte_by_byte() {
    let (mut lane, mut stream) = connected();
    let writer = thread::spawn(move || {
        let start = Instant::now();
        for byte in frame(&Body::Opaque(&[0; 4000]), 1) {
            if stream.write_all(&[byte]).is_err() || start.elapsed() > HANG {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    });
    let error = ending(&mut lane);
    assert!(matches!(error.fault, Fault::Slow { .. }), "{error}");
    drop(lane);
    writer.join().expect("no panic");
}

#[test]
fn a_connection_that_breaks_off() {
    let (mut lane, mut stream) = connected();
    stream.write_all(&frame(&Body::Opaque(&[0; 1000]), 1)[..100]).expect("sent");
    drop(stream);
    let error = ending(&mut lane);
    assert!(error.to_string().ends_with("the connection was closed in the middle of a frame"), "{error}");
}

/// A host that lost its power: the connection stays, and nothing comes.
#[test]
fn a_half_open_connection() {
    let (mut lane, _stream) = connected();
    let error = ending(&mut lane);
    assert!(error.to_string().ends_with("silent: nothing received for 1.2s"), "{error}");
}

/// Questions whose answers are never read do not make memory grow.
#[test]
fn a_flood_of_questions() {
    let (mut lane, mut stream) = connected();
    stream.set_write_timeout(Some(Duration::from_millis(50))).expect("a time limit");
    let start = Instant::now();
    let mut sequence = 1;
    let error = loop {
        let mut bytes = Vec::new();
        for _ in 0..1000 {
            encode(&Body::Ping(1), 0, sequence, &mut bytes);
            sequence += 1;
        }
        let sent = stream.write_all(&bytes);
        let outcome = loop {
            match lane.receive(|_, _| {}).and_then(|taken| lane.tick(Instant::now(), 0).map(|()| taken)) {
                Ok(0) => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        assert!(lane.waiting() <= lane.limits().queue_bytes + 100, "{} bytes", lane.waiting());
        assert!(start.elapsed() < HANG, "it goes on for ever");
        match (outcome, sent) {
            (Err(error), _) => break error,
            // A part of the questions went out, and the next would begin in the middle of one.
            (Ok(()), Err(_)) => break ending(&mut lane),
            (Ok(()), Ok(())) => {}
        }
    };
    assert!(matches!(error.fault, Fault::Stalled { .. } | Fault::Slow { .. }), "{error}");
}

#[test]
fn a_stranger_and_a_node_that_claims_another_number() {
    let (ours, strangers) = (Authority::new(), Authority::new());
    let listener = Listener::bind(&Place::Tls(anywhere(), ours.identity(0))).expect("a listener");
    let address = listener.address().expect("an address");
    let outcome = |place: Place, node: u8| {
        thread::scope(|scope| {
            let dialled = scope.spawn(move || dial(&place, &hello(node, 0), short()));
            (accept(&listener, &hello(0, 0), short()), dialled.join().expect("no panic"))
        })
    };
    let (accepted, _) = outcome(Place::Tls(address, ours.identity(1)), 1);
    assert_eq!(accepted.expect("its own certificate").peer().node, Some(1));

    let (accepted, _) = outcome(Place::Tls(address, ours.identity(1)), 2);
    let error = accepted.expect_err("node 1 says that it is node 2").to_string();
    let text = "hello.node: the peer says it is node 2, and its certificate is not for node-2.dsm.vnuma";
    assert!(error.ends_with(text), "{error}");

    let stranger = strangers.identity_believing(1, &ours);
    let (accepted, _) = outcome(Place::Tls(address, stranger), 1);
    let error = accepted.expect_err("a certificate of somebody else").to_string();
    assert!(error.contains("certificate"), "{error}");

    // The listener is not the node that was dialled.
    let wrong = Listener::bind(&Place::Tls(anywhere(), ours.identity(5))).expect("a listener");
    let place = Place::Tls(wrong.address().expect("an address"), ours.identity(1));
    let dialled = thread::scope(|scope| {
        let dialled = scope.spawn(move || dial(&place, &hello(1, 0), short()));
        let _ = accept(&wrong, &hello(0, 0), short());
        dialled.join().expect("no panic")
    });
    let error = dialled.expect_err("node 5 instead of node 0").to_string();
    assert!(error.contains("certificate"), "{error}");
}

#[test]
fn a_caller_without_tls() {
    let meeting = Meeting::new(Transport::Tls);
    let mut stream = TcpStream::connect(meeting.address()).expect("connected");
    stream.write_all(&frame(&Body::Hello(hello(1, 0)), 0)).expect("sent");
    let error = accept(&meeting.listener, &hello(0, 0), short()).expect_err("no TLS");
    assert!(matches!(error.fault, Fault::Io { .. }), "{error}");
    let (zero, one) = meet(&meeting, hello(0, 0), hello(1, 0), Limits::default());
    assert!(zero.is_ok() && one.is_ok(), "the next caller is served");
}

/// A peer that begins a handshake of TLS, or not even that, delays others no longer than one without TLS.
#[test]
fn a_handshake_of_tls_that_goes_no_further() {
    let meeting = Meeting::new(Transport::Tls);
    // Of a ClientHello of 512 bytes.
    for part in [&[][..], &[22, 3, 1, 2, 0], &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]] {
        let mut stream = TcpStream::connect(meeting.address()).expect("connected");
        stream.write_all(part).expect("sent");
        let error = accept(&meeting.listener, &hello(0, 0), short()).expect_err("no TLS").to_string();
        assert!(error.ends_with(": no connection within 300ms"), "{} bytes: {error}", part.len());
    }
    let silent = TcpListener::bind(anywhere()).expect("a listener");
    let Place::Tls(_, identity) = &meeting.place else { unreachable!("TLS") };
    let place = Place::Tls(silent.local_addr().expect("an address"), identity.clone());
    let error = dial(&place, &hello(1, 0), short()).expect_err("no TLS").to_string();
    assert!(error.ends_with(": no connection within 300ms"), "{error}");
    let (zero, one) = meet(&meeting, hello(0, 0), hello(1, 0), Limits::default());
    assert!(zero.is_ok() && one.is_ok(), "the next caller is served");
}

/// Another process of the host that scribbles over the positions of the ring.
#[test]
fn a_broken_ring() {
    use nix::sys::{mman, socket};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    for (offset, value, field) in
        [(0, u64::MAX, "head"), (0, (2 << 20) + 5000, "head"), ((2 << 20) + 4096 + 64, 1 << 40, "tail")]
    {
        let meeting = Meeting::new(Transport::Shm);
        let Place::Shm(path) = &meeting.place else { unreachable!("shared memory") };
        // A proxy that keeps the memory: it dials as a peer does, and takes the file from the middle.
        let (left, right) = UnixStream::pair().expect("a pair");
        let pipe = vnuma_dsm_transport::ShmPipe::dialled(left).expect("a ring");
        let mut byte = [0];
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
        let mut buffer = [std::io::IoSliceMut::new(&mut byte)];
        let flags = socket::MsgFlags::MSG_CMSG_CLOEXEC;
        let message =
            socket::recvmsg::<()>(right.as_raw_fd(), &mut buffer, Some(&mut space), flags).expect("a file");
        let Some(socket::ControlMessageOwned::ScmRights(numbers)) = message.cmsgs().expect("whole").next()
        else {
            panic!("no file");
        };
        // SAFETY: it was just received.
        let file = unsafe { OwnedFd::from_raw_fd(numbers[0]) };
        let stream = UnixStream::connect(path).expect("connected");
        let rights = [socket::ControlMessage::ScmRights(&numbers)];
        let byte = [std::io::IoSlice::new(&[1])];
        socket::sendmsg::<()>(stream.as_raw_fd(), &byte, &rights, socket::MsgFlags::empty(), None)
            .expect("sent");
        let mut lane = Lane::new(Box::new(pipe), "shm".to_owned(), short());
        lane.send(&Body::Hello(hello(1, 0)), 0).expect("sent");
        let mut zero = accept(&meeting.listener, &hello(0, 0), short()).expect("accepted");
        let size = std::num::NonZeroUsize::new(2 * (4096 + (2 << 20))).expect("a size");
        let protection = mman::ProtFlags::PROT_READ | mman::ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping of the test's own.
        let memory = unsafe { mman::mmap(None, size, protection, mman::MapFlags::MAP_SHARED, &file, 0) };
        let memory = memory.expect("mapped");
        // SAFETY: inside the mapping and aligned.
        unsafe { memory.cast::<u8>().add(offset).cast::<u64>().write_volatile(value) };
        let error = match zero.send(&Body::Opaque(&[1]), 0) {
            Ok(()) => ending(&mut zero),
            Err(error) => error,
        };
        let text =
            format!("node 1, lane 0 (shm {}): shared ring: {field}: {value:#x} is not", path.display());
        assert!(error.to_string().starts_with(&text), "{error}");
        drop(stream);
    }
}

#[test]
fn a_caller_without_a_ring() {
    let meeting = Meeting::new(Transport::Shm);
    let Place::Shm(path) = &meeting.place else { unreachable!("shared memory") };
    let mut stream = UnixStream::connect(path).expect("connected");
    stream.write_all(b"hello").expect("sent");
    let error = accept(&meeting.listener, &hello(0, 0), short()).expect_err("no file").to_string();
    assert!(error.contains("shared ring: files: 0x0 is not one, with the first byte"), "{error}");
    let silent = UnixStream::connect(path).expect("connected");
    let error = accept(&meeting.listener, &hello(0, 0), short()).expect_err("nothing").to_string();
    assert!(error.starts_with("shm "), "{error}");
    drop(silent);
}

/// Node 0 waits for node 1. What it says about callers, and whether node 1 came in at last.
fn waiting_for_node_1(
    transport: Transport,
    limits: Limits,
    callers: impl FnOnce(&Meeting),
) -> (Vec<String>, Duration) {
    let meeting = Meeting::new(transport);
    let peers = [(1, Place::Tcp(anywhere()))].into();
    let begin = Instant::now();
    thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let mut told = Vec::new();
            let lanes =
                mesh(&meeting.listener, &peers, &hello(0, 0), limits, |error| told.push(error.to_string()));
            (lanes.expect("a mesh"), told)
        });
        callers(&meeting);
        // It may take longer than a caller has on a machine that is busy.
        let _one = loop {
            match dial(&meeting.place, &hello(1, 0), limits) {
                Ok(lane) => break lane,
                Err(error) => assert!(begin.elapsed() < HANG / 2, "node 1 is not served: {error}"),
            }
        };
        let (_zero, told) = waits.join().expect("no panic");
        (told, begin.elapsed())
    })
}

#[test]
fn a_caller_that_does_not_say_who_it_is_is_closed_long_before_the_mesh_is_given_up() {
    let limits = Limits { connect: HANG, hello: Duration::from_millis(200), ..Limits::default() };
    let greeting = frame(&Body::Hello(hello(1, 0)), 0);
    for (transport, part) in [
        (Transport::Tcp, &[][..]),
        (Transport::Tcp, &greeting[..HEADER + 59]),
        (Transport::Tls, &[]),
        (Transport::Tls, &[22, 3, 1, 2, 0]),
    ] {
        let (told, _) = waiting_for_node_1(transport, limits, |meeting| {
            let mut stream = TcpStream::connect(meeting.address()).expect("connected");
            stream.write_all(part).expect("sent");
            stream.set_read_timeout(Some(HANG / 2)).expect("set");
            let end = stream.read(&mut [0]);
            let reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
            assert!(end.as_ref().map_or_else(reset, |bytes| *bytes == 0), "{end:?}");
        });
        assert!(told.first().is_some_and(|told| told.ends_with(": no connection within 200ms")), "{told:?}");
    }
}

#[test]
fn callers_that_fail_without_end_are_told_a_few_times() {
    let limits = Limits { connect: HANG, ..Limits::default() };
    let (told, taken) = waiting_for_node_1(Transport::Tcp, limits, |meeting| {
        for _ in 0..200 {
            let mut stream = TcpStream::connect(meeting.address()).expect("connected");
            stream.write_all(&[0xff; 100]).expect("sent");
            // Until it is closed.
            let _ = stream.read(&mut [0]);
        }
    });
    let each = told.iter().filter(|text| text.contains("header.kind: 0xff is not a kind")).count();
    assert!((20..=21 + taken.as_secs() as usize).contains(&each), "{each} lines in {taken:?}");
    let rest = format!("127.0.0.1: {} more failures were not told", 200 - each);
    assert_eq!(told.last(), Some(&rest));
}

/// A message has room for four descriptors. More than that, and those that do not belong there, are closed.
#[test]
fn a_caller_with_more_files_than_one_leaves_none_behind() {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use std::os::fd::AsRawFd;
    for count in [2, 4, 5, 200_usize] {
        let meeting = Meeting::new(Transport::Shm);
        let Place::Shm(path) = &meeting.place else { unreachable!("shared memory") };
        let stream = UnixStream::connect(path).expect("connected");
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let numbers = vec![writer.as_raw_fd(); count];
        let rights = [ControlMessage::ScmRights(&numbers)];
        let byte = [std::io::IoSlice::new(&[1])];
        sendmsg::<()>(stream.as_raw_fd(), &byte, &rights, MsgFlags::empty(), None).expect("sent");
        drop(writer);
        let error = accept(&meeting.listener, &hello(0, 0), short()).expect_err("too many").to_string();
        let text = format!("shared ring: files: {:#x} is not one, with the first byte", count.min(4));
        assert!(error.ends_with(&text), "{error}");
        drop(stream);
        nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))
            .expect("set");
        assert_eq!(reader.read(&mut [0]).expect("no other end is left open"), 0, "{count} files");
    }
}

/// The rest of the test below, in a process of its own, which may have no more memory.
const NO_MEMORY: &str = "VNUMA_TEST_NO_MEMORY";

#[test]
fn a_thread_that_cannot_be_started_is_an_error() {
    if std::env::var_os(NO_MEMORY).is_none() {
        let test = "a_thread_that_cannot_be_started_is_an_error";
        let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
        let again =
            again.args(["--exact", test, "--nocapture"]).env(NO_MEMORY, "1").output().expect("started");
        let told = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success(), "{told}{}", String::from_utf8_lossy(&again.stdout));
        return;
    }
    let meeting = Meeting::new(Transport::Tcp);
    let silent = TcpListener::bind(anywhere()).expect("a listener");
    let peers = [(0, Place::Tcp(silent.local_addr().expect("an address")))].into();
    let ours = vnuma_abi_dsm_wire::Hello { lanes: 256, ..hello(1, 0) };
    let limits = Limits { connect: Duration::from_secs(5), ..Limits::default() };
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: u64 = pages.split(' ').next().and_then(|pages| pages.parse().ok()).expect("a number");
    let most = libc::rlimit { rlim_cur: pages * 4096 + (64 << 20), rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel reads the limit, which lives through the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const most) }, 0);
    let error =
        mesh(&meeting.listener, &peers, &ours, limits, |_| {}).expect_err("too many threads").to_string();
    assert!(error.starts_with("node 0, lane ") && error.contains("(not dialled): thread: "), "{error}");
}
