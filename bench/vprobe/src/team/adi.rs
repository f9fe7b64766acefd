//! `sp-like` and `bt-like`: implicit solvers on a cube with five unknowns a point, direction by direction, as SP and BT of the NAS
//! parallel benchmarks. A line of the cube is a system of equations: pentadiagonal for each unknown alone (SP), or
//! tridiagonal in blocks of 5 by 5 (BT). Lines along x and y lie in the own part. Those along z go through the parts of all threads.

use super::shared::{Kernel, Random, Shared};

/// Unknowns of a point.
pub const UNKNOWNS: usize = 5;
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

type Block = [[f64; UNKNOWNS]; UNKNOWNS];
type Unknowns = [f64; UNKNOWNS];

/// How a line is solved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Solver {
    /// Pentadiagonal, each unknown alone.
    Scalar,
    /// Tridiagonal blocks.
    Block,
}

/// Cubes of points that have nothing to do with each other and are solved in turn, as zones of the multi-zone versions. The planes of
/// each are distributed over the threads.
pub struct Adi {
    /// How many.
    pub zones: usize,
    /// Points of an edge, a multiple of the number of threads.
    pub edge: usize,
    /// Which system.
    pub solver: Solver,
}

/// Direction of lines.
#[derive(Clone, Copy)]
enum Along {
    X,
    Y,
    Z,
}

impl Adi {
    /// Part and word of a point's first unknown. A part has the state of a zone, after it the right side, then the next zone.
    fn point(&self, threads: usize, zone: usize, [z, y, x]: [usize; 3]) -> (usize, usize) {
        let planes = self.edge / threads;
        let first = zone * 2 * self.right(threads);
        (z / planes, first + ((z % planes * self.edge + y) * self.edge + x) * UNKNOWNS)
    }

    fn right(&self, threads: usize) -> usize {
        self.edge.pow(3) / threads * UNKNOWNS
    }

    /// The right side: how much a point differs from those around it.
    fn differences(&self, shared: &Shared<'_>, me: usize, zone: usize, done: &mut dyn FnMut(u64)) {
        let (threads, edge) = (shared.threads(), self.edge);
        let (planes, right) = (edge / threads, self.right(threads));
        for z in me * planes..(me + 1) * planes {
            for y in 0..edge {
                for x in 0..edge {
                    let (part, at) = self.point(threads, zone, [z, y, x]);
                    let near = [
                        [z.saturating_sub(1), y, x],
                        [(z + 1).min(edge - 1), y, x],
                        [z, y.saturating_sub(1), x],
                        [z, (y + 1).min(edge - 1), x],
                        [z, y, x.saturating_sub(1)],
                        [z, y, (x + 1).min(edge - 1)],
                    ]
                    .map(|place| self.point(threads, zone, place));
                    for unknown in 0..UNKNOWNS {
                        let around: f64 = near.iter().map(|&(part, at)| shared.get(part, at + unknown)).sum();
                        let own = shared.get(part, at + unknown);
                        shared.set(part, right + at + unknown, 0.1 * (around - 6.0 * own));
                    }
                }
                done(edge as u64);
            }
        }
        shared.meet();
    }

    /// Solves all own lines of a direction. Those along z are distributed by y.
    fn lines(&self, shared: &Shared<'_>, me: usize, zone: usize, along: Along, done: &mut dyn FnMut(u64)) {
        let (threads, edge) = (shared.threads(), self.edge);
        let planes = edge / threads;
        let mut line = Line::new(edge);
        for outer in me * planes..(me + 1) * planes {
            for inner in 0..edge {
                let place = |at: usize| {
                    let place = match along {
                        Along::X => [outer, inner, at],
                        Along::Y => [outer, at, inner],
                        Along::Z => [at, outer, inner],
                    };
                    self.point(threads, zone, place)
                };
                line.load(shared, self.right(threads), place);
                match self.solver {
                    Solver::Scalar => line.solve_scalar(),
                    Solver::Block => line.solve_block(),
                }
                line.store(shared, self.right(threads), place);
                done(edge as u64);
            }
        }
        shared.meet();
    }
}

/// A line: states and right sides of its points, and what the solver keeps of each.
struct Line {
    state: Vec<Unknowns>,
    right: Vec<Unknowns>,
    upper: Vec<[Unknowns; 2]>,
    blocks: Vec<Block>,
}

impl Line {
    fn new(edge: usize) -> Self {
        let zero = [0.0; UNKNOWNS];
        Self {
            state: vec![zero; edge],
            right: vec![zero; edge],
            upper: vec![[zero; 2]; edge],
            blocks: vec![[zero; UNKNOWNS]; edge],
        }
    }

    fn load(&mut self, shared: &Shared<'_>, right: usize, place: impl Fn(usize) -> (usize, usize)) {
        for at in 0..self.state.len() {
            let (part, first) = place(at);
            self.state[at] = std::array::from_fn(|unknown| shared.get(part, first + unknown));
            self.right[at] = std::array::from_fn(|unknown| shared.get(part, right + first + unknown));
        }
    }

    fn store(&self, shared: &Shared<'_>, right: usize, place: impl Fn(usize) -> (usize, usize)) {
        for (at, values) in self.right.iter().enumerate() {
            let (part, first) = place(at);
            for (unknown, &value) in values.iter().enumerate() {
                shared.set(part, right + first + unknown, value);
            }
        }
    }

    /// Coefficients of a point's equation for an unknown: two before, one before, itself, one after, two after.
    fn scalar(&self, at: usize, unknown: usize) -> [f64; 5] {
        let speed = 0.1 * self.state[at][unknown];
        [0.05, -0.3 - speed, 2.0, -0.3 + speed, 0.05]
    }

    /// Gauss elimination without pivots; the diagonal is large.
    fn solve_scalar(&mut self) {
        let count = self.state.len();
        for unknown in 0..UNKNOWNS {
            for at in 0..count {
                let [two, one, mut own, mut next, after] = self.scalar(at, unknown);
                let mut right = self.right[at][unknown];
                let mut factor = one;
                if at >= 2 {
                    let [first, second] = self.upper[at - 2];
                    right -= two * self.right[at - 2][unknown];
                    factor -= two * first[unknown];
                    own -= two * second[unknown];
                }
                if at >= 1 {
                    let [first, second] = self.upper[at - 1];
                    right -= factor * self.right[at - 1][unknown];
                    own -= factor * first[unknown];
                    next -= factor * second[unknown];
                }
                self.right[at][unknown] = right / own;
                self.upper[at][0][unknown] = next / own;
                self.upper[at][1][unknown] = after / own;
            }
            for at in (0..count).rev() {
                let later = |by: usize| self.right.get(at + by).map_or(0.0, |right| right[unknown]);
                let [first, second] = self.upper[at];
                let value = self.right[at][unknown] - first[unknown] * later(1) - second[unknown] * later(2);
                self.right[at][unknown] = value;
            }
        }
    }

    /// Blocks of a point's equation: before, itself, after. They depend on the state, as Jacobians do.
    fn block(&self, at: usize) -> [Block; 3] {
        let state = &self.state[at];
        let of = |diagonal: f64, weight: f64| -> Block {
            std::array::from_fn(|row| {
                std::array::from_fn(|column| {
                    let own = if row == column { diagonal } else { 0.0 };
                    own + weight * state[row] * state[column]
                })
            })
        };
        [of(-0.3, -0.01), of(2.0, 0.02), of(-0.3, 0.01)]
    }

    /// Gauss elimination by blocks.
    fn solve_block(&mut self) {
        let count = self.state.len();
        for at in 0..count {
            let [before, mut own, after] = self.block(at);
            let mut right = self.right[at];
            if at > 0 {
                let (upper, last) = (&self.blocks[at - 1], self.right[at - 1]);
                for row in 0..UNKNOWNS {
                    for column in 0..UNKNOWNS {
                        right[row] -= before[row][column] * last[column];
                        for inner in 0..UNKNOWNS {
                            own[row][column] -= before[row][inner] * upper[inner][column];
                        }
                    }
                }
            }
            let mut upper = after;
            eliminate(&mut own, &mut upper, &mut right);
            self.blocks[at] = upper;
            self.right[at] = right;
        }
        for at in (0..count.saturating_sub(1)).rev() {
            for row in 0..UNKNOWNS {
                let later = self.right[at + 1];
                let sum: f64 = (0..UNKNOWNS).map(|column| self.blocks[at][row][column] * later[column]).sum();
                self.right[at][row] -= sum;
            }
        }
    }
}

/// Multiplies a block and a right side by the inverse of another block.
fn eliminate(own: &mut Block, block: &mut Block, right: &mut Unknowns) {
    for pivot in 0..UNKNOWNS {
        let inverse = 1.0 / own[pivot][pivot];
        for column in 0..UNKNOWNS {
            own[pivot][column] *= inverse;
            block[pivot][column] *= inverse;
        }
        right[pivot] *= inverse;
        for row in (0..UNKNOWNS).filter(|&row| row != pivot) {
            let factor = own[row][pivot];
            for column in 0..UNKNOWNS {
                own[row][column] -= factor * own[pivot][column];
                block[row][column] -= factor * block[pivot][column];
            }
            right[row] -= factor * right[pivot];
        }
    }
}

impl Kernel for Adi {
    fn words(&self, threads: usize) -> usize {
        self.zones * 2 * self.right(threads)
    }

    fn fill(&self, shared: &Shared<'_>, me: usize) {
        let count = self.right(shared.threads());
        for zone in 0..self.zones {
            for at in 0..count {
                let seed = ((zone * shared.threads() + me) * count + at) as u64 + 1;
                shared.set(me, zone * 2 * count + at, Random(seed.wrapping_mul(SEED)).unit());
            }
        }
    }

    /// A time step of each zone.
    fn round(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64)) {
        let right = self.right(shared.threads());
        for zone in 0..self.zones {
            self.differences(shared, me, zone, done);
            for along in [Along::X, Along::Y, Along::Z] {
                self.lines(shared, me, zone, along, done);
            }
            for at in zone * 2 * right..(zone * 2 + 1) * right {
                shared.set(me, at, shared.get(me, at) + shared.get(me, right + at));
            }
            shared.meet();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::shared::tests::run, *};
    use std::sync::atomic::AtomicU64;

    fn line() -> Line {
        let mut random = Random(7);
        let mut line = Line::new(9);
        let mut unknowns = || std::array::from_fn(|_| random.unit());
        line.state.iter_mut().for_each(|state| *state = unknowns());
        line.right.iter_mut().for_each(|right| *right = unknowns());
        line
    }

    #[test]
    fn a_scalar_line_is_solved() {
        let mut line = line();
        let wanted = line.right.clone();
        line.solve_scalar();
        for (at, wanted) in wanted.iter().enumerate() {
            for (unknown, wanted) in wanted.iter().enumerate() {
                let weights = line.scalar(at, unknown);
                let found: f64 = (0..5)
                    .filter_map(|by| Some(weights[by] * line.right.get((at + by).checked_sub(2)?)?[unknown]))
                    .sum();
                assert!((found - wanted).abs() < 1e-12, "{at}: {found}, expected {wanted}");
            }
        }
    }

    #[test]
    fn a_line_of_blocks_is_solved() {
        let mut line = line();
        let wanted = line.right.clone();
        line.solve_block();
        for (at, wanted) in wanted.iter().enumerate() {
            let blocks = line.block(at);
            for row in 0..UNKNOWNS {
                let of = |by: usize| -> Option<f64> {
                    let there = line.right.get((at + by).checked_sub(1)?)?;
                    Some(blocks[by][row].iter().zip(there).map(|(a, b)| a * b).sum())
                };
                let found: f64 = (0..3).filter_map(of).sum();
                assert!((found - wanted[row]).abs() < 1e-12, "{at}: {found}, expected {}", wanted[row]);
            }
        }
    }

    #[test]
    fn lines_go_through_the_cube_in_each_direction() {
        let kernel = Adi { zones: 1, edge: 8, solver: Solver::Scalar };
        let words: Vec<AtomicU64> = (0..kernel.words(1)).map(|_| AtomicU64::new(0)).collect();
        let shared = Shared::new(vec![&words]);
        shared.set(0, 0, 1.0);
        kernel.round(&shared, 0, &mut |_| {});
        // One corner was not 0, and now the one at the other end is not.
        let (part, at) = kernel.point(1, 0, [7, 7, 7]);
        assert!(shared.get(part, at).abs() > 0.0 && shared.get(part, at + 1) == 0.0);
    }

    #[test]
    fn the_state_does_not_depend_on_the_number_of_threads() {
        for solver in [Solver::Scalar, Solver::Block] {
            let states = [1, 2, 4].map(|threads| {
                let kernel = Adi { zones: 2, edge: 8, solver };
                let (content, operations) = run(&kernel, threads, 3);
                assert_eq!(operations, vec![2 * 3 * 4 * 512 / threads as u64; threads]);
                let right = kernel.right(threads);
                let zone = |zone: usize| {
                    content.iter().flat_map(move |part| part[zone * 2 * right..][..right].to_vec())
                };
                zone(0).chain(zone(1)).collect::<Vec<u64>>()
            });
            assert!(states[0] == states[1] && states[0] == states[2], "{solver:?}");
            assert!(states[0].iter().all(|bits| f64::from_bits(*bits).abs() < 2.0), "{solver:?}");
        }
    }
}
