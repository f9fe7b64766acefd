//! Answers to requests, by the numbers of these.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};
use vnuma_daemon::core::{Refusal, ReplyTo};
use vnuma_policy::world::RequestId;

/// Why each request that was answered was refused, if it was.
#[derive(Default)]
pub struct Answers(Arc<Mutex<BTreeMap<RequestId, Option<Refusal>>>>);

impl Answers {
    /// Where the answer to a request goes.
    pub fn to<T: Send + 'static>(&self, request: RequestId) -> ReplyTo<T> {
        let answers = Arc::clone(&self.0);
        ReplyTo::new(move |answer| {
            let before = answers.lock().expect("no panic").insert(request, answer.err());
            assert!(before.is_none(), "answered once");
        })
    }

    /// All of them.
    pub fn all(&self) -> MutexGuard<'_, BTreeMap<RequestId, Option<Refusal>>> {
        self.0.lock().expect("no panic")
    }
}
