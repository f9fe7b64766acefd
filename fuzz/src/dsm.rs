//! What another host of a distributed shared memory sends.

use crate::expect_clear;
use vnuma_abi_dsm_wire::{Body, Contents, Delta, HEADER, Header, Hello, PAGE_SIZE, diff, encode};

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
