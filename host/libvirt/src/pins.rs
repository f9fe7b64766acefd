//! vnumad's own pins, which it notes in a domain's metadata, so that it does not take them for the operator's.
//!
//! libvirt keeps a pin and the note separately, and libvirtd or vnumad may end between two calls. So what is noted holds at each step:
//!
//! ```text
//!  note: set NEW, before OLD ──▶ pin NEW ──▶ note: set NEW
//! ```
//!
//! A pin stays as an operator's move has made it. One of a policy is taken back when the policy ends, or by the next vnumad: what is
//! noted says what the vCPU gets then (`after`).

use crate::{
    DomainXml,
    own_pins::{MAX_BEFORE, OwnPin, PINS_NAMESPACE},
    xml::{Reader, XmlError, child, children, of_metadata},
};
use std::{collections::BTreeMap, ops::Range};
use vnuma_model::CpuSet;

/// What a vCPU is to be pinned to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The CPUs.
    pub set: CpuSet,
    /// For a policy: what it is pinned to afterwards.
    pub after: Option<CpuSet>,
}

/// How pins are taken back. libvirt has no call that removes one: where the operator lets a vCPU run anywhere, a pin to all CPUs of the
/// host is left, which is vnumad's as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakingBack {
    /// What is to be noted before.
    pub meanwhile: BTreeMap<u32, OwnPin>,
    /// What vCPUs are to be pinned to.
    pub sets: BTreeMap<u32, CpuSet>,
    /// What is to be noted afterwards.
    pub afterwards: BTreeMap<u32, OwnPin>,
}

/// The XML of a domain as another host is to have it: without pins of vnumad, which name CPUs of this one. `None`: as it is.
/// `name` is for messages.
pub fn xml_for_elsewhere(name: &str, text: &str) -> Result<Option<String>, XmlError> {
    let domain = DomainXml::parse(name, text)?;
    let own: BTreeMap<u32, &OwnPin> = domain.set_pins().into_iter().collect();
    let reader = Reader::new(name);
    let document = reader.document(text)?;
    let root = document.root_element();
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    for node in child(root, "cputune").into_iter().flat_map(|tune| children(tune, "vcpupin")) {
        let vcpu: u32 = reader.some_number(node, "vcpu")?;
        let Some(own) = own.get(&vcpu) else { continue };
        // The operator's, where it is one of this vCPU.
        let operators = own.operator.as_ref().filter(|operator| domain.cpuset.as_ref() != Some(operator));
        let pin = operators.map(|cpus| format!("<vcpupin vcpu='{vcpu}' cpuset='{cpus}'/>"));
        edits.push((node.range(), pin.unwrap_or_default()));
    }
    edits.extend(of_metadata(root, PINS_NAMESPACE, "pins").map(|note| (note.range(), String::new())));
    if edits.is_empty() {
        return Ok(None);
    }
    // From behind, so that the places of others stay.
    edits.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    let mut edited = text.to_owned();
    edits.iter().for_each(|(range, with)| edited.replace_range(range.clone(), with));
    Ok(Some(edited))
}

impl DomainXml {
    /// CPUs that an operator lets a vCPU run on. `None`: any. A pin of vnumad that is still set is not the operator's.
    pub fn limit(&self, vcpu: u32) -> Option<&CpuSet> {
        let pin = self.pin(vcpu);
        match self.own_pins.get(&vcpu) {
            Some(own) if own.is(pin) => own.operator.as_ref(),
            _ => pin,
        }
    }

    /// Those of these CPUs that its operator lets a vCPU run on.
    pub fn allowed(&self, vcpu: u32, cpus: &CpuSet) -> CpuSet {
        let Some(limit) = self.limit(vcpu) else { return cpus.clone() };
        let mut set = CpuSet::new();
        cpus.iter().filter(|cpu| limit.contains(*cpu)).for_each(|cpu| set.insert(cpu));
        set
    }

    /// The pin by which a policy confines a vCPU that had the CPUs `operator` before. `None`: its operator forbids some of the CPUs.
    pub fn confined(&self, vcpu: u32, cpus: &CpuSet, operator: &CpuSet) -> Option<Wanted> {
        let Wanted { set: after, .. } = self.given_back(vcpu, operator);
        (self.allowed(vcpu, cpus) == *cpus).then(|| Wanted { set: cpus.clone(), after: Some(after) })
    }

    /// The pin by which a vCPU gets CPUs back that it had before a policy. What its operator has forbidden since stays forbidden.
    pub fn given_back(&self, vcpu: u32, to: &CpuSet) -> Wanted {
        let allowed = Some(self.allowed(vcpu, to)).filter(|allowed| !allowed.is_empty());
        let set = allowed.or_else(|| self.limit(vcpu).cloned()).unwrap_or_default();
        Wanted { set, after: None }
    }

    /// Pins of vnumad that are still set, and were for another run than this: the domain has come with them from another host.
    pub fn stale_pins(&self, run: &str) -> Vec<(u32, &OwnPin)> {
        self.set_pins().into_iter().filter(|(_, own)| !own.is_of(run)).collect()
    }

    /// What is noted of policies in this run: each pin, and what it is replaced by when no policy confines the vCPU.
    pub fn policy_pins(&self, run: &str) -> Vec<(u32, &OwnPin, &CpuSet)> {
        let noted = self.own_pins.iter().filter(|(_, own)| own.is_of(run));
        noted.filter_map(|(vcpu, own)| Some((*vcpu, own, own.after.as_ref()?))).collect()
    }

    /// Pins of vnumad that are still set.
    pub fn set_pins(&self) -> Vec<(u32, &OwnPin)> {
        let set = |vcpu: &u32, own: &OwnPin| own.is(self.pin(*vcpu));
        self.own_pins.iter().filter(|(vcpu, own)| set(vcpu, own)).map(|(vcpu, own)| (*vcpu, own)).collect()
    }

    /// What is to be noted before vCPUs are pinned: both pins of each are vnumad's, whatever comes of it. A pin of another run is one
    /// until it is replaced, and one of a policy is a policy's until then.
    pub fn pins_before(&self, wanted: &BTreeMap<u32, Wanted>, run: &str) -> BTreeMap<u32, OwnPin> {
        let mut pins = self.own_pins.clone();
        pins.extend(wanted.iter().map(|(vcpu, wanted)| (*vcpu, self.pin_before(*vcpu, wanted, run))));
        pins
    }

    fn pin_before(&self, vcpu: u32, Wanted { set, after }: &Wanted, run: &str) -> OwnPin {
        let (set, operator) = (set.clone(), self.limit(vcpu).cloned());
        let pin = self.pin(vcpu);
        let (mut before, mut run, mut after) = (Vec::new(), Some(run.to_owned()), after.clone());
        if let Some(own) = self.own_pins.get(&vcpu).filter(|own| own.is(pin)) {
            // The one that it has first, as no other is sure to be needed.
            for other in pin.into_iter().chain(own.sets()) {
                if *other != set && !before.contains(other) && before.len() < MAX_BEFORE {
                    before.push(other.clone());
                }
            }
            run = own.run.clone().or(run);
            after = after.or_else(|| own.after.clone());
        }
        OwnPin { set, before, operator, run, after }
    }

    /// What is to be noted once these pins were made and those of `untouched` were not tried, after what was noted before.
    pub fn pins_after(
        &self,
        mut noted: BTreeMap<u32, OwnPin>,
        made: &BTreeMap<u32, Wanted>,
        untouched: &[u32],
        run: &str,
    ) -> BTreeMap<u32, OwnPin> {
        for (&vcpu, Wanted { set, after }) in made {
            let operator = self.limit(vcpu).cloned();
            // What its operator has set is no pin of vnumad's.
            if after.is_none() && operator.as_ref() == Some(set) {
                noted.remove(&vcpu);
                continue;
            }
            let (set, after, run) = (set.clone(), after.clone(), Some(run.to_owned()));
            noted.insert(vcpu, OwnPin { set, before: Vec::new(), operator, run, after });
        }
        for vcpu in untouched {
            match self.own_pins.get(vcpu) {
                Some(own) => drop(noted.insert(*vcpu, own.clone())),
                None => drop(noted.remove(vcpu)),
            }
        }
        noted
    }

    /// How pins of other runs are taken back on a host with these CPUs.
    pub fn taking_back(&self, run: &str, all: &CpuSet) -> TakingBack {
        let (mut meanwhile, mut afterwards) = (self.own_pins.clone(), self.own_pins.clone());
        let mut sets = BTreeMap::new();
        for (vcpu, own) in self.stale_pins(run) {
            if let Some(operators) = own.operator.as_ref().or(self.cpuset.as_ref()) {
                afterwards.remove(&vcpu);
                sets.insert(vcpu, operators.clone());
                continue;
            }
            let anywhere = Wanted { set: all.clone(), after: None };
            meanwhile.insert(vcpu, self.pin_before(vcpu, &anywhere, run));
            let (before, operator, run) = (Vec::new(), None, Some(run.to_owned()));
            afterwards.insert(vcpu, OwnPin { set: all.clone(), before, operator, run, after: None });
            sets.insert(vcpu, all.clone());
        }
        TakingBack { meanwhile, sets, afterwards }
    }

    /// What is to be noted where a pin has come to be what it was to be, if something is.
    pub fn settled_pins(&self) -> Option<BTreeMap<u32, OwnPin>> {
        // One that is as before may be about to change: a call goes on after its caller has stopped waiting.
        let settled = |vcpu: u32, own: &OwnPin| !own.before.is_empty() && self.pin(vcpu) == Some(&own.set);
        if !self.own_pins.iter().any(|(vcpu, own)| settled(*vcpu, own)) {
            return None;
        }
        let mut pins = self.own_pins.clone();
        pins.iter_mut().filter(|(vcpu, own)| settled(**vcpu, own)).for_each(|(_, own)| own.before.clear());
        Some(pins)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{own_pins::pins_element, xml::parse_set};
    use proptest::prelude::*;

    fn set(text: &str) -> CpuSet {
        parse_set(text).unwrap()
    }

    fn parsed(inner: &str) -> DomainXml {
        let text = format!("<domain><name>web</name><uuid>u</uuid><vcpu>8</vcpu>{inner}</domain>");
        DomainXml::parse("web", &text).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The note as libvirt writes it: with the prefix that it was given.
    fn metadata(pins: &BTreeMap<u32, OwnPin>) -> String {
        let element = pins_element(pins).replace("<", "<vnuma:").replace("<vnuma:/", "</vnuma:");
        let element = element.replacen("pins>", &format!("pins xmlns:vnuma='{PINS_NAMESPACE}'>"), 1);
        format!("<metadata><app:pins xmlns:app='x'><app:vcpu id='3' set='1'/></app:pins>{element}</metadata>")
    }

    /// A vCPU is to be pinned so by a move.
    fn moved(vcpu: u32, cpus: &str) -> BTreeMap<u32, Wanted> {
        BTreeMap::from([(vcpu, Wanted { set: set(cpus), after: None })])
    }

    /// The domain with this note, and vCPU 0 pinned so.
    fn pinned(pins: &BTreeMap<u32, OwnPin>, pin: &str) -> DomainXml {
        let metadata = metadata(pins);
        parsed(&format!("{metadata}<cputune><vcpupin vcpu='0' cpuset='{pin}'/></cputune>"))
    }

    #[test]
    fn a_pin_of_vnumad_is_no_limit_until_somebody_changes_it() {
        let own = |operator: Option<&str>| OwnPin {
            set: set("2-3"),
            before: Vec::new(),
            operator: operator.map(set),
            run: Some("7.9".to_owned()),
            after: None,
        };
        let pins = BTreeMap::from([(0, own(Some("0-3"))), (1, own(None)), (2, own(Some("0-3")))]);
        let metadata = metadata(&pins);
        let found = parsed(&format!(
            "{metadata}<cputune><vcpupin vcpu='0' cpuset='2-3'/><vcpupin vcpu='1' cpuset='2-3'/>\
             <vcpupin vcpu='2' cpuset='1'/></cputune>"
        ));
        assert_eq!(found.own_pins, pins);
        assert_eq!(found.limit(0), Some(&set("0-3")), "what the operator allowed before");
        assert_eq!(found.limit(1), None);
        assert_eq!(found.limit(2), Some(&set("1")), "the operator has pinned it since");
        assert_eq!(found.limit(3), None);
        assert_eq!(found.stale_pins("7.9"), [], "they are of this run");
        let stale: Vec<u32> = found.stale_pins("8.9").into_iter().map(|(vcpu, _)| vcpu).collect();
        assert_eq!(stale, [0, 1], "the operator's pin of vCPU 2 is the operator's on each host");
        assert!(!found.marked);
    }

    #[test]
    fn pins_without_a_run_are_taken_as_of_this_one() {
        let found = parsed(&format!(
            "<metadata><v:pins xmlns:v='{PINS_NAMESPACE}'><v:vcpu id='0' set='1'/></v:pins></metadata>\
             <cputune><vcpupin vcpu='0' cpuset='1'/></cputune>"
        ));
        assert_eq!(found.set_pins().len(), 1);
        assert_eq!(found.stale_pins("8.9"), []);
    }

    /// As vnumad noted it first.
    #[test]
    fn a_run_may_be_that_of_all_pins() {
        let found = parsed(&format!(
            "<metadata><v:pins xmlns:v='{PINS_NAMESPACE}' run='7.9'><v:vcpu id='0' set='1'/><v:vcpu id='1' set='1' run='8.9'/>\
             <v:vcpu id='2' set='1' run=\"'/&lt;x\"/></v:pins></metadata>"
        ));
        let runs: Vec<_> = found.own_pins.values().map(|own| own.run.as_deref()).collect();
        assert_eq!(runs, [Some("7.9"), Some("8.9"), Some("7.9")], "what vnumad does not write is no run");
    }

    /// It moves vCPU 0 before pins of the host before could be taken back.
    #[test]
    fn a_pin_of_another_run_stays_one_until_it_is_replaced() {
        let elsewhere = pinned(&BTreeMap::new(), "0-7").pins_before(&moved(0, "0-3"), "7.9");
        let noted = pinned(&elsewhere, "0-3").pins_before(&moved(0, "4-7"), "8.9");
        assert_eq!(pinned(&noted, "0-3").stale_pins("8.9").len(), 1, "it was not pinned after all");
        let other = pinned(&noted, "0-3").pins_before(&moved(1, "2"), "8.9");
        assert_eq!(other[&1].run.as_deref(), Some("8.9"));
        assert_eq!(pinned(&other, "0-3").stale_pins("8.9").len(), 1, "nor was the one of another vCPU");
    }

    #[test]
    fn another_host_gets_the_operators_pins_only() {
        let own = |set_: &str, operator: Option<&str>| OwnPin {
            set: set(set_),
            before: vec![set("5")],
            operator: operator.map(set),
            run: Some("7.9".to_owned()),
            after: None,
        };
        let pins = BTreeMap::from([
            (0, own("2-3", None)),
            (1, own("2-3", Some("0-3"))),
            (2, own("2-3", Some("0-7"))),
            (3, own("2-3", Some("0-3"))),
            (4, own("2-3", None)),
        ]);
        let metadata = metadata(&pins);
        let mark = format!("<v:attach xmlns:v='{}'/>", crate::MARK_NAMESPACE);
        let text = format!(
            "<domain><name>ä &amp; ö</name><uuid>u</uuid><vcpu cpuset='0-7'>8</vcpu><metadata>{mark}</metadata>{metadata}\
             <cputune><shares>7</shares><vcpupin vcpu='0' cpuset='2-3'/><vcpupin vcpu=\"1\" cpuset=\"2-3\"></vcpupin>\
             <vcpupin vcpu='2' cpuset='2-3'/><vcpupin vcpu='3' cpuset='1'/><vcpupin vcpu='4' cpuset='5'/>\
             <vcpupin vcpu='5' cpuset='2-3'/><emulatorpin cpuset='2-3'/></cputune><title>ü</title></domain>"
        );
        let text = text.replace("</metadata><metadata>", "");
        let note = &metadata[metadata.find("<vnuma:pins").unwrap()..metadata.find("</metadata>").unwrap()];
        let expected = text
            .replace(note, "")
            .replace("<vcpupin vcpu='0' cpuset='2-3'/>", "")
            .replace("<vcpupin vcpu=\"1\" cpuset=\"2-3\"></vcpupin>", "<vcpupin vcpu='1' cpuset='0-3'/>")
            .replace("<vcpupin vcpu='2' cpuset='2-3'/>", "")
            .replace("<vcpupin vcpu='4' cpuset='5'/>", "");
        let edited = xml_for_elsewhere("web", &text).unwrap().unwrap();
        assert_eq!(edited, expected);
        let there = DomainXml::parse("web", &edited).unwrap();
        assert!(there.own_pins.is_empty() && there.marked, "the mark goes along");
        assert_eq!(xml_for_elsewhere("web", &edited), Ok(None), "there is nothing more to do");
        assert!(xml_for_elsewhere("web", "<domain>").is_err());
    }

    /// Whichever process is killed and whichever call fails: the notes then tell vnumad's pin from the operator's.
    #[test]
    fn at_each_step_of_a_pin_both_are_vnumads() {
        let operator = pinned(&BTreeMap::new(), "0-7");
        let (mut pin, mut note) = ("0-7", BTreeMap::new());
        for to in ["0-3", "4-7", "0-3", "2"] {
            let noted = pinned(&note, pin).pins_before(&moved(0, to), "7.9");
            for may_be in [pin, to] {
                let xml = pinned(&noted, may_be);
                assert_eq!(xml.own_pins, noted, "what is written is read");
                assert_eq!(xml.limit(0), operator.limit(0), "{pin} to {to}, and it has {may_be}");
                assert_eq!(xml.set_pins().len(), usize::from(may_be != "0-7"));
            }
            let settled = pinned(&noted, to).settled_pins();
            assert_eq!(settled.is_some(), pin != "0-7", "the operator's own pin is no pin before");
            note = settled.unwrap_or(noted);
            pin = to;
            assert_eq!(pinned(&note, pin).settled_pins(), None);
        }
        let (before, operator, run) = (Vec::new(), Some(set("0-7")), Some("7.9".to_owned()));
        assert_eq!(note[&0], OwnPin { set: set("2"), before, operator, run, after: None });
        assert_eq!(pinned(&note, "0-3").limit(0), Some(&set("0-3")), "vnumad's no longer");
    }

    /// At each step nothing becomes the operator's that is not, and what was cut short is repeated.
    #[test]
    fn pins_of_another_host_are_taken_back_step_by_step() {
        let own = |operator: Option<&str>, run: &str| OwnPin {
            set: set("2-3"),
            before: Vec::new(),
            operator: operator.map(set),
            run: Some(run.to_owned()),
            after: None,
        };
        let note =
            BTreeMap::from([(0, own(None, "7.9")), (1, own(Some("0-1"), "7.9")), (2, own(None, "8.9"))]);
        let with = |note: &BTreeMap<u32, OwnPin>, pins: [&str; 3]| {
            let pins = [0, 1, 2].map(|vcpu| format!("<vcpupin vcpu='{vcpu}' cpuset='{}'/>", pins[vcpu]));
            parsed(&format!("{}<cputune>{}</cputune>", metadata(note), pins.concat()))
        };
        let limits = |xml: &DomainXml| [0, 1, 2].map(|vcpu| xml.limit(vcpu).map(CpuSet::to_string));
        let arrived = with(&note, ["2-3"; 3]);
        let operators = [None, Some("0-1".to_owned()), None];
        assert_eq!(limits(&arrived), operators);
        let TakingBack { meanwhile, sets, afterwards } = arrived.taking_back("8.9", &set("0-7"));
        assert_eq!(sets, BTreeMap::from([(0, set("0-7")), (1, set("0-1"))]));
        for pins in [["2-3", "2-3", "2-3"], ["0-7", "2-3", "2-3"], ["0-7", "0-1", "2-3"]] {
            let cut_short = with(&meanwhile, pins);
            assert_eq!(limits(&cut_short), operators, "{pins:?}");
            let again = cut_short.taking_back("8.9", &set("0-7"));
            assert_eq!(again.afterwards.get(&0), afterwards.get(&0), "{pins:?}");
            assert!(again.sets.contains_key(&0), "{pins:?}");
        }
        let done = with(&afterwards, ["0-7", "0-1", "2-3"]);
        assert_eq!((limits(&done), done.stale_pins("8.9")), (operators, Vec::new()));
        assert_eq!(done.own_pins.keys().copied().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(done.stale_pins("9.9").len(), 2, "on the next host they are of another");
    }

    /// Calls that fail one after the other, of which each may still be carried out.
    #[test]
    fn a_pin_that_stays_is_vnumads_however_often_another_one_fails() {
        let mut note = pinned(&BTreeMap::new(), "0-7").pins_before(&moved(0, "0-3"), "7.9");
        for to in ["4", "5", "6", "7", "1", "2"] {
            note = pinned(&note, "0-3").pins_before(&moved(0, to), "7.9");
            let xml = pinned(&note, "0-3");
            assert_eq!((xml.limit(0), xml.settled_pins()), (Some(&set("0-7")), None), "pinned to {to}");
            assert_eq!(pinned(&note, to).limit(0), Some(&set("0-7")), "it was carried out late");
        }
        assert_eq!(note[&0].before.len(), MAX_BEFORE);
    }

    /// What one that was killed leaves to the next vnumad.
    #[test]
    fn what_a_policy_has_pinned_is_given_back_by_what_is_noted() {
        let wanted = |wanted: Wanted| BTreeMap::from([(0, wanted)]);
        let operators = pinned(&BTreeMap::new(), "0-7");
        // An operator has moved it, and a policy confines it there.
        let note = operators.pins_before(&moved(0, "4-7"), "7.9");
        let note = operators.pins_after(note, &moved(0, "4-7"), &[], "7.9");
        let xml = pinned(&note, "4-7");
        assert!(xml.policy_pins("7.9").is_empty(), "a move stays");
        let confined = wanted(xml.confined(0, &set("5"), &set("4-7")).unwrap());
        let noted = xml.pins_before(&confined, "7.9");
        for may_be in ["4-7", "5"] {
            let xml = pinned(&noted, may_be);
            assert_eq!(
                xml.policy_pins("7.9").iter().map(|(.., after)| *after).collect::<Vec<_>>(),
                [&set("4-7")]
            );
            assert_eq!(xml.policy_pins("8.9"), [], "they came from another host");
        }
        let note = xml.pins_after(noted, &confined, &[], "7.9");
        let xml = pinned(&note, "5");
        assert_eq!((xml.limit(0), xml.own_pins[&0].before.len()), (Some(&set("0-7")), 0));
        // It is given back, and the note is that of the move again.
        let back = wanted(xml.given_back(0, &set("4-7")));
        let noted = xml.pins_before(&back, "7.9");
        assert_eq!(pinned(&noted, "5").policy_pins("7.9").len(), 1, "it was not pinned after all");
        let note = xml.pins_after(noted, &back, &[], "7.9");
        let xml = pinned(&note, "4-7");
        assert_eq!((xml.policy_pins("7.9").len(), xml.limit(0)), (0, Some(&set("0-7"))));
        // What its operator has set is not noted.
        let back = wanted(xml.given_back(0, &set("0-7")));
        assert_eq!(xml.pins_after(xml.pins_before(&back, "7.9"), &back, &[], "7.9"), BTreeMap::new());
        // What was not tried is as before.
        assert_eq!(xml.pins_after(xml.pins_before(&confined, "7.9"), &BTreeMap::new(), &[0], "7.9"), note);
    }

    #[test]
    fn a_policy_stays_within_what_an_operator_allows_later() {
        let operators = pinned(&BTreeMap::new(), "0-7");
        let confined = BTreeMap::from([(0, operators.confined(0, &set("4-7"), &set("0-7")).unwrap())]);
        let note = operators.pins_after(operators.pins_before(&confined, "7.9"), &confined, &[], "7.9");
        // `virsh vcpupin` while the policy has it.
        let xml = pinned(&note, "2-5");
        assert_eq!(xml.confined(0, &set("4-7"), &set("0-7")), None);
        let next = xml.confined(0, &set("4-5"), &set("0-7")).unwrap();
        assert_eq!(next, Wanted { set: set("4-5"), after: Some(set("2-5")) });
        assert_eq!(xml.given_back(0, &set("0-7")).set, set("2-5"));
        assert_eq!(xml.given_back(0, &set("6-7")).set, set("2-5"), "nothing of it is left");
    }

    /// A domain of one vCPU, its operator, and a vnumad that may be killed at each step.
    #[derive(Debug)]
    struct Played {
        xml: DomainXml,
        /// What the operator allows.
        operator: Option<CpuSet>,
        /// What the vCPU may have when no policy confines it: the last move or what its operator allows, and moves that were cut short.
        may_have: Vec<CpuSet>,
        /// What this vnumad's policy found, if it confines the vCPU.
        found: Option<CpuSet>,
    }

    impl Played {
        fn new() -> Self {
            let xml = parsed("");
            Self { xml, operator: None, may_have: vec![set("0-7")], found: None }
        }

        /// Where libvirt has it, which is its affinity, too.
        fn pin(&self) -> CpuSet {
            self.xml.pin(0).cloned().unwrap_or_else(|| set("0-7"))
        }

        /// What is written is read.
        fn write(&mut self, pins: &BTreeMap<u32, OwnPin>, pin: Option<CpuSet>) {
            let pin = pin.or(self.xml.pin(0).cloned());
            let pin = pin.map(|pin| format!("<cputune><vcpupin vcpu='0' cpuset='{pin}'/></cputune>"));
            self.xml = parsed(&format!("{}{}", metadata(pins), pin.unwrap_or_default()));
        }

        /// Pins it, in as many of the steps as are made before vnumad is killed.
        fn make(&mut self, wanted: Wanted, steps: usize) -> bool {
            let (before, wanted) = (self.xml.clone(), BTreeMap::from([(0, wanted)]));
            let noted = before.pins_before(&wanted, "7.9");
            if steps > 0 {
                self.write(&noted, None);
            }
            if steps > 1 {
                self.write(&noted, Some(wanted[&0].set.clone()));
            }
            if steps > 2 {
                let after = before.pins_after(noted, &wanted, &[], "7.9");
                self.write(&after, None);
            }
            steps > 2
        }

        /// A vnumad begins, and may be killed as well.
        fn begin(&mut self, steps: usize) {
            self.found = None;
            if let Some(settled) = self.xml.settled_pins() {
                self.write(&settled, None);
            }
            let policys = self.xml.policy_pins("7.9").into_iter().find(|(_, own, _)| own.is(self.xml.pin(0)));
            if let Some(back) = policys.map(|(vcpu, _, after)| self.xml.given_back(vcpu, after)) {
                self.make(back, steps);
            }
        }
    }

    /// What happens next.
    #[derive(Clone, Debug)]
    enum Deed {
        Confine(u32),
        GiveBack,
        Move(u32),
        Vcpupin(u32, u32),
        Begin,
    }

    fn deeds() -> impl Strategy<Value = Vec<(Deed, usize)>> {
        let deed = prop_oneof![
            4 => (0..8_u32).prop_map(Deed::Confine),
            2 => Just(Deed::GiveBack),
            2 => (0..8_u32).prop_map(Deed::Move),
            1 => (0..4_u32, 3..5_u32).prop_map(|(first, count)| Deed::Vcpupin(first, count)),
            1 => Just(Deed::Begin),
        ];
        proptest::collection::vec((deed, prop_oneof![4 => Just(3_usize), 1 => 0..3_usize]), 1..30)
    }

    proptest! {
        /// Policies pin to one CPU, moves to two, and its operator to three or more, so that each pin shows whose it is.
        #[test]
        fn whenever_vnumad_is_killed_nothing_of_a_policy_stays_or_becomes_the_operators(deeds in deeds()) {
            let mut played = Played::new();
            for (deed, steps) in deeds {
                let base = played.found.clone().unwrap_or_else(|| played.pin());
                let alive = match deed {
                    Deed::Confine(nth) => {
                        let cpu = base.iter().nth(nth as usize % base.len()).unwrap();
                        let wanted = played.xml.confined(0, &[cpu].into_iter().collect(), &base);
                        prop_assert!(wanted.is_some(), "{cpu} of {base} is forbidden: {played:?}");
                        played.found = Some(base);
                        played.make(wanted.unwrap(), steps)
                    }
                    Deed::GiveBack => match played.found.take() {
                        Some(found) => played.make(played.xml.given_back(0, &found), steps),
                        None => true,
                    },
                    Deed::Move(nth) => {
                        let allowed = played.xml.allowed(0, &set("0-7"));
                        let cpus = allowed.iter().skip(nth as usize % (allowed.len() - 1)).take(2).collect::<CpuSet>();
                        played.found = None;
                        if steps > 2 {
                            played.may_have.clear();
                        }
                        played.may_have.push(cpus.clone());
                        played.make(Wanted { set: cpus, after: None }, steps)
                    }
                    Deed::Vcpupin(first, count) => {
                        let cpus: CpuSet = (first..first + count).collect();
                        // One that vnumad has noted cannot be told from its own.
                        if !played.xml.own_pins.get(&0).is_some_and(|own| own.sets().any(|set| *set == cpus)) {
                            (played.operator, played.found) = (Some(cpus.clone()), None);
                            played.may_have = vec![cpus.clone()];
                            let note = played.xml.own_pins.clone();
                            played.write(&note, Some(cpus));
                        }
                        true
                    }
                    Deed::Begin => false,
                };
                prop_assert_eq!(played.xml.limit(0), played.operator.as_ref(), "{:?}", &played);
                let pin = played.pin();
                prop_assert!(played.operator.as_ref().is_none_or(|operator| pin.is_subset(operator)), "{:?}", &played);
                if !alive {
                    played.begin(steps);
                    played.begin(3);
                    let pin = played.pin();
                    prop_assert!(played.may_have.contains(&pin), "it is left at {}: {:?}", pin, &played);
                    prop_assert_eq!(played.xml.limit(0), played.operator.as_ref(), "{:?}", &played);
                }
            }
        }
    }
}
