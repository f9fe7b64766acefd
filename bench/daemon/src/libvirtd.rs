//! Stands for the libvirtd of the host: its domains are the VMs of the bench. vnumad talks to it through the real libvirt.
//!
//! It answers what vnumad asks while VMs come, are attached and run: a list, the XML of a domain, what it does, a device that is
//! plugged, events. Anything else is refused.

use crate::{
    host::NODES,
    qemu::{NODE_BYTES, boot_node},
    rpc::{Call, KEEPALIVE, REMOTE, Values, notify},
    vms::{VCPUS, Vms, name, uuid},
};
use anyhow::{Context, bail};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
};
use vnuma_lab_qmp::Qmp;

/// Procedures of libvirt's protocol (src/remote/remote_protocol.x).
mod procedure {
    pub const OPEN: u32 = 1;
    pub const CLOSE: u32 = 2;
    pub const XML: u32 = 14;
    pub const LOOKUP: u32 = 24;
    pub const SUPPORTS_FEATURE: u32 = 60;
    pub const AUTH_LIST: u32 = 66;
    pub const URI: u32 = 110;
    pub const ATTACH: u32 = 160;
    pub const STATE: u32 = 212;
    pub const LIST: u32 = 273;
    pub const REGISTER_EVENT: u32 = 316;
    pub const DEREGISTER_EVENT: u32 = 317;
    pub const LIFECYCLE: u32 = 318;
    pub const DEVICE_ADDED: u32 = 354;
    pub const REGISTER_CLOSE: u32 = 360;
    pub const UNREGISTER_CLOSE: u32 = 361;
    /// Of the program of liveness.
    pub const PING: u32 = 1;
    pub const PONG: u32 = 2;
}

/// `VIR_DOMAIN_EVENT_ID_LIFECYCLE`, `VIR_DOMAIN_EVENT_ID_DEVICE_ADDED`.
const LIFECYCLE_EVENT: u32 = 0;
const DEVICE_ADDED_EVENT: u32 = 19;
/// `VIR_DOMAIN_EVENT_STARTED`, `VIR_DOMAIN_EVENT_STARTED_BOOTED`.
const STARTED: [u32; 2] = [2, 0];
/// `VIR_DOMAIN_RUNNING`, `VIR_DOMAIN_RUNNING_BOOTED`.
const RUNNING: [u32; 2] = [1, 1];

/// It serves until the bench ends.
pub struct Libvirtd {
    /// By which vnumad finds it.
    pub uri: String,
    /// Where it has its files of domains that run.
    pub states: PathBuf,
    shared: Arc<Shared>,
}

/// What all connections have to do with.
#[derive(Default)]
struct Shared {
    domains: Mutex<Vec<(Uuid, Arc<Mutex<Domain>>)>>,
    /// Clients that want to know which domains start, and the numbers of their callbacks.
    listeners: Mutex<Vec<(Arc<Client>, u32)>>,
}

type Uuid = [u8; 16];

/// The stream to a client, for one message at a time.
type Client = Mutex<UnixStream>;

struct Domain {
    number: usize,
    /// The VM's monitor.
    monitor: PathBuf,
    /// Devices that were plugged.
    plugged: String,
}

impl Libvirtd {
    /// Starts it without domains, with its files below `directory`.
    pub fn start(directory: &Path) -> anyhow::Result<Self> {
        let (states, socket) = (directory.join("libvirt"), directory.join("libvirt-sock"));
        fs::create_dir(&states)?;
        let (listener, shared) = (UnixListener::bind(&socket)?, Arc::<Shared>::default());
        let served = Arc::clone(&shared);
        thread::Builder::new().name("libvirtd".to_owned()).spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&served);
                thread::spawn(move || {
                    if let Err(error) = serve(stream, &shared) {
                        eprintln!("the stand-in for libvirtd: {error:#}");
                    }
                });
            }
        })?;
        Ok(Self { uri: format!("qemu+unix:///system?socket={}", socket.display()), states, shared })
    }

    /// These VMs are its domains from now on. It tells of each one, as if they had just started.
    pub fn show(&self, vms: &Vms) -> anyhow::Result<()> {
        let mut domains = Vec::new();
        for number in 0..vms.count() {
            let path = self.states.join(format!("{}.xml", name(number)));
            fs::write(&path, status(vms, number)?).with_context(|| path.display().to_string())?;
            let domain = Domain { number, monitor: vms.socket(number), plugged: String::new() };
            domains.push((uuid(number).1, Arc::new(Mutex::new(domain))));
        }
        *lock(&self.shared.domains) = domains;
        let tell = |(client, callback): &(Arc<Client>, u32), number| {
            let mut values = Values::default();
            values.number(*callback);
            domain_values(&mut values, number);
            values.number(STARTED[0]).number(STARTED[1]);
            notify(&mut lock(client), REMOTE, procedure::LIFECYCLE, &values)
        };
        // One that has gone listens no more.
        lock(&self.shared.listeners).retain(|one| (0..vms.count()).all(|number| tell(one, number).is_ok()));
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(mut stream: UnixStream, shared: &Shared) -> anyhow::Result<()> {
    let client = Arc::new(Client::new(stream.try_clone()?));
    // Numbers of callbacks by event.
    let mut callbacks = BTreeMap::new();
    while let Some(mut call) = Call::read(&mut stream)? {
        match (call.program, call.procedure) {
            (KEEPALIVE, procedure::PING) => {
                notify(&mut lock(&client), KEEPALIVE, procedure::PONG, &Values::default())?;
            }
            (KEEPALIVE, _) => {}
            (REMOTE, procedure::ATTACH) => {
                let plugged = attach(&mut call, shared);
                let event = plugged.as_ref().ok().zip(callbacks.get(&DEVICE_ADDED_EVENT).copied());
                let event = event.map(|((number, alias), callback)| {
                    let mut values = Values::default();
                    values.number(callback);
                    domain_values(&mut values, *number);
                    values.text(alias);
                    values
                });
                call.reply(&mut lock(&client), plugged.map(|_| Values::default()))?;
                if let Some(values) = event {
                    notify(&mut lock(&client), REMOTE, procedure::DEVICE_ADDED, &values)?;
                }
            }
            (REMOTE, _) => {
                let before = callbacks.contains_key(&LIFECYCLE_EVENT);
                let answer = answer(&mut call, shared, &mut callbacks);
                call.reply(&mut lock(&client), answer)?;
                if let Some(callback) = callbacks.get(&LIFECYCLE_EVENT).filter(|_| !before) {
                    lock(&shared.listeners).push((Arc::clone(&client), *callback));
                }
            }
            (program, _) => {
                call.reply(&mut lock(&client), Err(anyhow::anyhow!("no program {program:#x}")))?
            }
        }
    }
    Ok(())
}

fn answer(call: &mut Call, shared: &Shared, callbacks: &mut BTreeMap<u32, u32>) -> anyhow::Result<Values> {
    use procedure::*;
    let mut values = Values::default();
    match call.procedure {
        OPEN | CLOSE | REGISTER_CLOSE | UNREGISTER_CLOSE | DEREGISTER_EVENT => {}
        SUPPORTS_FEATURE => _ = values.number(1),
        // One way to prove who one is: none.
        AUTH_LIST => _ = values.number(1).number(0),
        URI => _ = values.text("qemu:///system"),
        LOOKUP => {
            let uuid = call.uuid()?;
            domain_values(&mut values, with_domain(shared, uuid, |domain| Ok(domain.number))?);
        }
        XML => {
            let uuid = domain_of(call)?;
            values.text(&with_domain(shared, uuid, |domain| Ok(xml(domain)))?);
        }
        STATE => _ = values.number(RUNNING[0]).number(RUNNING[1]),
        LIST => {
            let count = lock(&shared.domains).len();
            values.number(count as u32);
            (0..count).for_each(|number| domain_values(&mut values, number));
            values.number(count as u32);
        }
        REGISTER_EVENT => {
            let (event, callback) = (call.number()?, callbacks.len() as u32);
            callbacks.insert(event, callback);
            values.number(callback);
        }
        other => bail!("procedure {other} is not known to the bench"),
    }
    Ok(values)
}

fn domain_values(values: &mut Values, number: usize) {
    values.text(&name(number)).uuid(uuid(number).1).number(number as u32 + 1);
}

/// The domain that a call is about.
fn domain_of(call: &mut Call) -> anyhow::Result<Uuid> {
    call.text()?;
    let uuid = call.uuid()?;
    call.number()?;
    Ok(uuid)
}

/// Calls for a domain wait for each other, and not for those of others, as libvirtd's do.
fn with_domain<T>(
    shared: &Shared,
    uuid: Uuid,
    act: impl FnOnce(&mut Domain) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let known =
        lock(&shared.domains).iter().find(|(known, _)| *known == uuid).map(|(_, domain)| Arc::clone(domain));
    act(&mut lock(&*known.context("no such domain")?))
}

/// Plugs a device as libvirt does: QEMU is told to connect, then to take the device. Its domain and its alias.
fn attach(call: &mut Call, shared: &Shared) -> anyhow::Result<(usize, String)> {
    let (uuid, device) = (domain_of(call)?, call.text()?);
    let attribute = |begin: &str| {
        let rest = device.split_once(begin).map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split('\'').next()).with_context(|| format!("no {begin} in {device}"))
    };
    let (path, alias) = (attribute("<server path='")?, attribute("<alias name='")?);
    with_domain(shared, uuid, |domain| {
        let mut monitor = Qmp::connect(&domain.monitor)?;
        let address = json!({"type": "unix", "data": {"path": path}});
        let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
        monitor.run_with("chardev-add", &json!({"id": "charshmem0", "backend": backend}))?;
        monitor.run_with("device_add", &json!({"driver": "ivshmem-doorbell", "id": alias}))?;
        domain.plugged += &device;
        Ok((domain.number, alias.to_owned()))
    })
}

/// The file of a domain that runs.
fn status(vms: &Vms, number: usize) -> anyhow::Result<String> {
    let pid = vms.pid(number).context("no such VM")?;
    let places = vms.places().iter().skip(number * VCPUS).take(VCPUS);
    let tids = places.map(|place| place.tid.load(Ordering::Acquire)).enumerate();
    let vcpus: String = tids.map(|(vcpu, tid)| format!("    <vcpu id='{vcpu}' pid='{tid}'/>\n")).collect();
    Ok(format!(
        "<domstatus state='running' reason='booted' pid='{pid}'>\n  <vcpus>\n{vcpus}  </vcpus>\n  <domain type='kvm' id='{}'>\n    \
         <name>{}</name>\n    <uuid>{}</uuid>\n  </domain>\n</domstatus>\n",
        number + 1,
        name(number),
        uuid(number).0
    ))
}

/// The XML of a domain, with the devices that a small server has.
fn xml(domain: &Domain) -> String {
    let (number, kib) = (domain.number, NODE_BYTES >> 10);
    let cell = |node: usize| {
        let cpus = (0..VCPUS).filter(|&vcpu| boot_node(vcpu, VCPUS) == node).map(|vcpu| vcpu.to_string());
        let cpus = cpus.collect::<Vec<_>>().join(",");
        format!("      <cell id='{node}' cpus='{cpus}' memory='{kib}' unit='KiB'/>\n")
    };
    let binding = |node: usize| format!("    <memnode cellid='{node}' mode='strict' nodeset='{node}'/>\n");
    let port = |index: usize| {
        format!(
            "    <controller type='pci' index='{index}' model='pcie-root-port'>\n      <model name='pcie-root-port'/>\n      \
             <target chassis='{index}' port='{:#x}'/>\n      <alias name='pci.{index}'/>\n      \
             <address type='pci' domain='0x0000' bus='0x00' slot='0x01' function='{:#x}'/>\n    </controller>\n",
            index + 7,
            index - 1
        )
    };
    let each = |line: &dyn Fn(usize) -> String| (0..NODES).map(line).collect::<String>();
    format!(
        "<domain type='kvm' id='{}'>\n  <name>{}</name>\n  <uuid>{}</uuid>\n  <memory unit='KiB'>{total}</memory>\n  \
         <currentMemory unit='KiB'>{total}</currentMemory>\n  <vcpu placement='static'>{VCPUS}</vcpu>\n  <numatune>\n{}  </numatune>\n  \
         <resource>\n    <partition>/machine</partition>\n  </resource>\n  <os>\n    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>\n  \
         </os>\n  <features>\n    <acpi/>\n  </features>\n  <cpu mode='host-passthrough' check='none'>\n    \
         <topology sockets='1' dies='1' cores='{VCPUS}' threads='1'/>\n    <numa>\n{}    </numa>\n  </cpu>\n  <devices>\n    \
         <emulator>/usr/bin/qemu-system-x86_64</emulator>\n    <disk type='file' device='disk'>\n      \
         <source file='/var/lib/libvirt/images/{}.qcow2'/>\n      <target dev='vda' bus='virtio'/>\n      \
         <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>\n    </disk>\n{}    \
         <controller type='pci' index='0' model='pcie-root'>\n      <alias name='pcie.0'/>\n    </controller>\n    \
         <interface type='network'>\n      <source network='default'/>\n      <model type='virtio'/>\n      \
         <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>\n    </interface>\n{}  </devices>\n</domain>\n",
        number + 1,
        name(number),
        uuid(number).0,
        each(&binding),
        each(&cell),
        name(number),
        (1..=3).map(port).collect::<String>(),
        domain.plugged,
        total = kib * NODES as u64,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_libvirt::DomainXml;

    #[test]
    fn vnumad_understands_its_domains() {
        let mut domain = Domain { number: 3, monitor: PathBuf::new(), plugged: String::new() };
        let found = DomainXml::parse("vm0003", &xml(&domain)).expect("it is understood");
        assert_eq!((found.name.as_str(), found.uuid.as_str()), ("vm0003", uuid(3).0.as_str()));
        assert_eq!((found.cells.len(), found.cell_of(0), found.cell_of(15)), (NODES, Some(0), Some(1)));
        assert_eq!(found.binding(1).map(|binding| binding.nodes.clone()), Some(vec![1]));
        assert_eq!(found.topology.apic_id(15), 15);
        assert_eq!(found.free_ports.iter().map(|port| port.index).collect::<Vec<_>>(), [3]);
        domain.plugged = "<shmem name='v'><alias name='ua-vnuma'/></shmem>".to_owned();
        assert!(DomainXml::parse("vm0003", &xml(&domain)).expect("likewise").has_shmem("ua-vnuma"));
    }
}
