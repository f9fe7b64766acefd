//! The part of the BPF program that several CPUs run at once for one control group, by threads of this machine.

use std::{path::Path, process::Command};

/// Long enough that the threads run side by side for a while. Weights that are lost are lost in one of some twenty times then.
const TIMES: &str = "30000000";

#[test]
fn nothing_is_lost_while_threads_come_and_go() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("members");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(folder.join("tests/members.c"))
        .status();
    assert!(built.unwrap_or_else(|error| panic!("{compiler}: {error}")).success());
    let output = Command::new(&program).arg(TIMES).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.trim(), "0 wrong, users 0 and 0, weights 0 and 0, lost 0 ns");
}
