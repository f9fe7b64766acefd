//! numactl's own tests, in a guest whose vCPUs have moved: its programs have the library that stands before libnuma.

use crate::runtimes::{DIRECTORY, in_guest};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use vnuma_scenario::Vm;

/// As numactl's `make check` has them, but for two: `numademo` takes longer than a call in a guest may here, and `regress` has not been
/// tried.
const TESTS: [&str; 7] =
    ["bind_range", "checkaffinity", "checktopology", "distance", "move_pages", "nodemap", "tbitmap"];
/// What the tests look for where numactl is built.
const PROGRAMS: [&str; 1] = ["numactl"];

/// Runs them, if they were brought. Each status but 0 is a failure, also that of a test that finds that it cannot run.
pub fn tests(vm: &Vm) -> Result<()> {
    let directory = format!("{DIRECTORY}/numactl");
    if !Path::new(&directory).exists() {
        println!("numactl's tests: skipped, they were not brought (make soak)");
        return Ok(());
    }
    for program in PROGRAMS {
        vm.exec(&["ln", "-sf", &format!("/usr/bin/{program}"), &directory])?;
    }
    let run = in_guest("vnuma-run");
    let with = |command: &str| {
        let command = format!("cd {directory}/test && export srcdir=.. builddir=.. && {command}");
        vm.exec(&[&run, "--libraries", DIRECTORY, "bash", "-c", &command])
    };
    for program in ["../numactl", "./distance"] {
        let libraries = with(&format!("LD_TRACE_LOADED_OBJECTS=1 {program}"))?;
        let overlay = format!("{DIRECTORY}/numa/libnuma.so.1");
        ensure!(libraries.contains(&overlay), "{program} does not have {overlay}:\n{libraries}");
    }
    for test in TESTS {
        with(&format!("./{test} > {test}.log 2>&1 || {{ echo status $?; cat {test}.log; exit 1; }}"))
            .with_context(|| format!("numactl's test {test}"))?;
        println!("numactl's {test}: passed");
    }
    Ok(())
}
