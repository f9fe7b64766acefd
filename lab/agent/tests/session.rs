//! Client and agent talking over a socket pair, with real programs.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnuma_lab_agent::client::{ClientError, Input, Session};
use vnuma_lab_agent::protocol::{Exec, Frame, Request, STDIN_WINDOW, VERSION};
use vnuma_lab_agent::session::serve;

/// Nothing here takes a second; this only ends a hang.
const HANG: Duration = Duration::from_secs(60);

type Client = Session<BufReader<UnixStream>, UnixStream>;

fn pair() -> (Client, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(HANG)).unwrap();
    let agent = std::thread::spawn(move || drop(serve(&theirs)));
    (Session::open(BufReader::new(ours.try_clone().unwrap()), ours).unwrap(), agent)
}

fn shell(script: &str) -> Exec {
    Exec { argv: ["sh", "-c", script].map(str::to_owned).into(), ..Exec::default() }
}

fn run(client: &mut Client, exec: &Exec, input: Input<'_>) -> (i32, Vec<u8>, Vec<u8>) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = client.exec(exec, input, &mut stdout, &mut stderr).unwrap();
    (status, stdout, stderr)
}

fn file_with(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    file
}

/// All byte values, in no period that fits a buffer.
fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
fn streams_and_status_pass_through() {
    let (mut client, _agent) = pair();
    let (status, stdout, stderr) = run(&mut client, &shell("echo out; echo err >&2; exit 7"), Input::Null);
    assert_eq!((status, &stdout[..], &stderr[..]), (7, &b"out\n"[..], &b"err\n"[..]));
    let (status, ..) = run(&mut client, &shell("kill -TERM $$"), Input::Null);
    assert_eq!(status, 128 + 15);
    let exec = Exec { env: vec![("A".into(), "x y".into())], ..shell("printf %s \"$A\"") };
    assert_eq!(run(&mut client, &exec, Input::Null).1, b"x y");
}

#[test]
fn programs_that_cannot_run_have_the_status_of_shells() {
    let (mut client, _agent) = pair();
    for (program, expected) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
        let exec = Exec { argv: vec![program.into()], ..Exec::default() };
        let (status, _, stderr) = run(&mut client, &exec, Input::Null);
        assert_eq!(status, expected, "{program}");
        assert!(String::from_utf8_lossy(&stderr).contains(program));
    }
    let (status, _, stderr) = run(&mut client, &Exec::default(), Input::Null);
    assert_eq!(status, 126, "{}", String::from_utf8_lossy(&stderr));
}

#[test]
fn input_far_beyond_the_window_comes_back_unchanged() {
    let (mut client, _agent) = pair();
    let content = bytes(5 * STDIN_WINDOW + 17);
    let file = file_with(&content);
    let (status, stdout, _) = run(&mut client, &shell("cat"), Input::From(file.as_fd()));
    assert_eq!(status, 0);
    assert!(stdout == content, "{} bytes came back, sent {}", stdout.len(), content.len());
}

#[test]
fn input_that_nobody_reads_does_not_disturb_the_next_request() {
    let (mut client, _agent) = pair();
    let file = file_with(&bytes(4 * STDIN_WINDOW));
    let (status, ..) = run(&mut client, &shell("exit 3"), Input::From(file.as_fd()));
    assert_eq!(status, 3);
    for _ in 0..3 {
        let (status, stdout, _) = run(&mut client, &shell("cat; echo fine"), Input::Null);
        assert_eq!((status, &stdout[..]), (0, &b"fine\n"[..]));
    }
}

#[test]
fn a_program_left_in_the_background_does_not_hold_the_request() {
    let (mut client, _agent) = pair();
    let started = Instant::now();
    let (status, stdout, _) = run(&mut client, &shell("sleep 1000 & echo $!"), Input::Null);
    assert_eq!(status, 0);
    assert!(started.elapsed() < HANG);
    let pid: i32 = String::from_utf8(stdout).unwrap().trim().parse().unwrap();
    assert!(fs::exists(format!("/proc/{pid}")).unwrap(), "it was ended");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[test]
fn a_client_that_goes_away_ends_its_program() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let agent = std::thread::spawn(move || drop(serve(&theirs)));
    let mut reader = BufReader::new(ours.try_clone().unwrap());
    assert_eq!(Frame::read(&mut reader).unwrap(), Some(Frame::Hello(VERSION)));
    // Not even a program that ignores the hang-up, nor what it started, survives.
    let exec = shell("trap '' HUP; sleep 1000 & echo $$ $!; wait");
    Frame::Request(Request::Exec(exec)).write(&mut &ours).unwrap();
    let Some(Frame::Stdout(line)) = Frame::read(&mut reader).unwrap() else { panic!("no output") };
    let pids: Vec<String> = String::from_utf8(line).unwrap().split_whitespace().map(str::to_owned).collect();
    assert_eq!(pids.len(), 2);
    drop((reader, ours));
    agent.join().unwrap();
    let started = Instant::now();
    let running = |pid: &String| {
        // A zombie has ended; orphans are not reaped where the test runs.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    while pids.iter().any(running) {
        assert!(started.elapsed() < HANG, "{pids:?} still run");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn files_go_both_ways_with_their_mode() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/folder/file");
    let name = path.to_str().unwrap();
    let (mut client, _agent) = pair();
    let content = bytes(3 * STDIN_WINDOW + 1);
    client.put(name, 0o751, file_with(&content).as_fd()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), content);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o751);
    // A second one replaces it.
    client.put(name, 0o600, file_with(b"short").as_fd()).unwrap();
    let mut back = Vec::new();
    client.get(name, &mut back).unwrap();
    assert_eq!(back, b"short");
    let entries: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
    assert_eq!(entries.len(), 1, "something is left beside the file");
}

#[test]
fn a_refused_transfer_names_the_file_and_the_session_goes_on() {
    let (mut client, _agent) = pair();
    let error = client.get("/no/such/file", &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, ClientError::Refused(text) if text.contains("/no/such/file")), "{error}");
    let error = client.put("relative", 0o644, file_with(b"").as_fd()).unwrap_err().to_string();
    assert_eq!(error, "relative: the path must be absolute");
    // More than the window, so that the refusal comes while the client still sends.
    let error = client.put("/proc/nothing/here", 0o644, file_with(&bytes(4 * STDIN_WINDOW)).as_fd());
    assert!(matches!(error, Err(ClientError::Refused(_))), "{error:?}");
    assert_eq!(run(&mut client, &shell("exit 9"), Input::Null).0, 9);
}

#[test]
fn a_cut_transfer_leaves_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, "old").unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let agent = std::thread::spawn(move || drop(serve(&theirs)));
    let request = Request::Put { path: path.to_str().unwrap().into(), mode: 0o644 };
    Frame::Request(request).write(&mut &ours).unwrap();
    Frame::Stdin(b"half of".to_vec()).write(&mut &ours).unwrap();
    drop(ours);
    agent.join().unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_program_on_a_terminal_sees_its_size() {
    let (mut client, _agent) = pair();
    let exec = Exec { terminal: Some((33, 99)), ..shell("tty >/dev/null && stty size; exit 4") };
    let (status, stdout, stderr) = run(&mut client, &exec, Input::Null);
    assert_eq!((status, String::from_utf8_lossy(&stdout).trim()), (4, "33 99"));
    assert!(stderr.is_empty());
}

#[test]
fn bad_peers_are_refused() {
    // An agent of another version.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    Frame::Hello(VERSION + 1).write(&mut theirs).unwrap();
    let error = Session::open(ours.try_clone().unwrap(), ours).unwrap_err();
    assert!(matches!(error, ClientError::Version { found } if found == VERSION + 1), "{error}");
    // A client that speaks out of turn: the agent ends the connection.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let agent = std::thread::spawn(move || serve(&theirs).map_err(|error| error.to_string()));
    Frame::Exit(0).write(&mut ours).unwrap();
    assert!(agent.join().unwrap().unwrap_err().contains("unexpected frame"));
    let mut rest = Vec::new();
    ours.read_to_end(&mut rest).unwrap();
    assert!(!rest.is_empty(), "the greeting is missing");
}
