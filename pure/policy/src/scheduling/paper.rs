//! The policies of the paper's evaluation (section V-A): `vprobe-paper` is both algorithms as printed, `vcpu-p` and `lb` one
//! of them each, `credit` the stealing that Xen's Credit scheduler does without them.
//!
//! The paper's hypervisor migrates a vCPU from queue to queue. Here a vCPU is confined to the node that it is migrated to,
//! within its operator's mask, and the kernel chooses the CPU. A migration that the mask forbids is left out.

use super::{
    Analysis, Cause, Input, Place, Placed, Policy, Standing, idle_cpus,
    partition::{Candidate, periodical_partitioning},
    placed, run_queues,
};

/// Decides for one of these policies.
pub(super) fn decide(policy: Policy, input: &Input<'_>, analysis: &[Analysis]) -> Vec<Placed> {
    let mut wanted = vec![None; input.vcpus.len()];
    if matches!(policy, Policy::VcpuP | Policy::VprobePaper) {
        partition(input, analysis, &mut wanted);
    }
    load_balance(policy, input, analysis, &mut wanted);
    let step = |(at, wanted): (usize, &Option<(Option<Place>, Cause)>)| {
        let (to, cause) = (*wanted)?;
        (input.vcpus[at].assigned != to).then(|| placed(input, at, &analysis[at], to, (policy, cause, None)))
    };
    wanted.iter().enumerate().filter_map(step).collect()
}

/// Algorithm 1 for all memory-intensive vCPUs. The others are left to the default scheduling: they have their operator's
/// mask.
fn partition(input: &Input<'_>, analysis: &[Analysis], wanted: &mut [Option<(Option<Place>, Cause)>]) {
    let mut candidates = Vec::with_capacity(input.vcpus.len());
    for (at, analysis) in analysis.iter().enumerate().filter(|(_, a)| a.standing == Standing::Free) {
        match (analysis.kind, analysis.affinity.or(analysis.node)) {
            (Some(kind), Some(affinity)) if kind.is_memory_intensive() => {
                candidates.push(Candidate { vcpu: at, kind, affinity });
            }
            (Some(_), _) if input.vcpus[at].assigned.is_some() => wanted[at] = Some((None, Cause::Calm)),
            _ => {}
        }
    }
    for (at, node) in periodical_partitioning(&input.machine.with_cpus, &candidates) {
        if input.reaches[input.vcpus[at].reach].node(input.machine, node) {
            wanted[at] = Some((Some(Place::Node(node)), Cause::Partitioned));
        }
    }
}

/// Each CPU that was idle steals one vCPU: by Algorithm 2, or blindly.
fn load_balance(
    policy: Policy,
    input: &Input<'_>,
    analysis: &[Analysis],
    wanted: &mut [Option<(Option<Place>, Cause)>],
) {
    let mut queues = run_queues(input, analysis, |_| 1, |_| Some(0));
    for cpu in idle_cpus(input) {
        if queues.is_empty() {
            return;
        }
        let Some(domain) = input.machine.domain_of(cpu) else { continue };
        let node = input.machine.domains[domain].node;
        // A CPU that its operator does not allow is of no use to it, even if others of the node are.
        let may = |at: usize| input.reaches[input.vcpus[at].reach].cpu(cpu);
        let stolen = match policy {
            Policy::Credit | Policy::VcpuP => queues.steal_blindly(cpu, may),
            _ => queues.steal(node, input.machine.nearest(node), may),
        };
        if let Some(at) = stolen {
            wanted[at] = Some((Some(Place::Node(node)), Cause::Stolen));
        }
    }
}
