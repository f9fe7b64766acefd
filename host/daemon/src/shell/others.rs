//! Threads of a VM's process that run no vCPU, as the thread that sets affinities finds them: it keeps them where their vCPUs are, records the masks
//! of their operators before, and gives these back.
//!
//! | thread | what is its operator's mask |
//! |---|---|
//! | known | what was recorded, unless others have set another one since |
//! | new, with a mask that such a thread was given | that of the thread which made it |
//! | new | the mask that it has |
//!
//! Threads that their operator keeps elsewhere, and those with a real-time class, stay where they are.

use super::mask_records::{Kept, Masks, has, still};
use crate::core::event::{Followed, MaskOrder};
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};
use vnuma_model::CpuSet;
use vnuma_process::{ActError, pin_thread_if, procfs, read_allowed};

/// Threads of a VM that follow, at most: each costs the others' moves a little time.
const MOST: usize = 1024;

impl Masks {
    /// Keeps all threads of a process but its vCPUs to these CPUs, each within its operator's mask, or gives them these masks
    /// back. An error says what was not done for one of them.
    pub(super) fn follow(
        &mut self,
        (pid, pidfd): (i32, &Arc<OwnedFd>),
        vcpus: &[i32],
        cpus: Option<&CpuSet>,
        online: &CpuSet,
    ) -> Result<Followed, String> {
        let threads = procfs::threads(pid).map_err(|error| error.to_string())?;
        if cpus.is_some() && threads.len() > vcpus.len() + MOST {
            return Err(format!("process {pid} has more than {MOST} threads that run no vCPU"));
        }
        let (mut changed, mut orders, mut failed) = (false, Vec::new(), None);
        // Threads that have ended.
        let mut over: Vec<i32> = self.others_of(pid).map(|(tid, _)| tid).collect();
        for tid in threads.into_iter().filter(|tid| !vcpus.contains(tid)) {
            match self.order_for(pid, tid, cpus, online) {
                Ok(None) => continue,
                Ok(Some((order, is_new))) => {
                    changed |= is_new;
                    orders.push(order);
                }
                Err(problem) => failed = Some(problem),
            }
            over.retain(|known| *known != tid);
        }
        over.retain(|tid| !vcpus.contains(tid));
        self.forget(pid, &over);
        if changed {
            self.note(pid, pidfd, &orders, true)?;
        }
        let mut free = Vec::new();
        for MaskOrder { tid, expected, operator, cpus, .. } in &orders {
            let mask = cpus.as_ref().unwrap_or(operator);
            let outcome = match still(mask, expected, online) {
                true => Ok(()),
                false => {
                    pin_thread_if(pidfd.as_fd(), pid, *tid, |found| still(expected, found, online), mask)
                }
            };
            match outcome {
                Ok(()) if cpus.is_some() => {}
                // What others have set just now is looked at the next time.
                Ok(())
                | Err(
                    ActError::MaskChanged { .. } | ActError::ForeignThread { .. } | ActError::Raced { .. },
                ) => {
                    free.push(*tid);
                }
                Err(error) => failed = Some(error.to_string()),
            }
        }
        self.forget(pid, &free);
        let inherited = self.kept(pid, pid).and_then(Kept::inherited);
        let follows = |kept: &Kept| cpus.zip(kept.last()).is_some_and(|(cpus, last)| last.is_subset(cpus));
        let threads = self.others_of(pid).filter(|(_, kept)| follows(kept)).count();
        failed.map_or(Ok(Followed { threads, inherited }), Err)
    }

    fn others_of(&self, pid: i32) -> impl Iterator<Item = (i32, &Kept)> {
        self.recorded(pid).filter(|(_, kept)| kept.is_other())
    }

    /// What is to be done about a thread, and whether that is to be recorded. `None`: nothing.
    fn order_for(
        &self,
        pid: i32,
        tid: i32,
        cpus: Option<&CpuSet>,
        online: &CpuSet,
    ) -> Result<Option<(MaskOrder, bool)>, String> {
        let found = match procfs::read_affinity(tid) {
            Ok(found) => found,
            Err(procfs::ProcError::Gone { .. }) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let kept = self.kept(pid, tid).filter(|kept| kept.is_ours(&found, online));
        let made = || self.recorded(pid).filter_map(|(_, kept)| kept.inherited());
        let operator = match kept {
            Some(kept) => kept.operator().clone(),
            None => match made().find(|(given, _)| has(given, &found, online)) {
                Some((_, operator)) => operator,
                None if cpus.is_none() => return Ok(None),
                None => match read_allowed(pid, tid) {
                    Ok(allowed) => allowed,
                    Err(procfs::ProcError::Gone { .. }) => return Ok(None),
                    Err(error) => return Err(error.to_string()),
                },
            },
        };
        let within = cpus.map(|cpus| operator.iter().filter(|cpu| cpus.contains(*cpu)).collect::<CpuSet>());
        let real_time = || procfs::read_cpu_and_class(pid, tid).is_ok_and(|(_, real_time)| real_time);
        // One that stays where its operator keeps it is recorded as well: it is not taken for a new one later.
        let stays = |within: &CpuSet| within.is_empty() || real_time();
        let mask = within.map(|within| if stays(&within) { operator.clone() } else { within });
        let is_new = mask.is_some() && kept.is_none_or(|kept| kept.last() != mask.as_ref());
        Ok(Some((MaskOrder { vcpu: 0, tid, expected: found, operator, cpus: mask }, is_new)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        env,
        io::{BufRead, BufReader, Read, Write},
        process::{Child, ChildStdin, ChildStdout, Command, Stdio},
        thread,
    };
    use vnuma_process::open_pidfd;

    const CHILD: &str = "VNUMA_TEST_CHILD";

    /// Makes a thread for each line that it is sent, and says its number.
    #[test]
    #[ignore = "the other tests run it in a process of its own"]
    fn a_process_with_threads() {
        if env::var_os(CHILD).is_none() {
            return;
        }
        for _ in std::io::stdin().lines() {
            thread::spawn(|| {
                println!("\nthread {}", nix::unistd::gettid());
                loop {
                    thread::park();
                }
            });
        }
    }

    /// Such a process, whose threads may run on the CPUs 0 and 1.
    struct Process {
        child: Child,
        input: ChildStdin,
        output: BufReader<ChildStdout>,
        pidfd: Arc<OwnedFd>,
    }

    impl Process {
        fn start() -> Option<Self> {
            let online = read_allowed(own_pid(), own_pid()).expect("a mask");
            if ![0, 1].iter().all(|cpu| online.contains(*cpu)) {
                eprintln!("skipped: this needs the CPUs 0 and 1");
                return None;
            }
            let test = "shell::others::tests::a_process_with_threads";
            let mut child = Command::new(env::current_exe().expect("this test"))
                .args(["--exact", test, "--ignored", "--nocapture"])
                .env(CHILD, "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("started");
            let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
            let pidfd = Arc::new(open_pidfd(child.id().cast_signed()).expect("a pidfd"));
            let mut process = Self { child, input, output: BufReader::new(output), pidfd };
            // By then it has all threads that it makes on its own.
            process.thread();
            for tid in procfs::threads(process.pid()).expect("it runs") {
                process.set(tid, "0-1");
            }
            Some(process)
        }

        fn pid(&self) -> i32 {
            self.child.id().cast_signed()
        }

        /// It makes another thread.
        fn thread(&mut self) -> i32 {
            self.input.write_all(b"\n").expect("it reads");
            let lines = self.output.by_ref().lines().map(|line| line.expect("text"));
            let number = |line: String| line.strip_prefix("thread ").and_then(|tid| tid.parse().ok());
            lines.filter_map(number).next().expect("a thread")
        }

        fn set(&self, tid: i32, cpus: &str) {
            let cpus = set(cpus);
            pin_thread_if(self.pidfd.as_fd(), self.pid(), tid, |_| true, &cpus).expect("set");
        }

        fn mask(&self, tid: i32) -> String {
            read_allowed(self.pid(), tid).expect("a mask").to_string()
        }

        fn masks(&self) -> Vec<String> {
            let mut masks: Vec<String> =
                procfs::threads(self.pid()).expect("it runs").into_iter().map(|tid| self.mask(tid)).collect();
            masks.sort_unstable();
            masks.dedup();
            masks
        }

        fn follow(&self, masks: &mut Masks, vcpus: &[i32], cpus: Option<&str>) -> Followed {
            let cpus = cpus.map(set);
            let followed = masks.follow((self.pid(), &self.pidfd), vcpus, cpus.as_ref(), &set("0-1"));
            followed.expect("done")
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            // Gone already is as good.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn own_pid() -> i32 {
        std::process::id().cast_signed()
    }

    fn set(list: &str) -> CpuSet {
        list.parse().expect("a list")
    }

    #[test]
    fn threads_follow_and_get_their_operators_masks_again_with_those_that_they_made() {
        let Some(mut process) = Process::start() else { return };
        let directory = tempfile::tempdir().expect("a directory");
        let mut masks = Masks::new(directory.path().into());
        let (vcpu, pinned) = (process.thread(), process.thread());
        process.set(pinned, "1");
        let followed = process.follow(&mut masks, &[vcpu], Some("0,7"));
        assert_eq!(followed.inherited, Some((set("0"), set("0-1"))));
        let shown =
            |process: &Process| (process.mask(process.pid()), process.mask(vcpu), process.mask(pinned));
        assert_eq!(shown(&process), ("0".into(), "0-1".into(), "1".into()));
        assert!(masks.confined().is_empty(), "scx_vnuma is told of vCPUs only");
        // It has the mask of the one that made it, and is kept from the next look on.
        let new = process.thread();
        assert_eq!(
            (process.mask(new), process.follow(&mut masks, &[vcpu], Some("0")).threads),
            ("0".into(), followed.threads + 1)
        );
        // The vCPUs are elsewhere now.
        process.follow(&mut masks, &[vcpu], Some("1"));
        assert_eq!(
            (process.mask(new), shown(&process)),
            ("1".into(), ("1".into(), "0-1".into(), "1".into()))
        );
        let newer = process.thread();
        assert_eq!(process.follow(&mut masks, &[vcpu], None), Followed::default());
        assert_eq!((process.mask(new), process.mask(newer)), ("0-1".into(), "0-1".into()));
        assert_eq!(shown(&process), ("0-1".into(), "0-1".into(), "1".into()));
        assert_eq!(std::fs::read_dir(directory.path()).expect("there").count(), 0, "no record stays");
    }

    #[test]
    fn what_others_set_meanwhile_is_the_operators() {
        let Some(mut process) = Process::start() else { return };
        let directory = tempfile::tempdir().expect("a directory");
        let mut masks = Masks::new(directory.path().into());
        let thread = process.thread();
        process.follow(&mut masks, &[], Some("0"));
        process.set(thread, "1");
        process.follow(&mut masks, &[], Some("0"));
        assert_eq!((process.mask(thread), process.mask(process.pid())), ("1".into(), "0".into()));
        process.follow(&mut masks, &[], None);
        assert_eq!((process.mask(thread), process.mask(process.pid())), ("1".into(), "0-1".into()));
    }

    #[test]
    fn the_next_vnumad_gives_back_all_of_them() {
        let Some(mut process) = Process::start() else { return };
        let directory = tempfile::tempdir().expect("a directory");
        let mut masks = Masks::new(directory.path().into());
        process.follow(&mut masks, &[], Some("1"));
        // Nothing is recorded of it.
        let new = process.thread();
        assert_eq!((process.mask(new), process.masks()), ("1".into(), vec!["1".to_owned()]));
        let mut next = Masks::new(directory.path().into());
        let restored = next.restore(process.pid(), Some(&process.pidfd), &set("0-1")).expect("restored");
        assert_eq!((process.masks(), restored > 1), (vec!["0-1".to_owned()], true));
        assert_eq!(std::fs::read_dir(directory.path()).expect("there").count(), 0, "no record stays");
    }

    /// Where libvirt pins vCPUs: one of them may be where the other threads are.
    #[test]
    fn a_vcpu_that_is_pinned_by_others_is_none_that_was_made_meanwhile() {
        let Some(mut process) = Process::start() else { return };
        let directory = tempfile::tempdir().expect("a directory");
        let mut masks = Masks::new(directory.path().into());
        let vcpu = process.thread();
        process.set(vcpu, "1");
        masks.leave(process.pid(), [vcpu]);
        process.follow(&mut masks, &[vcpu], Some("1"));
        let new = process.thread();
        let mut next = Masks::new(directory.path().into());
        next.leave(process.pid(), [vcpu]);
        next.restore(process.pid(), Some(&process.pidfd), &set("0-1")).expect("restored");
        assert_eq!((process.mask(vcpu), process.mask(new)), ("1".into(), "0-1".into()));
        // The same as vnumad ends.
        process.follow(&mut masks, &[vcpu], Some("1"));
        masks.restore_all(&set("0-1"));
        assert_eq!((process.mask(vcpu), process.mask(new)), ("1".into(), "0-1".into()));
    }
}
