//! A set of CPU numbers in the kernel's list format (`0-3,8`).

use serde::{Deserialize, Serialize};
use std::{cmp::Ordering, fmt, str::FromStr};

/// Numbers that a list may spell out. Lists of the kernel name each CPU once; a list that
/// repeats itself is accepted, but not without end.
const MAX_SPELLED: usize = 8 * (CpuSet::MAX_CPU as usize + 1);

/// CPUs of a word.
const WORD: u32 = u64::BITS;
/// Words that need no memory of their own: those of most hosts.
const FEW: usize = 4;

/// CPU numbers, ordered. Masks are compared and copied for every thread in every period of the policies, so this is a bit for
/// each.
#[derive(Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(value_type = String, example = "0-3,8"))]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(Words);

/// Bits of CPUs, the lowest first. A set has one form only.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Words {
    Few([u64; FEW]),
    /// More than [`FEW`], and the last one is not 0.
    Many(Vec<u64>),
}

impl Default for Words {
    fn default() -> Self {
        Self::Few([0; FEW])
    }
}

/// Why a text is no CPU list.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CpuSetError {
    /// Neither `N` nor `N-M`.
    #[error("`{}` is neither a number nor a range of numbers", shown(.0))]
    Malformed(String),
    /// A range that ends before it begins.
    #[error("range `{}` ends before it begins", shown(.0))]
    Reversed(String),
    /// Beyond what a kernel can have.
    #[error("CPU {0} is above the largest number a kernel can have, {max}", max = CpuSet::MAX_CPU)]
    TooLarge(u64),
    /// It names CPUs over and over.
    #[error("more than {MAX_SPELLED} numbers in one list")]
    TooMany,
}

/// The beginning of a part of a list, with everything escaped that would disturb a terminal or a log.
fn shown(part: &str) -> String {
    const LIMIT: usize = 40;
    let rest = if part.chars().nth(LIMIT).is_some() { "…" } else { "" };
    part.chars().take(LIMIT).flat_map(char::escape_debug).chain(rest.chars()).collect()
}

impl CpuSet {
    /// Largest CPU number accepted in a list, the kernel's own limit (`NR_CPUS` of a Debian
    /// kernel is 8192).
    pub const MAX_CPU: u32 = 8191;

    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }
    /// The set of a mask: bits of words, the lowest first.
    pub fn from_words(mask: &[u64]) -> Self {
        let used = mask.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        let mut few = [0; FEW];
        match few.get_mut(..used) {
            Some(to) => to.copy_from_slice(&mask[..used]),
            None => return Self(Words::Many(mask[..used].to_vec())),
        }
        Self(Words::Few(few))
    }

    fn words(&self) -> &[u64] {
        match &self.0 {
            Words::Few(words) => words,
            Words::Many(words) => words,
        }
    }

    /// Its words and those of another set, as many as the longer one has.
    fn with<'a>(&'a self, other: &'a CpuSet) -> impl Iterator<Item = (u64, u64)> + 'a {
        let (own, its) = (self.words(), other.words());
        let word = |words: &[u64], at: usize| words.get(at).copied().unwrap_or(0);
        (0..own.len().max(its.len())).map(move |at| (word(own, at), word(its, at)))
    }

    /// Adds `cpu`, which is at most [`Self::MAX_CPU`]. A larger one is none that there can be, and is left out.
    pub fn insert(&mut self, cpu: u32) {
        if cpu > Self::MAX_CPU {
            return;
        }
        let (at, bit) = ((cpu / WORD) as usize, 1 << (cpu % WORD));
        match &mut self.0 {
            Words::Few(words) if at < FEW => words[at] |= bit,
            Words::Few(words) => {
                let mut many = words.to_vec();
                many.resize(at + 1, 0);
                many[at] = bit;
                self.0 = Words::Many(many);
            }
            Words::Many(words) => {
                words.resize(words.len().max(at + 1), 0);
                words[at] |= bit;
            }
        }
    }
    /// Is `cpu` in it?
    pub fn contains(&self, cpu: u32) -> bool {
        self.words().get((cpu / WORD) as usize).is_some_and(|word| word >> (cpu % WORD) & 1 == 1)
    }
    /// Are all of its members in `other`?
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.with(other).all(|(own, its)| own & !its == 0)
    }
    /// Has it a member that is in `other` as well?
    pub fn intersects(&self, other: &CpuSet) -> bool {
        self.with(other).any(|(own, its)| own & its != 0)
    }
    /// Are those of its members that are in `among` the same as those of `other`?
    pub fn agrees(&self, other: &CpuSet, among: &CpuSet) -> bool {
        let differing = self.with(other).zip(among.words());
        differing.into_iter().all(|((own, its), among)| (own ^ its) & among == 0)
    }
    /// Adds all members of `other`.
    pub fn add_all(&mut self, other: &CpuSet) {
        if !other.is_subset(self) {
            *self = Self::from_words(&self.with(other).map(|(own, its)| own | its).collect::<Vec<_>>());
        }
    }

    /// Number of its members that are in `other` as well.
    pub fn count_in(&self, other: &CpuSet) -> usize {
        self.with(other).map(|(own, its)| (own & its).count_ones() as usize).sum()
    }

    /// Has it no member?
    pub fn is_empty(&self) -> bool {
        self.words().iter().all(|word| *word == 0)
    }
    /// Number of members.
    pub fn len(&self) -> usize {
        self.words().iter().map(|word| word.count_ones() as usize).sum()
    }
    /// Members in rising order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        let bits = |(at, word): (usize, &u64)| Bits { left: *word, first: at as u32 * WORD };
        self.words().iter().enumerate().flat_map(bits)
    }
}

/// CPUs of a word that have not been taken yet.
#[derive(Clone, Copy, Debug)]
struct Bits {
    left: u64,
    first: u32,
}

impl Iterator for Bits {
    type Item = u32;
    fn next(&mut self) -> Option<u32> {
        let cpu = (self.left != 0).then(|| self.left.trailing_zeros())?;
        self.left &= self.left - 1;
        Some(self.first + cpu)
    }
}

impl DoubleEndedIterator for Bits {
    fn next_back(&mut self) -> Option<u32> {
        let cpu = (self.left != 0).then(|| self.left.ilog2())?;
        self.left &= !(1 << cpu);
        Some(self.first + cpu)
    }
}

/// As lists of numbers.
impl Ord for CpuSet {
    fn cmp(&self, other: &Self) -> Ordering {
        self.iter().cmp(other.iter())
    }
}

impl PartialOrd for CpuSet {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(iter: I) -> Self {
        let mut set = Self::new();
        iter.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;
    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let mut set = Self::new();
        let mut spelled = 0;
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| -> Result<u32, CpuSetError> {
                let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                let value: u64 = plain
                    .then(|| digits.parse().ok())
                    .flatten()
                    .ok_or_else(|| CpuSetError::Malformed(part.to_owned()))?;
                match u32::try_from(value) {
                    Ok(cpu) if cpu <= CpuSet::MAX_CPU => Ok(cpu),
                    _ => Err(CpuSetError::TooLarge(value)),
                }
            };
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return Err(CpuSetError::Reversed(part.to_owned()));
            }
            spelled += (last - first) as usize + 1;
            if spelled > MAX_SPELLED {
                return Err(CpuSetError::TooMany);
            }
            (first..=last).for_each(|cpu| set.insert(cpu));
        }
        Ok(set)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut rest = self.iter().peekable();
        while let Some(first) = rest.next() {
            let mut last = first;
            while let Some(next) = rest.next_if(|&cpu| cpu - last == 1) {
                last = next;
            }
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl TryFrom<String> for CpuSet {
    type Error = CpuSetError;
    fn try_from(text: String) -> Result<Self, CpuSetError> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> String {
        set.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn kernel_lists() {
        let set: CpuSet = "0-2,8,10-11\n".parse().unwrap();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 8, 10, 11]);
        assert_eq!(set.to_string(), "0-2,8,10-11");
        assert_eq!("\n".parse::<CpuSet>(), Ok(CpuSet::new()));
        assert_eq!("8191".parse::<CpuSet>(), Ok([CpuSet::MAX_CPU].into_iter().collect()));
    }

    #[test]
    fn what_is_no_list_is_named() {
        for (text, error) in [
            ("x", CpuSetError::Malformed("x".into())),
            ("1,-2", CpuSetError::Malformed("-2".into())),
            ("+1", CpuSetError::Malformed("+1".into())),
            ("1-2-3", CpuSetError::Malformed("1-2-3".into())),
            ("99999999999999999999999", CpuSetError::Malformed("99999999999999999999999".into())),
            ("3-1", CpuSetError::Reversed("3-1".into())),
            ("8192", CpuSetError::TooLarge(8192)),
            ("0-4294967296", CpuSetError::TooLarge(1 << 32)),
            (&"0-8191,".repeat(9), CpuSetError::TooMany),
        ] {
            assert_eq!(text.parse::<CpuSet>(), Err(error), "{text}");
        }
    }

    #[test]
    fn errors_say_what_and_where() {
        assert_eq!(
            "1,9000".parse::<CpuSet>().unwrap_err().to_string(),
            "CPU 9000 is above the largest number a kernel can have, 8191"
        );
        assert_eq!(CpuSetError::TooMany.to_string(), "more than 65536 numbers in one list");
        assert!("a".parse::<CpuSet>().unwrap_err().to_string().contains("`a`"));
        assert!("2-1".parse::<CpuSet>().unwrap_err().to_string().contains("`2-1`"));
        let odd = format!("\u{1b}[2J{}", "x".repeat(100)).parse::<CpuSet>().unwrap_err().to_string();
        assert_eq!(
            odd,
            format!(r"`\u{{1b}}[2J{}…` is neither a number nor a range of numbers", "x".repeat(36))
        );
    }

    #[test]
    fn a_number_that_no_cpu_has_is_left_out() {
        let set: CpuSet = [u32::MAX, CpuSet::MAX_CPU, CpuSet::MAX_CPU + 1, 3].into_iter().collect();
        assert_eq!(set.to_string(), "3,8191");
        assert_eq!(format!("{set:?}"), "CpuSet(3,8191)");
    }

    #[test]
    fn json_is_the_list() {
        let set: CpuSet = "0-3".parse().unwrap();
        assert_eq!(serde_json::to_string(&set).unwrap(), "\"0-3\"");
        assert!(serde_json::from_str::<CpuSet>("\"3-0\"").is_err());
    }

    proptest! {
        #[test]
        fn printed_sets_are_read_back(
            members in proptest::collection::btree_set(0..=CpuSet::MAX_CPU, 0..200),
        ) {
            let set: CpuSet = members.iter().copied().collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>(), Ok(set));
        }

        #[test]
        fn dense_sets_are_read_back(members in proptest::collection::btree_set(0..40u32, 0..40)) {
            let set: CpuSet = members.iter().copied().collect();
            prop_assert_eq!(set.len(), members.len());
            prop_assert_eq!(set.to_string().parse::<CpuSet>(), Ok(set));
        }

        /// Of hosts with few and with many CPUs.
        #[test]
        fn sets_are_those_of_their_numbers(
            [one, other, among] in (0..2_usize).prop_flat_map(|large| {
                let members = proptest::collection::btree_set(0..[80_u32, 700][large], 0..60);
                [members.clone(), members.clone(), members]
            }),
        ) {
            let set = |members: &BTreeSet<u32>| members.iter().rev().copied().collect::<CpuSet>();
            let (a, b, m) = (set(&one), set(&other), set(&among));
            prop_assert!(a.iter().eq(one.iter().copied()) && a.iter().rev().eq(one.iter().rev().copied()));
            prop_assert_eq!((a.len(), a.is_empty()), (one.len(), one.is_empty()));
            prop_assert!((0..800).all(|cpu| a.contains(cpu) == one.contains(&cpu)));
            prop_assert_eq!((a == b, a.cmp(&b)), (one == other, one.cmp(&other)));
            prop_assert_eq!(a.is_subset(&b), one.is_subset(&other));
            prop_assert_eq!(a.intersects(&b), !one.is_disjoint(&other));
            prop_assert_eq!(a.count_in(&b), one.intersection(&other).count());
            let mut both = a.clone();
            both.add_all(&b);
            prop_assert_eq!(both, one.union(&other).copied().collect::<CpuSet>());
            let same = among.iter().all(|cpu| one.contains(cpu) == other.contains(cpu));
            prop_assert_eq!(a.agrees(&b, &m), same);
            let both: CpuSet = one.intersection(&other).copied().collect();
            prop_assert!(both.is_subset(&a) && both.is_subset(&b));
            let mut words = vec![0_u64; 13];
            one.iter().for_each(|&cpu| words[cpu as usize / 64] |= 1 << (cpu % 64));
            prop_assert_eq!(CpuSet::from_words(&words), a);
        }

        #[test]
        fn any_text_is_survived(text in ".*") {
            let _ = text.parse::<CpuSet>();
        }

        #[test]
        fn any_text_of_its_letters_is_survived(text in "[0-9,\\- \n]{0,60}") {
            if let Ok(set) = text.parse::<CpuSet>() {
                prop_assert_eq!(set.to_string().parse::<CpuSet>(), Ok(set));
            }
        }
    }
}
