//! DAMON against a kernel that is made of its files.

use super::*;
use proptest::prelude::*;
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

const GIB: u64 = 1 << 30;
const CONTEXT: &str = "0/contexts/0";

/// The files, as the kernel has them.
#[derive(Default)]
struct Kernel {
    files: RefCell<BTreeMap<String, String>>,
    /// What regions it will tell.
    regions: Vec<(String, String, String)>,
    /// Other files say this.
    odd: Vec<(String, String)>,
    /// A module has DAMON for itself.
    alone: bool,
    /// It has no directory `tried_regions`.
    old: bool,
    /// The process ends while it is watched.
    ends: bool,
    /// So many writes of the next ones are refused, as somebody else has the lock.
    busy: Cell<u32>,
    /// Nothing more is wanted.
    cancelled: bool,
    /// vnumad is killed after so many writes.
    lives: Cell<u32>,
    writes: RefCell<Vec<String>>,
}

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl Kernel {
    fn new() -> Self {
        let kernel = Self { lives: Cell::new(u32::MAX), ..Self::default() };
        kernel.put("nr_kdamonds", "0\n");
        kernel
    }

    fn with_regions(regions: &[(u64, u64, u32)]) -> Self {
        let texts = regions.iter().map(|(start, end, accesses)| {
            (format!("{start}\n"), format!("{end}\n"), format!("{accesses}\n"))
        });
        Self { regions: texts.collect(), ..Self::new() }
    }

    fn put(&self, file: &str, text: &str) {
        self.files.borrow_mut().insert(below(file), text.to_owned());
    }

    fn get(&self, file: &str) -> Option<String> {
        self.files.borrow().get(&below(file)).cloned()
    }

    /// A directory gets other entries.
    fn remake(&self, below_it: &str, files: &[(&str, &str)]) {
        let prefix = below(below_it);
        self.files.borrow_mut().retain(|path, _| !path.starts_with(&prefix));
        files.iter().for_each(|(file, text)| self.put(&format!("{below_it}{file}"), text));
    }

    fn set(&self, file: &str, text: &str) -> io::Result<()> {
        let on = self.get("0/state").as_deref() == Some("on\n");
        match file {
            "nr_kdamonds" if on => return Err(error(libc::EBUSY)),
            "nr_kdamonds" => {
                let all = [("0/state", "off\n"), ("0/pid", "4711\n"), ("0/contexts/nr_contexts", "0\n")];
                self.remake("", if text == "0" { &[] } else { &all });
                self.put(file, "");
            }
            "0/contexts/nr_contexts" => self.remake(
                "0/contexts/0/",
                &[
                    ("avail_operations", "vaddr\nfvaddr\npaddr\n"),
                    ("operations", "vaddr\n"),
                    ("monitoring_attrs/intervals/update_us", "60000000\n"),
                    ("monitoring_attrs/intervals/sample_us", "5000\n"),
                    ("monitoring_attrs/intervals/aggr_us", "100000\n"),
                    ("monitoring_attrs/nr_regions/min", "10\n"),
                    ("monitoring_attrs/nr_regions/max", "1000\n"),
                    ("targets/nr_targets", "0\n"),
                    ("schemes/nr_schemes", "0\n"),
                ],
            ),
            "0/contexts/0/targets/nr_targets" => {
                self.remake(
                    "0/contexts/0/targets/0/",
                    &[("pid_target", "0\n"), ("regions/nr_regions", "0\n")],
                );
            }
            "0/contexts/0/targets/0/regions/nr_regions" => {
                for at in 0..text.parse::<u32>().expect("a number") {
                    let range = [("start", "0\n"), ("end", "0\n")];
                    self.remake(&format!("0/contexts/0/targets/0/regions/{at}/"), &range);
                }
            }
            "0/contexts/0/schemes/nr_schemes" => {
                let limits = ["sz", "nr_accesses", "age"].map(|of| format!("access_pattern/{of}/max"));
                let mut files: Vec<(&str, &str)> =
                    limits.iter().map(|limit| (limit.as_str(), "0\n")).collect();
                files.push(("action", "stat\n"));
                files.extend((!self.old).then_some(("tried_regions/total_bytes", "0\n")));
                self.remake("0/contexts/0/schemes/0/", &files);
            }
            "0/state" => return self.set_state(text, on),
            _ => {}
        }
        match self.get(file) {
            Some(_) => self.put(file, &format!("{text}\n")),
            None => return Err(error(libc::ENOENT)),
        }
        Ok(())
    }

    fn set_state(&self, text: &str, on: bool) -> io::Result<()> {
        match (text, on) {
            ("on", false) if self.alone => Err(error(libc::EBUSY)),
            ("on", false) => {
                self.put("0/state", if self.ends { "off\n" } else { "on\n" });
                Ok(())
            }
            ("off", true) => {
                self.put("0/state", "off\n");
                Ok(())
            }
            ("update_schemes_tried_regions", true) => {
                for (at, (start, end, accesses)) in self.regions.iter().enumerate() {
                    let files = [("start", start.as_str()), ("end", end), ("nr_accesses", accesses)];
                    self.remake(&format!("0/contexts/0/schemes/0/tried_regions/{at}/"), &files);
                }
                Ok(())
            }
            _ => Err(error(libc::EINVAL)),
        }
    }
}

impl Tree for &Kernel {
    fn read(&self, path: &str) -> io::Result<String> {
        if let Some((_, text)) = self.odd.iter().find(|(odd, _)| path.ends_with(odd.as_str())) {
            return Ok(text.clone());
        }
        self.files.borrow().get(path).cloned().ok_or_else(|| error(libc::ENOENT))
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let Some(lives) = self.lives.get().checked_sub(1) else { return Err(error(libc::EINTR)) };
        self.lives.set(lives);
        if let Some(busy) = self.busy.get().checked_sub(1) {
            self.busy.set(busy);
            return Err(error(libc::EBUSY));
        }
        let file =
            path.strip_prefix(FILES).and_then(|file| file.strip_prefix('/')).expect("a file of DAMON's");
        self.writes.borrow_mut().push(format!("{file}={text}"));
        self.set(file, text)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let (files, prefix) = (self.files.borrow(), format!("{path}/"));
        let names = files.keys().filter_map(|file| file.strip_prefix(&prefix)?.split('/').next());
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.dedup();
        if names.is_empty() { Err(error(libc::ENOENT)) } else { Ok(names) }
    }

    fn wait(&self, _: Duration) -> bool {
        !self.cancelled
    }

    fn pause(&self, _: Duration) {}
}

fn watch(kernel: &Kernel) -> Result<Vec<WatchedRegion>, DamonError> {
    Damon::new(kernel).watch(77, &[(GIB, 2 * GIB)]).map(|watched| watched.regions)
}

fn is_clean(kernel: &Kernel) -> bool {
    kernel.files.borrow().len() == 1 && kernel.get("nr_kdamonds").as_deref() == Some("0\n")
}

#[test]
fn memory_is_watched_and_nothing_is_left() {
    let kernel = Kernel::with_regions(&[(2 * GIB, 3 * GIB, 40), (GIB, 2 * GIB, 7)]);
    let memory = [(4 * GIB, 5 * GIB), (GIB, 2 * GIB)];
    kernel.files.borrow_mut().insert("proc/4711/schedstat".into(), "123456 789 10\n".into());
    let Watched { regions: seen, cost_ns } = Damon::new(&kernel).watch(77, &memory).expect("it is watched");
    assert_eq!(cost_ns, Some(123_456));
    kernel.files.borrow_mut().remove("proc/4711/schedstat");
    let region = |start, end, accesses| WatchedRegion { start, end, accesses };
    assert_eq!(
        seen,
        [region(GIB, 2 * GIB, 7), region(2 * GIB, 3 * GIB, LOOKS)],
        "in order, and at most all looks"
    );
    assert!(is_clean(&kernel), "{:?}", kernel.files);
    let writes = kernel.writes.borrow();
    assert_eq!(
        writes[..3],
        [
            "nr_kdamonds=1",
            "0/contexts/nr_contexts=1",
            &format!("{CONTEXT}/monitoring_attrs/intervals/update_us={MARK}")
        ]
    );
    for wanted in [
        "operations=fvaddr",
        "monitoring_attrs/intervals/sample_us=50000",
        "monitoring_attrs/intervals/aggr_us=1000000",
        "targets/0/pid_target=77",
        "schemes/0/action=stat",
        "schemes/0/access_pattern/sz/max=18446744073709551615",
        "schemes/0/access_pattern/nr_accesses/max=4294967295",
    ] {
        assert!(writes.contains(&format!("{CONTEXT}/{wanted}")), "{wanted}: {writes:?}");
    }
    let order: Vec<&String> = writes.iter().filter(|write| write.starts_with("0/state")).collect();
    assert_eq!(order, ["0/state=on", "0/state=update_schemes_tried_regions", "0/state=off"]);
    assert_eq!(writes.last().map(String::as_str), Some("nr_kdamonds=0"));
}

#[test]
fn somebody_elses_is_left_alone() {
    for on in [false, true] {
        for contexts in ["0", "1"] {
            let kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1)]);
            kernel.set("nr_kdamonds", "1").expect("theirs");
            kernel.set("0/contexts/nr_contexts", contexts).expect("theirs");
            kernel.put("0/contexts/nr_contexts", &format!("{contexts}\n"));
            kernel.put("0/state", if on { "on\n" } else { "off\n" });
            let before = kernel.files.borrow().clone();
            assert_eq!(
                watch(&kernel).expect_err("theirs").to_string(),
                "DAMON is in use: nr_kdamonds is 1, and vnumad has made none of them"
            );
            assert!(kernel.writes.borrow().is_empty() && *kernel.files.borrow() == before);
            assert!(Damon::new(&kernel).remove_ours().is_err());
        }
    }
    let kernel = Kernel::new();
    kernel.put("nr_kdamonds", "3\n");
    assert!(matches!(watch(&kernel), Err(DamonError::InUse(3))));
}

#[test]
fn what_has_damon_for_itself_is_named_and_nothing_is_left() {
    let mut kernel = Kernel::new();
    kernel.alone = true;
    assert_eq!(
        watch(&kernel).expect_err("it is in use").to_string(),
        "DAMON is in use by another part of the kernel, which lets nobody else use it"
    );
    assert!(is_clean(&kernel));
    kernel.files.borrow_mut().insert("sys/module/damon_stat/parameters/enabled".into(), "Y\n".into());
    kernel.files.borrow_mut().insert("sys/module/damon_reclaim/parameters/enabled".into(), "N\n".into());
    assert!(watch(&kernel).expect_err("it is in use").to_string().contains("in use by damon_stat,"));
}

#[test]
fn kernels_without_it_and_old_ones_are_told_apart() {
    let kernel = Kernel::default();
    assert_eq!(
        watch(&kernel).expect_err("there is none").to_string(),
        "this kernel has no DAMON for processes (/sys/kernel/mm/damon/admin/kdamonds is missing)"
    );
    let mut kernel = Kernel::new();
    kernel.old = true;
    assert!(matches!(watch(&kernel), Err(DamonError::Old)) && is_clean(&kernel));
    let mut kernel = Kernel::new();
    kernel.odd = vec![("avail_operations".into(), "paddr\n".into())];
    assert!(matches!(watch(&kernel), Err(DamonError::Missing(_))) && is_clean(&kernel));
}

#[test]
fn a_process_that_ends_and_a_watch_that_is_stopped_leave_nothing() {
    let mut kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1)]);
    kernel.ends = true;
    assert!(matches!(watch(&kernel), Err(DamonError::Stopped)) && is_clean(&kernel));
    let mut kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1)]);
    kernel.cancelled = true;
    assert!(matches!(watch(&kernel), Err(DamonError::Cancelled)) && is_clean(&kernel));
}

#[test]
fn a_lock_that_somebody_has_for_a_moment_is_waited_for() {
    let kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1)]);
    kernel.busy.set(TRIES - 1);
    assert!(watch(&kernel).is_ok() && is_clean(&kernel));
    kernel.busy.set(TRIES);
    let problem = watch(&kernel).expect_err("it takes too long").to_string();
    assert!(problem.starts_with("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds: "), "{problem}");
}

#[test]
fn whoever_is_killed_in_the_middle_is_cleaned_up_after() {
    let all = {
        let kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1)]);
        watch(&kernel).expect("it is watched");
        kernel.writes.borrow().len() as u32
    };
    for lives in 0..all {
        let kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1)]);
        kernel.lives.set(lives);
        assert!(watch(&kernel).is_err());
        kernel.lives.set(u32::MAX);
        match lives {
            0 => assert_eq!(Damon::new(&kernel).remove_ours().ok(), Some(false)),
            // It has no mark yet.
            1 | 2 => assert!(matches!(watch(&kernel), Err(DamonError::InUse(1)))),
            _ => {
                assert_eq!(Damon::new(&kernel).remove_ours().ok(), Some(true), "after {lives} writes");
                assert!(is_clean(&kernel));
            }
        }
    }
}

#[test]
fn what_a_file_should_not_say_is_refused_with_its_name_and_value() {
    for (odd, text, expected) in [
        ("0/start", "-1\n", "0/contexts/0/schemes/0/tried_regions/0/start: -1: expected a number"),
        ("0/nr_accesses", "a\u{1b}\n", "tried_regions/0/nr_accesses: a\\u{1b}: expected a number"),
        ("0/end", "5\n", "tried_regions/0/end: 5: expected an address after that in `start`"),
        (
            "1/start",
            "1073741825\n",
            "a region that begins at 0x40000001: expected regions that do not overlap",
        ),
        ("nr_kdamonds", "x\n", "kdamonds/nr_kdamonds: x: expected a number"),
    ] {
        let mut kernel = Kernel::with_regions(&[(GIB, 2 * GIB, 1), (2 * GIB, 3 * GIB, 1)]);
        kernel.odd = vec![(odd.to_owned(), text.to_owned())];
        let problem = watch(&kernel).expect_err(odd).to_string();
        assert!(problem.ends_with(expected), "{problem}");
        assert!(odd == "nr_kdamonds" || is_clean(&kernel), "{odd}");
    }
    assert!(watch(&Kernel::new()).expect_err("none").to_string().ends_with("no region: expected some"));
}

proptest! {
    /// Whatever the kernel says, what is returned is in order and within bounds, and nothing is left.
    #[test]
    fn whatever_the_kernel_says(
        regions in prop::collection::vec(("[0-9]{0,20}\n?", "\\PC{0,8}|[0-9]{1,20}", "[0-9a-z-]{0,11}"), 0..8),
        start in 0_u64..u64::MAX,
        numbers in prop::collection::vec((0_u64..1 << 20, 1_u64..1 << 20, 0_u64..50), 0..8),
    ) {
        let plain = numbers.iter().map(|&(at, size, accesses)| {
            let start = start.saturating_add(at);
            (start.to_string(), start.saturating_add(size).to_string(), accesses.to_string())
        });
        for regions in [regions.clone(), plain.collect()] {
            let kernel = Kernel { regions, ..Kernel::new() };
            let seen = watch(&kernel);
            prop_assert!(is_clean(&kernel));
            let Ok(seen) = seen else { continue };
            prop_assert!(seen.iter().all(|region| region.start < region.end && region.accesses <= LOOKS));
            prop_assert!(seen.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }

    #[test]
    fn first_regions_cover_all_memory_once(
        areas in prop::collection::vec((0_u64..1 << 20, 1_u64..1 << 24), 1..6),
    ) {
        let (mut memory, mut at) = (Vec::new(), 0);
        for (gap, pages) in areas {
            memory.push((at + gap * PAGE, at + (gap + pages) * PAGE));
            at += (gap + pages) * PAGE;
        }
        let regions = first_regions(&memory).expect("they are in order");
        let parts = memory.len() as u64;
        prop_assert!(regions.len() as u64 <= FIRST_REGIONS + 2 * parts);
        prop_assert!(regions.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        let bytes = |ranges: &[(u64, u64)]| ranges.iter().map(|(start, end)| end - start).sum::<u64>();
        prop_assert_eq!(bytes(&regions), bytes(&memory));
        prop_assert!(regions.iter().all(|(start, end)| memory.iter().any(|(first, last)| first <= start && end <= last)));
        // A huge page is in one region.
        prop_assert!(regions.iter().all(|(start, _)| start % REGION == 0 || memory.iter().any(|(first, _)| first == start)));
    }
}

#[test]
fn memory_that_makes_no_sense_is_not_watched() {
    let kernel = Kernel::new();
    for memory in [[(0, 0), (4096, 8192)], [(0, 8192), (4096, 12288)], [(1, 4096), (8192, 12288)]] {
        assert!(matches!(Damon::new(&kernel).watch(1, &memory), Err(DamonError::Range(..))));
    }
    assert!(kernel.writes.borrow().is_empty());
}
