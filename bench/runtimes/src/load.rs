//! What the loads that are written here do: STREAM, the stencil and the store, each by the piece, so that a thread can be halted between
//! two.

use crate::committed::{KEYS, ROW_BYTES, ROWS, VALUE_LINES};
use lab_count::load::Memory;
use std::{
    collections::{HashMap, VecDeque},
    hint::black_box,
};

/// Words of a line of the caches, and of a page.
const LINE: usize = 8;
const PAGE: usize = 512;
const PAGE_LINES: usize = PAGE / LINE;
const ROW_PAGES: usize = ROW_BYTES / size_of::<RowPage>();

/// STREAM's triad, c = a + 3 b, over arrays that stay. A word of each line: enough to bring the line from memory.
pub struct Stream {
    memory: Memory,
    /// Where the next page begins, in words of an array.
    next: usize,
}

impl Stream {
    /// All of the memory is written, by the thread that is to use it.
    pub fn new(mut memory: Memory) -> Self {
        memory.words().chunks_mut(LINE).for_each(|line| line[0] = 1);
        Self { memory, next: 0 }
    }

    /// A page of each array: how soon the caches see that lines follow each other does not depend on where the arrays lie.
    /// Operations, which are triads.
    pub fn page(&mut self) -> u64 {
        let words = self.memory.words();
        let third = words.len() / 3 / PAGE * PAGE;
        let (a, rest) = words.split_at_mut(third);
        let (b, c) = rest.split_at_mut(third);
        let at = self.next..self.next + PAGE;
        self.next = (self.next + PAGE) % third;
        let mut sums = [0_usize; PAGE_LINES];
        sums.iter_mut().zip(a[at.clone()].chunks(LINE)).for_each(|(sum, a)| *sum = a[0]);
        sums.iter_mut()
            .zip(b[at.clone()].chunks(LINE))
            .for_each(|(sum, b)| *sum = sum.wrapping_add(b[0].wrapping_mul(3)));
        c[at].chunks_mut(LINE).zip(sums).for_each(|(c, sum)| c[0] = sum);
        PAGE_LINES as u64
    }
}

/// A line of the caches.
type Line = [usize; LINE];

/// Caches see that lines follow each other within a page only. An allocator may begin what is large at any line of a page, which
/// makes another load of it.
#[repr(align(4096))]
struct RowPage([Line; PAGE_LINES]);

/// A stencil over rows that are allocated anew in each step, and given back as soon as the next step needs them no more. `malloc()`
/// gives that memory, jemalloc's if it is preloaded.
pub struct Stencil {
    /// Rows of the step before that are still needed, the next one first, then those of this step.
    rows: VecDeque<Vec<RowPage>>,
}

impl Stencil {
    /// By the thread that is to use it.
    pub fn new() -> Self {
        let page = |number: usize| RowPage([[number; LINE]; PAGE_LINES]);
        let row = |number: usize| (0..ROW_PAGES).map(|_| page(number)).collect();
        Self { rows: (0..ROWS).map(row).collect() }
    }

    /// The next row: a word of each line from three rows of the step before. They are a circle, so that each row has a neighbour on
    /// both sides. A page at a time from each of the rows. Operations, which are rows.
    pub fn row(&mut self) -> u64 {
        let mut new = Vec::with_capacity(ROW_PAGES);
        let mut words = [[0_usize; PAGE_LINES]; 3];
        for at in 0..ROW_PAGES {
            for (words, row) in words.iter_mut().zip(&self.rows) {
                words.iter_mut().zip(&row[at].0).for_each(|(word, line)| *word = line[0]);
                // One row after the other, line by line: a compiler that adds as it reads may read in another order.
                black_box(words);
            }
            let [above, here, below] = &words;
            let mut page = RowPage([[0; LINE]; PAGE_LINES]);
            let sums = above.iter().zip(here).zip(below);
            page.0.iter_mut().zip(sums).for_each(|(line, ((above, here), below))| {
                *line = [above.wrapping_add(here.wrapping_mul(2)).wrapping_add(*below); LINE];
            });
            new.push(page);
        }
        self.rows.push_back(new);
        // It is not needed any more.
        drop(self.rows.pop_front());
        1
    }
}

/// A key-value store in memory: each thread has the keys that are its own. Every second request replaces a value by one that is
/// allocated anew, of another size, the others read one.
pub struct Store {
    values: HashMap<u64, Vec<Line>>,
    /// Its state (xorshift).
    random: u64,
}

impl Store {
    /// With a value for each key, by the thread that is to use it.
    pub fn new() -> Self {
        let mut store = Self { values: HashMap::new(), random: 0x9e37_79b9_7f4a_7c15 };
        for key in 0..KEYS {
            let value = value_of(key, store.next());
            store.values.insert(key, value);
        }
        store
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// One request, for a key that is as likely as any. Operations, which are requests.
    pub fn request(&mut self) -> u64 {
        let random = self.next();
        let key = (random >> 32) % KEYS;
        if random.is_multiple_of(2) {
            // The one before is freed.
            self.values.insert(key, value_of(key, random));
        } else if let Some(value) = self.values.get(&key) {
            let word = value.iter().fold(0, |sum: usize, line| sum.wrapping_add(line[0]));
            black_box(word);
        }
        1
    }
}

/// A value for a key; its size is by chance.
fn value_of(key: u64, random: u64) -> Vec<Line> {
    let [least, most] = VALUE_LINES;
    let lines = least + (random >> 1) as usize % (most - least + 1);
    vec![[key as usize; LINE]; lines]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_triad_is_a_plus_three_b_page_by_page() {
        // Two pages for each array, and one that is left.
        let mut stream = Stream::new(Memory::map(7 * 4096, None, false).expect("pages"));
        for (at, word) in [(8, 5), (PAGE + 16, 7), (2 * PAGE + 8, 4)] {
            stream.memory.words()[at] = word;
        }
        assert_eq!((stream.page(), stream.next), (64, PAGE));
        assert_eq!((stream.page(), stream.next), (64, 0));
        let c = &stream.memory.words()[4 * PAGE..];
        assert_eq!((c[8], c[16], c[PAGE + 16]), (5 + 12, 4, 7 + 3));
    }

    #[test]
    fn a_store_replaces_values_and_keeps_its_keys() {
        let mut store = Store::new();
        let lines = |store: &Store| store.values.values().map(Vec::len).sum::<usize>();
        let before: Vec<usize> = (0..KEYS).map(|key| store.values[&key].len()).collect();
        // The size of a value is right in the middle, on average.
        let middle = KEYS as usize * VALUE_LINES.iter().sum::<usize>() / 2;
        assert!(lines(&store).abs_diff(middle) < middle / 50, "{} lines", lines(&store));
        for _ in 0..KEYS {
            assert_eq!(store.request(), 1);
        }
        assert_eq!(store.values.len(), KEYS as usize);
        assert!(store.values.iter().all(|(key, value)| value[0][0] == *key as usize));
        // Half of the requests replace: 1 - 1 / sqrt(e) of the keys, but for those that get the same size again.
        let changed = (0..KEYS).filter(|key| store.values[key].len() != before[*key as usize]).count();
        let share = changed as f64 / KEYS as f64;
        assert!((0.36..0.41).contains(&share), "{share} of the values have another size");
    }

    #[test]
    fn a_step_is_made_of_the_step_before() {
        let mut stencil = Stencil::new();
        for _ in 0..ROWS {
            assert_eq!(stencil.row(), 1);
        }
        let of = |number: usize| stencil.rows[number][ROW_PAGES - 1].0[PAGE_LINES - 1][0];
        // The first row of the step is that around row 1 of the one before.
        assert_eq!((of(0), of(1)), (4, 8));
        // The last ones are made of the step's own first rows, as there are no others.
        assert_eq!(of(ROWS - 1), (ROWS - 1) + 2 * of(0) + of(1));
        assert_eq!(stencil.rows.len(), ROWS);
    }
}
