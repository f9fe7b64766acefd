//! What can go wrong with a node.

use std::io;
use vnuma_dsm_pager::{PageError, PagerError};

/// Why a node cannot start, or go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The configuration does not fit.
    #[error("{field}: {value}, expected {expected}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is needed.
        expected: u64,
    },
    /// A page could not be changed.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The region cannot be served.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// The system refused.
    #[error("{call}: {source}")]
    System {
        /// What was called.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// A cut is not complete, and cannot be.
    #[error("cut {number}: {reason}")]
    Cut {
        /// The cut.
        number: u64,
        /// Why.
        reason: &'static str,
    },
    /// What came with a page is not what the protocol expects.
    #[error("page {page}: {detail}")]
    Contents {
        /// The page.
        page: u64,
        /// What is wrong.
        detail: &'static str,
    },
}

impl NodeError {
    pub(crate) fn system(call: &'static str) -> impl FnOnce(nix::Error) -> Self {
        move |error| Self::System { call, source: error.into() }
    }
}
