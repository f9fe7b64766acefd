//! The guest driver by itself, on real KVM: no vnumad, a fake host publishes. What is tested stands in
//! `guest/driver/test/driver-test.sh`; this runs it on a lab server.

mod debug;

use crate::driver::debug::{Known, Run};
use crate::{Job, run, soak_rounds, soak_seconds, soak_seed, third};
use std::path::Path;
use vnuma_lab_runner::kernels::{AddedKernel, DebugKernel};
use vnuma_lab_runner::{build_binaries, driver, schedulers_of_scx};

const KERNELS: [&str; 3] = ["6.12", "6.1", "7.3"];
const STAGES: &str = "checker events hostile distances devices hotplug reload readers safe";
/// One malformed publication for each way to refuse: the header, a torn slot, the slot's counts, its map, and a
/// guest that lacks the node.
const HOSTILE: &str = "slots that overlap|torn generation|unknown required section|too many vCPUs|too many devices|an APIC id twice|a node that the guest lacks";
/// Of a soak: random publications, and seconds that processes are busy meanwhile.
const ROUNDS: &str = "500";
const LOAD_SECONDS: &str = "1800";
const READ_SECONDS: &str = "600";
/// Of scx. The first one has the kernel keep idle CPUs by node.
const SCX: [&str; 4] = ["scx_bpfland", "scx_rusty", "scx_lavd", "scx_layered"];
/// What a guest needs for each of them.
const SCX_MEMORY: &str = "1536M";
/// That CPUs move under each of them.
const SCX_SECONDS: &str = "150";
/// What a kernel says when its own allocations fail: the stack of one for the module itself, and that a file of an interrupt in /proc/irq
/// is gone. The kernel does not look whether it could make these (`register_irq_proc()`), and warns when it removes one that it could not
/// make (`unregister_irq_proc()`).
const FAULTS_KNOWN: [Known<'_>; 2] = [
    Known { lines: [": vmalloc error: size ", "</TASK>"], has: &[" warn_alloc+"] },
    Known {
        lines: ["[ cut here ]", "[ end trace "],
        has: &["name '", " remove_proc_entry+", " unregister_irq_proc+"],
    },
];
/// Of a debug kernel. Those without sched_ext say so.
const DEBUG_STAGES: &str = "readers sched_ext devices hotplug reload safe moves churn";
/// Those of them that have a load of their own, which runs without moves, too.
const STILL_STAGES: &str = "readers sched_ext churn";

#[test]
#[ignore = "takes an hour: make soak"]
fn the_driver_applies_publications_on_each_kernel() {
    let rounds = soak_rounds().unwrap_or_else(|| ROUNDS.to_owned());
    for kernel in KERNELS {
        run("2n4c", &[job(kernel, &[&rounds, LOAD_SECONDS, kernel], &[])]);
    }
}

/// One kernel at each turn, as each takes ten seconds.
#[test]
fn the_kernels_own_checks_find_nothing_in_the_driver() {
    let kernels = third().map_or(&KERNELS[..], |third| &KERNELS[third..=third]);
    for kernel in kernels {
        driver::check(kernel).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
#[ignore = "takes a minute: make soak"]
fn dkms_builds_the_driver_for_each_kernel() {
    for kernel in KERNELS {
        driver::build_with_dkms(kernel).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The kernel's maps change as fast as the guest acknowledges, while a module of the guest reads them as drivers do.
/// A row: kernel, mode of the driver, nodes of the guest, words for its kernel.
fn maps_are_read_while_they_change(kernel: &str, mode: &str, nodes: &str, append: &str) {
    let seconds = soak_seconds().unwrap_or_else(|| READ_SECONDS.to_owned());
    let env =
        [("STAGES", "readers"), ("MODE", mode), ("NODES", nodes), ("APPEND", append), ("READ_S", &seconds)];
    run("2n4c", &[job(kernel, &["1", "0", kernel], &env)]);
}

/// CPUs move while schedulers of `sched_ext` run all tasks of the guest.
fn schedulers_run_while_maps_change(kernel: &str, mode: &str, nodes: &str, append: &str) {
    let seconds = soak_seconds().unwrap_or_else(|| READ_SECONDS.to_owned());
    let env =
        [("STAGES", "sched_ext"), ("MODE", mode), ("NODES", nodes), ("APPEND", append), ("READ_S", &seconds)];
    let mut job = job(kernel, &["1", "0", kernel], &env);
    let program = build_binaries(&[("vnuma-lab-tests", "lab-sched-ext")]).expect("the program builds");
    job.files.push((program[0].clone(), "/root/driver/lab-sched-ext".to_owned()));
    run("2n4c", &[job]);
}

/// CPUs move while schedulers of scx run all tasks of the guest, one after the other. One that does not build is named.
fn schedulers_of_scx_run_while_maps_change(kernel: &str, mode: &str, nodes: &str, append: &str) {
    let seconds = soak_seconds().unwrap_or_else(|| SCX_SECONDS.to_owned());
    let env = [
        ("STAGES", "others"),
        ("MODE", mode),
        ("NODES", nodes),
        ("APPEND", append),
        ("READ_S", &seconds),
        ("MEMORY", SCX_MEMORY),
    ];
    let mut job = job(kernel, &["1", "0", kernel], &env);
    let program = build_binaries(&[("vnuma-lab-tests", "lab-sched-ext")]).expect("the program builds");
    job.files.push((program[0].clone(), "/root/driver/lab-sched-ext".to_owned()));
    for (name, built) in SCX.iter().zip(schedulers_of_scx(&SCX).unwrap_or_else(|error| panic!("{error}"))) {
        match built {
            Ok(built) => job.files.push((built, format!("/root/driver/{name}"))),
            Err(error) => println!("{name}: not built: {error}"),
        }
    }
    run("2n4c", &[job]);
}

/// The kernel's own tests of `sched_ext` pass while CPUs move, as far as they do while none moves.
fn selftests_pass(kernel: &str, mode: &str) {
    let source = DebugKernel::ensure(kernel).unwrap_or_else(|error| panic!("{error}"));
    let program = source.sched_ext_selftests(kernel).unwrap_or_else(|error| panic!("{error}"));
    let mut job = job(kernel, &["1", "0", kernel], &[("STAGES", "selftests"), ("MODE", mode)]);
    job.files.push((program, "/root/driver/runner".to_owned()));
    run("2n4c", &[job]);
}

/// Cores of one socket, which share a cache, are on different nodes, and together again.
fn cores_of_a_socket_part(kernel: &str, mode: &str, nodes: &str, append: &str) {
    let rounds = soak_rounds().unwrap_or_else(|| ROUNDS.to_owned());
    let env = [("STAGES", "caches"), ("MODE", mode), ("NODES", nodes), ("APPEND", append), ("CORES", "2")];
    run("2n4c", &[job(kernel, &[&rounds, "0", kernel], &env)]);
}

/// A CPU, memory, a network card and a disk of the guest come and go; where `moves` is empty no CPU moves, to see what warns then.
fn all_comes_and_goes(kernel: &str, mode: &str, nodes: &str, append: &str, moves: &str) {
    let seconds = soak_seconds().unwrap_or_else(|| READ_SECONDS.to_owned());
    let append = format!("memhp_default_state=online_movable {append}");
    let env = [
        ("STAGES", if moves.is_empty() { "readers churn" } else { "churn" }),
        ("MOVES", moves),
        ("MODE", mode),
        ("NODES", nodes),
        ("APPEND", append.trim_end()),
        ("READ_S", &seconds),
        ("PLUGGABLE", "512M"),
    ];
    run("2n4c", &[job(kernel, &["1", "0", kernel], &env)]);
}

/// After random moves the kernel's structures are those of a guest that booted with that topology, but for a written list
/// (`keeps.txt` of `lab-kernel-state`).
fn structures_are_those_of_a_boot(kernel: &str, arguments: &str) {
    let seed = soak_seed();
    let arguments: Vec<_> = ["--seed", &seed].into_iter().chain(arguments.split_whitespace()).collect();
    run("2n4c", &[state(kernel, &arguments)]);
}

fn state(kernel: &str, arguments: &[&str]) -> Job {
    let program = build_binaries(&[("vnuma-lab-tests", "lab-kernel-state")]).expect("the program builds");
    let tools = driver::tools(kernel).expect("the fake host builds");
    let files = [
        (driver::build(kernel).expect("the driver builds"), "/root/driver/vnuma.ko"),
        (tools.join("vnuma-fake-host"), "/root/driver/vnuma-fake-host"),
        (program[0].clone(), "/usr/local/bin/lab-kernel-state"),
    ];
    let command = [&["lab-kernel-state", "play", "--kernel", kernel], arguments].concat();
    Job {
        command: command.iter().map(|&word| word.to_owned()).collect(),
        env: Vec::new(),
        files: files.map(|(here, there)| (here, there.to_owned())).into(),
    }
}

/// A kernel that checks itself finds nothing while CPUs move; `moves` is empty where none do, to see what it finds then.
fn a_debug_kernel_finds_nothing(kernel: &str, mode: &str, nodes: &str, append: &str, moves: &str) {
    let stages = if moves.is_empty() { STILL_STAGES } else { DEBUG_STAGES };
    debug::run(&Run { kernel, mode, nodes, append, stages, moves, ..Run::default() });
}

/// Each allocation fails once, of an update, a load and an unload.
fn allocations_fail(kernel: &str, mode: &str) {
    debug::run(&Run {
        kernel,
        mode,
        nodes: "2",
        stages: "faults",
        moves: "yes",
        known: &FAULTS_KNOWN,
        ..Run::default()
    });
}

/// Readers of `/dev/vnuma` that let no other task have their CPU, in kernels that preempt whatever they can.
fn a_reader_keeps_its_cpu(kernel: &str, mode: &str) {
    let seconds = soak_seconds().unwrap_or_else(|| READ_SECONDS.to_owned());
    let env = [("STAGES", "fifo"), ("MODE", mode), ("APPEND", "preempt=full"), ("READ_S", &seconds)];
    run("2n4c", &[job(kernel, &["1", "0", kernel], &env)]);
}

/// A kernel of Debian that the image does not have, such as a real-time one.
fn another_kernel_runs(kernel: &str, mode: &str, stages: &str) {
    let added = AddedKernel::ensure(kernel).unwrap_or_else(|error| panic!("{error}"));
    let built = driver::built_for_added(&added).unwrap_or_else(|error| panic!("{error}"));
    let folder = tempfile::tempdir().expect("a folder");
    added.guest_files(folder.path()).unwrap_or_else(|error| panic!("{error}"));
    let seconds = soak_seconds().unwrap_or_else(|| READ_SECONDS.to_owned());
    let env = [("STAGES", stages), ("MODE", mode), ("READ_S", &seconds)];
    let mut job = job_with(&built.join("vnuma.ko"), &built.join("test"), &["60", "0", kernel], &env);
    for file in ["vmlinux", "initrd"] {
        job.files.push((folder.path().join(file), format!("/run/lab/kernels/{kernel}/{file}")));
    }
    run("2n4c", &[job]);
}

macro_rules! rows {
    ($($name:ident: $row:ident $($value:literal)*;)*) => {
        /// Each row of `make soak NAME=kernel`.
        mod kernel {
            $(
                #[test]
                #[ignore = "takes ten minutes: make soak NAME=kernel"]
                fn $name() {
                    super::$row($($value),*);
                }
            )*
        }
    };
}

rows! {
    fast_6_1: maps_are_read_while_they_change "6.1" "fast" "2" "";
    fast_6_1_preempt_full: maps_are_read_while_they_change "6.1" "fast" "4" "preempt=full";
    safe_6_1: maps_are_read_while_they_change "6.1" "safe" "2" "";
    fast_6_12: maps_are_read_while_they_change "6.12" "fast" "2" "";
    fast_6_12_preempt_full: maps_are_read_while_they_change "6.12" "fast" "4" "preempt=full";
    safe_6_12: maps_are_read_while_they_change "6.12" "safe" "2" "";
    fast_7_3: maps_are_read_while_they_change "7.3" "fast" "2" "";
    fast_7_3_preempt_full: maps_are_read_while_they_change "7.3" "fast" "4" "preempt=full";
    safe_7_3: maps_are_read_while_they_change "7.3" "safe" "2" "";
    churn_6_1: all_comes_and_goes "6.1" "fast" "2" "" "yes";
    churn_6_12: all_comes_and_goes "6.12" "fast" "2" "" "yes";
    churn_7_3: all_comes_and_goes "7.3" "fast" "2" "" "yes";
    churn_safe_6_1: all_comes_and_goes "6.1" "safe" "2" "" "yes";
    churn_safe_6_12: all_comes_and_goes "6.12" "safe" "2" "" "yes";
    churn_safe_7_3: all_comes_and_goes "7.3" "safe" "2" "" "yes";
    still_6_1: all_comes_and_goes "6.1" "fast" "2" "" "";
    still_6_12: all_comes_and_goes "6.12" "fast" "2" "" "";
    still_7_3: all_comes_and_goes "7.3" "fast" "2" "" "";
    cores_6_1: cores_of_a_socket_part "6.1" "fast" "2" "";
    cores_6_12: cores_of_a_socket_part "6.12" "fast" "2" "";
    cores_7_3: cores_of_a_socket_part "7.3" "fast" "2" "";
    debug_6_12: a_debug_kernel_finds_nothing "6.12" "fast" "2" "" "yes";
    debug_6_12_preempt_full: a_debug_kernel_finds_nothing "6.12" "fast" "4" "preempt=full" "yes";
    debug_6_12_still: a_debug_kernel_finds_nothing "6.12" "fast" "2" "" "";
    debug_7_3: a_debug_kernel_finds_nothing "7.3" "fast" "2" "" "yes";
    debug_7_3_preempt_full: a_debug_kernel_finds_nothing "7.3" "fast" "4" "preempt=full" "yes";
    debug_7_3_still: a_debug_kernel_finds_nothing "7.3" "fast" "2" "" "";
    faults_6_12: allocations_fail "6.12" "fast";
    faults_7_3: allocations_fail "7.3" "fast";
    faults_safe_6_12: allocations_fail "6.12" "safe";
    fast_6_12_rt: another_kernel_runs "6.12-rt" "fast" "readers events distances hotplug reload moves safe";
    safe_6_12_rt: another_kernel_runs "6.12-rt" "safe" "readers";
    fifo_6_1: a_reader_keeps_its_cpu "6.1" "fast";
    fifo_6_12: a_reader_keeps_its_cpu "6.12" "fast";
    fifo_7_3: a_reader_keeps_its_cpu "7.3" "fast";
    selftests_7_3: selftests_pass "7.3" "fast";
    sched_ext_7_3: schedulers_run_while_maps_change "7.3" "fast" "2" "";
    sched_ext_7_3_preempt_full: schedulers_run_while_maps_change "7.3" "fast" "4" "preempt=full";
    sched_ext_safe_7_3: schedulers_run_while_maps_change "7.3" "safe" "2" "";
    scx_7_3: schedulers_of_scx_run_while_maps_change "7.3" "fast" "2" "";
    scx_7_3_preempt_full: schedulers_of_scx_run_while_maps_change "7.3" "fast" "4" "preempt=full";
    state_6_1: structures_are_those_of_a_boot "6.1" "";
    state_6_12: structures_are_those_of_a_boot "6.12" "";
    state_7_3: structures_are_those_of_a_boot "7.3" "";
    state_cores_6_1: structures_are_those_of_a_boot "6.1" "--cores";
    state_cores_6_12: structures_are_those_of_a_boot "6.12" "--cores";
    state_cores_7_3: structures_are_those_of_a_boot "7.3" "--cores";
}

/// The first vCPU is on node 1, which the guest's kernel therefore calls node 0.
const PLACE: &str = "0:1,1:1,2:0,3:0";

/// What of it `make test` has time for.
pub fn essential() -> Job {
    job("6.12", &[], &[("STAGES", STAGES), ("HOSTILE", HOSTILE), ("PLACE", PLACE)])
}

/// One of its sequences, to a topology with nodes without CPUs.
pub fn sequence(kernel: &str) -> Job {
    state(kernel, &["--first", "2", "--sequences", "1"])
}

fn job(kernel: &str, arguments: &[&str], env: &[(&str, &str)]) -> Job {
    let driver = driver::build(kernel).expect("the driver builds");
    let tools = driver::tools(kernel).expect("the checker and the fake host build");
    job_with(&driver, &tools, arguments, env)
}

fn job_with(driver: &Path, tools: &Path, arguments: &[&str], env: &[(&str, &str)]) -> Job {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/driver/test");
    let files = [
        (driver.to_owned(), "vnuma.ko"),
        (tools.join("vnuma-readers.ko"), "vnuma-readers.ko"),
        (tools.join("vnuma-check"), "vnuma-check"),
        (tools.join("vnuma-affinity"), "vnuma-affinity"),
        (tools.join("vnuma-fifo"), "vnuma-fifo"),
        (tools.join("vnuma-fake-host"), "vnuma-fake-host"),
        (sources.join("driver-test.sh"), "driver-test.sh"),
        (sources.join("driver-load.sh"), "driver-load.sh"),
        (sources.join("driver-faults.sh"), "driver-faults.sh"),
        (sources.join("on-lab.sh"), "on-lab.sh"),
    ];
    Job {
        command: [&["sh", "/root/driver/on-lab.sh"], arguments]
            .concat()
            .iter()
            .map(|&a| a.to_owned())
            .collect(),
        env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
        files: files.map(|(here, name)| (here, format!("/root/driver/{name}"))).into(),
    }
}
