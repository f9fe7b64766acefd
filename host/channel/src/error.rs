//! Why a channel could not be made or used.

use std::io;

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
#[error("topology channel: {act}: {source}")]
pub struct ChannelError {
    act: &'static str,
    source: io::Error,
}

pub(crate) fn failed<E: Into<io::Error>>(act: &'static str) -> impl Fn(E) -> ChannelError {
    move |source| ChannelError { act, source: source.into() }
}
