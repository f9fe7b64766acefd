//! The units of the Debian package: systemd knows their keys, they are started again for as long as that fails, and their limits fit the
//! VMs that their comments name.

use std::{fs, process::Command};

const VNUMAD: &str = include_str!("../../../packaging/debian/vnuma-host.vnumad.service");
const SCHEDULER: &str = include_str!("../../../packaging/debian/vnuma-host.scx_vnuma.service");
/// Keys that a systemd before 254 does not know.
const NEW: [&str; 2] = ["RestartSteps", "RestartMaxDelaySec"];

/// The number of a key, and its unit of measure.
fn number(unit: &str, key: &str) -> u64 {
    let value = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let value = value.unwrap_or_else(|| panic!("no {key}"));
    let (digits, scale) = match value.as_bytes().last() {
        Some(b'G') => (&value[..value.len() - 1], 1 << 30),
        Some(b'M') => (&value[..value.len() - 1], 1 << 20),
        _ => (value, 1),
    };
    digits.parse::<u64>().unwrap_or_else(|error| panic!("{key}={value}: {error}")) * scale
}

#[test]
fn the_limits_of_vnumad_have_room_for_twice_what_8000_vms_need() {
    let (vms, vcpus) = (8000, 16);
    // As docs/results/daemon.md has it of 1000 VMs.
    let memory = vms * 165_000 + 20_000_000;
    assert!(number(VNUMAD, "MemoryHigh") > memory && number(VNUMAD, "MemoryMax") > 2 * memory);
    assert!(number(VNUMAD, "MemoryHigh") < number(VNUMAD, "MemoryMax"));
    assert!(number(VNUMAD, "TasksMax") > 4 * vms + 512 + 256 + 20);
    assert!(number(VNUMAD, "LimitNOFILE") > 2 * vms * (20 + 2 * vcpus));
}

#[test]
fn both_are_started_again_for_as_long_as_that_fails_and_less_often_with_time() {
    for unit in [VNUMAD, SCHEDULER] {
        assert_eq!(number(unit, "StartLimitIntervalSec"), 0);
        assert!(unit.contains("\nRestart=on-failure\n") && unit.contains("\nOOMScoreAdjust=-500\n"));
        assert!(
            number(unit, "RestartSec") < number(unit, "RestartMaxDelaySec")
                && number(unit, "RestartSteps") > 1
        );
        assert!(number(unit, "MemoryMax") > 0 && number(unit, "TasksMax") > 0);
    }
}

#[test]
fn systemd_understands_both() {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, unit) in [("vnumad", VNUMAD), ("scx_vnuma", SCHEDULER)] {
        // Neither the program nor its manual need be installed.
        let lines = unit.lines().filter(|line| !line.starts_with("Documentation="));
        let command = format!("ExecStart=/usr/sbin/{name}");
        let lines = lines.map(|line| if line == command { "ExecStart=/bin/true" } else { line });
        let path = directory.path().join(format!("{name}.service"));
        fs::write(&path, lines.collect::<Vec<_>>().join("\n")).expect("written");
        let Ok(verified) = Command::new("systemd-analyze").arg("verify").arg(&path).output() else {
            eprintln!("skipped: there is no systemd-analyze");
            return;
        };
        let said = String::from_utf8_lossy(&verified.stderr).into_owned();
        let about = |line: &&str| line.contains(&format!("{name}.service"));
        let known = |line: &&str| !NEW.iter().any(|key| line.contains(key));
        let wrong: Vec<&str> = said.lines().filter(about).filter(known).collect();
        assert!(verified.status.success() && wrong.is_empty(), "{said}");
    }
}
