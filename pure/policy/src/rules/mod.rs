//! Rules that policies and requests have in common: pure functions of what is known and of what an operator has set.

mod memory;
mod rehome;
mod sizes;

pub use memory::Obstacle;
pub use rehome::RehomeObstacle;
pub(crate) use rehome::too_much_kept;
pub use sizes::ResizeObstacle;
