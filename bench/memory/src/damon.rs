//! The server's DAMON with a scheme for each guest node, as an operator may write it by hand for one VM whose homes are known
//! (Documentation/admin-guide/mm/damon/usage.rst): what is in the memory of guest node N goes to the server's node N, the hottest first.

use anyhow::{Context, Result, ensure};
use std::{fs, ops::Range};
use vnuma_bench_common::host::write;

const ADMIN: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// While it is on, no other program can use DAMON.
const STAT: &str = "/sys/module/damon_stat/parameters/enabled";
/// No limit.
const MOST: &str = "18446744073709551615";

/// It works until this is dropped.
pub struct Damon {
    /// damon_stat was on.
    stat: bool,
}

impl Damon {
    /// Starts it for a process. `ranges`: its addresses that are memory of each guest node.
    pub fn start(pid: i32, ranges: &[Range<u64>]) -> Result<Self> {
        let before =
            fs::read_to_string(format!("{ADMIN}/nr_kdamonds")).context("the server's kernel has no DAMON")?;
        ensure!(before.trim() == "0", "somebody else uses DAMON");
        let stat = fs::read_to_string(STAT).is_ok_and(|text| text.trim() == "Y");
        // Whatever follows is taken back.
        let damon = Self { stat };
        if stat {
            write(STAT, "N")?;
        }
        for (file, value) in files(pid, ranges) {
            write(&format!("{ADMIN}/{file}"), &value)?;
        }
        Ok(damon)
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        let off = write(&format!("{ADMIN}/0/state"), "off");
        if let Err(error) = off.and_then(|()| write(&format!("{ADMIN}/nr_kdamonds"), "0")) {
            eprintln!("{error:#}");
        }
        if self.stat
            && let Err(error) = write(STAT, "Y")
        {
            eprintln!("{error:#}");
        }
    }
}

/// What is written, in this order. What is not named stays as the kernel has it: 5 ms between samples, 100 ms between aggregations,
/// 10 to 1000 regions, no quotas.
fn files(pid: i32, ranges: &[Range<u64>]) -> Vec<(String, String)> {
    let (context, count) = ("0/contexts/0", ranges.len().to_string());
    let mut files: Vec<(String, String)> = [
        ("nr_kdamonds", "1"),
        ("0/contexts/nr_contexts", "1"),
        ("0/contexts/0/operations", "fvaddr"),
        ("0/contexts/0/targets/nr_targets", "1"),
    ]
    .map(|(file, value)| (file.to_owned(), value.to_owned()))
    .into();
    let mut add = |file: String, value: &str| files.push((format!("{context}/{file}"), value.to_owned()));
    add("targets/0/pid_target".to_owned(), &pid.to_string());
    add("targets/0/regions/nr_regions".to_owned(), &count);
    // In rising order, as DAMON wants them.
    let mut sorted: Vec<&Range<u64>> = ranges.iter().collect();
    sorted.sort_by_key(|range| range.start);
    for (at, range) in sorted.into_iter().enumerate() {
        add(format!("targets/0/regions/{at}/start"), &range.start.to_string());
        add(format!("targets/0/regions/{at}/end"), &range.end.to_string());
    }
    add("schemes/nr_schemes".to_owned(), &count);
    for (node, range) in ranges.iter().enumerate() {
        let mut of = |file: &str, value: &str| add(format!("schemes/{node}/{file}"), value);
        of("action", "migrate_hot");
        of("target_nid", &node.to_string());
        for pattern in ["sz", "nr_accesses", "age"] {
            of(&format!("access_pattern/{pattern}/max"), if pattern == "sz" { MOST } else { "4294967295" });
        }
        of("core_filters/nr_filters", "1");
        of("core_filters/0/type", "addr");
        of("core_filters/0/matching", "Y");
        of("core_filters/0/allow", "Y");
        of("core_filters/0/addr_start", &range.start.to_string());
        of("core_filters/0/addr_end", &range.end.to_string());
    }
    files.push(("0/state".to_owned(), "on".to_owned()));
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_guest_node_has_a_scheme_and_regions_rise() {
        let files = files(7, &[0x8000..0x9000, 0x1000..0x2000]);
        let value = |file: &str| files.iter().find(|(name, _)| name == file).map(|(_, value)| value.as_str());
        assert_eq!(value("0/contexts/0/targets/0/pid_target"), Some("7"));
        assert_eq!(value("0/contexts/0/targets/0/regions/0/start"), Some("4096"));
        assert_eq!(value("0/contexts/0/schemes/1/core_filters/0/addr_start"), Some("4096"));
        assert_eq!(value("0/contexts/0/schemes/1/target_nid"), Some("1"));
        assert_eq!(
            files.last().map(|(name, value)| (name.as_str(), value.as_str())),
            Some(("0/state", "on"))
        );
    }
}
