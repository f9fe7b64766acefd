//! What is checked of moves of memory.

use crate::{
    truth::Homes,
    world::{GUEST_NODE, mapping},
};
use std::collections::BTreeMap;
use vnuma_model::GuestNodeId;
use vnuma_policy::{
    memory_move::MoveMemory,
    world::{TaskId, VmId},
};

/// What is known of moves, and which are under way.
#[derive(Debug, Default)]
pub(super) struct Rules {
    under_way: BTreeMap<VmId, (TaskId, i32)>,
}

impl Rules {
    /// A move is to begin. What is wrong with it, if something is.
    pub(super) fn begins(
        &mut self,
        task: TaskId,
        pid: i32,
        order: &MoveMemory,
        homes: &Homes,
    ) -> Option<String> {
        let vm = task.vm;
        let twice = self.under_way.insert(vm, (task, pid)).is_some_and(|(_, before)| before == pid);
        let its = |(id, home): (&GuestNodeId, &u32)| {
            let start = mapping(*id).start;
            order.within == Some((start, start + GUEST_NODE)) && order.to == *home
        };
        let home = homes.iter().any(its);
        let inside = |part: &(u64, u64)| {
            let within = order.within.unwrap_or_default();
            within.0 <= part.0 && part.0 < part.1 && part.1 <= within.1
        };
        let parts = order.parts.as_ref().is_none_or(|parts| !parts.is_empty() && parts.iter().all(inside));
        let sound = order.from != order.to && order.bytes > 0 && order.bytes <= GUEST_NODE && parts;
        (twice || !home || !sound).then(|| {
            format!("memory of VM {vm}, at home {homes:?}: {order:?}; another one is under way: {twice}")
        })
    }

    /// A move has ended.
    pub(super) fn ended(&mut self, task: TaskId) {
        self.under_way.retain(|_, (known, _)| *known != task);
    }
}
