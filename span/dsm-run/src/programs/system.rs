//! What makes an operating system slow on a distributed memory (GiantVM, section 5.1): metadata under locks that share a page,
//! and blocks that all nodes read or write.

use super::{Access, Scope, Shared, Task, WORDS, expect, fits, mix};
use std::{collections::VecDeque, sync::atomic::Ordering::SeqCst};

/// The first page: a lock for the map, a lock and a counter for each directory, and the map, all in one page.
const LOCK: usize = WORDS;
const DIRECTORIES: usize = 4;
const DIRECTORY: usize = WORDS + 8;
const MAP: usize = WORDS + 64;
const INODES: usize = 1024;
/// Words of an inode: 128 bytes.
const INODE: usize = 16;
const TABLE: usize = 2 * WORDS;
/// Files that a node keeps.
const FILES: usize = 32;

fn seal(number: usize, owner: usize, sequence: usize) -> u64 {
    mix((number << 40 | owner << 32 | sequence) as u64)
}

/// Takes a free inode.
fn allocate(shared: &Shared) -> Option<usize> {
    shared.locked(LOCK, || {
        (0..INODES / 64).find_map(|index| {
            let bits = shared.load(MAP + index);
            let free = (!bits).trailing_zeros() as usize;
            (free < 64).then(|| {
                shared.store(MAP + index, bits | 1 << free);
                index * 64 + free
            })
        })
    })
}

fn release(shared: &Shared, number: usize) {
    shared.locked(LOCK, || {
        let word = MAP + number / 64;
        shared.store(word, shared.load(word) & !(1 << (number % 64)));
    });
}

/// A name comes to, or goes from, a directory.
fn link(shared: &Shared, number: usize, change: i64) {
    let directory = DIRECTORY + number % DIRECTORIES * 2;
    shared.locked(directory, || {
        shared.store(directory + 1, shared.load(directory + 1).wrapping_add_signed(change));
    });
}

/// Each node makes files, and removes its oldest when it has too many.
pub fn metadata(shared: &Shared, operations: usize) -> Result<(), String> {
    fits(operations, 1 << 30, "files")?;
    let mut files = VecDeque::new();
    for sequence in 0..operations {
        let number = allocate(shared).ok_or("there is no free inode, although some must be left")?;
        let inode = TABLE + number * INODE;
        expect("the seal of a free inode", shared.load(inode + 2), 0)?;
        let fields = [shared.node, sequence].map(|field| field as u64);
        (0..2).for_each(|field| shared.store(inode + field, fields[field]));
        shared.store(inode + 2, seal(number, shared.node, sequence));
        link(shared, number, 1);
        files.push_back((number, sequence));
        if files.len() > FILES
            && let Some((number, sequence)) = files.pop_front()
        {
            let inode = TABLE + number * INODE;
            expect("the seal of an inode", shared.load(inode + 2), seal(number, shared.node, sequence))?;
            link(shared, number, -1);
            (0..3).for_each(|field| shared.store(inode + field, 0));
            release(shared, number);
        }
    }
    shared.barrier();
    let left = (operations.min(FILES) * shared.nodes) as u64;
    let used = |number: &usize| shared.load(MAP + number / 64) & 1 << (number % 64) != 0;
    expect("the number of used inodes", (0..INODES).filter(used).count() as u64, left)?;
    let names = (0..DIRECTORIES).map(|directory| shared.load(DIRECTORY + directory * 2 + 1)).sum();
    expect("the number of names", names, left)?;
    (0..INODES).filter(used).try_for_each(|number| {
        let field = |field: usize| shared.load(TABLE + number * INODE + field);
        expect("the seal of an inode", field(2), seal(number, field(0) as usize, field(1) as usize))
    })
}

/// Pages of a barrier and of all blocks.
pub fn memory_pages(task: &Task, nodes: usize) -> usize {
    let blocks = if task.scope == Scope::Local { nodes } else { 1 };
    (1 + blocks * task.block.pages()).max(nodes)
}

/// A word of a block after a write: by whom, and in which round.
fn mark(node: usize, round: usize, word: usize) -> u64 {
    (node as u64) << 56 ^ (round as u64) << 32 ^ mix(word as u64) >> 32
}

/// Goes through a block so many times. Returns the bytes.
pub fn memory(shared: &Shared, task: &Task, rounds: usize) -> Result<u64, String> {
    fits(rounds, 1 << 20, "rounds")?;
    let (words, block) =
        (task.block.pages() * WORDS, if task.scope == Scope::Local { shared.node } else { 0 });
    let begin = WORDS + block * words;
    match task.access {
        Access::Read => {
            if task.scope == Scope::Local || shared.node == 0 {
                (0..words).for_each(|word| shared.store(begin + word, mark(block, 0, word)));
            }
            shared.barrier();
            let right = (0..words).fold(0, |sum: u64, word| sum.wrapping_add(mark(block, 0, word)));
            for _ in 0..rounds {
                let sum = (0..words).fold(0, |sum: u64, word| sum.wrapping_add(shared.load(begin + word)));
                expect("the sum of a block", sum, right)?;
            }
        }
        Access::Write => {
            for round in 0..rounds {
                (0..words).for_each(|word| {
                    shared.word(begin + word).store(mark(shared.node, round, word), SeqCst);
                });
            }
            shared.barrier();
            // The last writer wrote in its last round.
            for word in 0..words {
                let found = shared.load(begin + word);
                let writer = if task.scope == Scope::Local { shared.node } else { (found >> 56) as usize };
                let writer = writer.min(shared.nodes - 1);
                expect("a word of a block", found, mark(writer, rounds - 1, word))?;
            }
        }
    }
    Ok((rounds * words * 8) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::Block;

    #[test]
    fn marks_tell_nodes_rounds_and_words_apart() {
        let all: std::collections::HashSet<u64> = (0..16)
            .flat_map(|node| (0..16).map(move |round| (node, round)))
            .flat_map(|(node, round)| (0..64).map(move |word| mark(node, round, word)))
            .collect();
        assert_eq!(all.len(), 16 * 16 * 64);
        assert_eq!(mark(3, 5, 9) >> 56, 3);
        assert_eq!(Block::Large.pages() * WORDS * 8, 4 << 20);
    }
}
