//! Pins of vCPUs, which libvirt keeps for vnumad, and the note by which vnumad knows its own.

use super::{
    connection::{LibvirtConnection, XML},
    describe,
};
use crate::{PinError, Pins, PolicyPin, VmError};
use std::{collections::BTreeMap, fs};
use vnuma_libvirt::{DomainXml, OwnPin, PINS_NAMESPACE, PREFIX, TakingBack, Wanted, pins_element};
use vnuma_model::CpuSet;
use vnuma_process::{procfs, read_allowed};

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

    /// vCPUs by their threads.
    fn vcpus(&self, xml: &DomainXml) -> Result<BTreeMap<i32, u32>, VmError> {
        let threads =
            describe::threads(&self.name, &self.domain_name, xml, &self.process, &self.places.states)?;
        Ok(threads.into_iter().map(|(vcpu, tid)| (tid, vcpu)).collect())
    }

    fn vcpu_of(&self, vcpus: &BTreeMap<i32, u32>, tid: i32) -> Result<u32, VmError> {
        let found = vcpus.get(&tid).copied();
        found.map_or_else(|| self.impossible(format!("thread {tid} runs no vCPU of the domain any more")), Ok)
    }

    /// An operator's pin of a vCPU forbids CPUs.
    fn forbidden<T>(&self, xml: &DomainXml, vcpu: u32, which: &str, cpus: &CpuSet) -> Result<T, VmError> {
        let limit = xml.limit(vcpu).cloned().unwrap_or_default();
        self.impossible(format!(
            "an operator's vcpupin lets its vCPU {vcpu} run on CPUs {limit} only, {which} of {cpus}"
        ))
    }

    fn wanted(&self, xml: &DomainXml, vcpu: u32, pin: &PolicyPin) -> Result<Wanted, VmError> {
        let Some(cpus) = &pin.cpus else { return Ok(xml.given_back(vcpu, &pin.operator)) };
        let confined = xml.confined(vcpu, cpus, &pin.operator);
        confined.map_or_else(|| self.forbidden(xml, vcpu, "not on all", cpus), Ok)
    }

    fn try_confine(&self, pins: &[PolicyPin]) -> Result<Vec<Result<(), PinError>>, VmError> {
        let (xml, online) = (self.xml()?, self.all_cpus()?);
        let vcpus = self.vcpus(&xml)?;
        let (mut wanted, mut asked, mut refused) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for pin in pins {
            let vcpu = self.vcpu_of(&vcpus, pin.tid);
            let want = vcpu.and_then(|vcpu| Ok((vcpu, self.wanted(&xml, vcpu, pin)?)));
            match want {
                Ok((vcpu, want)) => {
                    wanted.insert(vcpu, want);
                    asked.insert(vcpu, pin);
                }
                Err(error) => drop(refused.insert(pin.tid, error)),
            }
        }
        // Whoever sets an affinity, or a pin by libvirt, which sets the affinity: it is seen here.
        let changed = |vcpu: u32| {
            let pin = asked.get(&vcpu)?;
            let found = read_allowed(self.process.pid(), pin.tid).ok()?;
            let own = xml.own_pins.get(&vcpu).filter(|own| own.after.is_some());
            let ours = own.into_iter().flat_map(OwnPin::sets).any(|set| is_still(set, &found, &online));
            (!ours && !is_still(&pin.expected, &found, &online)).then_some(found)
        };
        let mut outcomes = self.make(&xml, &wanted, changed)?;
        let outcome = |pin: &PolicyPin| match refused.remove(&pin.tid) {
            Some(error) => Err(error.into()),
            None => vcpus.get(&pin.tid).and_then(|vcpu| outcomes.remove(vcpu)).unwrap_or(Ok(())),
        };
        Ok(pins.iter().map(outcome).collect())
    }

    /// Pins vCPUs. `changed`: what somebody else has set in the meantime, which stays. An outcome for each; an error before any of them.
    fn make(
        &self,
        xml: &DomainXml,
        wanted: &BTreeMap<u32, Wanted>,
        changed: impl Fn(u32) -> Option<CpuSet>,
    ) -> Result<BTreeMap<u32, Result<(), PinError>>, VmError> {
        let run = self.run();
        // Noted before, so that there is no moment at which a pin could be taken for the operator's.
        let noted = xml.pins_before(wanted, &run);
        if noted != xml.own_pins {
            self.note_pins(&noted)?;
        }
        let (mut outcomes, mut made, mut untouched) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let mut silent: Option<String> = None;
        for (&vcpu, want) in wanted {
            let outcome = match (&silent, changed(vcpu)) {
                (Some(reason), _) => self.impossible(reason.clone()).map_err(PinError::from),
                (None, Some(found)) => {
                    untouched.push(vcpu);
                    Err(PinError::Changed(found))
                }
                (None, None) => {
                    let pinned = self.domain.pin_vcpu(vcpu, map_of(&want.set), XML);
                    pinned.map_err(|cause| self.failed(cause).into())
                }
            };
            match &outcome {
                Ok(()) => drop(made.insert(vcpu, want.clone())),
                // One that has not been answered may be made later, and the next ones would have to wait as long.
                Err(PinError::Vm(VmError::NoAnswer { reason, .. })) => silent = Some(reason.clone()),
                Err(_) => {}
            }
            outcomes.insert(vcpu, outcome);
        }
        let after = xml.pins_after(noted.clone(), &made, &untouched, &run);
        // They are pinned as they were to be, and the next description tries this again.
        if silent.is_none()
            && after != noted
            && let Err(error) = self.note_pins(&after)
        {
            tracing::warn!(vm = self.name, %error, "a pin that was replaced stays noted");
        }
        Ok(outcomes)
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
        set.or_else(|reason| self.impossible(format!("{ONLINE}: {reason}")))
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

impl Pins for LibvirtConnection {
    fn pin(&mut self, tid: i32, cpus: &CpuSet) -> Result<(), VmError> {
        let xml = self.xml()?;
        let vcpu = self.vcpu_of(&self.vcpus(&xml)?, tid)?;
        let set = xml.allowed(vcpu, cpus);
        if set.is_empty() {
            return self.forbidden(&xml, vcpu, "none", cpus);
        }
        let wanted = BTreeMap::from([(vcpu, Wanted { set, after: None })]);
        match self.make(&xml, &wanted, |_| None)?.remove(&vcpu) {
            Some(Err(PinError::Vm(error))) => Err(error),
            _ => Ok(()),
        }
    }

    fn confine(&mut self, pins: &[PolicyPin]) -> Vec<Result<(), PinError>> {
        self.try_confine(pins).unwrap_or_else(|error| {
            let again = || self.impossible(error.to_string()).map_err(PinError::from);
            let others: Vec<_> = pins.iter().skip(1).map(|_| again()).collect();
            [Err(error.into())].into_iter().chain(others).collect()
        })
    }

    fn give_back(&mut self, keep: &BTreeMap<i32, Vec<CpuSet>>) -> Result<usize, VmError> {
        let xml = self.xml()?;
        let run = self.run();
        if xml.policy_pins(&run).is_empty() {
            return Ok(0);
        }
        let (vcpus, online) = (self.vcpus(&xml)?, self.all_cpus()?);
        let tids: BTreeMap<u32, i32> = vcpus.into_iter().map(|(tid, vcpu)| (vcpu, tid)).collect();
        let mut wanted = BTreeMap::new();
        for (vcpu, own, after) in xml.policy_pins(&run) {
            let (Some(tid), pin) = (tids.get(&vcpu), xml.pin(vcpu)) else { continue };
            if keep.get(tid).is_some_and(|kept| kept.iter().any(|set| Some(set) == pin)) {
                continue;
            }
            let Ok(found) = read_allowed(self.process.pid(), *tid) else { continue };
            let ours = own.sets().any(|set| is_still(set, &found, &online));
            // libvirtd may have been killed before it wrote a pin down.
            let lost = || ours && !pin.is_some_and(|pin| is_still(pin, &found, &online));
            if own.is(pin) || lost() {
                // An affinity that somebody else has set is kept, and set in libvirt, too.
                wanted.insert(vcpu, xml.given_back(vcpu, if ours { after } else { &found }));
            }
        }
        let outcomes = self.make(&xml, &wanted, |_| None)?;
        let (given_back, failed): (Vec<_>, Vec<_>) = outcomes.into_values().partition(Result::is_ok);
        match failed.into_iter().find_map(Result::err) {
            Some(PinError::Vm(error)) => Err(error),
            _ => Ok(given_back.len()),
        }
    }
}

/// Is the affinity that was found the one that was set, as far as the CPUs are online? If none of them is left, the kernel lets the
/// thread run anywhere, and nobody has asked for that.
fn is_still(set: &CpuSet, found: &CpuSet, online: &CpuSet) -> bool {
    !set.intersects(online) || set.agrees(found, online)
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
    fn pins_become_maps() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(map_of(&set("0,9-10")), [1, 6]);
        assert_eq!(map_of(&set("7")), [128]);
    }
}
