//! VMs that all start while vnumad runs: when it knows what they are, and when they are attached.

use crate::{
    daemon::{Daemon, Found},
    host,
    libvirtd::Libvirtd,
    row::{attach_all, progress},
    vms::Vms,
};
use serde::{Deserialize, Serialize};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use vnuma_bench_figures::goals::Limit;

const VMS: usize = 1000;
const SMOKE_VMS: usize = 10;

/// What bench/README.md explains.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    backend: String,
    vms: usize,
    started_s: Option<f64>,
    described_s: Option<f64>,
    attached_s: Option<f64>,
    rss_mb: Option<f64>,
    skipped: Option<String>,
}

impl Start {
    pub fn goals(&self) -> [Limit; 4] {
        let named = |name: &str| format!("{} VMs that start, {}: {name}", self.vms, self.backend);
        // libvirt plugs a device in several steps, one domain after the other.
        let attached_s = if self.backend == "libvirt" { 30.0 } else { 5.0 };
        [
            Limit::at_most(named("started_s"), self.started_s, 10.0),
            Limit::at_most(named("described_s"), self.described_s, 5.0),
            Limit::at_most(named("attached_s"), self.attached_s, attached_s),
            Limit::at_most(named("rss_mb"), self.rss_mb, 200.0),
        ]
    }
}

pub fn measure(vnumad: &Path, log: Option<&Path>, backend: &str, smoke: bool) -> anyhow::Result<Start> {
    let vms = if smoke { SMOKE_VMS } else { VMS };
    let (directory, begin) = (tempfile::tempdir()?, Instant::now());
    eprintln!("start: {backend}, {vms} VMs");
    let root = directory.path();
    host::write(root)?;
    let sockets = root.join("qmp");
    std::fs::create_dir(&sockets)?;
    let libvirtd = (backend == "libvirt").then(|| Libvirtd::start(root)).transpose()?;
    let found = match &libvirtd {
        Some(libvirtd) => Found::Libvirt(&libvirtd.uri, &libvirtd.states),
        None => Found::Qmp(&sockets),
    };
    let default_log = root.join("vnumad.log");
    let mut start = Start {
        backend: backend.to_owned(),
        vms,
        started_s: None,
        described_s: None,
        attached_s: None,
        rss_mb: None,
        skipped: None,
    };
    let daemon = match Daemon::start(vnumad, "bpf", root, found, log.unwrap_or(&default_log))? {
        Ok(daemon) => daemon,
        Err(reason) => return Ok(Start { skipped: Some(reason), ..start }),
    };
    let seconds = |took: Duration| Some((took.as_secs_f64() * 1e3).round() / 1e3);
    let starts = Instant::now();
    let running = Vms::start(vms, root)?;
    libvirtd.as_ref().map(|libvirtd| libvirtd.show(&running)).transpose()?;
    start.started_s = seconds(starts.elapsed());
    progress(begin, "all have started");
    start.described_s = seconds(daemon.await_vms(vms)?);
    progress(begin, "all are known");
    let attaches = Instant::now();
    attach_all(&daemon, vms)?;
    start.attached_s = seconds(attaches.elapsed());
    progress(begin, "all are attached");
    start.rss_mb = Some(daemon.rss_mb()?);
    Ok(start)
}
