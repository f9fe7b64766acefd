//! Processes that stand for a QEMU and speak QMP, well or badly. Each is this test program itself, started anew, so that
//! it has a process of its own, threads that are named like vCPUs, and can be stopped and killed.

use super::wait_for;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::FileTypeExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

const KIND: &str = "VNUMAD_TEST_PEER";
const SOCKET: &str = "VNUMAD_TEST_SOCKET";
const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

/// Memory of a guest node.
const NODE_BYTES: u64 = 64 << 20;

/// A process that is killed when this is dropped.
pub struct Peer {
    child: Child,
    socket: PathBuf,
}

impl Peer {
    /// Starts one that behaves like `kind`; `test` is the test that calls [`serve_if_asked`].
    pub fn start(test: &str, kind: &str, socket: &Path) -> Self {
        let peer = Self::spawn(test, kind, socket, Stdio::null());
        wait_for("the peer to listen", || socket.exists());
        peer
    }

    /// Starts one that is handed a listener ready to use.
    pub fn start_at(test: &str, kind: &str, socket: &Path, listener: OwnedFd) -> Self {
        Self::spawn(test, kind, socket, listener.into())
    }

    fn spawn(test: &str, kind: &str, socket: &Path, stdin: Stdio) -> Self {
        let program = std::env::current_exe().expect("this test");
        let mut command = Command::new(program);
        command.args(["--exact", test, "--ignored", "--nocapture"]).env(KIND, kind).env(SOCKET, socket);
        let child = command.stdin(stdin).stdout(Stdio::null()).spawn().expect("started");
        Self { child, socket: socket.into() }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("alive");
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ended");
    }

    /// Makes one of kind `hangs` stop answering.
    pub fn hang(&self) {
        fs::write(self.socket.with_extension("hang"), "").expect("written");
    }

    /// Lets one go on that has stopped answering at a command.
    pub fn go_on(&self) {
        fs::write(self.socket.with_extension("go"), "").expect("written");
    }

    /// Makes one of kind `floods` say what means nothing, and that its channel is gone, for as long as it lives.
    pub fn flood(&self) {
        fs::write(self.socket.with_extension("flood"), "").expect("written");
    }

    /// So many lines have been read of one that does so, or wait to be.
    pub fn flooded(&self) -> u64 {
        let text = fs::read_to_string(self.socket.with_extension("flooded"));
        text.ok().and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// Commands that it has carried out.
    pub fn commands(&self) -> Vec<String> {
        let text = fs::read_to_string(self.socket.with_extension("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The thread of its vCPU of this index.
    pub fn vcpu(&self, index: usize) -> i32 {
        let name = format!("CPU {index}/KVM");
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).expect("alive").flatten();
        let found = tasks
            .map(|task| task.path())
            .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name));
        let tid = found.expect("the thread").file_name().and_then(|tid| tid.to_str()?.parse().ok());
        tid.expect("a number")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the process does that [`Peer::start`] starts; never returns there.
pub fn serve_if_asked() {
    let (Ok(kind), Ok(socket)) = (std::env::var(KIND), std::env::var(SOCKET)) else { return };
    let tids = [0, 1].map(vcpu_thread);
    let socket = PathBuf::from(socket);
    let handed = io::stdin().as_fd().try_clone_to_owned().expect("copied");
    let listener = if fs::metadata("/dev/stdin").is_ok_and(|file| file.file_type().is_socket()) {
        UnixListener::from(handed)
    } else {
        // Listening and named in one step: a client that sees the socket finds the threads.
        let hidden = socket.with_extension("new");
        let listener = UnixListener::bind(&hidden).expect("bound");
        fs::rename(&hidden, &socket).expect("renamed");
        listener
    };
    if kind == "nobody accepts" {
        loop {
            thread::sleep(Duration::from_secs(1000));
        }
    }
    let mut machine = Machine { tids, socket, ..Machine::default() };
    for stream in listener.incoming() {
        // A client that goes is followed by the next.
        let _ = serve(&kind, &mut machine, stream.expect("accepted"));
    }
}

/// A thread like an idle vCPU's, on the CPU of its number.
fn vcpu_thread(index: usize) -> i32 {
    let (sender, receiver) = std::sync::mpsc::channel();
    let body = move || {
        let mut set = nix::sched::CpuSet::new();
        set.set(index).expect("in range");
        nix::sched::sched_setaffinity(Pid::from_raw(0), &set).expect("pinned");
        sender.send(nix::unistd::gettid().as_raw()).expect("somebody waits");
        loop {
            thread::sleep(Duration::from_millis(2));
        }
    };
    thread::Builder::new().name(format!("CPU {index}/KVM")).spawn(body).expect("started");
    receiver.recv().expect("started")
}

fn serve(kind: &str, machine: &mut Machine, mut stream: UnixStream) -> io::Result<()> {
    let forever = |piece: &[u8], pause: u64, mut stream: UnixStream| loop {
        stream.write_all(piece)?;
        thread::sleep(Duration::from_millis(pause));
    };
    match kind {
        "endless line" => return forever(&[b'['; 65_536], 0, stream),
        "slow drip" => return forever(b" ", 1000, stream),
        "garbage" => return stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n"),
        "cut" => return stream.write_all(b"{\"QMP\": {\"vers"),
        _ => writeln!(stream, "{GREETING}")?,
    }
    // A line at a time.
    let speaks = Arc::new(Mutex::new(()));
    if kind == "floods" {
        let (machine, stream, speaks) = (machine.socket.clone(), stream.try_clone()?, Arc::clone(&speaks));
        thread::spawn(move || flood(&machine, stream, &speaks));
    }
    for line in BufReader::new(stream.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?)?;
        let name = command["execute"].as_str().unwrap_or_default().to_owned();
        match kind.split_once(' ') {
            _ if kind == "silence" => continue,
            _ if kind == "hangs" && machine.socket.with_extension("hang").exists() => machine.hang(),
            Some(("dies-at", at)) if at == name => std::process::exit(0),
            Some(("hangs-at" | "cuts-at", at)) if at == name => machine.hang(),
            _ => {}
        }
        let mut answer = match (kind, name.as_str()) {
            ("foreign threads", "query-cpus-fast") => Ok(machine.cpus(&[1, 2])),
            ("too many", "query-cpus-fast") => Ok(machine.cpus(&vec![machine.tids[0]; 5000])),
            ("called web", "query-name") => Ok(json!({"name": "web"})),
            _ => machine.answer(&name, &command["arguments"]),
        }
        .map_or_else(
            |reason| json!({"error": {"class": "GenericError", "desc": reason}}),
            |value| json!({"return": value}),
        );
        answer["id"] = command["id"].clone();
        let _speaks = speaks.lock().expect("no panic");
        writeln!(stream, "{answer}")?;
        if kind.strip_prefix("cuts-at ") == Some(&name) && !std::mem::replace(&mut machine.cut, true) {
            return Ok(());
        }
        if name == "device_del" && answer.get("return").is_some() {
            writeln!(stream, r#"{{"event": "DEVICE_DELETED", "data": {{"device": "vnuma-channel"}}}}"#)?;
        }
    }
    Ok(())
}

/// Says more than is of use to anybody, once it is to.
fn flood(socket: &Path, mut stream: UnixStream, speaks: &Mutex<()>) -> io::Result<()> {
    while !socket.with_extension("flood").exists() {
        thread::sleep(Duration::from_millis(5));
    }
    let lines = [
        r#"{"event": "NEW", "data": {}}"#,
        r#"{"event": "DEVICE_DELETED", "data": {"device": "vnuma-channel"}}"#,
        r#"{"event": "ACPI_DEVICE_OST", "data": {"info": {"slot-type": "CPU"}}}"#,
        r#"{"return": {}, "id": 0}"#,
    ];
    let piece = lines.map(|line| format!("{line}\n")).concat().repeat(25);
    for sent in 1_u64.. {
        let speaks = speaks.lock().expect("no panic");
        stream.write_all(piece.as_bytes())?;
        drop(speaks);
        // Another one waits for it, perhaps.
        thread::yield_now();
        fs::write(socket.with_extension("flooded"), (100 * sent).to_string())?;
    }
    Ok(())
}

/// As much of a QEMU as is asked for: two guest nodes with a vCPU each, at home on nodes 0 and 1, and a free root port.
#[derive(Default)]
struct Machine {
    tids: [i32; 2],
    socket: PathBuf,
    hung: bool,
    cut: bool,
    fd: bool,
    chardev: bool,
    device: bool,
}

impl Machine {
    /// Stands still once, until the test lets it go on.
    fn hang(&mut self) {
        while !self.hung && !self.socket.with_extension("go").exists() {
            thread::sleep(Duration::from_millis(5));
        }
        self.hung = true;
    }

    fn cpus(&self, tids: &[i32]) -> Value {
        let cpu = |(i, tid): (usize, &i32)| json!({"cpu-index": i, "qom-path": i.to_string(), "thread-id": tid, "props": {"node-id": i}});
        tids.iter().enumerate().map(cpu).collect()
    }

    fn answer(&mut self, name: &str, arguments: &Value) -> Result<Value, &'static str> {
        let path = arguments["path"].as_str().unwrap_or_default();
        let child = |name: &str, kind: &str| json!({"name": name, "type": format!("child<{kind}>")});
        let taken = |flag: &mut bool| if std::mem::take(flag) { Ok(json!({})) } else { Err("not found") };
        let answer = match name {
            "query-cpus-fast" => self.cpus(&self.tids),
            "query-hotpluggable-cpus" | "query-memory-devices" => json!([]),
            "query-status" => json!({"status": "running"}),
            "query-memdev" => [0, 1]
                .map(|node| {
                    json!({"id": format!("ram{node}"), "size": NODE_BYTES, "policy": "bind", "host-nodes": [node]})
                })
                .into_iter()
                .collect(),
            "qom-list" if path.starts_with("/objects/ram") => json!([child("memory", "memory-region")]),
            "qom-get" if arguments["property"] == "container" => json!("/machine/pc.ram[0]"),
            "qom-get" if path == "/objects/ram0/memory" => json!(0),
            "qom-get" if path == "/objects/ram1/memory" => json!(NODE_BYTES),
            "human-monitor-command" => json!(
                "2 nodes\r\nnode 0 cpus: 0\r\nnode 0 size: 64 MB\r\nnode 0 plugged: 0 MB\r\n\
                 node 1 cpus: 1\r\nnode 1 size: 64 MB\r\nnode 1 plugged: 0 MB\r\n"
            ),
            "qom-get" if arguments["property"] == "apic-id" => json!(path.parse::<u32>().unwrap_or(0)),
            "qom-get" => json!(true),
            "qom-list" if path == "/machine/peripheral" && self.device => {
                json!([child("vnuma0", "pcie-root-port"), child("vnuma-channel", "ivshmem-doorbell")])
            }
            "qom-list" if path == "/machine/peripheral" => json!([child("vnuma0", "pcie-root-port")]),
            "qom-list" if path == "/machine/peripheral/vnuma0" => json!([child("vnuma0", "PCIE")]),
            "qom-list" => json!([]),
            _ => return self.change(name, taken),
        };
        Ok(answer)
    }

    fn change(
        &mut self,
        name: &str,
        taken: impl Fn(&mut bool) -> Result<Value, &'static str>,
    ) -> Result<Value, &'static str> {
        let done = match name {
            "getfd" => {
                self.fd = true;
                Ok(json!({}))
            }
            "closefd" => taken(&mut self.fd),
            "chardev-add" => taken(&mut self.fd).inspect(|_| self.chardev = true),
            "chardev-remove" if self.device => Err("in use"),
            "chardev-remove" => taken(&mut self.chardev),
            "device_add" if self.chardev => {
                self.device = true;
                Ok(json!({}))
            }
            "device_del" => taken(&mut self.device),
            _ => return Ok(json!({})),
        };
        if done.is_ok() {
            let path = self.socket.with_extension("log");
            let mut log = fs::OpenOptions::new().create(true).append(true).open(path).expect("opened");
            writeln!(log, "{name}").expect("written");
        }
        done
    }
}
