//! Cells that are finished, a file each. Whoever can write the folder can change them, so each is checked before it is used: what
//! does not fit is refused by file and field, and never judged.

use crate::{
    committed::{MEASURED, MEASURED_STATIC, VMS, WARM_UP},
    full::{committed, configuration::hex, plan::Id},
    raw::{self, Period},
};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
};

/// Version of the files.
const FORMAT: u32 = 2;
/// A cell has some hundred kilobytes at most.
const LARGEST: u64 = 16 << 20;
/// No counter, and no time in nanoseconds, reaches this in a period.
const MOST: u64 = 1_000_000_000_000_000;
/// A period is ten seconds long at most, unless the machine stops.
const LONGEST_S: f64 = 3600.0;
/// Levels of folders below the store: setup, workload.
const LEVELS: usize = 2;

/// The first line of a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    /// What measured it.
    commit: String,
    configuration: String,
    cell: Id,
    /// Of the commit and the second line.
    sha256: String,
}

/// The second line: what was measured.
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
    /// What measured it, once it is stored.
    #[serde(skip)]
    pub commit: String,
}

/// Cells of one configuration, whichever commit measured them.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    commit: String,
    configuration: String,
}

impl Store {
    /// The store in `root`, which is made if it is not there.
    pub fn open(root: &Path, commit: &str, configuration: &str) -> Result<Self> {
        let directory = root.join(configuration);
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        Ok(Self { directory, commit: commit.to_owned(), configuration: configuration.to_owned() })
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn path(&self, id: &Id) -> PathBuf {
        let Id { setup, workload, policy, repetition } = id;
        self.directory.join(setup).join(workload).join(format!("{policy}.{repetition}.json"))
    }

    /// Stores a cell: the file appears complete or not at all.
    pub fn put(&self, id: &Id, measured: &Measured) -> Result<()> {
        check(id, measured).with_context(|| format!("what was measured for {id}"))?;
        let path = self.path(id);
        let at = || path.display().to_string();
        let folder = path.parent().context("a cell is in a folder")?;
        fs::create_dir_all(folder).with_context(at)?;
        let body = serde_json::to_string(measured)?;
        let header = Header {
            format: FORMAT,
            commit: self.commit.clone(),
            configuration: self.configuration.clone(),
            cell: id.clone(),
            sha256: sum(&self.commit, &body),
        };
        let scratch = folder.join(format!(".{}.{}", id.policy, std::process::id()));
        let mut file = File::create(&scratch).with_context(at)?;
        writeln!(file, "{}\n{body}", serde_json::to_string(&header)?).with_context(at)?;
        file.sync_all().with_context(at)?;
        fs::rename(&scratch, &path).with_context(at)
    }

    /// All cells that are finished.
    pub fn all(&self) -> Result<BTreeMap<Id, Measured>> {
        let mut cells = BTreeMap::new();
        self.visit(&self.directory, 0, &mut cells)?;
        Ok(cells)
    }

    fn visit(&self, folder: &Path, level: usize, cells: &mut BTreeMap<Id, Measured>) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry.with_context(|| folder.display().to_string())?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Left by a run that was cut off while it wrote.
            if name.starts_with('.') {
                continue;
            }
            if level < LEVELS && path.is_dir() {
                self.visit(&path, level + 1, cells)?;
                continue;
            }
            let (id, measured) = self.read(&path).with_context(|| {
                format!("{} is refused; remove it and its cell is measured again", path.display())
            })?;
            cells.insert(id, measured);
        }
        Ok(())
    }

    fn read(&self, path: &Path) -> Result<(Id, Measured)> {
        let mut text = String::new();
        let file = File::open(path)?;
        ensure!(file.metadata()?.is_file(), "it is no file");
        file.take(LARGEST + 1).read_to_string(&mut text)?;
        ensure!(text.len() as u64 <= LARGEST, "it is longer than {LARGEST} bytes");
        let (header, body) = text.split_once('\n').context("it has one line, expected two")?;
        let header: Header = parse("header", header)?;
        ensure!(header.format == FORMAT, "header.format: {}, expected {FORMAT}", header.format);
        let (found, expected) = (&header.configuration, &self.configuration);
        ensure!(found == expected, "header.configuration: {found:?}, expected {expected:?}");
        let id = header.cell;
        // Compared, not opened: the id is what a file says.
        ensure!(self.path(&id) == path, "header.cell: {id}: that cell has another file");
        let body = body.strip_suffix('\n').context("its second line is cut off")?;
        let sum = sum(&header.commit, body);
        ensure!(sum == header.sha256, "header.sha256: {:?}, but the file has {sum:?}", header.sha256);
        let measured: Measured = parse("measured", body)?;
        check(&id, &measured)?;
        Ok((id, Measured { commit: header.commit, ..measured }))
    }
}

fn sum(commit: &str, body: &str) -> String {
    hex(&Sha256::digest(format!("{commit}\n{body}")))
}

/// Parses a line; an error names the field.
fn parse<T: DeserializeOwned>(name: &str, line: &str) -> Result<T> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let parsed = serde_path_to_error::deserialize(&mut deserializer);
    let value = parsed.map_err(|error| anyhow::anyhow!("{name}.{}: {}", error.path(), error.inner()))?;
    deserializer.end().with_context(|| name.to_owned())?;
    Ok(value)
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

    fn stored() -> (tempfile::TempDir, Store, PathBuf) {
        let directory = tempfile::tempdir().expect("a folder");
        let store = Store::open(directory.path(), "abc with changes", "0123").expect("a store");
        let id = id("vprobe", 1);
        store.put(&id, &measured(&id, [1, 0])).expect("stored");
        let path = directory.path().join("0123/half/chase/vprobe.1.json");
        assert!(path.exists());
        (directory, store, path)
    }

    fn refused(store: &Store) -> String {
        format!("{:#}", store.all().expect_err("it is to be refused"))
    }

    #[test]
    fn what_was_stored_is_read_again_and_half_a_write_is_not_seen() {
        let (_directory, store, path) = stored();
        fs::write(path.with_file_name(".linux.7"), "{").expect("a file");
        let cells = store.all().expect("good");
        assert_eq!(cells.keys().cloned().collect::<Vec<_>>(), [id("vprobe", 1)]);
        assert_eq!(cells[&id("vprobe", 1)].cell.periods.len(), WARM_UP + MEASURED);
    }

    #[test]
    fn each_change_of_a_byte_is_noticed() {
        let (_directory, store, path) = stored();
        let good = fs::read(&path).expect("a file");
        for at in (0..good.len()).step_by(97).chain([good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).expect("a file");
            let error = refused(&store);
            assert!(error.contains("vprobe.1.json is refused"), "byte {at}: {error}");
        }
        for length in [0, 1, 100, good.len() / 2, good.len() - 1] {
            fs::write(&path, &good[..length]).expect("a file");
            assert!(refused(&store).contains("vprobe.1.json is refused"), "{length} bytes");
        }
    }

    #[test]
    fn foreign_cells_are_refused_by_file_and_field() {
        let (directory, store, path) = stored();
        let other = Store::open(directory.path(), "abc with changes", "4567").expect("a store");
        let there = other.path(&id("vprobe", 1));
        fs::create_dir_all(there.parent().expect("a folder")).expect("a folder");
        fs::copy(&path, &there).expect("a copy");
        let error = refused(&other);
        assert!(
            error.contains("4567/half/chase/vprobe.1.json")
                && error.contains("header.configuration: \"0123\"")
        );
        // Another commit that measures the same goes on with it.
        let later = Store::open(directory.path(), "abd", "0123").expect("a store");
        assert_eq!(later.all().expect("good")[&id("vprobe", 1)].commit, "abc with changes");
        fs::copy(&path, path.with_file_name("linux.1.json")).expect("a copy");
        assert!(refused(&store).contains("linux.1.json is refused"), "{}", refused(&store));
        assert!(refused(&store).contains("header.cell: half, chase, vprobe, repetition 1"));
        fs::remove_file(path.with_file_name("linux.1.json")).expect("removed");
        fs::write(path.with_file_name("notes.txt"), "words").expect("a file");
        assert!(refused(&store).contains("notes.txt is refused"));
    }

    /// Writes a file whose sum is right, whatever it says.
    fn forge(store: &Store, path: &Path, from: &str, to: &str) -> String {
        let good = serde_json::to_string(&measured(&id("vprobe", 1), [1, 0])).expect("JSON");
        assert!(good.contains(from), "{from} is not in {good}");
        let body = good.replacen(from, to, 1);
        let header = Header {
            format: FORMAT,
            commit: store.commit.clone(),
            configuration: store.configuration.clone(),
            cell: id("vprobe", 1),
            sha256: sum(&store.commit, &body),
        };
        let header = serde_json::to_string(&header).expect("JSON");
        fs::write(path, format!("{header}\n{body}\n")).expect("a file");
        refused(store)
    }

    #[test]
    fn impossible_values_are_refused_by_field() {
        let (_directory, store, path) = stored();
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
        for (from, to, expected) in cases {
            let error = forge(&store, &path, from, to);
            assert!(error.contains(expected) && error.contains("vprobe.1.json"), "{expected}: {error}");
        }
    }

    #[test]
    fn a_cell_has_the_vms_of_its_setup() {
        let (_directory, store, _) = stored();
        let small = Id { setup: "small-1".into(), workload: "small".into(), ..id("vprobe", 0) };
        store.put(&small, &measured(&small, [1, 0])).expect("one VM with one vCPU");
        let mut other = measured(&id("linux", 0), [1, 0]);
        other.cell.periods[3].vms.truncate(1);
        let error = format!("{:#}", store.put(&id("linux", 0), &other).expect_err("one VM only"));
        assert!(error.contains("cell.periods[3]: vms: 1, expected 4"), "{error}");
    }

    #[test]
    fn nothing_is_stored_that_would_be_refused() {
        let (_directory, store, _) = stored();
        let mut cut = measured(&id("linux", 0), [1, 0]);
        cut.cell.periods.pop();
        let error = format!("{:#}", store.put(&id("linux", 0), &cut).expect_err("a period is missing"));
        assert!(error.contains("half, chase, linux, repetition 0: cell.periods: 9, expected 10"), "{error}");
        assert_eq!(store.all().expect("good").len(), 1);
    }
}
