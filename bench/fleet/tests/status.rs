//! What a benchmark ends with when it measures nothing.

use std::process::Command;

#[test]
fn wrong_arguments_end_with_1_and_help_with_0() {
    let status = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_bench-fleet")).args(arguments).output().expect("started");
        output.status.code()
    };
    assert_eq!(status(&["--nonsense"]), Some(1));
    assert_eq!(status(&["--starts", "0"]), Some(1));
    assert_eq!(status(&["--help"]), Some(0));
}
