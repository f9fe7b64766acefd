//! VMs stay away from CPU 0.
//!
//! QEMU's TCG keeps in one word of each emulated CPU whether it is inside a VM, whether nested paging is on and whether
//! interrupts are held (`CPUX86State.hflags2`). That CPU changes it when it enters and leaves a VM, without a lock, as it is its
//! own. But whenever *any* emulated CPU loads FPU state, which every context switch does, `cpu_clear_ignne()`
//! (target/i386/tcg/system/fpu_helper.c, seen in 10.0.13) changes the word of CPU 0, by
//! load, change and store. A change of CPU 0's own in between is lost: the VM then runs without nested paging,
//! over the server's memory, or the server with it. Triple faults, hangs and a server that dies silently were all this.
//! On the other CPUs it cannot happen, and on CPU 0 only with a VM.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// Made by the server's init.
const CGROUPS: &str = "/sys/fs/cgroup";
const GROUP: &str = "/sys/fs/cgroup/vms";

/// Moves this process, and with it the QEMU that it starts, into the group that may use every CPU but 0. The group is
/// made if it is not there yet. The kernel leaves CPU 0 out of whatever affinity a thread in it is given.
pub fn avoid_cpu_0() -> Result<()> {
    let write = |path: &Path, text: &str| {
        fs::write(path, text).with_context(|| format!("{}: writing {text:?}", path.display()))
    };
    let present = fs::read_to_string("/sys/devices/system/cpu/present").context("CPUs of the server")?;
    let Some(others) = without_cpu_0(present.trim()) else { return Ok(()) };
    write(&Path::new(CGROUPS).join("cgroup.subtree_control"), "+cpuset")?;
    fs::create_dir_all(GROUP).context(GROUP)?;
    write(&Path::new(GROUP).join("cpuset.cpus"), &others)?;
    write(&Path::new(GROUP).join("cgroup.procs"), &std::process::id().to_string())
}

/// The list of CPUs, which begins with 0, without it; none if there is no other.
fn without_cpu_0(present: &str) -> Option<String> {
    let last: usize = present.strip_prefix("0-")?.parse().ok()?;
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
