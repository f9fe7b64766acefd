//! The answer to one request.

use std::sync::mpsc::{Receiver, channel};
use vnuma_daemon::core::{Refusal, ReplyTo};

/// Where the answer goes, and where it arrives.
pub fn asked<T: Send + 'static>() -> (ReplyTo<T>, Receiver<Result<T, Refusal>>) {
    let (sender, answer) = channel();
    // Whoever does not wait for it is no error.
    (ReplyTo::new(move |answer| drop(sender.send(answer))), answer)
}
