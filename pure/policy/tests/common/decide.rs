//! A decision of the policies that bring displaced memory home, with what they remember.

use vnuma_policy::{
    memory_move::MoveMemory,
    repatriation::{HomeInput, MemorySettings, Repatriator},
};

/// What is decided, and remembered.
pub fn decide(
    repatriator: &mut Repatriator,
    settings: &MemorySettings,
    input: &HomeInput<'_>,
) -> Option<MoveMemory> {
    let (order, next) = repatriator.weigh(settings, input);
    repatriator.remember(input.vm, next);
    order
}
