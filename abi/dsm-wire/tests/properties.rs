//! Any bytes are decoded or refused, and what was decoded encodes to the same bytes.

use proptest::prelude::*;
use vnuma_abi_dsm_wire::{
    Access, BODY_LIMIT, Body, Contents, Cut, DELTA_LIMIT, Delta, EPOCH_MOST, Entry, Epoch, Grant, HEADER,
    Header, Hello, Holding, Kind, MIGRATORY_MOST, Membership, Message, NOTICE_LIMIT, NodeId, NodeSet, Notice,
    PAGE_SIZE, PAGES_LIMIT, PageId, Payload, Purpose, RUN_LIMIT, Refusal, Request, VERSION_MAX, VERSION_MOST,
    View, WireError, diff, encode,
};

fn round_trip(body: &Body<'_>) {
    let mut frame = Vec::new();
    encode(body, 7, 8, &mut frame);
    let (header, rest) = frame.split_first_chunk::<HEADER>().expect("a header");
    let header = Header::decode(header).expect("our own header");
    assert_eq!((header.epoch, header.sequence, header.length), (7, 8, rest.len()));
    assert_eq!(Body::decode(header.kind, rest).expect("our own body"), *body);
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::None), Just(Access::Read), Just(Access::Write)]
}

fn purpose() -> impl Strategy<Value = Purpose> {
    prop_oneof![Just(Purpose::Read), Just(Purpose::Write), Just(Purpose::Prefetch)]
}

fn page() -> impl Strategy<Value = PageId> {
    any::<u64>().prop_map(PageId)
}

fn node() -> impl Strategy<Value = NodeId> {
    (0..64_u8).prop_map(NodeId)
}

fn nodes() -> impl Strategy<Value = NodeSet> {
    any::<u64>().prop_map(NodeSet::from_bits)
}

fn notice() -> impl Strategy<Value = Notice> {
    let invalidate = (page(), node()).prop_map(|(page, owner)| Notice::Invalidate { page, owner });
    prop_oneof![invalidate, page().prop_map(|page| Notice::Invalidated { page })]
}

fn epoch() -> impl Strategy<Value = Epoch> {
    prop_oneof![0..=EPOCH_MOST, Just(EPOCH_MOST)].prop_map(Epoch)
}

fn version() -> impl Strategy<Value = u64> {
    prop_oneof![0..=VERSION_MOST, Just(VERSION_MOST)]
}

fn membership() -> impl Strategy<Value = Membership> {
    let view = || (epoch(), nodes()).prop_map(|(epoch, members)| View { epoch, members });
    let holding = (page(), any::<bool>()).prop_map(|(page, owner)| Holding { page, owner });
    let entry = (page(), nodes()).prop_map(|(page, copyset)| Entry { page, copyset });
    let list = |most| 0..=most;
    let holdings = ((epoch(), any::<bool>()), proptest::collection::vec(holding, list(PAGES_LIMIT)));
    let directory = ((epoch(), any::<bool>()), proptest::collection::vec(entry, list(PAGES_LIMIT)));
    prop_oneof![
        node().prop_map(|node| Membership::Suspect { node }),
        (view(), 1..3_u8).prop_map(|(view, round)| Membership::Accept { view, round }),
        view().prop_map(|view| Membership::Conflict { view }),
        holdings.prop_map(|((epoch, last), pages)| Membership::Holdings { epoch, last, pages }),
        directory.prop_map(|((epoch, last), pages)| Membership::Directory { epoch, last, pages }),
        view().prop_map(|view| Membership::Fenced { view }),
    ]
}

fn plain() -> impl Strategy<Value = Message> {
    let request = (page(), node(), purpose(), version()).prop_map(|(page, requester, purpose, have)| {
        Message::Request(Request { page, requester, purpose, have })
    });
    let notices = proptest::collection::vec(notice(), 1..40).prop_map(Message::Notices);
    let owner = (page(), version(), node()).prop_map(|(page, version, owner)| Message::OwnerIs {
        page,
        owner,
        version,
    });
    let refuse = page().prop_map(|page| Message::Refuse { page });
    let lost = page().prop_map(|page| Message::Lost { page });
    let cut = any::<(u64, bool)>()
        .prop_map(|(number, end)| Message::Cut(if end { Cut::End { number } } else { Cut::Kept { number } }));
    prop_oneof![request, notices, owner, refuse, lost, cut, membership().prop_map(Message::Membership)]
}

fn grant() -> impl Strategy<Value = Grant> {
    let before = proptest::option::of(node());
    let copies = prop_oneof![Just(NodeSet::EMPTY), nodes()];
    let nodes = (node(), node(), before, copies);
    (page(), nodes, access(), any::<bool>(), 0..=MIGRATORY_MOST, version()).prop_map(
        |(page, (to, from, before, copies), access, owner, migratory, version)| Grant {
            page,
            to,
            from,
            access,
            owner,
            migratory,
            before,
            version,
            payload: Payload::None,
            copies,
        },
    )
}

/// A page, and another one that differs here and there.
fn pair() -> impl Strategy<Value = ([u8; PAGE_SIZE], [u8; PAGE_SIZE])> {
    let changes = proptest::collection::vec((0..PAGE_SIZE, 1..200_usize, any::<u8>()), 0..30);
    (any::<u8>(), changes).prop_map(|(fill, changes)| {
        let old = [fill; PAGE_SIZE];
        let mut new = old;
        for (start, len, byte) in changes {
            let end = (start + len).min(PAGE_SIZE);
            new[start..end].fill(byte);
        }
        (old, new)
    })
}

proptest! {
    #[test]
    fn pages_of_a_cut_come_back(number: u64, page in page(), version in version(), (_, content) in pair()) {
        let message = Message::Cut(Cut::Page { number, page, version });
        round_trip(&Body::Protocol(message, Contents::Page(&content)));
    }

    #[test]
    fn messages_come_back(message in plain()) {
        round_trip(&Body::Protocol(message, Contents::None));
    }

    #[test]
    fn grants_come_back_with_their_contents(grant in grant(), (old, new) in pair(), base in version()) {
        round_trip(&Body::Protocol(Message::Grant(grant), Contents::None));
        let whole = Grant { payload: Payload::Page, ..grant };
        round_trip(&Body::Protocol(Message::Grant(whole), Contents::Page(&new)));
        let mut bytes = Vec::new();
        if diff(&old, &new, &mut bytes) {
            let delta = Delta::decode(&bytes).expect("our own difference");
            let part = Grant { payload: Payload::Delta { base }, ..grant };
            round_trip(&Body::Protocol(Message::Grant(part), Contents::Delta(delta)));
        }
    }

    #[test]
    fn a_difference_turns_one_content_into_the_other((old, new) in pair()) {
        let mut bytes = vec![1, 2, 3];
        if diff(&old, &new, &mut bytes) {
            let delta = Delta::decode(&bytes[3..]).expect("our own difference");
            prop_assert!(delta.runs().count() <= RUN_LIMIT);
            let mut page = old;
            delta.apply(&mut page);
            prop_assert!(page == new);
        } else {
            let changed = old.iter().zip(&new).filter(|(old, new)| old != new).count();
            prop_assert!(bytes == [1, 2, 3] && changed > DELTA_LIMIT / 9, "{} bytes differ", changed);
        }
    }

    #[test]
    fn any_header_is_within_its_limit(bytes: [u8; HEADER], kind in 0..9_u8, length in 0..2 * BODY_LIMIT as u32) {
        let mut likely = bytes;
        likely[..4].copy_from_slice(&length.to_le_bytes());
        likely[4..8].copy_from_slice(&[kind, 0, 0, 0]);
        for bytes in [bytes, likely] {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.length <= header.kind.limit() && header.kind.limit() <= BODY_LIMIT);
            }
        }
    }

    #[test]
    fn any_body_is_refused_or_comes_back(bytes in proptest::collection::vec(any::<u8>(), 0..200), tag in 0..17_u8) {
        for kind in [Kind::Hello, Kind::Refusal, Kind::Ping, Kind::Pong, Kind::Bye, Kind::Protocol, Kind::Opaque] {
            let mut likely = bytes.clone();
            if let Some(first) = likely.first_mut() {
                *first = tag;
            }
            for bytes in [&bytes, &likely] {
                if let Ok(body) = Body::decode(kind, bytes) {
                    let mut frame = Vec::new();
                    encode(&body, 0, 0, &mut frame);
                    prop_assert_eq!(&frame[HEADER..], &bytes[..]);
                }
            }
        }
    }

    #[test]
    fn a_cut_or_longer_message_is_refused(message in plain(), cut in 0..60_usize) {
        let mut frame = Vec::new();
        encode(&Body::Protocol(message, Contents::None), 0, 0, &mut frame);
        let body = &frame[HEADER..];
        if cut < body.len() {
            let error = Body::decode(Kind::Protocol, &body[..cut]).expect_err("cut");
            prop_assert!(matches!(error, WireError::Short { .. }), "{}", error);
        }
        let longer = [body, &[0]].concat();
        let error = Body::decode(Kind::Protocol, &longer).expect_err("longer");
        prop_assert_eq!(error, WireError::Trailing { field: "message", extra: 1 });
    }
}

#[test]
fn a_page_that_changed_all_over_is_no_difference() {
    let mut bytes = Vec::new();
    assert!(!diff(&[0; PAGE_SIZE], &[1; PAGE_SIZE], &mut bytes) && bytes.is_empty());
    assert!(diff(&[0; PAGE_SIZE], &[0; PAGE_SIZE], &mut bytes) && bytes.is_empty());
}

#[test]
fn differences_that_reach_outside_or_overlap_are_refused() {
    let refusal = |bytes: &[u8]| Delta::decode(bytes).expect_err("refused").to_string();
    let run = |offset: u16, length: u16| {
        let mut bytes = [offset.to_le_bytes(), length.to_le_bytes()].concat();
        bytes.resize(4 + usize::from(length), 0);
        bytes
    };
    let offset = "is not behind the run before it and inside a page";
    let length = "is not at least 1 and inside a page";
    assert_eq!(refusal(&run(4096, 1)), format!("delta.offset: 0x1000 {offset}"));
    assert_eq!(refusal(&run(4095, 2)), format!("delta.length: 0x2 {length}"));
    assert_eq!(refusal(&run(5, 0)), format!("delta.length: 0x0 {length}"));
    assert_eq!(refusal(&[run(5, 3), run(7, 1)].concat()), format!("delta.offset: 0x7 {offset}"));
    assert_eq!(refusal(&[run(5, 3), run(8, 1)].concat()), format!("delta.offset: 0x8 {offset}"));
    assert_eq!(refusal(&run(5, 3)[..6]), "delta.bytes: 2 bytes are left, and 3 are needed");
    assert_eq!(refusal(&vec![0; DELTA_LIMIT + 1]), "delta: 2049, and at most 2048 are allowed");
}

#[test]
fn limits_are_those_of_the_header() {
    let refusal = |kind: u8, length: u32, reserved: u8| {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4] = kind;
        bytes[6] = reserved;
        Header::decode(&bytes).map(|header| header.length).map_err(|error| error.to_string())
    };
    let above =
        |length: u32, limit: u32| Err(format!("header.length: {length}, and at most {limit} are allowed"));
    for (kind, limit) in [(1, 60), (2, 1), (3, 8), (4, 8), (5, 0), (6, 10243), (7, 1 << 20)] {
        assert_eq!(refusal(kind, limit, 0), Ok(limit as usize));
        assert_eq!(refusal(kind, limit + 1, 0), above(limit + 1, limit));
        assert_eq!(refusal(kind, u32::MAX, 0), above(u32::MAX, limit));
    }
    assert_eq!(refusal(0, 0, 0), Err("header.kind: 0x0 is not a kind (1 to 7)".to_owned()));
    assert_eq!(refusal(8, 0, 0), Err("header.kind: 0x8 is not a kind (1 to 7)".to_owned()));
    assert_eq!(refusal(5, 0, 1), Err("header.reserved: 0x100 is not 0".to_owned()));
    let most = Message::Notices(vec![Notice::Invalidate { page: PageId(0), owner: NodeId(0) }; NOTICE_LIMIT]);
    round_trip(&Body::Protocol(most, Contents::None));
    let count = ((NOTICE_LIMIT + 1) as u16).to_le_bytes();
    let error = Body::decode(Kind::Protocol, &[4, count[0], count[1]]).expect_err("too many");
    assert_eq!(error.to_string(), "notices.count: 1025, and at most 1024 are allowed");
    let error = Body::decode(Kind::Protocol, &[4, 0, 0]).expect_err("none");
    assert_eq!(error.to_string(), "notices.count: 0x0 is not at least 1");
}

#[test]
fn fields_outside_of_their_range_are_named() {
    let refusal = |bytes: &[u8]| Body::decode(Kind::Protocol, bytes).expect_err("refused").to_string();
    let with = |mut bytes: Vec<u8>, index: usize, value: u8| {
        bytes[index] = value;
        bytes
    };
    let request = [&[1][..], &[0; 18]].concat();
    let grant = [&[2][..], &[0; 31]].concat();
    assert_eq!(refusal(&with(request.clone(), 9, 64)), "request.requester: 0x40 is not below 64");
    assert_eq!(refusal(&with(request, 10, 3)), "request.purpose: 0x3 is not 0 to 2");
    assert_eq!(refusal(&with(grant.clone(), 9, 64)), "grant.to: 0x40 is not below 64");
    assert_eq!(refusal(&with(grant.clone(), 10, 64)), "grant.from: 0x40 is not below 64");
    assert_eq!(refusal(&with(grant.clone(), 11, 3)), "grant.access: 0x3 is not 0 to 2");
    assert_eq!(refusal(&with(grant.clone(), 12, 4)), "grant.owner: 0x4 is not 0 to 3");
    let copies = with([&grant[..], &[0; 8]].concat(), 12, 3);
    assert_eq!(refusal(&copies), "grant.copies: 0x0 is not at least one node");
    assert_eq!(refusal(&copies[..32]), "grant.copies: 0 bytes are left, and 8 are needed");
    assert_eq!(refusal(&with(grant.clone(), 13, 4)), "grant.migratory: 0x4 is not 0 to 3");
    assert_eq!(refusal(&with(grant.clone(), 14, 64)), "grant.before: 0x40 is not below 64, or 255");
    assert_eq!(refusal(&with(grant.clone(), 23, 3)), "grant.payload: 0x3 is not 0 to 2");
    assert_eq!(refusal(&with(grant.clone(), 24, 1)), "grant.base: 0x1 is not 0 without a delta");
    let short = "grant.contents: 0 bytes are left, and 4096 are needed";
    assert_eq!(refusal(&with(grant, 23, 1)), short);
    assert_eq!(refusal(&[0]), "message: 0x0 is not a message (1 to 15)");
    assert_eq!(refusal(&[16]), "message: 0x10 is not a message (1 to 15)");
    let owner_is = [&[5][..], &[0; 8], &[64], &[0; 8]].concat();
    assert_eq!(refusal(&owner_is), "owner-is.owner: 0x40 is not below 64");
    // One above the limit.
    let far = [&[1][..], &[0; 6], &[0x40]].concat();
    let above = |start: &[u8], rest: usize| refusal(&[start, &far, &vec![0; rest]].concat());
    let versions = [
        (above(&[&[1][..], &[0; 10]].concat(), 0), "request.have"),
        (above(&[&[2][..], &[0; 14]].concat(), 9), "grant.version"),
        (above(&[&[2][..], &[0; 22], &[2]].concat(), 0), "grant.base"),
        (above(&[&[5][..], &[0; 9]].concat(), 0), "owner-is.version"),
        (above(&[&[13][..], &[0; 16]].concat(), PAGE_SIZE), "cut.version"),
    ];
    for (text, field) in versions {
        assert_eq!(text, format!("{field}: 0x4000000000000001 is not at most 2^62"));
    }
    let epochs =
        [(8, 9, "accept"), (9, 8, "conflict"), (10, 3, "holdings"), (11, 3, "directory"), (12, 8, "fenced")];
    for (number, rest, name) in epochs {
        let text = refusal(&[&[number][..], &[1, 0, 0, 0, 0, 0, 0, 1], &vec![0; rest]].concat());
        assert_eq!(text, format!("{name}.epoch: 0x100000000000001 is not at most 2^56"));
    }
    assert_eq!(refusal(&[7, 64]), "suspect.node: 0x40 is not below 64");
    assert_eq!(refusal(&[&[8][..], &[0; 16], &[3]].concat()), "accept.round: 0x3 is not 1 or 2");
    assert_eq!(refusal(&[&[10][..], &[0; 8], &[2]].concat()), "holdings.last: 0x2 is not 0 or 1");
    let much = |number: u8| [&[number][..], &[0; 9], &513_u16.to_le_bytes()].concat();
    assert_eq!(refusal(&much(10)), "holdings.count: 513, and at most 512 are allowed");
    assert_eq!(refusal(&much(11)), "directory.count: 513, and at most 512 are allowed");
    assert_eq!(refusal(&[]), "message: 0 bytes are left, and 1 are needed");
    assert_eq!(refusal(&[&[4, 1, 0, 1][..], &[0; 8], &[64]].concat()), "notice.owner: 0x40 is not below 64");
    assert_eq!(refusal(&[4, 1, 0, 3]), "notice: 0x3 is not a notice (1 or 2)");
}

#[test]
fn only_hosts_that_belong_together_agree() {
    let lanes = Hello { lanes: 2, lane: 1, ..Hello::new(1, 2) };
    let ours = Hello { cluster: 5 << 64 | 6, pages: 100, switches: 0x80, ..lanes };
    let theirs = Hello { node: 2, peer: 1, ..ours };
    assert_eq!(ours.agree(&theirs), Ok(VERSION_MAX));
    let refusal =
        |theirs: Hello| ours.agree(&theirs).map_err(|(refusal, error)| (refusal, error.to_string()));
    let expect = |theirs: Hello, reason: Refusal, text: &str| {
        assert_eq!(refusal(theirs), Err((reason, text.to_owned())));
    };
    let text = "the peer has";
    let field = |name: &str, theirs: u64, ours: u64| {
        format!("hello.{name}: {text} {theirs:#x}, and here it is {ours:#x}")
    };
    expect(Hello { peer: 3, ..theirs }, Refusal::Peer, &field("peer", 3, 1));
    expect(Hello { node: 3, ..theirs }, Refusal::Peer, &field("node", 3, 2));
    expect(Hello { cluster: 5 << 64 | 7, ..theirs }, Refusal::Cluster, &field("cluster", 7, 6));
    expect(Hello { cluster: 6, ..theirs }, Refusal::Cluster, &field("cluster", 0, 5));
    expect(Hello { lanes: 3, ..theirs }, Refusal::Lane, &field("lanes", 3, 2));
    expect(Hello { lane: 0, ..theirs }, Refusal::Lane, &field("lane", 0, 1));
    expect(Hello { pages: 99, ..theirs }, Refusal::Region, &field("pages", 99, 100));
    expect(Hello { page_size: 8192, ..theirs }, Refusal::Region, &field("page_size", 8192, 4096));
    expect(Hello { stripe_pages: 9, ..theirs }, Refusal::Region, &field("stripe_pages", 9, 1));
    expect(Hello { switches: 0x81, ..theirs }, Refusal::Switches, &field("switches", 0x81, 0x80));
    let newer = Hello { version_min: 2, version_max: 3, ..theirs };
    expect(newer, Refusal::Version, &field("version_max", 3, 1));
    assert_eq!(ours.agree(&Hello { version_max: 9, ..theirs }), Ok(1), "the highest that both know");
    let older = Hello { version_min: 0, version_max: 0, ..theirs };
    expect(older, Refusal::Version, &field("version_max", 0, 1));
}

#[test]
fn a_hello_that_makes_no_sense_is_refused() {
    let mut frame = Vec::new();
    encode(&Body::Hello(Hello::new(1, 2)), 0, 0, &mut frame);
    let refusal = |index: usize, value: u8| {
        let mut body = frame[HEADER..].to_vec();
        body[index] = value;
        Body::decode(Kind::Hello, &body).expect_err("refused").to_string()
    };
    assert_eq!(refusal(0, b'X'), "hello.magic: 0x584e554d4144534d is not VNUMADSM");
    assert_eq!(refusal(8, 2), "hello.version_min: 0x2 is not at most hello.version_max");
    assert_eq!(refusal(12, 64), "hello.node: 0x40 is not below 64");
    assert_eq!(refusal(13, 64), "hello.peer: 0x40 is not below 64");
    assert_eq!(refusal(14, 1), "hello.lane: 0x1 is not below hello.lanes");
}
