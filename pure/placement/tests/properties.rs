//! What holds for every host, every load and every request. The oracles here are written from the rules alone: sets and
//! subsets instead of the orders and proportions of the code.

mod common;

use common::{MIB2, address, device};
use proptest::prelude::*;
use std::collections::BTreeSet;
use vnuma_model::{CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology, HugePages};
use vnuma_placement::{
    BASE_PAGE_BYTES, Capacity, Claim, Locality, PlaceError, Placed, Promise, Request, Rule, place,
};

#[derive(Clone, Debug)]
struct Case {
    host: HostTopology,
    layout: CpuLayout,
    claims: Vec<Claim>,
    request: Request,
}

/// Nodes have CPUs `10 * id ..`, of which neighbours share a core where `smt`.
fn host(
    nodes: &[(u32, u64, u64)],
    distances: &[u8],
    smt: bool,
    devices: &[Option<u32>],
) -> (HostTopology, CpuLayout) {
    let count = nodes.len();
    let cpus = |id: u32, cpus: u32| (10 * id..10 * id + cpus).collect::<CpuSet>();
    let node = |(id, &(own, units, huge)): (usize, &(u32, u64, u64))| HostNode {
        id: id as u32,
        cpus: cpus(id as u32, own),
        memory_total_kib: 1 << 30,
        // Something that is no whole unit.
        memory_free_kib: units * 2048 + 1000,
        huge_pages: vec![HugePages { size_kib: 2048, total: huge, free: huge }],
    };
    let row = |from: usize| {
        (0..count).map(|to| if from == to { 10 } else { distances[from * count + to] }).collect()
    };
    let pair = |first: u32| [first, first + 1].into_iter().collect::<CpuSet>();
    let cores = if smt { (0..count as u32 * 5).map(|core| pair(2 * core)).collect() } else { Vec::new() };
    let node_of = |&at: &u32| at < count as u32;
    let topology = HostTopology {
        nodes: nodes.iter().enumerate().map(node).collect(),
        distances: DistanceMatrix::new((0..count).map(row).collect()).expect("square"),
        caches: nodes
            .iter()
            .zip(0..)
            .filter(|(node, _)| node.0 > 4)
            .map(|(_, id)| CacheGroup { level: 3, size_kib: 1, cpus: cpus(id, 4) })
            .collect(),
        pci_devices: devices.iter().zip(0..).map(|(node, at)| device(at, node.filter(node_of))).collect(),
    };
    (topology, CpuLayout { isolated: CpuSet::new(), cores })
}

fn case() -> impl Strategy<Value = Case> {
    let node = (0..9_u32, 0..12_u64, 0..6_u64);
    let nodes = proptest::collection::vec(node, 1..6);
    let claim = (
        proptest::collection::vec(0..50_u32, 0..6),
        (0..6_u32, 0..3_u32),
        (0..6_u32, any::<bool>(), 0..20_u64),
    );
    let claims = proptest::collection::vec(claim, 0..4);
    let devices = proptest::collection::vec(proptest::option::of(0..6_u32), 0..5);
    let asked = (1..24_u32, 1..40_u64, any::<bool>(), any::<bool>());
    (nodes, proptest::collection::vec(11..40_u8, 36), any::<bool>(), devices, claims, asked).prop_map(
        |(nodes, distances, smt, devices, claims, (vcpus, units, huge, preferred))| {
            let (host, layout) = host(&nodes, &distances, smt, &devices);
            let page = |huge| if huge { MIB2 } else { BASE_PAGE_BYTES };
            let claim = |(cpus, floating, (node, huge, mib)): (Vec<u32>, _, (u32, bool, u64))| Claim {
                owner: "other".into(),
                cpus: cpus.into_iter().collect(),
                floating: vec![floating],
                memory: vec![Promise { node, page_bytes: page(huge), bytes: mib << 20 }],
                devices: Vec::new(),
            };
            let request = Request {
                name: "a".into(),
                vcpus,
                memory_bytes: units * MIB2,
                page_bytes: page(huge),
                devices: (0..devices.len() as u32).map(address).collect(),
                locality: if preferred { Locality::Preferred } else { Locality::Required },
            };
            Case { host, layout, claims: claims.into_iter().map(claim).collect(), request }
        },
    )
}

/// What is free of each node, by sets: CPUs that nobody named, how many of them, and units of memory.
fn free(case: &Case) -> Vec<(BTreeSet<u32>, u64, u64)> {
    let page_bytes = case.request.page_bytes;
    let node = |node: &HostNode| {
        let named = |cpu: &u32| case.claims.iter().any(|claim| claim.cpus.contains(*cpu));
        let unnamed: BTreeSet<u32> = node.cpus.iter().filter(|cpu| !named(cpu)).collect();
        let floating = case.claims.iter().flat_map(|claim| &claim.floating).filter(|(id, _)| *id == node.id);
        let floating: u64 = floating.map(|(_, vcpus)| u64::from(*vcpus)).sum();
        let all =
            if page_bytes == MIB2 { node.huge_pages[0].free * MIB2 } else { node.memory_free_kib << 10 };
        let promises = case.claims.iter().flat_map(|claim| &claim.memory);
        let promised = promises.filter(|p| (p.node, p.page_bytes) == (node.id, page_bytes)).map(|p| p.bytes);
        let cpus = (unnamed.len() as u64).saturating_sub(floating);
        (unnamed, cpus, all.saturating_sub(promised.sum()) / MIB2)
    };
    case.host.nodes.iter().map(node).collect()
}

/// The home node of each device whose node is known, before anything takes its place for lack of room.
fn homes(case: &Case) -> Vec<usize> {
    let nodes = case.host.pci_devices.iter().filter_map(|device| device.node);
    let nearest = |from: u32| {
        let with_cpus = case.host.nodes.iter().filter(|node| !node.cpus.is_empty());
        let key = |to: u32| (to != from, case.host.distance(from, to), to);
        with_cpus.map(|node| node.id).min_by_key(|&to| key(to)).unwrap_or(from) as usize
    };
    nodes.map(nearest).collect()
}

/// Is there a way to give `vcpus` and `units` to `nodes`, with a vCPU and a unit on each of `must`?
fn possible(rooms: &[(u64, u64)], nodes: &[usize], must: &[usize], vcpus: u64, units: u64) -> bool {
    let all: u64 = nodes.iter().map(|&at| rooms[at].1).sum();
    if vcpus == 0 {
        return must.is_empty() && units <= all;
    }
    let subset = |bits: u32| nodes.iter().copied().filter(move |at| bits >> at & 1 == 1);
    (1..1_u32 << rooms.len()).any(|bits| {
        let count = subset(bits).count() as u64;
        let both = subset(bits).all(|at| rooms[at].0 > 0 && rooms[at].1 > 0);
        let served = must.iter().all(|at| bits >> at & 1 == 1);
        let cpus: u64 = subset(bits).map(|at| rooms[at].0).sum();
        both && served && count > 0 && count <= vcpus.min(units) && cpus >= vcpus && all >= units
    })
}

/// The shares of home nodes by the equations, if each is at least one: (node, vCPUs, units).
fn equations(
    rooms: &[(u64, u64)],
    homes: &BTreeSet<usize>,
    vcpus: u64,
    units: u64,
) -> Option<Vec<(usize, u64, u64)>> {
    let counted: Vec<_> = rooms.iter().filter(|room| room.0 > 0 && room.1 > 0).collect();
    let cpus: u64 = counted.iter().map(|room| room.0).sum();
    let memory: u64 = counted.iter().map(|room| room.1).sum();
    let memory = if memory < units { rooms.iter().map(|room| room.1).sum() } else { memory };
    let share = |&at: &usize| {
        let vcpus = (rooms[at].0 * vcpus).checked_div(cpus)?;
        let units = (rooms[at].1 * units).checked_div(memory)?;
        (vcpus > 0 && units > 0).then_some((at, vcpus, units))
    };
    homes.iter().map(share).collect()
}

fn attempt(case: &Case) -> Result<Placed, PlaceError> {
    place(&Capacity::new(&case.host, &case.layout, &case.claims), &case.request)
}

fn check_placement(case: &Case, placed: &Placed) -> Result<(), TestCaseError> {
    let (request, placement) = (&case.request, &placed.placement);
    let free = free(case);
    let mut vcpus = Vec::new();
    let mut homes = BTreeSet::new();
    let mut cpus = BTreeSet::new();
    for (id, node) in placement.guest_nodes.iter().enumerate() {
        prop_assert_eq!(node.id as usize, id);
        prop_assert!(homes.insert(node.home), "two guest nodes with one home");
        let (unnamed, count, units) = &free[node.home as usize];
        prop_assert!(node.vcpus.len() as u64 <= *count, "node {}: more CPUs than are free", node.home);
        prop_assert!(node.memory_bytes / MIB2 <= *units, "node {}: more memory than is free", node.home);
        prop_assert!(node.memory_bytes > 0 && node.memory_bytes.is_multiple_of(request.page_bytes.max(MIB2)));
        for pin in &node.vcpus {
            prop_assert!(unnamed.contains(&pin.cpu), "CPU {} is somebody's, or of another node", pin.cpu);
            prop_assert!(cpus.insert(pin.cpu), "CPU {} twice", pin.cpu);
            vcpus.push(pin.vcpu);
        }
        let later = &placement.guest_nodes[id..];
        prop_assert!(!node.vcpus.is_empty() || later.iter().all(|node| node.vcpus.is_empty()));
    }
    prop_assert_eq!(vcpus, (0..request.vcpus).collect::<Vec<_>>());
    prop_assert_eq!(placement.memory_bytes(), request.memory_bytes);
    prop_assert_eq!(placement.distances.len(), placement.guest_nodes.len());
    let devices: Vec<&String> = placement.devices.iter().map(|device| &device.address).collect();
    prop_assert_eq!(devices, request.devices.iter().collect::<Vec<_>>());
    for (device, of_host) in placement.devices.iter().zip(&case.host.pci_devices) {
        prop_assert_eq!(device.guest_node.is_some(), of_host.node.is_some());
        let at = device.guest_node.map(|id| &placement.guest_nodes[id as usize]);
        prop_assert!(at.is_none_or(|node| !node.vcpus.is_empty()));
        prop_assert!(!device.local || at.is_some());
    }
    Ok(())
}

fn check_existence(case: &Case, result: &Result<Placed, PlaceError>) -> Result<(), TestCaseError> {
    let rooms: Vec<(u64, u64)> = free(case).iter().map(|(_, cpus, units)| (*cpus, *units)).collect();
    let all: Vec<usize> = (0..rooms.len()).collect();
    let (vcpus, units) = (u64::from(case.request.vcpus), case.request.memory_bytes / MIB2);
    let of_devices = homes(case);
    let homes: BTreeSet<usize> = of_devices.iter().copied().collect();
    let preferred = case.request.locality == Locality::Preferred;
    let full = homes.iter().any(|&at| rooms[at].0 == 0 || rooms[at].1 == 0);
    if homes.is_empty() || preferred {
        prop_assert_eq!(result.is_ok(), possible(&rooms, &all, &[], vcpus, units));
    }
    if homes.is_empty() || (full && preferred) {
        return Ok(());
    }
    if full {
        prop_assert!(result.is_err(), "a home node has nothing left");
        return Ok(());
    }
    let devices = |at: usize| of_devices.iter().filter(|home| **home == at).count();
    let mut served: Vec<usize> = homes.iter().copied().collect();
    served.sort_by_key(|&at| (std::cmp::Reverse(devices(at)), at));
    served.truncate(vcpus.min(units) as usize);
    let at_home = possible(&rooms, &all, &served, vcpus, units);
    prop_assert!(result.is_ok() == at_home || preferred);
    let Ok(placed) = result else { return Ok(()) };
    prop_assert_eq!(at_home, placed.explanation.rule != Rule::HomesGivenUp);
    if !at_home {
        return Ok(());
    }
    for device in &placed.placement.devices {
        let served = device.host_node.is_some() && served.len() == homes.len();
        prop_assert!(device.local || !served, "{:?}", device);
    }
    let shares = equations(&rooms, &homes, vcpus, units).filter(|shares| {
        let others: Vec<usize> = all.iter().copied().filter(|at| !homes.contains(at)).collect();
        let vcpus = vcpus.checked_sub(shares.iter().map(|share| share.1).sum());
        let units = units.checked_sub(shares.iter().map(|share| share.2).sum());
        vcpus.zip(units).is_some_and(|(vcpus, units)| possible(&rooms, &others, &[], vcpus, units))
    });
    prop_assert_eq!(shares.is_some(), placed.explanation.rule == Rule::Equations);
    for (at, vcpus, units) in shares.unwrap_or_default() {
        let node =
            placed.placement.guest_nodes.iter().find(|node| node.home as usize == at).expect("a share");
        prop_assert_eq!((node.vcpus.len() as u64, node.memory_bytes), (vcpus, units * MIB2));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_over_allocated_and_everything_is_placed_once(case in case()) {
        if let Ok(placed) = attempt(&case) {
            check_placement(&case, &placed)?;
        }
    }

    #[test]
    fn there_is_a_placement_whenever_the_rules_allow_one_and_shares_are_the_equations(case in case()) {
        let result = attempt(&case);
        prop_assert!(!matches!(result, Err(PlaceError::Request(_))), "{result:?}");
        check_existence(&case, &result)?;
    }

    #[test]
    fn equal_input_gives_equal_output(case in case()) {
        let mut other = case.clone();
        other.claims.reverse();
        prop_assert_eq!(attempt(&case), attempt(&other));
    }

    #[test]
    fn what_would_fit_fits(case in case()) {
        if let Err(PlaceError::Refused(refusal)) = attempt(&case) {
            prop_assert!(!refusal.lacks.is_empty());
            prop_assert!(refusal.lacks.iter().all(|lack| lack.needed > lack.there), "{:?}", refusal.lacks);
            for fits in refusal.would_fit {
                let mut smaller = case.clone();
                smaller.request.vcpus = fits.vcpus;
                smaller.request.memory_bytes = fits.memory_bytes;
                smaller.request.page_bytes = fits.page_bytes;
                if fits.remote {
                    smaller.request.locality = Locality::Preferred;
                }
                prop_assert!(attempt(&smaller).is_ok(), "{fits:?}");
            }
        }
    }

    #[test]
    fn vms_that_come_one_after_the_other_share_nothing(case in case()) {
        let mut case = case;
        case.request.devices.clear();
        case.request.vcpus = case.request.vcpus.min(5);
        for number in 0..20 {
            let Ok(placed) = attempt(&case) else { break };
            check_placement(&case, &placed)?;
            let memory = placed.placement.guest_nodes.iter();
            let promise = |node: &vnuma_placement::GuestNodePlan| Promise {
                node: node.home,
                page_bytes: case.request.page_bytes,
                bytes: node.memory_bytes,
            };
            let memory = memory.map(promise).collect();
            let cpus = placed.placement.cpus();
            // Their vCPUs keep the CPUs, and floating ones of others stay where they are.
            case.claims.push(Claim { owner: number.to_string(), cpus, memory, ..Claim::default() });
        }
    }
}
