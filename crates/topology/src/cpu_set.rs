//! A set of CPU numbers in the kernel's list format (`0-3,8`).

use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fmt, str::FromStr};

/// Largest CPU number accepted, the kernel's own limit (`NR_CPUS` of a Debian kernel is 8192).
const MAX_CPU: u32 = 8191;

/// CPU numbers, ordered.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

/// Why a text is no CPU list.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CpuSetError {
    /// Neither `N` nor `N-M`.
    #[error("`{0}` is neither a number nor a range of numbers")]
    Malformed(String),
    /// A range that ends before it begins.
    #[error("range `{0}` ends before it begins")]
    Reversed(String),
    /// Beyond what a kernel can have.
    #[error("CPU {0} is above the largest number a kernel can have, {MAX_CPU}")]
    TooLarge(u64),
}

impl CpuSet {
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
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| -> Result<u32, CpuSetError> {
                let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                let value: u64 = plain
                    .then(|| digits.parse().ok())
                    .flatten()
                    .ok_or_else(|| CpuSetError::Malformed(part.to_owned()))?;
                match u32::try_from(value) {
                    Ok(cpu) if cpu <= MAX_CPU => Ok(cpu),
                    _ => Err(CpuSetError::TooLarge(value)),
                }
            };
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return Err(CpuSetError::Reversed(part.to_owned()));
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
            while rest.next_if_eq(&(last + 1)).is_some() {
                last += 1;
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
