//! Takes numbers from bytes.

use crate::{
    error::WireError,
    ids::{NODE_LIMIT, NodeId, NodeSet, PageId, VERSION_MOST, Version},
};

/// What is left of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn take(&mut self, field: &'static str, len: usize) -> Result<&'a [u8], WireError> {
        let have = self.bytes.len();
        let (taken, rest) =
            self.bytes.split_at_checked(len).ok_or(WireError::Short { field, need: len, have })?;
        self.bytes = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(field, N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(self.array::<1>(field)?[0])
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn page(&mut self, field: &'static str) -> Result<PageId, WireError> {
        self.u64(field).map(PageId)
    }

    pub(crate) fn node(&mut self, field: &'static str) -> Result<NodeId, WireError> {
        below(field, self.u8(field)?, NODE_LIMIT, "below 64").map(NodeId)
    }

    pub(crate) fn nodes(&mut self, field: &'static str) -> Result<NodeSet, WireError> {
        self.u64(field).map(NodeSet::from_bits)
    }

    pub(crate) fn version(&mut self, field: &'static str) -> Result<Version, WireError> {
        at_most(field, self.u64(field)?, VERSION_MOST, "at most 2^62")
    }

    /// Everything that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn end(self, field: &'static str) -> Result<(), WireError> {
        match self.bytes.len() {
            0 => Ok(()),
            extra => Err(WireError::Trailing { field, extra }),
        }
    }
}

/// A number that must be below a limit.
pub(crate) fn below(
    field: &'static str,
    value: u8,
    limit: u8,
    expected: &'static str,
) -> Result<u8, WireError> {
    if value < limit { Ok(value) } else { Err(WireError::Value { field, value: value.into(), expected }) }
}

/// A number that is at most this.
pub(crate) fn at_most(
    field: &'static str,
    value: u64,
    most: u64,
    expected: &'static str,
) -> Result<u64, WireError> {
    if value <= most { Ok(value) } else { Err(WireError::Value { field, value, expected }) }
}

/// A byte that says yes or no.
pub(crate) fn flag(field: &'static str, value: u8) -> Result<bool, WireError> {
    below(field, value, 2, "0 or 1").map(|value| value == 1)
}
