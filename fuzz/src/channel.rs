//! The topology channel: what is published, what a guest reads of a region that others write to meanwhile, and what a host
//! reads of the guest's area.

use std::{
    collections::BTreeSet,
    os::unix::fs::FileExt,
    sync::{Mutex, OnceLock, PoisonError},
};
use vnuma_abi_topology_channel::{
    Device, GUEST_OFFSET, GUEST_SIZE, MAX_DEVICES, MAX_NODES, MAX_SUPPORTED, MAX_VCPUS, REGION_SIZE, Vcpu,
};
use vnuma_channel::{
    Channel, Content, ContentError, Generations, Plug, Step,
    layout::{WORD, header, publication},
};
use vnuma_channel_model::{GuestEnd, ReadError, Topology, read};
use vnuma_model::DistanceMatrix;

const WORDS: usize = REGION_SIZE / WORD;

/// The words of a region with its header.
fn region() -> Vec<u64> {
    let mut words = vec![0; WORDS];
    header().iter().for_each(|step| apply(&mut words, step));
    words
}

fn apply(words: &mut [u64], step: &Step) {
    if let Step::Store { offset, value } = *step {
        assert!(offset.is_multiple_of(WORD));
        words[offset / WORD] = value;
    }
}

/// Contents that differ in every word: a mixture of two is none of them.
fn sample(seed: u32) -> Content {
    let distance = |from, to| if from == to { 10 } else { 11 + (seed % 200) as u8 };
    let rows = (0..3).map(|from| (0..3).map(|to| distance(from, to)).collect()).collect();
    let vcpu = |id: u32| Vcpu { apic_id: id * 1000 + seed % 1000, node: (id + seed) % 3 };
    let device = |bus: u8| Device { bus, devfn: seed as u8, node: (u32::from(bus) + seed) % 3, segment: 0 };
    Content::new(DistanceMatrix::new(rows).expect("square"), (0..5).map(vcpu).collect())
        .and_then(|content| content.with_devices((0..3).map(device).collect()))
        .expect("within limits")
}

fn topology(generation: u64, content: &Content) -> Topology {
    let (distances, vcpus) = (content.distances().rows().to_vec(), content.vcpus().to_vec());
    let devices = content.devices().to_vec();
    Topology { generation, distances, vcpus, devices, others: Vec::new() }
}

/// Patches of eleven bytes, a word each: when, the word, its value. Somebody writes them into a region with two
/// publications, before or while it is read. What is accepted can be relied on.
pub fn reader(input: &[u8]) {
    let mut words = region();
    let mut generations = Generations::new(7);
    for seed in 1..=2 {
        publication(generations.take(), &sample(seed)).iter().for_each(|step| apply(&mut words, step));
    }
    let patches = input.chunks_exact(11).map(|patch| {
        let word = usize::from(u16::from_le_bytes([patch[1], patch[2]])) % WORDS;
        (usize::from(patch[0]) * 16, word, u64::from_le_bytes(patch[3..].try_into().expect("eight bytes")))
    });
    let mut patches: Vec<_> = patches.take(64).collect();
    patches.sort_by_key(|&(when, _, _)| when);
    let mut pending = patches.iter().peekable();
    let mut loads = 0;
    let found = read(|offset| {
        while let Some(&&(_, word, value)) = pending.peek().filter(|&&&(when, _, _)| when <= loads) {
            words[word] = value;
            pending.next();
        }
        loads += 1;
        words[offset / WORD]
    });
    match found {
        Ok(found) => {
            let nodes = found.distances.len();
            assert!((1..=MAX_NODES).contains(&nodes) && (1..=MAX_VCPUS).contains(&found.vcpus.len()));
            assert!(found.generation != 0);
            assert!(found.vcpus.iter().all(|vcpu| (vcpu.node as usize) < nodes));
            assert!(found.devices.len() <= MAX_DEVICES);
            assert!(found.devices.iter().all(|device| (device.node as usize) < nodes));
            let rows = &found.distances;
            assert!(rows.iter().all(|row| row.len() == nodes && row.iter().all(|&distance| distance >= 10)));
        }
        Err(error) => assert!(!patches.is_empty(), "{error:?} of a whole region"),
    }
}

/// A topology to be published: nodes, distances, and vCPUs of six bytes each. It is refused for a reason that is there, or
/// read by the guest as it is.
pub fn content(input: &[u8]) {
    let Some((&nodes, rest)) = input.split_first() else { return };
    let nodes = usize::from(nodes) % (MAX_NODES + 2);
    let mut bytes = rest.iter().copied();
    let mut byte = || bytes.next().unwrap_or(20);
    let rows: Vec<Vec<u8>> = (0..nodes).map(|_| (0..nodes).map(|_| byte()).collect()).collect();
    let large = rows.iter().flatten().all(|&distance| distance >= 10);
    let distances = DistanceMatrix::new(rows);
    assert_eq!(distances.is_ok(), large);
    let Ok(distances) = distances else { return };
    let rest = rest.get(nodes * nodes..).unwrap_or_default();
    let vcpu = |bytes: &[u8]| Vcpu {
        apic_id: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
        node: u16::from_le_bytes([bytes[4], bytes[5]]).into(),
    };
    let vcpus: Vec<Vcpu> = rest.chunks_exact(6).map(vcpu).collect();
    let names: BTreeSet<u32> = vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
    let on = |node: usize| vcpus.iter().any(|vcpu| vcpu.node as usize == node);
    // The same bytes as devices, four for the address and two for the node.
    let device = |vcpu: &Vcpu| {
        let [low, high, bus, devfn] = vcpu.apic_id.to_le_bytes();
        Device { segment: u16::from_le_bytes([low, high]), bus, devfn, node: vcpu.node }
    };
    let devices: Vec<Device> = vcpus.iter().take(MAX_DEVICES).map(device).collect();
    match Content::new(distances, vcpus.clone()).and_then(|content| content.with_devices(devices)) {
        Ok(content) => {
            assert!(names.iter().copied().eq(content.vcpus().iter().map(|vcpu| vcpu.apic_id)));
            let (mut words, generation) = (region(), Generations::new(1).take());
            publication(generation, &content).iter().for_each(|step| apply(&mut words, step));
            assert_eq!(read(|offset| words[offset / WORD]), Ok(topology(generation, &content)));
        }
        Err(ContentError::Nodes(count)) => assert!(count == nodes && !(1..=MAX_NODES).contains(&count)),
        Err(ContentError::Vcpus(count)) => assert!(count == vcpus.len() && !(1..=MAX_VCPUS).contains(&count)),
        Err(ContentError::Node { node, .. }) => assert!(on(node as usize) && node as usize >= nodes),
        Err(ContentError::Twice(_)) => assert!(names.len() < vcpus.len()),
        Err(error) => panic!("the vCPUs were right: {error}"),
    }
}

/// Each byte says how far the writer comes between two loads of the reader. What is read was published, each time something at
/// least as new.
pub fn race(input: &[u8]) {
    if input.is_empty() {
        return;
    }
    let mut generations = Generations::new(99);
    let (mut published, mut steps) = (Vec::new(), Vec::new());
    for seed in 1..=6 {
        let (generation, content) = (generations.take(), sample(seed));
        published.push(topology(generation, &content));
        steps.extend(publication(generation, &content));
    }
    let (mut words, mut steps) = (region(), steps.iter());
    // Most of the time it stands still: a read loads many words.
    let mut schedule = input.iter().map(|&byte| usize::from(byte.saturating_sub(192))).cycle();
    let mut last = 0;
    for _ in 0..4 {
        let found = read(|offset| {
            steps.by_ref().take(schedule.next().expect("endless")).for_each(|step| apply(&mut words, step));
            words[offset / WORD]
        });
        match found {
            Ok(found) => {
                assert!(found.generation >= last, "time went backwards");
                last = found.generation;
                assert!(published.contains(&found), "a mixture: {found:?}");
            }
            Err(error) => assert!(matches!(error, ReadError::Nothing | ReadError::Torn), "{error:?}"),
        }
    }
}

/// The guest's area as the guest left it. Whatever it says, only an outstanding publication is acknowledged.
pub fn status(input: &[u8]) {
    static CHANNEL: OnceLock<Mutex<(Channel, GuestEnd)>> = OnceLock::new();
    let channel = CHANNEL.get_or_init(|| {
        let (channel, Plug::Ivshmem(socket)) = Channel::create(7).expect("a channel");
        Mutex::new((channel, GuestEnd::connect(&socket).expect("all messages")))
    });
    let mut channel = channel.lock().unwrap_or_else(PoisonError::into_inner);
    let (channel, guest) = &mut *channel;
    let mut area = vec![0; GUEST_SIZE];
    let length = input.len().min(GUEST_SIZE);
    area[..length].copy_from_slice(&input[..length]);
    let generation = channel.publish(&sample(1)).expect("published");
    guest.memory.write_all_at(&area, GUEST_OFFSET as u64).expect("written");
    let status = channel.guest_status();
    let (supported, driver) = (&status.supported, &status.driver);
    assert!(supported.len() <= MAX_SUPPORTED && supported.iter().all(|section| section.kind != 0));
    assert!(driver.refused.is_none_or(|(generation, errno)| generation != 0 && (0..=4095).contains(&errno)));
    assert!(driver.version.is_some() || status == vnuma_channel::GuestStatus::default());
    let acknowledged = channel.take_acknowledgement().expect("taken");
    // It may be one of the publications before.
    assert!(acknowledged.is_none_or(|taken| taken == status.acknowledged && taken <= generation));
    assert_eq!(status.acknowledged == generation, acknowledged == Some(generation));
}
