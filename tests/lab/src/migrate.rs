//! A VM with a running load migrates from one QEMU to another and back, by `vnumactl migrate` and with its channel plugged. The
//! server stands for two hosts: each has a vnumad of its own, and the homes of the guest nodes are the other way round on the second.
//! On its arrival the guest is told. A migration that fails or is cancelled leaves the VM as it was.

use crate::guest::{check, check_kernel_log, equip, show_guest, taskset};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};
use vnuma_model::CpuSet;
use vnuma_scenario::{
    HANG_LIMIT, Monitor, Nodes, Process, Vm, vcpu_threads, vnumactl, vnumactl_command, wait_for,
};

pub(crate) const NAME: &str = "web";
/// What the guest has in memory, so that it is seen whether all of it arrives.
const DATA: &str = "/dev/shm/data";
const DATA_MIB: u64 = 24;
/// Counted on without end.
const COUNT: &str = "/dev/shm/count";

/// A host, as far as one server can stand for two.
pub(crate) struct Host {
    /// Of the VM's directory, as lab-vm has it, and of the VM's context id.
    pub(crate) lab_name: &'static str,
    pub(crate) cid: u32,
    /// Where its QEMUs wait for VMs.
    pub(crate) port: u16,
    /// vnumad's sockets and files.
    pub(crate) directory: &'static str,
    /// Host node of each guest node.
    pub(crate) homes: [u32; 2],
}

/// Options of a QEMU that is marked, and takes a VM with post-copy.
pub(crate) const MARK: &str = "null,id=vnuma-attach";
pub(crate) const POST_COPY: &str = "migration.x-postcopy-ram=on";
/// What somebody who is slow to receive takes, and how often.
const SLOW: (usize, Duration) = (64 << 10, Duration::from_millis(100));

pub(crate) const HOSTS: [Host; 2] = [
    Host { lab_name: "web-a", cid: 91, port: 4441, directory: "/run/vnuma-a", homes: [0, 1] },
    Host { lab_name: "web-b", cid: 92, port: 4442, directory: "/run/vnuma-b", homes: [1, 0] },
];

impl Host {
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.directory)
    }

    pub(crate) fn start_vnumad(&self) -> Result<Process> {
        self.start_vnumad_with("")
    }

    /// The same. `more`: what else its configuration has.
    pub(crate) fn start_vnumad_with(&self, more: &str) -> Result<Process> {
        let [socket, qmp, records, file] =
            ["vnumad.sock", "qmp", "channels", "vnumad.toml"].map(|name| self.path(name));
        fs::create_dir_all(&qmp).with_context(|| qmp.clone())?;
        let text = format!(
            "[api]\nsocket = {socket:?}\n\n[vms]\ndirectory = {qmp:?}\ncommand_limit_ms = 30000\n\n[publish]\nrecords = {records:?}\n\n{more}"
        );
        fs::write(&file, text).with_context(|| file.clone())?;
        let child = Command::new("vnumad").args(["--config", &file]).stdin(Stdio::null()).spawn();
        let daemon = Process(child.context("vnumad")?);
        wait_for("vnumad to answer", HANG_LIMIT, || Ok(self.ask(&["list"]).is_ok()))?;
        Ok(daemon)
    }

    fn words<'a>(&self, words: &[&'a str], socket: &'a str) -> Vec<&'a str> {
        [words, &[socket]].concat()
    }

    pub(crate) fn ask(&self, words: &[&str]) -> Result<Value> {
        let socket = format!("--socket={}", self.path("vnumad.sock"));
        vnumactl(&self.words(words, &socket))
    }

    /// The same, again if its QEMU is too busy to answer.
    pub(crate) fn insist(&self, words: &[&str]) -> Result<()> {
        wait_for(&words.join(" "), HANG_LIMIT, || match self.ask(words) {
            Err(error) if format!("{error:#}").contains("answer") => Ok(false),
            outcome => outcome.map(|_| true),
        })
    }

    /// What `vnumactl list` says of the VM.
    pub(crate) fn listed(&self) -> Result<Option<Value>> {
        let vms = self.ask(&["list"])?;
        Ok(vms.as_array().context("not an array")?.iter().find(|vm| vm["name"] == NAME).cloned())
    }

    pub(crate) fn wait_until(&self, what: &str, ready: impl Fn(Option<&Value>) -> bool) -> Result<()> {
        let mut last = None;
        wait_for(what, HANG_LIMIT, || {
            last = self.listed()?;
            Ok(ready(last.as_ref()))
        })
        .with_context(|| format!("{}: {last:?}", self.lab_name))
    }

    /// It is attached, and its guest uses what is true.
    pub(crate) fn wait_until_told(&self) -> Result<()> {
        self.wait_until("the VM to be attached and its guest told", |vm| {
            let told = |vm: &Value| {
                let vcpus = vm["vcpus"].as_array().cloned().unwrap_or_default();
                vcpus.len() == 2 && vcpus.iter().all(|vcpu| vcpu["state"] == "true")
            };
            vm.is_some_and(|vm| vm["channel"] == "attached" && told(vm))
        })
    }

    pub(crate) fn wait_until_state(&self, state: &str) -> Result<()> {
        let mut last = Value::Null;
        wait_for(&format!("the migration to be {state}"), HANG_LIMIT, || {
            last = self.ask(&["migrate", NAME])?;
            Ok(last["state"] == state)
        })
        .with_context(|| last.to_string())
    }

    /// Migrates the VM to another host.
    pub(crate) fn migrate(&self, to: &Host, options: &[&str]) -> Result<Value> {
        let done = self.ask(&[&["migrate", NAME, &to.destination()][..], options].concat())?;
        ensure!(done["state"] == "done", "{done}");
        Ok(done)
    }

    pub(crate) fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.lab_directory().join("ctl.sock"))
    }

    /// So that a migration is not over before the guest goes on where it goes to.
    pub(crate) fn slow_down(&self) -> Result<()> {
        let slow = json!({"max-bandwidth": 8 << 20});
        self.monitor()?.execute(&json!({"execute": "migrate-set-parameters", "arguments": slow})).map(drop)
    }

    /// Attaches a VM that has just booted.
    pub(crate) fn begin(&self, vm: &Vm) -> Result<()> {
        equip(vm)?;
        self.wait_until("vnumad to find the VM", |vm| vm.is_some_and(|vm| vm["described"] == true))?;
        self.ask(&["attach", NAME])?;
        self.wait_until_told()
    }

    pub(crate) fn destination(&self) -> String {
        format!("tcp:127.0.0.1:{}", self.port)
    }

    pub(crate) fn lab_directory(&self) -> PathBuf {
        Path::new("/run/lab-vm").join(self.lab_name)
    }

    /// A QEMU like that of another host, which waits for the VM. `more`: what else is on its command line.
    pub(crate) fn receive(&self, like: &Host, more: &[&str]) -> Result<i32> {
        let directory = Vm::prepare(self.lab_name, self.cid)?;
        let pid = fs::read_to_string(like.lab_directory().join("pid")).context("pid")?;
        let words = fs::read_to_string(format!("/proc/{}/cmdline", pid.trim())).context("cmdline")?;
        let mut words: Vec<String> = words.split_terminator('\0').map(str::to_owned).collect();
        // What is about the arrival of that one, an option and its value each.
        let about_arrival = |pair: &[String]| match pair {
            [option, value] => option == "-incoming" || value == MARK || value == POST_COPY,
            _ => false,
        };
        while let Some(at) = words.windows(2).position(about_arrival) {
            words.drain(at..at + 2);
        }
        words.retain(|word| word != "-S");
        for word in &mut words {
            *word =
                word.replace(&like.lab_directory().display().to_string(), &directory.display().to_string());
            *word = word.replace(&format!("guest-cid={}", like.cid), &format!("guest-cid={}", self.cid));
            for (node, home) in self.homes.iter().enumerate() {
                if word.contains(&format!("id=ram{node},")) {
                    *word = word
                        .replace(&format!("host-nodes={}", like.homes[node]), &format!("host-nodes={home}"));
                }
            }
        }
        words.extend(["-incoming".to_owned(), self.destination()]);
        words.extend(more.iter().map(|&word| word.to_owned()));
        self.run(&words)
    }

    /// Starts a QEMU, and shows its monitor to vnumad.
    fn run(&self, words: &[String]) -> Result<i32> {
        let scope = format!("/sys/fs/cgroup/machine.slice/{}.scope", self.lab_name);
        fs::create_dir_all(&scope).with_context(|| scope.clone())?;
        let script = "echo 0 > \"$0\" && exec \"$@\"";
        let procs = format!("{scope}/cgroup.procs");
        let log = fs::File::create(self.path("qemu.log")).context("qemu.log")?;
        let mut command = Command::new("sh");
        command.args(["-c", script, &procs]).args(words);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().context("qemu")?;
        let pid = child.id() as i32;
        // It is ended through lab-vm.
        thread::spawn(move || child.wait_with_output());
        let monitor = self.lab_directory().join("qmp.sock");
        wait_for("QEMU to listen", HANG_LIMIT, || {
            let log = fs::read_to_string(self.path("qemu.log")).unwrap_or_default();
            ensure!(Path::new(&format!("/proc/{pid}")).exists(), "QEMU has ended: {log}");
            // It listens before its vCPUs are there.
            let threads = vcpu_threads(pid).unwrap_or_default().len();
            Ok(threads == 2 && UnixStream::connect(self.lab_directory().join("ctl.sock")).is_ok())
        })?;
        fs::write(self.lab_directory().join("pid"), pid.to_string()).context("pid")?;
        let link = self.path(&format!("qmp/{NAME}.sock"));
        // Of the QEMU before.
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&monitor, &link).with_context(|| link.clone())?;
        Ok(pid)
    }

    /// Puts vCPUs on host nodes, without vnumad's knowledge.
    pub(crate) fn place(&self, vm: &Vm, places: [u32; 2], nodes: &Nodes) -> Result<()> {
        places.iter().enumerate().try_for_each(|(vcpu, &node)| taskset(vm, vcpu, node, nodes))
    }

    /// vCPUs are on these host nodes, vnumad shows that, and the guest's kernel uses the guest nodes that have their homes there.
    pub(crate) fn expect(&self, vm: &Vm, places: [u32; 2]) -> Result<()> {
        let guest = places.map(|place| u64::from(self.homes[place as usize]));
        self.wait_until("vnumad to show the guest's nodes", |vm| {
            let vcpus = vm.and_then(|vm| vm["vcpus"].as_array().cloned()).unwrap_or_default();
            let is = |(at, vcpu): (usize, &Value)| {
                vcpu["host_node"] == places[at] && vcpu["acked_node"] == guest[at] && vcpu["state"] == "true"
            };
            vcpus.len() == 2 && vcpus.iter().enumerate().all(is)
        })
        .and_then(|()| check(vm, &guest))
        .and_then(|()| away_from_cpu_0(vm))
        .inspect_err(|_| {
            show_guest(vm);
            println!("vnumad shows {:?}", self.listed());
        })
    }
}

/// No vCPU may run on CPU 0 of the lab's server: TCG loses track of VMs there (lab/README.md, lab-vm). libvirt's domains are not in the
/// control group that keeps those of lab-vm away from it.
fn away_from_cpu_0(vm: &Vm) -> Result<()> {
    for thread in &vm.threads {
        let path = format!("/proc/{}/task/{thread}/status", vm.pid);
        let status = fs::read_to_string(&path).with_context(|| path.clone())?;
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed: CpuSet = allowed.with_context(|| path.clone())?.trim().parse().context(path)?;
        ensure!(!allowed.contains(0), "vCPU thread {thread} may run on CPU 0: {allowed}");
    }
    Ok(())
}

/// When a QEMU says that its guest runs, and when vnumad says that the guest has acknowledged what was published after that.
pub(crate) struct Watched {
    resumed: mpsc::Receiver<Instant>,
    told: mpsc::Receiver<Instant>,
    _watch: Process,
    /// A monitor has one client at a time.
    monitor: Arc<Mutex<Option<UnixStream>>>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The other end may be gone.
        let _ = monitor.map(|monitor| monitor.shutdown(Shutdown::Both));
    }
}

impl Watched {
    /// The QEMU may be started later.
    pub(crate) fn start(host: &Host) -> Result<Self> {
        let (say, resumed) = mpsc::channel();
        let (socket, monitor) = (host.lab_directory().join("ctl.sock"), Arc::new(Mutex::new(None)));
        let kept = Arc::clone(&monitor);
        thread::spawn(move || {
            let Some(mut stream) = connect(&socket) else { return };
            let copy = stream.try_clone().ok();
            *kept.lock().unwrap_or_else(PoisonError::into_inner) = copy;
            if stream.write_all(b"{\"execute\": \"qmp_capabilities\"}\n").is_err() {
                return;
            }
            let lines = BufReader::new(stream).lines().map_while(Result::ok);
            lines.filter(|line| line.contains("\"RESUME\"")).for_each(|_| {
                let _ = say.send(Instant::now());
            });
        });
        let (say, told) = mpsc::channel();
        let socket = format!("--socket={}", host.path("vnumad.sock"));
        let mut watch = Process(
            vnumactl_command(&["watch", "--json", "--events", "acknowledged", &socket])
                .stdout(Stdio::piped())
                .spawn()
                .context("vnumactl watch")?,
        );
        let stdout = watch.0.stdout.take().context("no output")?;
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.for_each(|_| {
                let _ = say.send(Instant::now());
            });
        });
        Ok(Self { resumed, told, _watch: watch, monitor })
    }

    /// Says how long that took.
    pub(crate) fn report(&self, how: &str) -> Result<()> {
        let took = self.took()?;
        println!("{how}: from its arrival until the guest was told: {} ms (measured)", took.as_millis());
        Ok(())
    }

    /// How long it took from the arrival until the guest was told.
    pub(crate) fn took(&self) -> Result<Duration> {
        let resumed =
            self.resumed.recv_timeout(HANG_LIMIT).context("the guest does not run at its destination")?;
        loop {
            let told = self.told.recv_timeout(HANG_LIMIT).context("the guest is not told")?;
            if told >= resumed {
                return Ok(told - resumed);
            }
        }
    }
}

/// A monitor, as soon as somebody listens.
fn connect(socket: &Path) -> Option<UnixStream> {
    let until = Instant::now() + HANG_LIMIT;
    while Instant::now() < until {
        if let Ok(stream) = UnixStream::connect(socket) {
            return Some(stream);
        }
        thread::sleep(Duration::from_millis(10));
    }
    None
}

/// Somebody who takes a migration in, slowly, until this is dropped. It never arrives.
struct SlowReceiver {
    destination: String,
    _end: mpsc::Sender<()>,
}

impl SlowReceiver {
    fn start((bytes, pause): (usize, Duration)) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("a port")?;
        let destination = format!("tcp:{}", listener.local_addr()?);
        let (end, ended) = mpsc::channel::<()>();
        thread::spawn(move || {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut taken = vec![0; bytes];
            while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
                if !matches!(stream.read(&mut taken), Ok(1..)) {
                    return;
                }
            }
        });
        Ok(Self { destination, _end: end })
    }
}

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    let [a, b] = &HOSTS;
    let (vnumad_a, vnumad_b) = (a.start_vnumad()?, b.start_vnumad()?);
    let vm = boot(a)?;
    a.begin(&vm)?;
    a.place(&vm, [0, 1], &nodes)?;
    a.expect(&vm, [0, 1])?;
    let load = Load::start(&vm)?;

    let (vm, vnumad_b) = there(vm, &load, &nodes, vnumad_b)?;
    let vm = back(vm, &load, &nodes)?;
    let vm = with_its_channel(vm, &load, &nodes)?;
    stays(b, &vm, &nodes)?;
    let vnumad_b = stays_without_vnumad(b, &vm, &nodes, vnumad_b)?;
    load.check(&vm)?;
    check_kernel_log(&vm)?;
    drop((vm, vnumad_a, vnumad_b));
    Ok(())
}

/// The VM as it begins: lab-vm makes it, and it is started anew under the name of both hosts.
pub(crate) fn boot(host: &Host) -> Result<Vm> {
    boot_like(host, &["--nodes", "2", "--vcpus", "2", "--memory", "384M"])
}

/// The same, of another shape.
pub(crate) fn boot_like(host: &Host, shape: &[&str]) -> Result<Vm> {
    let shape: Vec<String> = shape.iter().map(|&word| word.to_owned()).collect();
    let first = Vm::start(NAME, &shape)?;
    let words = fs::read_to_string(format!("/proc/{}/cmdline", first.pid)).context("cmdline")?;
    let cid = fs::read_to_string(format!("/run/lab-vm/{NAME}/cid")).context("cid")?;
    drop(first);
    let directory = Vm::prepare(host.lab_name, host.cid)?;
    let word = |word: &str| {
        word.replace(&format!("/run/lab-vm/{NAME}/"), &format!("{}/", directory.display()))
            .replace(&format!("guest-cid={}", cid.trim()), &format!("guest-cid={}", host.cid))
    };
    let words = words.split_terminator('\0').filter(|word| *word != "-S").map(word);
    let pid = host.run(&words.collect::<Vec<_>>())?;
    Vm::started(host.lab_name, pid)
}

/// Programs of the guest that go on while it migrates.
pub(crate) struct Load {
    sum: String,
    count: std::cell::Cell<u64>,
}

impl Load {
    pub(crate) fn start(vm: &Vm) -> Result<Self> {
        let write = format!("head -c {} /dev/urandom > {DATA} && cksum < {DATA}", DATA_MIB << 20);
        let sum = vm.exec(&["sh", "-c", &write])?;
        let count =
            format!("i=0; while :; do i=$((i+1)); echo $i > {COUNT}.new; mv {COUNT}.new {COUNT}; done");
        let burn = format!("while cksum < {DATA} > /dev/null; do :; done");
        for script in [count, burn] {
            let background = "setsid sh -c \"$0\" < /dev/null > /dev/null 2>&1 &";
            vm.exec(&["sh", "-c", background, &script])?;
        }
        let load = Self { sum, count: std::cell::Cell::new(0) };
        load.check(vm)?;
        Ok(load)
    }

    /// It goes on, and its memory is whole.
    pub(crate) fn check(&self, vm: &Vm) -> Result<()> {
        let before = self.count.get();
        wait_for("the load to go on", HANG_LIMIT, || {
            let text = vm.exec(&["cat", COUNT]).unwrap_or_default();
            self.count.set(text.trim().parse().unwrap_or(0));
            Ok(self.count.get() > before)
        })?;
        let sum = vm.exec(&["sh", "-c", &format!("cksum < {DATA}")])?;
        ensure!(sum == self.sum, "the content of the guest's memory changed: {} {sum}", self.sum);
        Ok(())
    }
}

/// Nobody waits there; then it is cancelled in the middle. Both times it is attached again, and its guest follows.
fn stays(host: &Host, vm: &Vm, nodes: &Nodes) -> Result<()> {
    let nobody = host.ask(&["migrate", NAME, "tcp:127.0.0.1:9"]).err().map(|error| format!("{error:#}"));
    let nobody = nobody.context("a migration to nobody has succeeded")?;
    ensure!(nobody.contains("Connection refused") && nobody.contains("did not migrate"), "{nobody}");
    host.wait_until_told()?;
    host.place(vm, [1, 1], nodes)?;
    host.expect(vm, [1, 1])?;
    println!("a migration that fails leaves the VM attached, and its guest told");

    let waits = SlowReceiver::start(SLOW)?;
    host.ask(&["migrate", NAME, &waits.destination, "--no-wait"])?;
    host.wait_until_state("sending")?;
    ensure!(host.listed()?.is_some_and(|vm| vm["channel"] == "none"), "it migrates with its device");
    let cancelled = host.ask(&["migrate", NAME, "--cancel"])?;
    ensure!(cancelled["state"] == "cancelled", "{cancelled}");
    host.wait_until_told()?;
    host.place(vm, [0, 1], nodes)?;
    host.expect(vm, [0, 1])?;
    println!("one that is cancelled as well");
    Ok(())
}

/// vnumad is killed in the middle. The next one knows of no migration, and attaches the VM when that has failed.
fn stays_without_vnumad(host: &Host, vm: &Vm, nodes: &Nodes, vnumad: Process) -> Result<Process> {
    let waits = SlowReceiver::start(SLOW)?;
    host.ask(&["migrate", NAME, &waits.destination, "--no-wait"])?;
    host.wait_until_state("sending")?;
    drop(vnumad);
    let vnumad = host.start_vnumad()?;
    host.wait_until("the next vnumad to know that the VM is to be attached", |vm| {
        vm.is_some_and(|vm| vm["attach_on_arrival"] == true && vm["channel"] == "none")
    })?;
    drop(waits);
    host.wait_until_told()?;
    host.place(vm, [1, 0], nodes)?;
    host.expect(vm, [1, 0])?;
    println!("vnumad was killed in the middle: the next one attached the VM that stayed");
    Ok(vnumad)
}

/// By `vnumactl migrate`, to a host whose vnumad is killed while the VM is on its way.
fn there(vm: Vm, load: &Load, nodes: &Nodes, vnumad_b: Process) -> Result<(Vm, Process)> {
    let [a, b] = &HOSTS;
    let pid = b.receive(a, &[])?;
    b.wait_until("the other vnumad to find the VM", |vm| {
        vm.is_some_and(|vm| vm["run_state"] == "inmigrate")
    })?;
    b.insist(&["attach", NAME, "--on-arrival"])?;
    drop(vnumad_b);
    let vnumad_b = b.start_vnumad()?;
    b.wait_until("the next vnumad to know that the VM is to be attached", |vm| {
        vm.is_some_and(|vm| vm["attach_on_arrival"] == true && vm["channel"] == "none")
    })?;
    let watched = Watched::start(b)?;
    a.migrate(b, &[])?;
    watched.report("by vnumactl migrate")?;
    let there = arrived(a, b, pid, load, nodes)?;
    // Its QEMU was left where it stood.
    drop(vm);
    Ok((there, vnumad_b))
}

/// With post-copy, to a QEMU that has the mark from its command line.
fn back(vm: Vm, load: &Load, nodes: &Nodes) -> Result<Vm> {
    let [a, b] = &HOSTS;
    let pid = a.receive(b, &["-chardev", MARK, "-global", "migration.x-postcopy-ram=on"])?;
    a.wait_until("vnumad to see the mark", |vm| vm.is_some_and(|vm| vm["attach_on_arrival"] == true))?;
    b.slow_down()?;
    let watched = Watched::start(a)?;
    let done = b.migrate(a, &["--post-copy"])?;
    watched.report("with post-copy")?;
    println!("with post-copy: {done}");
    let back = arrived(b, a, pid, load, nodes)?;
    drop(vm);
    Ok(back)
}

/// By another tool, with the channel plugged on both sides.
fn with_its_channel(vm: Vm, load: &Load, nodes: &Nodes) -> Result<Vm> {
    let [a, b] = &HOSTS;
    // Both sides have to allow post-copy, and the other one does.
    let pid = b.receive(a, &["-global", POST_COPY])?;
    b.wait_until("the other vnumad to find the VM", |vm| {
        vm.is_some_and(|vm| vm["run_state"] == "inmigrate")
    })?;
    b.insist(&["attach", NAME])?;
    let watched = Watched::start(b)?;
    let uri = json!({"uri": b.destination()});
    a.monitor()?.execute(&json!({"execute": "migrate", "arguments": uri}))?;
    watched
        .report("by QMP, with its channel")
        .with_context(|| fs::read_to_string(b.path("qemu.log")).unwrap_or_default())?;
    let there = arrived(a, b, pid, load, nodes)?;
    drop(vm);
    Ok(there)
}

/// The VM is at its new host, whole, attached, told, and goes on; and it is no more where it was.
fn arrived(from: &Host, to: &Host, pid: i32, load: &Load, nodes: &Nodes) -> Result<Vm> {
    from.wait_until("the VM to be forgotten where it was", |vm| vm.is_none())?;
    to.wait_until_told()?;
    let vm = Vm::started(to.lab_name, pid)?;
    for places in [[0, 1], [1, 1], [1, 0]] {
        to.place(&vm, places, nodes)?;
        to.expect(&vm, places)?;
    }
    load.check(&vm)?;
    check_kernel_log(&vm)?;
    Ok(vm)
}
