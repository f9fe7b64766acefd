//! Variety that repeats.

/// A small linear congruential generator (Knuth's MMIX constants): a scenario only needs variety that repeats.
pub struct Random(pub u64);

impl Random {
    /// A number from 0 to below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound as u64) as usize
    }
}
