//! A process that stands for the QEMU of a VM: its vCPU threads are there and sleep, and it answers QMP as a healthy one
//! does.

use crate::{board::Board, guest, host::NODES};
use anyhow::Context;
use nix::{
    cmsg_space,
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CpuSet, sched_setaffinity},
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg},
    unistd::{Pid, gettid},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{self, IoSliceMut, Write},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    thread,
};
use vnuma_abi_topology_channel::ivshmem::VECTORS;
use vnuma_channel_model::{GuestEnd, WORD};

/// Memory of a guest node.
pub const NODE_BYTES: u64 = 64 << 20;
/// Stack of a thread, which does next to nothing.
const STACK: usize = 64 << 10;

/// Which VM it is.
#[derive(clap::Args)]
pub struct Arguments {
    /// Its QMP socket, to be made
    #[arg(long)]
    socket: PathBuf,
    /// Memory shared with the bench
    #[arg(long)]
    board: PathBuf,
    /// Place of its first vCPU there
    #[arg(long)]
    first: usize,
    /// How many it has
    #[arg(long)]
    vcpus: usize,
    /// What QEMU has on its command line, for those who look there
    #[arg(last = true)]
    options: Vec<String>,
}

/// Node that a vCPU boots on: the first ones on the first.
pub fn boot_node(vcpu: usize, vcpus: usize) -> usize {
    (vcpu * NODES / vcpus.max(1)).min(NODES - 1)
}

/// Serves until it is killed.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let board = Board::open(&arguments.board)?;
    for index in 0..arguments.vcpus {
        start_vcpu(board, index, arguments)?;
    }
    let places = &board.places()[arguments.first..arguments.first + arguments.vcpus];
    let tid = |place: &crate::board::Place| place.tid.load(Ordering::Acquire);
    while places.iter().any(|place| tid(place) == 0) {
        thread::yield_now();
    }
    let tids = places.iter().map(tid).collect();
    // The socket gets its name when it listens already and the threads are there.
    let hidden = arguments.socket.with_extension("new");
    let listener = UnixListener::bind(&hidden).context("binding")?;
    fs::rename(&hidden, &arguments.socket)?;
    let mut machine = Machine { tids, board, first: arguments.first, ..Machine::default_with(board) };
    let (client, first) = (Arc::clone(&machine.client), arguments.first);
    let flood = move || flood(board, first, &client);
    thread::Builder::new().name("flood".to_owned()).stack_size(STACK).spawn(flood)?;
    // As QEMU's main loop does, so that vnumad sees it wait for work.
    loop {
        poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
        let (stream, _) = listener.accept()?;
        // A client that goes is followed by the next.
        if let Err(error) = machine.serve(stream) {
            eprintln!("{}: {error:#}", arguments.socket.display());
        }
    }
}

fn start_vcpu(board: Board, index: usize, arguments: &Arguments) -> anyhow::Result<()> {
    let (position, cpu) = (arguments.first + index, boot_node(index, arguments.vcpus));
    let body = move || {
        let mut set = CpuSet::new();
        let pinned = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
        if let Err(error) = pinned {
            eprintln!("vCPU {index} cannot run on CPU {cpu}: {error}");
        }
        let place = &board.places()[position];
        place.tid.store(gettid().as_raw(), Ordering::Release);
        loop {
            crate::board::sleep_on(&place.wake, place.wake.load(Ordering::Relaxed));
        }
    };
    let name = format!("CPU {index}/KVM");
    thread::Builder::new().name(name).stack_size(STACK).spawn(body).context("starting a thread")?;
    Ok(())
}

/// Sends events without end while it is told to, whenever no other thread wants the CPU: it stands for a QEMU on a CPU of its own.
fn flood(board: Board, first: usize, client: &Client) {
    // SAFETY: the call takes numbers. 0 is this thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
    let wanted = &board.places()[first].flood;
    let events = ["STOP", "RESUME", "DEVICE_DELETED", "ACPI_DEVICE_OST"];
    let event = |name: &&str| format!("{{\"event\": \"{name}\", \"data\": {{\"device\": \"none\"}}}}\r\n");
    let text: String = events.iter().cycle().take(64).map(event).collect();
    loop {
        if wanted.load(Ordering::Relaxed) == 0 {
            crate::board::sleep_on(wanted, 0);
        } else if send(client, &text).is_err() {
            // vnumad connects again.
            thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// The stream to vnumad, once it has connected.
type Client = Mutex<Option<UnixStream>>;

fn send(client: &Client, text: &str) -> io::Result<()> {
    let mut stream = client.lock().unwrap_or_else(PoisonError::into_inner);
    stream.as_mut().ok_or(io::ErrorKind::NotConnected)?.write_all(text.as_bytes())
}

/// What was received and not taken yet.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Input {
    /// The next line. `None` at the end.
    fn line(&mut self, stream: &UnixStream) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.bytes.iter().position(|&byte| byte == b'\n') {
                return Ok(Some(self.bytes.drain(..=end).collect()));
            }
            poll(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
            let (mut chunk, mut space) = ([0; 4096], cmsg_space!([i32; 1]));
            let mut slices = [IoSliceMut::new(&mut chunk)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(stream.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
            let length = message.bytes;
            for control in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(raw) = control {
                    // SAFETY: the kernel has just made these descriptors for this process.
                    self.descriptor =
                        raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }).next_back();
                }
            }
            if length == 0 {
                return Ok(None);
            }
            self.bytes.extend_from_slice(&chunk[..length]);
        }
    }
}

/// Two guest nodes, at home on the host nodes of their numbers, and a free root port.
struct Machine {
    tids: Vec<i32>,
    board: Board,
    first: usize,
    named: Option<OwnedFd>,
    chardev: Option<OwnedFd>,
    device: bool,
    client: Arc<Client>,
}

impl Machine {
    fn default_with(board: Board) -> Self {
        Self {
            tids: Vec::new(),
            board,
            first: 0,
            named: None,
            chardev: None,
            device: false,
            client: Arc::default(),
        }
    }

    fn serve(&mut self, stream: UnixStream) -> anyhow::Result<()> {
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream.try_clone()?);
        send(&self.client, "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n")?;
        let mut input = Input::default();
        while let Some(line) = input.line(&stream)? {
            let command: Value = serde_json::from_slice(&line)?;
            let name = command["execute"].as_str().unwrap_or_default();
            let mut answer = match self.answer(name, &command["arguments"], &mut input) {
                Ok(value) => json!({"return": value}),
                Err(reason) => json!({"error": {"class": "GenericError", "desc": reason}}),
            };
            answer["id"] = command["id"].clone();
            let mut text = answer.to_string() + "\r\n";
            if name == "device_del" && answer.get("return").is_some() {
                text += "{\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"vnuma-channel\"}}\r\n";
            }
            send(&self.client, &text)?;
        }
        Ok(())
    }

    fn answer(&mut self, name: &str, arguments: &Value, input: &mut Input) -> Result<Value, String> {
        let path = arguments["path"].as_str().unwrap_or_default();
        let child = |name: &str, kind: &str| json!({"name": name, "type": format!("child<{kind}>")});
        let root_port = || child("vnuma0", "pcie-root-port");
        Ok(match name {
            "query-status" => json!({"status": "running", "running": true}),
            "query-cpus-fast" => self.cpus(),
            "query-hotpluggable-cpus" | "query-memory-devices" => json!([]),
            "query-memdev" => (0..NODES)
                .map(|node| {
                    let id = format!("ram{node}");
                    json!({"id": id, "size": NODE_BYTES, "policy": "bind", "host-nodes": [node]})
                })
                .collect(),
            "qom-list" if path.starts_with("/objects/ram") => json!([child("memory", "memory-region")]),
            "qom-get" if arguments["property"] == "container" => json!("/machine/pc.ram[0]"),
            "qom-get" if arguments["property"] == "addr" => {
                let node = path.strip_prefix("/objects/ram").and_then(|rest| rest.split('/').next());
                json!(node.and_then(|node| node.parse::<u64>().ok()).unwrap_or(0) * NODE_BYTES)
            }
            "qom-get" if arguments["property"] == "apic-id" => json!(path.parse::<u32>().unwrap_or(0)),
            "qom-get" => json!(true),
            "human-monitor-command" => json!(info_numa()),
            "qom-list" if path == "/machine/peripheral" && self.device => {
                json!([root_port(), child("vnuma-channel", "ivshmem-doorbell")])
            }
            "qom-list" if path == "/machine/peripheral" => json!([root_port()]),
            "qom-list" if path == "/machine/peripheral/vnuma0" => json!([child("vnuma0", "PCIE")]),
            "qom-list" => json!([]),
            "qmp_capabilities" | "query-name" => json!({}),
            _ => self.change(name, arguments, input)?,
        })
    }

    fn change(&mut self, name: &str, arguments: &Value, input: &mut Input) -> Result<Value, String> {
        let path = arguments["backend"]["data"]["addr"]["data"]["path"].as_str();
        let there = |found: Option<OwnedFd>| found.map(drop).ok_or("not found".to_owned());
        match name {
            "getfd" => self.named = Some(input.descriptor.take().ok_or("no descriptor came with it")?),
            "closefd" => there(self.named.take())?,
            // libvirt gives the path of a socket instead of a descriptor.
            "chardev-add" if let Some(path) = path => {
                let stream = UnixStream::connect(path).map_err(|error| format!("{path}: {error}"))?;
                self.chardev = Some(stream.into());
            }
            "chardev-add" => self.chardev = Some(self.named.take().ok_or("not found")?),
            "chardev-remove" if self.device => return Err("in use".to_owned()),
            "chardev-remove" => there(self.chardev.take())?,
            "device_add" => self.plug().map_err(|error| format!("{error:#}"))?,
            "device_del" if std::mem::take(&mut self.device) => {}
            _ => return Err(format!("{name} is not known, or not possible now")),
        }
        Ok(json!({}))
    }

    /// The guest finds the device. Its thread stays when the device goes, which the bench never asks for.
    fn plug(&mut self) -> anyhow::Result<()> {
        let chardev = self.chardev.as_ref().context("no such character device")?;
        await_messages(chardev)?;
        let end = GuestEnd::connect(chardev)?;
        let (board, first) = (self.board, self.first);
        let body = move || {
            if let Err(error) = guest::run(&end, &board, first) {
                eprintln!("the guest stops: {error:#}");
            }
        };
        thread::Builder::new().name("guest".to_owned()).stack_size(STACK).spawn(body)?;
        self.device = true;
        Ok(())
    }

    fn cpus(&self) -> Value {
        let cpu = |(index, tid): (usize, &i32)| {
            let node = boot_node(index, self.tids.len());
            let path = index.to_string();
            json!({"cpu-index": index, "qom-path": path, "thread-id": tid, "props": {"node-id": node}})
        };
        self.tids.iter().enumerate().map(cpu).collect()
    }
}

/// Stands still until all messages of the channel's server are there, as QEMU does.
fn await_messages(server: &OwnedFd) -> anyhow::Result<()> {
    // Version, own number, memory, and the interrupts of both sides.
    let expected = ((3 + 2 * VECTORS) * WORD) as i32;
    let mut there = 0;
    while there < expected {
        poll(&mut [PollFd::new(server.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
        // SAFETY: the kernel writes a number to a place of that type.
        Errno::result(unsafe { libc::ioctl(server.as_raw_fd(), libc::FIONREAD, &raw mut there) })?;
        // The other end is closed before everything was sent.
        anyhow::ensure!(there > 0, "the server of the channel is gone");
    }
    Ok(())
}

fn info_numa() -> String {
    let mib = NODE_BYTES >> 20;
    let node =
        |node| format!("node {node} cpus:\r\nnode {node} size: {mib} MB\r\nnode {node} plugged: 0 MB\r\n");
    format!("{NODES} nodes\r\n") + &(0..NODES).map(node).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_boot_on_both_nodes() {
        assert_eq!([0, 7, 8, 15].map(|vcpu| boot_node(vcpu, 16)), [0, 0, 1, 1]);
        assert_eq!([0, 1, 2].map(|vcpu| boot_node(vcpu, 3)), [0, 0, 1]);
        assert_eq!(boot_node(0, 1), 0);
    }

    #[test]
    fn what_hmp_prints_names_every_node() {
        let text = info_numa();
        assert!(text.starts_with("2 nodes\r\n") && text.contains("node 1 size: 64 MB"), "{text}");
    }
}
