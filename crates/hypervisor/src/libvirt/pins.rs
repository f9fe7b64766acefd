//! Pins of vCPUs, which libvirt keeps for vnumad, and the note by which vnumad knows its own.

use super::{
    connection::{LibvirtConnection, XML},
    describe,
};
use crate::VmError;
use std::{collections::BTreeMap, fs};
use vnuma_libvirt::{DomainXml, OwnPin, PINS_NAMESPACE, PREFIX, TakingBack, pins_element};
use vnuma_process::procfs;
use vnuma_topology::CpuSet;

/// CPUs of the host.
const ONLINE: &str = "/sys/devices/system/cpu/online";

impl LibvirtConnection {
    /// The process of the domain, unlike any other on whatever host.
    fn run(&self) -> String {
        let stat = procfs::read_process(self.process.pid(), "stat", procfs::STAT_LIMIT).unwrap_or_default();
        format!("{}.{}", self.process.pid(), procfs::start_time(&stat).unwrap_or(0))
    }

    /// Notes vnumad's own pins with the domain.
    fn note_pins(&self, pins: &BTreeMap<u32, OwnPin>) -> Result<(), VmError> {
        let element = (!pins.is_empty()).then(|| pins_element(pins));
        let noted = self.domain.set_metadata(element.as_deref(), PREFIX, PINS_NAMESPACE, XML);
        noted.map_err(|cause| self.failed(cause))
    }

    /// Pins a vCPU, by its thread, to those of these CPUs that its operator allows.
    pub(super) fn pin(&self, tid: i32, cpus: &CpuSet) -> Result<(), VmError> {
        let xml = self.xml()?;
        let threads =
            describe::threads(&self.name, &self.domain_name, &xml, &self.process, &self.places.states)?;
        let Some(vcpu) = threads.iter().find(|(_, thread)| **thread == tid).map(|(vcpu, _)| *vcpu) else {
            return self.impossible(format!("thread {tid} runs no vCPU of the domain any more"));
        };
        let limit = xml.limit(vcpu);
        let set = within(cpus, limit);
        if set.is_empty() {
            let limit = limit.cloned().unwrap_or_default();
            let reason = format!(
                "an operator's vcpupin lets its vCPU {vcpu} run on CPUs {limit} only, none of {cpus}"
            );
            return self.impossible(reason);
        }
        let map = map_of(&set);
        // Noted before, so that there is no moment at which the pin could be taken for the operator's.
        let run = self.run();
        let mut pins = xml.pins_before(vcpu, set.clone(), &run);
        self.note_pins(&pins)?;
        self.domain.pin_vcpu(vcpu, map, XML).map_err(|cause| self.failed(cause))?;
        let operator = xml.limit(vcpu).cloned();
        let settled = OwnPin { set, before: Vec::new(), operator, run: Some(run) };
        // It is pinned as it was to be, and the next description tries this again.
        if pins.insert(vcpu, settled.clone()) != Some(settled)
            && let Err(error) = self.note_pins(&pins)
        {
            tracing::warn!(vm = self.name, %error, "a pin that was replaced stays noted");
        }
        Ok(())
    }

    /// Lets vCPUs run where their operator lets them.
    fn take_back_pins(
        &self,
        xml: &DomainXml,
        TakingBack { meanwhile, sets, afterwards }: TakingBack,
    ) -> Result<(), VmError> {
        if meanwhile != xml.own_pins {
            self.note_pins(&meanwhile)?;
        }
        for (vcpu, set) in sets {
            let pinned = self.domain.pin_vcpu(vcpu, map_of(&set), XML);
            pinned.map_err(|cause| self.failed(cause))?;
        }
        // Last, so that what was cut short is repeated.
        self.note_pins(&afterwards)
    }

    fn all_cpus(&self) -> Result<CpuSet, VmError> {
        let text = fs::read_to_string(ONLINE).map_err(|error| error.to_string());
        let set = text.and_then(|text| text.trim().parse().map_err(|error| format!("{error}")));
        set.map_err(|reason| VmError::Libvirt {
            vm: self.name.clone(),
            reason: format!("{ONLINE}: {reason}"),
        })
    }

    /// Takes back pins that came from another host; if there are none, notes the ones that are settled.
    pub(super) fn tidy_pins(&self, xml: &DomainXml) -> Result<(), VmError> {
        let run = self.run();
        let stale = xml.stale_pins(&run).len();
        if stale > 0 {
            tracing::info!(vm = self.name, pins = stale, "pins of the host before are taken back");
            return self.take_back_pins(xml, xml.taking_back(&run, &self.all_cpus()?));
        }
        xml.settled_pins().map_or(Ok(()), |pins| self.note_pins(&pins))
    }
}

/// Those CPUs that a limit has.
fn within(cpus: &CpuSet, limit: Option<&CpuSet>) -> CpuSet {
    let Some(limit) = limit else { return cpus.clone() };
    let mut set = CpuSet::new();
    cpus.iter().filter(|cpu| limit.contains(*cpu)).for_each(|cpu| set.insert(cpu));
    set
}

/// A set as libvirt takes it.
fn map_of(cpus: &CpuSet) -> Vec<u8> {
    let mut map = vec![0; cpus.iter().last().map_or(0, |last| last as usize / 8 + 1)];
    cpus.iter().for_each(|cpu| map[cpu as usize / 8] |= 1 << (cpu % 8));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_stay_within_limits_and_become_maps() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(within(&set("0-3"), None), set("0-3"));
        assert_eq!(within(&set("0-3"), Some(&set("2,5"))), set("2"));
        assert!(within(&set("0-3"), Some(&set("4-5"))).is_empty());
        assert_eq!(map_of(&set("0,9-10")), [1, 6]);
        assert_eq!(map_of(&set("7")), [128]);
    }
}
