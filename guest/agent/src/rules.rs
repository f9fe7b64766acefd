//! The operator's file. Every key has a default; a key that is not known, or a value out of range, is refused with its file,
//! line and name.

use crate::core::{Limits, NodeId, Process};
use serde::{Deserialize, de::DeserializeOwned};
use std::{collections::BTreeSet, path::Path, time::Duration};
use toml::Spanned;
use vnuma_process::text::sanitize_short;
use vnuma_settings::{SettingsError, Source, Table};

/// The file if none is named.
pub const DEFAULT_PATH: &str = "/etc/vnuma/vnuma-guest.toml";

/// Most rules of a file, and most libraries.
const COUNT_LIMIT: usize = 1024;
/// Longest name in it, in bytes.
const NAME_LIMIT: usize = 255;

/// Libraries that drive devices past the kernel: VMA, RDMA verbs, libfabric and DPDK.
const LIBRARIES: [&str; 4] = ["libvma", "libibverbs", "libfabric", "librte_*"];

/// What the operator says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Time between two looks.
    pub interval: Duration,
    /// Bounds of what is done.
    pub limits: Limits,
    /// What becomes of the memory of a process that is placed.
    pub memory: Memory,
    /// Which interrupts are kept on the nodes of their devices.
    pub interrupts: KeepInterrupts,
    /// Libraries whose users are heavy on I/O.
    pub libraries: Libraries,
    /// What is said of single programs. The first that names a process counts.
    pub workloads: Vec<Workload>,
}

/// What becomes of the memory of a process that is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// It is moved to the node; new memory comes from the node while that has any, as the process runs there.
    Move,
    /// The same, and new memory comes from the node only, where a control group can say that.
    Bind,
    /// It stays where it is.
    Leave,
}

/// Which interrupts are kept on the nodes of their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepInterrupts {
    /// Those of devices that placed processes use.
    Used,
    /// Those of all network controllers, disks and devices that do RDMA.
    All,
    /// None.
    None,
}

/// Names of libraries. `NAME` stands for the files `NAME.so` and `NAME.so.VERSION`, `NAME*` for those whose names begin so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries(Vec<String>);

impl Libraries {
    /// Is this file name that of one of them?
    pub fn has(&self, file: &str) -> bool {
        self.0.iter().any(|name| match name.strip_suffix('*') {
            Some(beginning) => file.starts_with(beginning) && file.contains(".so"),
            None => file
                .strip_prefix(name.as_str())
                .and_then(|rest| rest.strip_prefix(".so"))
                .is_some_and(|version| version.is_empty() || version.starts_with('.')),
        })
    }
}

/// What is said of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// File name of the program.
    pub program: Option<String>,
    /// A control group. Those in it count, too.
    pub cgroup: Option<String>,
    /// What to do with it.
    pub choice: Choice,
}

/// What a rule says of the processes that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// They use this device: an address, an interface, an RDMA device.
    Device(String),
    /// They belong on this node.
    Node(NodeId),
    /// They are left alone.
    Ignore,
}

impl Workload {
    /// Does it name this process?
    pub fn names(&self, process: &Process) -> bool {
        let below = |group: &String| {
            let rest = process.cgroup.strip_prefix(group.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.program.as_ref().is_none_or(|program| *program == process.program)
            && self.cgroup.as_ref().is_none_or(below)
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            limits: Limits {
                place_after: 2,
                release_after: 3,
                rest: Duration::from_secs(60),
                cpu_reserve_percent: 10,
                memory_reserve_percent: 5,
                placements_per_look: 4,
                memory_kib_per_look: 256 << 10,
            },
            memory: Memory::Move,
            interrupts: KeepInterrupts::Used,
            libraries: Libraries(LIBRARIES.map(str::to_owned).to_vec()),
            workloads: Vec::new(),
        }
    }
}

impl Rules {
    /// Reads `path`; without one, the default path if there is such a file, and the defaults if not.
    pub fn load(path: Option<&Path>) -> Result<Self, SettingsError> {
        vnuma_settings::load(path, DEFAULT_PATH, Self::parse)
    }

    /// Understands the text of `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, SettingsError> {
        let mut rules = Self::default();
        Source::new(path, text).read(|file| rules.take(file))?;
        Ok(rules)
    }

    fn take(&mut self, file: &mut Table<'_>) -> Result<(), SettingsError> {
        let Self { interval, limits, memory, interrupts, .. } = self;
        file.number("interval_s", 1..=3600, |s| *interval = Duration::from_secs(s))?;
        file.number("place_after", 2..=1000, |looks| limits.place_after = looks as u32)?;
        file.number("release_after", 1..=1000, |looks| limits.release_after = looks as u32)?;
        file.number("rest_s", 1..=86_400, |s| limits.rest = Duration::from_secs(s))?;
        file.number("cpu_reserve_percent", 0..=90, |share| limits.cpu_reserve_percent = share as u32)?;
        file.number("memory_reserve_percent", 1..=90, |share| limits.memory_reserve_percent = share as u32)?;
        file.number("placements_per_look", 1..=1000, |count| limits.placements_per_look = count as u32)?;
        file.number("memory_mib_per_look", 1..=1 << 20, |mib| limits.memory_kib_per_look = 1024 * mib)?;
        file.set("memory", memory)?;
        file.set("interrupts", interrupts)?;
        if let Some(names) = limited(file, "libraries", &format!("at most {COUNT_LIMIT} names"))? {
            self.libraries = Libraries(library_names(file, &names)?);
        }
        let tables =
            limited(file, "workload", &format!("given at most {COUNT_LIMIT} times"))?.unwrap_or_default();
        self.workloads = tables.iter().map(|table| workload(file, table)).collect::<Result<_, _>>()?;
        Ok(())
    }
}

/// A list of at most [`COUNT_LIMIT`].
fn limited<T: DeserializeOwned>(
    file: &mut Table<'_>,
    key: &'static str,
    expected: &str,
) -> Result<Option<Vec<Spanned<T>>>, SettingsError> {
    let list = file.given::<Vec<Spanned<T>>>(key)?.map(Spanned::into_inner);
    match list.as_ref().and_then(|list| list.get(COUNT_LIMIT)) {
        Some(extra) => Err(file.wrong(key, extra, "[...]", expected)),
        None => Ok(list),
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WorkloadTable {
    program: Option<Spanned<String>>,
    cgroup: Option<Spanned<String>>,
    device: Option<Spanned<String>>,
    node: Option<Spanned<i64>>,
    ignore: Option<Spanned<bool>>,
}

/// A name: one line that is not empty, and in which `allowed` finds nothing wrong.
fn name_of(
    file: &Table<'_>,
    key: &str,
    value: Option<&Spanned<String>>,
    allowed: fn(&str) -> bool,
    expected: &str,
) -> Result<Option<String>, SettingsError> {
    let Some(value) = value else { return Ok(None) };
    let name = value.get_ref();
    let plain = !name.is_empty() && name.len() <= NAME_LIMIT && !name.contains(char::is_control);
    if plain && allowed(name) {
        return Ok(Some(name.clone()));
    }
    let shown = format!("\"{}\"", sanitize_short(name));
    Err(file.wrong(key, value, shown, expected))
}

fn library_names(file: &Table<'_>, names: &[Spanned<String>]) -> Result<Vec<String>, SettingsError> {
    let expected = "the name of a library without .so, such as libibverbs, or its beginning and *";
    // What matches everything would make a workload of every process.
    let allowed = |name: &str| {
        let name = name.strip_suffix('*').unwrap_or(name);
        name.len() > 3 && name.starts_with("lib") && !name.contains(['/', '*']) && !name.contains(".so")
    };
    let name = |name| Ok(name_of(file, "libraries", Some(name), allowed, expected)?.unwrap_or_default());
    let mut seen = BTreeSet::new();
    let names = names.iter().map(name).collect::<Result<Vec<_>, _>>()?;
    Ok(names.into_iter().filter(|name| seen.insert(name.clone())).collect())
}

fn workload(file: &Table<'_>, table: &Spanned<WorkloadTable>) -> Result<Workload, SettingsError> {
    let WorkloadTable { program, cgroup, device, node, ignore } = table.get_ref();
    let wrong = |expected: &str| file.wrong("workload", table, "[...]", expected);
    let file_name = |name: &str| !name.contains('/');
    let program =
        name_of(file, "workload.program", program.as_ref(), file_name, "the file name of a program")?;
    let absolute = |path: &str| path.starts_with('/') && !path.split('/').any(|part| part == "..");
    let group = "the path of a control group, such as /system.slice/memcached.service";
    let cgroup = name_of(file, "workload.cgroup", cgroup.as_ref(), absolute, group)?;
    if program.is_none() && cgroup.is_none() {
        return Err(wrong("given a program or a cgroup, or both"));
    }
    let what = "an address such as 0000:81:00.0, a network interface or an RDMA device";
    let device = name_of(file, "workload.device", device.as_ref(), file_name, what)?;
    if let Some(node) = node.as_ref().filter(|node| !(0..=1023).contains(node.get_ref())) {
        return Err(file.wrong("workload.node", node, node.get_ref().to_string(), "0 to 1023"));
    }
    if let Some(no) = ignore.as_ref().filter(|ignore| !*ignore.get_ref()) {
        return Err(file.wrong("workload.ignore", no, "false", "true, or left out"));
    }
    let choice = match (device, node, ignore) {
        (Some(device), None, None) => Choice::Device(device),
        (None, Some(node), None) => Choice::Node(*node.get_ref() as NodeId),
        (None, None, Some(_)) => Choice::Ignore,
        _ => return Err(wrong("given one of device, node and ignore")),
    };
    Ok(Workload { program, cgroup, choice })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Rules, String> {
        Rules::parse(Path::new("x.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_is_the_default_and_every_key_can_be_set() {
        assert_eq!(parse(""), Ok(Rules::default()));
        let text = "interval_s = 1\nplace_after = 3\nrelease_after = 2\nrest_s = 3\ncpu_reserve_percent = 0\n\
                    memory_reserve_percent = 7\nplacements_per_look = 8\nmemory_mib_per_look = 9\n\
                    memory = \"bind\"\ninterrupts = \"all\"\nlibraries = [\"libx\"]\n\
                    [[workload]]\nprogram = \"a\"\ncgroup = \"/b\"\ndevice = \"eth0\"\n\
                    [[workload]]\nprogram = \"c\"\nnode = 1\n[[workload]]\ncgroup = \"/d\"\nignore = true\n";
        let rules = parse(text).expect("rules");
        assert_eq!((rules.interval, rules.limits.rest), (Duration::from_secs(1), Duration::from_secs(3)));
        assert_eq!(rules.limits.memory_kib_per_look, 9 << 10);
        let choices: Vec<_> = rules.workloads.iter().map(|rule| rule.choice.clone()).collect();
        assert_eq!(choices, [Choice::Device("eth0".into()), Choice::Node(1), Choice::Ignore]);
    }

    #[test]
    fn what_is_wrong_is_named_with_file_line_and_key() {
        for (text, expected) in [
            ("\nintervall_s = 5\n", "x.toml: line 2: unknown field `intervall_s`, expected"),
            ("[[workload]]\nprogramme = \"a\"\n", "x.toml: line 2: unknown field `programme`, expected"),
            ("interval_s = 0", "x.toml: line 1: interval_s = 0: must be 1 to 3600"),
            ("interval_s = 1.5", "x.toml: line 1: invalid type"),
            ("memory = \"pin\"", "x.toml: line 1: unknown variant `pin`"),
            ("libraries = [\"*\"]", "line 1: libraries = \"*\": must be the name of a library"),
            ("libraries = [\"libc.so\"]", "libraries = \"libc.so\": must be"),
            ("[[workload]]\nnode = 1", "workload = [...]: must be given a program or a cgroup"),
            ("[[workload]]\nprogram = \"a\"", "must be given one of device, node and ignore"),
            ("[[workload]]\nprogram = \"a\"\nnode = 1\nignore = true", "must be given one of"),
            (
                "[[workload]]\nprogram = \"a\"\nignore = false",
                "line 3: workload.ignore = false: must be true",
            ),
            ("[[workload]]\nprogram = \"/bin/a\"\nnode = 1", "must be the file name of a program"),
            ("[[workload]]\ncgroup = \"/a/../b\"\nnode = 1", "must be the path of a control group"),
            ("[[workload]]\nprogram = \"a\\u001b\"\nnode = 1", "workload.program = \"a\\u{1b}\""),
            ("[[workload]]\nprogram = \"a\"\nnode = 1024", "workload.node = 1024: must be 0 to 1023"),
            ("x", "x.toml: line 1: "),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn libraries_are_known_by_their_file_names() {
        let Rules { libraries, .. } = Rules::default();
        for yes in
            ["libibverbs.so", "libibverbs.so.1", "libibverbs.so.1.14.39.0", "librte_eal.so.24", "libvma.so"]
        {
            assert!(libraries.has(yes), "{yes}");
        }
        for no in [
            "libibverbsx.so",
            "libibverbs",
            "xlibibverbs.so",
            "librte_eal.a",
            "libibverbs.sox",
            "libvmalloc.so",
            "",
        ] {
            assert!(!libraries.has(no), "{no}");
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_the_default_unless_it_was_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("none.toml");
        assert!(Rules::load(Some(&path)).unwrap_err().to_string().contains("none.toml: No such file"));
        std::fs::write(&path, b"memory = \"move\"\n#\xff").expect("written");
        let error = Rules::load(Some(&path)).unwrap_err().to_string();
        assert!(error.ends_with("none.toml: line 2: not UTF-8"), "{error}");
        std::fs::write(&path, vec![b'#'; (vnuma_settings::SIZE_LIMIT + 1) as usize]).expect("written");
        assert!(Rules::load(Some(&path)).unwrap_err().to_string().contains("longer than"));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|\\n|[\\[\\]=\"#]|workload|program|node|ignore){0,200}") {
            let _ = parse(&text);
        }
    }
}
