//! Cells that are finished, as the store has them. Others may have write access, so each cell is checked before it is used: what does
//! not fit is refused by its name and field, and never judged.

use crate::{
    committed::{MEASURED, MEASURED_STATIC, VMS, WARM_UP},
    full::{committed, plan::Id},
    raw::{self, Period},
};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};
use vnuma_bench_common::cells::Raw;

/// No counter, and no time in nanoseconds, reaches this in a period.
const MOST: u64 = 1_000_000_000_000_000;
/// A period is ten seconds long at most, unless the machine stops.
const LONGEST_S: f64 = 3600.0;
/// What was measured.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The server.
    pub server: raw::Server,
    /// Its boot: cells of one boot ran one after the other.
    pub boot: String,
    /// Seconds that the cell took.
    pub took_s: f64,
    /// What held for all cells of the workload on that boot.
    pub workload: raw::Workload,
    /// The cell.
    pub cell: raw::Cell,
    /// What measured it.
    pub commit: String,
}

/// A cell.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Which.
    pub id: Id,
    /// What was measured.
    pub measured: Measured,
}

/// All cells that are finished.
pub fn read(path: &Path) -> Result<BTreeMap<Id, Measured>> {
    let lines = if path.exists() { Raw::<Line>::read(path)?.lines } else { Vec::new() };
    for Line { id, measured } in &lines {
        check(id, measured).with_context(|| {
            format!("{}: {id} is refused; remove its line and it is measured again", path.display())
        })?;
    }
    Ok(lines.into_iter().map(|Line { id, measured }| (id, measured)).collect())
}

/// Whether it can be what was measured for that cell.
fn check(id: &Id, measured: &Measured) -> Result<()> {
    let Some(setup) = committed::setup(&id.setup) else { bail!("cell.setup: {:?} is unknown", id.setup) };
    let Measured { server, boot, took_s, workload, cell, .. } = measured;
    let same = |field: &str, found: &str, expected: &str| {
        ensure!(found == expected, "{field}: {found:?}, expected {expected:?}");
        Ok(())
    };
    same("server.profile", &server.profile, setup.counters)?;
    same("workload.name", &workload.name, &id.workload)?;
    same("cell.workload", &cell.workload, &id.workload)?;
    same("cell.policy", &cell.policy, &id.policy)?;
    ensure!(!boot.is_empty(), "boot: it is empty");
    within("took_s", *took_s, 0.0, 86_400.0)?;
    within("workload.dilation", workload.dilation, 0.01, 100_000.0)?;
    within("workload.period_s", workload.period_s, 0.001, LONGEST_S)?;
    within("workload.factor", workload.factor, 0.001, 100_000.0)?;
    ensure!(cell.warm_up == WARM_UP, "cell.warm_up: {}, expected {WARM_UP}", cell.warm_up);
    let count = WARM_UP + if id.policy.starts_with("oracle:") { MEASURED_STATIC } else { MEASURED };
    ensure!(cell.periods.len() == count, "cell.periods: {}, expected {count}", cell.periods.len());
    let counts =
        [0, VMS.len()].contains(&cell.vm_steps.len()) && cell.vm_steps.iter().all(|&steps| steps < MOST);
    ensure!(counts, "cell.vm_steps: {:?}", cell.vm_steps);
    let known = |(name, &steps): (&String, &u64)| steps < MOST && VMS.iter().any(|(vm, _)| vm == name);
    ensure!(cell.because_of.iter().all(known), "cell.because_of: {:?}", cell.because_of);
    for (at, period) in cell.periods.iter().enumerate() {
        check_period(period, setup.shape()).with_context(|| format!("cell.periods[{at}]"))?;
    }
    Ok(())
}

fn within(field: &str, value: f64, low: f64, high: f64) -> Result<()> {
    ensure!((low..=high).contains(&value), "{field}: {value} is not within {low} to {high}");
    Ok(())
}

fn check_period(period: &Period, (vms, vcpus): (usize, usize)) -> Result<()> {
    within("elapsed_s", period.elapsed_s, 0.001, LONGEST_S)?;
    // The kernel counts idle time in steps.
    within("idle_share", period.idle_share, 0.0, 1.1)?;
    ensure!(period.vms.len() == vms, "vms: {}, expected {vms}", period.vms.len());
    for (at, vm) in period.vms.iter().enumerate() {
        ensure!(vm.len() == vcpus, "vms[{at}]: {} vCPUs, expected {vcpus}", vm.len());
        for (vcpu, found) in vm.iter().enumerate() {
            for list in [&found.values.user.dram_by_class, &found.values.user.streamed_by_class] {
                let classes = list.len();
                ensure!(
                    classes <= vnuma_abi_lab_counters::MAX_CLASSES,
                    "vms[{at}][{vcpu}]: {classes} classes"
                );
            }
        }
    }
    below_most("vms", &serde_json::to_value(&period.vms)?)?;
    below_most("daemon", &serde_json::to_value(&period.daemon)?)
}

/// No number in it reaches [`MOST`].
fn below_most(field: &str, value: &Value) -> Result<()> {
    match value {
        Value::Array(list) => {
            list.iter().enumerate().try_for_each(|(at, value)| below_most(&format!("{field}[{at}]"), value))
        }
        Value::Object(fields) => {
            fields.iter().try_for_each(|(name, value)| below_most(&format!("{field}.{name}"), value))
        }
        value => {
            let reaches = value.as_u64().is_some_and(|number| number >= MOST);
            ensure!(!reaches, "{field}: {value}, expected less than {MOST}");
            Ok(())
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::{raw::Vcpu, threads::Values};
    use std::{fs, path::PathBuf};
    use vnuma_bench_common::cells::{Cells, Options};
    use vnuma_lab_pricing::Counts;

    /// A cell whose operations take so many local and remote accesses each.
    pub fn measured(id: &Id, accesses: [u64; 2]) -> Measured {
        let vcpu = || Vcpu {
            values: Values {
                user: Counts {
                    instructions: 4000,
                    base_cycles: 4000,
                    dram_by_class: accesses.map(|count| count * 1000).to_vec(),
                    streamed_by_class: vec![0, 0],
                    ..Counts::default()
                },
                cycles: 1000,
                ran_ns: 300_000_000,
                ..Values::default()
            },
            operations: 1000,
            cpu: 1,
        };
        let (vms, vcpus) = committed::setup(&id.setup).expect("a setup").shape();
        let vm = || (0..vcpus).map(|_| vcpu()).collect();
        let period = || Period {
            elapsed_s: 1.0,
            vms: (0..vms).map(|_| vm()).collect(),
            idle_share: 0.0,
            daemon: None,
            daemon_ns: None,
            programs_ns: None,
            program_runs: None,
            wakes_us: Vec::new(),
        };
        let count = if id.policy.starts_with("oracle:") { MEASURED_STATIC } else { MEASURED };
        Measured {
            server: raw::Server {
                profile: committed::setup(&id.setup).expect("a setup").counters.into(),
                second_llc: None,
                kernel: "7.3".into(),
                numad: "0.5".into(),
            },
            boot: "b".into(),
            took_s: 60.0,
            workload: raw::Workload {
                name: id.workload.clone(),
                dilation: 20.0,
                period_s: 5.0,
                factor: 5.0,
                stretched: BTreeMap::new(),
            },
            cell: raw::Cell {
                workload: id.workload.clone(),
                policy: id.policy.clone(),
                warm_up: WARM_UP,
                periods: (0..WARM_UP + count).map(|_| period()).collect(),
                pages_scanned: 1 << 20,
                pages_moved: 0,
                steps: 0,
                means: None,
                vm_steps: Vec::new(),
                because_of: Default::default(),
                left_out: 0,
                repeated: 0,
            },
            commit: String::new(),
        }
    }

    pub fn id(policy: &str, repetition: u32) -> Id {
        Id { setup: "half".into(), workload: "chase".into(), policy: policy.into(), repetition }
    }

    /// A store with a cell, whatever that says.
    fn stored(id: &Id, measured: &Value) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("full.jsonl");
        let options = Options { store: Some(path.clone()), ..Options::default() };
        let mut cells = Cells::stored(&options).expect("a store");
        let line = serde_json::json!({"id": id, "measured": measured});
        cells.measure(&id.to_string(), || Ok((line.clone(), String::new()))).expect("stored");
        (directory, path)
    }

    fn value(id: &Id) -> Value {
        serde_json::to_value(measured(id, [1, 0])).expect("JSON")
    }

    fn refused(id: &Id, measured: &Value) -> String {
        let (_directory, path) = stored(id, measured);
        format!("{:#}", read(&path).expect_err("it is to be refused"))
    }

    #[test]
    fn each_change_of_a_byte_is_noticed() {
        let id = id("vprobe", 1);
        let (_directory, path) = stored(&id, &value(&id));
        let good = fs::read(&path).expect("a file");
        assert_eq!(read(&path).expect("good")[&id].cell.periods.len(), WARM_UP + MEASURED);
        for at in (0..good.len() - 1).step_by(97) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).expect("a file");
            let error = format!("{:#}", read(&path).expect_err("changed"));
            assert!(error.contains("full.jsonl:1"), "byte {at}: {error}");
        }
        // What was cut off is measured again.
        for length in [0, 1, 100, good.len() / 2, good.len() - 1] {
            fs::write(&path, &good[..length]).expect("a file");
            assert!(read(&path).expect("no whole line").is_empty(), "{length} bytes");
        }
    }

    #[test]
    fn impossible_values_are_refused_by_field() {
        let cases = [
            (r#""dilation":20.0"#, r#""dilation":0.0"#, "workload.dilation: 0 is not within"),
            (
                r#""dilation":20.0"#,
                r#""dilation":"fast""#,
                "measured.workload.dilation: invalid type: string",
            ),
            (r#""profile":"broadwell-2s""#, r#""profile":"other""#, "server.profile: \"other\", expected"),
            (r#""policy":"vprobe""#, r#""policy":"linux""#, "cell.policy: \"linux\", expected \"vprobe\""),
            (r#""warm_up":2"#, r#""warm_up":0"#, "cell.warm_up: 0, expected 2"),
            (r#""elapsed_s":1.0"#, r#""elapsed_s":-1.0"#, "cell.periods[0]: elapsed_s: -1 is not within"),
            (r#""idle_share":0.0"#, r#""idle_share":7.0"#, "cell.periods[0]: idle_share: 7"),
            (
                r#""operations":1000"#,
                r#""operations":-1"#,
                "measured.cell.periods[0].vms[0][0].operations: invalid",
            ),
            (
                r#""ran_ns":300000000"#,
                r#""ran_ns":1000000000000000"#,
                "cell.periods[0]: vms[0][0].values.ran_ns: 1000000000000000, expected less",
            ),
            (r#""because_of":{}"#, r#""because_of":{"vm7":1}"#, "cell.because_of: {\"vm7\": 1}"),
            (r#""vm_steps":[]"#, r#""vm_steps":[1]"#, "cell.vm_steps: [1]"),
            (r#""took_s":60.0"#, r#""took":60.0"#, "unknown field `took`"),
        ];
        let id = id("vprobe", 1);
        for (from, to, expected) in cases {
            let good = value(&id).to_string();
            assert!(good.contains(from), "{from} is not in {good}");
            let bad: Value = serde_json::from_str(&good.replacen(from, to, 1)).expect("JSON");
            let error = refused(&id, &bad);
            assert!(error.contains(expected) && error.contains("full.jsonl"), "{expected}: {error}");
        }
        let other = Id { policy: "linux".into(), ..id.clone() };
        let error = refused(&other, &value(&id));
        assert!(error.contains("half, chase, linux, repetition 1 is refused"), "{error}");
    }

    #[test]
    fn a_cell_has_the_vms_of_its_setup_and_all_its_periods() {
        let small = Id { setup: "small-1".into(), workload: "small".into(), ..id("vprobe", 0) };
        let (_directory, path) = stored(&small, &value(&small));
        read(&path).expect("one VM with one vCPU");
        let id = id("linux", 0);
        let refused = |change: fn(&mut Measured)| {
            let mut other = measured(&id, [1, 0]);
            change(&mut other);
            refused(&id, &serde_json::to_value(other).expect("JSON"))
        };
        let error = refused(|other| other.cell.periods[3].vms.truncate(1));
        assert!(error.contains("cell.periods[3]: vms: 1, expected 4"), "{error}");
        let error = refused(|other| drop(other.cell.periods.pop()));
        assert!(error.contains("cell.periods: 9, expected 10"), "{error}");
    }
}
