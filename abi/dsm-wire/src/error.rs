//! Refusals.

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It ends too early.
    #[error("{field}: {have} bytes are left, and {need} are needed")]
    Short {
        /// What should have been there.
        field: &'static str,
        /// Its length in bytes.
        need: usize,
        /// What is left.
        have: usize,
    },
    /// It goes on after its end.
    #[error("{field}: {extra} bytes follow its end")]
    Trailing {
        /// What ended.
        field: &'static str,
        /// How many follow.
        extra: usize,
    },
    /// A number that is not allowed there.
    #[error("{field}: {value:#x} is not {expected}")]
    Value {
        /// The field.
        field: &'static str,
        /// What it held.
        value: u64,
        /// What is allowed.
        expected: &'static str,
    },
    /// A length or a count above its limit.
    #[error("{field}: {value}, and at most {limit} are allowed")]
    Limit {
        /// The field.
        field: &'static str,
        /// What it held.
        value: usize,
        /// The limit.
        limit: usize,
    },
    /// Two hosts that do not belong together.
    #[error("{field}: the peer has {theirs:#x}, and here it is {ours:#x}")]
    Mismatch {
        /// The field.
        field: &'static str,
        /// The peer's value.
        theirs: u64,
        /// The value here.
        ours: u64,
    },
}
