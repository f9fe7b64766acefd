//! Callers that have not said who they are.
//!
//! Anybody who reaches the listener can be one. One thread serves them all, and waits for none of them: one that says nothing
//! costs a descriptor, and [`Limits::hello`] later not even that. When there is room for no more, the one gives way that has
//! waited longest of the party that has most. Who calls from where no node is has half of the places at most: callers without
//! end, from any number of addresses, keep no node of this DSM from coming in.

use crate::{
    error::{Fault, Peer, TransportError},
    lane::{Lane, Limits},
    listener::{Caller, Listener, Party, Place, Stage, unknown},
    shm::ShmPipe,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, Hello, Refusal, WireError};
use vnuma_model::{Budgets, Rate};

/// Most callers at a time.
const MOST: usize = 256;
/// One that is new does not give way yet.
const NEW: Duration = Duration::from_millis(100);
/// Longest wait for callers: other threads dial meanwhile, and cannot end it.
const PAUSE: Duration = Duration::from_millis(1);
/// Calls of one party in the long run, a second. A handshake of TLS costs a signature.
const CALLS: u32 = 256;
/// Calls at once, if there are not more nodes and lanes.
const CALLS_AT_ONCE: u32 = 1024;
/// Failures that are told of one party.
const LINES: Rate = Rate::new(1, 20);
/// Parties of which it is told in the end how often they were limited.
const TOLD: usize = 8;

/// What a party has a budget for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Calls,
    Lines,
}

impl Caller {
    fn fd(&self) -> BorrowedFd<'_> {
        match &self.stage {
            Stage::Socket(socket) => socket.as_fd(),
            Stage::Lane(lane) => lane.fd(),
        }
    }

    fn events(&self) -> PollFlags {
        match &self.stage {
            Stage::Socket(_) => PollFlags::POLLIN,
            Stage::Lane(lane) => lane.events(),
        }
    }

    /// Says that it is about to be waited for. False: it has said something already.
    fn arm(&mut self) -> bool {
        match &mut self.stage {
            Stage::Socket(_) => true,
            Stage::Lane(lane) => lane.arm(),
        }
    }

    /// Takes what it has said. True: it is a node above this one, and has its answer.
    fn hear(&mut self, template: &Hello, limits: Limits) -> Result<bool, TransportError> {
        if let Stage::Socket(socket) = &self.stage {
            match socket.try_clone().and_then(ShmPipe::accepted) {
                Ok(pipe) => {
                    self.stage =
                        Stage::Lane(Box::new(Lane::new(Box::new(pipe), self.address.clone(), limits)));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(Fault::io("accept")(error).of(&unknown(&self.address))),
            }
        }
        let Stage::Lane(lane) = &mut self.stage else { return Ok(false) };
        lane.flush()?;
        let mut theirs = None;
        lane.receive(|_, body| {
            if let Body::Hello(hello) = body {
                theirs = Some(hello);
            }
        })?;
        let Some(theirs) = theirs else { return Ok(false) };
        answer(lane, &theirs, template).map(|()| true)
    }
}

/// Answers a caller: it must be a node above this one, and this DSM's. The number of the lane is the caller's.
fn answer(lane: &mut Lane, theirs: &Hello, template: &Hello) -> Result<(), TransportError> {
    let ours = Hello { peer: theirs.node, lane: theirs.lane, ..*template };
    let refused = match ours.agree(theirs) {
        Err((refusal, error)) => Some((refusal, Fault::Wire(error))),
        Ok(_) if theirs.node <= ours.node => {
            let expected = "above the node that listens";
            let error = WireError::Value { field: "hello.node", value: theirs.node.into(), expected };
            Some((Refusal::Peer, Fault::Wire(error)))
        }
        Ok(_) => None,
    };
    if let Some((refusal, fault)) = refused {
        let _ = lane.send(&Body::Refusal(refusal), 0);
        return Err(lane.end(fault));
    }
    lane.establish(theirs)?;
    lane.send(&Body::Hello(ours), 0)
}

/// What became of a caller.
pub(crate) type Outcome = (Party, Result<Lane, TransportError>);

/// All callers of a node.
pub(crate) struct Callers {
    /// In the order in which they came.
    waiting: Vec<(Instant, Caller)>,
    most: usize,
    /// Where nodes are.
    nodes: BTreeSet<Party>,
    limits: Limits,
    calls: Rate,
    budgets: Budgets<(Party, Work)>,
    begin: Instant,
}

impl Callers {
    /// Those of a mesh with nodes at these places.
    pub fn new<'a>(nodes: impl Iterator<Item = &'a Place>, lanes: u16, limits: Limits) -> Self {
        let nodes: Vec<Party> = nodes.map(Party::at).collect();
        // All nodes may be on one host, and call twice if their first call came too early.
        let wanted = u32::try_from(nodes.len()).unwrap_or(u32::MAX).saturating_mul(2 * u32::from(lanes));
        Self {
            waiting: Vec::new(),
            // Nodes do not push each other out.
            most: MOST.max(wanted as usize),
            nodes: nodes.into_iter().collect(),
            limits,
            calls: Rate::new(CALLS, CALLS_AT_ONCE.max(wanted)),
            budgets: Budgets::default(),
            begin: Instant::now(),
        }
    }

    /// The next one only. It gives way to none.
    pub fn one(limits: Limits) -> Self {
        Self { most: 1, ..Self::new([].into_iter(), 1, limits) }
    }

    /// Waits a moment for callers, and gives those that are done, in one way or the other.
    pub fn serve(&mut self, listener: &Listener, template: &Hello) -> Vec<Outcome> {
        let mut done = Vec::new();
        let (ready, called) = match self.wait(listener) {
            Ok(ready) => ready,
            Err(error) => {
                // Out of memory. It may pass.
                thread::sleep(PAUSE);
                return vec![(Party::Own, Err(Fault::io("poll")(error).of(&unknown("listener"))))];
            }
        };
        let limit = self.limits.hello.min(self.limits.connect);
        let waiting = std::mem::take(&mut self.waiting);
        for ((since, mut caller), ready) in waiting.into_iter().zip(ready) {
            let heard = if ready { caller.hear(template, self.limits) } else { Ok(false) };
            match (heard, caller.stage) {
                (Ok(true), Stage::Lane(lane)) => done.push((caller.party, Ok(*lane))),
                (Ok(_), stage) if since.elapsed() < limit => {
                    self.waiting.push((since, Caller { stage, ..caller }));
                }
                (Ok(_), _) => {
                    done.push((caller.party, Err(Fault::Deadline { limit }.of(&unknown(&caller.address)))));
                }
                (Err(error), _) => done.push((caller.party, Err(error))),
            }
        }
        if called {
            self.take(listener, &mut done);
        }
        done
    }

    /// Takes new callers while there is room for them, or others give way.
    fn take(&mut self, listener: &Listener, done: &mut Vec<Outcome>) {
        while self.has_room() {
            match listener.next(self.limits) {
                Ok(caller) => {
                    let now_ns = self.now_ns();
                    // One that calls without end is not even told why.
                    if self.budgets.spend((caller.party, Work::Calls), self.calls, 1, now_ns).is_err() {
                        continue;
                    }
                    if self.waiting.len() >= self.most
                        && let Some(at) = self.gives_way()
                    {
                        let (_, old) = self.waiting.remove(at);
                        done.push((old.party, Err(Fault::GaveWay.of(&unknown(&old.address)))));
                    }
                    self.waiting.push((Instant::now(), caller));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // There may be too few descriptors, and the listener stays ready.
                    thread::sleep(PAUSE);
                    done.push((Party::Own, Err(Fault::io("accept")(error).of(&unknown("listener")))));
                    return;
                }
            }
        }
    }

    /// Which callers have said something, and is there a new one for which there is room?
    fn wait(&mut self, listener: &Listener) -> io::Result<(Vec<bool>, bool)> {
        let mut ready: Vec<bool> = self.waiting.iter_mut().map(|(_, caller)| !caller.arm()).collect();
        let pause = if ready.contains(&true) { Duration::ZERO } else { PAUSE };
        let of_callers = self.waiting.iter().map(|(_, caller)| PollFd::new(caller.fd(), caller.events()));
        let of_listener = self.has_room().then(|| PollFd::new(listener.fd(), PollFlags::POLLIN));
        let mut polled: Vec<PollFd<'_>> = of_callers.chain(of_listener).collect();
        match poll(&mut polled, PollTimeout::try_from(pause).unwrap_or(PollTimeout::ZERO)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let any = |polled: &PollFd<'_>| polled.any().unwrap_or(true);
        for (ready, polled) in ready.iter_mut().zip(&polled) {
            *ready |= any(polled);
        }
        let called = polled.get(ready.len()).is_some_and(any);
        Ok((ready, called))
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < self.most || self.most > 1 && self.gives_way().is_some()
    }

    /// Which one gives way to one more, if it has had some time.
    fn gives_way(&self) -> Option<usize> {
        let mut counts = BTreeMap::<Party, usize>::new();
        for (_, caller) in &self.waiting {
            *counts.entry(caller.party).or_default() += 1;
        }
        let is_stranger = |party: &Party| !self.nodes.contains(party);
        let strangers: usize =
            counts.iter().filter(|(party, _)| is_stranger(party)).map(|(_, count)| count).sum();
        let candidates = counts.iter().filter(|(party, _)| strangers <= self.most / 2 || is_stranger(party));
        let most = candidates.max_by_key(|(_, count)| **count).map(|(party, _)| *party);
        let first = self.waiting.iter().position(|(_, caller)| Some(caller.party) == most);
        first.filter(|at| self.waiting[*at].0.elapsed() >= NEW)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Tells of a failure, if not too many of this party were told.
    pub fn tell(&mut self, of: Party, error: TransportError, complain: &mut impl FnMut(TransportError)) {
        let now_ns = self.now_ns();
        if self.budgets.spend((of, Work::Lines), LINES, 1, now_ns).is_ok() {
            complain(error);
        }
    }

    /// Tells who was limited, those first that were most often.
    pub fn tell_limited(&self, complain: &mut impl FnMut(TransportError)) {
        let mut limited: Vec<_> = self.budgets.limited().map(|(of, times, _)| (times, *of)).collect();
        limited.sort_unstable_by(|one, other| other.cmp(one));
        for (times, (party, work)) in limited.into_iter().take(TOLD) {
            let what = match work {
                Work::Calls => "calls were not answered, as there were too many",
                Work::Lines => "more failures were not told",
            };
            complain(Fault::Limited { times, what }.of(&Peer {
                node: None,
                lane: 0,
                address: party.to_string(),
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{net::TcpStream, os::unix::net::UnixStream};

    #[test]
    fn a_host_is_one_party_whatever_address_of_its_network_it_calls_from() {
        let of = |text: &str| Party::of(text.parse().expect("an address")).to_string();
        assert_eq!(of("192.0.2.7"), "192.0.2.7");
        assert_eq!(of("::ffff:192.0.2.7"), "192.0.2.7");
        assert_eq!([of("2001:db8::1"), of("2001:db8::ffff:0:0:1")], ["2001:db8::", "2001:db8::"]);
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8::1"));
    }

    fn host(text: &str) -> Party {
        Party::of(text.parse().expect("an address"))
    }

    fn one_of(party: Party) -> Caller {
        let socket = UnixStream::pair().expect("a pair").0;
        Caller { party, address: party.to_string(), stage: Stage::Socket(socket) }
    }

    #[test]
    fn who_has_most_callers_gives_way_and_strangers_do_before_they_take_more_than_half() {
        let place = Place::Tcp(([192, 0, 2, 1], 1).into());
        let (node, a, b) = (host("192.0.2.1"), host("192.0.2.2"), host("192.0.2.3"));
        let gives_way = |parties: &[Party], since: Instant| {
            let mut callers = Callers::new([&place].into_iter(), 1, Limits::default());
            callers.most = parties.len();
            callers.waiting = parties.iter().map(|party| (since, one_of(*party))).collect();
            callers.gives_way()
        };
        let long_ago = Instant::now().checked_sub(2 * NEW).expect("the machine runs longer than that");
        assert_eq!(gives_way(&[a, b, node, node, node, node], long_ago), Some(2));
        assert_eq!(gives_way(&[node, a, node, b, a, node], long_ago), Some(0), "half of them are no node's");
        assert_eq!(gives_way(&[node, node, b, a, a, b, a], long_ago), Some(3), "more than half");
        let parties: Vec<Party> =
            (0..6).map(|net| host(&format!("2001:db8:{net}::"))).chain([node; 5]).collect();
        assert_eq!(
            gives_way(&parties, long_ago).map(|at| parties[at] == node),
            Some(false),
            "each from elsewhere"
        );
        assert_eq!(gives_way(&parties, Instant::now() + NEW), None, "all have just come");
    }

    #[test]
    fn who_calls_without_end_is_answered_so_often_and_it_is_told_once() {
        let listener = Listener::bind(&Place::Tcp(([127, 0, 0, 1], 0).into())).expect("a listener");
        let address = listener.address().expect("an address");
        let mut callers = Callers::new([].into_iter(), 1, Limits::default());
        callers.calls = Rate::new(1, 3);
        let calls: Vec<_> = (0..50).map(|_| TcpStream::connect(address).expect("connected")).collect();
        let begin = Instant::now();
        let told = loop {
            assert!(callers.serve(&listener, &Hello::new(0, 0)).is_empty());
            let mut told = Vec::new();
            callers.tell_limited(&mut |error| told.push(error.to_string()));
            let refused: u64 =
                told.iter().filter_map(|text| text.split(' ').nth(1)?.parse::<u64>().ok()).sum();
            if refused + callers.waiting.len() as u64 == calls.len() as u64 {
                break told;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{told:?}");
        };
        assert!(callers.waiting.len() < 30, "{}", callers.waiting.len());
        assert!(told.len() == 1 && told[0].starts_with("127.0.0.1: "), "{told:?}");
        assert!(told[0].ends_with(" calls were not answered, as there were too many"), "{told:?}");
    }
}
