//! Table III of vProbe: what the policy costs with one to four small VMs. At half scale each has one vCPU and there are four CPUs, so
//! that with four VMs every CPU has one vCPU, as in the paper.

use crate::{
    committed::{DEFAULT_PERIOD_S, HALF, Kind, MEASURED, PERIOD_S, WARM_UP},
    guest_memory::GuestMemory,
    host::{self, Timers},
    load::Ready,
    raw::{self, Cell, Period, Vcpu},
    server::PERIODS_S,
    threads::{Counted, Thread, Values, threads_of},
    vms::PROGRAM,
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};
use vnuma_scenario::{Lines, Process, Vm, vnumactl};

/// The most that a setup has.
pub const NAMES: [&str; 4] = ["vm1", "vm2", "vm3", "vm4"];
const MIB: u64 = 256;
/// How long the dilation is measured, seconds of the server.
const DILATION_S: f64 = 6.0;

/// A VM with one vCPU, which follows a chain through its memory.
struct Small {
    vm: Vm,
    memory: GuestMemory,
    thread: Thread,
    ready: Ready,
    _program: Process,
}

/// VMs that run.
pub struct SmallVms {
    all: Vec<Small>,
    dilation: f64,
    period_s: f64,
    factor: f64,
}

/// What is read at the end of a period.
struct Moment {
    at: Instant,
    vcpus: Vec<(Values, u64)>,
    /// Cycles and time of each thread of vnumad.
    daemon: Vec<(u64, u64)>,
    /// Time and runs of its BPF programs in other threads, if it runs.
    programs: Option<(u64, u64)>,
    idle_ns: u64,
}

impl SmallVms {
    /// Boots so many and starts their programs; stretches all timers.
    pub fn start(count: usize, clock_ghz: f64) -> Result<(Self, raw::Workload)> {
        host::balance(false)?;
        let shape = ["--uma", "--vcpus", "1", "--memory", "256M"].map(str::to_owned);
        let names: Vec<_> = NAMES.iter().take(count).map(|name| (*name, shape.as_slice())).collect();
        let all = Vm::start_all(&names)?.into_iter().map(Small::load).collect::<Result<Vec<_>>>()?;
        host::divide(&HALF)?;
        let timers = Timers::read(&HALF)?;
        let mut vms = Self { all, dilation: 0.0, period_s: 0.0, factor: 0.0 };
        vms.place()?;
        vms.dilation = vms.dilation(clock_ghz)?;
        vms.period_s = (PERIOD_S * vms.dilation).clamp(PERIODS_S.0, PERIODS_S.1);
        vms.factor = vms.period_s / DEFAULT_PERIOD_S;
        let mut stretched = timers.stretch(vms.factor, vms.dilation)?;
        stretched.append(&mut host::stretched(vms.period_s, vms.factor, vms.dilation));
        let Self { dilation, period_s, factor, .. } = vms;
        eprintln!("{count} small VMs: dilation {dilation:.1}, periods of {period_s:.1} s");
        Ok((vms, raw::Workload { name: "small".into(), dilation, period_s, factor, stretched }))
    }

    /// Each vCPU on a CPU of its own, on nodes in turn, and its memory on the other node.
    fn place(&self) -> Result<()> {
        for (at, one) in self.all.iter().enumerate() {
            host::affine(one.thread.tid, &[HALF.vm_cpus[at % 2][at / 2]])?;
            let pieces = one.memory.pieces(&[(&one.ready.memory, 1 - at % 2)], HALF.nodes);
            one.memory.place(&pieces).with_context(|| one.vm.name.clone())?;
        }
        Ok(())
    }

    fn read(&self, daemon: &[(String, Thread)]) -> Result<Moment> {
        let at = Instant::now();
        let of = |one: &Small| {
            let at = one.ready.count.context("the program counts nothing")?;
            Ok((one.thread.read()?, one.memory.word(at)?))
        };
        let vcpus = self.all.iter().map(of).collect::<Result<_>>()?;
        let spent = |(_, thread): &(String, Thread)| Ok((thread.cycles()?, thread.ran_ns()?));
        Ok(Moment {
            at,
            vcpus,
            daemon: daemon.iter().map(spent).collect::<Result<_>>()?,
            programs: (!daemon.is_empty()).then(host::programs),
            idle_ns: host::idle_ns(&HALF)?,
        })
    }

    fn dilation(&self, clock_ghz: f64) -> Result<f64> {
        let before = self.read(&[])?;
        thread::sleep(Duration::from_secs_f64(DILATION_S));
        let after = self.read(&[])?;
        let sum = |of: fn(&Values) -> u64| {
            after
                .vcpus
                .iter()
                .zip(&before.vcpus)
                .map(|(now, before)| of(&now.0.since(&before.0)))
                .sum::<u64>() as f64
        };
        let cycles = sum(|values| values.cycles);
        ensure!(cycles > 0.0, "the vCPUs did nothing in {DILATION_S} s");
        Ok(sum(|values| values.ran_ns) / (cycles / clock_ghz))
    }

    /// A cell.
    pub fn cell(&self, policy: &str) -> Result<Cell> {
        host::balance(false)?;
        self.place()?;
        let names: Vec<&str> = self.all.iter().map(|one| one.vm.name.as_str()).collect();
        let set = |policy: &str| {
            names.iter().try_for_each(|name| vnumactl(&["policy", name, "--set", policy]).map(drop))
        };
        let daemon = match policy {
            "linux" => None,
            "vprobe" => Some(host::start_vnumad(&names, self.period_s, self.dilation)?),
            _ => bail!("{policy}: expected linux or vprobe"),
        };
        let mut counted = Vec::new();
        if let Some(Process(child)) = &daemon {
            counted = threads_of(child.id() as i32)?;
            counted.iter().try_for_each(|(_, thread)| host::affine(thread.tid, HALF.host_cpus))?;
        }
        self.all.iter().try_for_each(|one| host::affine(one.thread.tid, &HALF.all_vm_cpus()))?;
        let before = host::balanced()?;
        if daemon.is_some() {
            set(policy)?
        } else {
            host::balance(true)?
        }
        host::time_programs(daemon.is_some())?;
        let periods = self.measure(&counted)?;
        host::time_programs(false)?;
        let balanced = host::balanced()?.since(before);
        host::balance(false)?;
        if daemon.is_some() {
            set("off")?;
        }
        drop(daemon);
        Ok(Cell {
            workload: "small".into(),
            policy: policy.into(),
            warm_up: WARM_UP,
            periods,
            pages_scanned: balanced.scanned,
            pages_moved: balanced.moved,
            steps: 0,
            vm_steps: Vec::new(),
            because_of: BTreeMap::new(),
            means: None,
            left_out: 0,
            repeated: 0,
        })
    }

    fn measure(&self, daemon: &[(String, Thread)]) -> Result<Vec<Period>> {
        let began = Instant::now();
        let mut before = self.read(daemon)?;
        let mut periods = Vec::new();
        for number in 1..=WARM_UP + MEASURED {
            let end = began + Duration::from_secs_f64(self.period_s * number as f64);
            thread::sleep(end.saturating_duration_since(Instant::now()));
            let now = self.read(daemon)?;
            periods.push(since(&now, &before, daemon));
            before = now;
        }
        Ok(periods)
    }
}

fn since(now: &Moment, before: &Moment, daemon: &[(String, Thread)]) -> Period {
    let elapsed_s = now.at.duration_since(before.at).as_secs_f64();
    let vcpu = |(now, before): (&(Values, u64), &(Values, u64))| {
        vec![Vcpu { values: now.0.since(&before.0), operations: now.1.saturating_sub(before.1), cpu: 0 }]
    };
    let (mut by_name, mut daemon_ns) = (BTreeMap::<String, u64>::new(), 0);
    for ((name, _), (now, before)) in daemon.iter().zip(now.daemon.iter().zip(&before.daemon)) {
        *by_name.entry(name.clone()).or_default() += now.0.saturating_sub(before.0);
        daemon_ns += now.1.saturating_sub(before.1);
    }
    let idle_s = now.idle_ns.saturating_sub(before.idle_ns) as f64 / 1e9;
    let is_counted = !daemon.is_empty();
    let (programs_ns, program_runs) = host::programs_since(now.programs, before.programs).unzip();
    Period {
        elapsed_s,
        vms: now.vcpus.iter().zip(&before.vcpus).map(vcpu).collect(),
        idle_share: idle_s / elapsed_s / HALF.all_vm_cpus().len() as f64,
        daemon: is_counted.then_some(by_name),
        daemon_ns: is_counted.then_some(daemon_ns),
        programs_ns,
        program_runs,
        wakes_us: Vec::new(),
    }
}

impl Small {
    fn load(vm: Vm) -> Result<Self> {
        let &[tid] = vm.threads.as_slice() else { bail!("{}: expected one vCPU thread", vm.name) };
        vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
        let mut program = vm.spawn(&[PROGRAM, "load", Kind::Chase.name(), "--cpu", "0"])?;
        let line = Lines::of_process(&mut program, format!("the program in {}", vm.name))?.next("load")?;
        let parsed = serde_json::from_str(&line);
        let ready = parsed.with_context(|| format!("the program in {} said {line:?}", vm.name))?;
        let (memory, thread) = (
            GuestMemory::of(&vm, MIB << 20, 1)?,
            Thread::count(vm.pid, tid, Counted::Programs(HALF.classes))?,
        );
        Ok(Self { vm, memory, thread, ready, _program: program })
    }
}
