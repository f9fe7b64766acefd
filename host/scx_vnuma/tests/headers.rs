//! Headers of the BPF program that need nothing of the kernel, run on this machine by programs in C.

use std::{path::Path, process::Command};

/// Long enough that the threads run side by side for a while. Weights that are lost are lost in one of some twenty times then.
const TIMES: &str = "30000000";

/// Builds a program of this folder, and returns what it prints.
fn run(name: &str, arguments: &[&str]) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(folder.join("tests").join(format!("{name}.c")))
        .status();
    assert!(built.unwrap_or_else(|error| panic!("{compiler}: {error}")).success());
    let output = Command::new(&program).args(arguments).output().expect("it starts");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn nothing_is_lost_while_threads_come_and_go() {
    assert_eq!(run("members", &[TIMES]), "0 wrong, users 0 and 0, weights 0 and 0, lost 0 ns");
}

#[test]
fn virtual_time_is_the_same_before_and_after_it_wraps() {
    assert_eq!(run("order", &[]), "");
}
