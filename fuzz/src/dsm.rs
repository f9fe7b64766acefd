//! What another host of a distributed shared memory sends.

use crate::expect_clear;
use vnuma_abi_dsm_wire::{Body, Contents, Delta, HEADER, Header, Hello, Kind, PAGE_SIZE, diff, encode};
use vnuma_coherence::{Epoch, Event, Frame, Managers, Message, Node, NodeId, NodeSet, Options, PageId};

/// Frames in a row, as a connection reads them: what was decoded encodes to the same bytes, a length is within its limit, a
/// difference stays inside a page.
pub fn wire(input: &[u8]) {
    let mut rest = input;
    while let Some((bytes, after)) = rest.split_first_chunk::<HEADER>() {
        let header = match Header::decode(bytes) {
            Ok(header) => header,
            Err(error) => return expect_clear(&error.to_string()),
        };
        assert!(header.length <= header.kind.limit());
        let Some((body, after)) = after.split_at_checked(header.length) else { return };
        match Body::decode(header.kind, body) {
            Ok(decoded) => accepted(&decoded, &header, [bytes, body]),
            Err(error) => return expect_clear(&error.to_string()),
        }
        rest = after;
    }
}

fn accepted(body: &Body<'_>, header: &Header, bytes: [&[u8]; 2]) {
    let mut frame = Vec::new();
    encode(body, header.epoch, header.sequence, &mut frame);
    assert_eq!(frame, bytes.concat());
    match body {
        Body::Hello(hello) => {
            if let Err((_, error)) = Hello::new(0, 1).agree(hello) {
                expect_clear(&error.to_string());
            }
        }
        Body::Protocol(_, Contents::Delta(delta)) => applied(delta),
        _ => {}
    }
}

/// Applying it twice changes nothing more, and the difference to what was there before leads to the same content.
fn applied(delta: &Delta<'_>) {
    let old = [0xa5; PAGE_SIZE];
    let mut new = old;
    delta.apply(&mut new);
    let mut again = new;
    delta.apply(&mut again);
    assert!(again == new);
    let mut bytes = Vec::new();
    if diff(&old, &new, &mut bytes) {
        let mut page = old;
        Delta::decode(&bytes).expect("our own difference").apply(&mut page);
        assert!(page == new);
    }
}

/// Nodes of the DSM, and their pages.
const NODES: u8 = 5;
const PAGES: u64 = 8;

/// A member that says what it likes, to a node whose threads fault and whose shell suspects others. The node sends nothing to
/// itself or to nobody, and keeps no more than its pages and the others need.
///
/// The first byte says which node and protocol. Then for each event: a byte with a number (the low three bits) and what happens;
/// for a frame its epoch (a byte), the length of its body (two bytes), and the body; else a page (a byte).
pub fn node(input: &[u8]) {
    let Some((first, mut rest)) = input.split_first() else { return };
    let own = first % NODES;
    let options = if first & 0x80 == 0 { Options::default() } else { Options::ivy() };
    let managers = Managers::new(&[(3, NodeId(0)), (3, NodeId(1)), (2, NodeId(4))]).expect("ranges");
    let mut node = Node::new(NodeId(own), NodeSet::first(NODES.into()), managers, options);
    let (mut commands, mut now) = (Vec::new(), 0);
    while let Some(event) = next_event(&mut rest) {
        commands.clear();
        now += 1000;
        node.step(now, event, &mut commands);
        for (to, message) in commands.iter().filter_map(vnuma_coherence::Command::sends) {
            assert!(to.0 < NODES && to.0 != own, "to node {}: {message:?}", to.0);
        }
    }
    let kept = format!("{node:?}").len();
    assert!(kept < 64 << 10, "{kept} bytes as text");
}

/// The next event, or none if the input is over or is what a connection refuses.
fn next_event(rest: &mut &[u8]) -> Option<Event> {
    let (head, after) = rest.split_first_chunk::<2>()?;
    let node = NodeId(head[0] & 7);
    let page = PageId((head[1] % (PAGES as u8 + 1)).into());
    *rest = after;
    Some(match head[0] >> 3 {
        27 => Event::Progress { page },
        28 => Event::Fault { page, write: false },
        29 => Event::Fault { page, write: true },
        30 => Event::Suspect { node },
        31 if head[1] & 1 == 0 => Event::Flush,
        31 => Event::Timer { page },
        _ => {
            let (length, after) = after.split_first_chunk::<2>()?;
            let (body, after) = after.split_at_checked(u16::from_le_bytes(*length).into())?;
            *rest = after;
            let Ok(Body::Protocol(message, _)) = Body::decode(Kind::Protocol, body) else { return None };
            if matches!(message, Message::Cut(_)) {
                return Some(Event::Flush);
            }
            Event::Receive { from: node, frame: Frame { epoch: Epoch(head[1].into()), message } }
        }
    })
}
