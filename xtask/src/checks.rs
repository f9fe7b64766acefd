//! `make test`: format, lints, unit and property tests, lab tests. `make soak`: the long runs.

use crate::setup;
use crate::steps::{Steps, cargo_test, run, run_quiet, workspace};
use anyhow::{Context, Result, bail};
use std::process::Command;

/// Each test in `tests/` boots the lab for itself; two at once keep both cores busy.
const LAB_TEST_ARGUMENTS: &[&str] = &["--package", "vnuma-lab-tests", "--features", "lab", "--no-fail-fast"];
/// What is measured here is counts, but a server that another one slows down takes longer for them.
const COUNTER_TEST_ARGUMENTS: &[&str] =
    &["--package", "lab-count", "--features", "lab", "--test", "exact", "--", "--test-threads", "1"];

/// Everything that must hold before a change lands.
pub fn test() -> Result<()> {
    setup::packages()?;
    let mut steps = Steps::default();
    steps.step("format", |_| run(Command::new("cargo").args(["fmt", "--all", "--check"])));
    steps.step("clippy", |_| {
        let arguments = ["clippy", "--quiet", "--workspace", "--all-targets", "--all-features", "--locked"];
        run(Command::new("cargo").args(arguments).args(["--", "-D", "warnings"]))
    });
    steps.step("licences, bans and sources of the dependencies", |_| {
        let arguments = ["check", "licenses", "bans", "sources"];
        run(Command::new(setup::cargo_deny()?).arg("--log-level").arg("error").args(arguments))
    });
    steps.step("checkpatch", |_| checkpatch());
    steps.step("unit and property tests", |counts| {
        cargo_test(&["--quiet", "--workspace", "--locked", "--no-fail-fast"], counts)
    });
    steps.step("lab tests", |counts| cargo_test(LAB_TEST_ARGUMENTS, counts));
    steps.step("exactness of the lab's counters", |counts| cargo_test(COUNTER_TEST_ARGUMENTS, counts));
    steps.finish()
}

/// Kernel style for every C file that the kernel or a BPF loader sees.
fn checkpatch() -> Result<()> {
    let program = setup::checkpatch()?;
    let listed = Command::new("git")
        .args(["ls-files", "--", "*.c", "*.h"])
        .current_dir(workspace())
        .output()
        .context("git ls-files")?;
    let files: Vec<_> = String::from_utf8(listed.stdout)?.lines().map(str::to_owned).collect();
    if files.is_empty() {
        bail!("git lists no C file");
    }
    // Typedefs, file paths and the like concern patches to the kernel tree itself.
    let ignored =
        ["FILE_PATH_CHANGES", "SPDX_LICENSE_TAG", "LINUX_VERSION_CODE", "CONSTANT_COMPARISON"].join(",");
    run_quiet(
        Command::new("perl")
            .arg(program)
            .args(["--no-tree", "--strict", "--terse", "--quiet", "--max-line-length=100"])
            .args(["--ignore", &ignored, "--file"])
            .args(&files)
            .current_dir(workspace()),
    )
}
