//! Where the answer to a request goes.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use crate::protocol::Frame;

/// Where the frames of a request go; closed with its end, so that nothing late gets into the next one.
#[derive(Clone)]
pub(crate) struct Outlet {
    writer: Arc<Mutex<Option<Box<dyn Write + Send>>>>,
}

impl Outlet {
    /// Writes to the connection of the request.
    pub(crate) fn new(writer: Box<dyn Write + Send>) -> Self {
        Self { writer: Arc::new(Mutex::new(Some(writer))) }
    }

    /// Sends a frame; `false` if the other end is closed.
    pub(crate) fn send(&self, frame: &Frame) -> bool {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = writer.as_mut().is_some_and(|open| frame.write(open).is_ok());
        if !sent {
            *writer = None;
        }
        sent
    }

    /// Sends the last frame of the request.
    pub(crate) fn end(&self, frame: &Frame) {
        self.send(frame);
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
