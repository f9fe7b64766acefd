//! XML of other programs: elements and attributes as values, with errors that name them.

use roxmltree::{Document, Node, ParsingOptions};
use std::{fmt::Display, str::FromStr};
use vnuma_model::CpuSet;
use vnuma_process::text::{sanitize_reason, sanitize_short};

/// Longest document, in bytes. A domain with hundreds of devices has some hundred KiB.
pub(crate) const SIZE_LIMIT: usize = 4 << 20;

/// Most elements, texts and comments of a document.
const NODE_LIMIT: u32 = 200_000;

/// Most vCPUs of a domain that are read.
pub(crate) const MAX_VCPUS: u32 = 8192;

/// Why XML is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XmlError {
    /// It is no XML, or too much of it.
    #[error("domain {domain}: {reason}")]
    Document {
        /// The domain, as far as it is known.
        domain: String,
        /// What is wrong.
        reason: String,
    },
    /// Something is missing.
    #[error("domain {domain}: <{element}> is missing")]
    Missing {
        /// The domain.
        domain: String,
        /// The element, or element and attribute.
        element: String,
    },
    /// A value makes no sense.
    #[error("domain {domain}: <{element}> is `{value}`: {reason}")]
    Value {
        /// The domain.
        domain: String,
        /// The element, or element and attribute.
        element: String,
        /// What was found, sanitized.
        value: String,
        /// Why it cannot be.
        reason: String,
    },
}

/// A document of a domain.
pub(crate) struct Reader<'a> {
    domain: &'a str,
}

impl<'a> Reader<'a> {
    /// Reads what belongs to this domain. The name is for messages.
    pub(crate) fn new(domain: &'a str) -> Self {
        Self { domain }
    }

    /// Parses the text.
    pub(crate) fn document<'t>(&self, text: &'t str) -> Result<Document<'t>, XmlError> {
        let refused = |reason: String| {
            let (domain, reason) = (sanitize_short(self.domain), sanitize_reason(&reason));
            XmlError::Document { domain, reason }
        };
        if text.len() > SIZE_LIMIT {
            return Err(refused(format!("its XML has more than {SIZE_LIMIT} bytes")));
        }
        let options = ParsingOptions { nodes_limit: NODE_LIMIT, ..ParsingOptions::default() };
        Document::parse_with_options(text, options).map_err(|error| refused(format!("its XML: {error}")))
    }

    pub(crate) fn missing(&self, element: impl Display) -> XmlError {
        XmlError::Missing {
            domain: sanitize_short(self.domain),
            element: sanitize_reason(&element.to_string()),
        }
    }

    pub(crate) fn value(&self, element: impl Display, value: &str, reason: impl Into<String>) -> XmlError {
        let (domain, element) = (sanitize_short(self.domain), sanitize_reason(&element.to_string()));
        XmlError::Value { domain, element, value: sanitize_short(value), reason: reason.into() }
    }

    /// An attribute that is a number.
    pub(crate) fn number<T: FromStr>(
        &self,
        node: Node<'_, '_>,
        attribute: &str,
    ) -> Result<Option<T>, XmlError> {
        let Some(text) = node.attribute(attribute) else { return Ok(None) };
        let number = text.trim().parse();
        number.map(Some).map_err(|_| self.value(place(node, attribute), text, "not a number of this kind"))
    }

    /// The same, which must be there.
    pub(crate) fn some_number<T: FromStr>(&self, node: Node<'_, '_>, attribute: &str) -> Result<T, XmlError> {
        self.number(node, attribute)?.ok_or_else(|| self.missing(place(node, attribute)))
    }

    /// An attribute that is a hexadecimal number as libvirt writes it (`0x1f`), or a decimal one.
    pub(crate) fn hexadecimal(&self, node: Node<'_, '_>, attribute: &str) -> Result<Option<u32>, XmlError> {
        let Some(text) = node.attribute(attribute) else { return Ok(None) };
        let number = match text.trim().strip_prefix("0x") {
            Some(digits) if !digits.starts_with('+') => u32::from_str_radix(digits, 16).ok(),
            Some(_) => None,
            None => text.trim().parse().ok(),
        };
        number.map(Some).ok_or_else(|| self.value(place(node, attribute), text, "not a number"))
    }

    /// An attribute that is a list of CPUs or nodes.
    pub(crate) fn set(&self, node: Node<'_, '_>, attribute: &str) -> Result<Option<CpuSet>, XmlError> {
        let Some(text) = node.attribute(attribute) else { return Ok(None) };
        match parse_set(text) {
            Ok(set) if !set.is_empty() => Ok(Some(set)),
            Ok(_) => Err(self.value(place(node, attribute), text, "an empty list")),
            Err(reason) => Err(self.value(place(node, attribute), text, reason)),
        }
    }

    /// The text of an element, as an amount of memory in bytes, with libvirt's units.
    pub(crate) fn bytes(&self, node: Node<'_, '_>) -> Result<u64, XmlError> {
        let text = node.text().unwrap_or_default();
        let amount = text.trim().parse().map_err(|_| self.value(place(node, ""), text, "not an amount"))?;
        self.scale(node, amount, text)
    }

    /// An attribute as an amount of memory in bytes.
    pub(crate) fn bytes_of(&self, node: Node<'_, '_>, attribute: &str) -> Result<u64, XmlError> {
        let amount = self.some_number(node, attribute)?;
        self.scale(node, amount, node.attribute(attribute).unwrap_or_default())
    }

    fn scale(&self, node: Node<'_, '_>, amount: u64, text: &str) -> Result<u64, XmlError> {
        let unit = node.attribute("unit").unwrap_or("KiB");
        // docs/formatdomain.rst: KiB without a unit.
        let scale = match unit {
            "b" | "bytes" => 1,
            "KB" => 1000,
            "k" | "K" | "KiB" => 1 << 10,
            "MB" => 1_000_000,
            "M" | "MiB" => 1 << 20,
            "GB" => 1_000_000_000,
            "G" | "GiB" => 1 << 30,
            "TB" => 1_000_000_000_000,
            "T" | "TiB" => 1 << 40,
            _ => return Err(self.value(place(node, "unit"), unit, "not a unit of memory")),
        };
        amount.checked_mul(scale).ok_or_else(|| self.value(place(node, ""), text, "more than can be counted"))
    }
}

/// A list as libvirt writes it, or an operator: `0-3,^2,7`.
pub(crate) fn parse_set(text: &str) -> Result<CpuSet, String> {
    let mut left_out = CpuSet::new();
    let mut set = CpuSet::new();
    for part in text.trim().split(',') {
        let (to, list) = match part.trim().strip_prefix('^') {
            Some(list) => (&mut left_out, list),
            None => (&mut set, part.trim()),
        };
        to.add_all(&list.parse::<CpuSet>().map_err(|error| sanitize_reason(&error.to_string()))?);
    }
    if left_out.is_empty() {
        return Ok(set);
    }
    let mut rest = CpuSet::new();
    set.iter().filter(|cpu| !left_out.contains(*cpu)).for_each(|cpu| rest.insert(cpu));
    Ok(rest)
}

/// What an element, or an attribute of it, is called in messages.
fn place(node: Node<'_, '_>, attribute: &str) -> String {
    let name = node.tag_name().name();
    if attribute.is_empty() { name.to_owned() } else { format!("{name} {attribute}") }
}

/// The first child of this name.
pub(crate) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    children(node, name).next()
}

/// All children of this name.
pub(crate) fn children<'a, 'i: 'a>(node: Node<'a, 'i>, name: &str) -> impl Iterator<Item = Node<'a, 'i>> {
    node.children().filter(move |child| child.is_element() && child.tag_name().name() == name)
}

/// Elements of the domain's metadata.
pub(crate) fn of_metadata<'a, 'i: 'a>(
    root: Node<'a, 'i>,
    namespace: &'static str,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'i>> {
    let elements = child(root, "metadata").into_iter().flat_map(|metadata| metadata.children());
    elements.filter(move |element| element.has_tag_name((namespace, name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> Option<String> {
        parse_set(text).ok().map(|set| set.to_string())
    }

    #[test]
    fn lists_of_cpus_with_exceptions() {
        assert_eq!(set("0-3,^2,7").as_deref(), Some("0-1,3,7"));
        assert_eq!(set(" 1 ").as_deref(), Some("1"));
        assert_eq!(set("^1,0-2").as_deref(), Some("0,2"));
        assert_eq!(set("1-x"), None);
        assert_eq!(set("0-99999999999"), None);
    }

    #[test]
    fn amounts_have_units() {
        let reader = Reader::new("web");
        let amount = |text: &str| {
            let document = reader.document(text).unwrap();
            reader.bytes(document.root_element()).map_err(|error| error.to_string())
        };
        assert_eq!(amount("<memory unit='KiB'>2048</memory>"), Ok(2 << 20));
        assert_eq!(amount("<memory>1</memory>"), Ok(1024));
        assert_eq!(amount("<memory unit='GiB'> 3 </memory>"), Ok(3 << 30));
        assert_eq!(amount("<memory unit='bytes'>7</memory>"), Ok(7));
        let refused = |text, reason: &str| assert_eq!(amount(text).unwrap_err(), reason);
        refused("<memory unit='x'>1</memory>", "domain web: <memory unit> is `x`: not a unit of memory");
        refused("<memory>-1</memory>", "domain web: <memory> is `-1`: not an amount");
        let large = format!("<memory unit='TiB'>{}</memory>", u64::MAX);
        refused(&large, &format!("domain web: <memory> is `{}`: more than can be counted", u64::MAX));
    }

    #[test]
    fn no_document_grows_beyond_its_bounds() {
        let reader = Reader::new("a\u{1b}b");
        let refused = |text: &str| reader.document(text).unwrap_err().to_string();
        assert!(refused("<a>").starts_with("domain a\\u{1b}b: its XML: "));
        assert!(refused(&" ".repeat(SIZE_LIMIT + 1)).contains("more than"));
        assert!(refused("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>").contains("DTD"));
        assert!(reader.document(&format!("<a>{}</a>", "<b/>".repeat(NODE_LIMIT as usize))).is_err());
    }
}
