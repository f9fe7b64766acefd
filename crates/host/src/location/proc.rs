//! A thread's location as /proc has it.

use super::{LocationError, monotonic_ns};
use std::{
    fs::File,
    io::{self, Read},
};
use vnuma_process::text::sanitize_short;
use vnuma_topology::{CpuId, CpuSet, HostTopology, VcpuLocation};

/// `status` has some 60 lines; the longest are a mask and a list of 8192 CPUs, 40 KiB at worst.
const FILE_LIMIT: u64 = 64 * 1024;

/// What /proc says of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThreadState {
    pub(super) cpu: CpuId,
    pub(super) allowed: CpuSet,
}

/// Where a thread is now. `pinned` is the one node that all of its allowed CPUs which are
/// online are on.
pub fn read_location(topology: &HostTopology, pid: i32, tid: i32) -> Result<VcpuLocation, LocationError> {
    // Before the reading, so that any event from now on counts as newer.
    let time_ns = monotonic_ns();
    let ThreadState { cpu, allowed } = read_thread(pid, tid)?;
    let node = topology.node_of_cpu(cpu).ok_or(LocationError::UnknownCpu { tid, cpu })?;
    Ok(VcpuLocation { cpu, node, pinned: topology.node_of_cpus(&allowed), time_ns })
}

/// The allowed CPUs first: whoever sets them and moves the thread then does so in this order.
pub(super) fn read_thread(pid: i32, tid: i32) -> Result<ThreadState, LocationError> {
    let (path, status) = read(pid, tid, "status")?;
    let invalid = |path, field, value: &str, reason: String| LocationError::Value {
        path,
        field,
        value: sanitize_short(value),
        reason,
    };
    let list = allowed_list(&status);
    let allowed = list.parse::<CpuSet>();
    let allowed = allowed.map_err(|why| invalid(path, "Cpus_allowed_list", list, why.to_string()))?;
    let (path, stat) = read(pid, tid, "stat")?;
    let cpu = last_cpu(&stat)
        .ok_or_else(|| invalid(path, "processor (field 39)", &stat, "no CPU number".to_owned()))?;
    Ok(ThreadState { cpu, allowed })
}

/// CPUs that a thread may run on.
pub fn read_allowed(pid: i32, tid: i32) -> Result<CpuSet, LocationError> {
    read_thread(pid, tid).map(|thread| thread.allowed)
}

fn read(pid: i32, tid: i32, file: &str) -> Result<(String, String), LocationError> {
    if pid <= 0 || tid <= 0 {
        return Err(LocationError::NoThread { pid, tid });
    }
    let path = format!("/proc/{pid}/task/{tid}/{file}");
    let mut bytes = Vec::new();
    match File::open(&path).and_then(|file| file.take(FILE_LIMIT).read_to_end(&mut bytes)) {
        // The name of a thread may be any bytes.
        Ok(_) => Ok((path, String::from_utf8_lossy(&bytes).into_owned())),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) =>
        {
            Err(LocationError::NoThread { pid, tid })
        }
        Err(source) => Err(LocationError::Read { path, source }),
    }
}

/// `Cpus_allowed_list` of a `status` file; empty if there is none. The name, in the first
/// line, has its line breaks escaped by the kernel.
pub fn allowed_list(status: &str) -> &str {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default()
}

/// Field 39 of a `stat` file, the CPU the thread runs on or ran on last. The name
/// (field 2) may contain anything, parentheses included, so fields are counted from its end.
pub fn last_cpu(stat: &str) -> Option<CpuId> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_found_behind_a_hostile_name() {
        let numbers: Vec<String> = (4..=52).map(|field| (field * 10).to_string()).collect();
        let stat = format!("77 (a) R 1) 2\n(x) S {}", numbers.join(" "));
        assert_eq!(last_cpu(&stat), Some(390));
        assert_eq!(last_cpu("77 (a) S 1 2 3"), None);
        assert_eq!(allowed_list("Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1,4\n").trim(), "0-1,4");
        assert_eq!(allowed_list("Name: x"), "");
    }

    #[test]
    fn a_thread_that_is_not_there() {
        for (pid, tid) in [(0, 1), (-1, -1), (1, i32::MAX)] {
            let error = read_location(&HostTopology::default(), pid, tid).unwrap_err();
            assert!(matches!(error, LocationError::NoThread { .. }), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|[0-9() \\n:]){0,200}") {
            let _ = (last_cpu(&text), allowed_list(&text));
        }
    }
}
