//! Lines without end.

use crate::{Driver, Error, within};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::time::Duration;

/// A longer line is no event.
pub(crate) const EVENT_LIMIT: usize = 1 << 16;
/// A longer line is no observation: a period of a host with 65536 vCPUs and 64 nodes is shorter.
pub(crate) const OBSERVATION_LIMIT: usize = 256 << 20;

/// Lines as vnumad writes them.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    driver: Driver,
    path: String,
    /// What has come, of which so much was returned already.
    pending: Vec<u8>,
    returned: usize,
    longest: usize,
    limit: Option<Duration>,
}

impl Lines {
    pub(crate) fn new(
        body: Incoming,
        driver: Driver,
        path: String,
        longest: usize,
        limit: Option<Duration>,
    ) -> Self {
        Self { body, driver, path, pending: Vec::new(), returned: 0, longest, limit }
    }

    /// Changes how long the next line may take.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The next line, with its end. No line is lost if this is given up before it is there.
    ///
    /// # Errors
    ///
    /// vnumad has ended or drops who reads too slowly; or it takes longer than the limit, after which one may ask again.
    pub async fn line(&mut self) -> Result<Vec<u8>, Error> {
        let path = self.path.clone();
        within(self.limit, &path, self.read()).await
    }

    async fn read(&mut self) -> Result<Vec<u8>, Error> {
        let mut searched = self.returned;
        loop {
            if let Some(end) = self.pending[searched..].iter().position(|&byte| byte == b'\n') {
                let line = self.returned..searched + end + 1;
                self.returned = line.end;
                return Ok(self.pending[line].to_vec());
            }
            self.pending.drain(..self.returned);
            self.returned = 0;
            searched = self.pending.len();
            if searched > self.longest {
                let (path, reason) = (self.path.clone(), "an endless line".to_owned());
                return Err(Error::Unexpected { path, status: 200, reason });
            }
            let frame = self.driver.during(self.body.frame()).await.ok_or(Error::WatchEnded)?;
            let frame = frame.map_err(|source| Error::Broken { path: self.path.clone(), source })?;
            self.pending.extend_from_slice(frame.data_ref().map_or(&[][..], |data| &data[..]));
        }
    }
}
