//! What is so, and what happens next. Pure, so that a seed does the same steps again.

use vnuma_model::CpuSet;
use vnuma_random::Rng;

/// vCPUs of each VM.
pub const VCPUS: usize = 2;
/// Names of VMs. One that has ended may come again under its name.
const NAMES: [&str; 3] = ["vm1", "vm2", "vm3"];
const POLICIES: [&str; 8] = ["off", "observe", "credit", "vcpu-p", "lb", "brm", "vprobe-paper", "vprobe"];

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    pub name: &'static str,
    pub policy: &'static str,
    /// CPUs that the operator allows, by vCPU.
    pub masks: [CpuSet; VCPUS],
    /// vCPUs that never sleep.
    pub busy: [bool; VCPUS],
}

impl Guest {
    /// Does its policy move vCPUs?
    pub fn acts(&self) -> bool {
        !["off", "observe"].contains(&self.policy)
    }
}

/// The sched_ext scheduler that is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    Nothing,
    /// scx_vnuma.
    Ours {
        full: bool,
    },
    /// One that vnumad does not know.
    Other,
}

/// Something that happens. VMs are named by their position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Policy {
        vm: usize,
        policy: &'static str,
    },
    Mask {
        vm: usize,
        vcpu: usize,
        mask: CpuSet,
    },
    StartVm {
        name: &'static str,
        node: usize,
        busy: [bool; VCPUS],
    },
    EndVm {
        vm: usize,
        kill: bool,
    },
    Load {
        full: bool,
    },
    LoadOther,
    /// One more scx_vnuma than the kernel takes.
    Refused,
    EndScheduler {
        kill: bool,
    },
    StartDaemon,
    EndDaemon {
        kill: bool,
    },
    /// Nothing, for so many seconds.
    Wait {
        seconds: u64,
    },
}

impl Step {
    /// For people. `vms`: those that there are before it.
    pub fn text(&self, vms: &[Guest]) -> String {
        let signal = |kill: &bool| if *kill { "SIGKILL" } else { "SIGTERM" };
        match self {
            Self::Policy { vm, policy } => format!("policy {policy} for {}", vms[*vm].name),
            Self::Mask { vm, vcpu, mask } => format!("CPUs {mask} for vCPU {vcpu} of {}", vms[*vm].name),
            Self::StartVm { name, node, busy } => format!("{name} starts on node {node}, busy: {busy:?}"),
            Self::EndVm { vm, kill: true } => format!("SIGKILL for {}", vms[*vm].name),
            Self::EndVm { vm, kill: false } => format!("{} is stopped", vms[*vm].name),
            Self::Load { full } => {
                format!("scx_vnuma is loaded{}", if *full { ", in full mode" } else { "" })
            }
            Self::LoadOther => "another scheduler is loaded".to_owned(),
            Self::Refused => "one more scx_vnuma is refused".to_owned(),
            Self::EndScheduler { kill } => format!("{} for the scheduler", signal(kill)),
            Self::StartDaemon => "vnumad starts".to_owned(),
            Self::EndDaemon { kill } => format!("{} for vnumad", signal(kill)),
            Self::Wait { seconds } => format!("nothing for {seconds} s"),
        }
    }
}

type Kind = (bool, usize, fn(&State, &mut Rng) -> Step);

/// What is so.
#[derive(Clone, Debug)]
pub struct State {
    /// CPUs of each node that VMs may run on.
    nodes: Vec<CpuSet>,
    pub vms: Vec<Guest>,
    pub daemon: bool,
    pub loaded: Loaded,
}

impl State {
    /// Nothing runs yet.
    pub fn new(nodes: Vec<CpuSet>) -> Self {
        Self { nodes, vms: Vec::new(), daemon: false, loaded: Loaded::Nothing }
    }

    /// All CPUs of VMs.
    pub fn cpus(&self) -> CpuSet {
        self.nodes.iter().flat_map(CpuSet::iter).collect()
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// CPUs of a node that VMs may run on.
    pub fn node(&self, node: usize) -> &CpuSet {
        &self.nodes[node]
    }

    /// What happens next.
    pub fn next(&self, random: &mut Rng) -> Step {
        let (more, fewer) = (self.vms.len() < NAMES.len(), self.vms.len() > 1);
        let (some, nothing) = (!self.vms.is_empty(), self.loaded == Loaded::Nothing);
        // Whether it is possible, how often beside the others, what it is.
        let kinds: [Kind; 11] = [
            (!self.daemon, 12, |_, _| Step::StartDaemon),
            (self.daemon, 3, |_, random| Step::EndDaemon { kill: random.index(3) > 0 }),
            (self.daemon && some, 10, Self::any_policy),
            (some, 8, Self::any_mask),
            (more, if fewer { 2 } else { 8 }, Self::any_start),
            (fewer, 1, |this, random| Step::EndVm {
                vm: random.index(this.vms.len()),
                kill: random.index(2) == 0,
            }),
            (nothing, 4, |_, random| Step::Load { full: random.index(2) == 0 }),
            (nothing, 1, |_, _| Step::LoadOther),
            (!nothing, 1, |_, _| Step::Refused),
            (some, 3, |_, random| Step::Wait { seconds: 5 + random.index(20) as u64 }),
            (!nothing, 3, |_, random| Step::EndScheduler { kill: random.index(2) == 0 }),
        ];
        let possible: Vec<&Kind> = kinds.iter().filter(|(possible, ..)| *possible).collect();
        let all = possible.iter().map(|(_, weight, _)| weight).sum();
        let mut at = random.index(all);
        let chosen = possible.iter().find(|(_, weight, _)| {
            let found = at < *weight;
            at = at.saturating_sub(*weight);
            found
        });
        chosen.map_or(Step::StartDaemon, |(_, _, make)| make(self, random))
    }

    fn any_policy(&self, random: &mut Rng) -> Step {
        Step::Policy { vm: random.index(self.vms.len()), policy: POLICIES[random.index(POLICIES.len())] }
    }

    /// CPUs that are not what a policy may have set itself: nobody could tell whose they are.
    fn any_mask(&self, random: &mut Rng) -> Step {
        let (vm, vcpu) = (random.index(self.vms.len()), random.index(VCPUS));
        let (all, before) = (self.cpus(), &self.vms[vm].masks[vcpu]);
        let mask = loop {
            let mask: CpuSet = match random.index(4) {
                0 => all.iter().nth(random.index(all.len())).into_iter().collect(),
                1 => all.clone(),
                _ => all.iter().filter(|_| random.index(2) == 0).collect(),
            };
            if !mask.is_empty() && !self.is_a_place(&mask, before) {
                break mask;
            }
        };
        Step::Mask { vm, vcpu, mask }
    }

    /// Could a policy confine a vCPU whose operator allows `operator` to this?
    fn is_a_place(&self, mask: &CpuSet, operator: &CpuSet) -> bool {
        self.nodes.iter().any(|node| node.iter().filter(|cpu| operator.contains(*cpu)).eq(mask.iter()))
    }

    fn any_start(&self, random: &mut Rng) -> Step {
        let taken = |name: &&&str| !self.vms.iter().any(|vm| vm.name == **name);
        let name = NAMES.iter().find(taken).copied().unwrap_or_default();
        let busy = [[true, true], [true, false], [false, true]][random.index(3)];
        Step::StartVm { name, node: random.index(self.nodes.len()), busy }
    }

    /// It has happened.
    pub fn apply(&mut self, step: &Step) {
        match step {
            Step::Policy { vm, policy } => self.vms[*vm].policy = policy,
            Step::Mask { vm, vcpu, mask } => self.vms[*vm].masks[*vcpu] = mask.clone(),
            Step::StartVm { name, busy, .. } => {
                let masks = [self.cpus(), self.cpus()];
                self.vms.push(Guest { name, policy: "off", masks, busy: *busy });
            }
            Step::EndVm { vm, .. } => drop(self.vms.remove(*vm)),
            Step::Load { full } => self.loaded = Loaded::Ours { full: *full },
            Step::LoadOther => self.loaded = Loaded::Other,
            Step::Refused | Step::Wait { .. } => {}
            Step::EndScheduler { .. } => self.loaded = Loaded::Nothing,
            Step::StartDaemon => self.daemon = true,
            Step::EndDaemon { .. } => {
                self.daemon = false;
                // The next one begins with what is configured.
                self.vms.iter_mut().for_each(|vm| vm.policy = "off");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, mem};

    fn state() -> State {
        State::new(["1", "2-3", "4-5", "6-7"].map(|list| list.parse().expect("a list")).into())
    }

    /// So many steps of a seed, each with the state before it.
    fn walk(seed: u64, steps: usize) -> Vec<(State, Step)> {
        let (mut state, mut random, mut walked) = (state(), Rng::new(seed), Vec::new());
        for _ in 0..steps {
            let step = state.next(&mut random);
            walked.push((state.clone(), step.clone()));
            state.apply(&step);
        }
        walked
    }

    #[test]
    fn a_seed_repeats_and_others_differ() {
        let steps = |seed| walk(seed, 50).into_iter().map(|(_, step)| step).collect::<Vec<_>>();
        assert_eq!(steps(7), steps(7));
        assert_ne!(steps(7), steps(8));
    }

    #[test]
    fn each_kind_of_step_comes_and_only_where_it_is_possible() {
        let mut kinds = BTreeSet::new();
        for (before, step) in (1..20).flat_map(|seed| walk(seed, 400)) {
            let loaded = before.loaded != Loaded::Nothing;
            let possible = match &step {
                Step::Policy { vm, .. } => before.daemon && *vm < before.vms.len(),
                Step::Mask { vm, vcpu, mask } => {
                    let all = before.cpus();
                    *vm < before.vms.len() && *vcpu < VCPUS && !mask.is_empty() && mask.is_subset(&all)
                }
                Step::StartVm { name, node, busy } => {
                    let new = before.vms.iter().all(|vm| vm.name != *name);
                    !name.is_empty() && new && *node < 4 && busy.contains(&true)
                }
                Step::EndVm { vm, .. } => *vm < before.vms.len() && before.vms.len() > 1,
                Step::Load { .. } | Step::LoadOther => !loaded,
                Step::Refused | Step::EndScheduler { .. } => loaded,
                Step::StartDaemon => !before.daemon,
                Step::EndDaemon { .. } => before.daemon,
                Step::Wait { seconds } => !before.vms.is_empty() && (5..25).contains(seconds),
            };
            assert!(possible, "{step:?} in {before:?}");
            kinds.insert(format!("{:?}", mem::discriminant(&step)));
            step.text(&before.vms);
        }
        assert_eq!(kinds.len(), 11, "{kinds:?}");
    }

    #[test]
    fn an_operators_mask_is_never_one_that_a_policy_may_have_set() {
        let mut pinned = 0;
        for (before, step) in (1..20).flat_map(|seed| walk(seed, 400)) {
            let Step::Mask { vm, vcpu, mask } = step else { continue };
            let operator = &before.vms[vm].masks[vcpu];
            for node in ["1", "2-3", "4-5", "6-7"] {
                let node: CpuSet = node.parse().expect("a list");
                let place: CpuSet = node.iter().filter(|cpu| operator.contains(*cpu)).collect();
                assert_ne!(mask, place, "of {operator}");
            }
            pinned += usize::from(mask.len() == 1);
        }
        assert!(pinned > 100, "{pinned}");
    }

    #[test]
    fn policies_end_with_vnumad() {
        let mut state = state();
        for step in [
            Step::StartVm { name: "vm1", node: 0, busy: [true; VCPUS] },
            Step::StartDaemon,
            Step::Policy { vm: 0, policy: "brm" },
        ] {
            state.apply(&step);
        }
        assert!(state.vms[0].acts());
        state.apply(&Step::EndDaemon { kill: true });
        assert_eq!((state.vms[0].policy, state.vms[0].acts(), state.daemon), ("off", false, false));
    }
}
