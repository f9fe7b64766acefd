//! On the lab server: every workload under every policy, on one boot and from one placement.

use crate::{
    committed::{
        self, AT_HOME, DEFAULT_PERIOD_S, HALF, Layout, MEASURED, MEASURED_STATIC, PERIOD_S, POLICIES,
        Placement, SLEEP_S, VMS, WARM_UP, WORKLOADS, Workload, goals, overhead,
    },
    full,
    host::{self, Numad, Timers},
    raw::{self, Cell, Line, Period},
    threads::{Counted, Thread, threads_of},
    vms::{Programs, Vms},
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs, thread,
    time::{Duration, Instant},
};
use vnuma_bench_common::{
    cells::{self, Cells, print},
    stats::median,
};
use vnuma_lab_pricing::{CounterProfile, by_name};
use vnuma_scenario::{Process, vnumactl};
use vnuma_scheduled::Wakes;

/// How long the dilation is measured, seconds of the server, and how often.
const DILATION_S: f64 = 3.0;
const DILATIONS: usize = 3;
/// Shortest and longest period that vnumad takes, seconds.
pub const PERIODS_S: (f64, f64) = (0.1, 60.0);
/// A period that took so much longer was interrupted by the machine.
const LATE: f64 = 1.25;
/// vCPUs have no more of the time of all CPUs than this. Where they seem to, the machine stopped the server while a period's end was
/// being read: some vCPUs were read later than others, and operations later than what they took.
const USED: f64 = 1.1;
/// Periods that a cell may leave out and measure once more, as the machine stopped the server in them or just before.
const LEFT_OUT: usize = 6;
/// Times that a cell is repeated which would have to leave out more.
const REPEATS: u32 = 4;
/// Times that a cell is repeated as a VM had too little CPU time, if it had at least this part of what it has under linux: the kernel's
/// balancer, whose timers are stretched, leaves CPUs unequally loaded for a good part of a cell.
const REPEATS_FOR_TIME: (u32, f64) = (4, 0.85);

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these workloads
    #[arg(long)]
    workload: Vec<String>,
    /// Only these policies
    #[arg(long)]
    policy: Vec<String>,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    cells: cells::Options,
}

/// How cells are measured.
#[derive(clap::Args, Clone, Copy, Debug)]
#[group(id = "periods-and-places")]
pub struct Options {
    /// So many measured periods
    #[arg(long, default_value_t = MEASURED)]
    pub periods: usize,
    /// Set the places of vnumad's policies by scx_vnuma
    #[arg(long)]
    pub sched_ext: bool,
    /// A cell of Linux and one of vnumad's, of one VM and a period each
    #[arg(long)]
    pub smoke: bool,
}

/// Of the short form, with its longest period in seconds, also on a busy machine.
const SMOKE: (&str, [&str; 2], f64) = ("chase", ["linux", "vprobe"], 2.0);

impl Arguments {
    fn workloads(&self) -> Result<Vec<&'static Workload>> {
        let of =
            |name: &str| committed::workload(name).with_context(|| format!("--workload {name} is unknown"));
        match (self.options.smoke, self.workload.is_empty()) {
            (true, _) => Ok(vec![of(SMOKE.0)?]),
            (_, true) => Ok(WORKLOADS.iter().collect()),
            (_, false) => self.workload.iter().map(|name| of(name)).collect(),
        }
    }

    fn policies(&self, workload: &Workload) -> Vec<&'static str> {
        if self.options.smoke {
            return SMOKE.1.into();
        }
        let last = (workload.name == overhead::WORKLOAD).then_some(overhead::CELL);
        let chosen = |name: &&str| self.policy.is_empty() || self.policy.iter().any(|chosen| chosen == name);
        POLICIES.into_iter().chain(last).filter(chosen).collect()
    }
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    for name in &arguments.policy {
        let known = POLICIES.contains(&name.as_str()) || name == overhead::CELL;
        ensure!(known, "--policy {name}: there are {POLICIES:?} and {:?}", overhead::CELL);
    }
    let workloads = arguments.workloads()?;
    let header = lab_count::server::header()?;
    let profile = by_name(header.profile_name())?;
    let second = (header.second_sets > 0).then_some((header.second_sets, header.second_ways));
    let counted = if second.is_some() { Counted::SecondLlc } else { Counted::Programs };
    let counted = counted(HALF.classes);
    print(&Line::Server(raw::Server {
        profile: profile.name.clone(),
        second_llc: second,
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
        numad: Numad::version(),
    }))?;
    let (mut cells, mut timers) = (Cells::printed(&arguments.cells)?, None);
    for workload in workloads {
        let policies = arguments.policies(workload);
        let variants: Vec<_> = policies.iter().flat_map(|policy| variants(&HALF, workload, policy)).collect();
        let name = |variant: &str| format!("{}, {variant}", workload.name);
        if variants.iter().all(|(variant, _)| cells.has(&name(variant))) {
            continue;
        }
        // Those of a workload are compared, and are of the same VMs.
        variants.iter().for_each(|(variant, _)| cells.forget(&name(variant)));
        let vms = if arguments.options.smoke { 1 } else { VMS.len() };
        let fresh = Fresh::start((&HALF, vms), counted, false, &mut timers)?;
        let (bench, line) = fresh.load(workload, &profile, arguments.options)?;
        print(&Line::Workload(line))?;
        for (variant, placement) in &variants {
            cells.measure(&name(variant), || {
                let cell = bench.cell(variant, *placement)?;
                let shown = format!("{} periods, repeated {}", cell.periods.len(), cell.repeated);
                Ok((Line::Cell(cell), shown))
            })?;
        }
    }
    cells.end()
}

/// All cells of a policy by name: one, or the candidates of `oracle`.
fn variants(layout: &Layout, workload: &Workload, policy: &str) -> Vec<(String, Option<&'static Placement>)> {
    let named = |placement: &'static Placement| (format!("oracle:{}", placement.name), Some(placement));
    match policy {
        "oracle" => layout.oracles(workload).iter().map(named).collect(),
        _ => vec![(policy.to_owned(), None)],
    }
}

/// Time of the server by modelled time, of all vCPUs together, under this load: the median, as the machine may stop the server
/// in between.
fn dilation(vms: &Vms, programs: &Programs, clock_ghz: f64, times: usize) -> Result<f64> {
    let mut found = Vec::new();
    for _ in 0..times {
        let before = vms.read(programs, &[])?;
        thread::sleep(Duration::from_secs_f64(DILATION_S));
        let period = vms.read(programs, &[])?.since(&before);
        let dilation = dilation_of(std::slice::from_ref(&period), clock_ghz);
        found.push(dilation.with_context(|| format!("the vCPUs did nothing in {DILATION_S} s"))?);
    }
    median(found).context("no dilation was measured")
}

/// That in some periods, if vCPUs did something.
fn dilation_of(periods: &[Period], clock_ghz: f64) -> Option<f64> {
    let vcpus = || periods.iter().flat_map(|period| period.vms.iter().flatten());
    let ran_ns: u64 = vcpus().map(|vcpu| vcpu.values.ran_ns).sum();
    let cycles: u64 = vcpus().map(|vcpu| vcpu.values.cycles).sum();
    (cycles > 0).then(|| ran_ns as f64 / (cycles as f64 / clock_ghz))
}

/// The periods of a cell, seconds of the server.
#[derive(Clone, Copy)]
struct Periods {
    /// Of vnumad's policy.
    policy_s: f64,
    /// That are measured.
    length_s: f64,
    warm_up: usize,
    measured: usize,
    /// By which vnumad's other periodic work is stretched.
    dilation: f64,
}

/// VMs that were just started.
///
/// Each workload has its own. AutoNUMA looks at the memory of a process less often the longer it has found nothing, and at
/// mappings that seem unused hardly at all. In VMs of which another workload's cells are over it moves nothing.
pub struct Fresh<'t> {
    vms: Vms,
    wakes: Wakes,
    timers: &'t Timers,
}

impl<'t> Fresh<'t> {
    /// Boots them. `timers` are those of the kernel as they were before the first time.
    pub fn start(
        (layout, vms): (&'static Layout, usize),
        counted: Counted,
        told: bool,
        timers: &'t mut Option<Timers>,
    ) -> Result<Self> {
        if let Some(timers) = timers {
            timers.stretch(1.0, 1.0)?;
        }
        eprintln!("starting VMs: {vms}");
        let vms = Vms::start(layout, counted, told, vms)?;
        let wakes = Wakes::watch(vms.tids())?;
        host::divide(layout)?;
        let timers = match timers {
            Some(timers) => timers,
            None => timers.insert(Timers::read(layout)?),
        };
        Ok(Self { vms, wakes, timers })
    }

    /// Starts a workload in them.
    pub fn load(
        &self,
        workload: &'static Workload,
        profile: &CounterProfile,
        options: Options,
    ) -> Result<(Bench<'_>, raw::Workload)> {
        Bench::load((&self.vms, &self.wakes), workload, self.timers, profile, options)
    }
}

/// A workload that runs.
pub struct Bench<'a> {
    vms: &'a Vms,
    wakes: &'a Wakes,
    programs: Programs,
    workload: &'a Workload,
    dilation: f64,
    period_s: f64,
    factor: f64,
    clock_ghz: f64,
    options: Options,
    /// Share of the time that a vCPU of vm1 and vm2 runs under `linux`, mean.
    under_linux: std::cell::Cell<Option<f64>>,
}

impl<'a> Bench<'a> {
    /// Starts a workload, measures the dilation under it and stretches all timers by it.
    fn load(
        (vms, wakes): (&'a Vms, &'a Wakes),
        workload: &'a Workload,
        timers: &Timers,
        profile: &CounterProfile,
        options: Options,
    ) -> Result<(Self, raw::Workload)> {
        eprintln!("{}: starting its programs", workload.name);
        host::balance(false)?;
        let mut programs = vms.load(workload)?;
        vms.place(&programs, &vms.layout.start)?;
        vms.release(None)?;
        let times = if options.smoke { 1 } else { DILATIONS };
        let dilation = dilation(vms, &programs, profile.clock_ghz, times)?;
        let longest_s = if options.smoke { SMOKE.2 } else { PERIODS_S.1 };
        let period_s = (PERIOD_S * dilation).clamp(PERIODS_S.0, longest_s);
        let factor = period_s / DEFAULT_PERIOD_S;
        let mut stretched = timers.stretch(factor, dilation)?;
        stretched.append(&mut host::stretched(period_s, factor, dilation));
        if let Some((told, vm)) = vms.told() {
            told.stretch(vm, factor)?;
        }
        vms.load_sleepers(&mut programs, SLEEP_S * dilation)?;
        eprintln!("{}: dilation {dilation:.1}, periods of {period_s:.1} s", workload.name);
        let name = workload.name.into();
        let line = raw::Workload { name, dilation, period_s, factor, stretched };
        let clock_ghz = profile.clock_ghz;
        let under_linux = std::cell::Cell::new(None);
        let bench = Self {
            vms,
            wakes,
            programs,
            workload,
            dilation,
            period_s,
            factor,
            clock_ghz,
            options,
            under_linux,
        };
        Ok((bench, line))
    }

    /// A cell by the name of its policy, such as `oracle:at-home`.
    pub fn variant(&self, policy: &str) -> Result<Cell> {
        let Some(name) = policy.strip_prefix("oracle:") else { return self.cell(policy, None) };
        let mut placements = self.vms.layout.oracles(self.workload).iter();
        let placement = placements.find(|placement| placement.name == name);
        self.cell(policy, Some(placement.with_context(|| format!("there is no placement {name}"))?))
    }

    /// The dilation where `vprobe` leaves the vCPUs: an access to local memory takes less modelled time, and as much of the
    /// server's.
    fn dilation_at_home(&self) -> Result<f64> {
        host::balance(false)?;
        self.vms.place(&self.programs, &AT_HOME)?;
        self.vms.release(Some(&AT_HOME))?;
        dilation(self.vms, &self.programs, self.clock_ghz, DILATIONS)
    }

    /// The policy of a variant, and the periods of its cell on this server.
    fn periods<'p>(&self, name: &'p str, fixed: bool) -> Result<(&'p str, Periods)> {
        let all = self.options.periods;
        let measured = if fixed { MEASURED_STATIC.min(all) } else { all };
        let (length_s, dilation) = (self.period_s, self.dilation);
        let usual = match self.options.smoke {
            true => Periods { policy_s: length_s, length_s, warm_up: 1, measured: 1, dilation },
            false => Periods { policy_s: length_s, length_s, warm_up: WARM_UP, measured, dilation },
        };
        let of = |modelled_s: f64, dilation: f64| {
            let (period_s, (least, most)) = (modelled_s * dilation, PERIODS_S);
            let within = (least..=most).contains(&period_s);
            ensure!(within, "{name}: {period_s} s is not within {least} to {most} s");
            Ok(period_s)
        };
        if name == overhead::CELL {
            let (policy, modelled_s) = overhead::PERIOD;
            let dilation = self.dilation_at_home()?;
            let (length_s, warm_up, measured) =
                (of(modelled_s, dilation)?, overhead::WARM_UP, overhead::MEASURED);
            eprintln!("{name}: dilation {dilation:.1} at home, periods of {length_s:.1} s");
            return Ok((policy, Periods { policy_s: length_s, length_s, warm_up, measured, dilation }));
        }
        match full::committed::with_period(name) {
            Some((policy, modelled_s)) => {
                Ok((policy, Periods { policy_s: of(modelled_s, dilation)?, ..usual }))
            }
            None => Ok((name, usual)),
        }
    }

    /// Measures a cell, again if the machine stopped the server too often: then periods are too long, and limits are reached. Also if vCPUs
    /// had so little CPU time that it would not count, and not much less: that may be chance.
    pub fn cell(&self, policy: &str, fixed: Option<&Placement>) -> Result<Cell> {
        let name = policy;
        let (policy, mut lengths) = self.periods(name, fixed.is_some())?;
        let most = if self.options.smoke { 0 } else { REPEATS };
        for repeated in 0.. {
            let cell = self.once((name, policy), lengths, fixed)?;
            let late = cell.measured().iter().any(|period| self.is_torn(period, lengths));
            let problem = match late {
                true => Some("interrupted by the machine".to_owned()),
                false if name == overhead::CELL => self.other_dilation(&cell, &mut lengths),
                false if repeated < REPEATS_FOR_TIME.0 => self.lacks_cpu_time(name, &cell),
                false => None,
            };
            match problem {
                Some(problem) if repeated < most => eprintln!("{}: {name}: {problem}", self.workload.name),
                _ => return Ok(Cell { repeated, ..cell }),
            }
        }
        bail!("{name}: repeated for ever")
    }

    /// The machine stopped the server in this period.
    fn is_torn(&self, period: &Period, lengths: Periods) -> bool {
        let cpus = self.vms.layout.all_vm_cpus().len();
        period.elapsed_s > lengths.length_s * LATE || period.used_share(cpus) > USED
    }

    /// The machine became slower or faster than it was when the dilation was measured, so that periods were not as long as they are to
    /// be. They become so.
    fn other_dilation(&self, cell: &Cell, lengths: &mut Periods) -> Option<String> {
        let found = dilation_of(cell.measured(), self.clock_ghz)?;
        let factor = found / lengths.dilation;
        let problem = format!("periods of {:.2} s of modelled time", overhead::PERIOD.1 / factor);
        let (length_s, (least, most)) = (overhead::PERIOD.1 * found, PERIODS_S);
        let wrong = (factor - 1.0).abs() > overhead::TOLERANCE && (least..=most).contains(&length_s);
        *lengths = Periods { policy_s: length_s, length_s, dilation: found, ..*lengths };
        wrong.then_some(problem)
    }

    /// What is wrong with the CPU time of `vm1` or `vm2`, if anything.
    fn lacks_cpu_time(&self, name: &str, cell: &Cell) -> Option<String> {
        let shares = [0, 1].map(|vm| cell.running_share(vm));
        let mean = shares.iter().sum::<f64>() / 2.0;
        if ["linux", "linux-nobalance"].contains(&name) {
            self.under_linux.set(Some(self.under_linux.get().map_or(mean, |other| mean.min(other))));
            return None;
        }
        let least = shares.into_iter().reduce(f64::min)? / self.under_linux.get()?;
        let may_count = least >= REPEATS_FOR_TIME.1 && least < goals::CPU_SHARE;
        may_count.then(|| format!("{:.1} % of the CPU time under linux", least * 100.0))
    }

    /// Counts all threads of programs, which run on the server's CPUs.
    fn count<'p>(&self, programs: impl Iterator<Item = &'p Process>) -> Result<Vec<(String, Thread)>> {
        let mut counted = Vec::new();
        for Process(child) in programs {
            let threads = threads_of(child.id() as i32)?;
            threads.iter().try_for_each(|(_, thread)| host::affine(thread.tid, self.vms.layout.host_cpus))?;
            counted.extend(threads);
        }
        Ok(counted)
    }

    fn once(
        &self,
        (name, policy): (&str, &str),
        lengths: Periods,
        fixed: Option<&Placement>,
    ) -> Result<Cell> {
        host::balance(false)?;
        let placement = fixed.unwrap_or(&self.vms.layout.start);
        self.vms.place(&self.programs, placement)?;
        let by_vnumad = fixed.is_none() && !["linux", "linux-nobalance", "numad"].contains(&policy);
        let sched_ext = by_vnumad && self.options.sched_ext;
        // Dropped after vnumad, which gives the vCPUs back.
        let scheduler = sched_ext.then(|| host::start_scheduler(lengths.dilation)).transpose()?;
        let told = self.vms.told().is_some();
        let start = || host::start_vnumad(&self.vms.names(), lengths.policy_s, lengths.dilation);
        let daemon = (by_vnumad || told).then(start).transpose()?;
        if told {
            self.vms.tell(&self.programs, placement)?;
        }
        let daemon = daemon.filter(|_| by_vnumad);
        let counted = self.count(scheduler.iter().chain(&daemon))?;
        self.vms.release(fixed)?;
        let before = host::balanced()?;
        let mut numad = None;
        match policy {
            "linux" => host::balance(true)?,
            "numad" => numad = Some(Numad::start(self.factor)?),
            _ if by_vnumad => self.set_policy(policy)?,
            _ => {}
        }
        let timed = name == overhead::CELL;
        host::time_programs(timed)?;
        let (periods, left_out) = self.measure(lengths, &counted, timed)?;
        host::time_programs(false)?;
        let balanced = host::balanced()?.since(before);
        if policy == "linux" {
            let host::Balanced { scanned, seen, moved } = balanced;
            let name = self.workload.name;
            eprintln!(
                "{name}: AutoNUMA: {scanned} pages unmapped, {seen} accesses seen, {moved} pages moved"
            );
        }
        let (vm_steps, because_of) =
            if by_vnumad { (self.steps()?, host::because_of()?) } else { Default::default() };
        let means = by_vnumad.then(means).transpose()?;
        let expected = if sched_ext { "sched_ext" } else { "affinity" };
        ensure!(means.as_ref().is_none_or(|means| means == expected), "places were set by {means:?}");
        host::balance(false)?;
        drop(numad);
        if by_vnumad {
            self.set_policy("off")?;
        }
        drop(daemon);
        drop(scheduler);
        Ok(Cell {
            workload: self.workload.name.into(),
            policy: name.into(),
            warm_up: lengths.warm_up,
            periods,
            left_out,
            pages_scanned: balanced.scanned,
            pages_moved: balanced.moved,
            steps: vm_steps.iter().sum(),
            vm_steps,
            because_of,
            means,
            repeated: 0,
        })
    }

    fn set_policy(&self, policy: &str) -> Result<()> {
        let set = |name| vnumactl(&["policy", name, "--set", policy]).map(drop);
        self.vms.names().into_iter().try_for_each(set)
    }

    /// Steps that policies have made in each VM.
    fn steps(&self) -> Result<Vec<u64>> {
        let of = |name| {
            let shown = vnumactl(&["policy", name])?;
            let vcpus = shown["vcpus"].as_array().context("vnumactl policy: no vcpus")?;
            Ok(vcpus.iter().filter_map(|vcpu| vcpu["moves"].as_u64()).sum())
        };
        self.vms.names().into_iter().map(of).collect()
    }

    /// All periods of a cell, and how many were left out: those that are torn, and the one after each, as vCPUs may have been read
    /// at different times where both meet. To measure a period once more takes less than the whole cell, and AutoNUMA scans in a
    /// cell that is repeated as slowly as it did at the end of the first one. `timed`: BPF programs are.
    fn measure(
        &self,
        lengths: Periods,
        daemon: &[(String, Thread)],
        timed: bool,
    ) -> Result<(Vec<Period>, usize)> {
        self.wakes.take()?;
        let programs = || timed.then(host::programs);
        let mut before = (self.vms.read(&self.programs, daemon)?, programs());
        let (mut periods, mut torn_ones) = (Vec::new(), Torn::default());
        let mut end = Instant::now();
        while periods.len() < lengths.warm_up + lengths.measured {
            end += Duration::from_secs_f64(lengths.length_s);
            thread::sleep(end.saturating_duration_since(Instant::now()));
            let now = (self.vms.read(&self.programs, daemon)?, programs());
            let (programs_ns, program_runs) = host::programs_since(now.1, before.1).unzip();
            let wakes_us = self.wakes.take()?;
            let period = Period { wakes_us, programs_ns, program_runs, ..now.0.since(&before.0) };
            before = now;
            let torn = self.is_torn(&period, lengths);
            if torn {
                end = Instant::now();
            }
            if torn_ones.keeps(torn, periods.len() < lengths.warm_up) {
                periods.push(period);
            }
        }
        Ok((periods, torn_ones.left_out))
    }
}

/// Which periods of a cell are left out.
#[derive(Default)]
struct Torn {
    left_out: usize,
    /// The last one was torn.
    last: bool,
}

impl Torn {
    /// Is the next period one of the cell's?
    fn keeps(&mut self, torn: bool, warm_up: bool) -> bool {
        let suspect = std::mem::replace(&mut self.last, torn) || torn;
        let leaves_out = suspect && !warm_up && self.left_out < LEFT_OUT;
        self.left_out += usize::from(leaves_out);
        !leaves_out
    }
}

/// By what vnumad sets places.
fn means() -> Result<String> {
    let shown = vnumactl(&["daemon"])?;
    let mechanism = shown["places"]["mechanism"].as_str();
    Ok(mechanism.context("vnumactl daemon: no places.mechanism")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_period_and_the_next_one_are_left_out() {
        let kept = |torn: &[usize], warm_up: usize| -> Vec<usize> {
            let mut state = Torn::default();
            (0..20).filter(|number| state.keeps(torn.contains(number), *number < warm_up)).collect()
        };
        let without = |left_out: &[usize]| (0..20).filter(|n| !left_out.contains(n)).collect::<Vec<_>>();
        assert_eq!(kept(&[], 2), without(&[]));
        assert_eq!(kept(&[5, 9, 10], 2), without(&[5, 6, 9, 10, 11]));
        assert_eq!(kept(&[0], 2), without(&[]), "periods to warm up are not judged");
        assert_eq!(kept(&[1], 2), without(&[2]), "the first that is measured comes after a torn one");
        assert_eq!(kept(&[2, 4, 6, 8, 10], 2), without(&[2, 3, 4, 5, 6, 7]), "not more than {LEFT_OUT}");
    }
}
