//! Each rule by example: the equations, small VMs, several devices, nodes that lack something, VMs without devices.

mod common;

use common::{GIB, MIB2, Node, address, claim, device, free, host, paper, promise, vm};
use vnuma_model::{CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostTopology};
use vnuma_placement::{
    Capacity, Claim, Locality, PlaceError, Placed, Request, RequestError, Resource, Rule, place,
};

/// Of each guest node: home, CPUs, memory in MiB.
fn shown(placed: &Placed) -> Vec<(u32, String, u64)> {
    let cpus =
        |node: &vnuma_placement::GuestNodePlan| node.vcpus.iter().map(|pin| pin.cpu).collect::<CpuSet>();
    let nodes = placed.placement.guest_nodes.iter();
    nodes.map(|node| (node.home, cpus(node).to_string(), node.memory_bytes >> 20)).collect()
}

fn nodes(of: &[(u32, &str, u64)]) -> Vec<(u32, String, u64)> {
    of.iter().map(|&(home, cpus, mib)| (home, cpus.to_owned(), mib)).collect()
}

fn refusal(capacity: &Capacity, request: &Request) -> vnuma_placement::Refusal {
    match place(capacity, request) {
        Err(PlaceError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_vm_of_the_paper_has_half_of_itself_on_the_home_node() {
    let host = paper();
    let placed = place(&free(&host, &[]), &vm(6, 8 * GIB, &[1, 2])).expect("placed");
    assert_eq!(placed.explanation.rule, Rule::Equations);
    assert_eq!(shown(&placed), nodes(&[(0, "0-2", 4096), (1, "8-10", 4096)]));
    assert_eq!(placed.placement.distances.rows(), [[10, 21], [21, 10]]);
    let devices: Vec<_> = placed.placement.devices.iter().map(|d| (d.guest_node, d.local)).collect();
    assert_eq!(devices, [(Some(0), true), (Some(0), true)]);
}

#[test]
fn the_share_follows_what_is_free() {
    let host = paper();
    // Node 0 has 2 of 10 free CPUs, and 16 of 80 GiB.
    let claims = [claim("0-5"), promise(0, 48 * GIB)];
    let placed = place(&free(&host, &claims), &vm(6, 8 * GIB, &[1])).expect("placed");
    // floor(2 x 6 / 10) and floor(16 GiB x 8 GiB / 80 GiB), in units of 2 MiB.
    assert_eq!(shown(&placed), nodes(&[(0, "6", 1638), (1, "8-12", 6554)]));
    assert_eq!(placed.explanation.rule, Rule::Equations);
    let text = placed.explanation.to_string();
    for line in [
        "host node 0 of 0000:01:00.0:\n",
        "memory, equation (3): floor(8192 x 4096 / 40960) = 819 units of 2 MiB; 40960 is that of nodes with a free CPU\n",
        "vCPUs, equation (4): floor(2 x 6 / 10) = 1\n",
        "host node 1 gets 5 vCPUs and 6554 MiB\n",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
}

#[test]
fn a_small_vm_is_on_its_home_node() {
    let host = paper();
    let placed = place(&free(&host, &[]), &vm(1, GIB, &[3])).expect("placed");
    assert_eq!(placed.explanation.rule, Rule::Small);
    assert_eq!(shown(&placed), nodes(&[(1, "8", 1024)]));
    // Its node has one CPU left: the equation gives floor(1 x 6 / 9) = 0, and the VM one vCPU there.
    let placed = place(&free(&host, &[claim("0-6")]), &vm(6, 8 * GIB, &[1])).expect("placed");
    assert_eq!(placed.explanation.rule, Rule::Small);
    assert_eq!(shown(&placed).iter().map(|node| node.1.as_str()).collect::<Vec<_>>(), ["7", "8-12"]);
}

#[test]
fn devices_on_several_nodes_have_a_share_on_each() {
    let quarter = |first: &'static str| Node(first, 8192, 0);
    let devices = [device(1, Some(1)), device(2, Some(3)), device(3, Some(3)), device(4, Some(0))];
    let host = host(&[quarter("0-7"), quarter("8-15"), quarter("16-23"), quarter("24-31")], &devices);
    let capacity = free(&host, &[]);
    let placed = place(&capacity, &vm(16, 8 * GIB, &[1, 2, 3])).expect("placed");
    let expected = [(1, "8-11", 2048), (3, "24-27", 2048), (0, "0-7", 4096)];
    assert_eq!(shown(&placed), nodes(&expected));
    let devices: Vec<_> = placed.placement.devices.iter().map(|d| (d.guest_node, d.local)).collect();
    assert_eq!(devices, [(Some(0), true), (Some(1), true), (Some(1), true)]);
    // A small one has a vCPU on each.
    let placed = place(&capacity, &vm(2, GIB, &[1, 2])).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(1, "8", 512), (3, "24", 512)]));
    // More nodes with devices than vCPUs: the node with most devices is served, and the others are told.
    let placed = place(&capacity, &vm(1, GIB, &[1, 2, 3, 4])).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(3, "24", 1024)]));
    let devices: Vec<_> = placed.placement.devices.iter().map(|d| (d.guest_node, d.local)).collect();
    assert_eq!(devices, [(Some(0), false), (Some(0), true), (Some(0), true), (Some(0), false)]);
    let text = placed.explanation.to_string();
    let line = "device 0000:01:00.0: not local: the VM has fewer vCPUs or units of memory than nodes with devices, and host node 1 \
                was left out\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_vm_that_fits_only_without_its_home_node_is_placed_if_locality_is_only_preferred() {
    // Two units of 2 MiB are free beside the device's node, and all CPUs of the other two nodes are needed.
    let devices = [device(1, Some(0))];
    let mut host = host(&[Node("0", 1, 0), Node("1-7", 1, 0), Node("8-9", 1, 0)], &devices);
    host.nodes.iter_mut().for_each(|node| node.memory_free_kib = 2048);
    let capacity = free(&host, &[]);
    let mut asked = vm(9, 4 << 20, &[1]);
    assert!(matches!(place(&capacity, &asked), Err(PlaceError::Refused(_))));
    asked.locality = Locality::Preferred;
    let placed = place(&capacity, &asked).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(1, "1-7", 2), (2, "8-9", 2)]));
    assert_eq!(placed.explanation.rule, Rule::HomesGivenUp);
    assert!(!placed.placement.devices[0].local);
    let line = "device 0000:01:00.0: not local: the VM fits only if none of it is on host node 0\n";
    assert!(placed.explanation.to_string().contains(line), "{}", placed.explanation);
}

#[test]
fn a_node_without_cpus_is_no_home() {
    let devices = [device(1, Some(1)), device(2, None)];
    let mut host = host(&[Node("0-7", 8192, 0), Node("", 8192, 0), Node("8-15", 8192, 0)], &devices);
    host.distances =
        DistanceMatrix::new(vec![vec![10, 21, 31], vec![21, 10, 14], vec![31, 14, 10]]).expect("square");
    let placed = place(&free(&host, &[]), &vm(2, 2 * GIB, &[1, 2])).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(2, "8", 1024), (0, "0", 1024)]));
    let [first, second] = &placed.placement.devices[..] else { panic!("two devices") };
    assert_eq!((first.host_node, first.guest_node, first.local), (Some(1), Some(0), true));
    assert_eq!((second.host_node, second.guest_node, second.local), (None, None, false));
    assert_eq!(placed.explanation.homes[0].instead_of, Some(1));
    // Its memory is the last resort.
    let placed = place(&free(&host, &[]), &vm(2, 20 * GIB, &[])).expect("placed");
    assert_eq!(shown(&placed)[2], (1, String::new(), 4096));
    assert!(placed.placement.guest_nodes[2].vcpus.is_empty());
}

#[test]
fn a_home_node_with_nothing_left_is_named() {
    let host = paper();
    let capacity = free(&host, &[claim("0-7"), promise(0, 64 * GIB)]);
    let refusal = refusal(&capacity, &vm(4, 4 * GIB, &[1]));
    let lacks: Vec<_> = refusal.lacks.iter().map(|l| (l.node, l.resource, l.needed, l.there)).collect();
    assert_eq!(lacks, [(Some(0), Resource::Cpus, 1, 0), (Some(0), Resource::Memory, MIB2, 0)]);
    assert_eq!(
        refusal.to_string(),
        "host node 0 lacks 1 CPUs: 1 are needed, 0 are free; host node 0 lacks 2 MiB of memory in pages of 4 KiB: 2 MiB are \
         needed, 0 bytes are free; would fit: 4 vCPUs with 4 GiB in pages of 4 KiB, with devices that are not local"
    );
    let preferred = Request { locality: Locality::Preferred, ..vm(4, 4 * GIB, &[1]) };
    let placed = place(&capacity, &preferred).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(1, "8-11", 4096)]));
    assert!(!placed.placement.devices[0].local);
    let line = "device 0000:01:00.0: not local: host node 0 has no free CPU or no free memory\n";
    assert!(placed.explanation.to_string().contains(line), "{}", placed.explanation);
}

#[test]
fn what_the_host_lacks_is_counted() {
    let host = host(&[Node("0-7", 4096, 100), Node("8-15", 4096, 200)], &[device(1, Some(0))]);
    let capacity = free(&host, &[claim("0-3")]);
    let refusal = refusal(&capacity, &Request { page_bytes: MIB2, ..vm(13, GIB, &[]) });
    assert_eq!(
        refusal.to_string(),
        "the host lacks 1 CPUs: 13 are needed, 12 are free; the host lacks 424 MiB of memory in pages of 2 MiB: 1 GiB are needed, \
         600 MiB are free; would fit: 12 vCPUs with 600 MiB in pages of 2 MiB"
    );
    let pages = Request { page_bytes: MIB2, ..vm(4, GIB, &[]) };
    let text = place(&capacity, &pages).expect_err("refused").to_string();
    let fits = "; would fit: 4 vCPUs with 1 GiB in pages of 4 KiB; 4 vCPUs with 600 MiB in pages of 2 MiB";
    assert!(text.ends_with(fits), "{text}");
}

#[test]
fn guest_nodes_without_memory_are_none() {
    let mut host = host(&[Node("0-3", 4096, 0), Node("4-7", 4096, 0)], &[]);
    for node in &mut host.nodes {
        node.huge_pages[0] = vnuma_model::HugePages { size_kib: 1 << 20, total: 4, free: 4 };
    }
    let request = Request { page_bytes: GIB, ..vm(6, GIB, &[]) };
    let refusal = refusal(&free(&host, &[]), &request);
    assert_eq!(refusal.lacks[0].resource, Resource::Units);
    assert!(
        refusal.to_string().starts_with(
            "the host has free CPUs on so many nodes that the VM would need 2 guest nodes, and its memory suffices for 1 with pages \
             of 1 GiB; would fit: 6 vCPUs with 1 GiB in pages of 4 KiB"
        ),
        "{refusal}"
    );
}

#[test]
fn vms_without_devices_are_neither_all_on_node_0_nor_on_siblings() {
    let mut host = host(&[Node("0-7", 8192, 0), Node("8-15", 8192, 0)], &[]);
    host.pci_devices = vec![device(1, Some(0))];
    // CPU n and n + 4 share a core.
    let core = |cpu: u32| [cpu, cpu + 4].into_iter().collect::<CpuSet>();
    let layout = CpuLayout { cores: [0, 1, 2, 3, 8, 9, 10, 11].map(core).to_vec(), ..CpuLayout::default() };
    let mut claims: Vec<Claim> = Vec::new();
    let mut homes = Vec::new();
    let mut cpus = Vec::new();
    for _ in 0..6 {
        let placed = place(&Capacity::new(&host, &layout, &claims), &vm(2, GIB, &[])).expect("placed");
        homes.push(placed.placement.guest_nodes[0].home);
        cpus.push(placed.placement.cpus().to_string());
        claims.push(claim(&placed.placement.cpus().to_string()));
    }
    assert_eq!(homes, [0, 1, 0, 1, 0, 1]);
    // The fifth shares cores, because no other one is left.
    assert_eq!(cpus, ["0-1", "8-9", "2-3", "10-11", "4-5", "12-13"]);
    // Where only one node has whole cores for it, it is that one.
    let claims = [claim("0,1,2"), claim("8,9,10,11,12,13,14")];
    let placed = place(&Capacity::new(&host, &layout, &claims), &vm(1, GIB, &[])).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(0, "3", 1024)]));
}

#[test]
fn a_core_that_a_floating_vcpu_runs_on_is_not_whole() {
    let host = host(&[Node("0-7", 8192, 0)], &[]);
    // CPU n and n + 4 share a core.
    let core = |cpu: u32| [cpu, cpu + 4].into_iter().collect::<CpuSet>();
    let layout = CpuLayout { cores: [0, 1, 2, 3].map(core).to_vec(), ..CpuLayout::default() };
    let floating = Claim { owner: "other".into(), floating: vec![(0, 1)], ..Claim::default() };
    let capacity = Capacity::new(&host, &layout, &[floating]);
    assert_eq!((capacity.nodes[0].free_cpus, capacity.nodes[0].free_cores), (7, 3));
    let placed = place(&capacity, &vm(4, GIB, &[])).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(0, "1-3,5", 1024)]), "a sibling of its own, before the other VM's");
}

#[test]
fn a_vm_larger_than_any_node_is_on_few_near_ones() {
    let mut host: HostTopology = host(
        &[Node("0-7", 8192, 0), Node("8-15", 8192, 0), Node("16-23", 8192, 0), Node("24-31", 8192, 0)],
        &[],
    );
    let row = |near: [u8; 4]| near.to_vec();
    let rows =
        vec![row([10, 32, 32, 12]), row([32, 10, 32, 32]), row([32, 32, 10, 32]), row([12, 32, 32, 10])];
    host.distances = DistanceMatrix::new(rows).expect("square");
    let placed = place(&free(&host, &[]), &vm(12, 4 * GIB, &[])).expect("placed");
    assert_eq!(placed.explanation.rule, Rule::Spans);
    assert_eq!(shown(&placed), nodes(&[(0, "0-5", 2048), (3, "24-29", 2048)]));
    assert_eq!(placed.placement.distances.rows(), [[10, 12], [12, 10]]);
    // Memory for which one node is too small, with one vCPU only.
    let placed = place(&free(&host, &[]), &vm(1, 12 * GIB, &[])).expect("placed");
    assert_eq!(shown(&placed), nodes(&[(0, "0", 8192), (3, "", 4096)]));
}

#[test]
fn floating_vcpus_and_isolated_cpus_are_not_free() {
    let host = paper();
    let layout = CpuLayout { isolated: "0-1".parse().expect("CPUs"), ..CpuLayout::default() };
    let floating = Claim { owner: "b".into(), floating: vec![(0, 4), (1, 100), (7, 1)], ..Claim::default() };
    let capacity = Capacity::new(&host, &layout, &[floating]);
    let free: Vec<_> = capacity.nodes.iter().map(|node| (node.usable_cpus, node.free_cpus)).collect();
    assert_eq!(free, [(6, 2), (8, 0)]);
}

#[test]
fn requests_that_make_no_sense_are_named() {
    let mut host = paper();
    host.pci_devices[1].iommu_group = Some(1);
    let taken = Claim { owner: "b".into(), devices: vec![address(2)], ..Claim::default() };
    let capacity = free(&host, &[taken]);
    let error = |request: Request| match place(&capacity, &request) {
        Err(PlaceError::Request(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let named = |name: &str| Request { name: name.into(), ..vm(1, GIB, &[]) };
    assert!(
        error(named("a b")).starts_with("name \"a b\": expected 1 to 64 letters"),
        "{}",
        error(named("a b"))
    );
    assert!(error(named("-a")).starts_with("name") && error(named("")).starts_with("name"));
    assert_eq!(error(vm(0, GIB, &[])), "vcpus 0: expected 1 to 4096");
    assert_eq!(error(vm(1, 0, &[])), "memory 0: expected at least 2 MiB");
    let odd = "memory 1025 MiB: not a multiple of 2 MiB, so that transparent huge pages fit";
    assert_eq!(error(vm(1, GIB + (1 << 20), &[])), odd);
    let odd = "memory 1025 MiB: not a multiple of 2 MiB, the size of its pages";
    assert_eq!(error(Request { page_bytes: MIB2, ..vm(1, GIB + (1 << 20), &[]) }), odd);
    let pages = Request { page_bytes: GIB, ..vm(1, GIB, &[]) };
    assert_eq!(error(pages), "page size 1 GiB: the host has pages of 4 KiB, 2 MiB");
    assert!(
        error(vm(1, GIB, &[9])).starts_with("device \"0000:09:00.0\": the host has no such PCI function")
    );
    assert_eq!(error(vm(1, GIB, &[3, 3])), "device 0000:03:00.0: named twice");
    assert_eq!(error(vm(1, GIB, &[2])), "device 0000:02:00.0: in use by b");
    let group = "device 0000:01:00.0: shares IOMMU group 1 with 0000:02:00.0, which is in use by b";
    assert_eq!(error(vm(1, GIB, &[1])), group);
    assert!(matches!(
        place(&capacity, &vm(4097, GIB, &[])),
        Err(PlaceError::Request(RequestError::Vcpus(4097)))
    ));
}

#[test]
fn of_the_caches_of_a_cpu_the_last_level_counts_and_cpus_without_one_share_that_of_their_node() {
    let set = |text: &str| text.parse::<CpuSet>().expect("CPUs");
    let group = |level: u32, text: &str| CacheGroup { level, size_kib: 1024, cpus: set(text) };
    let mut host = host(&[Node("0-7", 64 << 10, 0)], &[]);
    let pick = |host: &HostTopology, vcpus: u32| {
        let placed = place(&free(host, &[]), &vm(vcpus, GIB, &[])).expect("placed");
        placed.placement.cpus().to_string()
    };
    // Two last-level caches, of five cores and of three, and second-level ones of two cores each.
    host.caches = ["0-1", "2-3", "4-5", "6-7"].map(|cpus| group(2, cpus)).to_vec();
    host.caches.splice(1..1, [group(3, "0-4"), group(3, "5-7")]);
    assert_eq!(pick(&host, 3), "5-7", "the smallest last-level cache that suffices");
    assert_eq!(pick(&host, 2), "5-6", "not a second-level cache");
    // CPUs 0 to 3 have no cache that is known: they are in one, which is larger than the other.
    host.caches = vec![group(3, "4-6")];
    assert_eq!(pick(&host, 5), "0-3,7");
}

#[test]
fn of_equally_near_groups_of_nodes_the_emptier_one_has_a_vm_larger_than_any_node() {
    let mut host = host(
        &[Node("0-7", 8192, 0), Node("8-15", 8192, 0), Node("16-25", 8192, 0), Node("26-35", 8192, 0)],
        &[],
    );
    let row = |near: [u8; 4]| near.to_vec();
    let rows =
        vec![row([10, 12, 32, 32]), row([12, 10, 32, 32]), row([32, 32, 10, 12]), row([32, 32, 12, 10])];
    host.distances = DistanceMatrix::new(rows).expect("square");
    let placed = place(&free(&host, &[]), &vm(12, 4 * GIB, &[])).expect("placed");
    assert_eq!(placed.explanation.rule, Rule::Spans);
    let homes: Vec<u32> = placed.placement.guest_nodes.iter().map(|node| node.home).collect();
    assert_eq!(homes, [2, 3]);
}

#[test]
fn a_name_and_a_list_of_devices_may_be_as_long_as_the_limit_says_and_no_longer() {
    let devices: Vec<_> = (1..=33).map(|number| device(number, Some(0))).collect();
    let host = host(&[Node("0-7", 8192, 0)], &devices);
    let numbers: Vec<u32> = (1..=33).collect();
    let asked =
        |request: &Request| place(&free(&host, &[]), request).map(|placed| placed.placement.devices.len());
    assert_eq!(asked(&vm(2, GIB, &numbers[..32])), Ok(32));
    assert_eq!(asked(&vm(2, GIB, &numbers)), Err(PlaceError::Request(RequestError::Devices(33))));
    let named = |length: usize| Request { name: "a".repeat(length), ..vm(1, GIB, &[]) };
    assert_eq!(asked(&named(64)), Ok(0));
    assert_eq!(asked(&named(65)), Err(PlaceError::Request(RequestError::Name("a".repeat(65)))));
}
