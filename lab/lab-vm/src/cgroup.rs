//! The control group of each VM, `machine.slice/NAME.scope`, as systemd and libvirt lay them out. The groups keep VMs
//! away from CPU 0.
//!
//! QEMU's TCG keeps in one word of each emulated CPU whether it is inside a VM, whether nested paging is on and whether
//! interrupts are held (`CPUX86State.hflags2`). That CPU changes it when it enters and leaves a VM, without a lock, as it is its
//! own. But whenever *any* emulated CPU loads FPU state, which every context switch does, `cpu_clear_ignne()`
//! (target/i386/tcg/system/fpu_helper.c, seen in 10.0.13) changes the word of CPU 0, by
//! load, change and store. A change of CPU 0's own in between is lost: the VM then runs without nested paging,
//! over the server's memory, or the server with it. Triple faults, hangs and a server that dies silently were all this.
//! On the other CPUs it cannot happen, and on CPU 0 only with a VM.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::place::is_lab_server;

/// Mounted by the server's init, which has made the slices.
const SLICE: &str = "/sys/fs/cgroup/machine.slice";
/// Controllers of the groups of VMs.
const CONTROLLERS: &str = "+cpuset +cpu +io +memory +pids";
/// There if systemd is process 1.
const SYSTEMD: &str = "/run/systemd/system";
/// How long the kernel may take to empty the group of a process that has ended.
const LIMIT: Duration = Duration::from_secs(10);

fn scope(name: &str) -> PathBuf {
    Path::new(SLICE).join(format!("{name}.scope"))
}

/// Makes the group of a VM. The command runs what is appended to it in that group, on the lab's server on every CPU but 0:
/// the kernel leaves CPU 0 out of whatever affinity a thread of the group is given. Elsewhere the group is a scope of
/// systemd that changes nothing, and without systemd there is none.
pub fn enter(name: &str) -> Result<Command> {
    let path = "/sys/devices/system/cpu/possible";
    let possible = fs::read_to_string(path).context(path)?;
    let cpus = without_cpu_0(possible.trim()).filter(|_| is_lab_server());
    if Path::new(SYSTEMD).exists() {
        let mut command = Command::new("systemd-run");
        command.args(["--scope", "--quiet", "--collect", "--slice=machine.slice"]);
        command.arg(format!("--unit={name}.scope"));
        if let Some(cpus) = cpus {
            command.arg(format!("--property=AllowedCPUs={cpus}"));
        }
        command.arg("--");
        return Ok(command);
    }
    if !is_lab_server() {
        return Ok(Command::new("env"));
    }
    let write = |path: &Path, text: &str| {
        fs::write(path, text).with_context(|| format!("{}: writing {text:?}", path.display()))
    };
    let slice = Path::new(SLICE);
    if let Some(cpus) = cpus {
        write(&slice.join("cpuset.cpus"), &cpus)?;
    }
    write(&slice.join("cgroup.subtree_control"), CONTROLLERS)?;
    let scope = scope(name);
    fs::create_dir_all(&scope).with_context(|| scope.display().to_string())?;
    let mut command = Command::new("sh");
    // The shell, and what it becomes, is in the group before it makes a thread.
    command.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(scope.join("cgroup.procs"));
    Ok(command)
}

/// Removes the group of a VM that has ended. systemd does that by itself.
pub fn remove(name: &str) -> Result<()> {
    let scope = scope(name);
    let started = Instant::now();
    while is_lab_server() && !Path::new(SYSTEMD).exists() {
        match fs::remove_dir(&scope) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                ensure!(started.elapsed() < LIMIT, "{}: processes stay in it", scope.display());
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| scope.display().to_string());
            }
            _ => break,
        }
    }
    Ok(())
}

/// The list of CPUs, which begins with 0, without it; none if there is no other.
fn without_cpu_0(possible: &str) -> Option<String> {
    let last: usize = possible.strip_prefix("0-")?.parse().ok()?;
    Some(if last == 1 { "1".to_owned() } else { format!("1-{last}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_cpu_0_are_left() {
        assert_eq!(without_cpu_0("0-7").as_deref(), Some("1-7"));
        assert_eq!(without_cpu_0("0-1").as_deref(), Some("1"));
        assert_eq!(without_cpu_0("0"), None);
    }
}
