//! `mg-like`: a multigrid solver of Poisson's equation on a cube, as MG of the NAS parallel benchmarks. Each thread has the planes of
//! its part on every level. It reads and writes these in order, and the neighbours' planes at its borders.

use super::shared::{Kernel, Random, Shared};

/// Weights of the operator, of the smoother and of the restriction for a point, its faces, edges and corners (NAS MG). The operator
/// takes the distance of points for 1 on each level, so that those of the restriction sum up to 4.
const OPERATOR: [f64; 4] = [-8.0 / 3.0, 0.0, 1.0 / 6.0, 1.0 / 12.0];
const SMOOTHER: [f64; 4] = [-3.0 / 8.0, 1.0 / 32.0, -1.0 / 64.0, 0.0];
const RESTRICTION: [f64; 4] = [0.5, 0.25, 0.125, 0.0625];
/// Fields of a level: solution, residual.
const U: usize = 0;
const R: usize = 1;
const SEED: u64 = 0x9e37_79b9;

/// A cube with periodic borders. Its right side is a third field of the finest level.
pub struct Mg {
    /// Points of an edge: the number of threads, by a power of two.
    pub edge: usize,
    /// Levels.
    pub levels: u32,
}

/// A field of a level.
#[derive(Clone, Copy)]
struct Field {
    edge: usize,
    planes: usize,
    /// First word in each part.
    at: usize,
}

impl Field {
    /// Part and word of a row's first point; planes and rows go round.
    fn row(&self, z: usize, y: usize) -> (usize, usize) {
        let (z, y) = (z % self.edge, y % self.edge);
        (z / self.planes, self.at + (z % self.planes * self.edge + y) * self.edge)
    }
}

impl Mg {
    fn field(&self, threads: usize, level: u32, number: usize) -> Field {
        let size = |level: u32| (self.edge >> level).pow(3) / threads;
        let before: usize = (0..level).map(|level| 2 * size(level)).sum();
        let edge = self.edge >> level;
        Field { edge, planes: edge / threads, at: size(0) + before + number * size(level) }
    }

    fn right(&self, threads: usize) -> Field {
        Field { edge: self.edge, planes: self.edge / threads, at: 0 }
    }
}

/// Sums of the rows around one, point by point: itself, the four at its sides, the four at its edges.
struct Rows {
    own: Vec<f64>,
    sides: Vec<f64>,
    edges: Vec<f64>,
}

impl Rows {
    fn of(shared: &Shared<'_>, field: Field, z: usize, y: usize) -> Self {
        let (below, under) = (z + field.edge - 1, y + field.edge - 1);
        let rows = |list: &[(usize, usize)]| {
            let mut sum = vec![0.0; field.edge];
            for &(z, y) in list {
                let (part, at) = field.row(z, y);
                sum.iter_mut().enumerate().for_each(|(x, sum)| *sum += shared.get(part, at + x));
            }
            sum
        };
        Self {
            own: rows(&[(z, y)]),
            sides: rows(&[(z, under), (z, y + 1), (below, y), (z + 1, y)]),
            edges: rows(&[(below, under), (below, y + 1), (z + 1, under), (z + 1, y + 1)]),
        }
    }

    /// The weighted sum of a point and the 26 around it.
    fn at(&self, x: usize, weights: [f64; 4]) -> f64 {
        let edge = self.own.len();
        let (left, right) = ((x + edge - 1) % edge, (x + 1) % edge);
        let both = |row: &[f64]| row[left] + row[right];
        weights[0] * self.own[x]
            + weights[1] * (both(&self.own) + self.sides[x])
            + weights[2] * (both(&self.sides) + self.edges[x])
            + weights[3] * both(&self.edges)
    }
}

impl Mg {
    /// Goes through the own rows of a field.
    fn rows(&self, me: usize, field: Field, mut of: impl FnMut(usize, usize)) {
        for z in me * field.planes..(me + 1) * field.planes {
            (0..field.edge).for_each(|y| of(z, y));
        }
    }

    /// `to = from - A u`.
    fn residual(&self, shared: &Shared<'_>, me: usize, [u, from, to]: [Field; 3], done: &mut dyn FnMut(u64)) {
        self.rows(me, to, |z, y| {
            let around = Rows::of(shared, u, z, y);
            let (part, at) = to.row(z, y);
            let (_, right) = from.row(z, y);
            for x in 0..to.edge {
                shared.set(part, at + x, shared.get(part, right + x) - around.at(x, OPERATOR));
            }
            done(to.edge as u64);
        });
        shared.meet();
    }

    /// `u += S r`.
    fn smooth(&self, shared: &Shared<'_>, me: usize, [u, r]: [Field; 2], done: &mut dyn FnMut(u64)) {
        self.rows(me, u, |z, y| {
            let around = Rows::of(shared, r, z, y);
            let (part, at) = u.row(z, y);
            for x in 0..u.edge {
                shared.set(part, at + x, shared.get(part, at + x) + around.at(x, SMOOTHER));
            }
            done(u.edge as u64);
        });
        shared.meet();
    }

    /// The residual of the next coarser level, whose solution begins with 0.
    fn restrict(
        &self,
        shared: &Shared<'_>,
        me: usize,
        [fine, coarse, u]: [Field; 3],
        done: &mut dyn FnMut(u64),
    ) {
        self.rows(me, coarse, |z, y| {
            let around = Rows::of(shared, fine, 2 * z, 2 * y);
            let (part, at) = coarse.row(z, y);
            let (_, zero) = u.row(z, y);
            for x in 0..coarse.edge {
                shared.set(part, at + x, around.at(2 * x, RESTRICTION));
                shared.set(part, zero + x, 0.0);
            }
            done(coarse.edge as u64);
        });
        shared.meet();
    }

    /// Adds the solution of the coarser level, point between points.
    fn interpolate(
        &self,
        shared: &Shared<'_>,
        me: usize,
        [coarse, fine]: [Field; 2],
        done: &mut dyn FnMut(u64),
    ) {
        self.rows(me, fine, |z, y| {
            let mut sum = vec![0.0; coarse.edge];
            for (z, y) in [
                (z / 2, y / 2),
                (z.div_ceil(2), y / 2),
                (z / 2, y.div_ceil(2)),
                (z.div_ceil(2), y.div_ceil(2)),
            ] {
                let (part, at) = coarse.row(z, y);
                sum.iter_mut().enumerate().for_each(|(x, sum)| *sum += 0.25 * shared.get(part, at + x));
            }
            let (part, at) = fine.row(z, y);
            for x in 0..fine.edge {
                let between = 0.5 * (sum[x / 2] + sum[x.div_ceil(2) % coarse.edge]);
                shared.set(part, at + x, shared.get(part, at + x) + between);
            }
            done(fine.edge as u64);
        });
        shared.meet();
    }
}

impl Kernel for Mg {
    fn words(&self, threads: usize) -> usize {
        let last = self.field(threads, self.levels - 1, R);
        last.at + last.edge.pow(3) / threads
    }

    /// The right side has 1 and -1 at a few points, as in NAS MG.
    fn fill(&self, shared: &Shared<'_>, me: usize) {
        let right = self.right(shared.threads());
        let mut random = Random(SEED);
        for number in 0..20 {
            let mut place = || random.next() as usize % self.edge;
            let (z, y, x) = (place(), place(), place());
            let (part, at) = right.row(z, y);
            if part == me {
                shared.set(part, at + x, if number % 2 == 0 { 1.0 } else { -1.0 });
            }
        }
    }

    /// A V-cycle, from the beginning.
    fn round(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64)) {
        let threads = shared.threads();
        let field = |level, number| self.field(threads, level, number);
        let (right, u) = (self.right(threads), field(0, U));
        self.residual(shared, me, [u, right, field(0, R)], done);
        for level in 1..self.levels {
            self.restrict(shared, me, [field(level - 1, R), field(level, R), field(level, U)], done);
        }
        self.smooth(shared, me, [field(self.levels - 1, U), field(self.levels - 1, R)], done);
        for level in (0..self.levels - 1).rev() {
            self.interpolate(shared, me, [field(level + 1, U), field(level, U)], done);
            if level > 0 {
                self.again(shared, me, level, done);
            } else {
                self.residual(shared, me, [u, right, field(0, R)], done);
                self.smooth(shared, me, [u, field(0, R)], done);
            }
        }
    }
}

impl Mg {
    /// The residual of a coarser level with its new solution, in place, and a step of the smoother with it.
    fn again(&self, shared: &Shared<'_>, me: usize, level: u32, done: &mut dyn FnMut(u64)) {
        let threads = shared.threads();
        let (u, r) = (self.field(threads, level, U), self.field(threads, level, R));
        self.residual(shared, me, [u, r, r], done);
        self.smooth(shared, me, [u, r], done);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::shared::tests::run, *};

    /// The greatest residual of the solution after some cycles.
    fn residual(threads: usize, cycles: usize) -> (f64, Vec<u64>) {
        let kernel = Mg { edge: 32, levels: 3 };
        let (content, _) = run(&kernel, threads, cycles);
        let (u, right) = (kernel.field(threads, 0, U), kernel.right(threads));
        let mut solution = Vec::new();
        let get = |field: Field, z: usize, y: usize, x: usize| {
            let (part, at) = field.row(z, y);
            f64::from_bits(content[part][at + x % 32])
        };
        let mut worst = 0.0_f64;
        for (z, y, x) in (0..32_usize.pow(3)).map(|at| (at / 1024, at / 32 % 32, at % 32)) {
            let mut image = 0.0;
            for (dz, dy, dx) in (0..27).map(|at| (at / 9, at / 3 % 3, at % 3)) {
                let away = [dz, dy, dx].iter().filter(|&&step| step != 1).count();
                image += OPERATOR[away] * get(u, z + dz + 31, y + dy + 31, x + dx + 31);
            }
            worst = worst.max((get(right, z, y, x) - image).abs());
            solution.push(get(u, z, y, x).to_bits());
        }
        (worst, solution)
    }

    #[test]
    fn cycles_come_nearer_to_the_solution() {
        let after: Vec<f64> = [0, 1, 2, 4].map(|cycles| residual(1, cycles).0).into();
        assert_eq!(after[0], 1.0);
        // The coarser levels take most of it away: without them, or with a wrong weight, it is several times as much.
        assert!(after[1] < 0.1 && after[2] < 0.025 && after[3] < 0.003, "{after:?}");
    }

    #[test]
    fn the_solution_does_not_depend_on_the_number_of_threads() {
        let one = residual(1, 2).1;
        assert_eq!(residual(2, 2).1, one);
        assert_eq!(residual(4, 2).1, one);
    }
}
