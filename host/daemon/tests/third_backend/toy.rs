//! A backend by the recipe of docs/extending.md: a VMM whose VMs are threads of this process. Its manager keeps pins, and neither
//! migrates nor sizes memory.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};
use vnuma_hypervisor::{
    ObservedVcpus, PinError, Pins, Plug, Plugged, PolicyPin, VmBackend, VmConnection, VmError, VmEvent,
};
use vnuma_model::{Abilities, CpuSet, VmCandidate, VmDescription, VmHandle};

const PREFIX: &str = "toy:";
const ABILITIES: Abilities = Abilities { answered_for: false, pins: true, migrates: None };

/// One VM, and what was asked of it.
#[derive(Clone)]
pub struct ToyBackend {
    pub description: VmDescription,
    /// The guest's end of the channel, while it is plugged.
    pub device: Arc<Mutex<Option<OwnedFd>>>,
    /// The thread and CPUs of each pin.
    pub pinned: Arc<Mutex<Vec<(i32, CpuSet)>>>,
}

impl ToyBackend {
    pub fn new(description: VmDescription) -> Self {
        Self { description, device: Arc::default(), pinned: Arc::default() }
    }
}

impl VmBackend for ToyBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        let name = self.description.name.as_str();
        Ok(vec![VmCandidate::new(format!("{PREFIX}{name}"), name, 0).with(ABILITIES)])
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear_changes(&mut self) {}

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        let failed = |source| VmError::Connect { socket: handle.to_string(), source };
        if !handle.as_str().starts_with(PREFIX) {
            return Err(failed(std::io::Error::other("not a VM of the toy")));
        }
        let pidfd = vnuma_process::open_pidfd(self.description.pid).map_err(failed)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let events = EventFd::from_value_and_flags(0, flags).map_err(|errno| failed(errno.into()))?;
        Ok(Box::new(ToyConnection { vm: self.clone(), pidfd, events }))
    }
}

struct ToyConnection {
    vm: ToyBackend,
    pidfd: OwnedFd,
    events: EventFd,
}

impl ToyConnection {
    fn name(&self) -> String {
        self.vm.description.name.clone()
    }

    fn no_slot(&self, vcpu: u32) -> VmError {
        VmError::NoVcpu { vm: self.name(), vcpu }
    }
}

impl VmConnection for ToyConnection {
    fn greet(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn observe_vcpus(&self) -> Option<ObservedVcpus> {
        None
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        Ok(self.vm.description.clone())
    }

    fn attach_channel(&mut self, plug: Plug) -> Result<(), VmError> {
        let Plug::Ivshmem(server) = plug;
        *self.vm.device.lock().expect("no panic") = Some(server);
        Ok(())
    }

    fn probe(&mut self, _limit: Duration) -> Result<(), VmError> {
        Ok(())
    }

    fn channel_attached(&mut self) -> Result<bool, VmError> {
        Ok(self.vm.device.lock().expect("no panic").is_some())
    }

    fn tidy_channel(&mut self) -> Result<bool, VmError> {
        self.channel_attached()
    }

    fn detach_channel(&mut self) -> Result<(), VmError> {
        let device = self.vm.device.lock().expect("no panic").take();
        device.map(drop).ok_or_else(|| VmError::NotAttached { vm: self.name() })
    }

    fn pins(&mut self) -> Option<&mut dyn Pins> {
        Some(self)
    }

    fn removable_vcpu(&mut self, vcpu: u32) -> Result<Plugged, VmError> {
        Err(self.no_slot(vcpu))
    }

    fn plug_vcpu(&mut self, node: u32) -> Result<Plugged, VmError> {
        Err(VmError::NoSpareSlot { vm: self.name(), node })
    }

    fn await_guest(&mut self, vcpu: u32) -> Result<(), VmError> {
        Err(self.no_slot(vcpu))
    }

    fn unplug_vcpu(&mut self, vcpu: u32) -> Result<(), VmError> {
        Err(self.no_slot(vcpu))
    }

    fn poll_event(&mut self, _timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        Ok(None)
    }

    fn pid(&self) -> i32 {
        self.vm.description.pid
    }

    fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl Pins for ToyConnection {
    fn pin(&mut self, tid: i32, cpus: &CpuSet) -> Result<(), VmError> {
        self.vm.pinned.lock().expect("no panic").push((tid, cpus.clone()));
        Ok(())
    }

    fn confine(&mut self, pins: &[PolicyPin]) -> Vec<Result<(), PinError>> {
        let set = |pin: &PolicyPin| pin.cpus.clone().unwrap_or_else(|| pin.operator.clone());
        pins.iter().map(|pin| Ok(self.pin(pin.tid, &set(pin))?)).collect()
    }

    fn give_back(&mut self, _keep: &BTreeMap<i32, Vec<CpuSet>>) -> Result<usize, VmError> {
        Ok(0)
    }
}
