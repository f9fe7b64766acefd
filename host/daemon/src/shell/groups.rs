//! Control groups of the VMs that are counted. They are read when a VM is found and seldom afterwards: operators change them
//! seldom, and each one costs two files.

use crate::core::sanitize;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_observe::{may_be_threaded, read_cpu_control};
use vnuma_policy::scheduling::entitlement::CpuGroup;
use vnuma_process::{ProcError, procfs};

/// Least time between two readings of all of them, and least number of periods.
const REREAD: Duration = Duration::from_secs(10);
const REREAD_PERIODS: u32 = 10;
/// Groups in groups.
const DEPTH: usize = 64;

/// All that vCPUs are in, and those that these are in.
#[derive(Debug)]
pub(super) struct Groups {
    root: PathBuf,
    known: Arc<Vec<CpuGroup>>,
    /// By path: the group, or the one around it if it is none to the scheduler.
    positions: BTreeMap<String, Option<usize>>,
    /// By path: may threads of a process that is in it be in others?
    threaded: BTreeMap<String, bool>,
    read_at: Instant,
    /// How long what was read is taken as true.
    valid: Duration,
    problem: Option<String>,
}

impl Groups {
    /// For periods of this length.
    pub(super) fn new(root: PathBuf, period: Duration) -> Self {
        Self::valid_for(root, REREAD.max(REREAD_PERIODS * period))
    }

    fn valid_for(root: PathBuf, valid: Duration) -> Self {
        let (known, positions, threaded) = (Arc::default(), BTreeMap::new(), BTreeMap::new());
        Self { root, known, positions, threaded, read_at: Instant::now(), valid, problem: None }
    }

    /// Those that are known.
    pub(super) fn known(&self) -> Arc<Vec<CpuGroup>> {
        Arc::clone(&self.known)
    }

    /// Why something is not known of them.
    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// If it is time to read all of them again, forgets what is known.
    pub(super) fn forget_if_old(&mut self) -> bool {
        let old = self.read_at.elapsed() >= self.valid;
        if old {
            *self = Self::valid_for(std::mem::take(&mut self.root), self.valid);
        }
        old
    }

    /// The groups of these threads of a process, by position. What cannot be read counts as the root.
    pub(super) fn read(&mut self, pid: i32, tids: &[i32]) -> Vec<Option<usize>> {
        match self.try_read(pid, tids) {
            Ok(positions) => positions,
            Err(problem) => {
                self.problem.get_or_insert(sanitize(&problem));
                vec![None; tids.len()]
            }
        }
    }

    fn try_read(&mut self, pid: i32, tids: &[i32]) -> Result<Vec<Option<usize>>, String> {
        let Some(path) = path_of(pid, pid)? else { return Ok(vec![None; tids.len()]) };
        if !self.may_be_threaded(&path)? {
            let position = self.position(&path)?;
            return Ok(vec![position; tids.len()]);
        }
        let one = |&tid: &i32| match path_of(pid, tid)? {
            Some(path) => self.position(&path),
            None => Ok(None),
        };
        tids.iter().map(one).collect()
    }

    fn may_be_threaded(&mut self, path: &str) -> Result<bool, String> {
        if let Some(known) = self.threaded.get(path) {
            return Ok(*known);
        }
        let found = may_be_threaded(&self.root, path).map_err(|error| error.to_string())?;
        self.threaded.insert(path.to_owned(), found);
        Ok(found)
    }

    fn position(&mut self, path: &str) -> Result<Option<usize>, String> {
        if let Some(known) = self.positions.get(path) {
            return Ok(*known);
        }
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        // The root is empty.
        let ends: Vec<usize> = ends.filter(|&end| end == 0 || !path[..end].ends_with('/')).collect();
        if ends.len() > DEPTH {
            return Err(format!("process in control group `{path:.100}`: more than {DEPTH} levels"));
        }
        let mut position = None;
        for end in ends {
            let group = &path[..end];
            position = match self.positions.get(group) {
                Some(known) => *known,
                None => {
                    let control = read_cpu_control(&self.root, group).map_err(|error| error.to_string())?;
                    let found = control.map(|control| {
                        let known = Arc::make_mut(&mut self.known);
                        let (weight, limit_permille) = (control.weight, control.limit_permille);
                        known.push(CpuGroup { parent: position, weight, limit_permille });
                        known.len() - 1
                    });
                    *self.positions.entry(group.to_owned()).or_insert(found.or(position))
                }
            };
        }
        Ok(position)
    }
}

/// The control group of a thread. One that has ended is in none.
fn path_of(pid: i32, tid: i32) -> Result<Option<String>, String> {
    match procfs::read_cgroup(pid, tid) {
        Ok(path) => Ok(path),
        Err(ProcError::Gone { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const PERIOD: Duration = Duration::from_secs(1);

    #[test]
    fn groups_are_read_again_after_ten_periods_but_seldom() {
        let after = |period| Groups::new(PathBuf::new(), period).valid;
        assert_eq!(after(Duration::from_millis(100)), Duration::from_secs(10));
        assert_eq!(after(Duration::from_secs(5)), Duration::from_secs(50));
        let mut groups = Groups::valid_for(PathBuf::new(), Duration::ZERO);
        assert!(groups.forget_if_old() && groups.forget_if_old(), "it keeps what it was made for");
        assert!(!Groups::new(PathBuf::new(), PERIOD).forget_if_old());
    }

    /// A tree in which this process' groups have these weights and limits, outermost last.
    struct Fixture {
        tree: tempfile::TempDir,
        path: String,
    }

    impl Fixture {
        fn new() -> Option<Self> {
            let pid = std::process::id().cast_signed();
            let Ok(Some(path)) = procfs::read_cgroup(pid, pid) else {
                eprintln!("skipped: this process is in no control group of cgroup v2");
                return None;
            };
            let fixture = Self { tree: tempfile::tempdir().expect("a directory"), path };
            fs::create_dir_all(fixture.directory()).expect("created");
            Some(fixture)
        }

        fn directory(&self) -> PathBuf {
            self.tree.path().join("sys/fs/cgroup").join(self.path.trim_start_matches('/'))
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.directory().join(file), text).expect("written");
        }

        fn read(&self) -> (Groups, Vec<Option<usize>>) {
            let (pid, tid) = (std::process::id().cast_signed(), nix::unistd::gettid().as_raw());
            let mut groups = Groups::new(self.tree.path().into(), PERIOD);
            let positions = groups.read(pid, &[tid, tid]);
            (groups, positions)
        }
    }

    #[test]
    fn weights_and_limits_are_read_along_the_path() {
        let Some(fixture) = Fixture::new() else { return };
        let (groups, positions) = fixture.read();
        assert_eq!(
            (positions, groups.known().len(), groups.problem()),
            (vec![None; 2], 0, None),
            "no controller"
        );
        fixture.write("cgroup.type", "domain\n");
        fixture.write("cpu.weight", "250\n");
        fixture.write("cpu.max", "150000 100000\n");
        // The mount's root has a weight only in a container.
        fs::write(fixture.tree.path().join("sys/fs/cgroup/cpu.weight"), "30\n").expect("written");
        let (groups, positions) = fixture.read();
        let inner = *positions[0].and_then(|at| groups.known().get(at).copied()).as_ref().expect("a group");
        assert_eq!(positions[0], positions[1]);
        if fixture.path == "/" {
            assert_eq!((inner.weight, inner.parent), (30, None));
        } else {
            let expected = CpuGroup { parent: Some(0), weight: 250, limit_permille: Some(1500) };
            assert_eq!((inner, groups.known()[0].weight, groups.problem()), (expected, 30, None));
        }
    }

    #[test]
    fn what_is_wrong_is_named_and_counts_as_the_default() {
        let Some(fixture) = Fixture::new() else { return };
        for (file, text, problem) in [
            ("cpu.weight", "heavy\n", "cpu.weight: `heavy`: not a number"),
            ("cpu.max", "1 2\n", "cpu.max: `1 2`: its period must be 1000 to 1000000 us"),
        ] {
            fixture.write("cpu.weight", "100\n");
            fixture.write(file, text);
            let (groups, positions) = fixture.read();
            assert_eq!(positions, [None, None]);
            let found = groups.problem().expect("a problem");
            assert!(found.contains(problem), "{found}");
        }
    }

    #[test]
    fn groups_are_in_those_around_them_that_divide_time() {
        let tree = tempfile::tempdir().expect("a directory");
        let write = |file: &str, text: &str| {
            let file = tree.path().join("sys/fs/cgroup").join(file);
            fs::create_dir_all(file.parent().expect("a parent")).expect("created");
            fs::write(file, text).expect("written");
        };
        // The controller is not enabled for the one in between.
        write("a/cpu.weight", "200\n");
        write("a/b/c/cpu.weight", "50\n");
        write("a/b/c/cpu.max", "max 100000\n");
        write("a/b/d/cpu.weight", "0\n");
        write("a/b/d/cpu.max", "50000 100000\n");
        let mut groups = Groups::new(tree.path().into(), PERIOD);
        let found = ["/a/b/c", "/a/b/d", "/a/b", "/a", "/e"].map(|path| groups.position(path));
        assert_eq!(found, [Ok(Some(1)), Ok(Some(2)), Ok(Some(0)), Ok(Some(0)), Ok(None)]);
        let shown = groups.known().iter().map(|g| (g.parent, g.weight, g.limit_permille)).collect::<Vec<_>>();
        assert_eq!(shown, [(None, 200, None), (Some(0), 50, None), (Some(0), 1, Some(500))]);
    }

    #[test]
    fn groups_outside_and_endless_ones_are_refused() {
        let tree = tempfile::tempdir().expect("a directory");
        let mut groups = Groups::new(tree.path().into(), PERIOD);
        assert!(
            groups.position("/a/../../b").expect_err("outside").contains("`/a/..`: a control group outside")
        );
        assert!(groups.position(&"/a".repeat(100)).expect_err("deep").contains("more than 64 levels"));
        assert_eq!(groups.position("/a/b"), Ok(None));
    }
}
