//! Two states of a kernel: what differs, and the written list of what may.

use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};

/// What may differ, and why.
const LIST: &str = include_str!("keeps.txt");
/// The value of what only the other one has.
const ABSENT: &str = "absent";

/// A difference between a kernel that booted with a topology and one that came to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    /// Names and indexes down to the value, with `/` in between.
    pub path: String,
    /// What it was after a boot.
    pub booted: String,
    /// What it is after moves.
    pub moved: String,
}

/// When an entry of the list counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Always,
    /// A node has no CPUs.
    Bare,
    /// The value is the one from before all moves.
    Kept,
}

/// What is compared.
pub struct Case<'a> {
    /// A kernel that booted with a topology.
    pub booted: &'a Json,
    /// One that came to it.
    pub moved: &'a Json,
    /// The same before all moves.
    pub before: &'a Json,
}

/// An entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    kernels: Vec<String>,
    when: When,
    path: Vec<String>,
    reason: String,
}

/// The list of what may differ.
pub struct Known {
    entries: Vec<Entry>,
    /// Those that were seen to differ, by index.
    seen: BTreeSet<usize>,
}

impl Known {
    /// The one that is kept beside this program.
    pub fn read() -> Result<Self> {
        Self::parse(LIST)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut entries: Vec<Entry> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            if line.starts_with(' ') {
                let last =
                    entries.last_mut().with_context(|| format!("the list: \"{line}\" continues nothing"))?;
                last.reason.push_str(&format!(
                    "{}{}",
                    if last.reason.is_empty() { "" } else { " " },
                    line.trim()
                ));
                continue;
            }
            let fields: Vec<&str> = line.split('|').map(str::trim).collect();
            let [kernels, when, path] = fields[..] else {
                anyhow::bail!("the list: \"{line}\": expected KERNELS | WHEN | PATH")
            };
            let when = match when {
                "always" => When::Always,
                "bare" => When::Bare,
                "kept" => When::Kept,
                _ => anyhow::bail!("the list: \"{when}\": expected always, bare or kept"),
            };
            entries.push(Entry {
                kernels: kernels.split(' ').map(str::to_owned).collect(),
                when,
                path: path.split('/').map(str::to_owned).collect(),
                reason: String::new(),
            });
        }
        let bad = entries.iter().find(|entry| entry.reason.is_empty());
        ensure!(bad.is_none(), "the list: no reason for {:?}", bad.map(|entry| entry.path.join("/")));
        Ok(Self { entries, seen: BTreeSet::new() })
    }

    /// Differences that are not in the list. Entries that allow others are remembered.
    pub fn unknown(&mut self, case: &Case<'_>) -> Result<(usize, Vec<Difference>)> {
        let (kernel, bare) = (kernel_of(case.booted)?, has_bare_node(case.booted));
        let before = flat(case.before, true);
        let mut unknown = differences(case.booted, case.moved);
        let all = unknown.len();
        unknown.retain(|one| {
            let kept = before.get(&without_bare(&one.path)).map_or(ABSENT, String::as_str) == one.moved;
            !self.allows(&kernel, bare, kept, &one.path)
        });
        Ok((all, unknown))
    }

    fn allows(&mut self, kernel: &str, bare: bool, kept: bool, path: &str) -> bool {
        let parts: Vec<&str> = path.split('/').collect();
        let fits = |entry: &Entry| {
            let now = match entry.when {
                When::Always => true,
                When::Bare => bare,
                When::Kept => kept,
            };
            now && entry.kernels.iter().any(|one| one == kernel) && matches(&entry.path, &parts)
        };
        let found: Vec<usize> = (0..self.entries.len()).filter(|index| fits(&self.entries[*index])).collect();
        self.seen.extend(&found);
        !found.is_empty()
    }

    /// Entries for a kernel that were not seen to differ.
    pub fn unused(&self, kernel: &str) -> Vec<String> {
        let unused = self.entries.iter().enumerate().filter(|(index, entry)| {
            !self.seen.contains(index) && entry.kernels.iter().any(|one| one == kernel)
        });
        unused.map(|(_, entry)| entry.path.join("/")).collect()
    }

    /// What was seen to differ, with its reason.
    pub fn used(&self) -> Vec<String> {
        let show = |index: &usize| {
            self.entries.get(*index).map(|one| format!("{}: {}", one.path.join("/"), one.reason))
        };
        self.seen.iter().filter_map(show).collect()
    }
}

/// `*` is any part, `**` at the end any parts.
fn matches(pattern: &[String], parts: &[&str]) -> bool {
    match (pattern, parts) {
        ([last], _) if last == "**" => true,
        ([first, pattern @ ..], [part, parts @ ..]) => fits(first, part) && matches(pattern, parts),
        ([], []) => true,
        _ => false,
    }
}

/// A `*` within a part stands for any characters.
fn fits(pattern: &str, part: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == part,
        Some((before, after)) => {
            part.len() >= before.len() + after.len() && part.starts_with(before) && part.ends_with(after)
        }
    }
}

/// A node has the same name, whether or not it has CPUs.
fn without_bare(path: &str) -> String {
    path.replace(" (bare)", "")
}

/// All values, by their paths.
fn flat(state: &Json, without: bool) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    flatten(state, String::new(), &mut all);
    if without { all.into_iter().map(|(path, value)| (without_bare(&path), value)).collect() } else { all }
}

/// Each value that is not the same in both.
pub fn differences(booted: &Json, moved: &Json) -> Vec<Difference> {
    let (before, after) = (flat(booted, false), flat(moved, false));
    let paths: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let shown = |values: &BTreeMap<String, String>, path: &String| {
        values.get(path).cloned().unwrap_or_else(|| ABSENT.to_owned())
    };
    let one = |path: &String| Difference {
        path: path.clone(),
        booted: shown(&before, path),
        moved: shown(&after, path),
    };
    paths.into_iter().map(one).filter(|difference| difference.booted != difference.moved).collect()
}

fn flatten(value: &Json, path: String, into: &mut BTreeMap<String, String>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
    match value {
        Json::Object(fields) => {
            fields.iter().for_each(|(name, field)| flatten(field, below(name), into));
        }
        Json::Array(list) => {
            list.iter().enumerate().for_each(|(index, one)| flatten(one, below(&index.to_string()), into));
        }
        plain => {
            into.insert(path, plain.to_string());
        }
    }
}

/// Whether a node has no CPUs.
pub fn has_bare_node(state: &Json) -> bool {
    state["node"].as_object().is_some_and(|nodes| nodes.keys().any(|name| name.ends_with("(bare)")))
}

/// The name of the kernel in the list, such as `6.12`.
pub fn kernel_of(state: &Json) -> Result<String> {
    let release = state["release"].as_str().context("no \"release\" in the state of a kernel")?;
    let mut parts = release.splitn(3, '.');
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
        anyhow::bail!("release \"{release}\"")
    };
    let minor = minor.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    Ok(format!("{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TEXT: &str = "# a comment\n6.1 6.12 | always | cpu/*/timers/**\n  made at boot,\n  and kept\n\
                        7.3 | bare | node/* (bare)/masks/0\n  there are more\n";

    #[test]
    fn each_value_that_differs_is_named() {
        let booted = json!({ "cpu": { "0": { "node": 1, "sd": [{ "span": "0-1" }] } }, "same": null });
        let moved = json!({ "cpu": { "0": { "node": 2, "sd": [{ "span": "0-1" }, { "span": "0-3" }] } }, "same": null });
        let found = differences(&booted, &moved);
        let shown: Vec<_> =
            found.iter().map(|one| format!("{} {} {}", one.path, one.booted, one.moved)).collect();
        assert_eq!(shown, ["cpu/0/node 1 2", "cpu/0/sd/1/span absent \"0-3\""]);
        assert!(differences(&booted, &booted).is_empty());
    }

    #[test]
    fn the_list_is_by_kernel_and_topology() {
        let mut known = Known::parse(TEXT).unwrap();
        assert!(known.allows("6.12", false, false, "cpu/3/timers/0/node"));
        assert!(
            !known.allows("7.3", false, false, "cpu/3/timers/0/node")
                && !known.allows("6.1", false, false, "cpu/3/timer")
        );
        assert_eq!(known.used(), ["cpu/*/timers/**: made at boot, and kept"]);
        assert!(
            !known.allows("7.3", false, false, "node/1 (bare)/masks/0")
                && !known.allows("7.3", true, false, "node/1/masks/0")
        );
        assert_eq!(known.unused("7.3"), ["node/* (bare)/masks/0"]);
        assert!(known.allows("7.3", true, false, "node/1 (bare)/masks/0") && known.unused("7.3").is_empty());
    }

    #[test]
    fn what_is_kept_is_what_it_was_before() {
        let mut known = Known::parse("6.1 | kept | node/*/kswapd\n  bound when it starts\n").unwrap();
        let state =
            |node: &str, cpus: &str| json!({ "release": "6.1.0", "node": { node: { "kswapd": cpus } } });
        let (booted, before) = (state("1 (bare)", ""), state("1", "2-3"));
        let mut unknown = |moved: &str| {
            let case = Case { booted: &booted, moved: &state("1 (bare)", moved), before: &before };
            known.unknown(&case).unwrap().1.len()
        };
        assert_eq!((unknown("2-3"), unknown("0-3"), unknown("")), (0, 1, 0));
    }

    #[test]
    fn the_list_itself_is_whole() {
        assert!(!Known::read().unwrap().entries.is_empty());
        for bad in ["6.1 | always\n  why", "6.1 | never | a\n  why", "6.1 | always | a", "  why"] {
            assert!(Known::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_state_says_its_kernel_and_whether_a_node_is_bare() {
        assert_eq!(kernel_of(&json!({ "release": "6.12.117+deb13-amd64" })).unwrap(), "6.12");
        assert_eq!(kernel_of(&json!({ "release": "7.3-rc1" })).unwrap(), "7.3");
        assert!(kernel_of(&json!({})).is_err());
        assert!(has_bare_node(&json!({ "node": { "0": {}, "1 (bare)": {} } })));
        assert!(!has_bare_node(&json!({ "node": { "0": {} } })));
    }
}
