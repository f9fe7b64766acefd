//! Producer and consumer, word count, Pi.

use super::{Shared, WORDS, expect, fits, mix};
use std::{collections::BTreeMap, sync::atomic::Ordering::SeqCst};

/// Messages that a ring has room for, and words of a message.
const SLOTS: usize = 32;
const MESSAGE: usize = 64;

/// What a message says, word by word.
fn message(from: usize, number: usize, word: usize) -> u64 {
    mix((from << 40 | number << 8 | word) as u64)
}

/// Node `n` sends to the node behind it. A ring has a page with the number of messages that were written, one with the number
/// of those that were read, and pages with the messages.
pub fn producer_consumer(shared: &Shared, count: usize) -> Result<(), String> {
    const PAGES: usize = 2 + SLOTS * MESSAGE / WORDS;
    fits(count, 1 << 30, "messages")?;
    let ring = |from: usize| (1 + from * PAGES) * WORDS;
    let slot = |from: usize, number: usize| ring(from) + 2 * WORDS + number % SLOTS * MESSAGE;
    let from = (shared.node + shared.nodes - 1) % shared.nodes;
    let (ours, theirs) = (ring(shared.node), ring(from));
    let (mut sent, mut received) = (0, 0);
    while sent < count || received < count {
        let mut busy = false;
        while sent < count && sent < shared.load(ours + WORDS) as usize + SLOTS {
            let at = slot(shared.node, sent);
            (0..MESSAGE).for_each(|word| shared.store(at + word, message(shared.node, sent, word)));
            sent += 1;
            shared.store(ours, sent as u64);
            busy = true;
        }
        while received < count && received < shared.load(theirs) as usize {
            let at = slot(from, received);
            (0..MESSAGE).try_for_each(|word| {
                expect("a word of a message", shared.load(at + word), message(from, received, word))
            })?;
            received += 1;
            shared.store(theirs + WORDS, received as u64);
            busy = true;
        }
        if !busy {
            shared.rest();
        }
    }
    Ok(())
}

/// Bytes that words do not cross.
const BLOCK: usize = 1024;
/// Different words of the text.
const VOCABULARY: u64 = 200;

/// A word of the vocabulary: 2 to 9 letters.
fn spelling(number: u64) -> Vec<u8> {
    let random = mix(number);
    // The number makes it unlike all others.
    let tail = [b'a' + (number / 26) as u8, b'a' + (number % 26) as u8];
    let letters = (0..random % 8).map(|at| b'a' + (mix(random + at) % 26) as u8);
    letters.chain(tail).collect()
}

/// A block of the text.
fn block(number: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(BLOCK);
    for index in 0.. {
        let word = spelling(mix((number << 16 | index) as u64) % VOCABULARY);
        if text.len() + word.len() + 1 > BLOCK {
            break;
        }
        text.extend(word);
        text.push(b' ');
    }
    text.resize(BLOCK, b' ');
    text
}

fn count_words(text: &[u8], counts: &mut BTreeMap<Vec<u8>, u64>) {
    for word in text.split(|byte| *byte == b' ').filter(|word| !word.is_empty()) {
        *counts.entry(word.to_vec()).or_default() += 1;
    }
}

/// Node 0 writes a text of so many KiB, as if it read a file. Each node counts the words of its part, and adds that to the
/// counters of all.
pub fn word_count(shared: &Shared, blocks: usize) -> Result<(), String> {
    const WORDS_OF_BLOCK: usize = BLOCK / 8;
    let (text, counters) = (2 * WORDS, WORDS);
    fits(blocks, 1022 * 4, "KiB")?;
    if shared.node == 0 {
        for number in 0..blocks {
            for (index, bytes) in block(number).as_chunks::<8>().0.iter().enumerate() {
                shared.store(text + number * WORDS_OF_BLOCK + index, u64::from_le_bytes(*bytes));
            }
        }
    }
    shared.barrier();
    let mut counts = BTreeMap::new();
    for number in shared.part(blocks) {
        let words = (0..WORDS_OF_BLOCK).map(|index| shared.load(text + number * WORDS_OF_BLOCK + index));
        count_words(&words.flat_map(u64::to_le_bytes).collect::<Vec<_>>(), &mut counts);
    }
    for number in 0..VOCABULARY {
        let count = counts.get(&spelling(number)).copied().unwrap_or(0);
        shared.word(counters + number as usize).fetch_add(count, SeqCst);
    }
    shared.barrier();
    let mut right = BTreeMap::new();
    (0..blocks).for_each(|number| count_words(&block(number), &mut right));
    (0..VOCABULARY).try_for_each(|number| {
        let expected = right.get(&spelling(number)).copied().unwrap_or(0);
        expect("how often a word occurs", shared.load(counters + number as usize), expected)
    })
}

/// How many of these points of a square lie within the circle in it.
fn inside(points: std::ops::Range<usize>) -> u64 {
    let coordinate = |random: u64| u128::from(random >> 32);
    let hit = |point: &usize| {
        let random = mix(*point as u64);
        let (x, y) = (coordinate(random), coordinate(mix(random)));
        x * x + y * y < 1 << 64
    };
    points.filter(hit).count() as u64
}

/// Each node adds what it has counted to one counter.
pub fn pi(shared: &Shared, points: usize) -> Result<(), String> {
    fits(points, 1 << 40, "points")?;
    shared.word(WORDS).fetch_add(inside(shared.part(points)), SeqCst);
    shared.barrier();
    expect("the number of points in the circle", shared.load(WORDS), inside(0..points))
}
