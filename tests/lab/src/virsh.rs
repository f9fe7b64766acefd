//! libvirt on the lab's server: Debian's own, with QEMUs that have the rights and the files that they have in the lab.

use anyhow::{Context, Result};
use std::fs;
use std::process::Command;
use vnuma_scenario::{HANG_LIMIT, Process, output, wait_for};

pub(crate) const CONFIGURATION: &str = "user = \"root\"\ngroup = \"root\"\nnamespaces = []\n";

/// VMs do not run on CPU 0 of the lab's server. libvirt starts a QEMU there too, to learn what that can do.
pub(crate) const CPUS: &str = "1-7";

/// libvirt's daemons, which end with the scenario.
pub struct Libvirt {
    _log: Process,
    daemon: Option<Process>,
}

impl Libvirt {
    /// Starts them and waits until they answer. `more`: what else `qemu.conf` has.
    pub fn start(more: &str) -> Result<Self> {
        fs::write("/etc/libvirt/qemu.conf", format!("{CONFIGURATION}{more}")).context("qemu.conf")?;
        let mut libvirt = Self { _log: daemon("virtlogd")?, daemon: None };
        libvirt.restart()?;
        Ok(libvirt)
    }

    /// Kills libvirtd. Domains run on.
    pub fn kill(&mut self) {
        // SIGKILL; dropping waits for the end.
        drop(self.daemon.take());
    }

    /// Sends libvirtd a signal.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let daemon = self.daemon.as_ref().context("libvirtd does not run")?;
        output("kill", &[signal, &daemon.0.id().to_string()]).map(drop)
    }

    /// Starts libvirtd again.
    pub fn restart(&mut self) -> Result<()> {
        self.daemon = Some(daemon("libvirtd")?);
        wait_for("libvirt to answer", HANG_LIMIT, || Ok(virsh(&["version"]).is_ok()))
    }
}

fn daemon(name: &str) -> Result<Process> {
    let child = Command::new("taskset").args(["--cpu-list", CPUS, name]).spawn();
    Ok(Process(child.context(name.to_owned())?))
}

/// What virsh prints.
pub fn virsh(command: &[&str]) -> Result<String> {
    output("virsh", &[&["--quiet", "--connect", "qemu:///system"], command].concat())
}
