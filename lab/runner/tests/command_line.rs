//! `cargo xtask lab` as a user calls it.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--quiet", "--package", "xtask", "--", "lab"]).args(arguments).stdin(Stdio::null());
    command
}

#[test]
fn streams_files_and_status_pass_through_without_noise() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    fs::write(&source, "content\n").unwrap();
    let script = "cat; tr a-z A-Z < /root/in > /root/out; echo error >&2; exit 42";
    let put = format!("{}:/root/in", source.display());
    let get = format!("/root/out:{}", target.display());
    let mut command =
        lab(&["run", "--profile", "2n4c", "--put", &put, "--get", &get, "--", "sh", "-c", script]);
    let output = command.stdin(fs::File::open(&source).unwrap()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("content\n".into(), "error\n".into()));
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(fs::read_to_string(&target).unwrap(), "CONTENT\n");
}

#[test]
fn an_interrupt_leaves_neither_server_nor_files() {
    // A directory of its own, so that other runs do not count.
    let temporary = tempfile::tempdir().unwrap();
    let mut command = lab(&["run", "--profile", "2n4c", "--", "sh", "-c", "echo up; sleep 1000"]);
    command.env("TMPDIR", temporary.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut first = [0; 3];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    let directories = || fs::read_dir(temporary.path()).unwrap().count();
    assert_eq!(directories(), 1);
    // cargo becomes the program that it runs, so this is xtask.
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 2));
    assert_eq!(directories(), 0);
    let started = Instant::now();
    let runs = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
        let path = temporary.path().to_str().unwrap().to_owned();
        lines.filter(|line| String::from_utf8_lossy(line).contains(&path)).count()
    };
    while runs() > 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "QEMU still runs");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn wrong_arguments_boot_nothing() {
    let cases: [(&[&str], &str); 4] = [
        (&["run", "--put", "nocolon", "--", "true"], "expected SRC:DST"),
        (&["run", "--timeout", "0", "--", "true"], "0 is not in"),
        (&["run", "--profile", "9n9c", "--", "true"], "there are: 2n4c, "),
        (&["run"], "COMMAND"),
    ];
    for (arguments, expected) in cases {
        let output = lab(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}
