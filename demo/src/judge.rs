//! What the samples of a run say: was a page on the node of the vCPU that touched it, and did the guest follow?

use crate::checker::Sample;
use crate::locations::Locations;
use crate::record::Kind;
use crate::report::VmReport;
use crate::series::{Move, Touch};
use anyhow::{Result, bail, ensure};
use vnuma_scenario::Vm;

/// Pages at the end of a stay that say whether the guest has followed.
const LAST_PAGES: usize = 64;
/// How many of them must be local. Not all: AutoNUMA may be migrating one.
const LAST_LOCAL_PAGES: usize = 60;

/// Compares the node of each page that was touched before a time with that of the vCPU that touched it. `told` says whether the guest
/// knew of a change of the first time at the second, both of the host's time stamp counter.
pub fn judge(
    vm: &Vm,
    samples: &[Sample],
    locations: &Locations,
    until_tsc: u64,
    told: &impl Fn(u64, u64) -> bool,
) -> Result<VmReport> {
    let mut report = VmReport::default();
    let (mut local, mut resident_local) = (0usize, 0usize);
    let samples: Vec<Sample> =
        samples.iter().filter(|sample| sample.before_tsc < until_tsc).copied().collect();
    for sample in &samples {
        let node_at = |tsc| locations.node(sample.tid, tsc);
        let (before, after) = (node_at(sample.before_tsc), node_at(sample.after_tsc));
        ensure!(before.is_some() && after.is_some(), "no location of thread {} in the trace", sample.tid);
        let is_local = sample.is_local(locations);
        report.pages_not_found += usize::from(sample.node.is_none());
        match sample.kind {
            Kind::Fresh => {
                report.pages += 1;
                report.pages_in_transit += usize::from(before != after);
                local += usize::from(is_local);
            }
            Kind::Resident => {
                report.resident_pages += 1;
                resident_local += usize::from(is_local);
            }
        }
    }
    if report.pages == 0 || report.resident_pages == 0 {
        bail!("the guest of {} reported no pages", vm.name);
    }
    for &tid in &vm.threads {
        add_stays(&mut report, tid, &samples, locations, told);
    }
    report.local_share = local as f64 / report.pages as f64;
    report.resident_local_share = resident_local as f64 / report.resident_pages as f64;
    let stays = |&tid: &i32| locations.stays(tid).iter().filter(|stay| stay.since_tsc < until_tsc).count();
    report.vcpu_node_changes = vm.threads.iter().map(|tid| stays(tid).saturating_sub(1)).sum();
    Ok(report)
}

/// The fresh pages among samples, by time.
pub fn touches(samples: &[Sample], locations: &Locations, seconds: impl Fn(u64) -> f64) -> Vec<Touch> {
    let fresh = samples.iter().filter(|sample| sample.kind == Kind::Fresh);
    let touch =
        |sample: &Sample| Touch { seconds: seconds(sample.after_tsc), local: sample.is_local(locations) };
    fresh.map(touch).collect()
}

/// The changes of node of a VM's vCPUs, by time. `threads` are in the order of the vCPUs.
pub fn moves(threads: &[i32], locations: &Locations, seconds: impl Fn(u64) -> f64) -> Vec<Move> {
    let mut moves = Vec::new();
    for (vcpu, &tid) in threads.iter().enumerate() {
        moves.extend(locations.stays(tid).windows(2).map(|pair| Move {
            seconds: seconds(pair[1].since_tsc),
            vcpu,
            from_node: pair[0].node,
            to_node: pair[1].node,
        }));
    }
    moves.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    moves
}

/// Counts stays of a vCPU on a host node, and those at whose end fresh pages were local. Short ones, in which too few pages
/// were touched, are left out. Time does not count: a guest that has to wait for a CPU follows late, but it follows.
fn add_stays(
    report: &mut VmReport,
    tid: i32,
    samples: &[Sample],
    locations: &Locations,
    told: &impl Fn(u64, u64) -> bool,
) {
    let mut fresh: Vec<_> =
        samples.iter().filter(|sample| sample.kind == Kind::Fresh && sample.tid == tid).collect();
    fresh.sort_unstable_by_key(|sample| sample.before_tsc);
    let since = |tsc| {
        let stays = locations.stays(tid).iter().map(|stay| stay.since_tsc);
        stays.take_while(|since| *since <= tsc).last().unwrap_or_default()
    };
    for stay in fresh.chunk_by(|one, next| since(one.before_tsc) == since(next.before_tsc)) {
        let Some((_, last)) = stay.split_last_chunk::<LAST_PAGES>() else { continue };
        let local = last.iter().filter(|sample| {
            let node = locations.node(tid, sample.before_tsc);
            node.is_some() && node == sample.node
        });
        let (followed, since) = (local.count() >= LAST_LOCAL_PAGES, since(last[0].before_tsc));
        report.stays += 1;
        report.stays_followed += usize::from(followed);
        // The guest was attached where its vCPUs were at the start.
        let told = since == 0 || told(since, last[0].before_tsc);
        report.stays_told += usize::from(told);
        report.told_missed += usize::from(told && !followed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locations::Stay;

    /// Counts of one vCPU that is on the nodes 0, 1 and 0 from the times 0, 1000 and 2000 on. `pages`: (time of the first, node, how many).
    fn count(pages: &[(u64, Option<u32>, u64)], told_at: u64) -> [usize; 4] {
        let stay = |since_tsc, node| Stay { since_tsc, node: Some(node) };
        let locations = Locations::of(7, &[stay(0, 0), stay(1000, 1), stay(2000, 0)]);
        let samples = pages.iter().flat_map(|&(first, node, count)| {
            (first..first + count).map(move |tsc| Sample {
                kind: Kind::Fresh,
                tid: 7,
                before_tsc: tsc,
                after_tsc: tsc,
                node,
            })
        });
        let (mut report, samples) = (VmReport::default(), samples.collect::<Vec<_>>());
        add_stays(&mut report, 7, &samples, &locations, &|since, at| since <= told_at && told_at <= at);
        [report.stays, report.stays_followed, report.stays_told, report.told_missed]
    }

    #[test]
    fn a_stay_counts_by_its_last_pages() {
        let late = [(0, Some(0), 64), (1000, Some(0), 500), (1600, Some(1), 64)];
        assert_eq!(count(&late, 1550), [2, 2, 2, 0]);
        let never = [(0, Some(0), 64), (1000, Some(0), 500), (2000, Some(0), 64)];
        assert_eq!(count(&never, 1400), [3, 2, 2, 1]);
        let too_short = [(0, Some(0), 64), (1000, Some(0), 63), (2000, Some(1), 4), (2010, Some(0), 60)];
        assert_eq!(count(&too_short, 2000), [2, 2, 2, 0]);
        assert_eq!(count(&[(0, None, 64)], 0), [1, 0, 1, 1]);
        assert_eq!(count(&[], 0), [0; 4]);
    }

    /// On a busy machine a stay may end before the guest is told, or the pages that count may be taken before that.
    #[test]
    fn a_stay_that_the_guest_is_told_of_late_is_not_missed() {
        let pages = [(0, Some(0), 64), (1000, Some(0), 500)];
        assert_eq!(count(&pages, 1436), [2, 1, 2, 1]);
        assert_eq!(count(&pages, 1437), [2, 1, 1, 0]);
    }

    #[test]
    fn moves_and_pages_have_their_times_and_places() {
        let stay = |since_tsc, node| Stay { since_tsc, node: Some(node) };
        let locations = Locations::of(7, &[stay(0, 0), stay(300, 1)]);
        let seconds = |tsc: u64| tsc as f64 / 100.0;
        let moved = Move { seconds: 3.0, vcpu: 1, from_node: Some(0), to_node: Some(1) };
        assert_eq!(moves(&[8, 7], &locations, seconds), [moved]);
        let sample = |kind, before_tsc, after_tsc, node| Sample { kind, tid: 7, before_tsc, after_tsc, node };
        let samples = [
            sample(Kind::Fresh, 100, 200, Some(0)),
            sample(Kind::Resident, 100, 200, Some(0)),
            sample(Kind::Fresh, 299, 301, Some(1)),
            sample(Kind::Fresh, 300, 400, Some(1)),
            sample(Kind::Fresh, 400, 500, None),
        ];
        let touches = touches(&samples, &locations, seconds);
        let seen: Vec<_> = touches.iter().map(|touch| (touch.seconds, touch.local)).collect();
        assert_eq!(
            seen,
            [(2.0, true), (3.01, false), (4.0, true), (5.0, false)],
            "a page in transit is not local"
        );
    }
}
