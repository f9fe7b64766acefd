//! VMs start and stop on a fleet. A VM goes to the first server on which the rule finds a place, in the order of the servers'
//! numbers; if there is none, it is refused and does not come back.

use crate::{
    server::{Amount, Model, Server, Strategy, UNITS_PER_CPU},
    workload::Vm,
};
use serde::{Deserialize, Serialize};

/// What a rule made of a workload. Shares are from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// VMs that started.
    pub started: u32,
    /// Refused, of all.
    pub refused_share: f64,
    /// Refused while some server had the CPUs, the memory and the functions, of all.
    pub refused_though_it_fits_share: f64,
    /// Of the VMs with devices that started: those with vCPUs and memory on the node of each device.
    pub devices_local_share: f64,
    /// Of the vCPUs of VMs with devices: those on a node of a device.
    pub vcpus_at_home_share: f64,
    /// Of the VMs without devices that started: those on more nodes than an empty server needs for them.
    pub split_share: f64,
    /// Of what is free, in CPUs with 4 GiB: what cannot be used because the node lacks the other. Mean over servers and starts.
    pub stranded_share: f64,
}

#[derive(Default)]
struct Counts {
    started: u32,
    fits: u32,
    with_devices: u32,
    local: u32,
    vcpus: u32,
    vcpus_at_home: u32,
    split: u32,
    stranded: f64,
    samples: u32,
}

/// Lets a rule place all VMs.
pub fn run(model: Model, servers: usize, vms: &[Vm], strategy: &mut dyn Strategy) -> Outcome {
    let mut fleet = vec![Server::new(model); servers];
    // Running VMs: when they stop, their number, where they are, what they have.
    let mut running: Vec<(f64, usize, usize, Vec<Amount>)> = Vec::new();
    let mut counts = Counts::default();
    for (id, vm) in vms.iter().enumerate() {
        running.sort_by(|one, other| other.0.total_cmp(&one.0));
        while running.last().is_some_and(|next| next.0 <= vm.start) {
            let Some((_, gone, server, allotment)) = running.pop() else { break };
            fleet[server].change(&vms[gone], &allotment, false);
            strategy.stopped(server, gone);
        }
        let place = |(number, server): (usize, &Server)| {
            if !server.suffices(vm) {
                return None;
            }
            Some((number, strategy.place(number, server, id, vm)?))
        };
        match fleet.iter().enumerate().find_map(place) {
            Some((number, allotment)) => {
                count(&mut counts, model, vm, &allotment);
                fleet[number].change(vm, &allotment, true);
                running.push((vm.stop, id, number, allotment));
            }
            None => counts.fits += u32::from(fleet.iter().any(|server| server.suffices(vm))),
        }
        for share in fleet.iter().filter_map(stranded) {
            counts.stranded += share;
            counts.samples += 1;
        }
    }
    outcome(&counts, vms)
}

fn count(counts: &mut Counts, model: Model, vm: &Vm, allotment: &[Amount]) {
    let cpus: u32 = allotment.iter().map(|amount| amount.cpus).sum();
    let units: u64 = allotment.iter().map(|amount| amount.units).sum();
    assert_eq!((cpus, units), (vm.vcpus, vm.units), "a VM gets what it asked for");
    counts.started += 1;
    let mut homes: Vec<usize> = vm.cards.iter().map(|&card| model.node_of_card(card)).collect();
    homes.dedup();
    if homes.is_empty() {
        let nodes = allotment.iter().filter(|amount| amount.cpus > 0 || amount.units > 0).count();
        counts.split += u32::from(nodes > model.fewest_nodes(vm));
        return;
    }
    counts.with_devices += 1;
    let near = |&home: &usize| allotment[home].cpus > 0 && allotment[home].units > 0;
    counts.local += u32::from(homes.iter().all(near));
    counts.vcpus += vm.vcpus;
    counts.vcpus_at_home += homes.iter().map(|&home| allotment[home].cpus).sum::<u32>();
}

/// Nothing if nothing is free.
fn stranded(server: &Server) -> Option<f64> {
    let by_memory = |units: u64| units as f64 / UNITS_PER_CPU as f64;
    let cpus: u32 = server.free.iter().map(|node| node.cpus).sum();
    let units: u64 = server.free.iter().map(|node| node.units).sum();
    let all = f64::from(cpus).min(by_memory(units));
    let usable: f64 = server.free.iter().map(|node| f64::from(node.cpus).min(by_memory(node.units))).sum();
    (all >= 1.0).then(|| 1.0 - usable / all)
}

fn outcome(counts: &Counts, vms: &[Vm]) -> Outcome {
    let share = |part: u32, of: u32| f64::from(part) / f64::from(of.max(1));
    let all = vms.len() as u32;
    Outcome {
        started: counts.started,
        refused_share: share(all - counts.started, all),
        refused_though_it_fits_share: share(counts.fits, all),
        devices_local_share: share(counts.local, counts.with_devices),
        vcpus_at_home_share: share(counts.vcpus_at_home, counts.vcpus),
        split_share: share(counts.split, counts.started - counts.with_devices),
        stranded_share: counts.stranded / f64::from(counts.samples.max(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kubernetes::BestEffort, nova::Nova, random::Random, vnuma::Vnuma, workload::generate};

    #[test]
    fn every_rule_places_what_it_is_asked_for_and_equal_seeds_give_equal_outcomes() {
        for model in Model::ALL {
            let vms = generate(3, 400, 1.0, model, 2);
            let outcome = |mut strategy: Box<dyn Strategy>| run(model, 2, &vms, strategy.as_mut());
            let rules: [fn() -> Box<dyn Strategy>; 6] = [
                || Box::new(Vnuma::required()),
                || Box::new(Vnuma::preferred()),
                || Box::new(Nova { pack: true }),
                || Box::new(Nova { pack: false }),
                || Box::new(BestEffort),
                || Box::new(Random::new(1)),
            ];
            for rule in rules {
                let first = outcome(rule());
                assert!(first.started > 200, "{first:?}");
                assert_eq!(first, outcome(rule()));
            }
            assert_eq!(outcome(Box::new(Vnuma::required())).devices_local_share, 1.0);
            let nova = outcome(Box::new(Nova { pack: true }));
            assert_eq!((nova.devices_local_share, nova.split_share), (1.0, 0.0));
        }
    }

    #[test]
    fn what_one_node_lacks_the_other_cannot_use() {
        let mut server = Server::new(Model::Two);
        assert_eq!(stranded(&server), Some(0.0));
        server.free[0].cpus = 0;
        assert_eq!(stranded(&server), Some(0.0), "CPUs are what is lacking");
        server.free[1].units = 0;
        assert_eq!(stranded(&server), Some(1.0));
        server.free[1].cpus = 0;
        assert_eq!(stranded(&server), None);
    }
}
