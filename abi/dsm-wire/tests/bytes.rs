//! The bytes of each version, written down: what was released does not change.

use vnuma_abi_dsm_wire::{
    Access, Body, Contents, Cut, Delta, Entry, Epoch, Grant, HEADER, Header, Hello, Holding, Membership,
    Message, NodeId, NodeSet, Notice, PAGE_SIZE, PageId, Payload, Purpose, Refusal, Request, View, encode,
};

/// A frame with epoch 0x0102 and sequence 3, as hexadecimal digits of its header's first 8 bytes and its body.
#[track_caller]
fn expect(body: &Body<'_>, start: &str, text: &str) {
    let mut frame = Vec::new();
    encode(body, 0x0102, 3, &mut frame);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&frame[..8]), start);
    assert_eq!(hex(&frame[8..24]), "02010000000000000300000000000000");
    assert_eq!(hex(&frame[24..]), text.replace(' ', ""));
    let (header, rest) = frame.split_first_chunk::<HEADER>().expect("a header");
    let header = Header::decode(header).expect("our own");
    assert_eq!((header.epoch, header.sequence, header.length), (0x0102, 3, rest.len()));
    assert_eq!(Body::decode(header.kind, rest).as_ref(), Ok(body));
}

#[test]
fn hello() {
    let hello = Hello {
        version_min: 1,
        version_max: 2,
        node: 3,
        peer: 4,
        lane: 5,
        lanes: 6,
        switches: 0x0809,
        cluster: 0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100,
        incarnation: 7,
        pages: 8,
        page_size: 4096,
        stripe_pages: 512,
    };
    let text = "564e554d4144534d 0100 0200 03 04 0500 0600 0908 000102030405060708090a0b0c0d0e0f \
                0700000000000000 0800000000000000 00100000 00020000";
    expect(&Body::Hello(hello), "3c00000001000000", text);
}

#[test]
fn small_frames() {
    expect(&Body::Refusal(Refusal::Version), "0100000002000000", "01");
    expect(&Body::Refusal(Refusal::Region), "0100000002000000", "05");
    expect(&Body::Refusal(Refusal::Switches), "0100000002000000", "06");
    expect(&Body::Ping(0x0102_0304_0506_0708), "0800000003000000", "0807060504030201");
    expect(&Body::Pong(1), "0800000004000000", "0100000000000000");
    expect(&Body::Bye, "0000000005000000", "");
    expect(&Body::Opaque(b"abc"), "0300000007000000", "616263");
}

fn protocol(message: Message) -> Body<'static> {
    Body::Protocol(message, Contents::None)
}

#[test]
fn messages() {
    let request =
        Request { page: PageId(0x0a0b), requester: NodeId(63), purpose: Purpose::Prefetch, have: 9 };
    let text = "01 0b0a000000000000 3f 02 0900000000000000";
    expect(&protocol(Message::Request(request)), "1300000006000000", text);
    let grant = Grant {
        page: PageId(1),
        to: NodeId(2),
        from: NodeId(3),
        access: Access::Write,
        owner: true,
        migratory: 3,
        before: Some(NodeId(6)),
        version: 5,
        payload: Payload::None,
        copies: NodeSet::EMPTY,
    };
    let text = "02 0100000000000000 02 03 02 01 03 06 0500000000000000 00 0000000000000000";
    expect(&protocol(Message::Grant(grant)), "2000000006000000", text);
    let text = "02 0100000000000000 02 03 02 03 03 06 0500000000000000 00 0000000000000000 1200000000000080";
    let copies = NodeSet::from_bits(1 << 63 | 0b1_0010);
    expect(&protocol(Message::Grant(Grant { copies, ..grant })), "2800000006000000", text);
    let delta = [1, 0, 2, 0, 0xaa, 0xbb, 0xff, 0x0f, 1, 0, 0xcc];
    let contents = Contents::Delta(Delta::decode(&delta).expect("a difference"));
    let grant = Grant {
        payload: Payload::Delta { base: 4 },
        owner: false,
        access: Access::Read,
        before: None,
        ..grant
    };
    let text =
        "02 0100000000000000 02 03 01 00 03 ff 0500000000000000 02 0400000000000000 01000200aabbff0f0100cc";
    expect(&Body::Protocol(Message::Grant(grant), contents), "2b00000006000000", text);
    let grant = Grant { payload: Payload::Page, ..grant };
    let text = "02 0100000000000000 02 03 01 00 03 ff 0500000000000000 01 0000000000000000".to_owned();
    let page = [0x5a; PAGE_SIZE];
    let whole = Body::Protocol(Message::Grant(grant), Contents::Page(&page));
    expect(&whole, "2010000006000000", &(text + &"5a".repeat(PAGE_SIZE)));
    expect(&protocol(Message::Refuse { page: PageId(7) }), "0900000006000000", "03 0700000000000000");
    let notices = vec![
        Notice::Invalidate { page: PageId(1), owner: NodeId(2) },
        Notice::Invalidated { page: PageId(3) },
    ];
    let text = "04 0200 01 0100000000000000 02 02 0300000000000000";
    expect(&protocol(Message::Notices(notices)), "1600000006000000", text);
    let text = "05 0700000000000000 09 0800000000000000";
    expect(
        &protocol(Message::OwnerIs { page: PageId(7), owner: NodeId(9), version: 8 }),
        "1200000006000000",
        text,
    );
    expect(&protocol(Message::Lost { page: PageId(7) }), "0900000006000000", "06 0700000000000000");
}

#[test]
fn messages_about_a_cut() {
    let cut = |cut| protocol(Message::Cut(cut));
    expect(&cut(Cut::End { number: 9 }), "0900000006000000", "0e 0900000000000000");
    expect(&cut(Cut::Kept { number: 9 }), "0900000006000000", "0f 0900000000000000");
    let page = [0xa5; PAGE_SIZE];
    let whole = Body::Protocol(
        Message::Cut(Cut::Page { number: 9, page: PageId(2), version: 3 }),
        Contents::Page(&page),
    );
    let text = "0d 0900000000000000 0200000000000000 0300000000000000".to_owned();
    expect(&whole, "1910000006000000", &(text + &"a5".repeat(PAGE_SIZE)));
}

#[test]
fn messages_about_the_membership() {
    let expect = |message, start: &str, text: &str| {
        expect(&protocol(Message::Membership(message)), start, text);
    };
    let view = View { epoch: Epoch(0x41), members: NodeSet::from_bits(1 << 63 | 5) };
    let numbers = "4100000000000000 0500000000000080";
    expect(Membership::Suspect { node: NodeId(63) }, "0200000006000000", "07 3f");
    expect(Membership::Accept { view, round: 2 }, "1200000006000000", &format!("08 {numbers} 02"));
    expect(Membership::Conflict { view }, "1100000006000000", &format!("09 {numbers}"));
    let pages = vec![Holding { page: PageId(1), owner: true }, Holding { page: PageId(2), owner: false }];
    let text = "0a 4100000000000000 00 0200 0100000000000000 01 0200000000000000 00";
    expect(Membership::Holdings { epoch: Epoch(0x41), last: false, pages }, "1e00000006000000", text);
    let pages = vec![Entry { page: PageId(3), copyset: NodeSet::from_bits(6) }];
    let text = "0b 4100000000000000 01 0100 0300000000000000 0600000000000000";
    expect(Membership::Directory { epoch: Epoch(0x41), last: true, pages }, "1c00000006000000", text);
    expect(Membership::Fenced { view }, "1100000006000000", &format!("0c {numbers}"));
}
