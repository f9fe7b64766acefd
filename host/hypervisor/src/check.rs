//! Answers that make no sense, and the errors that say so.

use crate::{VmError, client::Client};
use std::fmt::Display;
use vnuma_process::text::sanitize_short;

/// Longest id or path taken from QEMU.
const MAX_ID: usize = 1024;

pub(crate) fn check_length(client: &Client, command: &str, field: &str, text: &str) -> Result<(), VmError> {
    if text.len() <= MAX_ID {
        return Ok(());
    }
    Err(value(client, command, field, text, format!("it has more than {MAX_ID} bytes")))
}

pub(crate) fn value(
    client: &Client,
    command: &str,
    field: &str,
    value: impl Display,
    reason: impl Into<String>,
) -> VmError {
    VmError::Value {
        vm: client.vm().to_owned(),
        command: command.to_owned(),
        field: field.to_owned(),
        value: sanitize_short(&value.to_string()),
        reason: reason.into(),
    }
}
