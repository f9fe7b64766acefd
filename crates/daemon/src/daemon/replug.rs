//! vCPUs of guests that cannot be told, plugged anew where an operator wants that.

use super::Daemon;
use crate::{vm::Replugging, vm_thread::Command};
use tracing::info;

impl Daemon {
    /// Replugs what is due, a vCPU of each VM at a time.
    pub(super) fn replug_due(&mut self) {
        let Some(after) = self.config.replug_after else { return };
        for entry in self.entries.values_mut() {
            let (Some(vm), Some((_, thread))) = (&mut entry.vm, &entry.connection) else { continue };
            if entry.silent || entry.halt.is_some() {
                continue;
            }
            let Some((vcpu, guest_node)) = vm.replug_due(after) else { continue };
            info!(vm = vm.name(), vcpu, guest_node, "a vCPU of a guest that cannot be told is replugged");
            if thread.send(Command::Replug { vcpu, node: guest_node }) {
                vm.replugging = Some(Replugging { vcpu, guest_node, reply: None });
            }
        }
    }
}
