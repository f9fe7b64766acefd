//! Answers to requests: each goes once to the client that asked, and has the type that was asked for.

use super::refusal::Refusal;
use std::sync::{Arc, Weak};
use vnuma_model::Party;

/// Who has asked: a client that may go before it has its answer. The default is one that stays.
#[derive(Clone, Debug, Default)]
pub struct Requester {
    here: Option<Weak<()>>,
    /// Who pays for what others have to do for it. `None`: it may have them do anything.
    pub(super) payer: Option<Party>,
}

impl Requester {
    /// One that is there for as long as this is.
    pub fn with(here: &Arc<()>) -> Self {
        Self { here: Some(Arc::downgrade(here)), payer: None }
    }

    /// The same that may only look.
    pub fn paid_by(self, payer: Option<Party>) -> Self {
        Self { payer, ..self }
    }

    /// Does it wait for the answer no more?
    pub fn has_gone(&self) -> bool {
        self.here.as_ref().is_some_and(|here| here.strong_count() == 0)
    }
}

/// Who asked, and gets one answer of this type. How it gets there is not known here.
pub struct ReplyTo<T> {
    give: Box<dyn FnOnce(Result<T, Refusal>) + Send>,
    pub(super) requester: Requester,
}

impl<T: Send + 'static> ReplyTo<T> {
    /// Someone who is given the answer so.
    pub fn new(give: impl FnOnce(Result<T, Refusal>) + Send + 'static) -> Self {
        Self { give: Box::new(give), requester: Requester::default() }
    }

    /// The same of one that may go.
    pub fn of(self, requester: Requester) -> Self {
        Self { requester, ..self }
    }

    /// The answer is this.
    pub(super) fn with(self, answer: Result<T, Refusal>) -> Reply {
        Reply(Box::new(move || (self.give)(answer)))
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
