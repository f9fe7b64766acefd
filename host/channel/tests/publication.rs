//! Readers never accept a mixture, whatever happens between two stores of the writer.

use proptest::prelude::*;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
};
use vnuma_abi_topology_channel::{
    Device, MAX_DEVICES, MAX_VCPUS, REGION_SIZE, SECTION_DEVICES, SECTION_NODES, SECTION_REQUIRED,
    SECTION_VCPUS, SupportedSection, Vcpu,
};
use vnuma_channel::{
    Content, Generations, Step,
    layout::{WORD, header, publication, publication_of, section, sections},
};
use vnuma_channel_model::{Other, ReadError, SUPPORTED, Topology, read, read_as};
use vnuma_model::DistanceMatrix;

/// Contents that differ in every word: a mixture of two is none of them.
fn content(seed: u32, nodes: usize, vcpus: usize) -> Content {
    let distance = |from, to| if from == to { 10 } else { 11 + (seed % 200) as u8 };
    let rows = (0..nodes).map(|from| (0..nodes).map(|to| distance(from, to)).collect()).collect();
    let vcpu = |id: u32| Vcpu { apic_id: id * 1000 + seed % 1000, node: (id + seed) % nodes as u32 };
    let device = |index: usize| Device {
        segment: seed as u16,
        bus: (index >> 5) as u8,
        devfn: index as u8,
        node: ((index + seed as usize) % nodes) as u32,
    };
    let devices = (seed as usize * vcpus / 2).min(MAX_DEVICES);
    Content::new(DistanceMatrix::new(rows).expect("square"), (0..vcpus as u32).map(vcpu).collect())
        .and_then(|content| content.with_devices((0..devices).map(device).collect()))
        .expect("within limits")
}

fn expected(generation: u64, content: &Content) -> Topology {
    let (distances, vcpus) = (content.distances().rows().to_vec(), content.vcpus().to_vec());
    Topology { generation, distances, vcpus, devices: content.devices().to_vec(), others: Vec::new() }
}

struct Memory(Vec<u64>);

impl Memory {
    fn new() -> Self {
        let mut memory = Self(vec![0; REGION_SIZE / WORD]);
        header().iter().for_each(|step| memory.apply(step));
        memory
    }
    fn apply(&mut self, step: &Step) {
        if let Step::Store { offset, value } = *step {
            assert_eq!(offset % WORD, 0);
            self.0[offset / WORD] = value;
        }
    }
    fn read(&self) -> Result<Topology, ReadError> {
        read(|offset| self.0[offset / WORD])
    }
}

#[test]
fn what_is_published_is_what_is_read() {
    let mut memory = Memory::new();
    assert_eq!(memory.read(), Err(ReadError::Nothing));
    let mut generations = Generations::new(99);
    for (seed, nodes, vcpus) in [(1, 1, 1), (2, 64, MAX_VCPUS), (3, 4, 8), (4, 2, 3)] {
        let (generation, content) = (generations.take(), content(seed, nodes, vcpus));
        publication(generation, &content).iter().for_each(|step| memory.apply(step));
        assert_eq!(memory.read(), Ok(expected(generation, &content)));
    }
}

#[test]
fn a_region_without_its_magic_is_refused() {
    assert_eq!(read(|_| 0), Err(ReadError::Header));
    let mut memory = Memory::new();
    memory.0[1] += 1;
    assert_eq!(memory.read(), Err(ReadError::Header));
}

/// A section of a later version of the host: this one does not have it.
const LATER: u16 = 0x7001;

fn publish_sections(sections: &[Vec<u64>]) -> Memory {
    let mut memory = Memory::new();
    publication_of((99 << 32) | 1, sections).iter().for_each(|step| memory.apply(step));
    memory
}

#[test]
fn an_older_reader_skips_what_a_newer_host_adds() {
    let content = content(1, 2, 3);
    let first = expected((99 << 32) | 1, &content);
    let with = |later: Vec<u64>| {
        let mut all = sections(&content);
        all.insert(1, later);
        publish_sections(&all)
    };
    assert_eq!(with(section(LATER, 3, 1, 0, &[1, 2, 3])).read(), Ok(first.clone()));
    let required = with(section(LATER, 3, 1, SECTION_REQUIRED, &[1, 2, 3]));
    assert_eq!(required.read(), Err(ReadError::Unsupported(LATER)));
    // The same by a reader that knows it, also in an older version.
    for version in [1, 3] {
        let supported = [&SUPPORTED[..], &[SupportedSection { kind: LATER, version }]].concat();
        let read = read_as(&supported, |offset| required.0[offset / WORD]);
        let others = vec![Other { kind: LATER, version: 3, words: vec![1, 2, 3] }];
        assert_eq!(read, Ok(Topology { others, ..first.clone() }));
    }
    // One that only knows a version before `compatible`.
    let changed = with(section(LATER, 3, 2, SECTION_REQUIRED, &[1, 2, 3]));
    let supported = [&SUPPORTED[..], &[SupportedSection { kind: LATER, version: 1 }]].concat();
    let read = read_as(&supported, |offset| changed.0[offset / WORD]);
    assert_eq!(read, Err(ReadError::Unsupported(LATER)));
}

#[test]
fn a_newer_reader_reads_an_older_host() {
    let content = content(1, 2, 3);
    let supported = [
        SupportedSection { kind: SECTION_NODES, version: 5 },
        SupportedSection { kind: SECTION_VCPUS, version: 5 },
        SupportedSection { kind: SECTION_DEVICES, version: 5 },
        SupportedSection { kind: LATER, version: 1 },
    ];
    let memory = publish_sections(&sections(&content));
    let read = read_as(&supported, |offset| memory.0[offset / WORD]);
    assert_eq!(read, Ok(expected((99 << 32) | 1, &content)));
}

#[test]
fn devices_are_skipped_by_a_reader_and_left_out_by_a_host_that_do_not_know_them() {
    let content = content(3, 2, 3);
    assert!(!content.devices().is_empty());
    let without = Topology { devices: Vec::new(), ..expected((99 << 32) | 1, &content) };
    let newer_host = publish_sections(&sections(&content));
    assert_eq!(read_as(&SUPPORTED[..2], |offset| newer_host.0[offset / WORD]), Ok(without.clone()));
    let older_host = publish_sections(&sections(&content)[..2]);
    assert_eq!(older_host.read(), Ok(without));
}

/// Version 2 of all sections, in the tests alone: a field before the arrays, and vCPUs of two words.
#[test]
fn an_older_reader_reads_the_known_prefix_of_newer_sections() {
    let content = content(1, 2, 3);
    let nodes = [2 | 32 << 32, 0xdead, 0x0a0c_0c0a];
    let mut vcpus = vec![3 | 40 << 32, 16, 0xdead];
    for vcpu in content.vcpus() {
        vcpus.extend([u64::from(vcpu.apic_id) | u64::from(vcpu.node) << 32, 0xdead]);
    }
    let mut devices = vec![content.devices().len() as u64 | 40 << 32, 16, 0xdead];
    for device in content.devices() {
        let place = u64::from(device.segment) | u64::from(device.bus) << 16 | u64::from(device.devfn) << 24;
        devices.extend([place | u64::from(device.node) << 32, 0xdead]);
    }
    let newer = |compatible| {
        publish_sections(&[
            section(SECTION_DEVICES, 2, compatible, 0, &devices),
            section(SECTION_NODES, 2, compatible, 0, &nodes),
            section(SECTION_VCPUS, 2, compatible, 0, &vcpus),
        ])
    };
    assert_eq!(newer(1).read(), Ok(expected((99 << 32) | 1, &content)));
    // Not readable for this one, and there is no other.
    assert_eq!(newer(2).read(), Err(ReadError::Malformed));
}

#[test]
fn a_writer_killed_after_any_store_leaves_the_old_or_the_new() {
    let mut generations = Generations::new(99);
    let mut memory = Memory::new();
    let mut last = None;
    // The third publication writes over a slot that holds the first.
    for seed in 1..=4 {
        let (generation, content) = (generations.take(), content(seed, 3, 5));
        let steps = publication(generation, &content);
        let new = expected(generation, &content);
        for (done, step) in steps.iter().enumerate() {
            memory.apply(step);
            let found = memory.read();
            let complete = done + 1 == steps.len();
            let allowed = if complete { Ok(new.clone()) } else { last.clone().ok_or(ReadError::Nothing) };
            assert_eq!(found, allowed, "publication {seed}, after step {done}");
        }
        last = Some(new);
    }
}

#[test]
fn a_successor_of_a_writer_killed_after_any_store_hides_nothing() {
    let (old, second, third) = (content(1, 3, 5), content(2, 3, 5), content(3, 3, 5));
    for before in [1, 2] {
        // Publications before the one that is cut off, so that either slot is the published one.
        let mut generations = Generations::new(99);
        let mut start = Memory::new();
        let mut published = 0;
        for _ in 0..before {
            published = generations.take();
            publication(published, &old).iter().for_each(|step| start.apply(step));
        }
        let cut = publication(generations.take(), &second);
        // Between are stores into a slot that is marked as being written: those states are alike.
        let distinct = |index: usize, length: usize| index < 6 || index + 6 > length || index == length / 2;
        for done in (0..=cut.len()).filter(|done| distinct(*done, cut.len())) {
            let mut memory = Memory(start.0.clone());
            cut[..done].iter().for_each(|step| memory.apply(step));
            let readable = memory.read();
            assert!(readable.is_ok(), "after step {done}: {readable:?}");
            let last = readable.as_ref().map_or(published, |found| found.generation);
            let generation = Generations::after(100, last).take();
            let steps = publication(generation, &third);
            for (index, step) in steps.iter().enumerate() {
                memory.apply(step);
                if !distinct(index, steps.len()) {
                    continue;
                }
                let complete = index + 1 == steps.len();
                let allowed = if complete { Ok(expected(generation, &third)) } else { readable.clone() };
                assert_eq!(memory.read(), allowed, "cut after {done}, successor's step {index}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    // The writer goes on by some steps between any two loads of the reader.
    #[test]
    fn no_interleaving_shows_a_mixture(
        schedule in prop::collection::vec(prop_oneof![8 => 0..3usize, 2 => 0..20usize, 1 => 0..100usize], 1..200),
    ) {
        let mut generations = Generations::new(99);
        let mut published = BTreeMap::new();
        let mut steps = Vec::new();
        for seed in 1..=12 {
            let (generation, content) = (generations.take(), content(seed, 3, 5));
            published.insert(generation, expected(generation, &content));
            steps.extend(publication(generation, &content));
        }
        let (mut memory, mut steps) = (Memory::new(), steps.iter());
        let mut schedule = schedule.iter().cycle();
        let mut last = 0;
        for _ in 0..8 {
            let found = read(|offset| {
                let count = *schedule.next().expect("endless");
                steps.by_ref().take(count).for_each(|step| memory.apply(step));
                memory.0[offset / WORD]
            });
            match found {
                Ok(topology) => {
                    prop_assert!(topology.generation >= last, "time went backwards");
                    last = topology.generation;
                    prop_assert_eq!(Some(&topology), published.get(&topology.generation));
                }
                Err(error) => prop_assert!(matches!(error, ReadError::Nothing | ReadError::Torn)),
            }
        }
    }
}

#[test]
fn a_reader_on_another_cpu_sees_no_mixture() {
    let memory: Vec<AtomicU64> = (0..REGION_SIZE / WORD).map(|_| AtomicU64::new(0)).collect();
    let apply = |step: &Step| match *step {
        Step::Store { offset, value } => memory[offset / WORD].store(value, Ordering::Release),
        Step::Fence => fence(Ordering::SeqCst),
    };
    header().iter().for_each(apply);
    let contents: Vec<_> = (0..4).map(|seed| content(seed, 4, 64)).collect();
    let done = AtomicBool::new(false);
    let read_count = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut count = 0u32;
            while !done.load(Ordering::Relaxed) {
                let Ok(found) = read(|offset| memory[offset / WORD].load(Ordering::Acquire)) else {
                    continue;
                };
                let content = &contents[found.generation as u32 as usize % contents.len()];
                assert_eq!(found, expected(found.generation, content));
                count += 1;
            }
            count
        });
        let mut generations = Generations::new(1);
        for _ in 0..3000 {
            let generation = generations.take();
            let content = &contents[generation as u32 as usize % contents.len()];
            publication(generation, content).iter().for_each(apply);
            std::thread::yield_now();
        }
        done.store(true, Ordering::Relaxed);
        reader.join().expect("no mixture")
    });
    assert!(read_count > 0, "the reader never succeeded");
}
