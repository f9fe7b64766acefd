//! A set of CPU numbers in the kernel's list format (`0-3,8`).

use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fmt, str::FromStr};

/// Numbers that a list may spell out. Lists of the kernel name each CPU once; a list that
/// repeats itself is accepted, but not without end.
const MAX_SPELLED: usize = 8 * (CpuSet::MAX_CPU as usize + 1);

/// CPU numbers, ordered.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

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
    /// Adds `cpu`.
    pub fn insert(&mut self, cpu: u32) {
        self.0.insert(cpu);
    }
    /// Is `cpu` in it?
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }
    /// Are all of its members in `other`?
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.0.is_subset(&other.0)
    }
    /// Has it no member?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// Number of members.
    pub fn len(&self) -> usize {
        self.0.len()
    }
    /// Members in rising order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(iter: I) -> Self {
        Self(iter.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;
    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let mut set = BTreeSet::new();
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
            set.extend(first..=last);
        }
        Ok(Self(set))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut rest = self.0.iter().copied().peekable();
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
    fn the_largest_number_of_all_is_printed() {
        let set: CpuSet = [u32::MAX - 1, u32::MAX].into_iter().collect();
        assert_eq!(set.to_string(), "4294967294-4294967295");
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
