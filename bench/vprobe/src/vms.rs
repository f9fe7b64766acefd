//! The three VMs, their programs, and the counters of their vCPUs.

use crate::{
    committed::{BUSY, Kind, LOADED, Layout, Placement, VCPUS, VMS, Workload},
    full::told::{self, Talk, Told},
    guest_memory::GuestMemory,
    host,
    load::Ready,
    raw::{Period, Vcpu},
    threads::{Counted, Thread, Values, last_cpu},
};
use anyhow::{Context, Result, ensure};
use std::{cell::RefCell, collections::BTreeMap, time::Instant};
use vnuma_scenario::{Lines, Process, Vm};

/// Where this program is in a guest.
pub const PROGRAM: &str = "/root/bench-vprobe";

/// That are one operation of a program which does not count its own.
const INSTRUCTIONS: u64 = 1000;
/// Files that a program of many connections has open, in `prlimit`'s words.
const FILES: &str = "--nofile=16384:16384";

/// A running VM.
struct One {
    vm: Vm,
    memory: GuestMemory,
    threads: Vec<Thread>,
}

/// All VMs of the benchmark.
pub struct Vms {
    /// Of the server.
    pub layout: &'static Layout,
    all: Vec<One>,
    /// If vm1 has guest nodes.
    told: Option<Told>,
}

/// Programs that run in them.
pub struct Programs {
    /// By VM and vCPU.
    ready: Vec<Vec<Ready>>,
    running: Vec<Process>,
    /// With those of vm1, if it has guest nodes.
    talks: RefCell<Vec<Talk>>,
}

/// Everything that grows, at one moment.
pub struct Reading {
    at: Instant,
    /// By VM and vCPU: values, operations, CPU.
    vcpus: Vec<Vec<(Values, u64, u32)>>,
    /// CPUs of VMs, and how long these were idle, all together.
    cpus: usize,
    idle_ns: u64,
    /// Modelled cycles of each thread of vnumad, and its time on a CPU.
    daemon: Vec<(String, u64, u64)>,
}

impl Vms {
    /// Boots the first ones, so many. Of the loaded ones this is counted. `told`: vm1 has guest nodes and the driver.
    pub fn start(layout: &'static Layout, loaded: Counted, told: bool, count: usize) -> Result<Self> {
        // What AutoNUMA does while VMs start would have it scan their memory less often in its cells.
        host::balance(false)?;
        let shape = |name: &str, memory: &str| {
            let nodes = if told && name == VMS[0].0 { &told::NODES[..] } else { &["--uma"] };
            let rest = ["--vcpus", &VCPUS.to_string(), "--memory", memory].map(str::to_owned);
            nodes.iter().map(|&word| word.to_owned()).chain(rest).collect::<Vec<_>>()
        };
        let sizes =
            VMS.map(|(name, memory)| (name, if told && name == VMS[0].0 { told::MEMORY } else { memory }));
        let shapes = sizes.map(|(name, memory)| (name, shape(name, memory)));
        let arguments = shapes.each_ref().map(|(name, shape)| (*name, shape.as_slice()));
        let mut vms = Vec::new();
        for (vm, (_, memory)) in Vm::start_all(&arguments[..count])?.into_iter().zip(sizes) {
            ensure!(vm.threads.len() == VCPUS, "{}: {} vCPU threads", vm.name, vm.threads.len());
            let mib: u64 = memory.trim_end_matches('M').parse().context("memory of a VM")?;
            vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
            let counted = if vms.len() < LOADED { loaded } else { Counted::Cycles };
            let count = |&tid: &i32| Thread::count(vm.pid, tid, counted);
            let threads = vm.threads.iter().map(count).collect::<Result<_>>()?;
            let nodes = if told && vms.is_empty() { layout.nodes.len() } else { 1 };
            vms.push(One { memory: GuestMemory::of(&vm, mib << 20, nodes)?, threads, vm });
        }
        let told = told.then(|| Told::equip(&vms[0].vm)).transpose()?;
        Ok(Self { layout, all: vms, told })
    }

    /// Their names.
    pub fn names(&self) -> Vec<&str> {
        self.all.iter().map(|one| one.vm.name.as_str()).collect()
    }

    /// vm1, if it has guest nodes.
    pub fn told(&self) -> Option<(&Told, &Vm)> {
        Some((self.told.as_ref()?, &self.all.first()?.vm))
    }

    /// Waits until the guest of vm1 knows where its vCPUs are, and takes its programs' memory to the nodes of the placement.
    pub fn tell(&self, programs: &Programs, placement: &Placement) -> Result<()> {
        let Some(One { vm, memory, .. }) = self.all.first() else { return Ok(()) };
        told::wait_until_told(vm, &placement.vcpus[0])?;
        for (talk, node) in programs.talks.borrow_mut().iter_mut().zip(placement.memory[0]) {
            talk.bring_home(memory, node).with_context(|| vm.name.clone())?;
        }
        Ok(())
    }

    /// Starts the programs of a workload and waits until they work. The vCPUs that sleep have none yet.
    pub fn load(&self, workload: &Workload) -> Result<Programs> {
        let mut programs = Programs { ready: Vec::new(), running: Vec::new(), talks: RefCell::default() };
        for position in 0..BUSY.min(self.all.len()) {
            let kind = |vcpu: usize| match position {
                1 => workload.vm2.unwrap_or(workload.programs)[vcpu],
                _ if position < LOADED => workload.programs[vcpu],
                _ => Kind::Compute,
            };
            let count = if kind(0).is_team() { 1 } else { VCPUS };
            let connections = (workload.connections / VCPUS).to_string();
            self.start_programs(&mut programs, count, |vcpu| {
                let cpu = vcpu.to_string();
                let words = ["load", kind(vcpu).name(), "--cpu", &cpu, "--connections", &connections];
                let mut words: Vec<_> = words.map(str::to_owned).into();
                if position == 0 && self.told.is_some() {
                    words.push("--count-on=0".to_owned());
                }
                words
            })?;
        }
        Ok(programs)
    }

    /// Starts those that sleep, for so many seconds of the server at a time, if there is a VM for them.
    pub fn load_sleepers(&self, programs: &mut Programs, sleep_s: f64) -> Result<()> {
        if programs.ready.len() == self.all.len() {
            return Ok(());
        }
        let sleep_us = format!("{:.0}", sleep_s * 1e6);
        self.start_programs(programs, VCPUS, |vcpu| {
            let cpu = vcpu.to_string();
            ["load", Kind::Sleep.name(), "--cpu", &cpu, "--sleep-us", &sleep_us].map(str::to_owned).into()
        })
    }

    /// Starts so many programs in the first VM that has none, with these arguments: one on each vCPU, or one for all.
    fn start_programs(
        &self,
        programs: &mut Programs,
        count: usize,
        of: impl Fn(usize) -> Vec<String>,
    ) -> Result<()> {
        let one = self.all.get(programs.ready.len()).context("a VM without programs")?;
        let mut started = Vec::new();
        for vcpu in 0..count {
            let arguments = of(vcpu);
            let mut command = vec!["prlimit", FILES, PROGRAM];
            command.extend(arguments.iter().map(String::as_str));
            started.push(one.vm.spawn(&command)?);
        }
        let mut lines = Vec::new();
        for mut process in started {
            let mut out = Lines::of_process(&mut process, format!("a program in {}", one.vm.name))?;
            // One for each vCPU.
            for _ in 0..VCPUS / count {
                let line = out.next("a start")?;
                let parsed = serde_json::from_str(&line);
                lines.push(parsed.with_context(|| format!("a program in {} said {line:?}", one.vm.name))?);
            }
            if self.told.is_some()
                && programs.ready.is_empty()
                && let Some(input) = process.0.stdin.take()
            {
                programs.talks.borrow_mut().push(Talk { input, lines: out });
            }
            programs.running.push(process);
        }
        programs.ready.push(lines);
        Ok(())
    }

    /// Threads of all vCPUs.
    pub fn tids(&self) -> impl Iterator<Item = i32> {
        self.all.iter().flat_map(|one| &one.threads).map(|thread| thread.tid)
    }

    /// Puts every vCPU and every page where the placement says. Each vCPU gets one CPU; three share one.
    pub fn place(&self, programs: &Programs, placement: &Placement) -> Result<()> {
        let mut taken = vec![0_usize; self.layout.nodes.len()];
        for (one, nodes) in self.all.iter().zip(self.layout.nodes_of(placement)) {
            for (thread, &node) in one.threads.iter().zip(nodes) {
                let cpus = self.layout.vm_cpus[node];
                host::affine(thread.tid, &[cpus[taken[node] % cpus.len()]])?;
                taken[node] += 1;
            }
        }
        for (at, ((one, ready), nodes)) in
            self.all.iter().zip(&programs.ready).zip(&placement.memory).enumerate()
        {
            if at == 0 && self.told.is_some() {
                // Its programs go to their guest nodes, which are at home on the server's.
                one.memory.place(&one.memory.at_home()).with_context(|| one.vm.name.clone())?;
                continue;
            }
            let both = |(ready, &node): (&'_ Ready, &usize)| {
                let next = (node + 1) % self.layout.nodes.len();
                [(ready.memory.clone(), node), (ready.other.clone(), next)]
            };
            let both: Vec<_> = ready.iter().zip(nodes).flat_map(both).collect();
            let of: Vec<_> = both.iter().map(|(memory, node)| (memory.as_slice(), *node)).collect();
            one.memory
                .place(&one.memory.pieces(&of, self.layout.nodes))
                .with_context(|| one.vm.name.clone())?;
        }
        Ok(())
    }

    /// Lets all vCPUs run where VMs may, or only on the nodes of a placement.
    pub fn release(&self, within: Option<&Placement>) -> Result<()> {
        let mut nodes = within.map(|placement| self.layout.nodes_of(placement));
        let all = self.layout.all_vm_cpus();
        for one in &self.all {
            let nodes = nodes.as_mut().and_then(Iterator::next);
            for (vcpu, thread) in one.threads.iter().enumerate() {
                let cpus = nodes.map_or(&all[..], |nodes| self.layout.vm_cpus[nodes[vcpu]]);
                host::affine(thread.tid, cpus)?;
            }
        }
        Ok(())
    }

    /// Reads everything.
    pub fn read(&self, programs: &Programs, daemon: &[(String, Thread)]) -> Result<Reading> {
        let at = Instant::now();
        let mut vcpus = Vec::new();
        for (one, ready) in self.all.iter().zip(&programs.ready) {
            let of = |(thread, ready): (&Thread, &Ready)| -> Result<_> {
                let values = thread.read()?;
                let by_instructions = || Ok(values.user.instructions / INSTRUCTIONS);
                let operations = ready.count.map_or_else(by_instructions, |at| one.memory.word(at))?;
                Ok((values, operations, last_cpu(one.vm.pid, thread.tid)?))
            };
            vcpus.push(one.threads.iter().zip(ready).map(of).collect::<Result<_>>()?);
        }
        let spent =
            |(name, thread): &(String, Thread)| Ok((name.clone(), thread.cycles()?, thread.ran_ns()?));
        let daemon = daemon.iter().map(spent).collect::<Result<_>>()?;
        let cpus = self.layout.all_vm_cpus().len();
        Ok(Reading { at, vcpus, cpus, idle_ns: host::idle_ns(self.layout)?, daemon })
    }
}

impl Reading {
    /// What happened since `before`.
    pub fn since(&self, before: &Self) -> Period {
        let elapsed_s = self.at.duration_since(before.at).as_secs_f64();
        let vcpu = |(now, before): (&(Values, u64, u32), &(Values, u64, u32))| Vcpu {
            values: now.0.since(&before.0),
            operations: now.1.saturating_sub(before.1),
            cpu: now.2,
        };
        let vm = |(now, before): (&Vec<_>, &Vec<_>)| now.iter().zip(before).map(vcpu).collect();
        let idle_ns = self.idle_ns.saturating_sub(before.idle_ns) as f64;
        Period {
            elapsed_s,
            vms: self.vcpus.iter().zip(&before.vcpus).map(vm).collect(),
            idle_share: idle_ns / 1e9 / elapsed_s / self.cpus as f64,
            daemon: (!self.daemon.is_empty()).then(|| self.daemon_since(before)),
            daemon_ns: (!self.daemon.is_empty()).then(|| self.daemon_ns_since(before)),
            programs_ns: None,
            program_runs: None,
            wakes_us: Vec::new(),
        }
    }
}

impl Reading {
    /// Cycles of vnumad's threads, by their name.
    fn daemon_since(&self, before: &Self) -> BTreeMap<String, u64> {
        let mut by_name = BTreeMap::new();
        for ((name, now, _), (_, before, _)) in self.daemon.iter().zip(&before.daemon) {
            *by_name.entry(name.clone()).or_default() += now.saturating_sub(*before);
        }
        by_name
    }

    /// Time of vnumad's threads on CPUs.
    fn daemon_ns_since(&self, before: &Self) -> u64 {
        let threads = self.daemon.iter().zip(&before.daemon);
        threads.map(|((_, _, now), (_, _, before))| now.saturating_sub(*before)).sum()
    }
}
