//! The kernel's own description of its types, BTF (Documentation/bpf/btf.rst). Only what it takes to find fields and constants.

use anyhow::{Context, Result, bail, ensure};
use std::cell::RefCell;
use std::collections::HashMap;

const MAGIC: u16 = 0xeb9f;
/// More modifiers than any type has, or nested structures without a name: a circle.
const DEEP: usize = 32;

/// What a type is made of. Functions, and what else has no memory, are `Other`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Integer {
        signed: bool,
    },
    Pointer,
    Array {
        element: u32,
        length: u32,
    },
    Structure {
        members: Vec<Member>,
    },
    Enumeration {
        values: Vec<(u32, i64)>,
    },
    /// A typedef, or a qualifier such as const.
    Modifier,
    Variable,
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    name: u32,
    of: u32,
    bit: u32,
    is_bits: bool,
}

#[derive(Clone, Debug)]
struct Type {
    name: u32,
    /// Its size, or another type.
    value: u32,
    kind: Kind,
}

/// All types of a kernel.
pub struct Btf {
    types: Vec<Type>,
    /// Where each name is among the strings.
    names: HashMap<&'static str, u32>,
    /// What was asked for by name. There are 100,000 types, of which few are.
    found: RefCell<HashMap<(u32, Sort), Option<Id>>>,
}

/// What is looked for by name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Sort {
    Structure,
    Plain,
    Variable,
}

/// A number of a type.
pub type Id = u32;

struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> Result<u32> {
        let (word, rest) = self.0.split_at_checked(4).context("a type is cut off")?;
        self.0 = rest;
        Ok(u32::from_le_bytes(word.try_into()?))
    }
}

fn read_type(words: &mut Words<'_>) -> Result<Type> {
    let (name, info, value) = (words.next()?, words.next()?, words.next()?);
    let (count, flag) = (info & 0xffff, info >> 31 == 1);
    let kind = match info >> 24 & 0x1f {
        1 => Kind::Integer { signed: words.next()? >> 24 & 1 == 1 },
        2 => Kind::Pointer,
        3 => {
            let (element, _index, length) = (words.next()?, words.next()?, words.next()?);
            Kind::Array { element, length }
        }
        4 | 5 => {
            let mut member = || -> Result<Member> {
                let (name, of, place) = (words.next()?, words.next()?, words.next()?);
                let (bit, bits) = if flag { (place & 0x00ff_ffff, place >> 24) } else { (place, 0) };
                Ok(Member { name, of, bit, is_bits: bits > 0 || bit % 8 > 0 })
            };
            Kind::Structure { members: (0..count).map(|_| member()).collect::<Result<_>>()? }
        }
        6 => {
            let mut one = || -> Result<(u32, i64)> {
                let (name, value) = (words.next()?, words.next()?);
                Ok((name, if flag { i64::from(value as i32) } else { i64::from(value) }))
            };
            Kind::Enumeration { values: (0..count).map(|_| one()).collect::<Result<_>>()? }
        }
        19 => {
            let mut one = || -> Result<(u32, i64)> {
                let (name, low, high) = (words.next()?, words.next()?, words.next()?);
                Ok((name, (u64::from(high) << 32 | u64::from(low)) as i64))
            };
            Kind::Enumeration { values: (0..count).map(|_| one()).collect::<Result<_>>()? }
        }
        8..=11 | 18 => Kind::Modifier,
        14 => {
            words.next()?;
            Kind::Variable
        }
        7 | 12 | 16 => Kind::Other,
        // Parameters, the section of variables, tags of declarations: passed over.
        13 => skip(words, 2 * count)?,
        15 => skip(words, 3 * count)?,
        17 => skip(words, 1)?,
        kind => bail!("kind {kind} of a type is not known"),
    };
    Ok(Type { name, value, kind })
}

fn skip(words: &mut Words<'_>, count: u32) -> Result<Kind> {
    for _ in 0..count {
        words.next()?;
    }
    Ok(Kind::Other)
}

impl Btf {
    /// Reads it as it is in `/sys/kernel/btf/vmlinux`.
    pub fn parse(bytes: &'static [u8]) -> Result<Self> {
        let mut header = Words(bytes);
        let start = header.next()?;
        ensure!(start as u16 == MAGIC, "BTF: magic {:#06x}, expected {MAGIC:#06x}", start as u16);
        let [length, types, types_length, strings, strings_length] =
            [header.next()?, header.next()?, header.next()?, header.next()?, header.next()?];
        let part = |name: &str, offset: u32, size: u32| {
            let first = length as usize + offset as usize;
            let found = bytes.get(first..first + size as usize);
            found.with_context(|| format!("BTF: {name} at {first}, {size} bytes: beyond the end"))
        };
        let mut words = Words(part("types", types, types_length)?);
        let void = Type { name: 0, value: 0, kind: Kind::Other };
        let mut all = vec![void];
        while !words.0.is_empty() {
            all.push(read_type(&mut words).with_context(|| format!("BTF: type {}", all.len()))?);
        }
        let strings =
            std::str::from_utf8(part("strings", strings, strings_length)?).context("BTF: strings")?;
        let mut names = HashMap::with_capacity(all.len());
        let mut offset = 0;
        for name in strings.split('\0') {
            names.insert(name, offset);
            offset += name.len() as u32 + 1;
        }
        Ok(Self { types: all, names, found: RefCell::default() })
    }

    /// The first of a name counts: those that share one are drivers' own.
    fn first(&self, name: &str, sort: Sort) -> Option<Id> {
        let key = (*self.names.get(name)?, sort);
        if let Some(found) = self.found.borrow().get(&key) {
            return *found;
        }
        let is_it = |kind: &Kind| match kind {
            Kind::Structure { .. } => sort == Sort::Structure,
            Kind::Variable => sort == Sort::Variable,
            Kind::Other => false,
            _ => sort == Sort::Plain,
        };
        let id =
            self.types.iter().position(|found| found.name == key.0 && is_it(&found.kind)).map(|id| id as Id);
        self.found.borrow_mut().insert(key, id);
        id
    }

    fn get(&self, id: Id) -> Result<&Type> {
        self.types.get(id as usize).with_context(|| format!("BTF: no type {id}"))
    }

    /// A structure, or else a type of that name.
    pub fn named(&self, name: &str) -> Result<Id> {
        let found = self.first(name, Sort::Structure).or_else(|| self.first(name, Sort::Plain));
        found.with_context(|| format!("BTF: no type \"{name}\""))
    }

    /// The type of a variable. BTF has those that there is one of for each CPU.
    pub fn variable(&self, name: &str) -> Option<Id> {
        let id = self.first(name, Sort::Variable)?;
        self.get(id).ok().map(|found| found.value)
    }

    /// Without typedefs and qualifiers.
    fn bare(&self, mut id: Id) -> Result<&Type> {
        for _ in 0..DEEP {
            let found = self.get(id)?;
            if found.kind != Kind::Modifier {
                return Ok(found);
            }
            id = found.value;
        }
        bail!("BTF: type {id} has no end")
    }

    /// Size in bytes, of a pointer 8.
    pub fn size(&self, id: Id) -> Result<u64> {
        self.size_below(id, 0)
    }

    fn size_below(&self, id: Id, depth: usize) -> Result<u64> {
        ensure!(depth < DEEP, "BTF: type {id} has no end");
        let found = self.bare(id)?;
        match &found.kind {
            Kind::Pointer => Ok(8),
            Kind::Array { element, length } => {
                let size = self.size_below(*element, depth + 1)?.checked_mul((*length).into());
                size.with_context(|| format!("BTF: type {id} has no end"))
            }
            Kind::Integer { .. } | Kind::Structure { .. } | Kind::Enumeration { .. } => {
                Ok(found.value.into())
            }
            _ => bail!("BTF: type {id} has no size"),
        }
    }

    /// What a pointer points to; none if it is no pointer.
    pub fn target(&self, id: Id) -> Result<Option<Id>> {
        let found = self.bare(id)?;
        Ok((found.kind == Kind::Pointer).then_some(found.value))
    }

    /// The elements of an array; none if it is no array.
    pub fn element(&self, id: Id) -> Result<Option<Id>> {
        let Kind::Array { element, .. } = self.bare(id)?.kind else { return Ok(None) };
        Ok(Some(element))
    }

    /// Whether a number of that type may be negative; none if it is no number.
    pub fn signed(&self, id: Id) -> Result<Option<bool>> {
        Ok(match &self.bare(id)?.kind {
            Kind::Integer { signed } => Some(*signed),
            Kind::Enumeration { .. } => Some(false),
            _ => None,
        })
    }

    /// Offset in bytes and type of a field; none if there is none.
    pub fn field(&self, id: Id, name: &str) -> Result<Option<(u64, Id)>> {
        self.names.get(name).map_or(Ok(None), |name| self.field_below(id, *name, 0))
    }

    fn field_below(&self, id: Id, name: u32, depth: usize) -> Result<Option<(u64, Id)>> {
        ensure!(depth < DEEP, "BTF: type {id} has no end");
        let Kind::Structure { members } = &self.bare(id)?.kind else { return Ok(None) };
        for member in members {
            if member.name == name {
                ensure!(!member.is_bits, "BTF: the field is a part of a word");
                return Ok(Some((u64::from(member.bit / 8), member.of)));
            }
            // A structure or union without a name.
            let below = if member.name == 0 { self.field_below(member.of, name, depth + 1)? } else { None };
            if let Some((offset, of)) = below {
                return Ok(Some((u64::from(member.bit / 8) + offset, of)));
            }
        }
        Ok(None)
    }

    /// The value of a constant of some enumeration.
    pub fn constant(&self, name: &str) -> Option<i64> {
        let name = *self.names.get(name)?;
        let enumerations = self.types.iter().filter_map(|found| match &found.kind {
            Kind::Enumeration { values } => Some(values),
            _ => None,
        });
        enumerations.flatten().find(|(text, _)| *text == name).map(|(_, value)| *value)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Strings by offset, types by number: what a test needs of a kernel.
    pub struct Maker {
        types: Vec<u32>,
        strings: Vec<u8>,
    }

    impl Maker {
        pub fn new() -> Self {
            Self { types: Vec::new(), strings: vec![0] }
        }

        pub fn string(&mut self, text: &str) -> u32 {
            let offset = self.strings.len() as u32;
            self.strings.extend(text.bytes().chain([0]));
            offset
        }

        pub fn add(&mut self, name: &str, kind: u32, count: u32, value: u32, more: &[u32]) {
            let name = if name.is_empty() { 0 } else { self.string(name) };
            self.types.extend([name, kind << 24 | count, value]);
            self.types.extend(more);
        }

        pub fn bytes(&self) -> &'static [u8] {
            let (types, strings) = (self.types.len() as u32 * 4, self.strings.len() as u32);
            let header = [u32::from(MAGIC) | 1 << 16, 24, 0, types, types, strings];
            let words = header.iter().chain(&self.types).flat_map(|word| word.to_le_bytes());
            words.chain(self.strings.iter().copied()).collect::<Vec<_>>().leak()
        }
    }

    /// `struct node { int id; union { struct node *next; char name[4]; }; const nr bits; }`, and a few more.
    pub fn small() -> Maker {
        let mut made = Maker::new();
        made.add("int", 1, 0, 4, &[1 << 24 | 32]);
        made.add("char", 1, 0, 1, &[8]);
        made.add("", 3, 0, 0, &[2, 1, 4]);
        made.add("", 2, 0, 6, &[]);
        let [next, name] = ["next", "name"].map(|text| made.string(text));
        made.add("", 5, 2, 8, &[next, 4, 0, name, 3, 0]);
        let [id, bits] = ["id", "bits"].map(|text| made.string(text));
        made.add("node", 4, 3, 24, &[id, 1, 0, 0, 5, 64, bits, 7, 128]);
        made.add("", 10, 0, 8, &[]);
        made.add("nr", 8, 0, 1, &[]);
        let [low, high] = ["LOW", "HIGH"].map(|text| made.string(text));
        made.add("limits", 6, 2, 4, &[low, 1, high, 7]);
        made.add("per_node", 14, 0, 4, &[1]);
        made
    }

    #[test]
    fn fields_are_found_through_unions_without_a_name() {
        let btf = Btf::parse(small().bytes()).unwrap();
        let node = btf.named("node").unwrap();
        assert_eq!(btf.size(node).unwrap(), 24);
        assert_eq!(btf.field(node, "id").unwrap(), Some((0, 1)));
        assert_eq!(btf.field(node, "next").unwrap(), Some((8, 4)));
        assert_eq!(btf.field(node, "bits").unwrap(), Some((16, 7)));
        assert_eq!(btf.field(node, "gone").unwrap(), None);
        assert_eq!(btf.target(4).unwrap(), Some(node));
        assert_eq!((btf.element(3).unwrap(), btf.size(3).unwrap()), (Some(2), 4));
        assert_eq!((btf.signed(7).unwrap(), btf.signed(2).unwrap()), (Some(true), Some(false)));
        assert_eq!((btf.constant("HIGH"), btf.constant("MIDDLE")), (Some(7), None));
        assert_eq!((btf.variable("per_node"), btf.variable("node")), (Some(4), None));
    }

    #[test]
    fn what_is_cut_off_or_runs_in_a_circle_is_an_error() {
        let bytes = small().bytes();
        for length in 0..bytes.len() {
            assert!(Btf::parse(&bytes[..length]).is_err(), "{length}");
        }
        let mut circle = Maker::new();
        circle.add("round", 8, 0, 1, &[]);
        let btf = Btf::parse(circle.bytes()).unwrap();
        assert!(btf.size(1).is_err() && btf.size(9).is_err());
        let mut unknown = Maker::new();
        unknown.add("new", 30, 0, 0, &[]);
        let error = format!("{:#}", Btf::parse(unknown.bytes()).err().unwrap());
        assert_eq!(error, "BTF: type 1: kind 30 of a type is not known");
    }
}
