//! The life of a VM.
//!
//! ```text
//! /run/lab-vm/.lock            (elsewhere see place.rs) held while a VM is added or removed
//! /run/lab-vm/NAME/            made by start, removed by stop
//!     cid                      context id of AF_VSOCK
//!     address                  its address on the lab's network, if it is there
//!     pid                      process of QEMU, locked by it while it lives
//!     qmp.sock                 monitor for the VM's manager; lab-vm does not touch it
//!     ctl.sock                 monitor for lab-vm
//!     console.log              console of the guest
//!     qemu.log                 what QEMU said
//! /run/vnuma/qmp/NAME.sock     symbolic link to qmp.sock while the VM runs
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vnuma_lab_qmp::Qmp;

use serde_json::json;

use crate::cgroup;
use crate::host::read_nodes;
use crate::network::{self, Nic};
use crate::place;
use crate::placement::{self, Placement};
use crate::plan::{Plan, Request, check_name, plan};
use crate::qemu::{self, Files};
use crate::session;
use crate::state::{
    alive, all, directory, existing, kvm_internal_error, pid, read_number, running_cid, stands_still, tail,
};

/// How long a guest may take to boot; nested under emulation it is 5 to 20 s, with several at once on a busy machine minutes.
const BOOT_LIMIT: Duration = Duration::from_secs(900);
/// How long QEMU may take to end after it was asked to.
const QUIT_LIMIT: Duration = Duration::from_secs(5);

fn link(name: &str) -> PathBuf {
    place::qmp_links().join(format!("{name}.sock"))
}

/// Where it is said what the machine of a VM is.
enum Machine {
    /// By options of lab-vm.
    Planned(Plan),
    /// In a file.
    Placed(Placement),
}

impl Machine {
    fn of(request: &Request, file: Option<&Path>) -> Result<Self> {
        let Some(file) = file else { return Ok(Self::Planned(plan(request, &read_nodes(Path::new("/"))?)?)) };
        check_name(&request.name)?;
        placement::read(file, &request.name).map(Self::Placed)
    }

    fn options(&self, request: &Request) -> Vec<Vec<String>> {
        match self {
            Self::Planned(plan) => {
                [qemu::machine(&request.name, plan), qemu::passed_through(&request.devices)].concat()
            }
            Self::Placed(placement) => placement.options.clone(),
        }
    }

    /// Pins the threads of its QEMU, before the guest runs.
    fn pin(&self, name: &str, qmp: &mut Qmp) -> Result<()> {
        let plan = match self {
            Self::Planned(plan) => plan,
            Self::Placed(placement) => return placement.pin(pid(name).context("QEMU has written no PID")?),
        };
        for thread in qmp.vcpu_threads()? {
            let node = plan.nodes.iter().find(|node| node.vcpus.contains(&thread.index));
            if let Some(home) = node.and_then(|node| node.home.as_ref()) {
                pin(thread.tid, &home.cpus).with_context(|| format!("vCPU {}", thread.index))?;
            }
        }
        Ok(())
    }
}

/// Starts a VM, if there is a file as that says, and waits until its agent answers.
pub fn start(request: &Request, file: Option<&Path>, verbose: bool) -> Result<()> {
    let machine = Machine::of(request, file)?;
    let kernel = place::kernels().join(&request.kernel);
    ensure!(
        kernel.join("vmlinux").exists(),
        "--kernel {}: expected one of: {}",
        request.kernel,
        names(&place::kernels())?
    );
    let name = request.name.as_str();
    let cid = reserve(name)?;
    let result = launch(request, &machine, cid, &kernel, verbose).and_then(|()| await_agent(name, cid));
    if let Err(error) = result {
        let text = format!("{error:#}\n{}", tail(name));
        // The first error is reported.
        let _ = remove(name);
        bail!("VM \"{name}\" did not start: {text}");
    }
    // Last, so that who watches the directory sees only VMs that are up.
    let links = place::qmp_links();
    fs::create_dir_all(&links).with_context(|| links.display().to_string())?;
    symlink(directory(name).join("qmp.sock"), link(name)).with_context(|| link(name).display().to_string())
}

/// Makes the directory of a VM, which must not exist yet, and finds a free context id.
fn reserve(name: &str) -> Result<u32> {
    let vms = place::vms();
    fs::create_dir_all(&vms).with_context(|| vms.display().to_string())?;
    let _lock = lock()?;
    let directory = directory(name);
    match fs::create_dir(&directory) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            bail!("VM \"{name}\": there is one of that name already; \"lab-vm stop {name}\" ends it");
        }
        Err(error) => return Err(error).with_context(|| directory.display().to_string()),
    }
    let taken: BTreeSet<u32> = all()?.iter().filter_map(|name| read_number(name, "cid").ok()).collect();
    let cid = (place::first_cid()..).find(|cid| !taken.contains(cid)).context("no context id is free")?;
    fs::write(directory.join("cid"), format!("{cid}\n"))?;
    Ok(cid)
}

fn lock() -> Result<Flock<File>> {
    let path = place::vms().join(".lock");
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| anyhow!("{}: {errno}", path.display()))
}

/// Starts QEMU, pins its vCPU threads and lets it go.
fn launch(request: &Request, machine: &Machine, cid: u32, kernel: &Path, verbose: bool) -> Result<()> {
    let Request { name, network, append, .. } = request;
    let directory = directory(name);
    let (vmlinux, initrd) = (kernel.join("vmlinux"), kernel.join("initrd"));
    let nic = if *network { Some(Nic::new(cid)?) } else { None };
    let root = place::root_disk();
    let files = Files {
        kernel: &vmlinux,
        initrd: &initrd,
        root: &root,
        directory: &directory,
        append: append.as_deref().unwrap_or_default(),
    };
    let groups = [machine.options(request), qemu::surroundings(cid, &files, nic.as_ref())].concat();
    if verbose {
        println!("{}", readable(&groups));
    }
    if let Some(nic) = &nic {
        nic.add()?;
        fs::write(directory.join("address"), format!("{}\n", nic.address))?;
    }
    let mut qmp = spawn(cgroup::enter(name)?, &directory, &groups.concat())?;
    machine.pin(name, &mut qmp)?;
    qmp.run("cont").map(drop)
}

/// Starts QEMU by `command`, in a session of its own, with a log, and connects to its monitor. QEMU's own way into the background
/// would lose what it says later, such as why KVM gave a VM up.
fn spawn(mut command: Command, directory: &Path, arguments: &[String]) -> Result<Qmp> {
    let path = directory.join("qemu.log");
    let log = File::create(&path).with_context(|| path.display().to_string())?;
    let (stdout, stderr) = (log.try_clone()?, log);
    command
        .arg("setsid")
        .args(place::qemu())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr);
    let mut child = command.spawn().context("setsid qemu-system-x86_64")?;
    let started = Instant::now();
    loop {
        // Before the first try: a process that has ended may have made its socket.
        let ended = child.try_wait()?;
        match Qmp::connect(&directory.join("ctl.sock")) {
            Ok(qmp) => return Ok(qmp),
            Err(error) => {
                if let Some(status) = ended {
                    let said = fs::read_to_string(&path).unwrap_or_default();
                    bail!("qemu-system-x86_64: {status}: {}", said.trim());
                }
                if started.elapsed() > BOOT_LIMIT {
                    // It is of no use to anybody.
                    let _ = child.kill();
                    return Err(error.context("QEMU's monitor does not answer"));
                }
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn pin(tid: i32, cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
    }
    sched_setaffinity(Pid::from_raw(tid), &set)
        .with_context(|| format!("pinning thread {tid} to CPUs {cpus:?}"))
}

/// One option a line.
fn readable(groups: &[Vec<String>]) -> String {
    let quoted = |word: &String| if word.contains(' ') { format!("'{word}'") } else { word.clone() };
    let lines = groups.iter().map(|group| group.iter().map(quoted).collect::<Vec<_>>().join(" "));
    format!("qemu-system-x86_64 \\\n  {}", lines.collect::<Vec<_>>().join(" \\\n  "))
}

fn await_agent(name: &str, cid: u32) -> Result<()> {
    let started = Instant::now();
    loop {
        match session::connect(cid) {
            Ok(_) => return Ok(()),
            Err(_) if !alive(name) => bail!("QEMU has ended"),
            Err(_) if kvm_internal_error(name).is_some() => {
                bail!(kvm_internal_error(name).unwrap_or_default())
            }
            Err(_) if stands_still(name) => bail!("a vCPU stands still"),
            Err(error) if started.elapsed() > BOOT_LIMIT => {
                return Err(
                    error.context(format!("its agent did not answer within {} s", BOOT_LIMIT.as_secs()))
                );
            }
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Resets a VM, as its reset button would, and waits until its agent answers again. The memory stays, and
/// with it what hangs on QEMU; what was in the guest is gone.
pub fn reset(name: &str) -> Result<()> {
    let cid = running_cid(name)?;
    let mut qmp = Qmp::connect(&directory(name).join("ctl.sock"))?;
    // A guest that reboots of itself ends QEMU; see the options. Not now: the firmware resets once more.
    qmp.run_with("set-action", &json!({ "reboot": "reset" }))?;
    let booted = qmp.run("system_reset").and_then(|_| qmp.await_event("RESET")).and_then(|()| {
        await_agent(name, cid).with_context(|| format!("VM \"{name}\" did not come back:\n{}", tail(name)))
    });
    qmp.run_with("set-action", &json!({ "reboot": "shutdown" }))?;
    booted
}

/// Stops a VM at once. Its changes live in its memory, so nothing is lost by that.
pub fn stop(name: &str) -> Result<()> {
    existing(name)?;
    remove(name)
}

fn remove(name: &str) -> Result<()> {
    match fs::remove_file(link(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| link(name).display().to_string());
        }
        _ => {}
    }
    if let Some(pid) = pid(name).filter(|_| alive(name)) {
        // QEMU closes the connection when it quits, before or after it answers.
        let _ = Qmp::connect(&directory(name).join("ctl.sock")).and_then(|mut qmp| qmp.run("quit"));
        let started = Instant::now();
        // Its memory, which identifies it, goes a moment before the process.
        while Path::new("/proc").join(pid.to_string()).exists() {
            if started.elapsed() > QUIT_LIMIT && alive(name) {
                // If this fails, it has ended already.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            ensure!(started.elapsed() < 4 * QUIT_LIMIT, "VM \"{name}\": QEMU {pid} does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    cgroup::remove(name)?;
    if directory(name).join("address").exists() {
        network::remove(read_number(name, "cid")?)?;
    }
    let _lock = lock()?;
    fs::remove_dir_all(directory(name)).with_context(|| directory(name).display().to_string())
}

/// Prints name, process and state of every VM.
pub fn list() -> Result<()> {
    let mut stdout = io::stdout().lock();
    for name in all()? {
        let state = match (alive(&name), kvm_internal_error(&name)) {
            (false, _) => "dead",
            (true, Some(_)) => "given up",
            (true, None) => "running",
        };
        let pid = pid(&name).map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        writeln!(stdout, "{name}\t{pid}\t{state}")?;
    }
    Ok(())
}

/// Prints the console of a VM.
pub fn log(name: &str) -> Result<()> {
    existing(name)?;
    let path = directory(name).join("console.log");
    let mut file = File::open(&path).with_context(|| path.display().to_string())?;
    io::copy(&mut file, &mut io::stdout().lock())?;
    Ok(())
}

fn names(directory: &Path) -> Result<String> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?.flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names.join(", "))
}
