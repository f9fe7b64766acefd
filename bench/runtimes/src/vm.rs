//! The VM, its vCPUs' places, and the load in its guest.

use crate::committed::{
    Allocator, CPUS, GRID, HOMES, HOST_CPUS, JAVA, JAVA_NO_NUMA, JAVA_NUMA, MEMORY_MIB, NODES, OTHERS,
    Policy, SCAN_PERIOD_MS, Workload,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};
use vnuma_bench_common::{
    host::{affine, balance, balanced},
    talk::Talk,
    threads::{Counted, Thread, Values, last_cpu, threads_of},
};
use vnuma_scenario::{Process, Vm, output, vnumactl, vnumad_logging_to, wait_for};

/// Its name.
const NAME: &str = "runtimes";
const LOG: &str = "/root/vnumad.log";
/// On the server and in the guest: what guest/runtime builds, and the Java VM.
pub const RUNTIME: &str = "/root/runtime";
const PROGRAM: &str = "/root/bench-runtimes";
const DRIVER: &str = "/root/vnuma.ko";
const JAVA_ARCHIVE: &str = "java.tar";
/// Where vnuma-run looks for it. The guest's image does not have it.
const MIMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2";
const PRELOADED_MIMALLOC: &str = "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libmimalloc.so.2";
const PRELOADED_TCMALLOC: &str = "LD_PRELOAD=/root/runtime/tcmalloc/libvnuma-tcmalloc.so";
const SOLVER: &str = "/root/runtime/solver";
/// Each of its threads stays on its CPU, and sleeps where it waits for others: one that spins would be counted.
const OPENMP: [&str; 4] = ["env", "OMP_PROC_BIND=close", "OMP_PLACES=threads", "OMP_WAIT_POLICY=passive"];
/// Runs a command that does not see the driver's device: tcmalloc follows where it does.
const WITHOUT_DEVICE: &str = "[ ! -e /dev/vnuma ] || mount --bind /dev/null /dev/vnuma; exec \"$@\"";
const HANG: Duration = Duration::from_secs(180);
/// Where a kernel's AutoNUMA is set.
const BALANCING: &str = "/sys/kernel/debug/sched/numa_balancing";

/// A VM that runs.
pub struct Machine {
    threads: Vec<Thread>,
    /// The node that each vCPU is on, and its CPU.
    at: Vec<(usize, u32)>,
    /// Ends before vnumad does, which would see it go.
    vm: Vm,
    daemon: Option<Process>,
    /// Pages are moved by the server's kernel, not by the guest's.
    balanced_by_host: bool,
    /// Does the guest's kernel take pages to the threads that use them? One without nodes never does.
    pub autonuma: bool,
}

impl Machine {
    /// Boots the one of a policy, with all vCPUs at home.
    pub fn start(policy: Policy, autonuma: bool, counted: Counted) -> Result<Self> {
        let (size, vcpus, nodes) = (format!("{MEMORY_MIB}M"), HOMES.len().to_string(), NODES.to_string());
        let nodes: &[&str] = if policy.is_black_box() { &["--uma"] } else { &["--nodes", &nodes] };
        let shape = [nodes, &["--vcpus", &vcpus, "--memory", &size]].concat();
        let shape: Vec<String> = shape.into_iter().map(str::to_owned).collect();
        let balanced_by_host = policy == Policy::AutonumaHost;
        output("sh", &["-c", &set_balancing()]).context("the server's AutoNUMA")?;
        balance(balanced_by_host)?;
        let vm = Vm::start_under(policy.started_by().unwrap_or_default(), NAME, &shape)?;
        ensure!(vm.threads.len() == HOMES.len(), "{} vCPU threads", vm.threads.len());
        for (_, thread) in threads_of(vm.pid)? {
            if !vm.threads.contains(&thread.tid) {
                affine(thread.tid, &[OTHERS])?;
            }
        }
        let count = |thread: &i32| Thread::count(vm.pid, *thread, counted);
        let threads = vm.threads.iter().map(count).collect::<Result<_>>()?;
        let mut machine = Self { threads, at: Vec::new(), vm, daemon: None, balanced_by_host, autonuma };
        machine.go_home()?;
        machine.vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
        put_directory(&machine.vm, Path::new(RUNTIME))?;
        machine.vm.exec(&["chmod", "-R", "a+rx", RUNTIME])?;
        let mimalloc =
            format!("[ ! -e {RUNTIME}/libmimalloc.so.2 ] || cp {RUNTIME}/libmimalloc.so.2 {MIMALLOC}");
        machine.vm.exec(&["sh", "-c", &mimalloc])?;
        machine.vm.exec(&["sh", "-c", &set_balancing()]).context("the guest's AutoNUMA")?;
        if !policy.is_black_box() {
            let switch = format!("echo {} > /proc/sys/kernel/numa_balancing", u8::from(autonuma));
            machine.vm.exec(&["sh", "-c", &switch]).context("the guest's AutoNUMA")?;
        }
        Ok(machine)
    }

    /// Unpacks the Java VM. What it says of its version, or that none was brought.
    pub fn unpack_java(&self) -> Result<String> {
        let unpack = format!(
            "cd {RUNTIME}; [ -e {JAVA_ARCHIVE} ] || {{ echo none; exit; }}; \
             tar -xf {JAVA_ARCHIVE} && rm {JAVA_ARCHIVE} && jre/bin/java -version 2>&1 | sed -n 2p"
        );
        Ok(self.vm.exec(&["sh", "-c", &unpack])?.trim().to_owned())
    }

    /// The guest's kernel.
    pub fn kernel(&self) -> Result<String> {
        Ok(self.vm.exec(&["uname", "-r"])?.trim().to_owned())
    }

    /// From now on vnumad tells the guest's kernel where its vCPUs are.
    pub fn attach(&mut self) -> Result<()> {
        let daemon = vnumad_logging_to(Path::new(LOG), &[])?;
        let threads = threads_of(daemon.0.id() as i32)?;
        threads.iter().try_for_each(|(_, thread)| affine(thread.tid, HOST_CPUS))?;
        self.daemon = Some(daemon);
        self.vm.put(DRIVER, DRIVER)?;
        self.vm.exec(&["insmod", DRIVER])?;
        self.vm.attach()?;
        self.vm.await_driver()?;
        self.await_told()
    }

    /// The end of the guest's console, if the VM is no more or its kernel has panicked.
    pub fn console_if_ended(&self) -> Option<String> {
        let runs = Path::new("/proc").join(self.vm.pid.to_string()).exists() && !self.vm.has_panicked();
        (!runs).then(|| self.vm.end_of_console())
    }

    /// Is the VM attached?
    pub fn is_attached(&self) -> bool {
        self.daemon.is_some()
    }

    /// Does the guest use the true node of each vCPU, as far as vnumad knows?
    pub fn is_told(&self) -> Result<bool> {
        let shown = vnumactl(&["show", NAME])?;
        let vcpus = shown["vcpus"].as_array().context("vnumactl show: no vcpus")?;
        let is_told = |vcpu: &Value| {
            let at = vcpu["apic_id"].as_u64().and_then(|number| self.at.get(number as usize));
            vcpu["state"] == "true" && at.is_some_and(|(node, _)| vcpu["host_node"] == *node)
        };
        Ok(vcpus.len() == HOMES.len() && vcpus.iter().all(is_told))
    }

    fn await_told(&self) -> Result<()> {
        wait_for("the guest to use the true node of each vCPU", HANG, || self.is_told())
    }

    /// Takes a vCPU to the first free CPU of a node.
    pub fn put(&mut self, vcpu: usize, node: usize) -> Result<()> {
        let is_free = |cpu: &&u32| self.at.iter().all(|(_, used)| used != *cpu);
        let cpu = *CPUS[node].iter().find(is_free).with_context(|| format!("node {node} is full"))?;
        affine(self.vm.threads[vcpu], &[cpu])?;
        self.at[vcpu] = (node, cpu);
        Ok(())
    }

    /// Takes a vCPU to the other node, and says which that is.
    pub fn turn(&mut self, vcpu: usize) -> Result<usize> {
        let node = 1 - self.at[vcpu].0;
        self.put(vcpu, node)?;
        Ok(node)
    }

    /// From now on the server's scheduler chooses the CPUs of all vCPUs, of both nodes.
    pub fn release(&self) -> Result<()> {
        self.vm.threads.iter().try_for_each(|thread| affine(*thread, &CPUS.concat()))
    }

    /// vCPUs that came to another node since they were put or looked for, and that node.
    pub fn look(&mut self) -> Result<Vec<(usize, usize)>> {
        let mut moved = Vec::new();
        for (vcpu, (at, &thread)) in self.at.iter_mut().zip(&self.vm.threads).enumerate() {
            let cpu = last_cpu(self.vm.pid, thread)?;
            let node = CPUS.iter().position(|cpus| cpus.contains(&cpu));
            let node = node.with_context(|| format!("vCPU {vcpu} is on CPU {cpu}"))?;
            if node != at.0 {
                moved.push((vcpu, node));
            }
            *at = (node, cpu);
        }
        Ok(moved)
    }

    /// All vCPUs stay where they are.
    pub fn hold(&mut self) -> Result<()> {
        self.look()?;
        self.at.iter().zip(&self.vm.threads).try_for_each(|((_, cpu), thread)| affine(*thread, &[*cpu]))
    }

    /// All vCPUs are at home, and the guest knows if it is told.
    pub fn go_home(&mut self) -> Result<()> {
        self.at.clear();
        for (vcpu, home) in HOMES.into_iter().enumerate() {
            self.at.push((home, 0));
            self.put(vcpu, home)?;
        }
        if self.is_attached() { self.await_told() } else { Ok(()) }
    }

    /// What the vCPUs did so far.
    pub fn read(&self) -> Result<Vec<Values>> {
        self.threads.iter().map(Thread::read).collect()
    }

    /// Pages that the guest's kernel, or the server's in its stead, has moved so far.
    pub fn migrated(&self) -> Result<u64> {
        if self.balanced_by_host {
            return Ok(balanced()?.moved);
        }
        let text = self.vm.exec(&["sed", "-n", "s/^numa_pages_migrated //p", "/proc/vmstat"])?;
        text.trim().parse().with_context(|| format!("numa_pages_migrated: {text:?}"))
    }

    /// Starts a load in the guest. It has its memory then, and waits.
    pub fn load(&self, workload: Workload, policy: Policy) -> Result<Talk> {
        // What the one before has left does not decide which huge pages this one gets.
        self.vm.exec(&[
            "sh",
            "-c",
            "echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory",
        ])?;
        let command = command(workload, policy);
        let process = self.vm.spawn(&command.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mut load = Talk::with(process, format!("{} in the guest", workload.name()))?;
        load.answer::<u64>("a start")?;
        Ok(load)
    }
}

/// Sets how often a kernel's AutoNUMA looks.
fn set_balancing() -> String {
    let [least, most] = SCAN_PERIOD_MS;
    format!(
        "[ -d {BALANCING} ] || mount -t debugfs none /sys/kernel/debug; \
         echo {least} > {BALANCING}/scan_period_min_ms && echo {most} > {BALANCING}/scan_period_max_ms"
    )
}

/// What the guest runs. Without vnuma-run a runtime has the nodes of its start; jemalloc has none.
fn command(workload: Workload, policy: Policy) -> Vec<String> {
    let run = format!("{RUNTIME}/vnuma-run");
    let java = format!("{RUNTIME}/jre/bin/java");
    let threads = HOMES.len().to_string();
    let grid = GRID.map(|number| number.to_string());
    let full = policy == Policy::Full;
    let followed = |options: &[&'static str]| {
        let run: &[&str] = &[&run, "--libraries", RUNTIME];
        let words = if full { [run, options].concat() } else { alone(workload.allocator(), policy) };
        words.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let by_vnuma_run = ["--allocator", workload.allocator().map_or("", Allocator::name)];
    let (mut words, rest): (Vec<String>, Vec<&str>) = match workload {
        Workload::Stream => (followed(&[]), vec![PROGRAM, "guest", "stream"]),
        Workload::Solver => (followed(&[]), [&OPENMP[..], &[SOLVER, &grid[0], &grid[1]]].concat()),
        Workload::Stencil | Workload::StencilMimalloc | Workload::StencilTcmalloc => {
            (followed(&by_vnuma_run), vec![PROGRAM, "guest", "stencil"])
        }
        Workload::StoreJemalloc | Workload::StoreMimalloc | Workload::StoreTcmalloc => {
            (followed(&by_vnuma_run), vec![PROGRAM, "guest", "store"])
        }
        Workload::Orders | Workload::OrdersG1 | Workload::OrdersZ => {
            let [name, flag] = workload.collector().unwrap_or_default();
            let flags: &[&str] = match policy {
                Policy::Full => &[],
                Policy::VnumaOs => &[flag, JAVA_NO_NUMA],
                _ => &[flag, JAVA_NUMA],
            };
            (
                followed(&["--gc", name]),
                [&[java.as_str()], flags, workload.heap(), &JAVA, &["-cp", RUNTIME, "Orders", &threads]]
                    .concat(),
            )
        }
    };
    words.extend(rest.into_iter().map(str::to_owned));
    words
}

/// What stands before a program with an allocator that is not told. jemalloc and mimalloc have no nodes by themselves, tcmalloc has those
/// of its start unless it is not to.
fn alone(allocator: Option<Allocator>, policy: Policy) -> Vec<&'static str> {
    match allocator {
        None => Vec::new(),
        Some(Allocator::Jemalloc) => vec!["env", "LD_PRELOAD=libjemalloc.so.2"],
        Some(Allocator::Mimalloc) => vec!["env", PRELOADED_MIMALLOC],
        Some(Allocator::Tcmalloc) => {
            let aware =
                if policy == Policy::VnumaOs { "TCMALLOC_NUMA_AWARE=0" } else { "TCMALLOC_NUMA_AWARE=1" };
            let run = ["unshare", "--mount", "sh", "-c", WITHOUT_DEVICE, "sh", "env"];
            [&run[..], &["GLIBC_TUNABLES=glibc.pthread.rseq=0", aware, PRELOADED_TCMALLOC]].concat()
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn line(workload: Workload, policy: Policy) -> String {
        command(workload, policy).join(" ")
    }

    #[test]
    fn only_full_runs_under_vnuma_run() {
        for &workload in Workload::ALL {
            for &policy in Policy::ALL {
                let is_run =
                    line(workload, policy).starts_with("/root/runtime/vnuma-run --libraries /root/runtime ");
                assert_eq!(is_run, policy == Policy::Full, "{}", line(workload, policy));
            }
            assert_eq!(line(workload, Policy::OsOnly), line(workload, Policy::StaticVnuma));
        }
    }

    #[test]
    fn a_runtime_uses_nodes_unless_it_is_not_to() {
        let with = line(Workload::Orders, Policy::StaticVnuma);
        assert!(
            with.starts_with("/root/runtime/jre/bin/java -XX:+UseParallelGC -XX:+UseNUMA -Xms400m "),
            "{with}"
        );
        assert!(!line(Workload::Orders, Policy::VnumaOs).contains("+UseNUMA"));
        let full = line(Workload::Orders, Policy::Full);
        assert!(full.contains(" --gc parallel /root/runtime/jre/bin/java -Xms400m "), "{full}");
        let full = line(Workload::Stencil, Policy::Full);
        assert!(full.ends_with(" --allocator jemalloc /root/bench-runtimes guest stencil"), "{full}");
        let solver = line(Workload::Solver, Policy::OsOnly);
        assert!(
            solver.starts_with("env OMP_PROC_BIND=close ") && solver.ends_with("/solver 4096 4608"),
            "{solver}"
        );
        let full = line(Workload::StoreMimalloc, Policy::Full);
        assert!(full.ends_with(" --allocator mimalloc /root/bench-runtimes guest store"), "{full}");
    }

    #[test]
    fn an_allocator_that_is_not_told_has_the_nodes_of_its_start() {
        let alone = line(Workload::StoreMimalloc, Policy::OsOnly);
        assert_eq!(alone, format!("env LD_PRELOAD={MIMALLOC} /root/bench-runtimes guest store"));
        let alone = line(Workload::StencilTcmalloc, Policy::OsOnly);
        assert!(
            alone.starts_with("unshare --mount sh -c ") && alone.contains("/dev/null /dev/vnuma"),
            "{alone}"
        );
        assert!(alone.contains(&format!(" TCMALLOC_NUMA_AWARE=1 {PRELOADED_TCMALLOC} ")), "{alone}");
        let unaware = line(Workload::StencilTcmalloc, Policy::VnumaOs);
        assert!(unaware.contains(" TCMALLOC_NUMA_AWARE=0 "), "{unaware}");
    }
}
