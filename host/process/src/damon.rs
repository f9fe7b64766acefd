//! How often pages of a process are accessed, by DAMON, the kernel's monitor of data accesses, through its files in sysfs
//! (Documentation/admin-guide/mm/damon/usage.rst).
//!
//! ```text
//!   not in use ──▶ made, with our mark ──▶ on ──▶ a while later: its regions are read ──▶ off, and removed
//! ```
//!
//! DAMON watches one page of each region and tells how many looks found it accessed since the look before. It parts and joins
//! regions, so that neighbours that are accessed alike make up one. What a look costs depends on the number of regions, not on
//! the size of the process. Nothing is left when a watch ends, and nothing runs before the next one.
//!
//! All users of these files share them. The program that has made a kernel thread of DAMON's (`kdamond`) there keeps it: nothing is
//! watched then. Ours has a mark, so that one that a killed process has left is recognised and removed:
//! an interval that these operations never use ([`MARK`]). One that was left before it got its mark, within the first two files
//! that are written, is taken for somebody else's.

mod files;
#[cfg(test)]
mod tests;

pub use files::Sysfs;

use crate::text::sanitize_short;
use std::{io, time::Duration};
use vnuma_model::WatchedRegion;

/// Where its files are, below the root.
const FILES: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// Modules that may have DAMON for themselves.
const ALONE: [&str; 3] = ["damon_stat", "damon_reclaim", "damon_lru_sort"];
/// `update_us` of our kdamond: about 33 minutes, an unlikely choice for others. Regions that are given are never updated.
const MARK: u64 = 1_986_949_741;
/// Between two looks. A page that is accessed at least so often that a move pays (three times a second) is found accessed by
/// most series of [`LOOKS`].
pub const LOOK: Duration = Duration::from_millis(50);
/// Looks of a series, after which regions are parted and joined.
pub const LOOKS: u32 = 20;
/// Series before that which is read: each can double the number of regions where accesses differ.
const SERIES: u32 = 2;
/// Regions at the begin and at most; none is larger than so small a part of all memory.
const FIRST_REGIONS: u64 = 400;
const MOST_REGIONS: u64 = 1000;
const LEAST_REGIONS: u64 = 100;
/// A region has so many bytes at least at the begin: a huge page is accessed as a whole.
const REGION: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// More are not read.
const READ_REGIONS: usize = 8192;
/// While somebody else uses the files for a moment, a write is tried again.
const TRIES: u32 = 40;
const TRY_AGAIN: Duration = Duration::from_millis(25);

/// What a watch has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// In rising order, without overlaps, with how many of [`LOOKS`] looks found each accessed.
    pub regions: Vec<WatchedRegion>,
    /// CPU time of the kernel's thread, nanoseconds, if the kernel says it.
    pub cost_ns: Option<u64>,
}

/// Why accesses are not known.
#[derive(Debug, thiserror::Error)]
pub enum DamonError {
    /// It has none.
    #[error("this kernel has no DAMON for processes ({0} is missing)")]
    Missing(String),
    /// It is too old.
    #[error("DAMON of this kernel does not tell its regions; Linux 6.2 is the first that does")]
    Old,
    /// Another program uses DAMON: its kdamonds are there.
    #[error("DAMON is in use: nr_kdamonds is {0}, and vnumad has made none of them")]
    InUse(u64),
    /// Something has it for itself.
    #[error("DAMON is in use by {0}, which lets nobody else use it")]
    Alone(String),
    /// It watches no longer.
    #[error("DAMON has stopped: the process has ended")]
    Stopped,
    /// The caller wants no more.
    #[error("it was stopped")]
    Cancelled,
    /// What is to be watched makes no sense.
    #[error("memory from {0:#x} to {1:#x} cannot be watched")]
    Range(u64, u64),
    /// A file cannot be used.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A file says what it should not.
    #[error("{path}: {value}: expected {expected}")]
    Value {
        /// The file.
        path: String,
        /// What it has.
        value: String,
        /// What it should have.
        expected: &'static str,
    },
}

/// The files of a machine.
pub trait Tree {
    /// What a file has.
    fn read(&self, path: &str) -> io::Result<String>;
    /// Writes to a file. It may take as long as a series of looks.
    fn write(&self, path: &str, text: &str) -> io::Result<()>;
    /// Names of what a directory has.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    /// Waits for so long; false: no more is wanted.
    fn wait(&self, time: Duration) -> bool;
    /// Waits for so long, whatever is wanted.
    fn pause(&self, time: Duration);
}

/// DAMON of a machine.
#[derive(Debug)]
pub struct Damon<T> {
    tree: T,
}

impl<T: Tree> Damon<T> {
    /// By these files.
    pub fn new(tree: T) -> Self {
        Self { tree }
    }

    /// Watches this memory of a process, from start to end each, for a few seconds. The caller sees to it that the process is
    /// the one that it means when this has returned.
    pub fn watch(&self, pid: i32, memory: &[(u64, u64)]) -> Result<Watched, DamonError> {
        let regions = first_regions(memory)?;
        self.remove_ours()?;
        let watched = self.make(pid, &regions).and_then(|()| self.look());
        // Whatever has become of it.
        let removed = self.remove_ours();
        let watched = watched?;
        removed.map(|_| watched)
    }

    /// Removes what was left by a process that was killed. True if there was something.
    pub fn remove_ours(&self) -> Result<bool, DamonError> {
        let count = match self.tree.read(&below("nr_kdamonds")) {
            Ok(text) => number(below("nr_kdamonds"), &text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DamonError::Missing(format!("/{FILES}")));
            }
            Err(source) => return Err(DamonError::File { path: below("nr_kdamonds"), source }),
        };
        if count == 0 {
            return Ok(false);
        }
        if count != 1 || !self.is_ours()? {
            return Err(DamonError::InUse(count));
        }
        // One that has stopped already cannot be stopped.
        if self.read("0/state")?.trim_end() != "off" {
            let stopped = self.write("0/state", "off");
            if self.read("0/state")?.trim_end() != "off" {
                stopped?;
            }
        }
        self.write("nr_kdamonds", "0").map(|()| true)
    }

    fn is_ours(&self) -> Result<bool, DamonError> {
        if self.read_number("0/contexts/nr_contexts")? != 1 {
            return Ok(false);
        }
        Ok(self.read_number("0/contexts/0/monitoring_attrs/intervals/update_us")? == MARK)
    }

    /// Makes a kdamond and has it begin.
    fn make(&self, pid: i32, regions: &[(u64, u64)]) -> Result<(), DamonError> {
        self.write("nr_kdamonds", "1")?;
        self.write("0/contexts/nr_contexts", "1")?;
        let context = |file: &str| format!("0/contexts/0/{file}");
        let set = |file: &str, value: u64| self.write(&context(file), &value.to_string());
        set("monitoring_attrs/intervals/update_us", MARK)?;
        if !self.read(&context("avail_operations"))?.split_whitespace().any(|known| known == "fvaddr") {
            return Err(DamonError::Missing("fvaddr in avail_operations".to_owned()));
        }
        self.write(&context("operations"), "fvaddr")?;
        set("monitoring_attrs/intervals/sample_us", micros(LOOK))?;
        set("monitoring_attrs/intervals/aggr_us", micros(LOOK * LOOKS))?;
        set("monitoring_attrs/nr_regions/max", MOST_REGIONS)?;
        set("monitoring_attrs/nr_regions/min", LEAST_REGIONS)?;
        set("targets/nr_targets", 1)?;
        self.write(&context("targets/0/pid_target"), &pid.to_string())?;
        set("targets/0/regions/nr_regions", regions.len() as u64)?;
        for (at, (start, end)) in regions.iter().enumerate() {
            set(&format!("targets/0/regions/{at}/start"), *start)?;
            set(&format!("targets/0/regions/{at}/end"), *end)?;
        }
        // One that does nothing with any region, but tells which there are.
        set("schemes/nr_schemes", 1)?;
        self.write(&context("schemes/0/action"), "stat")?;
        set("schemes/0/access_pattern/sz/max", u64::MAX)?;
        set("schemes/0/access_pattern/nr_accesses/max", u64::from(u32::MAX))?;
        set("schemes/0/access_pattern/age/max", u64::from(u32::MAX))?;
        match self.tree.list(&below(&context("schemes/0/tried_regions"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(DamonError::Old),
            _ => {}
        }
        match self.write("0/state", "on") {
            Err(DamonError::File { source, .. }) if is_busy(&source) => Err(DamonError::Alone(self.who())),
            outcome => outcome,
        }
    }

    /// Waits, and reads the regions.
    fn look(&self) -> Result<Watched, DamonError> {
        if !self.tree.wait(LOOK * LOOKS * SERIES) {
            return Err(DamonError::Cancelled);
        }
        let told = self.write("0/state", "update_schemes_tried_regions");
        if self.read("0/state")?.trim_end() != "on" {
            return Err(DamonError::Stopped);
        }
        told?;
        let tried = "0/contexts/0/schemes/0/tried_regions";
        let path = below(tried);
        let names =
            self.tree.list(&path).map_err(|source| DamonError::File { path: path.clone(), source })?;
        let numbers = names.iter().filter_map(|name| name.parse::<u32>().ok());
        let mut regions = Vec::new();
        for number in numbers.take(READ_REGIONS) {
            let field = |field: &str| self.read_number(&format!("{tried}/{number}/{field}"));
            let (start, end, accesses) = (field("start")?, field("end")?, field("nr_accesses")?);
            if start >= end {
                let (path, value) = (below(&format!("{tried}/{number}/end")), end.to_string());
                return Err(DamonError::Value { path, value, expected: "an address after that in `start`" });
            }
            // A series may have a look more where the kernel was late.
            let accesses = u32::try_from(accesses).unwrap_or(u32::MAX).min(LOOKS);
            regions.push(WatchedRegion { start, end, accesses });
        }
        regions.sort_by_key(|region| region.start);
        if let Some(pair) = regions.windows(2).find(|pair| pair[0].end > pair[1].start) {
            let value = format!("a region that begins at {:#x}", pair[1].start);
            return Err(DamonError::Value { path, value, expected: "regions that do not overlap" });
        }
        if regions.is_empty() {
            return Err(DamonError::Value { path, value: "no region".to_owned(), expected: "some" });
        }
        Ok(Watched { regions, cost_ns: self.cost_ns() })
    }

    /// CPU time of the thread that watches: the first number of its schedstat.
    fn cost_ns(&self) -> Option<u64> {
        let pid: u32 = self.read("0/pid").ok()?.trim_end().parse().ok()?;
        let text = self.tree.read(&format!("proc/{pid}/schedstat")).ok()?;
        text.split_ascii_whitespace().next()?.parse().ok()
    }

    /// The holder, which excludes all others.
    fn who(&self) -> String {
        let is_on = |module: &&str| {
            let enabled = self.tree.read(&format!("sys/module/{module}/parameters/enabled"));
            enabled.is_ok_and(|text| text.trim_end() == "Y")
        };
        let names: Vec<&str> = ALONE.into_iter().filter(is_on).collect();
        if names.is_empty() { "another part of the kernel".to_owned() } else { names.join(" and ") }
    }

    fn read(&self, file: &str) -> Result<String, DamonError> {
        let path = below(file);
        self.tree.read(&path).map_err(|source| DamonError::File { path, source })
    }

    fn read_number(&self, file: &str) -> Result<u64, DamonError> {
        number(below(file), &self.read(file)?)
    }

    /// Writes, and tries again while somebody else uses the files for a moment.
    fn write(&self, file: &str, text: &str) -> Result<(), DamonError> {
        let path = below(file);
        let mut tries = 1;
        loop {
            match self.tree.write(&path, text) {
                Err(error) if is_busy(&error) && tries < TRIES => tries += 1,
                outcome => return outcome.map_err(|source| DamonError::File { path, source }),
            }
            self.tree.pause(TRY_AGAIN);
        }
    }
}

fn below(file: &str) -> String {
    format!("{FILES}/{file}")
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}

fn number(path: String, text: &str) -> Result<u64, DamonError> {
    let number = text.trim_end().parse();
    number.map_err(|_| DamonError::Value { path, value: sanitize_short(text), expected: "a number" })
}

/// Cuts memory into regions of one size.
fn first_regions(memory: &[(u64, u64)]) -> Result<Vec<(u64, u64)>, DamonError> {
    let mut memory = memory.to_vec();
    memory.sort_unstable();
    let (mut all, mut before) = (0_u64, 0);
    for &(start, end) in &memory {
        if start >= end || start < before || start % PAGE != 0 || end % PAGE != 0 {
            return Err(DamonError::Range(start, end));
        }
        (all, before) = (all.saturating_add(end - start), end);
    }
    let size = (all / FIRST_REGIONS).next_multiple_of(REGION).max(REGION);
    let mut regions = Vec::new();
    for (start, end) in memory {
        let mut at = start;
        while at < end {
            let next = (at / size + 1).saturating_mul(size).min(end);
            regions.push((at, next));
            at = next;
        }
    }
    Ok(regions)
}
