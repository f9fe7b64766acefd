//! What a re-home promises, whatever moves, stays or fails, and wherever it is ended.

use proptest::prelude::*;
use std::collections::BTreeMap;
use vnuma_policy::rehome::{Efforts, FRUITLESS, Part, Rehome, RehomePhase, RehomeStep, RehomeView};

const PAGE: u64 = 4096;
const TO: u32 = 2;

/// A re-home, and what its moves have brought so far.
#[derive(Clone, Debug)]
struct Going {
    rehome: Rehome,
    efforts: Efforts,
}

impl Going {
    fn new(guest_node: u32, to: u32, vcpus: Vec<u32>) -> Self {
        Self { rehome: Rehome::new(guest_node, to, vcpus), efforts: Efforts::default() }
    }

    fn next(&mut self, view: &RehomeView) -> RehomeStep {
        self.rehome.next(view, &mut self.efforts)
    }
}

impl std::ops::Deref for Going {
    type Target = Rehome;

    fn deref(&self) -> &Rehome {
        &self.rehome
    }
}

impl std::ops::DerefMut for Going {
    fn deref_mut(&mut self) -> &mut Rehome {
        &mut self.rehome
    }
}

/// A guest node of a VM that really is somewhere.
#[derive(Clone, Debug)]
struct Vm {
    /// Pages by what they are of (it booted with that, or a device has it) and host node, and those of them that cannot be moved.
    pages: BTreeMap<(u64, u32), (u64, u64)>,
    told: Option<u32>,
    vcpus: BTreeMap<u32, u32>,
}

impl Vm {
    fn home(&self) -> Option<u32> {
        (0..4).find(|node| self.on(*node) * 2 > self.sum())
    }

    fn view(&self, moving: bool) -> RehomeView {
        RehomeView {
            parts: self.pages.iter().map(|(at, (pages, _))| part(*at, pages * PAGE)).collect(),
            home: self.home(),
            moving,
            published: self.told == self.home(),
            vcpus: self.vcpus.keys().copied().collect(),
        }
    }

    fn on(&self, node: u32) -> u64 {
        self.pages.iter().filter(|((_, known), _)| *known == node).map(|(_, (pages, _))| pages).sum()
    }

    fn sum(&self) -> u64 {
        self.pages.values().map(|(pages, _)| pages).sum()
    }

    /// Runs it until it ends, or for so many steps; each move takes at most `most` pages. Returns how many moves it took.
    fn run(&mut self, rehome: &mut Going, most: u64, steps: usize, fails: bool) -> usize {
        let mut moves = 0;
        for _ in 0..steps {
            if !rehome.is_active() {
                break;
            }
            assert_eq!(rehome.clone().next(&self.view(true)).memory(), None, "one move at a time");
            let told_before = self.told;
            match rehome.next(&self.view(false)) {
                RehomeStep::Memory(Part { start, node: from, bytes }) => {
                    moves += 1;
                    assert_ne!(from, TO, "nothing leaves the new home");
                    let (pages, stuck) = self.pages[&(start, from)];
                    assert!(bytes >= PAGE && bytes <= pages * PAGE);
                    let moved = (pages - stuck).min(most).min(bytes / PAGE);
                    self.pages.insert((start, from), (pages - moved, stuck));
                    self.pages.entry((start, TO)).or_default().0 += moved;
                    rehome.memory_ended(start, from, None);
                    assert_eq!(
                        rehome.next(&self.view(false)),
                        RehomeStep::Wait,
                        "what is there is looked at first"
                    );
                    rehome.unseen = false;
                }
                RehomeStep::Vcpus(vcpus) => {
                    assert_eq!(
                        (self.home(), told_before),
                        (Some(TO), Some(TO)),
                        "memory and guest come first"
                    );
                    for vcpu in vcpus {
                        if !fails {
                            self.vcpus.insert(vcpu, TO);
                        }
                        rehome.vcpu_ended(vcpu, if fails { Err("EPERM".into()) } else { Ok(()) });
                    }
                }
                RehomeStep::Wait if *rehome.phase() == RehomePhase::Topology => self.told = self.home(),
                RehomeStep::Wait => {}
            }
        }
        moves
    }
}

trait OfMemory {
    fn memory(&self) -> Option<u32>;
}

impl OfMemory for RehomeStep {
    fn memory(&self) -> Option<u32> {
        if let Self::Memory(part) = self { Some(part.node) } else { None }
    }
}

fn part((start, node): (u64, u32), bytes: u64) -> Part {
    Part { start, node, bytes }
}

fn vms() -> impl Strategy<Value = Vm> {
    let pages = proptest::collection::btree_map((0..3_u64, 0..4_u32), (0..200_u64, 0..200_u64), 1..9);
    (pages, 0..3_u32).prop_map(|(pages, vcpus)| Vm {
        pages: pages.into_iter().map(|(at, (all, stuck))| (at, (all, stuck.min(all)))).collect(),
        told: Some(0),
        vcpus: (0..vcpus).map(|vcpu| (vcpu, 0)).collect(),
    })
}

fn without_stuck(mut vm: Vm) -> Vm {
    vm.pages.values_mut().for_each(|(_, stuck)| *stuck = 0);
    vm.pages.entry((0, 0)).or_default().0 += 1;
    vm
}

fn ids(vm: &Vm) -> Vec<u32> {
    vm.vcpus.keys().copied().collect()
}

proptest! {
    #[test]
    fn it_ends_and_what_it_says_is_true(vm in vms(), most in 1..100_u64, fails: bool) {
        let mut vm = vm;
        let before = vm.sum();
        let mut rehome = Going::new(0, TO, ids(&vm));
        let moves = vm.run(&mut rehome, most, 10_000, fails);
        prop_assert!(!rehome.is_active(), "{rehome:?}");
        prop_assert!(moves as u64 <= before + 12 * u64::from(FRUITLESS), "{moves} moves");
        prop_assert_eq!(vm.sum(), before, "no page is lost");
        let done = *rehome.phase() == RehomePhase::Done;
        prop_assert_eq!(done, vm.home() == Some(TO), "{:?} {:?}", rehome, vm);
        let all_moved = vm.pages.iter().all(|((_, node), (pages, stuck))| *node == TO || pages == stuck);
        prop_assert!(all_moved, "{vm:?}");
        let stays = vm.pages.iter().any(|((_, node), (pages, _))| *node != TO && *pages > 0);
        let vcpus_stay = done && fails && !vm.vcpus.is_empty();
        prop_assert_eq!(rehome.problem.is_some(), stays || vcpus_stay || !done, "{:?}", rehome);
        prop_assert!(!done || fails || vm.vcpus.values().all(|node| *node == TO));
        prop_assert!(done || vm.vcpus.values().all(|node| *node == 0), "vCPUs follow memory only");
    }

    /// vnumad is killed, or an operator stops it, at any step: the next one begins with what is there, and nothing else.
    #[test]
    fn one_that_was_interrupted_is_completed_by_the_next(vm in vms(), most in 1..50_u64, steps in 0..40_usize) {
        let mut vm = without_stuck(vm);
        let before = vm.sum();
        let mut first = Going::new(0, TO, ids(&vm));
        vm.run(&mut first, most, steps, false);
        first.stop();
        prop_assert_eq!(first.next(&vm.view(false)), RehomeStep::Wait, "nothing is begun after a stop");
        prop_assert!(!first.is_active());
        let mut second = Going::new(0, TO, ids(&vm));
        vm.run(&mut second, most, 10_000, false);
        prop_assert_eq!(second.phase(), &RehomePhase::Done);
        prop_assert_eq!(&second.problem, &None);
        prop_assert_eq!((vm.home(), vm.told, vm.on(TO)), (Some(TO), Some(TO), before));
        prop_assert!(vm.vcpus.values().all(|node| *node == TO));
    }
}

#[test]
fn a_move_that_moves_nothing_is_tried_again_and_not_for_ever() {
    let pages = BTreeMap::from([((0, 0), (10, 10)), ((0, 1), (3, 0))]);
    let vm = Vm { pages, told: None, vcpus: BTreeMap::new() };
    let (mut vm, mut rehome) = (vm, Going::new(0, TO, Vec::new()));
    let moves = vm.run(&mut rehome, 100, 1000, false);
    assert_eq!(moves, FRUITLESS as usize + 1);
    assert_eq!(*rehome.phase(), RehomePhase::Failed);
    assert!(rehome.problem.as_ref().is_some_and(|problem| problem.contains("leaves node 0")), "{rehome:?}");
}

#[test]
fn a_vcpu_that_is_unplugged_meanwhile_is_not_waited_for() {
    let mut rehome = Going::new(0, TO, vec![1, 2]);
    let mut view = RehomeView {
        parts: vec![part((0, TO), PAGE)],
        home: Some(TO),
        published: true,
        vcpus: vec![1, 2],
        ..RehomeView::default()
    };
    assert_eq!(rehome.next(&view), RehomeStep::Vcpus(vec![1, 2]));
    rehome.vcpu_ended(1, Ok(()));
    assert!(rehome.is_active());
    view.vcpus = vec![1];
    assert_eq!(rehome.next(&view), RehomeStep::Wait);
    assert_eq!(*rehome.phase(), RehomePhase::Done);
}

#[test]
fn memory_that_somebody_moves_back_is_not_moved_for_ever() {
    let mut rehome = Going::new(0, TO, Vec::new());
    let parts = vec![part((0, 0), 9 * PAGE), part((0, TO), PAGE)];
    let view = RehomeView { parts, home: Some(0), ..RehomeView::default() };
    let mut moves = 0;
    while let RehomeStep::Memory(from) = rehome.next(&view) {
        moves += 1;
        assert!(moves < 100, "no end");
        rehome.memory_ended(from.start, from.node, None);
        rehome.unseen = false;
    }
    assert_eq!((moves, rehome.phase()), (FRUITLESS, &RehomePhase::Failed));
}

#[test]
fn phases_have_the_names_of_the_api() {
    use RehomePhase::{Done, Failed, Memory, Stopped, Topology, Vcpus};
    let names = [Memory, Topology, Vcpus, Done, Stopped, Failed].map(|phase| phase.name());
    assert_eq!(names, ["memory", "topology", "vcpus", "done", "stopped", "failed"]);
}

#[test]
fn less_than_a_page_is_nothing_that_can_be_moved() {
    let mut rehome = Going::new(0, TO, Vec::new());
    let place = |bytes| RehomeView {
        parts: vec![part((0, 0), bytes), part((0, TO), 9 * PAGE)],
        home: Some(TO),
        ..RehomeView::default()
    };
    assert_eq!(rehome.clone().next(&place(PAGE)), RehomeStep::Memory(part((0, 0), PAGE)));
    assert_eq!(rehome.next(&place(PAGE - 1)), RehomeStep::Wait);
    assert_eq!((rehome.phase(), &rehome.problem), (&RehomePhase::Topology, &None));
}

#[test]
fn what_is_plugged_goes_with_what_it_booted_with_and_is_given_up_by_itself() {
    // The device at 7 is stuck on node 0, and what it booted with is not.
    let pages = BTreeMap::from([((0, 0), (10, 0)), ((7, 0), (9, 9)), ((7, 1), (5, 0))]);
    let vm = Vm { pages, told: None, vcpus: BTreeMap::new() };
    let (mut vm, mut rehome) = (vm, Going::new(0, TO, Vec::new()));
    let moves = vm.run(&mut rehome, 100, 1000, false);
    assert_eq!((moves, vm.on(0), vm.on(TO)), (2 + FRUITLESS as usize, 9, 15));
    assert_eq!(*rehome.phase(), RehomePhase::Done, "most of all is there");
    assert!(rehome.problem.as_ref().is_some_and(|problem| problem.contains("leaves node 0")), "{rehome:?}");
}
