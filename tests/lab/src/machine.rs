//! `make demo --here` on the lab server, which is a machine with KVM and several nodes, and has a vnumad already. It runs
//! to its end once and is interrupted once; nothing of it may stay, and that vnumad may see nothing of it.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use vnuma_scenario::{HANG_LIMIT, Lines, Process, output, vnumactl, vnumad, wait_for};

/// The programs are put there.
const FILES: &str = "/root/here";
const RUN: [&str; 2] = ["/run/vnuma-demo", "/sys/kernel/tracing/instances/vnuma-demo"];
const SECONDS: &str = "10";

pub fn run() -> Result<()> {
    // As in the folder that `make demo` makes; the server's own image is what the guests need.
    for (target, name) in [("/run/lab/kernels", "kernels"), ("/dev/vda", "root.erofs"), ("/", "tree")] {
        symlink(target, Path::new(FILES).join(name)).context(name)?;
    }
    let mut other = vnumad(&[])?;
    to_the_end()?;
    interrupted()?;
    ensure!(other.0.try_wait()?.is_none(), "the other vnumad has ended");
    let vms = vnumactl(&["list"])?;
    ensure!(vms == json!([]), "the other vnumad has seen VMs: {vms}");
    Ok(())
}

fn arguments() -> Vec<String> {
    let program = format!("{FILES}/bin/xtask");
    let words = ["demo", "--here", "--files", FILES, "--seconds", SECONDS, "--period-ms", "2000"];
    std::iter::once(program.as_str()).chain(words).map(str::to_owned).collect()
}

fn to_the_end() -> Result<()> {
    let words = arguments();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let text = output(words[0], &words[1..])?;
    println!("{text}");
    let named = |title: &str| -> Result<PathBuf> {
        let path = text.lines().find_map(|line| line.strip_prefix(title));
        Ok(PathBuf::from(path.with_context(|| format!("no line {title:?}:\n{text}"))?.trim()))
    };
    let report: Value = serde_json::from_str(&fs::read_to_string(named("report:")?)?)?;
    ensure!(report["source"] == "measured on this machine", "{report}");
    ensure!(report["changes"].as_u64().is_some_and(|changes| changes > 0), "no changes: {report}");
    ensure!(fs::read_to_string(named("picture:")?)?.contains("<svg"), "no picture");
    ensure!(named("vnumad's log:")?.exists(), "no log");
    nothing_stays()
}

fn interrupted() -> Result<()> {
    let words = arguments();
    let mut demo = Command::new(&words[0]).args(&words[1..]).stdout(Stdio::piped()).spawn().map(Process)?;
    let mut lines = Lines::of_process(&mut demo, "the demonstration")?;
    await_line(&mut lines, "moving vCPUs")?;
    let second = output(&words[0], &words[1..].iter().map(String::as_str).collect::<Vec<_>>());
    let refused = second.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("another demonstration runs"), "a second one was not refused: {refused:?}");
    ensure!(!processes("/run/vnuma-demo")?.is_empty(), "nothing runs that could be ended");
    kill(Pid::from_raw(i32::try_from(demo.0.id())?), Signal::SIGINT)?;
    await_line(&mut lines, "interrupted")?;
    let status = demo.ended(lines.who())?;
    ensure!(status.code() == Some(130), "interrupted by SIGINT: {status}");
    nothing_stays()
}

fn await_line(lines: &mut Lines<ChildStdout>, part: &str) -> Result<()> {
    loop {
        let line = lines.next(part)?;
        println!("{line}");
        if line.contains(part) {
            return Ok(());
        }
    }
}

/// Processes whose command line has a word, by number.
fn processes(word: &str) -> Result<Vec<u32>> {
    let numbers =
        fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has_word = |process: &u32| {
        let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(word)
    };
    Ok(numbers.filter(has_word).collect())
}

fn nothing_stays() -> Result<()> {
    for path in RUN {
        ensure!(!Path::new(path).exists(), "{path} is still there");
    }
    let scopes = fs::read_dir("/sys/fs/cgroup/machine.slice")?.flatten();
    let scopes: Vec<_> =
        scopes.filter(|entry| entry.file_name().to_string_lossy().contains("vnuma")).collect();
    ensure!(scopes.is_empty(), "control groups are still there: {scopes:?}");
    for word in ["/run/vnuma-demo", "vnuma-demo\0move"] {
        wait_for(
            "the processes of the demonstration to end",
            HANG_LIMIT,
            || Ok(processes(word)?.is_empty()),
        )?;
    }
    Ok(())
}
