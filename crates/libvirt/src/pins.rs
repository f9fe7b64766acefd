//! vnumad's own pins, which it notes in a domain's metadata, so that it does not take them for the operator's.
//!
//! libvirt keeps a pin and the note separately, and libvirtd or vnumad may end between two calls. So what is noted holds at each step:
//!
//! ```text
//!  note: set NEW, before OLD ──▶ pin NEW ──▶ note: set NEW
//! ```

use crate::{
    DomainXml,
    domain_xml::{MAX_VCPUS, of_metadata},
    xml::{Reader, XmlError, child, children, parse_set},
};
use roxmltree::Node;
use std::{collections::BTreeMap, ops::Range};
use vnuma_topology::CpuSet;

/// Namespace of the element in a domain's metadata that names the pins of vnumad. XML calls for a URI; nothing is there.
pub const PINS_NAMESPACE: &str = "urn:vnuma:pins:1";

/// Most bytes of the name of a run of a domain.
const MAX_RUN: usize = 64;

/// Most sets that a pin may have beside the one that it is to have. More come together only if as many calls fail, one after the other.
const MAX_BEFORE: usize = 4;

/// A pin that vnumad has set, and what the operator allowed before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPin {
    /// CPUs of the pin.
    pub set: CpuSet,
    /// What it may still have instead: it is being changed, or that was cut short.
    pub before: Vec<CpuSet>,
    /// CPUs that the operator lets the vCPU run on; `None`: any.
    pub operator: Option<CpuSet>,
    /// The process that it was set for, unlike any other on whatever host: pins that came to another one name CPUs of another host.
    /// `None`: that was not noted.
    pub run: Option<String>,
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

impl OwnPin {
    /// Is this pin of the XML vnumad's?
    fn is(&self, pin: Option<&CpuSet>) -> bool {
        pin.is_some_and(|pin| *pin == self.set || self.before.contains(pin))
    }
}

/// The element for these pins, by index of their vCPUs.
pub fn pins_element(pins: &BTreeMap<u32, OwnPin>) -> String {
    let mut element = "<pins>".to_owned();
    for (vcpu, OwnPin { set, before, operator, run }) in pins {
        element.push_str(&format!("<vcpu id='{vcpu}' set='{set}'"));
        if !before.is_empty() {
            let before: Vec<_> = before.iter().map(CpuSet::to_string).collect();
            element.push_str(&format!(" before='{}'", before.join(" ")));
        }
        if let Some(operator) = operator {
            element.push_str(&format!(" operator='{operator}'"));
        }
        if let Some(run) = run {
            element.push_str(&format!(" run='{run}'"));
        }
        element.push_str("/>");
    }
    element + "</pins>"
}

/// The name of a run as vnumad writes it. Anything else is none.
fn run_of(node: Node<'_, '_>) -> Option<String> {
    let run = node.attribute("run").filter(|run| run.len() <= MAX_RUN);
    run.filter(|run| run.chars().all(|character| character.is_ascii_digit() || character == '.'))
        .map(str::to_owned)
}

pub(crate) fn own_pins(reader: &Reader<'_>, root: Node<'_, '_>) -> Result<BTreeMap<u32, OwnPin>, XmlError> {
    let mut pins = BTreeMap::new();
    for node in of_metadata(root, PINS_NAMESPACE, "pins")
        .flat_map(|pins| children(pins, "vcpu"))
        .take(MAX_VCPUS as usize)
    {
        let set = reader.set(node, "set")?.ok_or_else(|| reader.missing("vcpu set"))?;
        let operator = reader.set(node, "operator")?;
        let sets = node.attribute("before").unwrap_or_default().split_whitespace().take(MAX_BEFORE);
        let before =
            sets.map(|text| parse_set(text).map_err(|reason| reader.value("vcpu before", text, reason)));
        let before = before.collect::<Result<_, _>>()?;
        // Once all had one together.
        let run = run_of(node).or_else(|| run_of(node.parent()?));
        pins.insert(reader.some_number(node, "id")?, OwnPin { set, before, operator, run });
    }
    Ok(pins)
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

    /// Pins of vnumad that are still set, and were for another run than this: the domain has come with them from another host.
    pub fn stale_pins(&self, run: &str) -> Vec<(u32, &OwnPin)> {
        let stale = |own: &OwnPin| own.run.as_deref().is_some_and(|noted| noted != run);
        self.set_pins().into_iter().filter(|(_, own)| stale(own)).collect()
    }

    /// Pins of vnumad that are still set.
    pub fn set_pins(&self) -> Vec<(u32, &OwnPin)> {
        let set = |vcpu: &u32, own: &OwnPin| own.is(self.pin(*vcpu));
        self.own_pins.iter().filter(|(vcpu, own)| set(vcpu, own)).map(|(vcpu, own)| (*vcpu, own)).collect()
    }

    /// What is to be noted before a vCPU is pinned to a set: both pins are vnumad's, whatever comes of it. A pin of another run is one
    /// until it is replaced.
    pub fn pins_before(&self, vcpu: u32, set: CpuSet, run: &str) -> BTreeMap<u32, OwnPin> {
        let operator = self.limit(vcpu).cloned();
        let pin = self.pin(vcpu);
        let (mut before, mut run) = (Vec::new(), Some(run.to_owned()));
        if let Some(own) = self.own_pins.get(&vcpu).filter(|own| own.is(pin)) {
            // The one that it has first, as no other is sure to be needed.
            for other in pin.into_iter().chain([&own.set]).chain(&own.before) {
                if *other != set && !before.contains(other) && before.len() < MAX_BEFORE {
                    before.push(other.clone());
                }
            }
            run = own.run.clone().or(run);
        }
        let mut pins = self.own_pins.clone();
        pins.insert(vcpu, OwnPin { set, before, operator, run });
        pins
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
            meanwhile.extend(self.pins_before(vcpu, all.clone(), run).remove_entry(&vcpu));
            let (before, operator, run) = (Vec::new(), None, Some(run.to_owned()));
            afterwards.insert(vcpu, OwnPin { set: all.clone(), before, operator, run });
            sets.insert(vcpu, all.clone());
        }
        TakingBack { meanwhile, sets, afterwards }
    }

    /// What is to be noted where a pin has come to be what it was to be, if something is.
    pub fn settled_pins(&self) -> Option<BTreeMap<u32, OwnPin>> {
        // One that is as before may be about to change: a call that nobody waits for any more goes on.
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
        let elsewhere = pinned(&BTreeMap::new(), "0-7").pins_before(0, set("0-3"), "7.9");
        let noted = pinned(&elsewhere, "0-3").pins_before(0, set("4-7"), "8.9");
        assert_eq!(pinned(&noted, "0-3").stale_pins("8.9").len(), 1, "it was not pinned after all");
        let other = pinned(&noted, "0-3").pins_before(1, set("2"), "8.9");
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

    /// Whoever is killed, and whichever call fails: what is noted then tells vnumad's pin from the operator's.
    #[test]
    fn at_each_step_of_a_pin_both_are_vnumads() {
        let operator = pinned(&BTreeMap::new(), "0-7");
        let (mut pin, mut note) = ("0-7", BTreeMap::new());
        for to in ["0-3", "4-7", "0-3", "2"] {
            let noted = pinned(&note, pin).pins_before(0, set(to), "7.9");
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
        assert_eq!(note[&0], OwnPin { set: set("2"), before, operator, run });
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
        let mut note = pinned(&BTreeMap::new(), "0-7").pins_before(0, set("0-3"), "7.9");
        for to in ["4", "5", "6", "7", "1", "2"] {
            note = pinned(&note, "0-3").pins_before(0, set(to), "7.9");
            let xml = pinned(&note, "0-3");
            assert_eq!((xml.limit(0), xml.settled_pins()), (Some(&set("0-7")), None), "pinned to {to}");
            assert_eq!(pinned(&note, to).limit(0), Some(&set("0-7")), "it was carried out late");
        }
        assert_eq!(note[&0].before.len(), MAX_BEFORE);
    }
}
