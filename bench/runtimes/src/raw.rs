//! What was measured, before anything is concluded: a line of JSON each, so that a run that is cut off leaves what it has.

use crate::committed::{By, Cell as Wanted, Policy, Workload};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::Path;
use vnuma_bench_common::{report::Raw, threads::Values};

/// A line of what the server prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// First.
    Server(Server),
    /// A workload under a policy.
    Cell(Cell),
}

/// The server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// The profile that it counts with.
    pub profile: String,
    /// Sets and ways of the second last-level cache, if one is modelled.
    pub second_llc: Option<(u32, u32)>,
    /// Its kernel.
    pub kernel: String,
    /// That of the guest.
    pub guest_kernel: String,
    /// What `java -version` says first, or [`NO_JAVA`].
    pub java: String,
}

/// No Java was brought, as no workload needs one.
pub const NO_JAVA: &str = "none";

impl Server {
    /// Whether cells of both may stand beside each other.
    fn is_like(&self, other: &Self) -> bool {
        let without_java = |server: &Self| Self { java: String::new(), ..server.clone() };
        let java_differs = self.java != other.java && self.java != NO_JAVA && other.java != NO_JAVA;
        without_java(self) == without_java(other) && !java_differs
    }
}

/// A workload under a policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    pub workload: Workload,
    /// Which.
    pub policy: Policy,
    /// Changes a minute of guest time, for a VM of 16 vCPUs.
    pub changes_per_minute: u32,
    /// How they come about.
    #[serde(default)]
    pub by: By,
    /// Whether the guest's kernel takes pages to the threads that use them.
    #[serde(default = "is_on")]
    pub autonuma: bool,
    /// Which one of those that are the same.
    #[serde(default)]
    pub take: u32,
    /// How long it was measured, seconds of the guest.
    pub window_s: f64,
    /// What the load has done.
    pub operations: u64,
    /// What each vCPU did for it.
    pub vcpus: Vec<Values>,
    /// Moves of vCPUs.
    pub changes: Vec<Change>,
    /// About one a second.
    pub samples: Vec<Sample>,
    /// Pages that the guest's kernel has moved meanwhile (`numa_pages_migrated`).
    pub pages_migrated: u64,
    /// At its end, does the guest use the true node of each vCPU? None: it is not attached.
    pub told: Option<bool>,
    /// What was measured. Empty in what was measured before it was told.
    #[serde(default)]
    pub commit: String,
}

impl Cell {
    /// Which of those that are compared.
    pub fn which(&self) -> Wanted {
        Wanted {
            workload: self.workload,
            policy: self.policy,
            rate: self.changes_per_minute,
            by: self.by,
            autonuma: self.autonuma,
            take: self.take,
        }
    }
}

/// What a file has.
#[derive(Default)]
pub struct Measured {
    pub server: Option<Server>,
    pub cells: Vec<Cell>,
    /// Cells that did not come about at first.
    pub again: Vec<String>,
}

/// A cell that was measured again counts as it was last.
pub fn read(path: &Path) -> Result<Measured> {
    let Raw { lines, again } = Raw::read(path)?;
    let mut read = Measured { again, ..Measured::default() };
    for line in lines {
        match line {
            Line::Server(line) => {
                let same = read.server.as_ref().is_none_or(|before| before.is_like(&line));
                ensure!(same, "{}: of two servers; remove the file to begin anew", path.display());
                // The Java of those that had one.
                if read.server.is_none() || line.java != NO_JAVA {
                    read.server = Some(line);
                }
            }
            Line::Cell(cell) => {
                read.cells.retain(|before| before.which() != cell.which());
                read.cells.push(cell);
            }
        }
    }
    Ok(read)
}

/// As in what was measured before there was a choice.
fn is_on() -> bool {
    true
}

/// A vCPU goes to another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// When, seconds of the guest since it is measured.
    pub at_s: f64,
    /// Which.
    pub vcpu: usize,
    /// Where to.
    pub node: usize,
}

/// Accesses to memory since the sample before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its end, seconds of the guest since it is measured.
    pub at_s: f64,
    /// Of each vCPU: local ones, and remote ones.
    pub accesses: Vec<[u64; 2]>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn cell(policy: Policy, operations: u64) -> Line {
        Line::Cell(Cell {
            workload: Workload::Stream,
            policy,
            changes_per_minute: 20,
            by: By::Hand,
            autonuma: true,
            take: 0,
            window_s: 48.0,
            operations,
            vcpus: Vec::new(),
            changes: Vec::new(),
            samples: Vec::new(),
            pages_migrated: 0,
            told: None,
            commit: "abc".to_owned(),
        })
    }

    fn server(java: &str) -> Line {
        Line::Server(Server {
            profile: "broadwell-2s".to_owned(),
            second_llc: None,
            kernel: "7.3".to_owned(),
            guest_kernel: "6.12".to_owned(),
            java: java.to_owned(),
        })
    }

    #[test]
    fn runs_that_go_on_are_read_as_one_and_only_of_one_server() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let mut write = |line: &Line| {
            writeln!(file, "{}", serde_json::to_string(line).expect("JSON")).expect("written");
            read(file.path()).map(|Measured { server, cells, .. }| {
                let cells = cells.iter().map(|cell| (cell.policy, cell.operations));
                (server.is_some(), cells.collect::<Vec<_>>())
            })
        };
        write(&server("17")).expect("read");
        write(&cell(Policy::Ideal, 1)).expect("read");
        write(&cell(Policy::Full, 2)).expect("read");
        write(&server("17")).expect("read");
        let read = write(&cell(Policy::Ideal, 3)).expect("read");
        assert_eq!(read, (true, vec![(Policy::Full, 2), (Policy::Ideal, 3)]));
        write(&server(NO_JAVA)).expect("read");
        let error = format!("{:#}", write(&server("21")).expect_err("another server"));
        assert!(error.contains("of two servers"), "{error}");
    }
}
