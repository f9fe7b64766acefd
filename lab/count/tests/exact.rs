//! The counters count what is known beforehand: loads in assembly on an emulated server. Bounds: 1 % of a count,
//! 99.9 % for the node. Only what the loads do themselves is counted: the kernel's ticks are the more the slower the machine is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use vnuma_lab_runner::{Exec, Input, Lab, build_binaries};

/// Only ends a hang on a loaded machine.
const HANG: Duration = Duration::from_secs(900);
const TIMES: f64 = 1e6;
/// Memory of chains and streams: more than twice the LLC of the profile, 55 MiB, so that LRU keeps nothing of it.
const MIB: u64 = 128;

/// A server with counters.
struct Server(Lab);

impl Server {
    fn boot(counters: &str) -> Self {
        Self::boot_machine("2n4c", counters)
    }

    fn boot_machine(machine: &str, counters: &str) -> Self {
        let lab = Lab::boot_with(machine, Some(&counters.parse().unwrap())).unwrap();
        println!("server with {counters}: boot {:?}", lab.boot_time());
        Self(lab)
    }

    fn sh(&self, script: &str) -> String {
        let exec = Exec { argv: ["sh", "-c", script].map(str::to_owned).into(), ..Exec::default() };
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let status = self.0.exec(&exec, Input::Null, &mut stdout, &mut stderr, HANG).unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(status, 0, "{script}: {}", text(&stderr));
        text(&stdout)
    }

    /// Runs lab-load on CPU 0, which is on node 0, and counts what it does itself.
    fn load(&self, arguments: &str) -> Counted {
        self.load_on(0, arguments)
    }

    /// The same on another CPU.
    fn load_on(&self, cpu: u32, arguments: &str) -> Counted {
        Counted::from(&self.sh(&format!("taskset -c {cpu} lab-load --user {arguments}")))
    }
}

/// The report of lab-load or lab-count.
#[derive(Debug)]
struct Counted(Value);

impl Counted {
    fn from(text: &str) -> Self {
        Self(serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    fn count(&self, name: &str) -> f64 {
        self.0["counts"][name].as_f64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    /// All accesses to memory of a node.
    fn node(&self, node: usize) -> f64 {
        let of = |name: &str| self.0["counts"][name][node].as_f64().unwrap();
        of("dram_by_node") + of("streamed_by_node")
    }

    fn number(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }
}

/// Collects what is wrong, so that one run shows all of it.
#[derive(Default)]
struct Checks(Vec<String>);

impl Checks {
    fn near(&mut self, what: &str, found: f64, expected: f64, percent: f64) {
        let off = (found - expected).abs() / expected * 100.0;
        println!("{what}: {found:.0}, expected {expected:.0} ({off:.2} % off, allowed {percent} %)");
        if off.is_nan() || off > percent {
            self.0.push(format!("{what}: {found} instead of {expected}, {off:.2} % off"));
        }
    }

    fn below(&mut self, what: &str, found: f64, limit: f64) {
        println!("{what}: {found:.0}, allowed {limit:.0}");
        if found.is_nan() || found > limit {
            self.0.push(format!("{what}: {found}, more than {limit}"));
        }
    }

    fn on_node(&mut self, what: &str, counted: &Counted, node: usize) {
        let all = counted.node(0) + counted.node(1);
        self.below(&format!("{what}: on another node than {node}"), counted.node(1 - node), all * 0.001);
    }

    fn done(self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}

#[test]
fn counts_of_a_server() {
    let server = Server::boot("broadwell-2s");
    let mut checks = Checks::default();
    chains(&server, &mut checks);
    caches(&server, &mut checks);
    streams(&server, &mut checks);
    instructions(&server, &mut checks);
    devices(&server, &mut checks);
    two_tasks_on_one_cpu(&server, &mut checks);
    unmodified_perf(&server, &mut checks);
    kernel_and_programs(&server, &mut checks);
    commands(&server);
    repeats_under_load(&server, &mut checks);
    checks.done();
}

/// Pointer chases through local and remote memory.
fn chains(server: &Server, checks: &mut Checks) {
    for node in 0..2 {
        let counted = server.load(&format!("chase --mib {MIB} --node {node} --times 1000000"));
        let what = format!("chase through node {node}");
        checks.near(&format!("{what}: DRAM"), counted.node(node), TIMES, 1.0);
        checks.near(&format!("{what}: LLC references"), counted.count("llc_references"), TIMES, 1.0);
        checks.near(&format!("{what}: LLC misses"), counted.count("llc_misses"), TIMES, 1.0);
        checks.below(&format!("{what}: streamed"), counted.count("llc_misses_streamed"), TIMES * 0.001);
        checks.on_node(&what, &counted, node);
    }
}

/// Sets that fit the LLC and not the L2: every access is a reference and none a miss.
fn caches(server: &Server, checks: &mut Checks) {
    // Huge pages: of scattered ones, some sets of the LLC would hold more than others, and 16384 lines would be
    // sampled to 3 % only (the square root of 15 / lines).
    for (what, load) in [("LLC-sized set", "chase --mib 8 --huge"), ("page stride", "pages --mib 64 --huge")]
    {
        let counted = server.load(&format!("{load} --node 1 --times 1000000"));
        checks.near(&format!("{what}: LLC references"), counted.count("llc_references"), TIMES, 1.0);
        checks.below(&format!("{what}: LLC misses"), counted.count("llc_misses"), TIMES * 0.01);
    }
}

/// A pass over memory misses each line once; of each page's 64 lines the detector needs three to learn.
fn streams(server: &Server, checks: &mut Checks) {
    let lines = (MIB << 20) as f64 / 64.0;
    for node in 0..2 {
        let counted = server.load(&format!("stream --mib {MIB} --node {node} --times 1"));
        let what = format!("stream through node {node}");
        checks.near(&format!("{what}: loads"), counted.count("loads"), lines * 8.0, 1.0);
        checks.near(&format!("{what}: LLC misses"), counted.count("llc_misses"), lines, 1.0);
        checks.near(
            &format!("{what}: streamed"),
            counted.count("llc_misses_streamed"),
            lines * 61.0 / 64.0,
            1.0,
        );
        checks.on_node(&what, &counted, node);
    }
}

/// Loops, of plain instructions and of strings.
fn instructions(server: &Server, checks: &mut Checks) {
    let counted = server.load("compute --times 100000000");
    checks.near("loop: instructions", counted.count("instructions"), 2e8, 1.0);
    checks.near("loop: base cycles", counted.count("base_cycles"), 2e8, 1.0);
    // 128 string instructions over a million bytes each.
    let counted = server.load("fill --mib 1 --times 128");
    checks.below("strings: instructions", counted.count("instructions"), (128 << 20) as f64 * 0.01);
}

/// What a CPU of either node reads of a device of node 1, and writes to it, counts as that node's, and as near or far.
fn devices(server: &Server, checks: &mut Checks) {
    let find = "for d in /sys/bus/pci/devices/*; do \
                test $(cat $d/numa_node) = 1 && grep -q 0x010802 $d/class && echo $d/resource0; done";
    let device = server.sh(find);
    // Of an NVMe disk; a write of 0 changes nothing.
    const INTERRUPT_MASK_SET: usize = 0xc;
    registers(server, checks, device.trim(), INTERRUPT_MASK_SET, [0, 2]);
}

/// A virtual function is on the node of its physical one, and so are accesses to it. Its registers are elsewhere than those.
#[test]
fn virtual_functions_count_as_the_physical_one() {
    let server = Server::boot_machine("2n6c-iommu", "broadwell-2s");
    let make = "modprobe igb; for d in /sys/bus/pci/devices/*; do \
                test $(cat $d/numa_node) = 1 && test -e $d/sriov_numvfs || continue; \
                echo 0 > $d/sriov_drivers_autoprobe; echo 2 > $d/sriov_numvfs; echo $d/virtfn1/resource0; break; done";
    let device = server.sh(make);
    // Nothing is there, so that a write changes nothing.
    const UNUSED: usize = 0x800;
    let mut checks = Checks::default();
    registers(&server, &mut checks, device.trim(), UNUSED, [0, 3]);
    checks.done();
}

/// Reads of a device of node 1, and writes of 0 to a register, by a CPU of each node.
fn registers(server: &Server, checks: &mut Checks, device: &str, register: usize, cpus: [u32; 2]) {
    for (cpu, class, far) in [(cpus[0], 1, "far"), (cpus[1], 0, "near")] {
        for kind in ["reads", "writes"] {
            let write = if kind == "writes" { format!("--write {register}") } else { String::new() };
            let counted = server.load_on(cpu, &format!("mmio --device {device} --times 20000 {write}"));
            let count = |kind: &str, by: &str, at: usize| {
                counted.0["counts"][format!("mmio_{kind}_by_{by}")][at].as_f64().unwrap()
            };
            let what = format!("MMIO {kind} by CPU {cpu}");
            checks.near(&format!("{what}: of node 1"), count(kind, "node", 1), 20000.0, 0.0);
            checks.near(&format!("{what}: {far}"), count(kind, "class", class), 20000.0, 0.0);
            let other = if kind == "writes" { "reads" } else { "writes" };
            let rest = count(kind, "node", 0)
                + count(kind, "class", 1 - class)
                + count(other, "node", 0)
                + count(other, "node", 1);
            checks.below(&format!("{what}: other"), rest, 0.0);
            let prices = vnuma_lab_pricing::by_name("broadwell-2s").unwrap().prices();
            let each = if kind == "writes" { prices.mmio_write[class] } else { prices.mmio_read[class] };
            let cost = counted.number("kernel_cycles") - counted.count("base_cycles");
            checks.near(&format!("{what}: cycles"), cost / 20000.0, f64::from(each) / 256.0, 1.0);
        }
    }
}

/// Two tasks that share a CPU: neither sees what the other does.
fn two_tasks_on_one_cpu(server: &Server, checks: &mut Checks) {
    let both = format!(
        "taskset -c 0 lab-load --user chase --mib {MIB} --node 1 --times 3000000 > /tmp/chase &
         taskset -c 0 lab-load --user compute --times 1500000000 > /tmp/compute; wait; cat /tmp/chase /tmp/compute"
    );
    let text = server.sh(&both);
    let (chase, compute) = text.trim().split_once('\n').unwrap();
    let (chase, compute) = (Counted::from(chase), Counted::from(compute));
    checks.near("chase beside a loop: DRAM of node 1", chase.node(1), 3.0 * TIMES, 1.0);
    checks.near("loop beside a chase: instructions", compute.count("instructions"), 3e9, 1.0);
    checks.below("chase beside a loop: instructions", chase.count("instructions"), 9.0 * TIMES + 3e9 * 0.01);
    checks.below("loop beside a chase: DRAM of node 1", compute.node(1), 3.0 * TIMES * 0.001);
}

/// `perf stat` of Debian's package and the generic events against lab-count of the same work.
fn unmodified_perf(server: &Server, checks: &mut Checks) {
    let work = format!("taskset -c 0 lab-load chase --uncounted --mib {MIB} --node 1 --times 1000000");
    let events = "instructions:u,cycles:u,cache-references:u,cache-misses:u";
    let perf = server.sh(&format!("perf stat -x ' ' -e {events} -o /tmp/perf {work} >&2; cat /tmp/perf"));
    let by_perf = |event: &str| -> f64 {
        let line = perf.lines().find(|line| line.split(' ').any(|word| word == format!("{event}:u")));
        let line = line.unwrap_or_else(|| panic!("no {event} in {perf}"));
        line.split(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"))
    };
    let counted =
        Counted::from(&server.sh(&format!("lab-count --user --json /tmp/j -- {work} >&2; cat /tmp/j")));
    // Two runs of a whole command: where its memory lies, and so what its first touches meet in the caches, differs.
    checks.near("perf: instructions", by_perf("instructions"), counted.count("instructions"), 1.0);
    checks.near("perf: cache-references", by_perf("cache-references"), counted.count("llc_references"), 1.0);
    checks.near("perf: cache-misses", by_perf("cache-misses"), counted.count("llc_misses"), 1.0);
    checks.near("perf: cycles", by_perf("cycles"), counted.number("kernel_cycles"), 1.0);
    let modelled = counted.0["modelled"][0]["cycles"]["total"].as_f64().unwrap();
    checks.near("modelled cycles, here and in the kernel", modelled, counted.number("kernel_cycles"), 1.0);
}

/// What the kernel does and what programs do is all that is done.
fn kernel_and_programs(server: &Server, checks: &mut Checks) {
    let counts = |work: &str| -> [f64; 3] {
        let events = "instructions:k,instructions:u,instructions";
        let perf = server.sh(&format!("perf stat -x ' ' -e {events} -o /tmp/perf {work} >&2; cat /tmp/perf"));
        let numbers = perf.lines().filter_map(|line| line.split(' ').next()?.parse().ok());
        numbers.collect::<Vec<f64>>().try_into().unwrap_or_else(|_| panic!("not three counts: {perf}"))
    };
    for (work, mostly) in [
        ("dd if=/dev/zero of=/dev/null bs=64K count=2000", 0),
        ("lab-load --uncounted compute --times 100000000", 1),
    ] {
        let each = counts(work);
        checks.near(&format!("{work}: kernel and programs"), each[0] + each[1], each[2], 1.0);
        checks.below(&format!("{work}: done by the other"), each[1 - mostly], each[2] * 0.2);
    }
}

/// lab-count passes the status on, and prices under every profile of the shape.
fn commands(server: &Server) {
    let counted = Counted::from(&server.sh("lab-count --json - -- sh -c 'exit 7'; test $? = 7"));
    let profile = |index: usize| counted.0["modelled"][index]["profile"].as_str();
    assert_eq!([profile(0), profile(1), profile(2)], [Some("broadwell-2s"), Some("broadwell-2s-high"), None]);
}

/// Modelled cycles do not depend on what else the machine does.
fn repeats_under_load(server: &Server, checks: &mut Checks) {
    let stop = AtomicBool::new(false);
    let cycles: Vec<f64> = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let one = || server.load(&format!("chase --mib {MIB} --node 1 --times 1000000"));
        let cycles = (0..3).map(|_| one().number("kernel_cycles")).collect();
        stop.store(true, Ordering::Relaxed);
        cycles
    });
    let most = cycles.iter().copied().fold(0.0, f64::max);
    let least = cycles.iter().copied().fold(f64::MAX, f64::min);
    checks.near("modelled cycles of one load, most against least of three runs", most, least, 1.0);
}

/// The vCPU thread of a VM is counted as any thread. What setting up costs drops out of the difference of two runs.
#[test]
fn counts_of_a_vm() {
    let server = Server::boot("broadwell-2s");
    let mut checks = Checks::default();
    server.sh(
        "lab-vm start a --nodes 2 --vcpus 4 --memory 1G && lab-vm put a /run/lab/bin/lab-load /root/lab-load",
    );
    let chase = |times: u64| {
        let work = format!("/root/lab-load chase --uncounted --mib {MIB} --node 1 --times {times}");
        Counted::from(&server.sh(&format!(
            "lab-count --user --vm a --json /tmp/j -- lab-vm exec a -- taskset -c 0 {work} >&2; cat /tmp/j"
        )))
    };
    // The first run makes the server clear the pages that back the guest's memory, in the vCPU's thread.
    chase(1000);
    let (short, long) = (chase(1_000_000), chase(9_000_000));
    let difference = |node: usize| long.node(node) - short.node(node);
    checks.near("VM: DRAM of node 1", difference(1), 8.0 * TIMES, 1.0);
    checks.below("VM: DRAM of node 0", difference(0).abs(), 8.0 * TIMES * 0.001);
    let vcpu = |counted: &Counted| {
        let parts = counted.0["parts"].as_array().unwrap();
        let part = parts.iter().find(|part| part["name"] == "CPU 0/KVM").unwrap();
        part["counts"]["dram_by_node"][1].as_f64().unwrap()
    };
    checks.near("vCPU 0: DRAM of node 1", vcpu(&long) - vcpu(&short), 8.0 * TIMES, 1.0);
    vnumad_counts_vcpus(&server, &mut checks);
    server.sh("lab-vm stop a");
    vnumactl_finds_bounds(&server, &mut checks);
    checks.done();
}

/// vnumad finds the PMU's events by node, and shows each vCPU as what its load is: vCPU 0 chases through memory of the other
/// node, vCPU 1 computes, and vCPU 2 streams through memory of its own node.
fn vnumad_counts_vcpus(server: &Server, checks: &mut Checks) {
    let built = build_binaries(&[("vnumad", "vnumad"), ("vnumactl", "vnumactl")]).unwrap();
    for (here, there) in built.iter().zip(["vnumad", "vnumactl"]) {
        server.0.put(here, &format!("/usr/local/bin/{there}"), HANG).unwrap();
    }
    let running = "cd /root; printf '[policy]\\ndefault = \"observe\"\\nperiod_ms = 500\\n' > vnumad.toml
         vnumad --config vnumad.toml 2> vnumad.log & all=$!
         run() { lab-vm exec a -- taskset -c $1 /root/lab-load --uncounted $2 --times 1000000000000 & all=\"$all $!\"; }
         run 0 'chase --node 1 --mib 64'; run 1 compute; run 2 'stream --node 1 --mib 64'
         until test -e stop; do sleep 0.2; done; kill $all; wait; cat vnumad.log >&2";
    let shown = std::thread::scope(|scope| {
        scope.spawn(|| server.sh(running));
        let shown = await_types(server, ["LLC-T", "LLC-FR", "LLC-T"]);
        server.sh("touch /root/stop");
        shown
    });
    assert_eq!(shown.daemon["counters"]["source"], "per-node", "{}", shown.daemon);
    assert_eq!(shown.daemon["counters"]["failed"], 0, "{}", shown.daemon);
    let of = |vcpu: usize, field: &str| shown.vcpus[vcpu][field].as_f64().unwrap();
    // One reference in four instructions; a tenth for what kernels do meanwhile, which counts as well.
    checks.near("vnumad: pressure of a chase", of(0, "pressure"), 250.0, 10.0);
    checks.near("vnumad: remote share of a chase", of(0, "remote_share"), 1.0, 2.0);
    checks.near("vnumad: the node of its memory", of(0, "affinity"), 1.0, 0.0);
    checks.below("vnumad: pressure of a loop", of(1, "pressure"), 3.0);
    // One reference in 32 instructions.
    checks.near("vnumad: pressure of a stream", of(2, "pressure"), 31.25, 10.0);
    checks.below("vnumad: remote share of a stream", of(2, "remote_share"), 0.02);
}

/// vnumactl separates loads by their miss rates: a loop, a matrix that fits the cache while it is alone, and a stream through
/// more memory than that. The server's kernel shows another size of the cache than the one that is modelled.
fn vnumactl_finds_bounds(server: &Server, checks: &mut Checks) {
    let load = |what: &str| format!("--load 'lab-load --uncounted {what} --times 1000000000000'");
    let loads = [load("compute"), load("matrix --mib 24 --huge"), load(&format!("stream --mib {MIB}"))];
    let options = "--json --cpu 2 --cache 55 --warm-up 3 --seconds 2";
    let text = server.sh(&format!("vnumactl calibrate {options} {}", loads.join(" ")));
    let found: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let types: Vec<_> =
        (0..loads.len()).map(|at| found["loads"][at]["type"].as_str().unwrap_or("-")).collect();
    assert_eq!(types, ["LLC-FR", "LLC-FI", "LLC-T"], "{text}");
    let bound = |name: &str| found[name].as_f64().unwrap_or_else(|| panic!("no {name}: {text}"));
    let pressure = |at: usize| found["loads"][at]["pressure"].as_f64().unwrap();
    checks.near("pressure of a matrix", pressure(1), 1000.0 / 56.0, 10.0);
    checks.below("the low bound, below the matrix", bound("bound_low"), pressure(1));
    checks.below("the matrix, below the high bound", pressure(1), bound("bound_high"));
    checks.below("the high bound, below the stream", bound("bound_high"), pressure(2));
}

/// A second cache beside the first misses what it would miss as a server's own.
#[test]
fn a_second_cache_counts_as_if_it_were_the_only_one() {
    let loads = [
        format!("chase --mib {MIB} --node 1 --times 1000000"),
        format!("stream --mib {MIB} --node 0 --times 1"),
        // Fits both, and the first only: of the second, each set of 16 ways gets some 32 lines in turn.
        "chase --mib 8 --huge --node 1 --times 1000000".to_owned(),
        "chase --mib 24 --huge --node 1 --times 1000000".to_owned(),
    ];
    let run = |counters: &str| -> Vec<Counted> {
        let server = Server::boot(counters);
        loads.iter().map(|load| server.load(load)).collect()
    };
    let (beside, alone) = (run("broadwell-2s+vprobe-e5620"), run("vprobe-e5620"));
    let mut checks = Checks::default();
    for ((load, beside), alone) in loads.iter().zip(&beside).zip(&alone) {
        let cycles = |counted: &Counted, index: usize| {
            counted.0["modelled"][index]["cycles"]["total"].as_f64().unwrap_or(f64::NAN)
        };
        assert_eq!(beside.0["modelled"][2]["profile"], "vprobe-e5620", "{load}");
        checks.near(&format!("{load}: modelled cycles"), cycles(beside, 2), cycles(alone, 0), 1.0);
        let second = beside.0["counts"]["second"]["llc_misses"].as_f64().unwrap_or(f64::NAN);
        let apart = (second - alone.count("llc_misses")).abs();
        checks.below(&format!("{load}: LLC misses apart"), apart, alone.count("llc_references") * 0.01);
    }
    let [first, second] = [beside[3].count("llc_misses"), alone[3].count("llc_misses")];
    checks.below("24 MiB: misses of 55 MiB", first, TIMES * 0.01);
    checks.near("24 MiB: misses of 12 MiB", second, TIMES, 5.0);
    checks.done();
}

/// What vnumactl shows.
struct Shown {
    vcpus: Vec<Value>,
    daemon: Value,
}

/// Pressure that a chase has, and none of the loads has while it sets its memory up.
const CHASES: f64 = 200.0;

/// Waits until the vCPUs have been of these types for a while, as the loads have to set their memory up first.
fn await_types(server: &Server, types: [&str; 3]) -> Shown {
    let (mut vcpus, mut times) = (Vec::new(), 0);
    for _ in 0..200 {
        let text = server.sh("sleep 0.5; vnumactl top --once --json || echo []");
        let vms: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        vcpus = vms[0]["vcpus"].as_array().cloned().unwrap_or_default();
        let is = |(vcpu, kind): (&Value, &str)| vcpu["quality"] == "counted" && vcpu["type"] == kind;
        let chases = |vcpu: &Value| vcpu["pressure"].as_f64() > Some(CHASES);
        let all = vcpus.len() > types.len() && vcpus.iter().zip(types).all(is) && chases(&vcpus[0]);
        times = if all { times + 1 } else { 0 };
        if times == 4 {
            let daemon = serde_json::from_str(&server.sh("vnumactl daemon --json")).unwrap();
            return Shown { vcpus, daemon };
        }
    }
    panic!("the vCPUs never were {types:?}: {vcpus:?}")
}

/// One set in 16 shows the same as all sets, also where only a model of the cache knows the answer.
#[test]
fn the_sampled_model_agrees_with_the_full_one() {
    let loads = [
        format!("chase --mib {MIB} --node 1 --times 1000000"),
        format!("stream --mib {MIB} --node 0 --times 1"),
        "chase --mib 8 --huge --node 0 --times 1000000".to_owned(),
        // 20 huge pages put at most one line each into a set of 20 ways and so just fit the LLC of 55 MiB; 32 do not.
        "chase --mib 40 --huge --node 0 --times 1000000".to_owned(),
        "chase --mib 64 --huge --node 0 --times 1000000".to_owned(),
    ];
    let run = |counters: &str| -> Vec<Counted> {
        let server = Server::boot(counters);
        loads.iter().map(|load| server.load(load)).collect()
    };
    let (sampled, full) = (run("broadwell-2s"), run("broadwell-2s:full"));
    let mut checks = Checks::default();
    for ((load, sampled), full) in loads.iter().zip(&sampled).zip(&full) {
        let cycles = |counted: &Counted| counted.number("kernel_cycles");
        checks.near(&format!("{load}: modelled cycles"), cycles(sampled), cycles(full), 1.0);
        let references = |counted: &Counted| counted.count("llc_references");
        checks.near(&format!("{load}: LLC references"), references(sampled), references(full), 1.0);
        let misses = |counted: &Counted| counted.count("llc_misses");
        let apart = (misses(sampled) - misses(full)).abs();
        checks.below(&format!("{load}: LLC misses apart"), apart, references(full) * 0.01);
    }
    checks.done();
}
