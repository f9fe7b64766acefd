//! On a server with systemd, vnuma-guest as its unit has it: what it places of programs that systemd has started, and what is there
//! after each of its ends.
//!
//! | unit | `AllowedCPUs=` | rule | confined by |
//! |---|---|---|---|
//! | `limited` | all CPUs | node 1 | that property, which systemd sets |
//! | `free` | none | node 1 | the affinity of its thread |
//! | `other` | none | none | nothing |

use crate::packages::{property, status};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use vnuma_scenario::{HANG_LIMIT, output, wait_for};

const AGENT: &str = "vnuma-guest.service";
/// The unit as packages have it, and where it expects the program and the rules.
const UNIT: &str = include_str!("../../../guest/agent/systemd/vnuma-guest.service");
const PROGRAM: &str = "/usr/bin/vnuma-guest";
const RULES: &str = "/etc/vnuma/vnuma-guest.toml";
/// Where both are put by who runs this scenario.
const BUILT: &str = "/usr/local/bin/vnuma-guest";
const UNITS: &str = "/run/systemd/system";
/// Where systemd keeps what was set until the next boot.
const SET: &str = "/run/systemd/system.control";
const PROGRAMS: [&str; 3] = ["limited", "free", "other"];

pub fn run() -> Result<()> {
    let cpus = |file: &str| -> Result<String> {
        let path = format!("/sys/devices/system/{file}");
        Ok(fs::read_to_string(&path).context(path)?.trim().to_owned())
    };
    let (all, home) = (cpus("cpu/online")?, cpus("node/node1/cpulist")?);
    install(&all)?;
    let before = [all.as_str(), &all, &all];
    let placed = [home.as_str(), &home, &all];
    expect(&all, before).context("before anything was done")?;

    output("systemctl", &["start", AGENT])?;
    wait_until(&home, placed).context("placed")?;
    println!(
        "placed on node 1: a unit with AllowedCPUs= by that, one without by its affinity, a third one is where it was"
    );
    output("systemctl", &["stop", AGENT])?;
    expect(&all, before).context("after systemctl stop")?;
    nothing_left()?;
    println!("after systemctl stop nothing is left");

    for (killed, restarts) in [("main", "1"), ("all", "2")] {
        // The first round starts it; afterwards systemd has started it anew.
        output("systemctl", &["start", AGENT])?;
        wait_until(&home, placed).context("placed once more")?;
        output("systemctl", &["kill", &format!("--kill-whom={killed}"), "--signal=KILL", AGENT])?;
        // Its unit waits 5 s before it starts the next one, which takes two looks until it places anything.
        wait_until(&all, before).with_context(|| format!("after SIGKILL of {killed}"))?;
        wait_for("systemd to start it anew", HANG_LIMIT, || Ok(property(AGENT, "NRestarts")? == restarts))?;
        println!("after SIGKILL of {killed} everything is undone, and the next one starts");
    }
    wait_until(&home, placed).context("placed by the last one")?;
    output("systemctl", &["stop", AGENT])?;
    expect(&all, before).context("in the end")?;
    nothing_left()
}

fn install(all: &str) -> Result<()> {
    let write = |path: String, text: &str| fs::write(&path, text).context(path);
    fs::copy(BUILT, PROGRAM).context(PROGRAM)?;
    fs::create_dir_all("/etc/vnuma").context("/etc/vnuma")?;
    let rule = |unit: &str| format!("[[workload]]\ncgroup = \"/system.slice/{unit}.service\"\nnode = 1\n");
    let settings = "interval_s = 1\ncpu_reserve_percent = 0\nmemory_reserve_percent = 1\n";
    write(RULES.to_owned(), &format!("{settings}{}{}", rule("limited"), rule("free")))?;
    write(format!("{UNITS}/{AGENT}"), UNIT)?;
    for name in PROGRAMS {
        let limit = if name == "limited" { format!("AllowedCPUs={all}\n") } else { String::new() };
        let unit = format!("[Service]\nType=exec\nExecStart=/usr/bin/sleep 100000\n{limit}");
        write(format!("{UNITS}/{name}.service"), &unit)?;
    }
    output("systemctl", &["daemon-reload"])?;
    for name in PROGRAMS {
        output("systemctl", &["start", &format!("{name}.service")])?;
    }
    Ok(())
}

/// CPUs that each program may use, by its kernel; and the property of the one that has it.
fn expect(limit: &str, cpus: [&str; 3]) -> Result<()> {
    for (name, expected) in PROGRAMS.iter().zip(cpus) {
        let pid = property(&format!("{name}.service"), "MainPID")?;
        let path = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&path).context(path)?;
        let allowed = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(str::trim);
        ensure!(allowed == Some(expected), "{name} may use CPUs {allowed:?}, expected {expected}");
    }
    let found = property("limited.service", "AllowedCPUs")?;
    ensure!(found == limit, "limited: AllowedCPUs={found}, expected {limit}");
    for name in ["free", "other"] {
        let found = property(&format!("{name}.service"), "AllowedCPUs")?;
        ensure!(found.is_empty(), "{name}: AllowedCPUs={found}, expected none");
    }
    Ok(())
}

fn wait_until(limit: &str, cpus: [&str; 3]) -> Result<()> {
    wait_for("the programs' CPUs to change", HANG_LIMIT, || Ok(expect(limit, cpus).is_ok()))
        .with_context(|| format!("{:?}\n{}", expect(limit, cpus).err(), status(AGENT)))
}

/// No file that systemd was made to write, no journal, no process.
fn nothing_left() -> Result<()> {
    for name in PROGRAMS {
        let set = Path::new(SET).join(format!("{name}.service.d"));
        ensure!(!set.exists(), "{} is left", set.display());
    }
    ensure!(!Path::new("/run/vnuma-guest/journal.json").exists(), "the journal is left");
    let pid = property(AGENT, "MainPID")?;
    let tasks = property(AGENT, "TasksCurrent")?;
    ensure!(pid == "0" && tasks.parse() != Ok(1_u64), "processes are left: {}", status(AGENT));
    Ok(())
}
