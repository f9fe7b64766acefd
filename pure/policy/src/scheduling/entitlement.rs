//! How much CPU time each vCPU is entitled to, by the control groups (cgroup v2) that it is in.
//!
//! ```text
//!   cpu.max      a group wants no more than its limit: a vCPU that waits for more is throttled, and no CPU helps it
//!   cpu.weight   if more is wanted than there is, a group's time is divided among its members by their weights, and what one
//!                of them does not want goes to the others
//! ```
//!
//! The kernel does the same, CPU by CPU. Here all CPUs that vCPUs may use count as one, which they would be with a perfect
//! balance.

/// `cpu.weight` of a thread that is in no group of its own, beside groups.
pub const DEFAULT_WEIGHT: u32 = 100;

/// A control group that the kernel's scheduler knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuGroup {
    /// Position of the group that it is in. It comes before this one. `None`: it is in the root.
    pub parent: Option<usize>,
    /// `cpu.weight`, 1 to 10000.
    pub weight: u32,
    /// `cpu.max`, thousandths of a CPU. `None`: no limit.
    pub limit_permille: Option<u64>,
}

/// What a vCPU did in a period, and wanted to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Position of its group. `None`: it is in the root.
    pub group: Option<usize>,
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time that it was ready to run and did not, nanoseconds. Whether it had no CPU or no quota the kernel does not say.
    pub waited_ns: u64,
    /// Weights do not apply to it, as it has CPUs for itself or a real-time class.
    pub apart: bool,
}

/// What a vCPU could have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entitlement {
    /// The part of its waiting that another CPU would have ended.
    pub waited_ns: u64,
    /// CPU time that it is entitled to. It is what it wanted, if there is enough for all.
    pub entitled_ns: u64,
}

/// Divides CPU time. Groups that are not there count as the root, and so does a parent that does not come before its group.
pub fn entitle(groups: &[CpuGroup], wants: &[Want], capacity_ns: u64, period_ns: u64) -> Vec<Entitlement> {
    let mut tree = Tree::new(groups, wants);
    tree.limit(period_ns);
    let mut shares: Vec<Entitlement> = wants.iter().map(|want| tree.unthrottled(want)).collect();
    let together = wants.iter().zip(&shares).filter(|(want, _)| !want.apart);
    if together.fold(0_u64, |sum, (_, share)| sum.saturating_add(share.entitled_ns)) > capacity_ns {
        tree.divide(wants, &mut shares, capacity_ns);
    }
    shares
}

/// A group while it is computed.
#[derive(Clone, Debug, Default)]
struct Node {
    /// `None` for the root.
    parent: Option<usize>,
    weight: u32,
    limit_permille: Option<u64>,
    ran_ns: u64,
    waited_ns: u64,
    /// Share of the waiting of its members that is not for quota, with that of all groups that it is in.
    waits: f64,
}

/// The root, and then the groups in their order.
struct Tree(Vec<Node>);

/// Who gets a part of a group's time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Member {
    who: Who,
    weight: f64,
    wanted_ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Group(usize),
    Vcpu(usize),
}

impl Tree {
    fn new(groups: &[CpuGroup], wants: &[Want]) -> Self {
        let mut nodes = vec![Node { waits: 1.0, ..Node::default() }];
        for (at, group) in groups.iter().enumerate() {
            nodes.push(Node {
                parent: Some(group.parent.filter(|parent| *parent < at).map_or(0, |parent| parent + 1)),
                weight: group.weight.max(1),
                limit_permille: group.limit_permille,
                waits: 1.0,
                ..Node::default()
            });
        }
        let mut tree = Self(nodes);
        for want in wants {
            let node = tree.of(want);
            tree.0[node].ran_ns = tree.0[node].ran_ns.saturating_add(want.ran_ns);
            tree.0[node].waited_ns = tree.0[node].waited_ns.saturating_add(want.waited_ns);
        }
        tree
    }

    fn of(&self, want: &Want) -> usize {
        want.group.filter(|group| *group < self.0.len() - 1).map_or(0, |group| group + 1)
    }

    /// Limits, from the leaves up: what a group wants beyond its own is not waiting for a CPU.
    fn limit(&mut self, period_ns: u64) {
        for at in (1..self.0.len()).rev() {
            let Node { parent, limit_permille, ran_ns, waited_ns, .. } = self.0[at].clone();
            if let Some(limit) = limit_permille {
                let limit_ns = u128::from(limit) * u128::from(period_ns) / 1000;
                let left_ns = limit_ns.saturating_sub(u128::from(ran_ns));
                if u128::from(waited_ns) > left_ns {
                    self.0[at].waits = left_ns as f64 / waited_ns as f64;
                    self.0[at].waited_ns = left_ns as u64;
                }
            }
            let (ran_ns, waited_ns) = (self.0[at].ran_ns, self.0[at].waited_ns);
            let parent = &mut self.0[parent.unwrap_or(0)];
            parent.ran_ns = parent.ran_ns.saturating_add(ran_ns);
            parent.waited_ns = parent.waited_ns.saturating_add(waited_ns);
        }
        for at in 1..self.0.len() {
            self.0[at].waits *= self.0[self.0[at].parent.unwrap_or(0)].waits;
        }
    }

    fn unthrottled(&self, want: &Want) -> Entitlement {
        let waited_ns = (want.waited_ns as f64 * self.0[self.of(want)].waits) as u64;
        Entitlement { waited_ns, entitled_ns: want.ran_ns.saturating_add(waited_ns) }
    }

    /// Weights, from the root down.
    fn divide(&self, wants: &[Want], shares: &mut [Entitlement], capacity_ns: u64) {
        let mut members: Vec<Vec<Member>> = vec![Vec::new(); self.0.len()];
        let mut wanted: Vec<f64> = vec![0.0; self.0.len()];
        for (at, (want, share)) in wants.iter().zip(&*shares).enumerate().filter(|(_, (want, _))| !want.apart)
        {
            let (node, wanted_ns) = (self.of(want), share.entitled_ns as f64);
            wanted[node] += wanted_ns;
            members[node].push(Member { who: Who::Vcpu(at), weight: f64::from(DEFAULT_WEIGHT), wanted_ns });
        }
        for at in (1..self.0.len()).rev() {
            let (parent, wanted_ns) = (self.0[at].parent.unwrap_or(0), wanted[at]);
            wanted[parent] += wanted_ns;
            let weight = f64::from(self.0[at].weight);
            members[parent].push(Member { who: Who::Group(at), weight, wanted_ns });
        }
        let mut budgets = vec![0.0; self.0.len()];
        budgets[0] = capacity_ns as f64;
        for at in 0..self.0.len() {
            for (who, part) in fill(&mut members[at], budgets[at]) {
                match who {
                    Who::Group(group) => budgets[group] = part,
                    Who::Vcpu(vcpu) => shares[vcpu].entitled_ns = part as u64,
                }
            }
        }
    }
}

/// Divides a budget by weights; nobody gets more than it wants, and what is left is divided again.
fn fill(members: &mut [Member], mut budget: f64) -> impl Iterator<Item = (Who, f64)> + '_ {
    // Who wants least for its weight is satisfied first.
    members.sort_by(|a, b| (a.wanted_ns * b.weight).total_cmp(&(b.wanted_ns * a.weight)));
    let mut weights: f64 = members.iter().map(|member| member.weight).sum();
    members.iter().map(move |member| {
        let part = (budget * member.weight / weights).min(member.wanted_ns).max(0.0);
        budget -= part;
        weights -= member.weight;
        (member.who, part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn group(parent: Option<usize>, weight: u32, limit_permille: Option<u64>) -> CpuGroup {
        CpuGroup { parent, weight, limit_permille }
    }

    fn want(group: Option<usize>, ran_permille: u64, waited_permille: u64) -> Want {
        let ns = |permille: u64| SECOND_NS / 1000 * permille;
        Want { group, ran_ns: ns(ran_permille), waited_ns: ns(waited_permille), apart: false }
    }

    /// Per mille of the period: waiting, and what it is entitled to.
    fn shares(groups: &[CpuGroup], wants: &[Want], cpus: u64) -> Vec<(u64, u64)> {
        let permille = |ns: u64| (ns + SECOND_NS / 2000) / (SECOND_NS / 1000);
        let shares = entitle(groups, wants, cpus * SECOND_NS, SECOND_NS);
        shares.iter().map(|share| (permille(share.waited_ns), permille(share.entitled_ns))).collect()
    }

    #[test]
    fn who_has_used_up_its_quota_does_not_wait_for_a_cpu() {
        let groups = [group(None, 100, Some(500)), group(None, 100, Some(1500)), group(Some(1), 100, None)];
        let wants = [
            // Throttled.
            want(Some(0), 500, 500),
            // Its group has half a CPU left, for which these two wait.
            want(Some(2), 400, 600),
            want(Some(2), 600, 400),
            // No limit.
            want(None, 400, 600),
        ];
        assert_eq!(shares(&groups, &wants, 8), [(0, 500), (300, 700), (200, 800), (600, 1000)]);
    }

    #[test]
    fn scarce_time_is_divided_by_weights_and_not_by_vcpus() {
        // Two VMs with equal weights and a third with twice as much, on four CPUs.
        let groups = [group(None, 100, None), group(None, 100, None), group(None, 200, None)];
        let mut wants = vec![want(Some(0), 500, 500); 4];
        wants.extend([want(Some(1), 500, 500); 2]);
        wants.extend([want(Some(2), 500, 500); 4]);
        let shares_of = shares(&groups, &wants, 4);
        let entitled: Vec<u64> = shares_of.iter().map(|(_, entitled)| *entitled).collect();
        assert_eq!(entitled, [250, 250, 250, 250, 500, 500, 500, 500, 500, 500]);
        // What the second does not want goes to the others.
        (wants[4], wants[5]) = (want(Some(1), 100, 0), want(Some(1), 100, 0));
        let entitled: Vec<u64> = shares(&groups, &wants, 4).iter().map(|(_, entitled)| *entitled).collect();
        assert_eq!(entitled, [317, 317, 317, 317, 100, 100, 633, 633, 633, 633]);
        // With enough for all nobody is limited.
        assert!(shares(&groups, &wants, 10).iter().all(|(_, entitled)| [100, 1000].contains(entitled)));
    }

    #[test]
    fn groups_in_groups_share_what_the_outer_one_gets() {
        // A slice of weight 100 with two VMs, beside a thread in the root.
        let groups = [group(None, 100, None), group(Some(0), 300, None), group(Some(0), 100, None)];
        let wants = [want(Some(1), 500, 500), want(Some(2), 500, 500), want(None, 500, 500)];
        let entitled: Vec<u64> = shares(&groups, &wants, 1).iter().map(|(_, entitled)| *entitled).collect();
        assert_eq!(entitled, [375, 125, 500]);
    }

    #[test]
    fn who_is_apart_neither_gives_nor_takes() {
        let mut wants = [want(None, 500, 500), want(None, 500, 500), want(None, 1000, 0)];
        wants[2].apart = true;
        assert_eq!(shares(&[], &wants, 1), [(500, 500), (500, 500), (0, 1000)]);
    }

    #[test]
    fn groups_that_cannot_be_are_the_root() {
        let groups = [group(Some(0), 100, Some(1)), group(Some(7), 0, None)];
        let wants = [want(Some(1), 500, 0), want(Some(9), 500, 0), want(Some(usize::MAX), 1000, 0)];
        assert_eq!(shares(&groups, &wants, 2), [(0, 500), (0, 500), (0, 1000)]);
    }

    fn worlds() -> impl Strategy<Value = (Vec<CpuGroup>, Vec<Want>, u64)> {
        let groups = proptest::collection::vec(
            (proptest::option::of(0_usize..8), 1_u32..=10_000, proptest::option::of(1_u64..8000)),
            0..8,
        );
        let wants = proptest::collection::vec(
            (proptest::option::of(0_usize..8), 0_u64..=1000, prop::bool::weighted(0.1)),
            1..24,
        );
        (groups, wants, 1_u64..16).prop_map(|(groups, wants, cpus)| {
            let groups = groups.into_iter().map(|(parent, weight, limit)| group(parent, weight, limit));
            let wants =
                wants.into_iter().map(|(group, ran, apart)| Want { apart, ..want(group, ran, 1000 - ran) });
            (groups.collect(), wants.collect(), cpus)
        })
    }

    /// Rounding, nanoseconds.
    const ROUNDING: u64 = 100;

    proptest! {
        #[test]
        fn nobody_gets_more_than_it_wants_and_nothing_is_wasted((groups, wants, cpus) in worlds()) {
            let capacity_ns = cpus * SECOND_NS;
            let shares = entitle(&groups, &wants, capacity_ns, SECOND_NS);
            let (mut entitled_ns, mut wanted_ns) = (0, 0);
            for (want, share) in wants.iter().zip(&shares) {
                prop_assert!(share.waited_ns <= want.waited_ns, "{share:?}");
                prop_assert!(share.entitled_ns <= want.ran_ns + share.waited_ns, "{share:?}");
                if want.apart {
                    prop_assert_eq!(share.entitled_ns, want.ran_ns + share.waited_ns);
                } else {
                    entitled_ns += share.entitled_ns;
                    wanted_ns += want.ran_ns + share.waited_ns;
                }
            }
            prop_assert!(entitled_ns <= capacity_ns + ROUNDING);
            prop_assert!(entitled_ns + ROUNDING >= wanted_ns.min(capacity_ns), "{entitled_ns} of {wanted_ns}");
        }

        /// With what it ran a group waits for no more than its limit.
        #[test]
        fn limits_are_kept((groups, wants, cpus) in worlds()) {
            let shares = entitle(&groups, &wants, cpus * SECOND_NS, SECOND_NS);
            for (at, outer) in groups.iter().enumerate() {
                let Some(limit) = outer.limit_permille else { continue };
                let within = |mut group: Option<usize>| loop {
                    match group.filter(|group| *group < groups.len()) {
                        Some(inner) if inner == at => return true,
                        Some(inner) => group = groups[inner].parent.filter(|parent| *parent < inner),
                        None => return false,
                    }
                };
                let members = wants.iter().zip(&shares).filter(|(want, _)| within(want.group));
                let (ran_ns, waited_ns) = members.fold((0, 0), |(ran, waited), (want, share)| {
                    (ran + want.ran_ns, waited + share.waited_ns)
                });
                prop_assert!(waited_ns <= (limit * SECOND_NS / 1000).saturating_sub(ran_ns) + ROUNDING);
            }
        }

        /// Of two VMs that both want more than they get, each gets time in the proportion of its weight, whatever the
        /// numbers of their vCPUs are.
        #[test]
        fn weights_count_and_vcpus_do_not(
            weights in (1_u32..=10_000, 1_u32..=10_000), counts in (1_usize..9, 1_usize..9), busy in 0_usize..9,
        ) {
            let groups = [group(None, weights.0, None), group(None, weights.1, None), group(None, 100, None)];
            let mut wants = vec![want(Some(0), 500, 500); counts.0];
            wants.extend(vec![want(Some(1), 500, 500); counts.1]);
            wants.extend(vec![want(Some(2), 500, 500); busy]);
            let shares = entitle(&groups, &wants, SECOND_NS, SECOND_NS);
            let sum = |group: usize| -> f64 {
                let members = wants.iter().zip(&shares).filter(|(want, _)| want.group == Some(group));
                members.map(|(_, share)| share.entitled_ns as f64).sum()
            };
            let satisfied = |group: usize, count: usize| sum(group) + 100.0 >= count as f64 * SECOND_NS as f64;
            if !satisfied(0, counts.0) && !satisfied(1, counts.1) {
                let (a, b) = (sum(0) * f64::from(weights.1), sum(1) * f64::from(weights.0));
                prop_assert!((a - b).abs() <= 1e-3 * a.max(b) + 1e6, "{} {}", sum(0), sum(1));
            }
        }
    }
}
