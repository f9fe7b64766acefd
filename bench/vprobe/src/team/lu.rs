//! `lu-like`: symmetric successive over-relaxation on a cube with five unknowns a point, as LU of the NAS parallel benchmarks. A point
//! needs the new values of those before it, so that threads work as a pipeline: each has some rows of every plane, and begins a
//! plane when the thread before it has finished that plane. It reads the border rows of both neighbours.

use super::{
    adi::UNKNOWNS,
    shared::{Kernel, Random, Shared},
};

const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// How far each step goes beyond the solution (NAS LU).
const RELAXATION: f64 = 1.2;

/// A cube, whose rows of each plane are distributed over the threads.
pub struct Lu {
    /// Points of an edge, a multiple of the number of threads.
    pub edge: usize,
}

impl Lu {
    /// Part and word of a point's first unknown. A part has the state, and after it the right side.
    fn point(&self, threads: usize, z: usize, y: usize, x: usize) -> (usize, usize) {
        let rows = self.edge / threads;
        (y / rows, ((z * rows + y % rows) * self.edge + x) * UNKNOWNS)
    }

    fn right(&self, threads: usize) -> usize {
        self.edge.pow(3) / threads * UNKNOWNS
    }

    /// Relaxes a point by those around it. Outside of the cube everything is 0.
    fn relax(&self, shared: &Shared<'_>, z: usize, y: usize, x: usize) {
        let (threads, last) = (shared.threads(), self.edge - 1);
        let mut around = [0.0; UNKNOWNS];
        let mut add = |z: usize, y: usize, x: usize| {
            let (part, at) = self.point(threads, z, y, x);
            around.iter_mut().enumerate().for_each(|(unknown, sum)| *sum += shared.get(part, at + unknown));
        };
        for (below, above, at) in [(z > 0, z < last, 0), (y > 0, y < last, 1), (x > 0, x < last, 2)] {
            let step = |by: isize| {
                let mut place = [z, y, x];
                place[at] = place[at].saturating_add_signed(by);
                place
            };
            for [z, y, x] in [below.then(|| step(-1)), above.then(|| step(1))].into_iter().flatten() {
                add(z, y, x);
            }
        }
        let (part, at) = self.point(threads, z, y, x);
        let right = self.right(threads) + at;
        // Unknowns of a point depend on each other a little.
        let mean = around.iter().sum::<f64>() / UNKNOWNS as f64;
        for (unknown, around) in around.into_iter().enumerate() {
            let own = shared.get(part, at + unknown);
            let wanted = (shared.get(part, right + unknown) + 0.9 * around + 0.1 * mean) / 6.5;
            shared.set(part, at + unknown, own + RELAXATION * (wanted - own));
        }
    }

    /// Own rows of a plane, in ascending order or in descending order.
    fn plane(&self, shared: &Shared<'_>, me: usize, z: usize, down: bool, done: &mut dyn FnMut(u64)) {
        let rows = self.edge / shared.threads();
        let turn = |at: usize, count: usize| if down { count - 1 - at } else { at };
        for row in 0..rows {
            let y = me * rows + turn(row, rows);
            (0..self.edge).for_each(|at| self.relax(shared, z, y, turn(at, self.edge)));
            done(self.edge as u64);
        }
    }

    /// All planes, one way: thread after thread.
    fn sweep(&self, shared: &Shared<'_>, me: usize, down: bool, done: &mut dyn FnMut(u64)) {
        let last = shared.threads() - 1;
        let before = if down { (me < last).then_some(me + 1) } else { me.checked_sub(1) };
        for step in 0..self.edge {
            if let Some(before) = before {
                shared.await_step(before, step as u64 + 1);
            }
            let z = if down { self.edge - 1 - step } else { step };
            self.plane(shared, me, z, down, done);
            shared.reach(me, step as u64 + 1);
        }
        shared.meet();
        shared.reach(me, 0);
        shared.meet();
    }
}

impl Kernel for Lu {
    fn words(&self, threads: usize) -> usize {
        2 * self.right(threads)
    }

    fn fill(&self, shared: &Shared<'_>, me: usize) {
        let (threads, edge) = (shared.threads(), self.edge);
        let rows = edge / threads;
        for z in 0..edge {
            for y in me * rows..(me + 1) * rows {
                for x in 0..edge {
                    let (part, at) = self.point(threads, z, y, x);
                    let seed = ((z * edge + y) * edge + x) as u64 + 1;
                    let mut random = Random(seed.wrapping_mul(SEED));
                    for unknown in 0..UNKNOWNS {
                        shared.set(part, at + unknown, 0.0);
                        shared.set(part, self.right(threads) + at + unknown, random.unit());
                    }
                }
            }
        }
    }

    /// A sweep up and one down.
    fn round(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64)) {
        self.sweep(shared, me, false, done);
        self.sweep(shared, me, true, done);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::shared::tests::run, *};

    fn state(threads: usize, rounds: usize) -> Vec<u64> {
        let kernel = Lu { edge: 8 };
        let (content, operations) = run(&kernel, threads, rounds);
        assert_eq!(operations, vec![2 * rounds as u64 * 512 / threads as u64; threads]);
        let places = (0..512).map(|at| kernel.point(threads, at / 64, at / 8 % 8, at % 8));
        places.flat_map(|(part, at)| content[part][at..at + UNKNOWNS].to_vec()).collect()
    }

    #[test]
    fn the_pipeline_computes_what_one_thread_computes() {
        let one = state(1, 5);
        for threads in [2, 4, 8] {
            assert!(state(threads, 5) == one, "{threads} threads");
        }
    }

    #[test]
    fn it_converges() {
        let change = |rounds: usize| {
            let pairs = state(2, rounds).into_iter().zip(state(2, rounds + 1));
            pairs.map(|(a, b)| (f64::from_bits(a) - f64::from_bits(b)).abs()).fold(0.0, f64::max)
        };
        let changes = [change(0), change(4), change(16)];
        assert!(changes[1] < 0.5 * changes[0] && changes[2] < 0.1 * changes[1], "{changes:?}");
    }
}
