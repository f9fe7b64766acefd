//! The program itself, with real processes: what is placed, what is left alone, and what is there after each of its ends.
//!
//! Nodes and devices are those of a tree; `/proc` is the machine's. This needs root and two CPUs.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Write},
    os::{fd::AsRawFd, unix::fs::symlink, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};
use vnuma_model::CpuSet;
use vnuma_process::procfs::{read_affinity, threads};

/// Only a limit for tests that hang.
const HANG_LIMIT: Duration = Duration::from_secs(120);
const LIBRARY: &str = "FAKE_LIBRARY";
const CARD: &str = "0000:01:00.0";

/// The process of the other tests: code of a library, a thread that was pinned by its program to the CPU in its first line of
/// input, and a child for each further line.
#[test]
#[ignore = "a process that other tests start"]
fn workload() {
    let Some(library) = std::env::var_os(LIBRARY) else { return };
    let file = fs::File::open(library).expect("the library");
    let flags = libc::MAP_PRIVATE;
    // SAFETY: a new mapping of an open file, wherever the kernel likes; nothing refers to it.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_EXEC, flags, file.as_raw_fd(), 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    let mut lines = std::io::stdin().lines();
    let cpu: u32 = lines.next().expect("a line").expect("text").parse().expect("a CPU");
    let (pinned, is_pinned) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        pin(0, &CpuSet::from_iter([cpu]));
        pinned.send(()).expect("waits");
        std::thread::sleep(HANG_LIMIT);
    });
    is_pinned.recv().expect("pinned");
    println!("ready");
    let mut children = Vec::new();
    for _ in lines {
        // It ends with the other end of its input, which this process has.
        let (input, output) = (Stdio::piped(), Stdio::null());
        let child = Command::new("cat").stdin(input).stdout(output).spawn().expect("cat");
        println!("child {}", child.id());
        children.push(child);
    }
    for mut child in children {
        child.kill().expect("killed");
        child.wait().expect("ended");
    }
}

fn pin(tid: i32, cpus: &CpuSet) {
    let mut set = nix::sched::CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu as usize).expect("a CPU"));
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(tid), &set).expect("pinned");
}

/// A process of the tests.
struct Running {
    child: Child,
    output: Option<BufReader<ChildStdout>>,
}

impl Running {
    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// The rest of its next line that begins so.
    fn line(&mut self, beginning: &str) -> String {
        let output = self.output.as_mut().expect("a pipe");
        loop {
            let mut line = String::new();
            assert_ne!(output.read_line(&mut line).expect("output"), 0, "no line {beginning}");
            // The first one stands behind what the test harness says.
            if let Some((_, rest)) = line.split_once(beginning) {
                return rest.trim().to_owned();
            }
        }
    }

    fn write(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("a pipe"), "{line}").expect("written");
    }

    fn kill(&mut self, signal: i32) {
        // SAFETY: two numbers; the child has not been waited for, so that the number is its own.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tree with two nodes, each of one CPU of this machine and many that there are not, so that there is always time to spare.
struct Tree {
    directory: tempfile::TempDir,
    /// The machine's CPUs of node 0 and node 1.
    cpus: [u32; 2],
    /// What processes of the test may use.
    all: CpuSet,
    /// The library that makes a workload, for this test's agent only.
    library: String,
}

impl Tree {
    /// None where the test cannot run.
    fn new() -> Option<Self> {
        let all = read_affinity(std::process::id().cast_signed()).expect("own");
        let few: Vec<u32> = all.iter().take(2).collect();
        let ([first, second], true) = (&few[..], nix::unistd::geteuid().is_root()) else {
            eprintln!("skipped: this needs root and two CPUs");
            return None;
        };
        // Tests run at the same time, and an agent sees all processes of the machine.
        static TREES: AtomicU32 = AtomicU32::new(0);
        let number = TREES.fetch_add(1, Ordering::Relaxed);
        let library = format!("libtest{}x{number}", std::process::id());
        let tree = Self {
            directory: tempfile::tempdir().expect("a directory"),
            cpus: [*first, *second],
            all,
            library,
        };
        symlink("/proc", tree.path("proc")).expect("linked");
        tree.write("sys/devices/system/cpu/online", &format!("{},4000-4127", tree.all));
        tree.write("sys/devices/system/node/online", "0-1");
        tree.write_cpus(0);
        for node in 0..2 {
            let meminfo = format!("Node {node} MemTotal: 1000000 kB\nNode {node} MemFree: 900000 kB\n");
            tree.write(&format!("sys/devices/system/node/node{node}/meminfo"), &meminfo);
        }
        tree.write(&format!("sys/bus/pci/devices/{CARD}/class"), "0x020000");
        tree.write(&format!("sys/bus/pci/devices/{CARD}/numa_node"), "1");
        tree.write(&tree.file(), &"x".repeat(4096));
        let libraries = format!("libraries = [\"{}\"]", tree.library);
        tree.write("rules.toml", &format!("interval_s = 1\nmemory = \"leave\"\nrest_s = 1\n{libraries}\n"));
        Some(tree)
    }

    /// With the machine's second CPU on node 1, or the first one if `swapped`.
    fn write_cpus(&self, swapped: usize) {
        for node in 0..2 {
            let (cpu, more) = (self.cpus[node ^ swapped], 4000 + 64 * node);
            let list = format!("{cpu},{more}-{}", more + 63);
            self.write(&format!("sys/devices/system/node/node{node}/cpulist"), &list);
        }
    }

    fn file(&self) -> String {
        format!("{}.so.1", self.library)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().expect("inside")).expect("made");
        fs::write(self.path(path), text).expect("written");
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnuma-guest"));
        command
            .args(arguments)
            .arg("--root")
            .arg(self.directory.path())
            .arg("--journal")
            .arg(self.path("journal"));
        command
    }

    fn agent(&self) -> Running {
        let rules = self.path("rules.toml");
        let child =
            self.command(&["run", "--rules", rules.to_str().expect("UTF-8")]).spawn().expect("vnuma-guest");
        Running { child, output: None }
    }

    /// Its pinned thread is on node 0.
    fn workload(&self) -> Running {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "workload", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(LIBRARY, self.path(&self.file())).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a workload");
        let output = child.stdout.take().map(BufReader::new);
        let mut workload = Running { child, output };
        workload.write(&self.cpus[0].to_string());
        workload.line("ready");
        workload
    }

    fn journal(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.path("journal")).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    fn expect_no_trace(&self, workload: &Running) {
        expect(workload.pid(), &[self.cpu(0), self.all.clone()], "after the end");
        assert_eq!(self.journal(), BTreeSet::from(["lock".to_owned()]));
    }

    fn cpu(&self, node: usize) -> CpuSet {
        CpuSet::from_iter([self.cpus[node]])
    }

    fn undo(&self) -> String {
        let output = self.command(&["undo"]).output().expect("vnuma-guest");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        text
    }
}

/// Affinities of the threads of a process, each once.
fn affinities(pid: i32) -> BTreeSet<CpuSet> {
    let all = threads(pid).unwrap_or_default();
    all.into_iter().filter_map(|tid| read_affinity(tid).ok()).collect()
}

fn expect(pid: i32, expected: &[CpuSet], when: &str) {
    assert_eq!(affinities(pid), expected.iter().cloned().collect(), "{when}");
}

fn wait_for(what: &str, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + HANG_LIMIT;
    while !ready() {
        assert!(Instant::now() < end, "{what}: not within {} s", HANG_LIMIT.as_secs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn wait_until_placed(workload: &Running, tree: &Tree) {
    let expected = BTreeSet::from([tree.cpu(0), tree.cpu(1)]);
    wait_for("the workload to be placed", || affinities(workload.pid()) == expected);
}

/// The guard of an agent: its only child.
fn guard_of(agent: &Running) -> i32 {
    let path = format!("/proc/{0}/task/{0}/children", agent.pid());
    let children = fs::read_to_string(path).expect("children");
    children.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("a guard")
}

fn has_ended(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn a_workload_is_placed_and_nothing_else_and_sigterm_undoes_it() {
    let Some(tree) = Tree::new() else { return };
    let mut workload = tree.workload();
    let bystander = Command::new("sleep").arg("1000").spawn().expect("sleep");
    let bystander = Running { child: bystander, output: None };
    let mut agent = tree.agent();
    // All but the thread that its program has pinned to the other node.
    wait_until_placed(&workload, &tree);
    expect(bystander.pid(), std::slice::from_ref(&tree.all), "a process that was not found");
    let journal = fs::read_to_string(tree.path("journal/journal.json")).expect("a journal");
    assert!(journal.contains(&format!("\"pid\":{}", workload.pid())), "{journal}");

    workload.write("child");
    let child: i32 = workload.line("child ").parse().expect("a PID");
    let all = BTreeSet::from([tree.all.clone()]);
    wait_for("a child that is no workload to get its CPUs back", || affinities(child) == all);

    let rules = tree.path("rules.toml");
    let list = ["list", "--json", "--rules", rules.to_str().expect("UTF-8")];
    let list = tree.command(&list).output().expect("vnuma-guest");
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).expect("JSON");
    let listed = list["workloads"].as_array().expect("workloads");
    let listed = listed.iter().find(|one| one["pid"] == workload.pid()).expect("listed");
    assert_eq!((&listed["state"], &listed["found_by"][0]), (&"placed".into(), &tree.file().into()));

    // The driver has moved CPUs between nodes.
    tree.write_cpus(1);
    let only = BTreeSet::from([tree.cpu(0)]);
    wait_for("the workload to follow its node's CPUs", || affinities(workload.pid()) == only);

    let guard = guard_of(&agent);
    agent.kill(libc::SIGTERM);
    assert!(agent.child.wait().expect("ended").success());
    tree.expect_no_trace(&workload);
    assert!(has_ended(guard));
    assert!(tree.undo().contains("nothing is left to undo"));
}

#[test]
fn sigkill_leaves_nothing_as_a_guard_is_there() {
    let Some(tree) = Tree::new() else { return };
    let workload = tree.workload();
    let mut agent = tree.agent();
    wait_until_placed(&workload, &tree);
    let guard = guard_of(&agent);
    agent.kill(libc::SIGKILL);
    agent.child.wait().expect("ended");
    let free = BTreeSet::from([tree.cpu(0), tree.all.clone()]);
    wait_for("the guard to undo it", || affinities(workload.pid()) == free);
    wait_for("the guard to end", || has_ended(guard) || state(guard) == 'Z');
    tree.expect_no_trace(&workload);
}

/// What a process does, in a letter.
fn state(pid: i32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('Z')
}

/// Kills both, so that no process is left to undo anything.
fn kill_all(agent: &mut Running) {
    let guard = guard_of(agent);
    // SAFETY: two numbers. The guard is a child of the agent, which waits for it only at its end.
    assert_eq!(unsafe { libc::kill(guard, libc::SIGKILL) }, 0);
    agent.kill(libc::SIGKILL);
    agent.child.wait().expect("ended");
}

#[test]
fn what_is_left_when_all_are_killed_is_undone_by_the_next_one() {
    let Some(tree) = Tree::new() else { return };
    let workload = tree.workload();
    let mut agent = tree.agent();
    wait_until_placed(&workload, &tree);
    kill_all(&mut agent);
    expect(workload.pid(), &[tree.cpu(0), tree.cpu(1)], "nobody has undone it");
    let said = tree.undo();
    assert!(said.contains("may use CPUs"), "{said}");
    tree.expect_no_trace(&workload);

    agent = tree.agent();
    wait_until_placed(&workload, &tree);
    kill_all(&mut agent);
    // What was changed meanwhile is somebody else's: one thread, that keeps what it has.
    pin(workload.pid(), &tree.cpu(0));
    // A rule that nothing is placed by: what was left is undone all the same.
    tree.write("rules.toml", "libraries = [\"libnone\"]\n");
    let mut next = tree.agent();
    wait_for("the next one to undo it", || !affinities(workload.pid()).contains(&tree.cpu(1)));
    expect(workload.pid(), &[tree.cpu(0), tree.all.clone()], "the next one");
    assert_eq!(read_affinity(workload.pid()).expect("a mask"), tree.cpu(0));
    next.kill(libc::SIGINT);
    assert!(next.child.wait().expect("ended").success());
}

#[test]
fn whoever_is_not_root_may_look_and_is_told_why_nothing_is_placed() {
    let Some(tree) = Tree::new() else { return };
    fs::set_permissions(tree.directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("set");
    let nobody = |arguments: &[&str]| {
        // Others may not start what is below root's home. A copy cannot always be run: a child that another test forks
        // while it is written holds it open for writing until it execs.
        let mut command = Command::new("/proc/self/fd/0");
        command.stdin(fs::File::open(env!("CARGO_BIN_EXE_vnuma-guest")).expect("the program"));
        command.args(arguments).arg("--root").arg(tree.directory.path()).arg("--journal").arg("/nonexistent");
        command.uid(65534).gid(65534).output().expect("vnuma-guest")
    };
    let output = nobody(&["run"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("vnuma-guest: run needs root"), "{error}");
    let output = nobody(&["list"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && error.contains("cannot be looked at, for lack of rights"), "{error}");
}

#[test]
fn a_machine_without_numa_is_told_of() {
    let Some(tree) = Tree::new() else { return };
    fs::remove_dir_all(tree.path("sys")).expect("removed");
    let mut command = tree.command(&["run", "--dry-run", "--interval", "1"]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("vnuma-guest");
    let errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut agent = Running { child, output: None };
    let mut parts =
        vec!["this machine has 0 NUMA nodes", "no /dev/vnuma", "cgroup v2 is not at /sys/fs/cgroup"];
    for line in errors.lines() {
        let line = line.expect("text");
        parts.retain(|part| !line.contains(part));
        if parts.is_empty() {
            break;
        }
    }
    assert!(parts.is_empty(), "not said: {parts:?}");
    agent.kill(libc::SIGTERM);
    assert!(agent.child.wait().expect("ended").success());
}

#[test]
fn a_dry_run_says_what_would_be_done_and_does_nothing() {
    let Some(tree) = Tree::new() else { return };
    let workload = tree.workload();
    let rules = tree.path("rules.toml");
    let mut command = tree.command(&["run", "--dry-run", "--rules", rules.to_str().expect("UTF-8")]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("vnuma-guest");
    let errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut agent = Running { child, output: None };
    let expected = format!("PID {}: would be placed on node 1, CPUs {}", workload.pid(), tree.cpu(1));
    assert!(errors.lines().any(|line| line.expect("text").contains(&expected)), "{expected}");
    expect(workload.pid(), &[tree.cpu(0), tree.all.clone()], "a dry run");
    assert!(tree.journal().is_empty());
    agent.kill(libc::SIGTERM);
    assert!(agent.child.wait().expect("ended").success());
}

#[test]
fn rules_are_checked_and_what_is_wrong_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("rules.toml");
    let check = |text: &str| {
        fs::write(&path, text).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnuma-guest"));
        let output = command.arg("check-rules").arg(&path).output().expect("vnuma-guest");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(check("interval_s = 2\n"), (Some(0), String::new()));
    let (code, error) = check("\nintervall_s = 2\n");
    let expected = format!("vnuma-guest: {}: line 2: unknown field `intervall_s`", path.display());
    assert!(code == Some(1) && error.starts_with(&expected), "{error}");
}
