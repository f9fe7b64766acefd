//! What several clients are told, which is kept and written once for all of them.

use serde::Serialize;
use std::sync::{Arc, OnceLock};

/// What clients are told, and its line of JSON once one of them is served.
#[derive(Debug)]
pub(crate) struct Told<T> {
    what: T,
    line: OnceLock<Arc<[u8]>>,
}

impl<T: Serialize> Told<T> {
    pub(crate) fn new(what: T) -> Arc<Self> {
        Arc::new(Self { what, line: OnceLock::new() })
    }

    pub(crate) fn what(&self) -> &T {
        &self.what
    }

    /// As a line of JSON.
    pub(crate) fn line(&self) -> serde_json::Result<Arc<[u8]>> {
        if let Some(line) = self.line.get() {
            return Ok(Arc::clone(line));
        }
        let mut line = serde_json::to_vec(&self.what)?;
        line.push(b'\n');
        Ok(Arc::clone(self.line.get_or_init(|| line.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_written_once() {
        let told = Told::new([1, 2]);
        let [first, second] = [told.line(), told.line()].map(|line| line.expect("JSON"));
        assert_eq!(&*first, b"[1,2]\n");
        assert!(Arc::ptr_eq(&first, &second));
    }
}
