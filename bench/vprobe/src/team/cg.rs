//! `cg-like`: conjugate gradients with a sparse matrix, as CG of the NAS parallel benchmarks. Each thread has the rows of its part.
//! It reads their values and columns in order, and for each of them a number of a vector that lies in the parts of all threads, in
//! random order. Sums over all threads end each step.

use super::shared::{Kernel, Random, Shared};

/// Off-diagonal values of a row, in pairs.
const PAIRS: usize = 10;
const PER_ROW: usize = 2 * PAIRS + 1;
/// Steps until the solver begins again (NAS CG: 25).
const STEPS: usize = 25;
/// Rows between two counts.
const BATCH: usize = 256;
const SEED: u64 = 0x2545_f491_4f6c_dd1d;

/// A symmetric, diagonally dominant matrix in which row `i` is connected to rows that look random.
pub struct Cg {
    /// Rows of each thread.
    pub rows: usize,
}

/// Parts of a thread's memory: values, columns, and the vectors of the method.
impl Cg {
    fn columns(&self) -> usize {
        self.rows * PER_ROW
    }

    fn vector(&self, number: usize) -> usize {
        self.rows * (2 * PER_ROW + number)
    }

    /// `q = A p`, by row; the product of `p` and `q`.
    fn multiply(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64)) -> f64 {
        let (columns, p, q) = (self.columns(), self.vector(P), self.vector(Q));
        let mut product = 0.0;
        for row in 0..self.rows {
            let mut sum = 0.0;
            for at in row * PER_ROW..(row + 1) * PER_ROW {
                let column = shared.word(me, columns + at) as usize;
                sum += shared.get(me, at) * shared.get(column / self.rows, p + column % self.rows);
            }
            shared.set(me, q + row, sum);
            product += sum * shared.get(me, p + row);
            if (row + 1) % BATCH == 0 {
                done((BATCH * PER_ROW) as u64);
            }
        }
        product
    }

    fn restart(&self, shared: &Shared<'_>, me: usize) {
        for row in 0..self.rows {
            let right = 1.0 + ((me * self.rows + row) % 7) as f64;
            for (vector, value) in [(P, right), (R, right), (Z, 0.0)] {
                shared.set(me, self.vector(vector) + row, value);
            }
        }
    }
}

/// The method's names of its vectors: direction, image of it, residual, solution.
const P: usize = 0;
const Q: usize = 1;
const R: usize = 2;
const Z: usize = 3;

impl Kernel for Cg {
    fn words(&self, _: usize) -> usize {
        self.vector(4)
    }

    fn fill(&self, shared: &Shared<'_>, me: usize) {
        let count = self.rows * shared.threads();
        let mut random = Random(SEED);
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, (random.next() % (last as u64 + 1)) as usize);
        }
        let mut position = vec![0; count];
        order.iter().enumerate().for_each(|(at, &row)| position[row] = at);
        let pairs: Vec<(usize, f64)> = (0..PAIRS)
            .map(|_| (1 + random.next() as usize % (count - 1).max(1), random.unit() / PAIRS as f64))
            .collect();
        let diagonal = 0.1 + 2.0 * pairs.iter().map(|(_, value)| value).sum::<f64>();
        for row in 0..self.rows {
            let at = position[me * self.rows + row];
            let put = |index: usize, column: usize, value: f64| {
                shared.set(me, row * PER_ROW + index, value);
                shared.set_word(me, self.columns() + row * PER_ROW + index, column as u64);
            };
            for (number, &(distance, value)) in pairs.iter().enumerate() {
                put(2 * number, order[(at + distance) % count], -value);
                put(2 * number + 1, order[(at + count - distance % count) % count], -value);
            }
            put(2 * PAIRS, me * self.rows + row, diagonal);
        }
        self.restart(shared, me);
    }

    /// A solution from the beginning.
    fn round(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64)) {
        let [p, q, r, z] = [P, Q, R, Z].map(|number| self.vector(number));
        self.restart(shared, me);
        let own = |at: usize| (0..self.rows).map(|row| shared.get(me, at + row).powi(2)).sum::<f64>();
        let mut residual = shared.sum(me, own(r));
        for _ in 0..STEPS {
            let product = self.multiply(shared, me, done);
            let alpha = residual / shared.sum(me, product).max(f64::MIN_POSITIVE);
            for row in 0..self.rows {
                shared.set(me, z + row, shared.get(me, z + row) + alpha * shared.get(me, p + row));
                shared.set(me, r + row, shared.get(me, r + row) - alpha * shared.get(me, q + row));
            }
            let next = shared.sum(me, own(r));
            let beta = next / residual.max(f64::MIN_POSITIVE);
            residual = next;
            for row in 0..self.rows {
                shared.set(me, p + row, shared.get(me, r + row) + beta * shared.get(me, p + row));
            }
            shared.meet();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::shared::tests::run, *};

    #[test]
    fn the_solution_solves_the_system_with_any_number_of_threads() {
        for threads in [1, 2, 4] {
            let kernel = Cg { rows: 512 / threads };
            let (content, operations) = run(&kernel, threads, 1);
            let value = |part: usize, at: usize| f64::from_bits(content[part][at]);
            let (columns, z) = (kernel.columns(), kernel.vector(Z));
            let mut worst = 0.0_f64;
            for row in 0..512 {
                let (part, local) = (row / kernel.rows, row % kernel.rows);
                let entry = |at: usize| {
                    let column = content[part][columns + at] as usize;
                    value(part, at) * value(column / kernel.rows, z + column % kernel.rows)
                };
                let image: f64 = (local * PER_ROW..(local + 1) * PER_ROW).map(entry).sum();
                worst = worst.max((image - (1.0 + (row % 7) as f64)).abs());
            }
            assert!(worst < 1e-3, "{threads} threads: off by {worst}");
            let rounds = (kernel.rows / BATCH * BATCH * PER_ROW * STEPS) as u64;
            assert_eq!(operations, vec![rounds; threads]);
        }
    }

    #[test]
    fn columns_lie_in_all_parts() {
        let kernel = Cg { rows: 128 };
        let (content, _) = run(&kernel, 4, 0);
        let mut by_part = [0; 4];
        let columns = &content[0][kernel.columns()..kernel.vector(0)];
        columns.iter().for_each(|&column| by_part[column as usize / 128] += 1);
        assert!(by_part.iter().all(|&count| count > 128 * PER_ROW / 8), "{by_part:?}");
    }
}
