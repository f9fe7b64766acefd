//! A program in a guest follows the guest's topology while it changes: by libvnuma, and by a libnuma that does not keep what it read
//! once. It runs under `vnuma-run`, beside one that runs without it.

use crate::guest::{DEFAULT_KERNEL, check_kernel_log, detach, equip_with, show_guest, unload_driver};
use crate::{numactl, programs};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::ChildStdout;
use vnuma_scenario::{Lines, Process, Vm, vnumactl, vnumad};

const NAME: &str = "runtimes";
/// On the server, and in the guest.
pub const DIRECTORY: &str = "/root/runtime";
/// By themselves allocators keep what is free for some time only. A slow server may take longer than that for a round.
const KEEPS_JEMALLOC: [&str; 1] = ["MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1"];
const KEEPS_MIMALLOC: [&str; 2] =
    ["MIMALLOC_DECOMMIT_DELAY=600000", "MIMALLOC_SEGMENT_DECOMMIT_DELAY=600000"];
const MIMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2";
const TCMALLOC: &str = "/root/runtime/tcmalloc/libvnuma-tcmalloc.so";
/// What each line of these programs has.
const FOLLOW: &str = "current=";
const ALLOC: &str = "local=";
/// vCPUs 0 and 1 are on node 0 at first, the others on node 1.
const AT_FIRST: &str = "0,0,1,1";

/// A `vnuma-follow` or `vnuma-alloc` that runs in the guest.
struct Follower {
    lines: Lines<ChildStdout>,
    mark: &'static str,
    /// Its input is open as long as this is there.
    process: Process,
}

impl Follower {
    fn start(vm: &Vm, command: &[&str], mark: &'static str) -> Result<Self> {
        let mut process = vm.spawn(command)?;
        let who = format!("the program with lines of {mark:?}");
        Ok(Self { lines: Lines::of_process(&mut process, who)?, mark, process })
    }

    /// Reads on until a line says all of `state`. A change of several vCPUs can come in several parts, and the kernel's lists of
    /// nodes are ahead of the driver's page: `once` is what any line has said by then.
    fn expect(&mut self, state: &[&str], once: &[&str]) -> Result<()> {
        let says = |line: &str, word: &&str| line.split(' ').any(|seen| seen == *word);
        let mut seen = Vec::new();
        loop {
            let line = self.lines.next(&state.join(" ")).with_context(|| seen.join("\n"))?;
            println!("  {line}");
            ensure!(line.contains(self.mark), "a line without {:?}: {line}", self.mark);
            let done = state.iter().all(|word| says(&line, word));
            seen.push(line);
            if done {
                let missing = once.iter().find(|word| !seen.iter().any(|line| says(line, word)));
                ensure!(missing.is_none(), "no line with {missing:?}:\n{}", seen.join("\n"));
                return Ok(());
            }
        }
    }

    /// Ends it by the end of its input.
    fn end(mut self) -> Result<()> {
        drop(self.process.0.stdin.take());
        self.process.succeed(self.lines.who())
    }
}

pub fn run() -> Result<()> {
    let _daemon = vnumad(&[])?;
    let shape = ["--nodes", "2", "--vcpus", "4", "--memory", "512M", "--kernel", DEFAULT_KERNEL];
    let vm = Vm::start(NAME, &shape.map(str::to_owned))?;
    follow(&vm).inspect_err(|_| show_guest(&vm))?;
    check_kernel_log(&vm)
}

/// Puts all that is there on the server into a guest: what `guest/runtime` builds, and what else a job has beside it.
pub fn install(vm: &Vm) -> Result<()> {
    put_directory(vm, Path::new(DIRECTORY))
}

fn put_directory(vm: &Vm, directory: &Path) -> Result<()> {
    let name = directory.to_str().context("a name that is not UTF-8")?;
    vm.exec(&["mkdir", "-p", name])?;
    for entry in fs::read_dir(directory).with_context(|| name.to_owned())? {
        let path = entry?.path();
        if path.is_dir() {
            put_directory(vm, &path)?;
        } else {
            let file = path.to_str().context("a name that is not UTF-8")?;
            vm.put(file, file)?;
        }
    }
    Ok(())
}

fn follow(vm: &Vm) -> Result<()> {
    install(vm)?;
    let (run, follow) = (in_guest("vnuma-run"), in_guest("vnuma-follow"));
    let command = [&run, "--libraries", DIRECTORY, &follow];

    let mut without_driver = Follower::start(vm, &command, FOLLOW)?;
    without_driver.expect(&["source=sysfs", "with-cpus=0,1", "current=ok"], &[])?;
    without_driver.end()?;

    equip_with(vm, DEFAULT_KERNEL)?;
    vm.attach()?;
    vm.await_driver()?;
    for vcpu in ["0", "1", "2", "3"] {
        let node = if vcpu < "2" { "0" } else { "1" };
        vnumactl(&["move", NAME, "--vcpu", vcpu, "--node", node])?;
    }
    let mut followers = [Follower::start(vm, &command, FOLLOW)?, Follower::start(vm, &[&follow], FOLLOW)?];
    for follower in &mut followers {
        let state = ["source=device", &format!("cpus={AT_FIRST}"), &format!("libnuma={AT_FIRST}")];
        follower.expect(&state, &[])?;
    }
    move_and_back(&mut followers)?;
    numactl::tests(vm)?;
    stay(vm)?;
    vm.exec(&["sh", "-c", "echo 0 > /proc/sys/kernel/numa_balancing"])?;
    programs::essential(vm)?;
    let there = [true, install_mimalloc(vm)?, has_tcmalloc()];
    ALLOCATORS.iter().zip(there).filter(|(_, there)| *there).try_for_each(|(one, _)| allocate(vm, one))?;
    unload(vm, followers)
}

/// A node loses all its CPUs and gets them back. The one that runs without `vnuma-run` keeps the libnuma of its start.
fn move_and_back(followers: &mut [Follower; 2]) -> Result<()> {
    let [with, without] = followers;
    for vcpu in ["2", "3"] {
        vnumactl(&["move", NAME, "--vcpu", vcpu, "--node", "0"])?;
    }
    let (stays, lost, gained) = (format!("libnuma={AT_FIRST}"), ["lost=1"], ["gained=1"]);
    with.expect(&["cpus=0,0,0,0", "libnuma=0,0,0,0", "with-cpus=0", "current=ok"], &lost)?;
    without.expect(&["cpus=0,0,0,0", &stays, "with-cpus=0", "current=ok"], &lost)?;
    println!("libvnuma and the overlay follow, libnuma by itself does not");
    vnumactl(&["move", NAME, "--vcpu", "0", "--node", "1"])?;
    with.expect(&["cpus=1,0,0,0", "libnuma=1,0,0,0", "with-cpus=0,1", "current=ok"], &gained)?;
    without.expect(&["cpus=1,0,0,0", &stays, "current=ok"], &gained)
}

/// What a program has allocated once comes to its thread, from whichever allocator it has it, or shared memory: the driver tells AutoNUMA to look. By
/// itself AutoNUMA would do so next in ten minutes here, which is longer than the program waits.
fn stay(vm: &Vm) -> Result<()> {
    const SELDOM: &str = "d=/sys/kernel/debug/sched/numa_balancing; [ -d $d ] || mount -t debugfs none /sys/kernel/debug; \
                          echo 600000 > $d/scan_period_max_ms && echo 600000 > $d/scan_period_min_ms";
    vm.exec(&["sh", "-c", SELDOM])?;
    let told = || -> Result<u64> {
        let text = vm.exec(&["cat", "/sys/class/misc/vnuma/autonuma_told"])?;
        text.trim().parse().with_context(|| format!("autonuma_told: {text:?}"))
    };
    let (run, alloc) = (in_guest("vnuma-run"), in_guest("vnuma-alloc"));
    // An allocator would take the node of another CPU, if the program began there, for what it allocates once.
    let there: [&str; 6] = ["taskset", "-c", "1", &alloc, "1", "stay"];
    let with = |allocator| [&[&run, "--libraries", DIRECTORY, "--allocator", allocator][..], &there].concat();
    // Shared memory, as a database's buffers are: from 6.12 on.
    let mut commands = vec![there.to_vec(), with("jemalloc"), [&there[..], &["shared"]].concat()];
    if has_tcmalloc() {
        // It binds what is smaller.
        commands.push([&with("tcmalloc")[..], &["large"]].concat());
    }
    for command in &commands {
        let mut program = Follower::start(vm, command, ALLOC)?;
        program.expect(&["node=0", "local=100"], &[])?;
        let before = told()?;
        for node in ["1", "0"] {
            vnumactl(&["move", NAME, "--vcpu", "1", "--node", node])?;
            program.expect(&[&format!("node={node}"), "local=100"], &[])?;
        }
        ensure!(told()? > before, "autonuma_told stays at {before}");
        program.end()?;
    }
    println!("what was allocated once comes along: {} programs", commands.len());
    Ok(())
}

/// An allocator that vnuma-run can choose, and what keeps it from giving back what is free when it runs by itself.
struct Allocator {
    name: &'static str,
    library: &'static str,
    keeps: &'static [&'static str],
}

/// jemalloc has arenas of the thread's node; large blocks of mimalloc that are on another node get new pages; tcmalloc has memory for
/// each node, and by itself is one that knows none.
const ALLOCATORS: [Allocator; 3] = [
    Allocator { name: "jemalloc", library: "libjemalloc.so.2", keeps: &KEEPS_JEMALLOC },
    Allocator { name: "mimalloc", library: MIMALLOC, keeps: &KEEPS_MIMALLOC },
    Allocator { name: "tcmalloc", library: TCMALLOC, keeps: &["TCMALLOC_NUMA_AWARE=0"] },
];

/// Puts mimalloc where the system has it; the image does not. Is it there?
fn install_mimalloc(vm: &Vm) -> Result<bool> {
    let brought = in_guest("libmimalloc.so.2");
    let there = Path::new(&brought).exists();
    if there {
        vm.exec(&["cp", &brought, MIMALLOC])?;
    } else {
        println!("skipped: mimalloc: there was no libmimalloc.so.2 (package libmimalloc2.0 of Debian 12)");
    }
    Ok(there)
}

fn has_tcmalloc() -> bool {
    let there = Path::new(TCMALLOC).exists();
    if !there {
        println!("skipped: tcmalloc was not brought (make soak)");
    }
    there
}

/// With vnuma-run a thread gets memory of the node that its CPU is on now. By itself an allocator gives it what was freed, which is
/// on the node before: for as long as nobody else takes pages to the thread's node, as the kernel's balancer does. All vCPUs are on node
/// 0 when the programs start: a node without CPUs counts as well.
fn allocate(vm: &Vm, allocator: &Allocator) -> Result<()> {
    let name = allocator.name;
    vnumactl(&["move", NAME, "--vcpu", "0", "--node", "0"])?;
    let (run, alloc) = (in_guest("vnuma-run"), in_guest("vnuma-alloc"));
    // An allocator may have touched a huge page before the program has chosen its CPU.
    let there: [&str; 5] = ["taskset", "-c", "1", &alloc, "1"];
    let with = [&[&run, "--libraries", DIRECTORY, "--allocator", name][..], &there].concat();
    let mut with = Follower::start(vm, &with, ALLOC)?;
    let preload = format!("LD_PRELOAD={}", allocator.library);
    let alone = [&["env", preload.as_str()], allocator.keeps, &there].concat();
    let mut without = Follower::start(vm, &alone, ALLOC)?;
    for program in [&mut with, &mut without] {
        program.expect(&["node=0", "local=100"], &[])?;
    }
    vnumactl(&["move", NAME, "--vcpu", "1", "--node", "1"])?;
    with.expect(&["node=1", "local=100"], &[])?;
    without.expect(&["node=1", "local=0"], &[])?;
    vnumactl(&["move", NAME, "--vcpu", "1", "--node", "0"])?;
    with.expect(&["node=0", "local=100"], &[])?;
    println!("{name} with vnuma-run follows, by itself with what it keeps it does not");
    with.end()?;
    without.end()
}

/// The driver stays as long as a program has its page, with or without a channel.
fn unload(vm: &Vm, followers: [Follower; 2]) -> Result<()> {
    detach(vm)?;
    ensure!(vm.exec(&["rmmod", "vnuma"]).is_err(), "the driver goes while programs use its page");
    followers.into_iter().try_for_each(Follower::end)?;
    unload_driver(vm).context("nobody uses it any more")
}

pub fn in_guest(file: &str) -> String {
    format!("{DIRECTORY}/{file}")
}
