//! A connection that holds memory and a place for a bounded time only, whatever its client does.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// A client that takes nothing of its answer for so long is closed.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// When so many bytes of requests were taken and nothing is answered, no more are.
const UNANSWERED_LIMIT: usize = 64 << 10;

/// What is waited for.
type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection of `of`.
pub(crate) struct Guarded<S, C> {
    stream: S,
    pub(crate) of: C,
    /// Nothing is read before.
    first: Option<Wait>,
    /// It ends then.
    pub(super) until: Option<Pin<Box<Sleep>>>,
    /// While it takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
    stall_limit: Duration,
    unanswered: usize,
}

impl<S, C> Guarded<S, C> {
    /// Reads the first byte after this.
    pub(super) fn new(stream: S, of: C, first: impl Future<Output = ()> + Send + 'static) -> Self {
        let stall_limit = STALL_LIMIT;
        Self {
            stream,
            of,
            first: Some(Box::pin(first)),
            until: None,
            stalled: None,
            stall_limit,
            unanswered: 0,
        }
    }

    /// The same that lives no longer than this.
    pub(super) fn within(self, limit: Duration) -> Self {
        Self { until: Some(Box::pin(sleep(limit))), ..self }
    }

    /// An error once its time is over.
    fn in_time(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.until.as_mut().map(|until| until.as_mut().poll(context)) {
            Some(Poll::Ready(())) => Err(io::ErrorKind::TimedOut.into()),
            Some(Poll::Pending) | None => Ok(()),
        }
    }

    /// What became of a write, or an error once none was possible for too long.
    fn wrote(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            (self.stalled, self.unanswered) = (None, 0);
            return written;
        }
        let limit = self.stall_limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin, C: Unpin> AsyncRead for Guarded<S, C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(context)?;
        if let Some(first) = &mut self.first {
            ready!(first.as_mut().poll(context));
            self.first = None;
        }
        if self.unanswered > UNANSWERED_LIMIT {
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.unanswered += buffer.filled().len() - before;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin, C: Unpin> AsyncWrite for Guarded<S, C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.in_time(context)?;
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.wrote(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.in_time(context)?;
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.wrote(context, written)
    }

    /// So that what several clients are answered is not copied for each.
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        time::timeout,
    };

    const HANG_LIMIT: Duration = Duration::from_secs(60);

    fn connection() -> (Guarded<DuplexStream, ()>, DuplexStream) {
        let (ours, theirs) = duplex(1 << 16);
        (Guarded::new(ours, (), ready(())), theirs)
    }

    async fn kind<T>(act: impl Future<Output = io::Result<T>>) -> Option<io::ErrorKind> {
        timeout(HANG_LIMIT, act).await.expect("it does not hang").err().map(|error| error.kind())
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_closed_and_one_that_is_slow_is_not() {
        let (mut ours, mut theirs) = connection();
        ours.stall_limit = Duration::from_millis(300);
        let reader = tokio::spawn(async move {
            let mut piece = vec![0; 1 << 14];
            for _ in 0..20 {
                theirs.read_exact(&mut piece).await.expect("more");
                sleep(Duration::from_millis(30)).await;
            }
            theirs
        });
        assert_eq!(kind(ours.write_all(&vec![0; 20 << 14])).await, None);
        let _theirs = reader.await.expect("no panic");
        assert_eq!(kind(ours.write_all(&vec![0; 1 << 17])).await, Some(io::ErrorKind::TimedOut));
    }

    #[tokio::test]
    async fn a_request_without_end_is_not_kept() {
        let (mut ours, mut theirs) = connection();
        tokio::spawn(async move { while theirs.write_all(&[b'x'; 4096]).await.is_ok() {} });
        let mut read = Vec::new();
        assert_eq!(kind(ours.read_to_end(&mut read)).await, Some(io::ErrorKind::InvalidData));
        assert!(read.len() <= UNANSWERED_LIMIT + (1 << 16), "{}", read.len());
    }

    #[tokio::test]
    async fn a_connection_ends_when_its_time_is_over_and_begins_after_it_was_paid_for() {
        let (ours, _theirs) = connection();
        let mut ours = ours.within(Duration::from_millis(10));
        while ours.write_all(&[0]).await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
        let (ours, mut theirs) = duplex(16);
        theirs.write_all(b"x").await.expect("room");
        let mut ours = Guarded::new(ours, (), pending());
        assert!(timeout(Duration::from_millis(10), ours.read_u8()).await.is_err());
    }
}
