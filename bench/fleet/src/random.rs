//! Nodes in a random order, each filled before the next.

use crate::{
    server::{Amount, Server, Strategy},
    workload::{Vm, below},
};
use vnuma_random::Rng;

/// The order.
pub struct Random(Rng);

impl Random {
    /// Of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Rng::new(!seed))
    }
}

impl Strategy for Random {
    fn place(&mut self, _number: usize, server: &Server, _id: usize, vm: &Vm) -> Option<Vec<Amount>> {
        let mut order: Vec<usize> = (0..server.free.len()).collect();
        for at in (1..order.len()).rev() {
            order.swap(at, below(&mut self.0, at + 1));
        }
        Some(server.fill(&order, vm))
    }
}
