//! The cpuset of a control group that a process has for itself.

use super::Undone;
use crate::{
    core::ProcessId,
    files,
    journal::{Change, Value},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use vnuma_model::CpuSet;
use vnuma_process::procfs;

/// Where all distributions of today mount cgroup v2.
const MOUNT: &str = "sys/fs/cgroup";
const CPUS: &str = "cpuset.cpus";
const MEMS: &str = "cpuset.mems";
/// Groups below one that are looked at, and how deep.
const GROUPS: usize = 4096;
const DEPTH: usize = 16;

/// A group that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its path from the root.
    pub path: String,
    /// What its `cpuset.cpus` and `cpuset.mems` have.
    pub cpus: String,
    /// The same of memory.
    pub mems: String,
}

fn directory(root: &Path, path: &str) -> Option<PathBuf> {
    let plain = path.starts_with('/') && !path.split('/').any(|part| part == ".." || part == ".");
    plain.then(|| root.join(MOUNT).join(path.trim_start_matches('/')))
}

/// The group of a process, if confining the group confines the process and nothing else, and can be undone: the process is
/// alone in it, it has a cpuset with CPUs of its own, and no thread has an affinity of its own. Before Linux 6.2 a cpuset that changes takes that
/// from it.
pub fn of_process(root: &Path, id: ProcessId, allowed: &CpuSet, online: &CpuSet) -> Result<Group, String> {
    let text = files::text(&root.join(format!("proc/{}/cgroup", id.pid))).unwrap_or_default();
    let path = procfs::cgroup_path(&text).ok_or("cgroup v2 is not in use")?;
    if path == "/" {
        return Err("it is in the root of the control groups".to_owned());
    }
    let directory = directory(root, path).ok_or("its control group cannot be seen from here")?;
    let read = |file: &str| files::text(&directory.join(file));
    let cpus = read(CPUS).ok_or_else(|| format!("{path} has no cpuset"))?;
    // While there are processes in a group the kernel refuses to empty it again (ENOSPC).
    if cpus.is_empty() {
        return Err(format!("{path} has an empty {CPUS}, which it could not be given back"));
    }
    let mems = read(MEMS).unwrap_or_default();
    if read("cgroup.type").is_some_and(|kind| kind != "domain") {
        return Err(format!("{path} is threaded"));
    }
    if !is_alone(root, path, id.pid) {
        return Err(format!("others are in {path}"));
    }
    let effective: CpuSet =
        read("cpuset.cpus.effective").and_then(|list| list.parse().ok()).unwrap_or_default();
    let all_equal = procfs::threads(id.pid).is_ok_and(|threads| {
        let mut affinities = threads.into_iter().filter_map(|tid| procfs::read_affinity(tid).ok());
        affinities.all(|found| effective.agrees(&found, online))
    });
    if !all_equal || !effective.agrees(allowed, online) {
        return Err("its threads have affinities".to_owned());
    }
    Ok(Group { path: path.to_owned(), cpus, mems })
}

/// Is a process alone in a group and in those below it?
pub fn is_alone(root: &Path, path: &str, pid: i32) -> bool {
    let Some(top) = directory(root, path) else { return false };
    let (mut left, mut seen) = (vec![(top, 0)], 0);
    while let Some((directory, depth)) = left.pop() {
        let Some(members) = files::text(&directory.join("cgroup.procs")) else { return false };
        seen += 1;
        // A process of another PID namespace is 0.
        if members.lines().any(|line| line.trim().parse() != Ok(pid)) || seen > GROUPS || depth > DEPTH {
            return false;
        }
        for name in files::names(&directory) {
            let child = directory.join(name);
            if child.is_dir() {
                left.push((child, depth + 1));
            }
        }
    }
    true
}

/// Does a group still have these CPUs?
pub fn has(root: &Path, path: &str, cpus: &str) -> bool {
    let found = directory(root, path).and_then(|directory| files::text(&directory.join(CPUS)));
    // A group without the file is one that is gone.
    found.is_none_or(|found| same(&found, cpus))
}

fn same(found: &str, set: &str) -> bool {
    match (found.parse::<CpuSet>(), set.parse::<CpuSet>()) {
        (Ok(found), Ok(set)) => found == set,
        _ => found == set,
    }
}

fn write(path: &Path, value: &str) -> Result<(), String> {
    fs::write(path, format!("{value}\n")).map_err(|error| format!("{}: {error}", path.display()))
}

/// Confines a group as the change says, which is in the journal.
pub fn confine(root: &Path, change: &Change) -> Result<(), String> {
    let Change::Group { path, cpus, mems, .. } = change else { return Ok(()) };
    let directory = directory(root, path).ok_or("no path of a group")?;
    write(&directory.join(CPUS), &cpus.set)?;
    match mems {
        Some(mems) => write(&directory.join(MEMS), &mems.set),
        None => Ok(()),
    }
}

/// Gives a group back what it had.
pub fn release(root: &Path, path: &str, cpus: &Value, mems: Option<&Value>) -> Result<Undone, String> {
    let directory = directory(root, path).ok_or("no path of a group")?;
    if !directory.exists() {
        return Ok(Undone::Left(format!("control group {path} is gone")));
    }
    let mut others = false;
    // Memory first: with fewer nodes than before nothing could be allocated elsewhere meanwhile.
    for (file, value) in mems.map(|mems| (MEMS, mems)).into_iter().chain([(CPUS, cpus)]) {
        let file = directory.join(file);
        let found = match fs::read_to_string(&file) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(format!("{}: {error}", file.display())),
        };
        if same(found.trim(), &value.set) {
            write(&file, &value.former)?;
        } else if !same(found.trim(), &value.former) {
            others = true;
        }
    }
    let line = format!("control group {path}");
    Ok(match others {
        true => Undone::Left(format!("{line}: somebody else has set its cpuset")),
        false => Undone::Restored(format!("{line} has its cpuset again")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let group = root.path().join(MOUNT).join("a.slice/b.service");
        fs::create_dir_all(&group).expect("made");
        for (file, content) in
            [("cgroup.procs", "7\n"), (CPUS, "0-7\n"), (MEMS, "0-1\n"), ("cgroup.type", "domain\n")]
        {
            fs::write(group.join(file), content).expect("written");
        }
        root
    }

    fn read(root: &Path, file: &str) -> String {
        fs::read_to_string(root.join(MOUNT).join("a.slice/b.service").join(file)).expect("there")
    }

    fn change() -> Change {
        let value = |former: &str, set: &str| Value { former: former.to_owned(), set: set.to_owned() };
        let path = "/a.slice/b.service".to_owned();
        Change::Group { pid: 7, started: 1, path, cpus: value("0-7", "4-7"), mems: Some(value("0-1", "1")) }
    }

    fn undo(root: &Path) -> Result<Undone, String> {
        let Change::Group { path, cpus, mems, .. } = change() else { unreachable!() };
        release(root, &path, &cpus, mems.as_ref())
    }

    #[test]
    fn a_group_is_confined_and_given_back_what_it_had() {
        let root = tree();
        confine(root.path(), &change()).expect("confined");
        assert_eq!((read(root.path(), CPUS), read(root.path(), MEMS)), ("4-7\n".into(), "1\n".into()));
        assert!(
            has(root.path(), "/a.slice/b.service", "4-7") && !has(root.path(), "/a.slice/b.service", "4")
        );
        // As the kernel shows it.
        fs::write(root.path().join(MOUNT).join("a.slice/b.service").join(CPUS), "4,5-7\n").expect("written");
        assert!(matches!(undo(root.path()), Ok(Undone::Restored(_))));
        assert_eq!((read(root.path(), CPUS), read(root.path(), MEMS)), ("0-7\n".into(), "0-1\n".into()));
        assert!(matches!(undo(root.path()), Ok(Undone::Restored(_))), "twice is once");
    }

    #[test]
    fn what_somebody_else_has_set_stays() {
        let root = tree();
        confine(root.path(), &change()).expect("confined");
        fs::write(root.path().join(MOUNT).join("a.slice/b.service").join(CPUS), "0\n").expect("written");
        assert!(matches!(undo(root.path()), Ok(Undone::Left(_))));
        assert_eq!((read(root.path(), CPUS), read(root.path(), MEMS)), ("0\n".into(), "0-1\n".into()));
        fs::remove_dir_all(root.path().join(MOUNT).join("a.slice")).expect("removed");
        assert!(matches!(undo(root.path()), Ok(Undone::Left(_))));
    }

    #[test]
    fn only_a_process_that_is_alone_has_a_group_for_itself() {
        let root = tree();
        let is = |pid| is_alone(root.path(), "/a.slice/b.service", pid);
        assert!(is(7) && !is(8));
        assert!(!is_alone(root.path(), "/a.slice/../b", 7) && !is_alone(root.path(), "/none", 7));
        let below = root.path().join(MOUNT).join("a.slice/b.service/c");
        fs::create_dir(&below).expect("made");
        fs::write(below.join("cgroup.procs"), "9\n").expect("written");
        assert!(!is(7), "a group below has another");
    }
}
