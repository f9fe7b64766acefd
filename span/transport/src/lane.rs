//! Frames on a pipe, and what is done about a peer that does not keep to them.

use crate::{
    error::{Fault, Peer, TransportError},
    pipe::Pipe,
};
use nix::poll::PollFlags;
use std::{
    collections::VecDeque,
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, HEADER, Header, Hello, Kind, Membership, Message, encode};

/// How much, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A frame is taken while fewer bytes wait to be sent; then [`Fault::Full`]. Lists of pages after a loss do not count: they
    /// grow with the memory, and a peer that has not read them yet is not lost. They have a limit of 64 bytes a page.
    pub queue_bytes: usize,
    /// While fewer bytes wait, [`Lane::has_room`] says so: what can wait (new requests) should then.
    pub room_bytes: usize,
    /// How long nothing of what waits may be taken, and a frame may be incomplete.
    pub stall: Duration,
    /// How long nothing may come. A question goes out after a third of it. Until something has come for the first time it is
    /// `connect` if that is longer: a peer does not answer before it is connected to all others.
    pub silence: Duration,
    /// How long it may take until a connection is made.
    pub connect: Duration,
    /// How long one that calls may take until it has said who it is.
    pub hello: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queue_bytes: 8 << 20,
            room_bytes: 256 << 10,
            stall: Duration::from_millis(1000),
            silence: Duration::from_millis(1500),
            connect: Duration::from_secs(10),
            hello: Duration::from_secs(2),
        }
    }
}

/// Most frames that [`Lane::receive`] takes at once, so that a peer that sends much does not keep others waiting.
const BATCH: usize = 64;
/// Bytes that are asked of a pipe at once.
const READ: usize = 64 << 10;

/// Bytes of lists that may wait for each page of the memory, or [`Limits::queue_bytes`] if that is more. A page takes up to 16 in
/// each of the two lists of a membership, and a second loss may follow before the lists of the first have gone on.
const LIST_BYTES: u64 = 64;

/// One connection to a node. Nothing here waits.
///
/// Frames arrive in the order in which they were sent, each once, or the lane is at its end. After an error other than
/// [`Fault::Full`] every call returns [`Fault::Ended`].
pub struct Lane {
    pipe: Box<dyn Pipe>,
    peer: Peer,
    limits: Limits,
    /// The handshake is done.
    open: bool,
    ended: bool,
    outbox: Buffer,
    lists: Lists,
    /// Bytes of lists that may wait.
    list_bytes: usize,
    sent: u64,
    /// Since when nothing of the outbox was taken.
    stuck: Option<Instant>,
    inbox: Inbox,
    received: u64,
    /// [`Self::receive`] took as many frames as it may, and there may be more that no descriptor tells of.
    backlog: bool,
    /// The last read took all that there was.
    emptied: bool,
    /// Since when the frame at the head of the inbox is incomplete.
    partial: Option<Instant>,
    heard: Instant,
    asked: bool,
    /// Something has come since the handshake.
    answered: bool,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Lane").field("peer", &self.peer).field("ended", &self.ended).finish()
    }
}

/// Bytes of which the first have been used.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    used: usize,
}

impl Buffer {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.used..]
    }

    fn consume(&mut self, count: usize) {
        self.used += count;
        if self.used >= self.bytes.len() {
            self.bytes.clear();
            self.used = 0;
            // A burst does not keep its memory.
            self.bytes.shrink_to(READ * 4);
        } else if self.used >= READ * 16 {
            self.bytes.drain(..self.used);
            self.used = 0;
        }
    }
}

/// What of the outbox are lists of pages.
#[derive(Debug, Default)]
struct Lists {
    /// Bytes that were ever given on, of any kind.
    gone: u64,
    /// Where they begin and end, counted in the same way. One behind another is no part of its own.
    parts: VecDeque<(u64, u64)>,
    /// Bytes that wait.
    bytes: usize,
}

impl Lists {
    /// One was put behind `before` bytes that wait, with which there are `after`.
    fn add(&mut self, before: usize, after: usize) {
        let (begin, end) = (self.gone + before as u64, self.gone + after as u64);
        match self.parts.back_mut() {
            Some(last) if last.1 == begin => last.1 = end,
            _ => self.parts.push_back((begin, end)),
        }
        self.bytes += after - before;
    }

    /// So many bytes of the outbox were given on.
    fn consume(&mut self, count: usize) {
        self.gone += count as u64;
        while let Some((begin, end)) = self.parts.front_mut().filter(|(begin, _)| *begin < self.gone) {
            let gone = (*end).min(self.gone);
            self.bytes -= (gone - *begin) as usize;
            *begin = gone;
            if begin < end {
                return;
            }
            self.parts.pop_front();
        }
    }
}

/// A list of pages, which a node says after a loss.
fn is_list(body: &Body<'_>) -> bool {
    let lists =
        |message: &Membership| matches!(message, Membership::Holdings { .. } | Membership::Directory { .. });
    matches!(body, Body::Protocol(Message::Membership(message), _) if lists(message))
}

/// Bytes that have come and were not used. Its memory is cleared when it grows, not for each read.
#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
    used: usize,
    end: usize,
}

impl Inbox {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.used..self.end]
    }

    fn consume(&mut self, count: usize) {
        self.used += count;
        if self.used >= self.end {
            (self.used, self.end) = (0, 0);
            // A burst does not keep its memory.
            if self.bytes.len() > READ * 4 {
                self.bytes.truncate(READ * 2);
                self.bytes.shrink_to_fit();
            }
        }
    }

    /// Where so many more bytes may be put.
    fn room(&mut self, count: usize) -> &mut [u8] {
        if self.bytes.len() < self.end + count && self.used > 0 {
            self.bytes.copy_within(self.used..self.end, 0);
            (self.used, self.end) = (0, self.end - self.used);
        }
        let need = self.end + count;
        if self.bytes.len() < need {
            // Before the handshake a peer gets no more memory than a hello needs.
            self.bytes.resize(if count < READ { need } else { need.max(READ * 2) }, 0);
        }
        &mut self.bytes[self.end..need]
    }

    /// So many bytes were put there.
    fn filled(&mut self, count: usize) {
        self.end += count;
    }
}

impl Lane {
    /// A lane without handshake: the first frame of both sides is to be a hello.
    pub fn new(pipe: Box<dyn Pipe>, address: String, limits: Limits) -> Self {
        Self {
            pipe,
            peer: Peer { node: None, lane: 0, address },
            limits,
            open: false,
            ended: false,
            outbox: Buffer::default(),
            lists: Lists::default(),
            list_bytes: limits.queue_bytes,
            sent: 0,
            stuck: None,
            inbox: Inbox::default(),
            received: 0,
            backlog: false,
            emptied: false,
            partial: None,
            heard: Instant::now(),
            asked: false,
            answered: false,
        }
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Ends the handshake: the peer is who its hello says.
    pub(crate) fn establish(&mut self, theirs: &Hello) -> Result<(), TransportError> {
        if let Err(reason) = self.pipe.authenticate(theirs.node) {
            return Err(self.end(Fault::Identity(reason)));
        }
        self.peer.node = Some(theirs.node);
        self.peer.lane = theirs.lane;
        let lists = usize::try_from(theirs.pages.saturating_mul(LIST_BYTES)).unwrap_or(usize::MAX);
        self.list_bytes = self.limits.queue_bytes.max(lists);
        self.open = true;
        Ok(())
    }

    /// Ends the lane, and says why.
    pub(crate) fn end(&mut self, fault: Fault) -> TransportError {
        self.ended = true;
        fault.of(&self.peer)
    }

    fn alive(&self) -> Result<(), TransportError> {
        if self.ended { Err(Fault::Ended.of(&self.peer)) } else { Ok(()) }
    }

    /// Sends a frame, or has it wait in order behind those that wait already.
    pub fn send(&mut self, body: &Body<'_>, epoch: u64) -> Result<(), TransportError> {
        let waiting = self.waiting();
        self.post(body, epoch)?;
        // Behind bytes that a pipe did not take there is no use in trying again before it says so.
        if waiting == 0 { self.flush().map(drop) } else { Ok(()) }
    }

    /// Has a frame wait for [`Self::give_on`], so that several share a system call. Returns its bytes.
    pub fn post(&mut self, body: &Body<'_>, epoch: u64) -> Result<usize, TransportError> {
        self.alive()?;
        let (waiting, list) = (self.waiting(), is_list(body));
        let (bytes, limit) = match list {
            true => (self.lists.bytes, self.list_bytes),
            false => (waiting - self.lists.bytes, self.limits.queue_bytes),
        };
        if bytes >= limit {
            return Err(Fault::Full { bytes, limit }.of(&self.peer));
        }
        encode(body, epoch, self.sent, &mut self.outbox.bytes);
        if list {
            self.lists.add(waiting, self.waiting());
        }
        self.sent += 1;
        Ok(self.waiting() - waiting)
    }

    /// Gives on what was posted, once there are so many bytes of it. What a pipe did not take waits until it can.
    pub fn give_on(&mut self, bytes: usize) -> Result<(), TransportError> {
        let due = self.waiting() >= bytes.max(1) && self.stuck.is_none();
        if due { self.flush().map(drop) } else { Ok(()) }
    }

    /// Bytes that wait to be sent.
    pub fn waiting(&self) -> usize {
        self.outbox.rest().len()
    }

    /// Should new requests be made? Answers may be sent as long as [`Self::send`] takes them.
    pub fn has_room(&self) -> bool {
        self.waiting() < self.limits.room_bytes
    }

    /// Gives on what waits; true when nothing waits any more.
    pub fn flush(&mut self) -> Result<bool, TransportError> {
        self.alive()?;
        while !self.outbox.rest().is_empty() {
            match self.pipe.write(self.outbox.rest()) {
                Ok(0) => return Err(self.end(Fault::Closed { inside: true })),
                Ok(count) => {
                    self.outbox.consume(count);
                    self.lists.consume(count);
                    self.stuck = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stuck.get_or_insert_with(Instant::now);
                    return Ok(false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.end(Fault::io("write")(error))),
            }
        }
        match self.pipe.flush() {
            Ok(done) => {
                if done {
                    self.stuck = None;
                } else {
                    self.stuck.get_or_insert_with(Instant::now);
                }
                Ok(done)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.end(Fault::io("write")(error))),
        }
    }

    /// Gives frames that have come to `take`, a bounded number of them, and returns how many. Questions whether this node
    /// is there are answered here.
    ///
    /// `take` must not keep the peer waiting. A peer that sent what is no frame, or left, is an error; frames before that
    /// have been given to `take`.
    pub fn receive(&mut self, mut take: impl FnMut(&Header, Body<'_>)) -> Result<usize, TransportError> {
        self.alive()?;
        let mut taken = 0;
        while taken < BATCH {
            match self.next(&mut take) {
                Ok(true) => taken += 1,
                Ok(false) => match self.fill() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(fault) => return Err(self.end(fault)),
                },
                Err(fault) => return Err(self.end(fault)),
            }
        }
        self.backlog = taken == BATCH;
        Ok(taken)
    }

    /// Gives the frame at the head of the inbox to `take`; false if it is not there yet.
    fn next(&mut self, take: &mut impl FnMut(&Header, Body<'_>)) -> Result<bool, Fault> {
        let Some((header, rest)) = self.inbox.rest().split_first_chunk::<HEADER>() else { return Ok(false) };
        let header = self.expected(Header::decode(header)?)?;
        let Some(body) = rest.get(..header.length) else { return Ok(false) };
        let body = Body::decode(header.kind, body)?;
        let mut answer = None;
        match body {
            Body::Ping(number) => answer = Some(number),
            Body::Pong(_) => {}
            Body::Bye => return Err(Fault::Bye),
            Body::Refusal(refusal) => return Err(Fault::Refused(refusal)),
            body => take(&header, body),
        }
        self.inbox.consume(HEADER + header.length);
        self.received += 1;
        self.partial = None;
        if let Some(number) = answer {
            match self.send(&Body::Pong(number), header.epoch) {
                // A peer that asks and takes no answers learns of it soon enough.
                Ok(()) | Err(TransportError { fault: Fault::Full { .. }, .. }) => {}
                Err(error) => return Err(error.fault),
            }
        }
        Ok(true)
    }

    fn expected(&self, header: Header) -> Result<Header, Fault> {
        if header.sequence != self.received {
            return Err(Fault::Sequence { found: header.sequence, expected: self.received });
        }
        let first = header.sequence == 0;
        match header.kind {
            Kind::Refusal if !self.open => Ok(header),
            Kind::Hello if first => Ok(header),
            kind @ (Kind::Refusal | Kind::Hello) => Err(Fault::Order { kind, place: "after the beginning" }),
            kind if first || !self.open => Err(Fault::Order { kind, place: "before the hello" }),
            _ => Ok(header),
        }
    }

    /// Reads from the pipe; false when there is nothing now.
    fn fill(&mut self) -> Result<bool, Fault> {
        if std::mem::take(&mut self.emptied) {
            self.nothing_now();
            return Ok(false);
        }
        // Before the handshake a peer gets no more memory than a hello needs.
        let wanted = if self.open { READ } else { HEADER + Kind::Hello.limit() };
        let outcome = self.pipe.read(self.inbox.room(wanted));
        match outcome {
            Ok(0) => Err(Fault::Closed { inside: !self.inbox.rest().is_empty() }),
            Ok(count) => {
                self.inbox.filled(count);
                self.emptied = count < wanted && self.pipe.short_is_all();
                self.heard = Instant::now();
                self.asked = false;
                self.answered = self.open;
                if self.partial.is_none() {
                    self.partial = Some(self.heard);
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.nothing_now();
                Ok(false)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof) =>
            {
                Err(Fault::Closed { inside: !self.inbox.rest().is_empty() })
            }
            Err(error) => Err(Fault::io("read")(error)),
        }
    }

    /// All that had come was read. What is left may be the beginning of a frame that came behind a whole one.
    fn nothing_now(&mut self) {
        let begun = !self.inbox.rest().is_empty();
        self.partial = begun.then(|| self.partial.unwrap_or_else(Instant::now));
    }

    /// Looks at the time: a peer that takes nothing, sends half frames, or nothing at all, is at its end. To be called a few
    /// times within the shortest limit.
    pub fn tick(&mut self, now: Instant, epoch: u64) -> Result<(), TransportError> {
        self.alive()?;
        let since = |begin: Option<Instant>| {
            begin.map_or(Duration::ZERO, |begin| now.saturating_duration_since(begin))
        };
        let Limits { stall, silence, connect, .. } = self.limits;
        // What a pipe kept may have gone on while it was read.
        if self.stuck.is_some() {
            self.flush()?;
        }
        if since(self.stuck) > stall {
            let bytes = self.waiting();
            return Err(self.end(Fault::Stalled { bytes, limit: stall }));
        }
        if since(self.partial) > stall && !self.inbox.rest().is_empty() {
            let have = self.inbox.rest().len();
            return Err(self.end(Fault::Slow { have, limit: stall }));
        }
        if !self.open {
            return Ok(());
        }
        let quiet = now.saturating_duration_since(self.heard);
        // A peer that is still being connected to others does not answer yet.
        let limit = if self.answered { silence } else { silence.max(connect) };
        if quiet > limit {
            return Err(self.end(Fault::Silent { limit }));
        }
        if quiet > silence / 3 && !self.asked {
            self.asked = true;
            return match self.send(&Body::Ping(self.sent), epoch) {
                Err(TransportError { fault: Fault::Full { .. }, .. }) => Ok(()),
                outcome => outcome,
            };
        }
        Ok(())
    }

    /// Says goodbye, as far as that can be done without waiting.
    pub fn leave(&mut self, epoch: u64) {
        if self.alive().is_ok() && self.open {
            let _ = self.send(&Body::Bye, epoch);
        }
        self.ended = true;
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.pipe.fd()
    }

    pub(crate) fn events(&self) -> PollFlags {
        self.pipe.events(self.waiting() > 0)
    }

    pub(crate) fn arm(&mut self) -> bool {
        let writing = self.waiting() > 0;
        !self.backlog && self.pipe.arm(writing)
    }

    pub(crate) fn pending(&self) -> bool {
        self.backlog || self.pipe.pending()
    }
}
