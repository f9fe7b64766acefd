//! `brm`: bias random vCPU migration, one of the paper's baselines.
//!
//! It is *reconstructed* from what is said of it in *vProbe: Scheduling Virtual Machines on NUMA Systems* (sections I, V-A and
//! VII) and from the idea of the work cited there (Rao et al., HPCA 2013): a vCPU has an uncore penalty, what it loses beyond
//! its core's own caches, in which all causes count alike; vCPUs are moved at random, with a bias to where their penalty was
//! low. The lock that made it slow in the paper's evaluation is not part of it.

use super::{Analysis, Cause, Input, Place, Placed, Policy, Standing, VcpuKey, VcpuSample, placed};
use std::mem;

/// Chance that a memory-intensive vCPU is considered for a move in a period.
const CONSIDERED: f64 = 0.25;
/// What an LLC hit counts in units of a distance: a local miss counts 10.
const HIT: f64 = 2.0;
/// Share of the last value in an average.
const NEW: f64 = 0.5;

/// What it remembers.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    random: u64,
    /// Uncore penalty of each vCPU of the last input at each node that it was on, by position. Empty: of none yet.
    penalties: Vec<(VcpuKey, Vec<Option<f64>>)>,
}

impl Memory {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, penalties: Vec::new() }
    }

    /// A number from 0 to 1, by xorshift.
    fn chance(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn decide(&mut self, input: &Input<'_>, analysis: &[Analysis]) -> Vec<Placed> {
        self.follow(input);
        let mut steps = Vec::new();
        for (at, vcpu) in input.vcpus.iter().enumerate() {
            let memory_intensive = analysis[at].kind.is_some_and(|kind| kind.is_memory_intensive());
            let (Some(node), Some(penalty)) = (analysis[at].node, uncore_penalty(input, vcpu)) else {
                continue;
            };
            let nodes = input.machine.nodes.len();
            let seen = &mut self.penalties[at].1;
            seen.resize(nodes, None);
            seen[node] = Some(seen[node].map_or(penalty, |before| before + NEW * (penalty - before)));
            if analysis[at].standing != Standing::Free || !memory_intensive || self.chance() >= CONSIDERED {
                continue;
            }
            let Some(to) = self.choose(input, at) else { continue };
            if vcpu.assigned != Some(Place::Node(to)) {
                let why = (Policy::Brm, Cause::Random, None);
                steps.push(placed(input, at, &analysis[at], Some(Place::Node(to)), why));
            }
        }
        steps
    }

    /// Forgets vCPUs that are gone. Both are in the order of the keys.
    fn follow(&mut self, input: &Input<'_>) {
        let keys = input.vcpus.iter().map(|vcpu| vcpu.key);
        if self.penalties.iter().map(|(key, _)| *key).eq(keys.clone()) {
            return;
        }
        let mut before = mem::take(&mut self.penalties).into_iter().peekable();
        self.penalties.extend(keys.map(|key| {
            while before.next_if(|(known, _)| *known < key).is_some() {}
            before.next_if(|(known, _)| *known == key).unwrap_or((key, Vec::new()))
        }));
    }

    /// A node, each with a chance that is the higher the lower the penalty there. A node where it never was counts as good as
    /// the best one.
    fn choose(&mut self, input: &Input<'_>, at: usize) -> Option<usize> {
        let draw = self.chance();
        let seen = &self.penalties[at].1;
        let best = seen.iter().copied().flatten().reduce(f64::min)?.max(f64::MIN_POSITIVE);
        let reach = &input.reaches[input.vcpus[at].reach];
        let nodes = input.machine.with_cpus.iter().filter(|&&node| reach.node(input.machine, node));
        // By the square, or a penalty of twice the best would still be chosen every third time.
        let weigh = |node: usize| (best / seen[node].unwrap_or(best).max(best)).powi(2);
        let weights: Vec<(usize, f64)> = nodes.map(|&node| (node, weigh(node))).collect();
        let mut left = draw * weights.iter().map(|(_, weight)| weight).sum::<f64>();
        for (node, weight) in &weights {
            left -= weight;
            if left < 0.0 {
                return Some(*node);
            }
        }
        weights.last().map(|(node, _)| *node)
    }
}

/// What it lost beyond its core's own caches, per thousand instructions.
fn uncore_penalty(input: &Input<'_>, vcpu: &VcpuSample) -> Option<f64> {
    let (counts, node) = (vcpu.counts.as_ref()?, vcpu.node(input.machine)?);
    if counts.instructions == 0 {
        return None;
    }
    let hits = counts.llc_references.saturating_sub(counts.llc_misses) as f64 * HIT;
    // Of integers, which a CPU adds up faster, and exactly.
    let priced = |(count, &distance): (&u64, &u16)| count.saturating_mul(distance.into());
    let distances = input.machine.distances_from(node);
    let accesses = counts.accesses.iter().zip(distances).map(priced).fold(0_u64, u64::saturating_add) as f64;
    Some((hits + accesses) / counts.instructions as f64 * 1000.0)
}
