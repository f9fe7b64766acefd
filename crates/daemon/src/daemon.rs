//! The task that owns everything that is known: takes messages, decides, and lets tell.

mod lifecycle;
mod looks;
mod replug;
mod requests;
mod silence;

use crate::{
    config::Config,
    discovery::ChangeWatch,
    epoch::Epochs,
    locations::Locations,
    message::{ConnectionId, Message},
    pulse::Pulse,
    records::Records,
    server::BackendFactory,
    vm::Vm,
    vm_thread::VmThread,
    watchers::Watchers,
};
use looks::Looks;
use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tracing::warn;
use vnuma_api::Event;
use vnuma_host::location::{LocationEvent, LocationKind, monotonic_ns};
use vnuma_hypervisor::{VmBackend, VmCandidate, VmHandle};
use vnuma_process::StopReason;
use vnuma_topology::{ApicId, HostTopology};

/// Location events that are taken at a time.
const BATCH: usize = 256;

/// Between two looks whether the processes of VMs stand still: an operator is told within a second.
pub(crate) const PULSE: Duration = Duration::from_millis(500);

/// A handle that leads to a VM, or might.
struct Entry {
    candidate: VmCandidate,
    /// The connection, or the attempt to connect.
    connection: Option<(ConnectionId, VmThread)>,
    /// The VM, once connected; it stays known while a connection is lost.
    vm: Option<Vm>,
    /// Why it cannot be asked anything, as far as an operator should know.
    problem: Option<String>,
    /// It is waited for whether it answers; what it is asked for is still done then.
    slow: bool,
    /// There is a connection, over which nothing comes.
    silent: bool,
    /// The process behind the handle, while that is all that is known of it.
    peer: Option<i32>,
    /// Its process stands still.
    halt: Option<StopReason>,
    /// The instance that was looked at last: another one is another VM's.
    instance: Option<u64>,
    retry_at: Instant,
    backoff: Duration,
}

/// Everything that is known.
pub(crate) struct Daemon {
    config: Config,
    host: HostTopology,
    epochs: Epochs,
    records: Records,
    scanner: Box<dyn VmBackend>,
    /// Why it could not look, the last time.
    scan_problem: Option<String>,
    factory: BackendFactory,
    entries: BTreeMap<VmHandle, Entry>,
    /// Which vCPU of which entry a thread runs.
    threads: HashMap<i32, (VmHandle, ApicId)>,
    locations: Locations,
    /// Threads that are to be looked at.
    looks: Looks,
    /// From the first scan on, if the backend sees changes.
    changes: Option<ChangeWatch>,
    watchers: Watchers,
    messages: mpsc::Sender<Message>,
    last_id: ConnectionId,
}

impl Daemon {
    pub(crate) fn new(
        config: Config,
        host: HostTopology,
        locations: Locations,
        factory: BackendFactory,
        messages: mpsc::Sender<Message>,
    ) -> Self {
        Self {
            records: Records::open(config.records.clone()),
            config,
            host,
            epochs: Epochs::now(),
            scanner: factory(),
            scan_problem: None,
            factory,
            entries: BTreeMap::new(),
            threads: HashMap::new(),
            locations,
            looks: Looks::default(),
            changes: None,
            watchers: Watchers::default(),
            messages,
            last_id: 0,
        }
    }

    /// Runs until `stop` changes. What is to be looked at now and then is at ticks of `pulse`.
    pub(crate) async fn run(
        mut self,
        pulse: Pulse,
        mut messages: mpsc::Receiver<Message>,
        mut moved: mpsc::Receiver<LocationEvent>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut look_at = Instant::now();
        let mut batch = Vec::with_capacity(BATCH);
        let mut watching_locations = true;
        loop {
            let due = self.next_due();
            tokio::select! {
                message = messages.recv() => match message {
                    Some(message) => self.handle(message),
                    None => return,
                },
                count = moved.recv_many(&mut batch, BATCH), if watching_locations => {
                    watching_locations = count > 0;
                    batch.drain(..).for_each(|event| self.moved(&event));
                    if !watching_locations {
                        warn!("vCPU locations are not watched any more; they are looked at every {:?}", self.config.resync_interval);
                    }
                }
                () = sleep(due.unwrap_or_default()), if due.is_some() => {}
                () = pulse.tick() => {
                    self.look_at_processes();
                    self.replug_due();
                    if Instant::now() >= look_at {
                        look_at = Instant::now() + self.config.resync_interval - PULSE / 2;
                        self.look_at_everything();
                    }
                }
                // Between two looks everybody else has a turn.
                () = std::future::ready(()), if !self.looks.is_empty() => {}
                _ = stop.changed() => return,
            }
            self.look_at_some();
            self.tell_due();
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Vm { id, report } => self.reported(id, report),
            Message::Rung { id } => {
                let events = self.vm_by_id(id).map(Vm::rung).unwrap_or_default();
                events.iter().for_each(|event| self.watchers.tell(event));
            }
            Message::Rescan => self.rescan(),
            Message::Request(request) => self.request(request),
        }
    }

    /// How long nothing is due.
    fn next_due(&self) -> Option<Duration> {
        let vms = self.entries.values().filter_map(|entry| entry.vm.as_ref());
        let next_ns = vms.filter_map(|vm| vm.placement.next_deadline_ns()).min()?;
        Some(Duration::from_nanos(next_ns.saturating_sub(monotonic_ns())))
    }

    fn tell_due(&mut self) {
        for vm in self.entries.values_mut().filter_map(|entry| entry.vm.as_mut()) {
            if let Some(event) = vm.tell_due() {
                self.watchers.tell(&event);
            }
        }
    }

    /// Something happened to a thread.
    fn moved(&mut self, event: &LocationEvent) {
        let Some((handle, apic_id)) = self.threads.get(&event.tid).cloned() else { return };
        if event.kind == LocationKind::Exited {
            // The vCPU was unplugged, or the VM is about to end; its hypervisor knows.
            self.describe_again(&handle);
            // The kernel may give its number to a thread of another VM next.
            self.threads.remove(&event.tid);
            self.locations.unwatch(event.tid);
        }
        let location = self.locations.after(&self.host, event);
        let Some(vm) = self.entries.get_mut(&handle).and_then(|entry| entry.vm.as_mut()) else { return };
        if let Some(event) = vm.locate(&self.host, apic_id, location) {
            self.watchers.tell(&event);
        }
    }

    /// Reads where some of the vCPUs are that are to be looked at.
    fn look_at_some(&mut self) {
        for tid in self.looks.take() {
            if let Some((handle, apic_id)) = self.threads.get(&tid).cloned() {
                self.look(&handle, apic_id, tid);
            }
        }
    }

    /// Reads where a vCPU is, and watches it from now on.
    fn look(&mut self, handle: &VmHandle, apic_id: ApicId, tid: i32) {
        let Some(vm) = self.entries.get(handle).and_then(|entry| entry.vm.as_ref()) else { return };
        self.locations.watch(vm.description.pid, tid);
        let location = self.locations.read(&self.host, tid);
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        if let Some(event) = vm.locate(&self.host, apic_id, location) {
            self.watchers.tell(&event);
        }
    }

    /// Heals whatever a lost event left wrong. Cheap: three small files a vCPU, names of sockets.
    fn look_at_everything(&mut self) {
        if self.locations.lost_again() {
            warn!(lost = self.locations.lost(), "location events were lost; all locations are read again");
        }
        self.rescan();
        self.threads.keys().for_each(|tid| self.looks.add(*tid));
        self.describe_unbound();
    }

    fn vm_by_id(&mut self, id: ConnectionId) -> Option<&mut Vm> {
        self.entries.values_mut().filter_map(|entry| entry.vm.as_mut()).find(|vm| vm.id == id)
    }

    fn tell_watchers(&mut self, make: impl FnOnce(u64) -> Event) {
        self.watchers.tell(&make(monotonic_ns()));
    }
}
