//! Answers to requests: each goes once to the client that asked, and has the type that was asked for.

use super::refusal::Refusal;

/// Who asked, and gets one answer of this type. How it gets there is not known here.
pub struct ReplyTo<T>(Box<dyn FnOnce(Result<T, Refusal>) + Send>);

impl<T: Send + 'static> ReplyTo<T> {
    /// Someone who is given the answer so.
    pub fn new(give: impl FnOnce(Result<T, Refusal>) + Send + 'static) -> Self {
        Self(Box::new(give))
    }

    /// The answer is this.
    pub(super) fn with(self, answer: Result<T, Refusal>) -> Reply {
        Reply(Box::new(move || (self.0)(answer)))
    }
}

impl<T> std::fmt::Debug for ReplyTo<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReplyTo")
    }
}

/// An answer, ready to be given.
pub struct Reply(Box<dyn FnOnce() + Send>);

impl Reply {
    /// Gives it.
    pub fn give(self) {
        (self.0)();
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reply")
    }
}
