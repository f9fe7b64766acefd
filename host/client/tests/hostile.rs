//! What the client makes of what is not vnumad, or is one that refuses.

use std::{
    io::{Read, Write},
    os::unix::net::UnixListener,
    path::PathBuf,
    thread,
    time::Duration,
};
use vnuma_api::{ApiError, ErrorKind, operation as op};
use vnuma_client::{Error, Method, blocking::Client};

/// Only ends a hang.
const HANG: Duration = Duration::from_secs(60);

/// A socket that answers each connection with these bytes, and then ends it or keeps it open.
fn server(answer: &'static [u8], ends: bool) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("api.sock");
    let listener = UnixListener::bind(&socket).expect("bound");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
            if !ends {
                // A client that waits for ever fails then.
                thread::spawn(move || {
                    thread::sleep(HANG);
                    drop(stream);
                });
            }
        }
    });
    (directory, socket)
}

fn list(answer: &'static [u8]) -> Error {
    let (_directory, socket) = server(answer, true);
    let client = Client::new(socket, HANG).expect("a client");
    client.ask::<op::List>((), &()).expect_err("no list")
}

#[test]
fn a_refusal_has_its_kind_and_message() {
    let answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 44\r\n\r\n{\"error\":\"not-found\",\"message\":\"no such VM\"}";
    let Error::Refused(ApiError { error: ErrorKind::NotFound, message }) = list(answer) else { panic!() };
    assert_eq!(message, "no such VM");
}

#[test]
fn other_answers_are_unexpected() {
    for answer in [
        &b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"[..],
        b"HTTP/1.1 500 Broken\r\nContent-Length: 4\r\n\r\noops",
        b"HTTP/1.1 302 Elsewhere\r\nContent-Length: 0\r\n\r\n",
        // What would be a list, if the status did not say that it is none.
        b"HTTP/1.1 500 Broken\r\nContent-Length: 2\r\n\r\n[]",
        // It ends too soon.
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n[]",
    ] {
        let error = list(answer);
        assert!(matches!(&error, Error::Unexpected { path, .. } if path == "/v1/vms"), "{error}");
    }
    for answer in [&b""[..], b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n"] {
        let error = list(answer);
        assert!(matches!(&error, Error::Broken { path, .. } if path == "/v1/vms"), "{error}");
    }
}

#[test]
fn an_answer_that_does_not_come_is_not_waited_for() {
    let soon = Duration::from_millis(50);
    for answer in [&b""[..], b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n["] {
        let (_directory, socket) = server(answer, false);
        let client = Client::new(&socket, soon).expect("a client");
        let error = client.send(Method::GET, "/v1/vms", "").expect_err("nothing comes");
        assert!(matches!(error, Error::TimedOut { limit, .. } if limit == soon), "{error}");
        let error = client.watch(&[]).and_then(|mut lines| lines.line()).expect_err("nothing comes");
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    }
}

#[test]
fn lines_come_one_by_one_and_whole() {
    let answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
        5\r\n{}\n{}\r\n6\r\n\n[]\n{\"\r\n4\r\na\":0\r\n2\r\n}\n\r\n0\r\n\r\n";
    let (_directory, socket) = server(answer, true);
    let client = Client::new(socket, HANG).expect("a client");
    let mut lines = client.watch(&[]).expect("lines");
    for expected in ["{}\n", "{}\n", "[]\n", "{\"a\":0}\n"] {
        assert_eq!(lines.line().expect("a line"), expected.as_bytes());
    }
    assert!(matches!(lines.line(), Err(Error::WatchEnded)));
}

#[test]
fn nobody_at_the_socket_is_told_from_a_broken_connection() {
    let client = Client::new("/nonexistent/vnumad.sock", HANG).expect("a client");
    let error = client.ask::<op::Daemon>((), &()).expect_err("nobody");
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

/// Others have connected, and are not accepted yet.
#[test]
fn a_client_that_comes_while_as_many_wait_as_can_gets_its_place_later() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("api.sock");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let socket = tokio::net::UnixSocket::new_stream().expect("a socket");
        socket.bind(&path).expect("bound");
        let listener = socket.listen(1).expect("it listens");
        let mut others = Vec::new();
        while let Ok(other) = tokio::net::UnixStream::connect(&path).await {
            others.push(other);
        }
        let client = vnuma_client::Client::new(&path);
        let accept = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            listener.accept().await.expect("one that waited");
        };
        let (connected, ()) = tokio::time::timeout(HANG, async { tokio::join!(client.connect(), accept) })
            .await
            .expect("it does not hang");
        assert!(connected.is_ok() && !others.is_empty());
    });
}
