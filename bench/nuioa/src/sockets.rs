//! What both ends of the workloads on the network have in common.

use crate::{
    committed::{GUEST_ADDRESS, PEER_ADDRESS, Pace, Verb, Way},
    guest::process,
};
use anyhow::{Context, Result};
use std::path::Path;

const PORT: &str = "11111";
/// Longer than any cell, and more than can be sent in a second: sockperf keeps a record of each of so many messages.
const SECONDS: &str = "240";
const MOST_PER_SECOND: u32 = 10_000;
const RDMA: &str = "rxe0";
/// What a device of soft RoCE counts.
pub const RDMA_COUNTERS: &str = "/sys/class/infiniband/rxe0/ports/1/hw_counters";
/// Of perftest: more than any cell has time for.
const REQUESTS: &str = "1000000";
/// Requests of perftest that may be under way.
const DEPTH: &str = "4";

/// The arguments of sockperf at one end: of the one that sends if `client`.
pub fn sockperf(client: bool, way: Way, pace: Pace, bytes: usize) -> Vec<String> {
    let server = if way == Way::Receive { GUEST_ADDRESS } else { PEER_ADDRESS };
    let mode = match (client, pace) {
        (false, _) => "server",
        (true, Pace::Alone | Pace::Rate(_)) => "ping-pong",
        (true, Pace::Full) => "throughput",
    };
    let mut words: Vec<String> = [mode, "-i", server, "-p", PORT].map(str::to_owned).into();
    // Datagrams that a receiver has no time for are lost, and would be work without an operation.
    if (way, pace) == (Way::Receive, Pace::Full) {
        words.push("--tcp".to_owned());
    }
    if client {
        words.extend(["-m", &bytes.to_string(), "-t", SECONDS].map(str::to_owned));
        let per_second = match pace {
            Pace::Alone => Some(MOST_PER_SECOND),
            Pace::Rate(per_second) => Some(per_second),
            Pace::Full => None,
        };
        words.extend(per_second.map(|per_second| format!("--mps={per_second}")));
    }
    words
}

/// Makes an interface a device of soft RoCE, if there is none.
pub fn soft_roce(interface: &str) -> Result<()> {
    process::run("modprobe", &["-a", "rdma_rxe", "ib_uverbs"])?;
    if Path::new(RDMA_COUNTERS).exists() {
        process::run("rdma", &["link", "delete", RDMA])?;
    }
    process::run("rdma", &["link", "add", RDMA, "type", "rxe", "netdev", interface]).map(drop)
}

/// Program and arguments of perftest: of the end that initiates if the other one is named. It sleeps until something has completed,
/// as the time that it would poll for is the emulator's. Only with writes it polls: perftest has no events for them.
pub fn perftest(verb: Verb, bytes: usize, other: Option<&str>) -> (&'static str, Vec<String>) {
    let program = match verb {
        Verb::Send => "ib_send_bw",
        Verb::Read => "ib_read_bw",
        Verb::Write => "ib_write_bw",
        Verb::Atomic => "ib_atomic_bw",
    };
    let mut words: Vec<String> =
        ["-d", RDMA, "-F", "-x", "1", "-n", REQUESTS, "-t", DEPTH].map(str::to_owned).into();
    if verb != Verb::Write {
        words.push("-e".to_owned());
    }
    if verb != Verb::Atomic {
        words.extend(["-s".to_owned(), bytes.to_string()]);
    }
    words.extend(other.map(str::to_owned));
    (program, words)
}

/// The interface of a bridge that is not virtual.
pub fn card_of_bridge(bridge: &str) -> Result<String> {
    let directory = format!("/sys/class/net/{bridge}/brif");
    let mut names = std::fs::read_dir(&directory).with_context(|| directory.clone())?;
    let first = names.next().with_context(|| format!("{directory}: no interface"))??;
    Ok(first.file_name().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_part() {
        let words = |client, way, pace| sockperf(client, way, pace, 64).join(" ");
        let transmit = words(true, Way::Transmit, Pace::Alone);
        assert!(transmit.starts_with("ping-pong -i 10.77.0.2 ") && transmit.contains("-m 64"), "{transmit}");
        let paced = words(true, Way::Receive, Pace::Rate(40));
        assert!(paced.starts_with("ping-pong -i 10.77.9.1 ") && paced.ends_with("--mps=40"), "{paced}");
        assert!(words(false, Way::Receive, Pace::Full).starts_with("server -i 10.77.9.1 "));
        assert!(words(true, Way::Receive, Pace::Full).contains("--tcp"));
        assert!(!words(true, Way::Transmit, Pace::Full).contains("--tcp"));
        let (program, words) = perftest(Verb::Read, 1024, Some("10.77.0.2"));
        assert_eq!((program, words.last().map(String::as_str)), ("ib_read_bw", Some("10.77.0.2")));
        assert!(!perftest(Verb::Atomic, 8, None).1.contains(&"-s".to_owned()));
        let sleeps = |verb| perftest(verb, 8, None).1.contains(&"-e".to_owned());
        assert!(sleeps(Verb::Send) && !sleeps(Verb::Write), "perftest refuses -e with writes");
    }
}
