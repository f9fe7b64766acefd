//! What the lab tests share.

use std::time::Duration;

use vnuma_lab_runner::{Exec, Input, Lab};

/// No command here takes more than some seconds; this only ends a hang on a loaded machine.
pub const HANG: Duration = Duration::from_secs(300);

/// What a command gave.
#[derive(Debug)]
pub struct Ran {
    /// Its exit status.
    pub status: i32,
    /// Its output.
    pub stdout: String,
    /// Its error output.
    pub stderr: String,
}

/// Runs a shell line on the server.
pub fn sh(lab: &Lab, script: &str) -> Ran {
    let exec = Exec { argv: ["sh", "-c", script].map(str::to_owned).into(), ..Exec::default() };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = lab.exec(&exec, Input::Null, &mut stdout, &mut stderr, HANG).unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Ran { status, stdout: text(&stdout), stderr: text(&stderr) }
}

/// Runs a shell line on the server that must succeed; its output.
pub fn good(lab: &Lab, script: &str) -> String {
    let ran = sh(lab, script);
    assert_eq!(ran.status, 0, "{script}: {ran:?}");
    ran.stdout
}
