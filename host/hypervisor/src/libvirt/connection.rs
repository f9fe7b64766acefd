//! A domain as a VM.

use super::{
    Places,
    departure::Departure,
    describe,
    handshake::{Handshake, Place},
    states::shares_directory,
};
use crate::{
    Migrates, ObservedVcpus, Pins, Plug, Plugged, VmConnection, VmError, VmEvent, observed, process::Process,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    collections::VecDeque,
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_abi_topology_channel::ivshmem::VECTORS;
use vnuma_libvirt::{Domain, DomainEvent, DomainXml, LibvirtError};
use vnuma_model::{RunState, VmDescription};
use vnuma_process::{apparmor, qemu};

/// The alias of the channel's device. libvirt keeps the names that begin so for its users.
pub(super) const ALIAS: &str = "ua-vnuma";

/// For a call that libvirt answers without QEMU.
pub(super) const SHORT: Duration = Duration::from_secs(1);

/// For the XML, for which libvirt may ask QEMU.
pub(super) const XML: Duration = Duration::from_secs(3);

/// To plug or to unplug the device: some commands to QEMU, and the files that libvirt keeps.
const HOTPLUG: Duration = Duration::from_secs(15);

/// How long it is waited for the guest, which gives the device back.
const RELEASE: Duration = Duration::from_secs(1);

/// The channel's memory is a file of this name.
const MEMORY: &str = "/memfd:vnuma-topology";

/// Most events kept of a domain that does not answer. Of more the oldest are dropped: it is described anew when it answers.
const MAX_HELD: usize = 256;

/// Most open files of a QEMU that are looked at.
const MAX_FILES: usize = 65_536;

/// A domain that runs.
#[derive(Debug)]
pub(super) struct LibvirtConnection {
    pub(super) domain: Domain,
    pub(super) process: Process,
    /// As libvirt has it.
    pub(super) domain_name: String,
    /// As it is called here.
    pub(super) name: String,
    pub(super) places: Arc<Places>,
    /// Events that came while it was waited for another one.
    pub(super) held: VecDeque<VmEvent>,
    /// A VM comes from elsewhere, and has not run here yet.
    arrives: bool,
    /// The migration that was begun last.
    pub(super) departure: Option<Departure>,
    /// What people should know of the domain, and were not told yet.
    pub(super) complaint: Option<String>,
}

/// What libvirt says, as the error of a VM.
pub(super) fn error(vm: &str, error: LibvirtError) -> VmError {
    let vm = vm.to_owned();
    match error {
        LibvirtError::Timeout { .. } | LibvirtError::Busy { .. } => {
            VmError::NoAnswer { vm, reason: error.to_string() }
        }
        LibvirtError::NotConnected { uri, reason } => {
            VmError::Connect { socket: uri, source: std::io::Error::other(reason) }
        }
        LibvirtError::NoDomain { .. } => VmError::Disconnected { vm },
        other => VmError::Libvirt { vm, reason: other.to_string() },
    }
}

impl LibvirtConnection {
    pub(super) fn new(
        domain: Domain,
        process: Process,
        domain_name: String,
        name: String,
        places: Arc<Places>,
    ) -> Self {
        let (arrives, departure) = (qemu::receives(&qemu::command_line(process.pid())), None);
        Self {
            domain,
            process,
            domain_name,
            name,
            places,
            held: VecDeque::new(),
            arrives,
            departure,
            complaint: None,
        }
    }

    pub(super) fn failed(&self, cause: LibvirtError) -> VmError {
        error(&self.name, cause)
    }

    pub(super) fn xml(&self) -> Result<DomainXml, VmError> {
        let text = self.domain.xml(XML).map_err(|cause| self.failed(cause))?;
        let parsed = DomainXml::parse(&self.domain_name, &text);
        parsed.map_err(|cause| VmError::Libvirt { vm: self.name.clone(), reason: cause.to_string() })
    }

    fn refused<T>(&self, what: &str) -> Result<T, VmError> {
        self.impossible(format!("{what} is not done through libvirt"))
    }

    pub(super) fn impossible<T>(&self, reason: String) -> Result<T, VmError> {
        Err(VmError::Libvirt { vm: self.name.clone(), reason })
    }

    /// Plugs the device into the port of this bus. `along`: it goes with the domain to other hosts.
    fn plug(&self, bus: u32, handshake: Handshake, along: bool) -> Result<(), VmError> {
        let socket = handshake.path().to_string_lossy().into_owned();
        let device = device_xml(&socket, bus, along);
        let plugged = self.domain.attach_device(&device, HOTPLUG);
        // A child that has not served by now gets the order to end, so that QEMU cannot connect to it later.
        let served = handshake.end();
        match plugged {
            Ok(()) if served => Ok(()),
            Ok(()) => {
                let reason = format!(
                    "{socket}: another process has answered its QEMU, so the device is unplugged again"
                );
                let cause = VmError::Libvirt { vm: self.name.clone(), reason };
                // The guest takes part in that, and may take a while.
                let asked = self.domain.detach_device(ALIAS, HOTPLUG).map_err(|cause| self.failed(cause));
                Err(VmError::with_undo(cause, asked))
            }
            Err(late @ LibvirtError::Timeout { .. }) => {
                let then = if served { "QEMU has its channel" } else { "QEMU has not asked for its channel" };
                let reason = format!("{late}; {then}");
                Err(VmError::NoAnswer { vm: self.name.clone(), reason })
            }
            Err(cause) => Err(self.not_plugged(cause, socket)),
        }
    }

    /// Why the device could not be plugged. Of a QEMU that may not connect libvirt says only that it was not permitted.
    fn not_plugged(&self, cause: LibvirtError, socket: String) -> VmError {
        let reason = cause.to_string();
        match apparmor::profile(self.process.pid()) {
            Some(profile) if is_confined(&profile, &socket, &reason) => {
                VmError::Confined { vm: self.name.clone(), profile, socket, reason }
            }
            _ if !shares_directory(self.process.pid(), &self.places.sockets) => {
                let directory = self.places.sockets.display();
                let reason = format!(
                    "{cause}: its QEMU has not {directory} of the host, which has to be mounted at the same path in its container"
                );
                VmError::Libvirt { vm: self.name.clone(), reason }
            }
            _ => self.failed(cause),
        }
    }

    /// An error if QEMU has a channel that is not in the domain's XML. libvirtd was killed while it plugged the device, and does not
    /// find it when it is started again; or an operator gave QEMU the device by its monitor.
    fn knows_channel(&self) -> Result<(), VmError> {
        // QEMU closes the memory a moment after libvirt has taken the device out of the XML.
        let until = Instant::now() + RELEASE;
        while self.has_memory() {
            if Instant::now() >= until {
                return self.impossible(format!(
                    "its QEMU has the channel's device, and libvirt does not know of it: shut the domain down and start it again, \
                     or unplug the device with `virsh qemu-monitor-command {} --hmp device_del {ALIAS}`, after which libvirt shows \
                     the domain as tainted",
                    self.domain_name
                ));
            }
            std::thread::sleep(RELEASE / 50);
        }
        Ok(())
    }

    fn next_event(&self) -> Option<VmEvent> {
        std::iter::from_fn(|| self.domain.next_event()).find_map(|event| meaning(&event))
    }

    /// libvirt tells an event later than it changes the XML: another device may be plugged by then, or this one gone.
    fn is_still_true(&mut self, event: &VmEvent) -> Result<bool, VmError> {
        Ok(match event {
            VmEvent::ChannelAttached => self.channel_attached()?,
            VmEvent::ChannelDetached => !self.channel_attached()?,
            _ => true,
        })
    }

    /// Has QEMU the channel's memory, by vnumad or by others?
    fn has_memory(&self) -> bool {
        let Ok(files) = fs::read_dir(format!("/proc/{}/fd", self.process.pid())) else { return false };
        let names = files.take(MAX_FILES).flatten().filter_map(|file| fs::read_link(file.path()).ok());
        names.into_iter().any(|name| name.to_string_lossy().starts_with(MEMORY))
    }
}

/// Does the profile keep a QEMU from this socket? Where the kernel does not say, as in a sandbox, the error does.
fn is_confined(profile: &str, socket: &str, error: &str) -> bool {
    let may_connect = apparmor::may_connect(Path::new("/"), profile, socket);
    may_connect.map_or_else(|| error.contains("Permission denied"), |may_connect| !may_connect)
}

/// The channel's device as libvirt takes it. One that goes along has the role in which libvirt migrates it.
fn device_xml(socket: &str, bus: u32, along: bool) -> String {
    let role = if along { " role='master'" } else { "" };
    let mut path = String::new();
    for character in socket.chars() {
        match character {
            '&' => path.push_str("&amp;"),
            '<' => path.push_str("&lt;"),
            '\'' => path.push_str("&apos;"),
            other => path.push(other),
        }
    }
    format!(
        "<shmem name='vnuma'{role}><model type='ivshmem-doorbell'/><server path='{path}'/>\
         <msi vectors='{VECTORS}' ioeventfd='on'/><alias name='{ALIAS}'/>\
         <address type='pci' domain='0x0000' bus='{bus:#04x}' slot='0x00' function='0x0'/></shmem>"
    )
}

impl VmConnection for LibvirtConnection {
    fn greet(&mut self) -> Result<(), VmError> {
        // What happened while nothing was answered is reported later. Until then it does not wake a caller that waits for an answer.
        while let Some(event) = self.next_event() {
            self.held.push_back(event);
        }
        let surplus = self.held.len().saturating_sub(MAX_HELD);
        self.held.drain(..surplus);
        self.domain.state(SHORT).map(drop).map_err(|cause| self.failed(cause))
    }

    fn observe_vcpus(&self) -> Option<ObservedVcpus> {
        observed::of(&self.process)
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        let xml = self.xml()?;
        let state = self.domain.state(SHORT).map_err(|cause| self.failed(cause))?;
        let run_state = describe::run_state(state, self.arrives);
        self.arrives &= run_state != RunState::Running;
        // Nobody else looks at each VM that has arrived. What libvirt refuses now is tried again with the next description.
        if run_state == RunState::Running
            && let Err(error) = self.tidy_pins(&xml)
        {
            self.complaint = Some(format!("vnumad's own pins could not be tidied: {error}"));
        }
        let names = (self.name.as_str(), self.domain_name.as_str());
        describe::describe(names, &xml, run_state, &self.process, &self.places.states)
    }

    fn attach_channel(&mut self, plug: Plug) -> Result<(), VmError> {
        let Plug::Ivshmem(server) = plug;
        let xml = self.xml()?;
        if xml.has_shmem(ALIAS) {
            return Err(VmError::AlreadyAttached { vm: self.name.clone() });
        }
        self.knows_channel()?;
        let Some(port) = xml.free_ports.first() else {
            let how =
                "add `<controller type='pci' model='pcie-root-port'/>` to the domain and start it again";
            return self.impossible(format!("no free PCIe root port: {how}"));
        };
        let sends = || qemu::sends_channel(&qemu::command_line(self.process.pid()));
        let common = self.places.common().filter(|_| sends());
        let place = common.map_or(Place::Own(&self.places.sockets), Place::Common);
        match Handshake::start(&self.places.workers.vms, place, self.process.pid(), &server) {
            Ok(handshake) => self.plug(port.index, handshake, common.is_some()),
            Err(error) => self.impossible(format!("{}: {error}", self.places.sockets.display())),
        }
    }

    fn probe(&mut self, limit: Duration) -> Result<(), VmError> {
        self.domain.state(limit).map(drop).map_err(|cause| self.failed(cause))
    }

    fn channel_attached(&mut self) -> Result<bool, VmError> {
        Ok(self.xml()?.has_shmem(ALIAS))
    }

    fn tidy_channel(&mut self) -> Result<bool, VmError> {
        // Where another backend has the VM, its channel is not in the XML.
        Ok(self.channel_attached()? || self.has_memory())
    }

    fn gets_channel_anew(&self) -> bool {
        let words = qemu::command_line(self.process.pid());
        qemu::receives(&words) || qemu::sends_channel(&words)
    }

    fn detach_channel(&mut self) -> Result<(), VmError> {
        if !self.channel_attached()? {
            self.knows_channel()?;
            return Err(VmError::NotAttached { vm: self.name.clone() });
        }
        match self.domain.detach_device(ALIAS, HOTPLUG) {
            Ok(()) => {}
            // It was asked before. QEMU shows that only by this text.
            Err(LibvirtError::Refused { reason, .. }) if reason.contains("in the process of unplug") => {}
            Err(cause) => return Err(self.failed(cause)),
        }
        let until = Instant::now() + RELEASE;
        let mut held = VecDeque::new();
        let released = loop {
            match self.poll_event(until.saturating_duration_since(Instant::now())) {
                Ok(Some(VmEvent::ChannelDetached)) => break Ok(true),
                Ok(Some(VmEvent::Disconnected)) => {
                    break Err(VmError::Disconnected { vm: self.name.clone() });
                }
                Ok(Some(other)) if held.contains(&other) => {}
                Ok(Some(other)) => held.push_back(other),
                Ok(None) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        held.append(&mut self.held);
        self.held = held;
        let limit_ms = RELEASE.as_millis() as u64;
        if released? { Ok(()) } else { Err(VmError::DetachPending { vm: self.name.clone(), limit_ms }) }
    }

    fn migrates(&mut self) -> Option<&mut dyn Migrates> {
        Some(self)
    }

    fn pins(&mut self) -> Option<&mut dyn Pins> {
        Some(self)
    }

    fn removable_vcpu(&mut self, _apic_id: u32) -> Result<Plugged, VmError> {
        self.refused("a replug")
    }

    fn plug_vcpu(&mut self, _node: u32) -> Result<Plugged, VmError> {
        self.refused("a replug")
    }

    fn await_guest(&mut self, _apic_id: u32) -> Result<(), VmError> {
        self.refused("a replug")
    }

    fn unplug_vcpu(&mut self, _apic_id: u32) -> Result<(), VmError> {
        self.refused("a replug")
    }

    fn poll_event(&mut self, timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        let until = Instant::now() + timeout;
        loop {
            while let Some(event) = self.held.pop_front().or_else(|| self.next_event()) {
                match self.is_still_true(&event) {
                    Ok(true) => return Ok(Some(event)),
                    Ok(false) => {}
                    Err(error) => {
                        self.held.push_front(event);
                        return Err(error);
                    }
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut wait = [PollFd::new(self.domain.event_fd(), PollFlags::POLLIN)];
            // Interrupted or not, the time is looked at.
            let _ = poll(&mut wait, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        }
    }

    fn complaints(&mut self) -> Vec<String> {
        self.complaint.take().into_iter().collect()
    }

    fn pid(&self) -> i32 {
        self.process.pid()
    }

    fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.domain.event_fd()
    }
}

/// What an event of a domain means for its VM, if anything.
fn meaning(event: &DomainEvent) -> Option<VmEvent> {
    Some(match event {
        DomainEvent::Suspended => VmEvent::Stopped,
        DomainEvent::Resumed => VmEvent::Resumed,
        DomainEvent::Rebooted => VmEvent::Rebooted,
        DomainEvent::Stopped => VmEvent::Shutdown,
        DomainEvent::Left => VmEvent::Left,
        DomainEvent::DeviceAdded(alias) if alias == ALIAS => VmEvent::ChannelAttached,
        DomainEvent::DeviceRemoved(alias) if alias == ALIAS => VmEvent::ChannelDetached,
        DomainEvent::Changed | DomainEvent::DeviceAdded(_) | DomainEvent::DeviceRemoved(_) => {
            VmEvent::VcpusChanged
        }
        DomainEvent::RemovalFailed(_) => return None,
        DomainEvent::Disconnected => VmEvent::Disconnected,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_channels_device_detaches_the_channel() {
        let removed = |alias: &str| meaning(&DomainEvent::DeviceRemoved(alias.to_owned()));
        assert_eq!(removed(ALIAS), Some(VmEvent::ChannelDetached));
        assert_eq!(removed("net0"), Some(VmEvent::VcpusChanged));
        let added = |alias: &str| meaning(&DomainEvent::DeviceAdded(alias.to_owned()));
        assert_eq!(added(ALIAS), Some(VmEvent::ChannelAttached));
        assert_eq!(added("net0"), Some(VmEvent::VcpusChanged));
        assert_eq!(meaning(&DomainEvent::RemovalFailed(ALIAS.to_owned())), None);
        assert_eq!(meaning(&DomainEvent::Disconnected), Some(VmEvent::Disconnected));
        assert_eq!(meaning(&DomainEvent::Stopped), Some(VmEvent::Shutdown));
        assert_eq!(meaning(&DomainEvent::Left), Some(VmEvent::Left));
    }

    #[test]
    fn the_device_is_described_as_libvirt_takes_it() {
        let xml = device_xml("/run/a&b'<", 9, false);
        assert!(xml.contains("<server path='/run/a&amp;b&apos;&lt;'/>"), "{xml}");
        assert!(xml.contains("bus='0x09'") && xml.contains("alias name='ua-vnuma'"), "{xml}");
        assert!(xml.starts_with("<shmem name='vnuma'><model"), "{xml}");
        assert!(device_xml("/run/a", 9, true).starts_with("<shmem name='vnuma' role='master'><model"));
    }

    #[test]
    fn errors_say_whether_an_answer_may_still_come() {
        let uri = || "qemu:///system".to_owned();
        let late = LibvirtError::Timeout { uri: uri(), call: "virDomainGetState", limit_ms: 1000 };
        let late = error("web", late);
        assert!(late.may_be_answered(), "{late}");
        assert_eq!(
            late.to_string(),
            "web: qemu:///system: libvirt has not answered `virDomainGetState` within 1000 ms"
        );
        let lost = error("web", LibvirtError::NotConnected { uri: uri(), reason: "gone".to_owned() });
        assert!(!lost.may_be_answered() && !lost.nobody_listening());
        assert_eq!(lost.to_string(), "qemu:///system: cannot connect: gone");
    }
}
