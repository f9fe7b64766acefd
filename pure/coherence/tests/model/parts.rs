//! Parts of the protocol that a model must reach: one that never sends a prefetch says nothing about prefetches.

use crate::{common::Packet, system::World};
use std::collections::VecDeque;
use vnuma_coherence::{Access, Message, Notice, PageId, Payload, Purpose};

/// A part, and what shows that it was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// An owner answers a requester though the manager is a third node.
    Direct,
    /// A node asks another one than the manager.
    Hint,
    /// A grant to write without contents.
    Upgrade,
    /// A reader gets the page for itself.
    Migratory,
    /// A node that does not own a page tells who does.
    Told,
    /// A difference.
    Delta,
    /// A request ahead of a reader.
    Prefetch,
    /// A prefetch is refused.
    Refused,
    /// Several notices share a message.
    Batch,
    /// A prefetched copy is on its way, and its invalidation behind it.
    PrefetchInvalidated,
    /// A page is on its way to a writer, and so is the acknowledgement of a copy, which may come before it.
    DirectAck,
}

impl Part {
    /// The name of its property.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "reached: an answer past the manager",
            Self::Hint => "reached: a request past the manager",
            Self::Upgrade => "reached: an upgrade without data",
            Self::Migratory => "reached: a page handed over at a read",
            Self::Told => "reached: a former owner that is told",
            Self::Delta => "reached: a difference",
            Self::Prefetch => "reached: a prefetch",
            Self::Refused => "reached: a refused prefetch",
            Self::Batch => "reached: notices that share a message",
            Self::PrefetchInvalidated => "reached: an invalidation of a prefetched copy",
            Self::DirectAck => "reached: an acknowledgement to the next owner",
        }
    }

    /// True if a message of it is on its way.
    pub fn is_used(self, world: &World, homes: &[u8]) -> bool {
        let count = world.cluster.count();
        if self == Self::PrefetchInvalidated {
            let queues = world.cluster.network.iter().enumerate();
            return queues.into_iter().any(|(pair, queue)| invalidated(world, pair % count, queue));
        }
        if self == Self::DirectAck {
            return (0..count).any(|to| acknowledged(world, to));
        }
        let network = world.cluster.network.iter().enumerate();
        network
            .flat_map(|(pair, queue)| queue.iter().map(move |packet| (pair, packet)))
            .any(|(pair, packet)| self.shows(world, homes, [pair / count, pair % count], packet))
    }

    fn shows(self, world: &World, homes: &[u8], [from, to]: [usize; 2], packet: &Packet) -> bool {
        let manages = |page: u64, node: usize| usize::from(homes[page as usize]) == node;
        match (self, &packet.frame.message) {
            (Self::Direct, Message::Grant(grant)) => {
                !manages(grant.page.0, from) && !manages(grant.page.0, to)
            }
            (Self::Hint, Message::Request(request)) => {
                usize::from(request.requester.0) == from && !manages(request.page.0, to)
            }
            (Self::Upgrade, Message::Grant(grant)) => {
                grant.access == Access::Write && grant.payload == Payload::None && grant.version > 1
            }
            (Self::Migratory, Message::Grant(grant)) => {
                let waits = world.threads[usize::from(grant.to.0)].waits;
                grant.owner && waits.is_some_and(|access| access.page as u64 == grant.page.0 && !access.write)
            }
            (Self::Told, Message::OwnerIs { owner, .. }) => usize::from(owner.0) != from,
            (Self::Delta, Message::Grant(grant)) => matches!(grant.payload, Payload::Delta { .. }),
            (Self::Prefetch, Message::Request(request)) => request.purpose == Purpose::Prefetch,
            (Self::Refused, Message::Refuse { .. }) => true,
            (Self::Batch, Message::Notices(notices)) => notices.len() > 1,
            _ => false,
        }
    }
}

/// Both a page and an acknowledgement for it are on their way to this node.
fn acknowledged(world: &World, to: usize) -> bool {
    let count = world.cluster.count();
    let coming = || (0..count).flat_map(|from| &world.cluster.network[from * count + to]);
    let granted = |packet: &Packet| match &packet.frame.message {
        Message::Grant(grant) if !grant.copies.is_empty() => Some(grant.page),
        _ => None,
    };
    let acknowledges = |packet: &Packet, page: PageId| {
        let named = |notice: &Notice| *notice == Notice::Invalidated { page };
        match &packet.frame.message {
            Message::Notices(notices) => notices.iter().any(named),
            _ => false,
        }
    };
    let mut pages = coming().filter_map(granted);
    pages.any(|page| coming().any(|packet| acknowledges(packet, page)))
}

/// A copy that no thread waits for is on its way, and its invalidation behind it.
fn invalidated(world: &World, to: usize, queue: &VecDeque<Packet>) -> bool {
    let waits = world.threads[to].waits.map(|access| PageId(access.page as u64));
    let invalidates = |packet: &Packet, of: PageId| {
        let named = |notice: &Notice| matches!(notice, Notice::Invalidate { page, .. } if *page == of);
        match &packet.frame.message {
            Message::Notices(notices) => notices.iter().any(named),
            _ => false,
        }
    };
    queue.iter().enumerate().any(|(place, packet)| match &packet.frame.message {
        Message::Grant(grant) if grant.access == Access::Read && waits != Some(grant.page) => {
            queue.iter().skip(place + 1).any(|packet| invalidates(packet, grant.page))
        }
        _ => false,
    })
}
