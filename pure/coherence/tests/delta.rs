//! Differences between contents: encoded and applied again, and refused if they are damaged.

use proptest::prelude::*;
use vnuma_coherence::delta::{DeltaError, apply, encode};

#[test]
fn a_small_change_is_a_small_difference() {
    let base = vec![7; 4096];
    let mut page = base.clone();
    page[0] = 1;
    page[4095] = 2;
    let mut delta = Vec::new();
    assert!(encode(&base, &page, 4096, &mut delta));
    assert_eq!(delta, [0, 0, 1, 0, 1, 0xff, 0x0f, 1, 0, 2]);
    // Equal contents have an empty difference.
    delta.clear();
    assert!(encode(&base, &base, 0, &mut delta) && delta.is_empty());
}

#[test]
fn changes_that_are_close_share_a_run() {
    let base = vec![0; 64];
    let mut page = base.clone();
    (page[10], page[14], page[40]) = (1, 1, 1);
    let mut delta = Vec::new();
    assert!(encode(&base, &page, 64, &mut delta));
    assert_eq!(delta.len(), 4 + 5 + 4 + 1);
}

#[test]
fn a_difference_beyond_the_limit_is_not_made() {
    let mut delta = vec![9];
    assert!(!encode(&[0; 64], &[1; 64], 67, &mut delta));
    assert_eq!(delta, [9]);
    assert!(encode(&[0; 64], &[1; 64], 68, &mut delta));
}

#[test]
fn damaged_differences_are_refused_and_change_nothing() {
    let mut page = [5; 16];
    let cases: [(&[u8], DeltaError); 6] = [
        (&[0], DeltaError::Truncated),
        (&[0, 0, 2, 0, 1], DeltaError::Truncated),
        (&[0, 0, 0, 0], DeltaError::BadRun(0)),
        (&[15, 0, 2, 0, 1, 1], DeltaError::BadRun(0)),
        (&[4, 0, 1, 0, 1, 4, 0, 1, 0, 1], DeltaError::BadRun(5)),
        (&[4, 0, 1, 0, 1, 2, 0], DeltaError::Truncated),
    ];
    for (delta, error) in cases {
        assert_eq!(apply(delta, &mut page), Err(error), "{delta:?}");
        assert_eq!(page, [5; 16]);
    }
}

proptest! {
    #[test]
    fn what_is_encoded_is_applied(
        base in prop::collection::vec(0..4u8, 512),
        changes in prop::collection::vec((0..512usize, any::<u8>()), 0..40),
    ) {
        let mut page = base.clone();
        changes.iter().for_each(|(at, byte)| page[*at] = *byte);
        let mut delta = Vec::new();
        prop_assert!(encode(&base, &page, usize::MAX, &mut delta));
        prop_assert!(delta.len() <= changes.len() * 5 + changes.len() * 8);
        let mut result = base.clone();
        prop_assert_eq!(apply(&delta, &mut result), Ok(()));
        prop_assert_eq!(result, page);
    }

    #[test]
    fn anything_is_applied_or_refused(delta in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut page = [3; 256];
        if apply(&delta, &mut page).is_err() {
            prop_assert_eq!(page, [3; 256]);
        }
    }
}
