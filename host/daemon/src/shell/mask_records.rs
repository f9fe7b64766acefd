//! The record of masks that policies have set by affinities: for each process a file beside the records of channels, written before a mask
//! is set, so that the operators' masks can be given back whatever becomes of vnumad.

use crate::core::{event::MaskOrder, sanitize};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};
use tracing::warn;
use vnuma_model::CpuSet;
use vnuma_process::{ActError, own, pin_thread_if, procfs};

/// Longest record, in bytes: one of 8192 threads whose masks have all gaps that there can be is shorter.
const SIZE_LIMIT: u64 = 256 << 20;

/// Layout of a record; another one is not understood.
const VERSION: u32 = 1;

/// What becomes of a record that is not understood.
const STAYS: &str = "the record stays, for the vnumad that has written it";

/// A record.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MaskRecord {
    version: u32,
    /// Start of the process, in clock ticks since boot: its number may have been given to another one.
    started: u64,
    threads: BTreeMap<i32, Kept>,
}

/// How many masks of policies are kept for a thread.
const KEPT: usize = 3;

/// What is recorded of a thread.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    /// Its operator's mask.
    operator: CpuSet,
    /// Masks that a policy has set or was about to set. If the thread has another one, others have set that.
    set: Vec<CpuSet>,
    /// The thread runs no vCPU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    other: bool,
}

impl Kept {
    /// Its operator's mask.
    pub(super) fn operator(&self) -> &CpuSet {
        &self.operator
    }

    /// The mask that a policy has set last.
    pub(super) fn last(&self) -> Option<&CpuSet> {
        self.set.get(1)
    }

    /// Does it run no vCPU?
    pub(super) fn is_other(&self) -> bool {
        self.other
    }

    /// For a thread that was made by this one: the mask that it has then, and the one that it should have had.
    pub(super) fn inherited(&self) -> Option<(CpuSet, CpuSet)> {
        let given = self.last().filter(|given| self.other && **given != self.operator)?;
        Some((given.clone(), self.operator.clone()))
    }

    /// Is the mask that was found one that a policy has set?
    pub(super) fn is_ours(&self, found: &CpuSet, online: &CpuSet) -> bool {
        self.set.iter().any(|set| still(set, found, online))
    }
}

/// Refuses the text of a record of another version, whatever its fields are.
pub(super) fn check_version(text: &str, version: u32) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let head: Head = serde_json::from_str(text).map_err(|error| sanitize(&error.to_string()))?;
    if head.version == version {
        Ok(())
    } else {
        Err(format!("version = {}: must be {version}", head.version))
    }
}

/// Understands the text of a record, or says what is wrong with it.
pub fn parse_masks(text: &str) -> Result<MaskRecord, String> {
    check_version(text, VERSION)?;
    let record: MaskRecord = serde_json::from_str(text).map_err(|error| sanitize(&error.to_string()))?;
    let bad = |kept: &Kept| kept.operator.is_empty() || kept.set.iter().any(CpuSet::is_empty);
    if let Some((tid, _)) = record.threads.iter().find(|(tid, kept)| **tid <= 0 || bad(kept)) {
        return Err(format!("threads: {tid}: neither the number of a thread nor masks that one can have"));
    }
    Ok(record)
}

#[derive(Debug)]
struct Process {
    pidfd: Option<Arc<OwnedFd>>,
    started: u64,
    threads: BTreeMap<i32, Kept>,
}

/// Masks of all processes in which policies have set any.
#[derive(Debug)]
pub(super) struct Masks {
    directory: PathBuf,
    known: BTreeMap<i32, Process>,
    /// vCPUs, by process, that their VMs' manager pins. vnumad leaves their masks alone.
    pinned: BTreeMap<i32, BTreeSet<i32>>,
}

impl Masks {
    /// Records in `directory`.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory, known: BTreeMap::new(), pinned: BTreeMap::new() }
    }

    fn path(&self, pid: i32) -> PathBuf {
        self.directory.join(format!("{pid}.masks"))
    }

    /// Removes records of processes that have ended.
    pub(super) fn tidy(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.strip_suffix(".masks")?.parse::<i32>().ok());
            if let Some(pid) = pid.filter(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
                self.remove(pid);
            }
        }
    }

    /// Records that these masks are about to be set. `other`: the threads run no vCPUs.
    pub(super) fn note(
        &mut self,
        pid: i32,
        pidfd: &Arc<OwnedFd>,
        orders: &[MaskOrder],
        other: bool,
    ) -> Result<(), String> {
        let started = procfs::read_start_time(pid, pid).map_err(|error| error.to_string())?;
        let fresh = || Process { pidfd: None, started, threads: BTreeMap::new() };
        // Those of an earlier vnumad were given back before. What is left has masks that are not known.
        if !self.known.contains_key(&pid) && fs::symlink_metadata(self.path(pid)).is_ok() {
            let there = "there is a record of masks that were not given back";
            return Err(format!("{}: {there}", self.path(pid).display()));
        }
        let process = self.known.entry(pid).or_insert_with(fresh);
        if process.started != started {
            *process = fresh();
        }
        process.pidfd = Some(Arc::clone(pidfd));
        let mut changed = false;
        for MaskOrder { tid, expected, operator, cpus, .. } in orders {
            let Some(cpus) = cpus else { continue };
            let mut set = vec![expected.clone(), cpus.clone()];
            let before = process.threads.remove(tid).map(|kept| kept.set).unwrap_or_default();
            set.extend(before.into_iter().filter(|mask| mask != expected && mask != cpus));
            set.truncate(KEPT);
            process.threads.insert(*tid, Kept { operator: operator.clone(), set, other });
            changed = true;
        }
        if changed {
            self.write(pid).map_err(|error| format!("writing the record of masks: {error}"))
        } else {
            Ok(())
        }
    }

    /// These vCPUs are pinned by their VM's manager.
    pub(super) fn leave(&mut self, pid: i32, tids: impl IntoIterator<Item = i32>) {
        let mut tids = tids.into_iter().peekable();
        if tids.peek().is_some() {
            self.pinned.entry(pid).or_default().extend(tids);
        }
    }

    /// Does the VM's manager pin any vCPU of this process?
    pub(super) fn is_left(&self, pid: i32) -> bool {
        self.pinned.contains_key(&pid)
    }

    /// What is recorded of a thread.
    pub(super) fn kept(&self, pid: i32, tid: i32) -> Option<&Kept> {
        self.known.get(&pid)?.threads.get(&tid)
    }

    /// All threads of a process of which something is recorded.
    pub(super) fn recorded(&self, pid: i32) -> impl Iterator<Item = (i32, &Kept)> {
        let threads = self.known.get(&pid).map(|process| &process.threads);
        threads.into_iter().flatten().map(|(tid, kept)| (*tid, kept))
    }

    /// All vCPUs that policies have confined: process, thread, and what is recorded.
    pub(super) fn confined(&self) -> Vec<(i32, Arc<OwnedFd>, i32, Kept)> {
        let of = |(&pid, process): (&i32, &Process)| {
            let pidfd = process.pidfd.clone()?;
            let threads = process.threads.iter().filter(|(_, kept)| !kept.other);
            Some(threads.map(|(&tid, kept)| (pid, Arc::clone(&pidfd), tid, kept.clone())).collect::<Vec<_>>())
        };
        self.known.iter().filter_map(of).flatten().collect()
    }

    /// These threads have their operator's masks: nothing is recorded of them any more.
    pub(super) fn forget(&mut self, pid: i32, tids: &[i32]) {
        let Some(process) = self.known.get_mut(&pid) else { return };
        let before = process.threads.len();
        tids.iter().for_each(|tid| drop(process.threads.remove(tid)));
        let (left, changed) = (process.threads.len(), process.threads.len() != before);
        if left == 0 {
            self.forget_process(pid);
        } else if changed && let Err(error) = self.write(pid) {
            warn!(%pid, %error, "the record of masks cannot be written");
        }
    }

    /// The process has ended.
    pub(super) fn process_ended(&mut self, pid: i32) {
        self.pinned.remove(&pid);
        self.forget_process(pid);
    }

    fn forget_process(&mut self, pid: i32) {
        if self.known.remove(&pid).is_some() {
            self.remove(pid);
        }
    }

    /// Gives back the masks of a process, by the record of this vnumad or of an earlier one. Returns how many.
    pub(super) fn restore(
        &mut self,
        pid: i32,
        pidfd: Option<&Arc<OwnedFd>>,
        online: &CpuSet,
    ) -> Result<usize, String> {
        if !self.known.contains_key(&pid) {
            let Some(record) = self.read(pid)? else { return Ok(0) };
            let started = match procfs::read_start_time(pid, pid) {
                Ok(started) => Some(started),
                Err(procfs::ProcError::Gone { .. }) => None,
                // No file is left to open, say: that says nothing of the record.
                Err(error) => return Err(error.to_string()),
            };
            // Of another process with this number.
            if started != Some(record.started) {
                self.remove(pid);
                return Ok(0);
            }
            let process = Process { pidfd: None, started: record.started, threads: record.threads };
            self.known.insert(pid, process);
        }
        let Some(process) = self.known.get_mut(&pid) else { return Ok(0) };
        let Some(pidfd) = pidfd.cloned().or_else(|| process.pidfd.clone()) else {
            return Err(format!("process {pid} has ended"));
        };
        let (mut count, mut done, mut failed) = (0, Vec::new(), None);
        let made: Vec<(CpuSet, CpuSet)> = process.threads.values().filter_map(Kept::inherited).collect();
        let pinned = self.pinned.get(&pid).into_iter().flatten();
        let known: Vec<i32> = process.threads.keys().chain(pinned).copied().collect();
        for (&tid, kept) in &process.threads {
            let set_by_us = |found: &CpuSet| kept.is_ours(found, online);
            match pin_thread_if(pidfd.as_fd(), pid, tid, set_by_us, &kept.operator) {
                Ok(()) => count += 1,
                Err(
                    ActError::MaskChanged { .. } | ActError::ForeignThread { .. } | ActError::Raced { .. },
                ) => {}
                Err(ActError::Exited { .. }) => {
                    self.forget_process(pid);
                    return Ok(count);
                }
                Err(error) => {
                    failed = Some(error);
                    continue;
                }
            }
            done.push(tid);
        }
        count += give_back_inherited(pid, &pidfd, &made, &known, online);
        self.forget(pid, &done);
        failed.map_or(Ok(count), |error| Err(error.to_string()))
    }

    /// Gives back the masks of all processes.
    pub(super) fn restore_all(&mut self, online: &CpuSet) {
        for pid in self.known.keys().copied().collect::<Vec<_>>() {
            if let Err(error) = self.restore(pid, None, online) {
                warn!(%pid, %error, "cannot restore the masks of vCPUs; the next vnumad tries again");
            }
        }
    }

    fn write(&self, pid: i32) -> io::Result<()> {
        let Some(process) = self.known.get(&pid) else { return Ok(()) };
        let record =
            MaskRecord { version: VERSION, started: process.started, threads: process.threads.clone() };
        own::write(&self.path(pid), serde_json::to_string(&record)?.as_bytes())
    }

    /// The record of another vnumad. One that cannot be read or understood stays: it says what the operators' masks are, and a newer
    /// vnumad may have written it.
    fn read(&self, pid: i32) -> Result<Option<MaskRecord>, String> {
        let path = self.path(pid);
        let wrong = |what: String| format!("{}: {what}", path.display());
        let file = match own::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let mut bytes = Vec::new();
        file.take(SIZE_LIMIT).read_to_end(&mut bytes).map_err(|error| wrong(error.to_string()))?;
        let understood = String::from_utf8(bytes).map_err(|error| error.to_string());
        let understood = understood.and_then(|text| parse_masks(&text));
        understood.map(Some).map_err(|what| wrong(format!("{what} ({STAYS})")))
    }

    fn remove(&self, pid: i32) {
        let path = self.path(pid);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(path = %path.display(), %error, "cannot remove the record of masks");
            }
            _ => {}
        }
    }
}

/// Is the mask that was found the one that was set, as far as the CPUs are online? If none of them is left, the kernel lets
/// the thread run anywhere, which was not asked for.
pub(super) fn still(set: &CpuSet, found: &CpuSet, online: &CpuSet) -> bool {
    let lost = !online.intersects(set);
    lost || set.agrees(found, online)
}

/// Whether the mask that was found is this one. Unknown if all its CPUs are offline.
pub(super) fn has(given: &CpuSet, found: &CpuSet, online: &CpuSet) -> bool {
    online.intersects(given) && still(given, found, online)
}

/// Threads that were made by others while these were kept have their masks, and nothing is recorded of them. Returns how many
/// got the mask that they should have had.
fn give_back_inherited(
    pid: i32,
    pidfd: &Arc<OwnedFd>,
    made: &[(CpuSet, CpuSet)],
    known: &[i32],
    online: &CpuSet,
) -> usize {
    if made.is_empty() {
        return 0;
    }
    let new = procfs::threads(pid).unwrap_or_default().into_iter().filter(|tid| !known.contains(tid));
    let give_back = |tid: &i32| {
        let found = procfs::read_affinity(*tid).ok();
        let origin =
            made.iter().find(|(given, _)| found.as_ref().is_some_and(|found| has(given, found, online)));
        let Some((given, operator)) = origin else { return false };
        // One that has ended needs nothing.
        pin_thread_if(pidfd.as_fd(), pid, *tid, |found| has(given, found, online), operator).is_ok()
    };
    new.filter(give_back).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::mpsc;
    use vnuma_process::{open_pidfd, read_allowed};

    fn own_pid() -> i32 {
        std::process::id().cast_signed()
    }

    /// A thread that lives until the sender is dropped.
    fn thread() -> (i32, mpsc::Sender<()>) {
        let (keep, ended) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            tell.send(nix::unistd::gettid().as_raw()).expect("the test waits");
            let _ = ended.recv();
        });
        (told.recv().expect("started"), keep)
    }

    fn order(tid: i32, expected: &CpuSet, cpus: &CpuSet) -> MaskOrder {
        let (expected, operator, cpus) = (expected.clone(), expected.clone(), Some(cpus.clone()));
        MaskOrder { vcpu: 0, tid, expected, operator, cpus }
    }

    #[test]
    fn the_next_vnumad_gives_back_what_was_set_and_leaves_what_others_set() {
        let directory = tempfile::tempdir().expect("a directory");
        let pid = own_pid();
        let pidfd = Arc::new(open_pidfd(pid).expect("a pidfd"));
        let threads = [thread(), thread(), thread()];
        let tids = threads.each_ref().map(|(tid, _)| *tid);
        let set = |tid, cpus: &CpuSet| {
            pin_thread_if(pidfd.as_fd(), pid, tid, |_| true, cpus).expect("set");
        };
        // The test itself may be confined to one of the two.
        let [one, other, all]: [CpuSet; 3] =
            [&[0][..], &[1], &[0, 1]].map(|cpus| cpus.iter().copied().collect());
        tids.iter().for_each(|tid| set(*tid, &all));
        let mut masks = Masks::new(directory.path().join("channels"));
        let orders = tids.map(|tid| order(tid, &all, &one));
        masks.note(pid, &pidfd, &orders, false).expect("written");
        // The first was set, the second was not yet, and the third has been set by somebody else since.
        set(tids[0], &one);
        set(tids[2], &other);
        let mut next = Masks::new(directory.path().join("channels"));
        next.tidy();
        assert_eq!(next.restore(pid, Some(&pidfd), &all), Ok(2));
        let now = tids.map(|tid| read_allowed(pid, tid).expect("a mask"));
        assert_eq!(now, [all.clone(), all.clone(), other]);
        assert_eq!(next.restore(pid, Some(&pidfd), &all), Ok(0), "the record is gone");
        assert_eq!(fs::read_dir(directory.path().join("channels")).expect("there").count(), 0);
    }

    #[test]
    fn a_record_of_another_process_counts_for_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let pid = own_pid();
        let pidfd = Arc::new(open_pidfd(pid).expect("a pidfd"));
        let all = read_allowed(pid, pid).expect("a mask");
        let path = directory.path().join(format!("{pid}.masks"));
        let record = format!(
            "{{\"version\":1,\"started\":1,\"threads\":{{\"{pid}\":{{\"operator\":\"0\",\"set\":[\"{all}\"]}}}}}}"
        );
        fs::write(&path, record).expect("written");
        assert_eq!(Masks::new(directory.path().into()).restore(pid, Some(&pidfd), &all), Ok(0));
        assert!(!path.exists());
        assert_eq!(read_allowed(pid, pid).expect("a mask"), all);
    }

    /// A thread of this process with its CPUs, and a directory for records.
    struct Own {
        directory: tempfile::TempDir,
        pid: i32,
        pidfd: Arc<OwnedFd>,
        tid: i32,
        _keep: mpsc::Sender<()>,
        all: CpuSet,
        one: CpuSet,
    }

    impl Own {
        fn new() -> Self {
            let (directory, pid) = (tempfile::tempdir().expect("a directory"), own_pid());
            let pidfd = Arc::new(open_pidfd(pid).expect("a pidfd"));
            let (tid, _keep) = thread();
            let all = read_allowed(pid, tid).expect("a mask");
            let one = all.iter().take(1).collect();
            Self { directory, pid, pidfd, tid, _keep, all, one }
        }
    }

    #[test]
    fn a_record_that_cannot_be_read_now_counts_later() {
        let Own { directory, pid, pidfd, tid, _keep, all, one } = Own::new();
        let mut masks = Masks::new(directory.path().into());
        masks.note(pid, &pidfd, &[order(tid, &all, &one)], false).expect("written");
        pin_thread_if(pidfd.as_fd(), pid, tid, |_| true, &one).expect("set");
        let path = directory.path().join(format!("{pid}.masks"));
        let kept = directory.path().join("kept");
        fs::rename(&path, &kept).expect("moved");
        // ELOOP for everybody, root as well.
        std::os::unix::fs::symlink(&path, &path).expect("a loop");
        let mut next = Masks::new(directory.path().into());
        next.restore(pid, Some(&pidfd), &all).expect_err("it cannot be read");
        assert!(fs::symlink_metadata(&path).is_ok(), "it is not removed");
        fs::rename(&kept, &path).expect("back");
        assert_eq!(next.restore(pid, Some(&pidfd), &all), Ok(1));
        assert_eq!(read_allowed(pid, tid).expect("a mask"), all);
    }

    /// Only this record says what the operators' masks are.
    #[test]
    fn a_record_that_is_not_understood_stays_and_nothing_takes_its_place() {
        let Own { directory, pid, pidfd, tid, _keep, all, one } = Own::new();
        let path = directory.path().join(format!("{pid}.masks"));
        let newer = format!("{{\"version\":2,\"started\":1,\"groups\":[\"{all}\"]}}");
        for (text, problem) in [(newer.as_bytes(), "version = 2: must be 1"), (b"\xff", "invalid utf-8")] {
            own::write(&path, text).expect("written");
            let mut masks = Masks::new(directory.path().into());
            masks.tidy();
            for _ in 0..2 {
                let error = masks.restore(pid, Some(&pidfd), &all).expect_err(problem);
                let named = error.contains(problem) && error.contains(".masks: ") && error.contains(STAYS);
                assert!(named, "{error}");
            }
            let error = masks.note(pid, &pidfd, &[order(tid, &all, &one)], false).expect_err("no room");
            assert!(error.contains("there is a record of masks that were not given back"), "{error}");
            masks.process_ended(pid);
            assert_eq!(fs::read(&path).expect("it stays"), text);
        }
        std::os::unix::fs::chown(&path, Some(65_534), None)
            .unwrap_or_else(|error| println!("skipped: {error}"));
        let error =
            Masks::new(directory.path().into()).restore(pid, Some(&pidfd), &all).expect_err("of others");
        assert!(!nix::unistd::geteuid().is_root() || error.contains("owner = 65534"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, problem) in [
            ("", "EOF"),
            ("{\"version\":2,\"started\":1,\"threads\":{}}", "version = 2: must be 1"),
            ("{\"version\":2,\"groups\":[]}", "version = 2: must be 1"),
            (
                "{\"version\":1,\"started\":1,\"threads\":{\"0\":{\"operator\":\"0\",\"set\":[]}}}",
                "threads: 0: neither",
            ),
            (
                "{\"version\":1,\"started\":1,\"threads\":{\"7\":{\"operator\":\"\",\"set\":[]}}}",
                "threads: 7: neither",
            ),
            (
                "{\"version\":1,\"started\":1,\"threads\":{\"7\":{\"operator\":\"x\",\"set\":[]}}}",
                "`x` is neither",
            ),
            ("{\"version\":1,\"started\":1,\"threads\":{\"x\":{}}}", "invalid"),
        ] {
            let error = parse_masks(text).expect_err(text);
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn a_mask_is_still_the_one_that_was_set_when_cpus_go() {
        let set = |list: &str| list.parse::<CpuSet>().expect("a list");
        let check = |was: &str, found: &str, online: &str| still(&set(was), &set(found), &set(online));
        assert!(check("4-7", "4-7", "0-7") && check("4-7", "4-6", "0-6") && check("4-7", "0-3", "0-3"));
        assert!(!check("4-7", "4-6", "0-7") && !check("4-7", "0-7", "0-7"));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|[0-9{}\",:-]|operator|threads|set|version|started){0,200}") {
            let _ = parse_masks(&text);
        }
    }
}
