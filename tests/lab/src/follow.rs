//! A guest follows random moves of its vCPUs: one at a time, several at once, through vnumad and behind its
//! back, CPU 0, nodes that are emptied and filled again, while the guest is busy.

use crate::guest::{
    DEFAULT_KERNEL, check, check_kernel_log, equip_with, show_guest, taskset, wait_until_listed,
    wait_until_seen,
};
use anyhow::{Context, Result};
use vnuma_random::Rng;
use vnuma_scenario::{Nodes, Vm, vnumactl, vnumad};

const VCPUS: usize = 4;

#[derive(clap::Args)]
pub struct Arguments {
    /// Rounds of moves
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Seed of the moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Kernel of the guest, as lab-vm takes it; several: one guest after the other
    #[arg(long, default_value = DEFAULT_KERNEL)]
    kernel: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let nodes = Nodes::read()?;
    let _daemon = vnumad(&[])?;
    let (count, vcpus) = (nodes.with_cpus().count().to_string(), VCPUS.to_string());
    let name_and_shape = |kernel: &String| {
        // 256 MiB for each node: all vCPUs are on one for a while, and what they load, read and use there was 180 MiB once.
        let shape = ["--nodes", &count, "--vcpus", &vcpus, "--memory", "1024M", "--kernel", kernel];
        (format!("follow-{}", kernel.replace('.', "-")), shape.map(str::to_owned))
    };
    let shapes: Vec<_> = arguments.kernel.iter().map(name_and_shape).collect();
    let starts: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
    let vms = Vm::start_all(&starts)?;
    arguments.kernel.iter().zip(vms).try_for_each(|(kernel, vm)| {
        follow(arguments, kernel, &vm, &nodes).with_context(|| format!("guest kernel {kernel}"))
    })
}

fn follow(arguments: &Arguments, kernel: &str, vm: &Vm, nodes: &Nodes) -> Result<()> {
    let hosts: Vec<u32> = nodes.with_cpus().map(|(node, _)| *node).collect();
    // The driver is there first: plugging the channel in must find it.
    equip_with(vm, kernel)?;
    wait_until_listed(&vm.name)?;
    vnumactl(&["attach", &vm.name])?;
    let mut places: Vec<u32> = (0..VCPUS).map(|vcpu| hosts[vcpu * hosts.len() / VCPUS]).collect();
    expect(vm, &places).inspect_err(|_| show_guest(vm)).context("after attach")?;
    let _load =
        vm.spawn(&["stress-ng", "--quiet", "--cpu", &VCPUS.to_string(), "--vm", "1", "--vm-bytes", "32M"])?;

    let mut random = Rng::new(arguments.seed);
    for round in 0..arguments.rounds {
        let moves = plan(round, &hosts, &mut random);
        for &(vcpu, node, by_vnumactl) in &moves {
            if by_vnumactl {
                vnumactl(&["move", &vm.name, "--vcpu", &vcpu.to_string(), "--node", &node.to_string()])?;
            } else {
                taskset(vm, vcpu, node, nodes)?;
            }
            places[vcpu] = node;
        }
        expect(vm, &places)
            .inspect_err(|_| show_guest(vm))
            .with_context(|| format!("round {round}, after the moves {moves:?}"))?;
        println!("Linux {kernel}, round {round}: {places:?} ok");
    }
    check_kernel_log(vm)?;
    println!("Linux {kernel}: {} rounds of moves, no wrong state", arguments.rounds);
    Ok(())
}

/// Guest node N is at home on the Nth host node, so the guest must use what is true.
fn expect(vm: &Vm, places: &[u32]) -> Result<()> {
    let seen: Vec<_> = places.iter().map(|&node| (u64::from(node), u64::from(node), "true")).collect();
    wait_until_seen(&vm.name, &seen)?;
    check(vm, &places.iter().map(|&node| u64::from(node)).collect::<Vec<_>>())
}

/// Moves of one round: (vCPU, host node, by vnumactl or without vnumad's knowledge).
fn plan(round: usize, hosts: &[u32], random: &mut Rng) -> Vec<(usize, u32, bool)> {
    let node = hosts[random.index(hosts.len())];
    let by_vnumactl = random.index(2) == 0;
    match round % 4 {
        // Everything on one node: the others are emptied, CPU 0's among them.
        0 => (0..VCPUS).map(|vcpu| (vcpu, node, by_vnumactl)).collect(),
        // Filled again, all at once.
        1 => (0..VCPUS)
            .map(|vcpu| (vcpu, hosts[(vcpu + random.index(2)) % hosts.len()], by_vnumactl))
            .collect(),
        2 => vec![(0, node, by_vnumactl)],
        _ => vec![(random.index(VCPUS), node, by_vnumactl)],
    }
}
