//! Counting, false sharing, PageRank, matrices.

use super::{Shared, WORDS, expect, fits, mix};

pub fn lock_counter(shared: &Shared, rounds: usize) -> Result<(), String> {
    let (lock, counter) = (WORDS, 2 * WORDS);
    for _ in 0..rounds {
        shared.locked(lock, || shared.store(counter, shared.load(counter) + 1));
    }
    shared.barrier();
    expect("the counter", shared.load(counter), (rounds * shared.nodes) as u64)
}

pub fn false_sharing(shared: &Shared, rounds: usize) -> Result<(), String> {
    let own = WORDS + shared.node;
    for _ in 0..rounds {
        shared.store(own, shared.load(own) + 1);
    }
    shared.barrier();
    (0..shared.nodes).try_for_each(|node| expect("a counter", shared.load(WORDS + node), rounds as u64))
}

/// Edges into each vertex.
const DEGREE: usize = 8;
const ITERATIONS: usize = 10;
/// The iterations that second copies have.
const PROGRESS: usize = 500 * WORDS;

/// The next rank of a vertex.
fn rank(vertex: usize, count: usize, last: impl Fn(usize) -> f64) -> f64 {
    let from = |edge| mix((vertex * DEGREE + edge) as u64) as usize % count;
    let sum: f64 = (0..DEGREE).map(|edge| last(from(edge))).sum();
    0.15 / count as f64 + 0.85 * sum / DEGREE as f64
}

pub fn pagerank(shared: &Shared, count: usize) -> Result<(), String> {
    fits(count, 200 * WORDS, "vertices")?;
    let start = |half: usize| (1 + half * 200) * WORDS;
    let begin = 1.0 / count as f64;
    // Above 0 when this goes on from second copies.
    let first = shared.load(PROGRESS) as usize;
    if first == 0 {
        shared.part(count).for_each(|vertex| shared.store(start(0) + vertex, begin.to_bits()));
    }
    // No node may come to the next cut and change it before all have read where to begin.
    shared.barrier();
    for iteration in first..ITERATIONS {
        let (from, to) = (start(iteration % 2), start((iteration + 1) % 2));
        for vertex in shared.part(count) {
            let next = rank(vertex, count, |other| f64::from_bits(shared.load(from + other)));
            shared.store(to + vertex, next.to_bits());
        }
        shared.cut_point(PROGRESS, iteration as u64 + 1)?;
    }
    let mut right = vec![begin; count];
    for _ in 0..ITERATIONS {
        right = (0..count).map(|vertex| rank(vertex, count, |other| right[other])).collect();
    }
    let found = |vertex: usize| shared.load(start(ITERATIONS % 2) + vertex);
    (0..count).try_for_each(|vertex| expect("a rank", found(vertex), right[vertex].to_bits()))
}

pub fn matrix(shared: &Shared, side: usize) -> Result<(), String> {
    fits(side, (300 * WORDS).isqrt(), "rows")?;
    let cell = |matrix: usize, row: usize, column: usize| (1 + matrix * 300) * WORDS + row * side + column;
    let value = |matrix: usize, row: usize, column: usize| mix(cell(matrix, row, column) as u64);
    for row in shared.part(side) {
        for column in 0..side {
            (0..2).for_each(|matrix| shared.store(cell(matrix, row, column), value(matrix, row, column)));
        }
    }
    shared.barrier();
    let product = |row: usize, column: usize, at: &dyn Fn(usize, usize, usize) -> u64| {
        (0..side).fold(0_u64, |sum, k| sum.wrapping_add(at(0, row, k).wrapping_mul(at(1, k, column))))
    };
    for row in shared.part(side) {
        for column in 0..side {
            let sum = product(row, column, &|matrix, row, column| shared.load(cell(matrix, row, column)));
            shared.store(cell(2, row, column), sum);
        }
    }
    shared.barrier();
    (0..side * side).try_for_each(|at| {
        let (row, column) = (at / side, at % side);
        expect("a sum", shared.load(cell(2, row, column)), product(row, column, &value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            Arc, Mutex,
            atomic::{AtomicBool, AtomicU64},
            mpsc,
        },
        thread,
        time::Duration,
    };

    /// Two threads of one memory that go on from iteration 2, and the numbers of cuts that each has made.
    fn resumed(count: usize) -> [Result<usize, String>; 2] {
        let memory: Arc<Vec<AtomicU64>> = Arc::new((0..512 * WORDS).map(|_| AtomicU64::new(0)).collect());
        let mut ranks = vec![1.0 / count as f64; count];
        for _ in 0..2 {
            ranks = (0..count).map(|vertex| rank(vertex, count, |other| ranks[other])).collect();
        }
        for (vertex, rank) in ranks.iter().enumerate() {
            memory[WORDS + vertex].store(rank.to_bits(), std::sync::atomic::Ordering::SeqCst);
        }
        memory[PROGRESS].store(2, std::sync::atomic::Ordering::SeqCst);
        let (sender, outcomes) = mpsc::channel();
        for node in 0..2 {
            let (memory, sender) = (Arc::clone(&memory), sender.clone());
            thread::spawn(move || {
                let abandoned = Arc::new(AtomicBool::new(false));
                let mut shared = Shared::new(memory.as_ptr() as usize, 512, node, 2, abandoned);
                let cuts = Arc::new(Mutex::new(0));
                let counted = Arc::clone(&cuts);
                let cut = move || {
                    *counted.lock().expect("not poisoned") += 1;
                    Ok(true)
                };
                shared.cuts = Some((Duration::ZERO, Box::new(cut)));
                shared.barrier();
                let outcome = pagerank(&shared, count);
                let made = *cuts.lock().expect("not poisoned");
                sender.send((node, outcome.map(|()| made))).expect("the test waits");
            });
        }
        let mut both = [const { Err(String::new()) }; 2];
        for _ in 0..2 {
            let (node, outcome) = outcomes.recv_timeout(Duration::from_secs(60)).expect("it hangs");
            both[node] = outcome;
        }
        both
    }

    /// A node that is late must not begin behind the cut that another one has come to.
    #[test]
    fn all_nodes_go_on_from_the_same_iteration() {
        for _ in 0..300 {
            assert_eq!(resumed(8), [Ok(8), Ok(8)]);
        }
    }
}
