//! VMs that migrate to another host, and VMs that arrive from one.
//!
//! | | |
//! |---|---|
//! | `vnumactl migrate` | there is a [`Migration`], which a policy takes on: outcomes are its events |
//! | a VM that is at its destination | is forgotten, by whatever it was migrated |
//! | a VM that is marked, or arrives with its channel | that is noted, and a policy has it attached or plugged anew |

use super::counts::none_of;
use super::{
    Core,
    event::Level,
    refusal::{Refusal, refuse_if_migrating},
    requests::{Taken, check_publishable},
    waiting::Until,
};
use std::collections::{BTreeMap, VecDeque};
use vnuma_api as api;
use vnuma_hypervisor::{GO_ON, VmError};
use vnuma_model::{MigrationProgress, RunState, VmDescription};
use vnuma_policy::{
    migration::{BROKE, Migration, MigrationEvent, Phase},
    world::{ChannelState, LinkEvent, Vm, VmId, has_left},
};

/// How many migrations of VMs that are gone are kept, for clients that ask.
const REMEMBERED: usize = 64;

/// Migrations that have ended.
#[derive(Default)]
pub(super) struct Migrated {
    /// The last migrations of VMs that are gone.
    last: VecDeque<api::Migration>,
    /// How many have ended, by outcome.
    counts: BTreeMap<&'static str, u64>,
}

impl Migrated {
    /// Counts a migration that has ended. If it was under way when its VM ended, it has failed.
    fn count(&mut self, phase: Phase) {
        let phase = if phase.is_over() { phase } else { Phase::Failed };
        *self.counts.entry(phase.name()).or_default() += 1;
    }

    /// How many have ended, by outcome.
    pub(super) fn counts(&self) -> BTreeMap<&'static str, u64> {
        let mut all = none_of([Phase::Done, Phase::Cancelled, Phase::Failed].map(Phase::name));
        all.extend(&self.counts);
        all
    }

    fn remember(&mut self, known: api::Migration) {
        self.last.retain(|other| other.vm != known.vm);
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(known);
    }

    fn of(&self, name: &str) -> Option<api::Migration> {
        self.last.iter().find(|known| known.vm == name).cloned()
    }
}

impl Core {
    /// An operator wants a VM to go to another host.
    pub(super) fn want_migration(&mut self, name: &str, destination: String, post_copy: bool) -> Taken {
        let (id, vm, _) = self.connected(name)?;
        let vm_name = || name.to_owned();
        refuse_if_migrating(vm)?;
        let Some(destinations) = self.world.get(id).and_then(|managed| managed.abilities.migrates) else {
            return Err(VmError::NotMigrated { vm: vm_name() }.into());
        };
        if let Err(why) = destinations.check(&destination) {
            let destination = super::sanitize(&destination);
            return Err(Refusal::Destination { vm: vm_name(), destination, why });
        }
        if vm.waits() {
            return Err(Refusal::Waits { vm: vm_name() });
        }
        let attached = match vm.channel {
            _ if vm.replug.is_under_way() => return Err(Refusal::Replugging { vm: vm_name() }),
            ChannelState::Detached => false,
            ChannelState::Attached(_) => true,
            ChannelState::Lost | ChannelState::LostDetaching => {
                return Err(Refusal::Lost { vm: vm_name() });
            }
            ChannelState::Attaching | ChannelState::AttachTimedOut => {
                return Err(Refusal::Attaching { vm: vm_name() });
            }
            ChannelState::Recovering => return Err(Refusal::Recovering { vm: vm_name() }),
            ChannelState::Detaching(..) => return Err(Refusal::Detaching { vm: vm_name() }),
        };
        let now_ns = self.now_ns;
        self.log(None, Level::Info, format!("{name}: it migrates to {destination}"));
        if let Some((_, vm)) = self.world.vm_mut(id) {
            // The migration asks for that itself.
            (vm.unplug, vm.came_along) = (None, false);
            vm.migration = Some(Migration::new(destination, post_copy, attached, now_ns));
        }
        Ok((id, None))
    }

    /// An operator wants it to end.
    pub(super) fn cancel_migration(&mut self, name: &str) -> Taken {
        let known = self.migration_of(name)?;
        let past =
            |why| Refusal::PastCancel { vm: name.to_owned(), destination: known.destination.clone(), why };
        let Some(id) = self.registry.names.get(name).copied() else { return Err(past("it is over")) };
        let Some(migration) = self.vm(id).and_then(|vm| vm.migration.as_ref()) else {
            return Err(past("it is over"));
        };
        if migration.phase().is_over() || migration.phase() == Phase::Returning {
            return Err(past("it is over"));
        }
        if !migration.may_be_cancelled() {
            return Err(past("the guest runs at the destination, and part of its memory is there only"));
        }
        self.migration_event(id, MigrationEvent::CancelWanted);
        Ok((id, None))
    }

    /// The last migration of a VM, which may be gone.
    pub(super) fn migration_of(&self, name: &str) -> Result<api::Migration, Refusal> {
        let here = self.registry.names.get(name).and_then(|id| self.vm(*id));
        let shown = here.and_then(|vm| Some(shown(vm.name(), vm.migration.as_ref()?)));
        let gone = || self.states.migrated.of(name);
        match (shown.or_else(gone), here) {
            (Some(shown), _) => Ok(shown),
            (None, Some(_)) => Err(Refusal::NoMigration { vm: name.to_owned() }),
            (None, None) => Err(Refusal::NoVm(name.to_owned())),
        }
    }

    /// Passes an event to the VM's migration, if there is one.
    pub(super) fn migration_event(&mut self, id: VmId, event: MigrationEvent) {
        let now_ns = self.now_ns;
        self.change_migration(id, |migration| migration.on(event, now_ns));
    }

    /// Changes a migration, if there is one, and says once that it has ended.
    pub(super) fn change_migration(&mut self, id: VmId, change: impl FnOnce(&mut Migration)) {
        if self.vm(id).is_some_and(|vm| vm.migration.is_some())
            && let Some((_, vm)) = self.world.vm_mut(id)
            && let Some(migration) = &mut vm.migration
        {
            let was_over = migration.phase().is_over();
            change(migration);
            if !was_over && migration.phase().is_over() {
                self.migration_ended(id);
            }
        }
    }

    fn migration_ended(&mut self, id: VmId) {
        let Some(vm) = self.vm(id) else { return };
        let (name, Some(migration)) = (vm.name().to_owned(), &vm.migration) else { return };
        let (phase, keeps_mark) = (migration.phase(), migration.keeps_mark());
        let problem = migration.problem.as_ref().map(|problem| format!(": {problem}")).unwrap_or_default();
        let line = format!("{name}: its migration to {}: {}{problem}", migration.destination, phase.name());
        let level = if phase == Phase::Failed { Level::Warn } else { Level::Info };
        self.states.migrated.count(phase);
        self.log(id, level, line);
        if phase == Phase::Done {
            return self.left(id);
        }
        if self.vm(id).is_some_and(|vm| vm.channel.generation().is_some()) && !keeps_mark {
            self.unmark(id);
        }
    }

    /// The VM is at another host: its hypervisor here is left alone from now on. If its guest runs here again, it is found again.
    pub(super) fn left(&mut self, id: VmId) {
        self.migration_event(id, MigrationEvent::Left);
        if let Some(vm) = self.vm(id) {
            let line = format!("{}: it has left for another host", vm.name());
            self.log(id, Level::Info, line);
        }
        self.drop_left(id);
        let now_ns = self.now_ns;
        self.link_event(id, LinkEvent::Lost { problem: None, known: false, at_once: false, now_ns });
    }

    /// Keeps the migration of a VM that is gone, for clients that ask.
    pub(super) fn remember_migration(&mut self, mut vm: Vm) {
        let Some(mut migration) = vm.migration.take() else { return };
        let over = migration.phase().is_over();
        if !over {
            // Others were counted when they ended.
            self.states.migrated.count(migration.phase());
            migration.problem = Some("its hypervisor has ended".to_owned());
        }
        let mut known = shown(vm.name(), &migration);
        if !over {
            known.state = Phase::Failed.name().to_owned();
        }
        self.states.migrated.remember(known);
    }

    /// What the hypervisor says of a migration.
    pub(super) fn migration_looked(&mut self, id: VmId, outcome: Result<MigrationProgress, VmError>) {
        let event = match outcome {
            Ok(progress) => MigrationEvent::Looked(progress),
            Err(error) => MigrationEvent::LookFailed(error.to_string()),
        };
        self.migration_event(id, event);
    }

    /// The hypervisor has answered the order to begin, or has not in time.
    pub(super) fn migration_begun(&mut self, id: VmId, outcome: Result<(), VmError>) {
        let event = match outcome {
            Ok(()) => MigrationEvent::Begun(Ok(())),
            Err(error) if error.precedes_migration() => MigrationEvent::Busy(error.to_string()),
            Err(error) if error.may_be_answered() || lost(&error) => MigrationEvent::BeginUnanswered,
            Err(error) => MigrationEvent::Begun(Err(format!("{error} (docs/migration.md)"))),
        };
        self.migration_event(id, event);
    }

    /// The guest has not let go of the channel's device.
    pub(super) fn release_failed(&mut self, id: VmId, error: &VmError) {
        let pending =
            matches!(error, VmError::DetachPending { .. }) || error.may_be_answered() || lost(error);
        let event = match pending {
            true => MigrationEvent::ReleasePending,
            false => MigrationEvent::ReleaseFailed(error.to_string()),
        };
        self.migration_event(id, event);
    }

    /// An operator wants a VM attached as soon as its guest runs.
    pub(super) fn attach_on_arrival(&mut self, name: &str) -> Taken {
        let (id, vm, _) = self.connected(name)?;
        if vm.description.run_state == RunState::Running || vm.channel != ChannelState::Detached {
            return self.attach(name);
        }
        refuse_if_migrating(vm)?;
        check_publishable(vm)?;
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.mark.wanted = Some(true);
        }
        Ok((id, Some(Until::Marked)))
    }

    /// A VM is marked, or not, as was asked for; or that could not be changed.
    pub(super) fn marked(&mut self, id: VmId, marked: bool, outcome: Result<(), VmError>) {
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.mark.last = outcome.is_err().then_some(marked);
            vm.marked = if outcome.is_ok() { marked } else { vm.marked };
        }
        let event = match &outcome {
            Ok(()) => marked.then_some(MigrationEvent::Marked(Ok(()))),
            Err(error) if is_busy(error) => Some(MigrationEvent::Busy(error.to_string())),
            Err(error) => Some(MigrationEvent::Marked(Err(error.to_string()))),
        };
        match outcome {
            Ok(()) => self.reached(id, Until::Marked),
            Err(error) => self.refuse_first(id, Until::Marked, error.into()),
        }
        if let Some(event) = event {
            self.migration_event(id, event);
        }
    }

    /// The mark is to be removed. If that fails, it is tried again when an operator detaches the VM.
    pub(super) fn unmark(&mut self, id: VmId) {
        if let Some((_, vm)) = self.world.vm_mut(id).filter(|(_, vm)| vm.marked) {
            vm.mark.wanted = Some(false);
        }
    }

    /// Hypervisors report the end of the guest's run, and may not report the end of the migration, which follows.
    pub(super) fn describe_leaving(&mut self) {
        let leaves = |vm: &Vm| vm.description.run_state == RunState::Leaving;
        let all = self.world.iter().filter(|(_, managed)| managed.vm.as_ref().is_some_and(leaves));
        let all: Vec<VmId> = all.map(|(id, _)| id).collect();
        all.into_iter().for_each(|id| self.describe(id));
    }

    /// A marked VM could not be attached. Each reason is logged once.
    pub(super) fn attach_marked_failed(&mut self, id: VmId, problem: String) {
        if self.state(id).attach_problem.replace(problem.clone()).as_ref() == Some(&problem) {
            return;
        }
        let name = self.name_of(id);
        self.log(
            id,
            Level::Warn,
            format!("{name}: it could not be attached yet, which is tried on: {problem}"),
        );
        self.migration_event(id, MigrationEvent::AttachFailed(problem));
    }

    /// A VM is attached, whether an operator or its mark wanted that.
    pub(super) fn attached_again(&mut self, id: VmId) {
        self.state(id).attach_problem = None;
        self.migration_event(id, MigrationEvent::Attached);
        self.unmark(id);
    }

    /// The guest of a VM has arrived by a migration. No operator of this host has chosen the nodes of its vCPUs.
    pub(super) fn arrived(&mut self, id: VmId) {
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        vm.assigned.clear();
        vm.came_along = vm.channel.is_plugged();
        let name = vm.name().to_owned();
        self.log(id, Level::Info, format!("{name}: its guest has arrived"));
    }
}

/// Does this description say that a VM which waited does not any more?
pub(super) fn has_arrived(before: &Vm, description: &VmDescription) -> bool {
    before.waits() && description.run_state != before.description.run_state && !has_left(description)
}

/// The same request may succeed later.
fn is_busy(error: &VmError) -> bool {
    error.may_be_answered() || lost(error) || matches!(error, VmError::Silent { .. })
}

fn lost(error: &VmError) -> bool {
    matches!(error, VmError::Disconnected { .. } | VmError::Io { .. })
}

fn shown(name: &str, migration: &Migration) -> api::Migration {
    let MigrationProgress { sent_bytes, left_bytes, total_bytes, passes, downtime_ms, .. } =
        migration.progress;
    let phase = migration.phase();
    let way_out = |problem: String| if problem == BROKE { format!("{problem} ({GO_ON})") } else { problem };
    let cancelling = migration.is_cancelled() && matches!(phase, Phase::Starting(_) | Phase::Sending(_));
    api::Migration {
        vm: name.to_owned(),
        destination: migration.destination.clone(),
        post_copy: migration.post_copy,
        attached: migration.attached,
        state: if cancelling { "cancelling" } else { phase.name() }.to_owned(),
        sent_bytes,
        left_bytes,
        total_bytes,
        passes,
        downtime_ms,
        problem: migration.problem.clone().map(way_out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_whose_vm_has_ended_has_failed() {
        let mut migrated = Migrated::default();
        [Phase::Done, Phase::PostCopy, Phase::Failed].into_iter().for_each(|phase| migrated.count(phase));
        assert_eq!(migrated.counts(), [("cancelled", 0), ("done", 1), ("failed", 2)].into());
    }
}
