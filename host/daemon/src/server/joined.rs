//! What a handler has had done elsewhere.

use crate::core::Refusal;
use std::panic::resume_unwind;
use tokio::task::JoinError;

/// Its outcome. A panic there goes on as one of the handler, which is answered and logged as such ([`caught`](super::caught)). An error: it was
/// not begun, as vnumad is shutting down.
pub(super) fn joined<T>(done: Result<T, JoinError>) -> Result<T, Refusal> {
    done.map_err(|error| match error.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(_) => Refusal::ShuttingDown,
    })
}
