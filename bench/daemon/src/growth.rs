//! How the cost of a move grows with the number of VMs. On a shared machine that cost differs by a
//! quarter from minute to minute. So a small and a large host run at the same time, and their vCPUs are moved in turn.

use crate::{
    figures::Growth,
    moves::Moves,
    readers::Clients,
    row::{Host, Plan, progress},
};
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};
use vnuma_bench_figures::stats::Samples;

/// VMs of the small host and of the large one.
const VMS: [usize; 2] = [100, 1000];
const MOVES_PER_S: u64 = 500;
/// How often each is moved.
const TURNS: usize = 9;
/// Moves before those of a turn that count: the first ones after a pause find what they need in no cache.
const WARM_UP: Duration = Duration::from_secs(1);
/// Moves of a turn, and the time until the last of them has been published.
const WINDOW: Duration = Duration::from_secs(4);
const DRAIN: Duration = Duration::from_millis(500);

pub fn measure(vnumad: &Path, log: Option<&Path>) -> anyhow::Result<Growth> {
    eprintln!("growth: {} and {} VMs at the same time, moved in turn", VMS[0], VMS[1]);
    let few = Side { vnumad, vms: VMS[0], log };
    Ok(match in_turn(&[few, Side { vms: VMS[1], ..few }])? {
        Ok(measured) => Growth::of(VMS, MOVES_PER_S, measured.cpu_us_per_move),
        Err(reason) => Growth { skipped: Some(reason), ..Growth::of(VMS, MOVES_PER_S, Vec::new()) },
    })
}

/// A vnumad, and how many VMs it has.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    pub vnumad: &'a Path,
    pub vms: usize,
    pub log: Option<&'a Path>,
}

/// What two vnumads that existed at the same time took in each turn.
#[derive(Default)]
pub struct Measured {
    pub cpu_us_per_move: Vec<[f64; 2]>,
    pub publish_p99_ms: Vec<[Option<f64>; 2]>,
}

/// Brings up both, and moves the VMs of one and then of the other, turn by turn. `Err(reason)` in the inner result: that does not
/// work here.
pub fn in_turn(sides: &[Side; 2]) -> anyhow::Result<Result<Measured, String>> {
    let begin = Instant::now();
    let up = |side: &Side| {
        Host::up(&Plan {
            vnumad: side.vnumad,
            backend: "qmp",
            locations: "bpf",
            vms: side.vms,
            moves_per_s: MOVES_PER_S,
            clients: Clients::Readers,
            window: WINDOW,
            log: side.log,
        })
    };
    let [first, second] = match (up(&sides[0])?, up(&sides[1])?) {
        (Ok(first), Ok(second)) => [first, second],
        (Err(reason), _) | (_, Err(reason)) => return Ok(Err(reason)),
    };
    let hosts = [&first, &second];
    let mut moves = hosts.map(|host| Moves::new(&host.vms));
    let mut measured = Measured::default();
    for turn in 0..TURNS {
        // Which one is first alternates, so that what a turn leaves behind is shared.
        let first = turn % 2;
        let mut spans = [Span::default(); 2];
        for host in [first, 1 - first] {
            spans[host] = Span::of(&hosts, &mut moves[host])?;
        }
        measured.cpu_us_per_move.push([spans[0].cost(0, &spans[1]), spans[1].cost(1, &spans[0])]);
        measured.publish_p99_ms.push(spans.map(|span| span.publish_p99_ms));
        progress(begin, &format!("turn {} of {TURNS}", turn + 1));
    }
    Ok(Ok(measured))
}

/// What both vnumads used while the VMs of one were moved.
#[derive(Clone, Copy, Default)]
struct Span {
    seconds: f64,
    moves: usize,
    cpu_ns: [f64; 2],
    publish_p99_ms: Option<f64>,
}

impl Span {
    fn of(hosts: &[&Host; 2], moves: &mut Moves) -> anyhow::Result<Self> {
        moves.run(MOVES_PER_S, WARM_UP)?;
        thread::sleep(DRAIN);
        moves.forget();
        let (begin, before) = (Instant::now(), cpu_ns(hosts)?);
        let made = moves.run(MOVES_PER_S, WINDOW)?;
        thread::sleep(DRAIN);
        let after = cpu_ns(hosts)?;
        let cpu_ns = [0, 1].map(|host| after[host].saturating_sub(before[host]) as f64);
        let seconds = begin.elapsed().as_secs_f64();
        moves.collect_all();
        let publish_p99_ms = moves.latencies_ms.iter().copied().collect::<Samples>().percentile(99);
        Ok(Self { seconds, moves: made, cpu_ns, publish_p99_ms })
    }

    /// Microseconds of a move of `host` in its own span, less what its vnumad used in the other's, at rest.
    fn cost(&self, host: usize, other: &Self) -> f64 {
        let rest = other.cpu_ns[host] * self.seconds / other.seconds;
        (self.cpu_ns[host] - rest) / 1e3 / self.moves as f64
    }
}

fn cpu_ns(hosts: &[&Host; 2]) -> anyhow::Result<[u64; 2]> {
    Ok([hosts[0].daemon.cpu_ns()?, hosts[1].daemon.cpu_ns()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_that_was_disturbed_does_not_decide() {
        let growth = Growth::of([1, 2], 3, vec![[50.0, 55.0], [50.0, 500.0], [100.0, 110.0]]);
        assert_eq!(growth.cpu_us_per_move, [Some(50.0), Some(110.0)]);
        assert_eq!(growth.ratio, Some(1.1));
        assert_eq!(Growth::of(VMS, MOVES_PER_S, Vec::new()).ratio, None);
    }

    #[test]
    fn what_is_used_at_rest_is_no_cost_of_moves() {
        let few = Span { seconds: 2.0, moves: 10, cpu_ns: [600e3, 70e3], publish_p99_ms: None };
        let many = Span { seconds: 1.0, moves: 10, cpu_ns: [50e3, 300e3], publish_p99_ms: None };
        assert_eq!((few.cost(0, &many), many.cost(1, &few)), (50.0, 26.5));
    }
}
