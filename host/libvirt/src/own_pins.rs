//! vnumad's own pins as they are noted in a domain's metadata.

use crate::xml::{MAX_VCPUS, Reader, XmlError, children, of_metadata, parse_set};
use roxmltree::Node;
use std::collections::BTreeMap;
use vnuma_model::CpuSet;

/// Namespace of the element in a domain's metadata that names the pins of vnumad. XML calls for a URI; nothing is there.
pub const PINS_NAMESPACE: &str = "urn:vnuma:pins:1";

/// Most bytes of the name of a run of a domain.
const MAX_RUN: usize = 64;

/// Most sets that a pin may have beside the one that it is to have. More come together only if as many calls fail, one after the other.
pub(crate) const MAX_BEFORE: usize = 4;

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
    /// It is a policy's, or is being changed from or to one: what the vCPU is pinned to when no policy confines it.
    pub after: Option<CpuSet>,
}

impl OwnPin {
    /// Is this pin of the XML vnumad's?
    pub fn is(&self, pin: Option<&CpuSet>) -> bool {
        pin.is_some_and(|pin| self.sets().any(|set| set == pin))
    }

    /// All sets that the pin may have.
    pub fn sets(&self) -> impl Iterator<Item = &CpuSet> {
        [&self.set].into_iter().chain(&self.before)
    }

    pub(crate) fn is_of(&self, run: &str) -> bool {
        self.run.as_deref().is_none_or(|noted| noted == run)
    }
}

/// The element for these pins, by index of their vCPUs.
pub fn pins_element(pins: &BTreeMap<u32, OwnPin>) -> String {
    let mut element = "<pins>".to_owned();
    for (vcpu, OwnPin { set, before, operator, run, after }) in pins {
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
        if let Some(after) = after {
            element.push_str(&format!(" after='{after}'"));
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
        let after = reader.set(node, "after")?;
        pins.insert(reader.some_number(node, "id")?, OwnPin { set, before, operator, run, after });
    }
    Ok(pins)
}
