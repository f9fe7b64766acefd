//! Messages of the protocol as messages of the wire, and back.

use vnuma_abi_dsm_wire as wire;
use vnuma_coherence::{
    CutMessage, Entry, Epoch, Grant, Holding, Membership, Message, NodeId, NodeSet, Notice, PageId, Request,
    View,
};

/// A message for the wire; several where one would be longer than the wire permits.
pub fn to_wire(message: &Message, mut send: impl FnMut(wire::Message)) {
    match message {
        Message::Request(request) => send(wire::Message::Request(request_out(*request))),
        Message::Grant(grant) => send(wire::Message::Grant(grant_out(*grant))),
        Message::Refuse { page } => send(wire::Message::Refuse { page: page.0 }),
        Message::Notice(notice) => send(wire::Message::Notices(vec![notice_out(*notice)])),
        Message::Notices(notices) => {
            for part in notices.chunks(wire::NOTICE_LIMIT) {
                send(wire::Message::Notices(part.iter().map(|notice| notice_out(*notice)).collect()));
            }
        }
        Message::OwnerIs { page, owner, version } => {
            send(wire::Message::OwnerIs { page: page.0, owner: owner.0, version: *version });
        }
        Message::Lost { page } => send(wire::Message::Lost { page: page.0 }),
        Message::Membership(message) => {
            membership_out(message, |message| send(wire::Message::Membership(message)));
        }
        Message::Cut(message) => send(wire::Message::Cut(cut_out(*message))),
    }
}

/// What came, as the protocol takes it.
pub fn from_wire(message: wire::Message) -> Message {
    match message {
        wire::Message::Request(request) => Message::Request(Request {
            page: PageId(request.page),
            requester: NodeId(request.requester),
            kind: request.purpose,
            have: request.have,
        }),
        wire::Message::Grant(grant) => Message::Grant(grant_in(grant)),
        wire::Message::Refuse { page } => Message::Refuse { page: PageId(page) },
        wire::Message::Notices(notices) => match notices.as_slice() {
            [notice] => Message::Notice(notice_in(*notice)),
            notices => Message::Notices(notices.iter().map(|notice| notice_in(*notice)).collect()),
        },
        wire::Message::OwnerIs { page, owner, version } => {
            Message::OwnerIs { page: PageId(page), owner: NodeId(owner), version }
        }
        wire::Message::Lost { page } => Message::Lost { page: PageId(page) },
        wire::Message::Membership(message) => Message::Membership(membership_in(message)),
        wire::Message::Cut(message) => Message::Cut(cut_in(message)),
    }
}

fn cut_out(message: CutMessage) -> wire::Cut {
    match message {
        CutMessage::Page { number, page, version } => wire::Cut::Page { number, page: page.0, version },
        CutMessage::End { number } => wire::Cut::End { number },
        CutMessage::Kept { number } => wire::Cut::Kept { number },
    }
}

fn cut_in(message: wire::Cut) -> CutMessage {
    match message {
        wire::Cut::Page { number, page, version } => CutMessage::Page { number, page: PageId(page), version },
        wire::Cut::End { number } => CutMessage::End { number },
        wire::Cut::Kept { number } => CutMessage::Kept { number },
    }
}

fn request_out(request: Request) -> wire::Request {
    wire::Request {
        page: request.page.0,
        requester: request.requester.0,
        purpose: request.kind,
        have: request.have,
    }
}

fn grant_out(grant: Grant) -> wire::Grant {
    wire::Grant {
        page: grant.page.0,
        to: grant.to.0,
        from: grant.from.0,
        access: grant.access,
        owner: grant.owner,
        migratory: grant.migratory,
        before: grant.before.map(|node| node.0),
        version: grant.version,
        payload: grant.payload,
        copies: grant.copies.bits(),
    }
}

fn grant_in(grant: wire::Grant) -> Grant {
    Grant {
        page: PageId(grant.page),
        to: NodeId(grant.to),
        from: NodeId(grant.from),
        access: grant.access,
        owner: grant.owner,
        migratory: grant.migratory,
        before: grant.before.map(NodeId),
        version: grant.version,
        payload: grant.payload,
        copies: NodeSet::from_bits(grant.copies),
    }
}

fn notice_out(notice: Notice) -> wire::Notice {
    match notice {
        Notice::Invalidate { page, owner } => wire::Notice::Invalidate { page: page.0, owner: owner.0 },
        Notice::Invalidated { page } => wire::Notice::Invalidated { page: page.0 },
    }
}

fn notice_in(notice: wire::Notice) -> Notice {
    match notice {
        wire::Notice::Invalidate { page, owner } => {
            Notice::Invalidate { page: PageId(page), owner: NodeId(owner) }
        }
        wire::Notice::Invalidated { page } => Notice::Invalidated { page: PageId(page) },
    }
}

fn view_out(view: View) -> wire::View {
    wire::View { epoch: view.epoch.0, members: view.members.bits() }
}

fn view_in(view: wire::View) -> View {
    View { epoch: Epoch(view.epoch), members: NodeSet::from_bits(view.members) }
}

/// Parts of a list that are short enough, and whether each is the last of all; an empty list has one part.
fn parts<T>(list: &[T], last: bool) -> impl Iterator<Item = (&[T], bool)> {
    let count = list.len().div_ceil(wire::PAGES_LIMIT).max(1);
    (0..count).map(move |index| {
        let end = list.len().min((index + 1) * wire::PAGES_LIMIT);
        (&list[index * wire::PAGES_LIMIT..end], last && index + 1 == count)
    })
}

fn membership_out(message: &Membership, mut send: impl FnMut(wire::Membership)) {
    match message {
        Membership::Suspect { node } => send(wire::Membership::Suspect { node: node.0 }),
        Membership::Accept { view, round } => {
            send(wire::Membership::Accept { view: view_out(*view), round: *round });
        }
        Membership::Conflict { view } => send(wire::Membership::Conflict { view: view_out(*view) }),
        Membership::Holdings { epoch, pages, last } => {
            for (part, last) in parts(pages, *last) {
                let out = |holding: &Holding| wire::Holding { page: holding.page.0, owner: holding.owner };
                let pages = part.iter().map(out).collect();
                send(wire::Membership::Holdings { epoch: epoch.0, last, pages });
            }
        }
        Membership::Directory { epoch, pages, last } => {
            for (part, last) in parts(pages, *last) {
                let out = |entry: &Entry| wire::Entry { page: entry.page.0, copyset: entry.copyset.bits() };
                let pages = part.iter().map(out).collect();
                send(wire::Membership::Directory { epoch: epoch.0, last, pages });
            }
        }
        Membership::Fenced { view } => send(wire::Membership::Fenced { view: view_out(*view) }),
    }
}

fn membership_in(message: wire::Membership) -> Membership {
    match message {
        wire::Membership::Suspect { node } => Membership::Suspect { node: NodeId(node) },
        wire::Membership::Accept { view, round } => Membership::Accept { view: view_in(view), round },
        wire::Membership::Conflict { view } => Membership::Conflict { view: view_in(view) },
        wire::Membership::Holdings { epoch, last, pages } => {
            let back = |holding: wire::Holding| Holding { page: PageId(holding.page), owner: holding.owner };
            let pages = pages.into_iter().map(back).collect();
            Membership::Holdings { epoch: Epoch(epoch), pages, last }
        }
        wire::Membership::Directory { epoch, last, pages } => {
            let back = |entry: wire::Entry| Entry {
                page: PageId(entry.page),
                copyset: NodeSet::from_bits(entry.copyset),
            };
            let pages = pages.into_iter().map(back).collect();
            Membership::Directory { epoch: Epoch(epoch), pages, last }
        }
        wire::Membership::Fenced { view } => Membership::Fenced { view: view_in(view) },
    }
}

/// Bytes of the body of a message on the wire.
pub fn length(message: &wire::Message, contents: &wire::Contents<'_>) -> usize {
    let of_notice = |notice: &wire::Notice| match notice {
        wire::Notice::Invalidate { .. } => 10,
        wire::Notice::Invalidated { .. } => 9,
    };
    let body = match message {
        wire::Message::Request(_) => 19,
        wire::Message::Grant(grant) => 32 + if grant.copies == 0 { 0 } else { 8 },
        wire::Message::Refuse { .. } | wire::Message::Lost { .. } => 9,
        wire::Message::Notices(notices) => 3 + notices.iter().map(of_notice).sum::<usize>(),
        wire::Message::OwnerIs { .. } => 18,
        wire::Message::Membership(message) => match message {
            wire::Membership::Suspect { .. } => 2,
            wire::Membership::Accept { .. } => 18,
            wire::Membership::Conflict { .. } | wire::Membership::Fenced { .. } => 17,
            wire::Membership::Holdings { pages, .. } => 12 + 9 * pages.len(),
            wire::Membership::Directory { pages, .. } => 12 + 16 * pages.len(),
        },
        wire::Message::Cut(wire::Cut::Page { .. }) => 25,
        wire::Message::Cut(wire::Cut::End { .. } | wire::Cut::Kept { .. }) => 9,
    };
    body + match contents {
        wire::Contents::None => 0,
        wire::Contents::Page(page) => page.len(),
        wire::Contents::Delta(delta) => delta.bytes().len(),
    }
}

/// The pages that a message names, each with its field.
pub fn pages_of(message: &Message) -> impl Iterator<Item = (&'static str, PageId)> + '_ {
    let of_notice = |notice: &Notice| match *notice {
        Notice::Invalidate { page, .. } | Notice::Invalidated { page } => ("notice.page", page),
    };
    let (one, notices): (_, &[Notice]) = match message {
        Message::Request(request) => (Some(("request.page", request.page)), &[]),
        Message::Grant(grant) => (Some(("grant.page", grant.page)), &[]),
        Message::Refuse { page } => (Some(("refuse.page", *page)), &[]),
        Message::OwnerIs { page, .. } => (Some(("owner-is.page", *page)), &[]),
        Message::Lost { page } => (Some(("lost.page", *page)), &[]),
        Message::Cut(CutMessage::Page { page, .. }) => (Some(("cut.page", *page)), &[]),
        Message::Cut(CutMessage::End { .. } | CutMessage::Kept { .. }) => (None, &[]),
        Message::Notice(notice) => (None, std::slice::from_ref(notice)),
        Message::Notices(notices) => (None, notices),
        // Lists of pages are checked where they are used.
        Message::Membership(_) => (None, &[]),
    };
    one.into_iter().chain(notices.iter().map(of_notice))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vnuma_coherence::{Access, Kind, Payload};

    fn page() -> impl Strategy<Value = PageId> {
        any::<u64>().prop_map(PageId)
    }

    fn node() -> impl Strategy<Value = NodeId> {
        (0..64_u8).prop_map(NodeId)
    }

    fn notice() -> impl Strategy<Value = Notice> {
        prop_oneof![
            (page(), node()).prop_map(|(page, owner)| Notice::Invalidate { page, owner }),
            page().prop_map(|page| Notice::Invalidated { page }),
        ]
    }

    fn request() -> impl Strategy<Value = Request> {
        let kind = prop_oneof![Just(Kind::Read), Just(Kind::Write), Just(Kind::Prefetch)];
        (page(), node(), kind, any::<u64>()).prop_map(|(page, requester, kind, have)| Request {
            page,
            requester,
            kind,
            have,
        })
    }

    fn grant() -> impl Strategy<Value = Grant> {
        let access = prop_oneof![Just(Access::None), Just(Access::Read), Just(Access::Write)];
        let payload = prop_oneof![
            Just(Payload::None),
            Just(Payload::Page),
            any::<u64>().prop_map(|base| Payload::Delta { base })
        ];
        let before = proptest::option::of(node());
        let copies = prop_oneof![Just(0), any::<u64>()].prop_map(NodeSet::from_bits);
        let rest = (any::<bool>(), any::<u8>(), any::<u64>(), before, copies);
        (page(), node(), node(), access, payload, rest).prop_map(
            |(page, to, from, access, payload, (owner, migratory, version, before, copies))| Grant {
                page,
                to,
                access,
                owner,
                from,
                version,
                payload,
                migratory,
                before,
                copies,
            },
        )
    }

    fn view() -> impl Strategy<Value = View> {
        any::<(u64, u64)>()
            .prop_map(|(epoch, members)| View { epoch: Epoch(epoch), members: NodeSet::from_bits(members) })
    }

    fn membership() -> impl Strategy<Value = Membership> {
        let holding = (page(), any::<bool>()).prop_map(|(page, owner)| Holding { page, owner });
        let entry = (page(), any::<u64>())
            .prop_map(|(page, copyset)| Entry { page, copyset: NodeSet::from_bits(copyset) });
        let limit = wire::PAGES_LIMIT;
        prop_oneof![
            node().prop_map(|node| Membership::Suspect { node }),
            (view(), 1..3_u8).prop_map(|(view, round)| Membership::Accept { view, round }),
            view().prop_map(|view| Membership::Conflict { view }),
            (any::<(u64, bool)>(), proptest::collection::vec(holding, 0..=limit))
                .prop_map(|((epoch, last), pages)| Membership::Holdings { epoch: Epoch(epoch), pages, last }),
            (any::<(u64, bool)>(), proptest::collection::vec(entry, 0..=limit)).prop_map(
                |((epoch, last), pages)| Membership::Directory { epoch: Epoch(epoch), pages, last }
            ),
            view().prop_map(|view| Membership::Fenced { view }),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        prop_oneof![
            request().prop_map(Message::Request),
            grant().prop_map(Message::Grant),
            page().prop_map(|page| Message::Refuse { page }),
            notice().prop_map(Message::Notice),
            proptest::collection::vec(notice(), 2..100).prop_map(Message::Notices),
            (page(), node(), any::<u64>()).prop_map(|(page, owner, version)| Message::OwnerIs {
                page,
                owner,
                version
            }),
            page().prop_map(|page| Message::Lost { page }),
            any::<u64>().prop_map(|number| Message::Cut(CutMessage::End { number })),
            any::<u64>().prop_map(|number| Message::Cut(CutMessage::Kept { number })),
            membership().prop_map(Message::Membership),
        ]
    }

    proptest! {
        #[test]
        fn every_message_goes_there_and_back(message in message()) {
            let mut sent = Vec::new();
            to_wire(&message, |part| sent.push(part));
            prop_assert_eq!(sent.len(), 1);
            if !matches!(&message, Message::Grant(grant) if grant.payload != Payload::None) {
                let contents = wire::Contents::None;
                let mut frame = Vec::new();
                wire::encode(&wire::Body::Protocol(sent[0].clone(), contents), 0, 0, &mut frame);
                prop_assert_eq!(length(&sent[0], &contents), frame.len() - wire::HEADER);
            }
            prop_assert_eq!(from_wire(sent.remove(0)), message);
        }
    }

    #[test]
    fn a_page_of_a_cut_goes_there_and_back() {
        let message = Message::Cut(CutMessage::Page { number: 3, page: PageId(4), version: 5 });
        let mut sent = Vec::new();
        to_wire(&message, |part| sent.push(part));
        let contents = wire::Contents::Page(&[7; wire::PAGE_SIZE]);
        let mut frame = Vec::new();
        wire::encode(&wire::Body::Protocol(sent[0].clone(), contents), 0, 0, &mut frame);
        assert_eq!(length(&sent[0], &contents), frame.len() - wire::HEADER);
        assert_eq!(from_wire(sent.remove(0)), message);
    }

    #[test]
    fn lists_that_are_too_long_are_cut() {
        let notices = (0..2500).map(|page| Notice::Invalidated { page: PageId(page) });
        let mut lengths = Vec::new();
        to_wire(&Message::Notices(notices.collect()), |part| match part {
            wire::Message::Notices(part) => lengths.push(part.len()),
            other => panic!("{other:?}"),
        });
        assert_eq!(lengths, [1024, 1024, 452]);
        let pages = (0..1024).map(|page| Holding { page: PageId(page), owner: false }).collect();
        let message = Membership::Holdings { epoch: Epoch(1), pages, last: true };
        let mut ends = Vec::new();
        to_wire(&Message::Membership(message), |part| match part {
            wire::Message::Membership(wire::Membership::Holdings { pages, last, .. }) => {
                ends.push((pages.len(), last));
            }
            other => panic!("{other:?}"),
        });
        assert_eq!(ends, [(512, false), (512, true)]);
    }
}
