//! What is checked of migrations.

use super::{Checker, VmView};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_daemon::core::event::{Outcome, Report, Request};
use vnuma_hypervisor::VmError;
use vnuma_model::{ApicId, HostNodeId, MigrationStatus};
use vnuma_policy::world::{ConnectionId, VmId};

/// What a request wants, as far as a yes says that it was done.
#[derive(Debug)]
pub(super) enum Wanted {
    Move(String, ApicId, HostNodeId),
    Detach(String),
    Migrate,
    Other,
}

impl Wanted {
    pub(super) fn of(request: &Request) -> Self {
        match request {
            Request::Move(name, vcpu, node, _) => Self::Move(name.clone(), *vcpu, *node),
            Request::Detach(name, _) => Self::Detach(name.clone()),
            Request::Migrate(..) => Self::Migrate,
            _ => Self::Other,
        }
    }
}

/// A migration that was granted.
#[derive(Debug)]
struct Departure {
    /// How many orders to begin the VM may get.
    orders: u32,
    /// It had a channel.
    attached: bool,
}

/// What is known of migrations.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    granted: BTreeMap<VmId, Departure>,
    /// The same of the present step's request, which is answered after what it leads to.
    wanted: BTreeMap<VmId, Departure>,
    /// VMs with an order to migrate, which are not known to have finished.
    pub(super) under_way: BTreeSet<VmId>,
    /// Processes of VMs that an operator has detached.
    pub(super) unwanted: BTreeSet<i32>,
}

impl Migrations {
    /// What counts for the next daemon as well.
    pub(super) fn restarted(&mut self) -> Self {
        Self { unwanted: std::mem::take(&mut self.unwanted), ..Self::default() }
    }

    pub(super) fn forget(&mut self, vm: VmId) {
        self.granted.remove(&vm);
        self.under_way.remove(&vm);
    }
}

impl VmView {
    /// Its guest has arrived: who put its vCPUs where they were is of no account.
    pub(super) fn arrived(&mut self) {
        self.vcpus.values_mut().for_each(|vcpu| (vcpu.assigned, vcpu.by_policy) = (None, false));
    }
}

impl Checker {
    /// A process has ended.
    pub fn process_ended(&mut self, pid: i32) {
        self.migrations.unwanted.remove(&pid);
    }

    /// Somebody wants something after which a VM may be attached.
    pub(super) fn wanted_attached(&mut self, wanted: &Request) {
        if let Request::Attach(name, _) | Request::AttachOnArrival(name, _) | Request::Migrate(name, ..) =
            wanted
        {
            let pids: Vec<_> = self.named(name).map(|(_, view)| view.pid).collect();
            self.migrations.unwanted.retain(|pid| !pids.contains(pid));
        }
        if let Request::Migrate(name, ..) = wanted {
            let departure =
                |(vm, view): (VmId, &VmView)| (vm, Departure { orders: 1, attached: view.channel.is_some() });
            self.migrations.wanted = self.named(name).map(departure).collect();
        }
    }

    /// A request was answered.
    pub(super) fn granted(&mut self, wanted: &Wanted, yes: bool) {
        match wanted {
            Wanted::Migrate => {
                let granted = std::mem::take(&mut self.migrations.wanted);
                self.migrations.granted.extend(granted.into_iter().filter(|_| yes));
            }
            Wanted::Detach(name) if yes => {
                let pids: Vec<_> = self.named(name).map(|(_, view)| view.pid).collect();
                self.migrations.unwanted.extend(pids);
            }
            _ => {}
        }
    }

    /// What a report says of a migration.
    pub(super) fn migration_reported(&mut self, connection: ConnectionId, vm: VmId, report: &Report) {
        let Report::Outcome(_, outcome @ (Outcome::Migration(_) | Outcome::MigrationBegun(_))) = report
        else {
            return;
        };
        if let Some(known) = self.connections.get_mut(&connection) {
            known.asked_of_migration = false;
        }
        let over = match outcome {
            Outcome::Migration(Ok(migration)) => {
                !matches!(migration.status, MigrationStatus::Active | MigrationStatus::PostCopy)
            }
            Outcome::MigrationBegun(Err(error)) => {
                let not_told = error.precedes_migration();
                if let Some(departure) = self.migrations.granted.get_mut(&vm).filter(|_| not_told) {
                    departure.orders += 1;
                }
                not_told || matches!(error, VmError::Refused { .. })
            }
            _ => false,
        };
        if over {
            self.migrations.under_way.remove(&vm);
        }
    }

    /// A VM gets the order to migrate. `marked`: it is, in truth.
    pub fn departs(&mut self, connection: ConnectionId, marked: bool) {
        let Some(known) = self.connections.get_mut(&connection) else {
            return self.expect(false, "migration", || format!("connection {connection} is closed"));
        };
        let (vm, beside) = (known.vm, std::mem::replace(&mut known.asked_of_migration, true));
        let due = |departure: &&mut Departure| departure.orders > 0;
        let wanted = self.migrations.wanted.get_mut(&vm).filter(due);
        let departure = wanted.or_else(|| self.migrations.granted.get_mut(&vm).filter(due));
        let attached = departure.map(|departure| {
            departure.orders -= 1;
            departure.attached
        });
        self.expect(attached.is_some(), "migration", || format!("VM {vm}: nobody wants it to migrate"));
        let open = self.vms.get(&vm).is_some_and(|view| view.channel.is_some());
        self.expect(!open, "migration", || format!("VM {vm}: it migrates with its channel"));
        let back = marked || attached != Some(true);
        self.expect(back, "migration", || format!("VM {vm}: it has no mark to get its channel back by"));
        let fresh = self.migrations.under_way.insert(vm) && !beside;
        self.expect(fresh, "migration", || format!("VM {vm}: it is told to migrate twice"));
    }

    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (VmId, &'a VmView)> + 'a {
        self.vms.iter().filter(move |(_, view)| view.name == name).map(|(vm, view)| (*vm, view))
    }
}
