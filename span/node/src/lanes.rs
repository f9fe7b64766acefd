//! The connections of a shard.

use crate::{
    happening::Happening,
    pages::{Contents, Outgoing},
    shared::Shared,
    stats::Stats,
};
use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{self as wire, Body, Delta};
use vnuma_coherence::{Epoch, Frame, Message, NodeId, NodeSet, Payload};
use vnuma_dsm_transport::{Fault, Lane, Ready, TransportError, Waiter};

/// A frame that came, with what came beside it.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub from: NodeId,
    pub frame: Frame,
    pub contents: Contents,
}

/// Frames to a peer share system calls up to so many bytes, a few pages: the first of many should not wait for the last.
const TOGETHER: usize = 16 << 10;

#[derive(Debug)]
pub(crate) struct Peers {
    lanes: Vec<(NodeId, Lane)>,
    waiter: Waiter,
    /// Who has said goodbye.
    left: NodeSet,
}

impl Peers {
    pub fn new(lanes: BTreeMap<u8, Lane>) -> std::io::Result<Self> {
        let lanes = lanes.into_iter().map(|(node, lane)| (NodeId(node), lane)).collect();
        Ok(Self { lanes, waiter: Waiter::new()?, left: NodeSet::EMPTY })
    }

    /// Waits until something comes, or one of `others` can be read. Says which of these can.
    pub fn wait(
        &mut self,
        others: &[BorrowedFd<'_>],
        timeout: Duration,
        spin: Duration,
    ) -> std::io::Result<Ready> {
        let mut lanes: Vec<&mut Lane> = self.lanes.iter_mut().map(|(_, lane)| lane).collect();
        self.waiter.wait(&mut lanes, others, timeout, spin)
    }

    /// Should faults be taken, which make new requests?
    pub fn have_room(&self) -> bool {
        self.lanes.iter().all(|(_, lane)| lane.has_room())
    }

    /// Does the lane to a node take more?
    pub fn has_room(&self, to: NodeId) -> bool {
        self.lanes.iter().find(|(node, _)| *node == to).is_none_or(|(_, lane)| lane.has_room())
    }

    /// Takes what has come of the lanes at these places, and gives on what waits there.
    pub fn receive(&mut self, places: &[usize], inbox: &mut Vec<Incoming>, shared: &Shared) {
        let mut ended = Vec::new();
        for place in places {
            let Some((node, lane)) = self.lanes.get_mut(*place) else { continue };
            let from = *node;
            let outcome = lane.flush().and_then(|_| {
                lane.receive(|header, body| {
                    // Nothing else comes after the handshake but what the lane itself answers.
                    let Body::Protocol(message, contents) = body else { return };
                    let frame = Frame { epoch: Epoch(header.epoch), message };
                    let contents = match contents {
                        wire::Contents::None => Contents::None,
                        wire::Contents::Page(page) => Contents::Page(Box::new(*page)),
                        wire::Contents::Delta(delta) => Contents::Delta(delta.bytes().to_vec()),
                    };
                    inbox.push(Incoming { from, frame, contents });
                })
            });
            if let Err(error) = outcome {
                ended.push((from, error));
            }
        }
        for (node, error) in ended {
            self.ended(node, &error, shared);
        }
    }

    /// Looks at the time.
    pub fn tick(&mut self, epoch: u64, shared: &Shared) {
        let now = Instant::now();
        self.each(shared, |lane| lane.tick(now, epoch));
    }

    /// Does something with each lane. One that fails has ended.
    fn each(&mut self, shared: &Shared, mut act: impl FnMut(&mut Lane) -> Result<(), TransportError>) {
        let failed = |(node, lane): &mut (NodeId, Lane)| Some((*node, act(lane).err()?));
        let ended: Vec<_> = self.lanes.iter_mut().filter_map(failed).collect();
        ended.into_iter().for_each(|(node, error)| self.ended(node, &error, shared));
    }

    fn ended(&mut self, node: NodeId, error: &TransportError, shared: &Shared) {
        self.lanes.retain(|(other, _)| *other != node);
        // What this node itself ended, or does not need any more, is no news.
        if shared.is_leaving() || shared.is_halted() {
            return;
        }
        if matches!(error.fault, Fault::Bye) {
            self.left.insert(node);
            return shared.tell(Happening::PeerLeft { peer: node.0 });
        }
        shared.tell(Happening::PeerEnded { peer: node.0, reason: error.to_string() });
        shared.suspect(node.0);
    }

    /// Threads wait: who has left does not answer what was asked of it before.
    pub fn suspect_who_left(&self, shared: &Shared) {
        self.left.iter().for_each(|node| shared.suspect(node.0));
    }

    /// Ends a connection.
    pub fn cut(&mut self, node: NodeId) {
        self.lanes.retain(|(other, _)| *other != node);
    }

    /// Ends the connections to all but these, after what is queued was given on.
    pub fn keep(&mut self, members: NodeSet) {
        for (node, lane) in &mut self.lanes {
            if !members.contains(*node) {
                let _ = lane.flush();
            }
        }
        self.lanes.retain(|(node, _)| members.contains(*node));
    }

    /// Gives on what the events that were looked at had to send.
    pub fn give_on(&mut self, shared: &Shared) {
        self.each(shared, |lane| lane.give_on(1));
    }

    /// Says goodbye to all.
    pub fn leave(&mut self, epoch: u64) {
        for (_, lane) in &mut self.lanes {
            let _ = lane.give_on(1);
            lane.leave(epoch);
        }
        self.lanes.clear();
    }

    /// Sends a frame, with contents if it is a grant with a payload.
    pub fn send(
        &mut self,
        to: NodeId,
        frame: Frame,
        contents: wire::Contents<'_>,
        stats: &mut Stats,
        shared: &Shared,
    ) {
        let Some((_, lane)) = self.lanes.iter_mut().find(|(node, _)| *node == to) else {
            // Who has left is not there for what is still needed. Others are suspected already.
            if self.left.contains(to) {
                shared.suspect(to.0);
            }
            return;
        };
        let posted = lane.post(&Body::Protocol(frame.message, contents), frame.epoch.0);
        let outcome = posted.and_then(|bytes| {
            stats.messages += 1;
            stats.bytes += bytes as u64;
            shared.count(bytes);
            lane.give_on(TOGETHER)
        });
        if let Err(error) = outcome {
            self.ended(to, &error, shared);
        }
    }

    /// Sends a grant with what [`crate::pages::Pages::read`] has read.
    pub fn send_page(
        &mut self,
        to: NodeId,
        mut frame: Frame,
        payload: Payload,
        outgoing: &Outgoing,
        stats: &mut Stats,
        shared: &Shared,
    ) {
        if let Message::Grant(grant) = &mut frame.message {
            grant.payload = payload;
        }
        let contents = match payload {
            Payload::Delta { .. } => match Delta::decode(&outgoing.delta) {
                Ok(delta) => wire::Contents::Delta(delta),
                // `diff` makes what can be decoded.
                Err(_) => return,
            },
            Payload::Page | Payload::None => wire::Contents::Page(&outgoing.page),
        };
        match contents {
            wire::Contents::Delta(_) => stats.deltas += 1,
            _ => stats.whole_pages += 1,
        }
        self.send(to, frame, contents, stats, shared);
    }
}
