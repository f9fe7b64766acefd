//! What asks the kernel for nodes: the functions and macros of a kernel's source that call `cpu_to_node()` and its like, against a list
//! with a verdict for each. A kernel that has others may keep the node of a CPU where the driver does not look for it.

mod source;

use crate::steps::workspace;
use anyhow::{Context, Result, bail, ensure};
use source::{Calls, HELPERS};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const DRIVER: &str = "guest/driver";
const LIST: &str = "guest/driver/kernel-users.txt";
/// The words of the list, which says what they mean.
const VERDICTS: [&str; 6] = ["absent", "boot", "keeps", "places", "reads", "updated"];
/// Kernels that the list is for, and the releases of Debian that have their sources.
pub const KERNELS: [(&str, &str); 3] = [("6.1", "bookworm"), ("6.12", "trixie"), ("7.3", "trixie-backports")];
/// What is read of a source, and its semantic patches.
pub const FOLDERS: &str =
    "arch/x86 block drivers/base fs include/linux io_uring kernel lib mm net/core scripts/coccinelle";

#[derive(clap::Args)]
pub struct Arguments {
    /// A kernel's source: its Makefile, arch/x86, block, drivers/base, fs, include/linux, io_uring, kernel, lib, mm, net/core
    tree: PathBuf,
    /// Fail unless guest/driver/kernel-users.txt lists for this kernel what is found, and nothing else
    #[arg(long)]
    check: bool,
    /// Each as a JSON object on a line, with its verdict if it is listed
    #[arg(long, conflicts_with = "check")]
    json: bool,
}

/// A function or macro by its file and name.
type User = (String, String);

/// A line of the list.
struct Entry {
    user: User,
    verdict: String,
    kernels: Vec<String>,
    reason: String,
}

impl Entry {
    /// The kernel as it is listed: `6.1?` if only some of Debian's versions of it have this caller.
    fn of(&self, kernel: &str) -> Option<&str> {
        self.kernels.iter().map(String::as_str).find(|listed| listed.trim_end_matches('?') == kernel)
    }
}

/// `kernel/sys.c getcpu reads 6.1,6.12,7.3 the system call`, and comments.
fn entries(list: &str) -> Result<Vec<Entry>> {
    let lines = list.lines().enumerate().filter(|(_, line)| !line.starts_with('#') && !line.is_empty());
    let entry = |(at, line): (usize, &str)| {
        let here = || format!("{LIST}:{}", at + 1);
        let parts: Vec<&str> = line.splitn(5, ' ').collect();
        let [file, function, verdict, kernels, reason] = parts[..] else {
            bail!("{}: not FILE FUNCTION VERDICT KERNELS REASON", here());
        };
        ensure!(VERDICTS.contains(&verdict), "{}: `{verdict}` is none of {}", here(), VERDICTS.join(", "));
        let kernels: Vec<String> = kernels.split(',').map(str::to_owned).collect();
        for kernel in &kernels {
            let known = KERNELS.iter().any(|(known, _)| *known == kernel.trim_end_matches('?'));
            ensure!(known, "{}: no kernel `{kernel}`", here());
        }
        ensure!(!reason.trim().is_empty(), "{}: no reason", here());
        let user = (file.to_owned(), function.to_owned());
        Ok(Entry { user, verdict: verdict.to_owned(), kernels, reason: reason.to_owned() })
    };
    lines.map(entry).collect()
}

/// What the list says of the driver and its manual that is not so.
fn unproven(entries: &[Entry], readme: &str, is_driver_file: impl Fn(&str) -> bool) -> Vec<String> {
    let quoted =
        |reason: &str| reason.strip_prefix('"')?.split_once('"').map(|(text, _)| readme.contains(text));
    let wrong = entries.iter().filter(|entry| match entry.verdict.as_str() {
        "keeps" => quoted(&entry.reason) != Some(true),
        "updated" => entry.reason.split_once(':').is_none_or(|(file, _)| !is_driver_file(file)),
        _ => false,
    });
    let show = |Entry { user: (file, function), verdict, reason, .. }: &Entry| {
        let wanted = if verdict == "keeps" { "words of README.md in quotes" } else { "a file, FILE.c:" };
        format!("{file} {function}: `{reason}` does not begin with {wanted} that {DRIVER} has")
    };
    wrong.map(show).collect()
}

/// How the list differs from what is found in a kernel.
fn differences(entries: &[Entry], kernel: &str, found: &BTreeSet<&User>) -> Vec<String> {
    let mut listed = BTreeSet::new();
    let mut wrong = Vec::new();
    for entry in entries {
        let Some(as_listed) = entry.of(kernel) else { continue };
        let (file, function) = &entry.user;
        if !listed.insert(&entry.user) {
            wrong.push(format!("{file} {function} is listed twice for {kernel}"));
        }
        if as_listed == kernel && !found.contains(&entry.user) {
            wrong.push(format!("{file} {function} is listed for {kernel}, which has no such caller"));
        }
    }
    let unlisted = found.iter().filter(|user| !listed.contains(*user));
    wrong.extend(unlisted.map(|(file, function)| {
        format!("{file} {function} of {kernel} is not listed: read it, and give it a verdict")
    }));
    wrong
}

/// `7.3`, from the Makefile.
fn version(makefile: &str) -> Result<String> {
    let number = |name: &str| {
        let value =
            |line: &str| line.strip_prefix(name)?.trim().strip_prefix('=').map(str::trim).map(str::to_owned);
        makefile.lines().find_map(value).with_context(|| format!("Makefile: no {name}"))
    };
    Ok(format!("{}.{}", number("VERSION")?, number("PATCHLEVEL")?))
}

/// Adds what a folder and those in it have.
fn add_callers(tree: &Path, folder: &Path, found: &mut BTreeMap<User, Calls>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            add_callers(tree, &path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "c" || extension == "h") {
            let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
            let text = String::from_utf8_lossy(&bytes);
            // Few have one, and to look for it is much faster than to read them as words.
            if HELPERS.iter().any(|helper| text.contains(helper)) {
                let file = path.strip_prefix(tree)?.to_string_lossy().into_owned();
                let callers = source::callers(&text).into_iter();
                found.extend(callers.map(|(function, calls)| ((file.clone(), function), calls)));
            }
        }
    }
    Ok(())
}

fn show(user: &User, calls: &Calls, verdict: Option<&str>, json: bool) -> String {
    let (file, function) = user;
    if json {
        let object =
            serde_json::json!({"file": file, "function": function, "calls": calls, "verdict": verdict});
        return object.to_string();
    }
    let calls: Vec<String> = calls.iter().map(|(helper, count)| format!("{helper} {count}")).collect();
    format!("{file} {function}: {}", calls.join(", "))
}

/// How many of a kernel have which verdict.
fn summary(entries: &[Entry], kernel: &str, found: &BTreeMap<User, Calls>) -> String {
    let ours: Vec<&Entry> = entries
        .iter()
        .filter(|entry| entry.of(kernel).is_some() && found.contains_key(&entry.user))
        .collect();
    let count = |verdict: &str| ours.iter().filter(|entry| entry.verdict == verdict).count();
    VERDICTS.map(|verdict| format!("{verdict} {}", count(verdict))).join(", ")
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let tree = &arguments.tree;
    let makefile = tree.join("Makefile");
    let makefile = fs::read_to_string(&makefile).with_context(|| makefile.display().to_string())?;
    let kernel = version(&makefile)?;
    let mut found = BTreeMap::new();
    for folder in FOLDERS.split(' ') {
        add_callers(tree, &tree.join(folder), &mut found)?;
    }
    let entries = entries(&fs::read_to_string(workspace().join(LIST)).context(LIST)?)?;
    if !arguments.check {
        for (user, calls) in &found {
            let ours = |entry: &&Entry| entry.user == *user && entry.of(&kernel).is_some();
            let verdict = entries.iter().find(ours).map(|entry| entry.verdict.as_str());
            println!("{}", show(user, calls, verdict, arguments.json));
        }
        return Ok(());
    }
    ensure!(KERNELS.iter().any(|(known, _)| *known == kernel), "{LIST} is not for kernel {kernel}");
    let driver = workspace().join(DRIVER);
    let readme = fs::read_to_string(driver.join("README.md")).context("README.md of the driver")?;
    let mut wrong = differences(&entries, &kernel, &found.keys().collect());
    wrong.extend(unproven(&entries, &readme, |file| driver.join(file).is_file()));
    ensure!(wrong.is_empty(), "{LIST} and kernel {kernel} differ:\n{}", wrong.join("\n"));
    println!("{} functions of {kernel}: {}", found.len(), summary(&entries, &kernel, &found));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "# comment\n\na.c one reads 6.1,7.3 at once\na.c two keeps 7.3 \"stays\": why\n";

    fn user(function: &str) -> User {
        ("a.c".to_owned(), function.to_owned())
    }

    #[test]
    fn the_list_is_in_order_and_what_it_claims_of_the_driver_is_so() {
        let list = fs::read_to_string(workspace().join(LIST)).unwrap();
        let driver = workspace().join(DRIVER);
        let readme = fs::read_to_string(driver.join("README.md")).unwrap();
        let entries = entries(&list).unwrap();
        assert!(entries.len() > 200);
        assert!(entries.is_sorted_by(|one, next| one.user <= next.user));
        assert_eq!(unproven(&entries, &readme, |file| driver.join(file).is_file()), [""; 0]);
        let long: Vec<&str> = list.lines().filter(|line| line.chars().count() > 160).collect();
        assert_eq!(long, [""; 0]);
    }

    #[test]
    fn a_verdict_that_keeps_or_is_updated_names_where_that_is_said_or_done() {
        let entries = entries(SAMPLE).unwrap();
        assert_eq!(unproven(&entries, "it stays", |_| false), [""; 0]);
        assert_eq!(unproven(&entries, "it goes", |_| false).len(), 1);
        let updated = super::entries("a.c one updated 7.3 maps.c: the map\n").unwrap();
        assert_eq!(unproven(&updated, "", |file| file == "maps.c"), [""; 0]);
        assert_eq!(unproven(&updated, "", |_| false).len(), 1);
    }

    #[test]
    fn what_is_not_listed_listed_twice_or_gone_is_named() {
        let entries = entries(SAMPLE).unwrap();
        let (one, two, three) = (user("one"), user("two"), user("three"));
        assert_eq!(differences(&entries, "7.3", &[&one, &two].into()), [""; 0]);
        assert_eq!(differences(&entries, "6.1", &[&one].into()), [""; 0]);
        let wrong = differences(&entries, "7.3", &[&one, &three].into());
        assert!(wrong[0].starts_with("a.c two is listed for 7.3, which has no such"), "{wrong:?}");
        assert!(wrong[1].starts_with("a.c three of 7.3 is not listed"), "{wrong:?}");
        let twice = super::entries(&format!("{SAMPLE}a.c one boot 6.1 again\n")).unwrap();
        assert_eq!(differences(&twice, "6.1", &[&one].into()), ["a.c one is listed twice for 6.1"]);
    }

    #[test]
    fn some_versions_of_a_kernel_may_lack_what_is_marked() {
        let entries = entries("a.c one boot 6.1?,7.3 memory\n").unwrap();
        let one = user("one");
        assert_eq!(differences(&entries, "6.1", &[&one].into()), [""; 0]);
        assert_eq!(differences(&entries, "6.1", &BTreeSet::new()), [""; 0]);
        assert_eq!(differences(&entries, "7.3", &BTreeSet::new()).len(), 1);
    }

    #[test]
    fn lines_that_are_no_entries_are_refused_with_their_number() {
        let refused = |line: &str| entries(&format!("# comment\n{line}\n")).err().unwrap().to_string();
        assert!(refused("a.c one reads 6.1").starts_with("guest/driver/kernel-users.txt:2: not FILE"));
        assert!(refused("a.c one looks 6.1 why").contains("`looks` is none of absent, boot"));
        assert!(refused("a.c one reads 6.1,6.2 why").contains("no kernel `6.2`"));
    }

    #[test]
    fn a_tree_is_read_with_its_folders_and_version() {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join("kernel/sched");
        fs::create_dir_all(&folder).unwrap();
        let text = b"/* caf\xe9 */\nint one(void)\n{\n\treturn numa_node_id();\n}\n";
        fs::write(folder.join("a.c"), text).unwrap();
        fs::write(folder.join("a.txt"), text).unwrap();
        let mut found = BTreeMap::new();
        add_callers(tree.path(), &tree.path().join("kernel"), &mut found).unwrap();
        let lines: Vec<String> = found.iter().map(|(user, calls)| show(user, calls, None, false)).collect();
        assert_eq!(lines, ["kernel/sched/a.c one: numa_node_id 1"]);
        assert_eq!(version("# SPDX\nVERSION = 7\nPATCHLEVEL = 3\n").unwrap(), "7.3");
    }
}
