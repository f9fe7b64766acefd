//! A second application, as a database has its table: a hash table in memory whose records are looked up by keys, of which some are
//! asked for much more often than others, and written by each tenth of the operations.

/// Words of a record: four lines. The first word is its key, 0 if it is free.
const RECORD: usize = 32;
/// Words of a line of the caches.
const LINE: usize = 8;
/// Of so many records one is written when it is found.
const WRITES: usize = 10;
/// The part of the table that is full, in quarters.
const FULL_QUARTERS: usize = 3;
/// Operations of a pass.
pub const OPERATIONS: usize = 100_000;

/// Where the search for a key begins: Fibonacci hashing.
fn slot(key: usize, slots: usize) -> usize {
    (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_right(32) as usize % slots
}

/// How many keys a table of so many words has.
fn keys(words: usize) -> usize {
    words / RECORD * FULL_QUARTERS / 4
}

/// The first word of the record that has the key, or that is free for it.
fn find(words: &[usize], key: usize) -> usize {
    let slots = words.len() / RECORD;
    let mut at = slot(key, slots);
    while ![0, key].contains(&words[at * RECORD]) {
        at = (at + 1) % slots;
    }
    at * RECORD
}

/// The next of a row of random numbers (Knuth's MMIX).
fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 40
}

/// A key of so many: the cube of a random number, so that half of the operations ask for an eighth of the keys.
fn draw(seed: &mut u64, keys: usize) -> usize {
    let random = u128::from(next(seed));
    let cube = (random * random * random * keys as u128) >> (3 * 24);
    1 + cube as usize
}

/// Who asks for the keys of a table.
pub struct Store {
    seed: u64,
}

impl Store {
    /// Fills a table.
    pub fn fill(words: &mut [usize]) -> Self {
        for key in 1..=keys(words.len()) {
            let at = find(words, key);
            for line in 0..RECORD / LINE {
                words[at + line * LINE] = key;
            }
        }
        Self { seed: 1 }
    }

    /// A pass: how many operations it was. Each pass asks for other keys. Those of one pass fit into the last-level cache, where it
    /// would not matter on which node their memory is.
    pub fn lookups(&mut self, words: &mut [usize]) -> usize {
        let keys = keys(words.len());
        let mut sum = 0_usize;
        for number in 0..OPERATIONS {
            let at = find(words, draw(&mut self.seed, keys));
            for line in 0..RECORD / LINE {
                sum = sum.wrapping_add(words[at + line * LINE]);
            }
            if number % WRITES == 0 {
                words[at + 1] = number;
            }
        }
        std::hint::black_box(sum);
        OPERATIONS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_found_and_some_are_written() {
        let mut words = vec![0; 400 * RECORD];
        let mut store = Store::fill(&mut words);
        let count = keys(words.len());
        assert_eq!(count, 300);
        assert!((1..=count).all(|key| words[find(&words, key)] == key));
        assert_eq!(words.iter().step_by(RECORD).filter(|key| **key != 0).count(), count);
        assert_eq!(store.lookups(&mut words), OPERATIONS);
        let written = words.chunks(RECORD).filter(|record| record[1] != 0).count();
        assert!(written > count / 2, "{written}");
        assert!((1..=count).all(|key| words[find(&words, key)] == key), "keys stay");
    }

    #[test]
    fn the_passes_of_a_run_ask_for_different_keys_and_those_of_the_next_run_for_the_same() {
        let written = |store: &mut Store, words: &mut [usize]| -> Vec<bool> {
            words.chunks_mut(RECORD).for_each(|record| record[1] = 0);
            store.lookups(words);
            words.chunks(RECORD).map(|record| record[1] != 0).collect()
        };
        let run = || {
            let mut words = vec![0; 400_000 * RECORD];
            let mut store = Store::fill(&mut words);
            [(); 2].map(|()| written(&mut store, &mut words))
        };
        let [first, second] = run();
        let count = |passes: &[bool]| passes.iter().filter(|written| **written).count();
        let both = first.iter().zip(&second).filter(|(first, second)| **first && **second).count();
        assert!(both < count(&first) / 2, "{both} of {} and {}", count(&first), count(&second));
        assert_eq!([first, second], run());
    }

    #[test]
    fn half_of_the_operations_ask_for_an_eighth_of_the_keys() {
        let (mut seed, keys) = (1, 1_000_000);
        let drawn: Vec<usize> = (0..100_000).map(|_| draw(&mut seed, keys)).collect();
        assert!(drawn.iter().all(|key| (1..=keys).contains(key)));
        let few = drawn.iter().filter(|key| **key <= keys / 8).count();
        assert!((49_000..51_000).contains(&few), "{few}");
    }
}
