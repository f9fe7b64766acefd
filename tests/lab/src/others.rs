//! Threads of a VM that run no vCPU, beside `policy`: they follow the vCPU, and get their operators' CPUs again.

use crate::policy::{FAR, NEAR, OPERATORS};
use anyhow::{Context, Result, bail, ensure};
use std::{collections::BTreeMap, fs, path::PathBuf};
use vnuma_scenario::{HANG_LIMIT, Vm, output, wait_for};

/// The threads, and one that its operator has pinned.
pub struct Others {
    pid: i32,
    vcpus: Vec<i32>,
    pinned: i32,
}

/// A thread's name, and the CPUs that it may run on.
type Thread = (String, String);

impl Others {
    /// Lets all threads of a VM run on the operator's CPUs, but one.
    pub fn new(vm: &Vm) -> Result<Self> {
        let (pid, vcpus) = (vm.pid, vm.threads.clone());
        output("taskset", &["-a", "-p", "-c", OPERATORS, &pid.to_string()])?;
        let mut others = Self { pid, vcpus, pinned: 0 };
        let threads = others.threads()?;
        ensure!(
            threads.values().any(|(name, _)| name.starts_with("vhost-")),
            "no thread of vhost is among those of the VM: {threads:?}"
        );
        let plain = |(tid, (name, _)): &(&i32, &Thread)| **tid != pid && !name.starts_with("vhost-");
        let (&pinned, _) = threads.iter().find(plain).with_context(|| format!("too few: {threads:?}"))?;
        output("taskset", &["-p", "-c", FAR, &pinned.to_string()])?;
        others.pinned = pinned;
        Ok(others)
    }

    fn threads(&self) -> Result<BTreeMap<i32, Thread>> {
        let directory = PathBuf::from(format!("/proc/{}/task", self.pid));
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
            let tid: i32 = entry?.file_name().to_string_lossy().parse()?;
            // A worker may end meanwhile.
            let Ok(status) = fs::read_to_string(directory.join(format!("{tid}/status"))) else { continue };
            let field =
                |key| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
            if !self.vcpus.contains(&tid) {
                threads.insert(tid, (field("Name:").to_owned(), field("Cpus_allowed_list:").to_owned()));
            }
        }
        Ok(threads)
    }

    /// Threads that may not run on what is expected.
    fn wrong(&self, cpus: &str) -> Result<BTreeMap<i32, Thread>> {
        let mut threads = self.threads()?;
        threads.retain(|tid, (_, found)| found != if *tid == self.pinned { FAR } else { cpus });
        Ok(threads)
    }

    /// Expects that they have their operators' CPUs.
    pub fn expect_free(&self) -> Result<()> {
        let wrong = self.wrong(OPERATORS)?;
        ensure!(wrong.is_empty(), "not on their operator's CPUs {OPERATORS}, or {FAR}: {wrong:?}");
        Ok(())
    }

    /// Waits until they have their operators' CPUs.
    pub fn wait_until_free(&self) -> Result<()> {
        self.wait(OPERATORS)
    }

    /// Waits until they are near the vCPU.
    pub fn wait_until_near(&self) -> Result<()> {
        self.wait(NEAR)
    }

    fn wait(&self, cpus: &str) -> Result<()> {
        let what = format!("the other threads to have the CPUs {cpus}");
        match wait_for(&what, HANG_LIMIT, || Ok(self.wrong(cpus)?.is_empty())) {
            Ok(()) => Ok(()),
            Err(error) => bail!("{error:#}: {:?}", self.wrong(cpus)?),
        }
    }
}
