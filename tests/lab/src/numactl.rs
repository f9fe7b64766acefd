//! numactl's own tests, in a guest whose vCPUs have moved: its programs have the library that stands before libnuma.

use crate::runtimes::{DIRECTORY, in_guest};
use anyhow::{Context, Result, ensure};
use std::{path::Path, time::Duration};
use vnuma_scenario::{Vm, wait_for};

/// As numactl's `make check` has them.
const TESTS: [&str; 9] = [
    "bind_range",
    "checkaffinity",
    "checktopology",
    "distance",
    "move_pages",
    "nodemap",
    "numademo",
    "regress",
    "tbitmap",
];
/// What the tests look for where numactl is built.
const PROGRAMS: [&str; 3] = ["memhog", "numactl", "numastat"];
/// Only a limit for tests that hang.
const TEST_LIMIT: Duration = Duration::from_secs(600);
/// `numademo` measures how fast memory of each node is: in less of it than the test has, as CPUs are emulated.
const DEMO: &str = "sed -i s/10M/256K/ numademo";

/// Runs them, if they were brought. Each status but 0 is a failure, also that of a test that finds that it cannot run.
pub fn tests(vm: &Vm) -> Result<()> {
    let directory = format!("{DIRECTORY}/numactl");
    if !Path::new(&directory).exists() {
        println!("skipped: numactl's tests were not brought (make soak)");
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
    with(DEMO)?;
    for test in TESTS {
        // In the background, as a call in a guest may not take as long as some of them.
        with(&format!(
            "rm -f {test}.status; {{ ./{test} > {test}.log 2>&1; echo $? > {test}.status; }} < /dev/null > /dev/null 2>&1 &"
        ))?;
        let said =
            |file: &str| vm.exec(&["sh", "-c", &format!("cat {directory}/test/{test}.{file} || true")]);
        let log = || format!("numactl's test {test}: {}", said("log").unwrap_or_default());
        wait_for(&format!("numactl's test {test} to end"), TEST_LIMIT, || Ok(!said("status")?.is_empty()))
            .with_context(log)?;
        let status = said("status")?;
        ensure!(status.trim() == "0", "status {}: {}", status.trim(), log());
        println!("numactl's {test}: passed");
    }
    Ok(())
}
