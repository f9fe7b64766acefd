//! Samples of memory accesses, if the operator wants them: they say where accesses go that the counters do not count by node.

use std::{os::fd::AsFd, path::Path};
use vnuma_counters::{Ibs, MemoryMap, Shares, ThreadSamples};
use vnuma_model::{Accesses, Counted};
use vnuma_process::on_thread;

/// What this host samples with.
#[derive(Debug)]
pub(super) struct AccessSampling {
    found: Result<(Ibs, MemoryMap), String>,
}

impl AccessSampling {
    pub(super) fn find(root: &Path) -> Self {
        let map = || MemoryMap::read(root);
        Self { found: Ibs::find(root).and_then(|ibs| Ok((ibs, map()?))) }
    }

    /// Why nothing is sampled.
    pub(super) fn problem(&self) -> Option<&str> {
        self.found.as_ref().err().map(String::as_str)
    }

    /// Samples a thread of a process.
    pub(super) fn open(&self, pidfd: impl AsFd, pid: i32, tid: i32) -> Option<Result<Sampled, String>> {
        let (ibs, _) = self.found.as_ref().ok()?;
        // As with counters: those of a thread that is not the VM's are closed at once.
        Some(match on_thread(pidfd.as_fd(), pid, tid, || ThreadSamples::open(tid, *ibs)) {
            Some(Ok(samples)) => Ok(Sampled { samples, shares: Shares::default() }),
            Some(Err(error)) => Err(error.to_string()),
            None => Err(format!("thread {tid} does not belong to process {pid}")),
        })
    }

    /// What was counted in a period, with accesses as the thread's samples say.
    pub(super) fn refine(&self, sampled: &mut Sampled, counted: Counted) -> Counted {
        if let Ok((_, map)) = &self.found {
            sampled.shares.add(&sampled.samples.take(map));
        }
        refined(&sampled.shares, counted)
    }
}

/// The samples of a thread.
#[derive(Debug)]
pub(super) struct Sampled {
    samples: ThreadSamples,
    shares: Shares,
}

/// Accesses that are counted by node stay as they are.
fn refined(shares: &Shares, counted: Counted) -> Counted {
    match counted {
        Counted::Counted(mut counts) => {
            let sum = match counts.accesses {
                Accesses::ByNode(_) => return Counted::Counted(counts),
                Accesses::LocalRemote { local, remote } => local.saturating_add(remote),
                Accesses::Unknown => counts.llc_misses,
            };
            if let Some(by_node) = shares.spread(sum) {
                counts.accesses = Accesses::ByNode(by_node);
            }
            Counted::Counted(counts)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use vnuma_model::ThreadCounts;

    fn counted(accesses: Accesses) -> Counted {
        Counted::Counted(ThreadCounts {
            instructions: 1000,
            llc_references: 300,
            llc_misses: 200,
            accesses,
            permille: 1000,
        })
    }

    #[test]
    fn samples_say_where_accesses_go_that_are_not_counted_by_node() {
        let mut shares = Shares::default();
        let refined = |shares: &Shares, accesses| match super::refined(shares, counted(accesses)) {
            Counted::Counted(counts) => counts.accesses,
            other => panic!("{other:?}"),
        };
        assert_eq!(refined(&shares, Accesses::Unknown), Accesses::Unknown, "no samples yet");
        let by_node = [(0, 10), (3, 30)].into();
        shares.add(&vnuma_counters::Sampled { by_node, ..vnuma_counters::Sampled::default() });
        assert_eq!(refined(&shares, Accesses::Unknown), Accesses::ByNode(vec![(0, 50), (3, 150)]));
        let local_remote = Accesses::LocalRemote { local: 4, remote: 36 };
        assert_eq!(refined(&shares, local_remote), Accesses::ByNode(vec![(0, 10), (3, 30)]));
        let by_node = || Accesses::ByNode(vec![(1, 7)]);
        assert_eq!(refined(&shares, by_node()), by_node(), "what is counted is not sampled");
        assert_eq!(super::refined(&shares, Counted::Crowded), Counted::Crowded);
    }

    #[test]
    fn a_host_without_ibs_says_so() {
        let root = tempfile::tempdir().expect("a directory");
        let problem = |root: &Path| AccessSampling::find(root).problem().map(str::to_owned);
        assert!(problem(root.path()).is_some_and(|why| why.starts_with("no IBS: ")));
        let format = root.path().join("sys/bus/event_source/devices/ibs_op/format");
        fs::create_dir_all(&format).expect("made");
        fs::write(format.with_file_name("type"), "11\n").expect("written");
        assert!(problem(root.path()).is_some_and(|why| why.contains("block_size_bytes")));
    }
}
