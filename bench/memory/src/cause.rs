//! What displaces the guest's memory, by the means that do on real hosts.

use crate::{
    committed::{AT_HOME, AWAY, CHUNK_MIB, Cause, MEMORY_MIB, OTHERS_AT_HOME, OTHERS_AWAY, PERIODS},
    vm::Machine,
};
use anyhow::{Context, Result, ensure};
use std::{collections::BTreeMap, fs};
use vnuma_bench_common::host::write;
use vnuma_scenario::{HANG_LIMIT, wait_for};

const KSM: &str = "/sys/kernel/mm/ksm";
/// KSM looks at so many pages at a time, and sleeps for so many milliseconds in between.
const KSM_PACE: [(&str, &str); 2] = [("pages_to_scan", "20000"), ("sleep_millisecs", "20")];
/// What the balloon takes and gives back in each period, MiB.
const BREATH_MIB: u64 = 32;

/// Before the periods, while nothing is measured: what the guest has freed goes back to the host, or its pages are merged.
pub fn prepare(cause: Cause, machine: &mut Machine) -> Result<BTreeMap<String, u64>> {
    let mut caused = BTreeMap::new();
    if cause == Cause::Balloon {
        caused.insert("given_back".to_owned(), machine.give_back_by_balloon()?);
    } else {
        caused.insert("given_back".to_owned(), machine.give_back_by_reports()?);
    }
    match cause {
        Cause::FirstTouch | Cause::Balloon => {}
        Cause::Reporting => machine.put_others(OTHERS_AWAY)?,
        Cause::Ksm => {
            machine.report(false)?;
            for _ in 0..PERIODS {
                machine.ask::<u64>(&format!("take {CHUNK_MIB}"))?;
            }
            caused.insert("merged".to_owned(), merge((CHUNK_MIB * PERIODS) as u64)?);
        }
    }
    if cause == Cause::FirstTouch {
        machine.report(false)?;
    }
    Ok(caused)
}

/// Before a cell: nothing of the one before is merged any more.
pub fn clear(cause: Cause) -> Result<()> {
    if cause == Cause::Ksm {
        write(&format!("{KSM}/run"), "2")?;
        // Else what a guest node has on its home would be displaced memory of another one.
        write(&format!("{KSM}/merge_across_nodes"), "0")?;
        write(&format!("{KSM}/run"), "0")?;
    }
    Ok(())
}

/// Lets KSM work until most of so many MiB are merged. How much it was, bytes.
fn merge(mib: u64) -> Result<u64> {
    for (file, value) in KSM_PACE {
        write(&format!("{KSM}/{file}"), value)?;
    }
    write(&format!("{KSM}/run"), "1")?;
    let path = format!("{KSM}/pages_sharing");
    let mut merged = 0;
    let enough = wait_for("KSM to merge the guest's pages", HANG_LIMIT, || {
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        merged = text.trim().parse::<u64>().with_context(|| format!("{path}: {text:?}"))? * 4096;
        Ok(merged >= (mib << 20) / 10 * 9)
    });
    write(&format!("{KSM}/run"), "0")?;
    enough.with_context(|| format!("{} MiB are merged", merged >> 20))?;
    Ok(merged)
}

/// The I/O load's work of a period, from 0.
pub fn step(cause: Cause, machine: &mut Machine, period: usize) -> Result<()> {
    let take = format!("take {CHUNK_MIB}");
    match cause {
        Cause::FirstTouch => elsewhere(machine, &take),
        Cause::Balloon => {
            machine.inflate(MEMORY_MIB - BREATH_MIB)?;
            machine.inflate(MEMORY_MIB)?;
            elsewhere(machine, &take)
        }
        Cause::Reporting => machine.ask::<u64>(&format!("disk {CHUNK_MIB}")).map(drop),
        Cause::Ksm => elsewhere(machine, &format!("rewrite {period}")),
    }
}

/// The guest does something while its vCPU runs on the other node.
fn elsewhere(machine: &mut Machine, what: &str) -> Result<()> {
    machine.put(AWAY)?;
    let done = machine.ask::<u64>(what)?;
    machine.put(AT_HOME[0])?;
    ensure!(done > 0, "{what}: nothing was done");
    Ok(())
}

/// After the periods: what displaces ends.
pub fn end(cause: Cause, machine: &Machine) -> Result<()> {
    machine.put_others(OTHERS_AT_HOME)?;
    // Pages that are free must not go back to the host, or the second run would find none that is displaced.
    if cause == Cause::Reporting { machine.report(false) } else { Ok(()) }
}
