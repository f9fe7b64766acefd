//! What is known of VMs, from their directories (`vm.rs` has what is in them).

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use vnuma_lab_agent::client::ClientError;
use vnuma_lab_agent::emulator::ended_guest;
use vnuma_lab_qmp::Qmp;

use crate::place::vms;
use crate::plan::check_name;

/// How long QEMU's end may come after that of a connection to the guest.
const DEATH_LIMIT: Duration = Duration::from_secs(3);
/// Lines of the console that an error shows.
const TAIL_LINES: usize = 60;

/// The directory of a VM.
pub fn directory(name: &str) -> PathBuf {
    vms().join(name)
}

/// The context id of a VM that runs.
pub fn running_cid(name: &str) -> Result<u32> {
    existing(name)?;
    ensure!(alive(name), "VM \"{name}\" has died; the end of its console:\n{}", tail(name));
    read_number(name, "cid")
}

/// Explains why a session with a VM broke.
pub fn explain(name: &str, error: ClientError) -> anyhow::Error {
    let mine = matches!(error, ClientError::Local { .. } | ClientError::Refused(_));
    let started = Instant::now();
    // The connection breaks a moment before QEMU's end can be seen.
    while !mine && started.elapsed() < DEATH_LIMIT {
        if !alive(name) {
            return anyhow!("VM \"{name}\" has died; the end of its console:\n{}", tail(name));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    // The whole chain is in the text of the error.
    anyhow!("VM \"{name}\": {error}")
}

/// Why KVM does not run a VM any more, if so. Its QEMU and its connections live on, and nothing in it moves until it is
/// stopped.
pub fn kvm_internal_error(name: &str) -> Option<String> {
    let said = fs::read(directory(name).join("qemu.log")).unwrap_or_default();
    let error = internal_error(&String::from_utf8_lossy(&said))?;
    Some(format!("VM \"{name}\": KVM cannot run it any more; stop it: {error}"))
}

/// QEMU's messages for that (`kvm_handle_internal_error` and `kvm_cpu_exec` of accel/kvm/kvm-all.c, `kvm_arch_handle_exit` of
/// target/i386/kvm/kvm.c); registers follow.
const GIVEN_UP: [&str; 3] = ["KVM internal error", "error: kvm run failed", "KVM: entry failed"];

fn internal_error(log: &str) -> Option<String> {
    let start = GIVEN_UP.iter().filter_map(|message| log.find(message)).min()?;
    let lines: Vec<&str> = log[start..].lines().take(4).map(str::trim).collect();
    Some(lines.join("; "))
}

/// How a kernel says that one of its CPUs stands still (`print_other_cpu_stall` of kernel/rcu/tree_stall.h): after 21 s, and then each
/// 63 s. A machine that is busy makes one or two of them.
const STALL: &str = "detected stalls on CPUs/tasks";
const STALLS: usize = 3;

/// Whether a vCPU of the guest stands still for good.
pub fn stands_still(name: &str) -> bool {
    let console = fs::read(directory(name).join("console.log")).unwrap_or_default();
    shows_stalls(&String::from_utf8_lossy(&console))
}

fn shows_stalls(console: &str) -> bool {
    console.matches(STALL).count() >= STALLS
}

/// Explains why there is no connection to a VM. The kernel refuses one at once while the VM does not run.
pub fn explain_connect(name: &str, error: anyhow::Error) -> anyhow::Error {
    if let Some(error) = kvm_internal_error(name) {
        return anyhow!(error);
    }
    let status = Qmp::connect(&directory(name).join("ctl.sock")).and_then(|mut qmp| qmp.run("query-status"));
    let status = status.map_or_else(|error| format!("{error:#}"), |status| status["status"].to_string());
    error.context(format!(
        "agent of VM \"{name}\"; QEMU calls the VM {status}; the end of its console:\n{}",
        tail(name)
    ))
}

/// An error that names the VMs that there are, if there is none of that name.
pub fn existing(name: &str) -> Result<()> {
    check_name(name)?;
    ensure!(
        directory(name).is_dir(),
        "VM \"{name}\": there is none of that name; there are: {}",
        all()?.join(", ")
    );
    Ok(())
}

/// Names of all VMs.
pub fn all() -> Result<Vec<String>> {
    let vms = vms();
    if !vms.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(&vms).with_context(|| vms.display().to_string())?.flatten();
    let mut found: Vec<String> = entries
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| check_name(name).is_ok())
        .collect();
    found.sort();
    Ok(found)
}

/// A number that a file of the VM holds.
pub fn read_number<T: std::str::FromStr>(name: &str, file: &str) -> Result<T> {
    let path = directory(name).join(file);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    text.trim().parse().map_err(|_| anyhow!("{}: \"{}\" is no number", path.display(), text.trim()))
}

/// The process of a VM's QEMU, as far as it has come to writing it down.
pub fn pid(name: &str) -> Option<i32> {
    read_number(name, "pid").ok().filter(|&pid| pid > 1)
}

/// Whether the VM's QEMU lives: the number in the file could belong to another process by now.
pub fn alive(name: &str) -> bool {
    let Some(pid) = pid(name) else { return false };
    let socket = directory(name).join("ctl.sock");
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command).contains(&socket.display().to_string())
}

/// Whether what the VM's console shows, and what its QEMU said, is a fault of the emulated processor.
pub fn emulator_ended(name: &str) -> bool {
    ["console.log", "qemu.log"].iter().any(|file| {
        let said = fs::read(directory(name).join(file)).unwrap_or_default();
        ended_guest(&String::from_utf8_lossy(&said))
    })
}

/// The end of a VM's console, and of what its QEMU said.
pub fn tail(name: &str) -> String {
    let end = |file: &str| {
        let bytes = fs::read(directory(name).join(file)).unwrap_or_default();
        end_of(&String::from_utf8_lossy(&bytes))
    };
    let console = end("console.log").unwrap_or_else(|| "  (the console is empty)".into());
    end("qemu.log").map_or_else(|| console.clone(), |said| format!("{console}\nQEMU said:\n{said}"))
}

/// `None`: there is nothing.
fn end_of(text: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().collect();
    let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    let shown = tail.iter().map(|line| format!("  {}", line.trim_end_matches('\r'))).collect::<Vec<_>>();
    (!shown.is_empty()).then(|| shown.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_is_shown() {
        assert_eq!(end_of(""), None);
        assert_eq!(end_of("a\r\nb").as_deref(), Some("  a\n  b"));
        let long: String = (0..100).map(|line| format!("{line}\n")).collect();
        let shown = end_of(&long).unwrap();
        assert!(shown.starts_with("  40\n") && shown.ends_with("  99"), "{shown}");
    }

    #[test]
    fn a_vcpu_that_stands_still_is_told_from_one_that_is_slow() {
        let report =
            |seconds: u32| format!("[  {seconds}.3] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n");
        let console = |reports: &[u32]| reports.iter().map(|seconds| report(*seconds)).collect::<String>();
        assert!(!shows_stalls(&console(&[339, 402])));
        assert!(shows_stalls(&console(&[339, 402, 465])));
    }

    #[test]
    fn a_kvm_internal_error_is_found_in_the_log() {
        assert_eq!(internal_error("qemu-system-x86_64: warning: nothing\n"), None);
        let log = "warning\nKVM internal error. Suberror: 1\nemulation failure\nRAX=0 RBX=1\n";
        let error = internal_error(log).unwrap();
        assert_eq!(error, "KVM internal error. Suberror: 1; emulation failure; RAX=0 RBX=1");
        let error = internal_error("error: kvm run failed Bad address\nRAX=0\n").unwrap();
        assert_eq!(error, "error: kvm run failed Bad address; RAX=0");
        let error = internal_error("KVM: entry failed, hardware error 0x5\nRAX=0\n").unwrap();
        assert_eq!(error, "KVM: entry failed, hardware error 0x5; RAX=0");
    }
}
