//! Who brings displaced memory home: vnumad, the server's kernel by AutoNUMA or DAMON, numad, migratepages, or nobody.

use crate::{
    committed::{HOST_CPUS, PAPER_PERIOD_S, Policy},
    damon::Damon,
    vm::NAME,
};
use anyhow::{Context, Result};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path};
use vnuma_bench_common::{
    guest_memory::GuestMemory,
    host::{Numad, affine, balance, balanced, counted},
    threads::{Thread, threads_of},
};
use vnuma_scenario::{HANG_LIMIT, Process, output, vnumactl, vnumad_logging_to, wait_for};

const CONFIGURATION: &str = "/root/memory.toml";
const LOG: &str = "/root/vnumad.log";
/// vnumad's default between two looks, seconds (docs/vnumad.md).
const OBSERVE_S: f64 = 60.0;
/// numad takes a second at least (numad(8), `-i`): its default interval is 5 to 15 s.
const NUMAD_FACTOR: f64 = 0.2;

/// A policy that is at work. It ends when this is dropped.
pub struct Running {
    policy: Policy,
    /// QEMU.
    pid: i32,
    daemon: Option<(Process, Vec<(String, Thread)>)>,
    numad: Option<Numad>,
    damon: Option<Damon>,
    /// What was moved, and by vnumad's threads done, before the periods.
    before: (u64, BTreeMap<String, u64>),
    longest_hold_us: u64,
}

/// vnumad's configuration: times of the policies are shortened as the paper's period is. It looks as often as it may: the least that
/// it takes is a second.
fn configuration(period_s: f64) -> String {
    let observe_s = (OBSERVE_S * period_s / PAPER_PERIOD_S).max(1.0).round();
    format!(
        "[memory]\nperiod_s = {:.0}\nobserve_s = {observe_s:.0}\nobserve_permille = 1000\n\n\
         [observe]\ndescribe_interval_ms = 2000\n",
        period_s.max(1.0)
    )
}

impl Running {
    /// Starts it. What it does counts from [`begin`](Self::begin) on.
    pub fn start(policy: Policy, pid: i32, period_s: f64) -> Result<Self> {
        let daemon = policy.is_of_vnumad().then(|| start_vnumad(period_s)).transpose()?;
        let before = (0, BTreeMap::new());
        Ok(Self { policy, pid, daemon, numad: None, damon: None, before, longest_hold_us: 0 })
    }

    /// The periods begin.
    pub fn begin(&mut self, memory: &GuestMemory) -> Result<()> {
        match self.policy {
            Policy::Damon => self.damon = Some(Damon::start(self.pid, &memory.in_qemu())?),
            Policy::AutonumaHost => balance(true)?,
            Policy::Numad => self.numad = Some(Numad::start(NUMAD_FACTOR)?),
            Policy::Migratepages => {}
            _ => vnumactl(&["memory", NAME, "--set", self.policy.name()]).map(drop)?,
        }
        self.before = (self.moved()?, self.cycles()?);
        Ok(())
    }

    /// A period has ended.
    pub fn period(&mut self) -> Result<()> {
        if self.policy == Policy::Migratepages {
            output("migratepages", &[&self.pid.to_string(), "1", "0"])?;
        }
        if self.policy.is_of_vnumad() {
            let shown = vnumactl(&["memory", NAME])?;
            let hold_us = shown["moves"]["last"]["longest_hold_us"].as_u64().unwrap_or(0);
            self.longest_hold_us = self.longest_hold_us.max(hold_us);
        }
        Ok(())
    }

    /// The longest that a page was held, as far as vnumad has said it at the end of a period; none for others.
    pub fn longest_hold_us(&self) -> Option<u64> {
        self.policy.is_of_vnumad().then_some(self.longest_hold_us)
    }

    /// Pages that were moved since the periods began.
    pub fn pages_moved(&self) -> Result<u64> {
        Ok(self.moved()?.saturating_sub(self.before.0))
    }

    fn moved(&self) -> Result<u64> {
        match self.policy {
            Policy::AutonumaHost => Ok(balanced()?.moved),
            Policy::Numad | Policy::Migratepages | Policy::Damon => counted("pgmigrate_success"),
            _ => Ok(moved_bytes(&vnumactl(&["memory", NAME])?["moves"]) / 4096),
        }
    }

    /// Modelled cycles of vnumad's threads since the periods began.
    pub fn daemon(&self) -> Result<Option<BTreeMap<String, u64>>> {
        let mut now = self.cycles()?;
        for (name, cycles) in &mut now {
            *cycles = cycles.saturating_sub(self.before.1.get(name).copied().unwrap_or(0));
        }
        Ok(self.daemon.is_some().then_some(now))
    }

    fn cycles(&self) -> Result<BTreeMap<String, u64>> {
        let mut by_name = BTreeMap::new();
        for (name, thread) in self.daemon.iter().flat_map(|(_, threads)| threads) {
            *by_name.entry(name.clone()).or_default() += thread.cycles()?;
        }
        Ok(by_name)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.policy == Policy::AutonumaHost
            && let Err(error) = balance(false)
        {
            eprintln!("{error:#}");
        }
    }
}

/// What ended moves have moved, and the one that is under way.
fn moved_bytes(moves: &Value) -> u64 {
    let last = &moves["last"];
    let under_way = if last["ended"] == false { last["moved_bytes"].as_u64() } else { None };
    moves["bytes"].as_u64().unwrap_or(0) + under_way.unwrap_or(0)
}

fn start_vnumad(period_s: f64) -> Result<(Process, Vec<(String, Thread)>)> {
    fs::write(CONFIGURATION, configuration(period_s)).context(CONFIGURATION)?;
    let daemon = vnumad_logging_to(Path::new(LOG), &["--config", CONFIGURATION])?;
    wait_for("vnumad to know the homes of the VM", HANG_LIMIT, || {
        let Ok(shown) = vnumactl(&["memory", NAME]) else { return Ok(false) };
        let nodes = shown["nodes"].as_array().cloned().unwrap_or_default();
        Ok(!nodes.is_empty() && nodes.iter().all(|node| node["home"] == node["id"]))
    })?;
    let threads = threads_of(daemon.0.id() as i32)?;
    threads.iter().try_for_each(|(_, thread)| affine(thread.tid, HOST_CPUS))?;
    Ok((daemon, threads))
}

/// A vnumad that knows the VM and does what it is asked for.
pub fn quiet_vnumad() -> Result<Process> {
    start_vnumad(PAPER_PERIOD_S).map(|(daemon, _)| daemon)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_under_way_counts_with_those_that_have_ended() {
        let moves =
            |ended: bool| serde_json::json!({"bytes": 10, "last": {"ended": ended, "moved_bytes": 7}});
        assert_eq!((moved_bytes(&moves(true)), moved_bytes(&moves(false))), (10, 17));
        assert_eq!(moved_bytes(&Value::Null), 0);
    }

    #[test]
    fn times_of_policies_are_shortened_as_the_period_is() {
        let text = configuration(4.6);
        assert!(text.starts_with("[memory]\nperiod_s = 5\nobserve_s = 1\n"), "{text}");
        assert!(configuration(90.0).contains("period_s = 90\nobserve_s = 6\n"));
    }
}
