//! A connection to a VM that exists in memory.

use crate::{MemoryVm, Shared, Unplug};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};
use vnuma_hypervisor::{Migrates, ObservedVcpus, Plug, Plugged, Sizes, VmConnection, VmError, VmEvent};
use vnuma_model::{MigrationProgress, MigrationStatus, Vcpu, VmDescription};
use vnuma_process::open_pidfd;

/// What a guest is said to be given for an answer. Nothing waits that long.
const LIMIT_MS: u64 = 10_000;

/// `_OST` status of a guest that refuses.
const REFUSED: i64 = 0x82;

#[derive(Debug)]
pub(super) struct MemoryConnection {
    shared: Arc<Shared>,
    name: String,
    /// Differs when another VM has replaced it.
    instance: u64,
    pid: i32,
    pidfd: OwnedFd,
    event_fd: Arc<EventFd>,
}

impl MemoryConnection {
    pub(super) fn new(shared: &Arc<Shared>, name: &str, vm: &MemoryVm) -> io::Result<Self> {
        let pid = vm.description.pid;
        let pidfd =
            if vm.real_process { open_pidfd(pid)? } else { vm.end_fd.as_fd().try_clone_to_owned()? };
        let (shared, name, event_fd) = (Arc::clone(shared), name.to_owned(), Arc::clone(&vm.event_fd));
        Ok(Self { shared, name, instance: vm.instance, pid, pidfd, event_fd })
    }

    fn gone(&self) -> VmError {
        VmError::Disconnected { vm: self.name.clone() }
    }

    /// Asks the VM for something, once it answers.
    fn ask<T>(&self, act: impl FnOnce(&mut MemoryVm, String) -> Result<T, VmError>) -> Result<T, VmError> {
        let mine = |vm: &&mut MemoryVm| vm.instance == self.instance;
        let delay = self.shared.lock().vms.get_mut(&self.name).filter(mine).map(|vm| vm.delay);
        if let Some(delay) = delay.filter(|delay| !delay.is_zero()) {
            thread::sleep(delay);
        }
        let mut state = self.shared.lock();
        while state.vms.get_mut(&self.name).filter(mine).is_some_and(|vm| vm.stuck) {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let vm = state.vms.get_mut(&self.name).filter(mine).ok_or_else(|| self.gone())?;
        if let Some(error) = vm.errors.pop_front() {
            return Err(error);
        }
        let name = vm.description.name.clone();
        if vm.silent {
            return Err(VmError::Timeout { vm: name, command: "anything".to_owned(), limit_ms: 1 });
        }
        act(vm, name)
    }
}

/// The vCPU of this APIC id, if the guest can do without it.
fn removable(vm: &MemoryVm, name: String, apic_id: u32) -> Result<&Vcpu, VmError> {
    let vcpu = vm.description.vcpus.iter().find(|vcpu| vcpu.apic_id == apic_id);
    match vcpu {
        None => Err(VmError::NoVcpu { vm: name, vcpu: apic_id }),
        Some(vcpu) if vcpu.index == 0 => Err(VmError::BootVcpu { vm: name }),
        Some(vcpu) => Ok(vcpu),
    }
}

impl VmConnection for MemoryConnection {
    fn greet(&mut self) -> Result<(), VmError> {
        self.ask(|_, _| Ok(()))
    }

    fn observe_vcpus(&self) -> Option<ObservedVcpus> {
        let state = self.shared.lock();
        state.vms.get(&self.name).filter(|vm| vm.instance == self.instance)?.observed.clone()
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        self.ask(|vm, _| {
            vm.described += 1;
            Ok(vm.description.clone())
        })
    }

    fn attach_channel(&mut self, plug: Plug) -> Result<(), VmError> {
        let Plug::Ivshmem(server) = plug;
        self.ask(|vm, name| {
            if vm.device.is_some() || vm.foreign_channel {
                return Err(VmError::AlreadyAttached { vm: name });
            }
            if !vm.free_port {
                return Err(VmError::NoFreePort { vm: name });
            }
            vm.device = Some(server);
            Ok(())
        })
    }

    fn probe(&mut self, _limit: Duration) -> Result<(), VmError> {
        self.ask(|_, _| Ok(()))
    }

    fn channel_attached(&mut self) -> Result<bool, VmError> {
        self.ask(|vm, _| Ok(vm.device.is_some() || vm.foreign_channel))
    }

    fn tidy_channel(&mut self) -> Result<bool, VmError> {
        self.channel_attached()
    }

    fn detach_channel(&mut self) -> Result<(), VmError> {
        self.ask(|vm, name| {
            if vm.device.is_none() && !vm.foreign_channel {
                return Err(VmError::NotAttached { vm: name });
            }
            if !vm.releases_device {
                return Err(VmError::DetachPending { vm: name, limit_ms: LIMIT_MS });
            }
            (vm.device, vm.foreign_channel) = (None, false);
            Ok(())
        })
    }

    fn removable_vcpu(&mut self, apic_id: u32) -> Result<Plugged, VmError> {
        self.ask(|vm, name| {
            let tid = removable(vm, name, apic_id)?.tid;
            Ok(Plugged { apic_id, tid })
        })
    }

    fn plug_vcpu(&mut self, node: u32) -> Result<Plugged, VmError> {
        self.ask(|vm, name| {
            let Some(Plugged { apic_id, tid }) = vm.spare.pop_front() else {
                return Err(VmError::NoSpareSlot { vm: name, node });
            };
            let vcpus = &mut vm.description.vcpus;
            vcpus.push(Vcpu { index: apic_id, apic_id, boot_node: Some(node), tid });
            vcpus.sort_by_key(|vcpu| vcpu.apic_id);
            Ok(Plugged { apic_id, tid })
        })
    }

    fn await_guest(&mut self, apic_id: u32) -> Result<(), VmError> {
        self.ask(|vm, name| {
            removable(vm, name.clone(), apic_id)?;
            if vm.takes_vcpus {
                return Ok(());
            }
            Err(VmError::PlugIgnored { vm: name, limit_ms: LIMIT_MS })
        })
    }

    fn unplug_vcpu(&mut self, apic_id: u32) -> Result<(), VmError> {
        self.ask(|vm, name| {
            let tid = removable(vm, name.clone(), apic_id)?.tid;
            match vm.unplug {
                Unplug::Obey => {}
                Unplug::Refuse => {
                    vm.unplug = Unplug::Obey;
                    return Err(VmError::UnplugRefused { vm: name, vcpu: apic_id, status: REFUSED });
                }
                Unplug::Ignore => {
                    let limit_ms = LIMIT_MS;
                    return Err(VmError::UnplugPending { vm: name, vcpu: apic_id, limit_ms });
                }
            }
            vm.description.vcpus.retain(|vcpu| vcpu.apic_id != apic_id);
            vm.spare.push_back(Plugged { apic_id, tid });
            vm.silent |= std::mem::take(&mut vm.silent_after_unplug);
            Ok(())
        })
    }

    fn migrates(&mut self) -> Option<&mut dyn Migrates> {
        Some(self)
    }

    fn sizes(&mut self) -> Option<&mut dyn Sizes> {
        Some(self)
    }

    fn poll_event(&mut self, timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        let until = Instant::now() + timeout;
        loop {
            // Empty when nothing has happened.
            let _ = self.event_fd.read();
            let mut state = self.shared.lock();
            let Some(vm) = state.vms.get_mut(&self.name).filter(|vm| vm.instance == self.instance) else {
                return Ok(Some(VmEvent::Disconnected));
            };
            if let Some(event) = vm.events.pop_front() {
                return Ok(Some(event));
            }
            drop(state);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let left = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            // A signal is no event; the loop polls again.
            let _ = poll(&mut [PollFd::new(self.event_fd.as_fd(), PollFlags::POLLIN)], left);
        }
    }

    fn pid(&self) -> i32 {
        self.pid
    }

    fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}

impl Migrates for MemoryConnection {
    fn is_marked(&mut self) -> Result<bool, VmError> {
        self.ask(|vm, _| Ok(vm.marked))
    }

    fn mark(&mut self, marked: bool) -> Result<(), VmError> {
        self.ask(|vm, _| {
            vm.marked = marked;
            Ok(())
        })
    }

    fn migrate(&mut self, destination: &str, post_copy: bool) -> Result<(), VmError> {
        self.ask(|vm, _| {
            vm.migrated_to = Some((destination.to_owned(), post_copy));
            vm.migration.status = MigrationStatus::Setup;
            Ok(())
        })
    }

    fn progress(&mut self) -> Result<MigrationProgress, VmError> {
        self.ask(|vm, _| Ok(vm.migration.clone()))
    }

    fn is_leaving(&self) -> bool {
        self.shared.lock().vms.get(&self.name).is_some_and(|vm| vm.leaves.is_some())
    }

    fn has_left(&mut self) -> bool {
        self.shared.lock().vms.get(&self.name).is_some_and(|vm| vm.leaves == Some(true))
    }

    fn cancel(&mut self) -> Result<(), VmError> {
        self.ask(|vm, _| {
            vm.migration.status = MigrationStatus::Cancelled;
            Ok(())
        })
    }

    fn start_post_copy(&mut self) -> Result<(), VmError> {
        self.ask(|vm, _| {
            vm.migration.status = MigrationStatus::PostCopy;
            Ok(())
        })
    }
}

impl Sizes for MemoryConnection {
    fn request(&mut self, id: &str, bytes: u64) -> Result<(), VmError> {
        self.ask(|vm, name| {
            let resizes = vm.resizes;
            let devices = &mut vm.description.memory_devices;
            let Some(device) = devices.iter_mut().find(|device| device.id.as_deref() == Some(id)) else {
                let reason = format!("Device '{id}' not found");
                return Err(VmError::Refused { vm: name, command: "qom-set".to_owned(), reason });
            };
            device.requested_bytes = bytes;
            if resizes {
                device.plugged_bytes = bytes;
                vm.events.push_back(VmEvent::MemoryChanged);
                // A counter that is full is as readable as any other.
                let _ = vm.event_fd.write(1);
            }
            Ok(())
        })
    }
}
