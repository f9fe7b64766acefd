//! Machines that leave for another host, and machines that wait for a guest from there.

use crate::{
    action::{Action, MILLI, SECOND},
    simulation::Simulation,
    world::{Machine, Serial, Slot},
};
use vnuma_daemon::core::event::{Ask, Request};
use vnuma_hypervisor::VmError;
use vnuma_model::{MigrationProgress, MigrationStatus, RunState};

/// Between two attempts of a migration to end while its QEMU is stopped or hangs.
const AGAIN: u64 = 100 * MILLI;

fn vm() -> String {
    "a VM".to_owned()
}

/// How a machine that migrates refuses a change of its devices.
pub(crate) fn busy(command: &str) -> VmError {
    let reason = "not allowed while migrating".to_owned();
    VmError::Refused { vm: vm(), command: command.to_owned(), reason }
}

impl Machine {
    /// Its guest is on its way to another host.
    pub fn migrates(&self) -> bool {
        matches!(self.migration, MigrationStatus::Active | MigrationStatus::PostCopy)
    }

    /// Its guest is at another host.
    pub fn has_left(&self) -> bool {
        self.migration == MigrationStatus::Completed
    }

    /// What its hypervisor says that it does.
    pub fn run_state(&self) -> RunState {
        match self.migration {
            MigrationStatus::Completed => RunState::Left,
            MigrationStatus::PostCopy => RunState::Leaving,
            _ if self.waits => RunState::Arriving,
            _ => RunState::Running,
        }
    }
}

impl Simulation {
    /// Marks a machine, or takes the mark away.
    pub(crate) fn mark(&mut self, slot: Slot, serial: Serial, marked: bool) -> Result<(), VmError> {
        let fails = self.chaotic && self.rng.chance(20);
        let Some(machine) = self.world.machine_mut(slot, serial) else {
            return Err(VmError::Disconnected { vm: vm() });
        };
        if fails {
            let reason = "no memory".to_owned();
            return Err(VmError::Refused { vm: vm(), command: "chardev-add".into(), reason });
        }
        machine.marked = marked;
        self.count(if marked { "marks set" } else { "marks taken away" });
        Ok(())
    }

    /// A machine gets the order to migrate. It refuses while it has a channel or migrates already.
    pub(crate) fn begin_migration(
        &mut self,
        slot: Slot,
        serial: Serial,
        post_copy: bool,
    ) -> Result<(), VmError> {
        let refused = |reason: &str| {
            Err(VmError::Refused { vm: vm(), command: "migrate".into(), reason: reason.into() })
        };
        let unreachable = self.chaotic && self.rng.chance(150);
        let Some(machine) = self.world.machine_mut(slot, serial) else {
            return Err(VmError::Disconnected { vm: vm() });
        };
        if machine.device.is_some() {
            return refused("Migration is disabled when using feature 'peer mode' in device 'ivshmem'");
        }
        if machine.migrates() {
            self.count("second migrations refused");
            return refused("There's a migration process in progress");
        }
        if machine.waits || machine.has_left() {
            return refused("Guest is waiting for an incoming migration");
        }
        if unreachable {
            return refused("no route to host");
        }
        (machine.migration, machine.passes) = (MigrationStatus::Active, 1);
        machine.post_copy = post_copy;
        self.count("migrations begun");
        let after_ns = self.rng.within(50 * MILLI..10 * SECOND);
        self.later(after_ns, Action::EndMigration(slot, serial));
        Ok(())
    }

    /// A migration ends well or not, or is cancelled already.
    pub(crate) fn end_migration(&mut self, slot: Slot, serial: Serial) {
        let fails = self.rng.chance(400);
        let leaves_ns = self.rng.within(0..10 * SECOND);
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        if !machine.migrates() {
            return;
        }
        if !machine.answers() {
            return self.later(AGAIN, Action::EndMigration(slot, serial));
        }
        // With its guest at the destination, only the destination can fail.
        if fails && machine.migration == MigrationStatus::Active {
            machine.migration = MigrationStatus::Failed;
            self.count("migrations failed");
        } else {
            machine.migration = MigrationStatus::Completed;
            self.count("migrations completed");
            self.later(leaves_ns, Action::EndLeft(slot, serial));
        }
        self.machine_event(slot, |worker| worker.describe = true);
    }

    /// The manager of a machine that has left ends its process.
    pub(crate) fn end_left(&mut self, slot: Slot, serial: Serial) {
        if self.world.machine(slot, serial).is_some() {
            self.end(slot, false);
        }
    }

    /// A machine says how far it is, after an order to switch or to cancel.
    pub(crate) fn look_at_migration(
        &mut self,
        slot: Slot,
        serial: Serial,
        ask: &Ask,
    ) -> Result<MigrationProgress, VmError> {
        let Some(machine) = self.world.machine_mut(slot, serial) else {
            return Err(VmError::Disconnected { vm: vm() });
        };
        let (active, mut told) = (machine.migration == MigrationStatus::Active, false);
        match ask {
            Ask::SwitchMigration if active && machine.post_copy => {
                machine.migration = MigrationStatus::PostCopy;
                told = true;
            }
            Ask::CancelMigration if active => {
                machine.migration = MigrationStatus::Cancelled;
                told = true;
            }
            _ => {}
        }
        machine.passes += 1;
        let migration = MigrationProgress {
            status: machine.migration,
            sent_bytes: 1 << 20,
            left_bytes: 1 << 20,
            total_bytes: 1 << 30,
            passes: machine.passes,
            downtime_ms: None,
            problem: None,
        };
        if told {
            self.count(if *ask == Ask::CancelMigration { "migrations cancelled" } else { "post-copy begun" });
            self.machine_event(slot, |worker| worker.describe = true);
        }
        Ok(migration)
    }

    /// A machine that hangs may carry out its orders as soon as it goes on.
    pub(crate) fn carried_out_late(&mut self, slot: Slot, serial: Serial, ask: &Ask) {
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        match ask {
            Ask::Attach(_) => machine.late_attach = machine.device.is_none(),
            Ask::Mark(marked) => machine.marked = *marked,
            Ask::SwitchMigration | Ask::CancelMigration => drop(self.look_at_migration(slot, serial, ask)),
            Ask::Migrate(_, post_copy) => machine.late_migration = Some(*post_copy),
            _ => {}
        }
    }

    /// It goes on, and carries out earlier orders.
    pub(crate) fn catch_up(&mut self, slot: Slot, serial: Serial) {
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        let late = (std::mem::take(&mut machine.late_attach), machine.late_migration.take());
        if late.0 && !machine.migrates() && !machine.has_left() {
            self.plug_device(slot, serial, false);
            self.count("attaches carried out late");
        }
        if let (_, Some(post_copy)) = late
            && self.begin_migration(slot, serial, post_copy).is_ok()
        {
            self.count("migrations begun late");
        }
    }

    /// A guest arrives in a machine that waits.
    pub(crate) fn guest_arrives(&mut self, slot: Slot, serial: Serial) {
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        if std::mem::take(&mut machine.waits) {
            self.count("guests arrived");
            self.machine_event(slot, |worker| worker.describe = true);
        }
    }

    /// An operator has a VM migrated, cancels that, or wants one attached when it arrives.
    pub(crate) fn ask_migration(&mut self, slot: Slot) {
        let name = self.world.places[slot].name.clone();
        let post_copy = self.rng.chance(300);
        match self.rng.index(10) {
            0..=5 => self.ask(|to| Request::Migrate(name, "tcp:b:4444".to_owned(), post_copy, to)),
            6..=7 => self.ask(|to| Request::CancelMigration(name, to)),
            8 => self.ask(|to| Request::ShowMigration(name, to)),
            _ => self.ask(|to| Request::AttachOnArrival(name, to)),
        }
    }
}
