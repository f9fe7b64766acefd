//! From what was measured to rows, and from rows to goals. Everything is *modelled*: cycles of a named profile.

mod overhead;

use crate::{
    committed::{self, LEAST_WAKE_UPS, LOADED, Workload, goals},
    raw::{self, Cell, Line, Period, Vcpu},
};
use anyhow::{Context, Result, ensure};
use overhead::Overhead;
pub use overhead::programs_share;
use serde::Serialize;
use serde_json::json;
use std::{fmt, path::Path};
use vnuma_bench_common::{
    goals::Goal,
    judging::{profiles, profiles_of_second},
    report::{Bench, Files},
    stats::Samples,
};
use vnuma_lab_pricing::{CounterProfile, Counts, price};

/// Periods at the end that a policy's final state is taken from.
const FINAL: usize = 3;
/// From when on all periods are within this of the final state, a policy has converged.
const CONVERGED: f64 = 0.05;
/// A period that took so much longer than another one was interrupted.
const LATE: f64 = 1.5;

/// A workload under a policy, as a profile prices it. Figures are vm1's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// Whose prices.
    pub profile: String,
    /// Which load.
    pub workload: String,
    /// Does it use memory?
    pub memory_intensive: bool,
    /// Which policy.
    pub policy: String,
    /// Of `oracle`: the placement that was best.
    pub placement: Option<String>,
    /// Modelled cycles of an operation, mean of the vCPUs; of `mix` the mean of what each takes by what it takes under `linux`.
    pub cycles_per_op: f64,
    /// The same of vm2.
    pub vm2_cycles_per_op: f64,
    /// Share of the accesses to memory that leave the node.
    pub remote_share: Option<f64>,
    /// Accesses that leave the node, of a thousand operations.
    pub remote_accesses: f64,
    /// Misses of the last-level cache, of a thousand operations.
    pub llc_misses: f64,
    /// Times that a vCPU went to another CPU, warm-up included.
    pub migrations: u64,
    /// CPU time of a vCPU, by the time that passed.
    pub cpu_share: f64,
    /// The same of vm2.
    pub vm2_cpu_share: f64,
    /// Time that a vCPU waited, by the time that passed.
    pub wait_share: f64,
    /// Periods, warm-up included, until the costs stay within 5 % of those of the last three.
    pub converge_periods: usize,
    /// Modelled cycles of vnumad by those of all vCPUs; none if it does not run.
    pub overhead_share: Option<f64>,
    /// Modelled cycles of kernels, the guests' and the server's, on threads of vm1's and vm2's vCPUs, in a second of their CPU
    /// time, under the server's profile. What kernels do regularly goes by the server's clock, and so it is not by cycles.
    pub kernel_cycles_per_s: Option<f64>,
    /// Times that a vCPU of any VM was woken.
    pub wake_ups: usize,
    /// What such a vCPU waits for a CPU, 99th percentile, by the same under `linux`.
    pub wake_p99_by_linux: Option<f64>,
    /// Why there is none.
    pub no_wake_p99: Option<String>,
    /// By what vnumad set places, `affinity` or `sched_ext`; none if it does not run.
    pub means: Option<String>,
    /// Periods that are not judged.
    pub warm_up_periods: usize,
    /// Periods that are.
    pub measured_periods: usize,
    /// Length of a measured period in modelled time, seconds: its mean.
    pub modelled_period_s: f64,
    /// Share of the time that CPUs of VMs were idle.
    pub idle_share: f64,
    /// Pages of which AutoNUMA looked for the next user.
    pub pages_scanned: u64,
    /// Pages that the kernel's balancing moved.
    pub pages_moved: u64,
    /// Steps of vnumad's policy.
    pub steps: u64,
    /// Periods that were left out, as the machine had stopped the server.
    pub left_out_periods: usize,
    /// Times that it was repeated.
    pub repeated: u32,
    /// Why it does not count.
    pub does_not_count: Option<String>,
}

/// What it costs that vnumad observes, and does nothing else.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observing {
    /// Under which load.
    pub workload: String,
    /// Compared with which policy.
    pub against: &'static str,
    /// Modelled cycles of vnumad's threads by those of all vCPUs.
    pub vnumad: f64,
    /// What kernels take more of vm1's and vm2's cycles, as [`Row::kernel_cycles_per_s`].
    pub kernels: f64,
    /// What their programs take more for an operation.
    pub programs: f64,
}

impl fmt::Display for Observing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workload, against, .. } = self;
        let [vnumad, kernels, programs] = [(self.vnumad, 4), (self.kernels, 3), (self.programs, 2)]
            .map(|(share, digits)| percent(share, digits));
        write!(
            f,
            "{workload}: observe beside {against}: vnumad {vnumad}, kernels {kernels} more, programs {programs} more"
        )
    }
}

/// Everything that was read.
#[derive(Clone)]
pub struct Run {
    server: raw::Server,
    workloads: Vec<raw::Workload>,
    cells: Vec<Cell>,
}

/// Reads what was measured, and judges it.
pub fn run(files: &Files) -> Result<()> {
    let mut raw = files.read()?;
    let (mut server, mut workloads, mut cells) = (None, Vec::<raw::Workload>::new(), Vec::<Cell>::new());
    for line in std::mem::take(&mut raw.lines) {
        match line {
            Line::Server(found) => server = Some(found),
            // It begins anew.
            Line::Workload(workload) => {
                workloads.retain(|before| before.name != workload.name);
                cells.retain(|before| before.workload != workload.name);
                workloads.push(workload);
            }
            Line::Cell(cell) => cells.push(cell),
        }
    }
    let run = Run { server: server.context("the server said nothing")?, workloads, cells };
    // The server's own is known.
    profiles(&run.server.profile)?;
    files.judge(&run, &raw)
}

impl Bench for Run {
    type Row = Row;
    const SOURCE: &'static str = "modelled: the lab's counters, priced under the profile of each row";
    const MACHINE: &'static str = committed::SERVER;

    fn price(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        profiles(&self.server.profile)?.iter().for_each(|profile| rows.extend(self.rows(profile)));
        if let Some(llc) = self.server.second_llc {
            let (seen, all) = (self.by_second(), profiles_of_second(&self.server.profile, llc)?);
            all.iter().for_each(|profile| rows.extend(seen.rows(profile)));
        }
        ensure!(!rows.is_empty() || !self.overheads().is_empty(), "no cell was measured");
        Ok(rows)
    }

    fn figure(row: &Row) -> (String, f64) {
        ([&*row.workload, &row.policy, &row.profile].join(", "), row.cycles_per_op)
    }

    fn goals(&self, rows: &[Row]) -> Vec<Goal> {
        judge(rows).into_iter().chain(overhead::goal(&self.overheads(), rows)).collect()
    }

    fn more(&self, _: &[Row]) -> impl Serialize {
        json!({
            "server": self.server,
            "modelled_period_s": committed::PERIOD_S,
            "workloads": self.workloads,
            "observing": self.of_own(Run::observing),
            "overhead": self.overheads(),
        })
    }

    fn table(&self, rows: &[Row]) -> String {
        let observing = self.of_own(Run::observing);
        let lines = observing.iter().map(|found| format!("{found}\n"));
        let others = self.overheads();
        table(rows) + &lines.chain(others.iter().map(|found| format!("{found}\n"))).collect::<String>()
    }

    fn draw(&self, rows: &[Row], path: &Path) -> Result<()> {
        crate::picture::draw(rows, path)
    }
}

/// A figure as people read it.
fn shown(figure: f64, digits: usize) -> String {
    if figure.is_finite() { format!("{figure:.digits$}") } else { "none".to_owned() }
}

/// A share likewise.
fn percent(share: f64, digits: usize) -> String {
    if share.is_finite() { format!("{:.digits$} %", share * 100.0) } else { "none".to_owned() }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { f64::NAN }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    ratio(values.iter().sum(), values.len() as f64)
}

/// vCPUs of a VM in some periods.
fn vcpus(periods: &[Period], vm: usize, position: usize) -> impl Iterator<Item = &Vcpu> {
    periods.iter().filter_map(move |period| period.vms.get(vm)?.get(position))
}

fn counts(periods: &[Period], vm: usize, position: usize) -> Counts {
    vcpus(periods, vm, position).fold(Counts::default(), |sum, vcpu| sum.sum(&vcpu.values.user))
}

/// Modelled cycles per operation of each vCPU of a VM.
fn costs(profile: &CounterProfile, periods: &[Period], vm: usize) -> Vec<f64> {
    let count = periods.first().and_then(|period| period.vms.get(vm)).map_or(0, Vec::len);
    let cost = |position| {
        let operations: u64 = vcpus(periods, vm, position).map(|vcpu| vcpu.operations).sum();
        ratio(price(&counts(periods, vm, position), &profile.prices()).total, operations as f64)
    };
    (0..count).map(cost).collect()
}

impl Cell {
    pub fn measured(&self) -> &[Period] {
        self.periods.get(self.warm_up..).unwrap_or_default()
    }

    /// Share of the time that a vCPU of a VM runs, mean.
    pub fn running_share(&self, vm: usize) -> f64 {
        self.cpu_share(vm, |vcpu| vcpu.values.ran_ns)
    }

    fn cpu_share(&self, vm: usize, time: impl Fn(&Vcpu) -> u64) -> f64 {
        let elapsed: f64 = self.measured().iter().map(|period| period.elapsed_s).sum();
        let vcpus = || self.measured().iter().filter_map(|period| period.vms.get(vm)).flatten();
        let count = self.measured().first().and_then(|period| period.vms.get(vm)).map_or(0, Vec::len);
        ratio(vcpus().map(time).sum::<u64>() as f64 / 1e9 / count as f64, elapsed)
    }

    /// What vCPUs waited when they were woken, microseconds.
    fn wakes(&self) -> Samples {
        self.measured().iter().flat_map(|period| &period.wakes_us).map(|us| f64::from(*us)).collect()
    }

    /// The 99th percentile of that by the one under `linux`, or why there is none.
    fn wake_p99(&self, linux: Option<&Cell>) -> Result<f64, String> {
        let p99 = |cell: &Cell| {
            let wakes = cell.wakes();
            let count = wakes.count();
            let enough = wakes.percentile(99).filter(|_| count >= LEAST_WAKE_UPS);
            enough
                .ok_or_else(|| format!("{count} wake-ups under {}, fewer than {LEAST_WAKE_UPS}", cell.policy))
        };
        Ok(ratio(p99(self)?, p99(linux.ok_or("there is no linux row")?)?))
    }

    /// Modelled cycles of kernels and of all on the vCPU threads whose programs are counted, by their CPU time in seconds.
    fn cycles_per_s(&self) -> Option<(f64, f64)> {
        let vcpus = || self.measured().iter().flat_map(|period| period.vms.iter().take(LOADED)).flatten();
        let ran_s = vcpus().map(|vcpu| vcpu.values.ran_ns).sum::<u64>() as f64 / 1e9;
        let all: u64 = vcpus().map(|vcpu| vcpu.values.cycles).sum();
        let programs: Option<u64> = vcpus().map(|vcpu| vcpu.values.program_cycles).sum();
        programs.map(|programs| (ratio(all.saturating_sub(programs) as f64, ran_s), ratio(all as f64, ran_s)))
    }

    /// After how many periods the costs are those of the end.
    fn converge_periods(&self, profile: &CounterProfile) -> usize {
        let last = self.periods.len().saturating_sub(FINAL);
        let end = costs(profile, &self.periods[last..], 0);
        let of = |period: &Period| {
            mean(costs(profile, std::slice::from_ref(period), 0).iter().zip(&end).map(|(a, b)| a / b))
        };
        let differs = |period: &Period| (of(period) - 1.0).abs() > CONVERGED;
        self.periods.iter().rposition(differs).map_or(0, |at| at + 1)
    }

    /// As a profile prices it, beside the cells of Linux.
    pub fn row(&self, profile: &CounterProfile, by_linux: ByLinux<'_>) -> Row {
        let linux = by_linux.balanced;
        let wake_p99 = self.wake_p99(linux);
        let periods = self.measured();
        let workload = committed::workload(&self.workload);
        let (vm, all) = (|vm| score(profile, periods, linux, workload, vm), vec![0, 1, 2, 3]);
        let of = |&position: &usize| counts(periods, 0, position);
        let sum = all.iter().map(of).fold(Counts::default(), |sum, counts| sum.sum(&counts));
        let operations: u64 =
            all.iter().flat_map(|&position| vcpus(periods, 0, position)).map(|vcpu| vcpu.operations).sum();
        // The first class is the node itself.
        let lists = [&sum.dram_by_class, &sum.streamed_by_class];
        let local = lists.iter().filter_map(|list| list.first()).sum::<u64>() as f64;
        let remote = lists.iter().flat_map(|list| list.iter().skip(1)).sum::<u64>() as f64;
        let everybody =
            |period: &Period| period.vms.iter().flatten().map(|vcpu| vcpu.values.cycles).sum::<u64>();
        let cycles: u64 = periods.iter().map(everybody).sum();
        let of_daemon = |period: &Period| Some(period.daemon.as_ref()?.values().sum::<u64>());
        let daemon: Option<u64> = periods.iter().map(of_daemon).sum();
        let elapsed: f64 = periods.iter().map(|period| period.elapsed_s).sum();
        let ran: u64 = periods
            .iter()
            .flat_map(|period| period.vms.iter().flatten())
            .map(|vcpu| vcpu.values.ran_ns)
            .sum();
        let migrations = self.periods.iter().filter_map(|period| period.vms.first()).flatten();
        let mut row = Row {
            profile: profile.name.clone(),
            workload: self.workload.clone(),
            memory_intensive: workload.is_some_and(|workload| workload.memory_intensive),
            policy: self.policy.split(':').next().unwrap_or_default().to_owned(),
            placement: self.policy.split_once(':').map(|(_, placement)| placement.to_owned()),
            cycles_per_op: vm(0),
            vm2_cycles_per_op: vm(1),
            remote_share: (local + remote > 0.0).then(|| remote / (local + remote)),
            remote_accesses: ratio(remote * 1000.0, operations as f64),
            llc_misses: ratio(sum.llc_misses as f64 * 1000.0, operations as f64),
            migrations: migrations.map(|vcpu| vcpu.values.migrations).sum(),
            cpu_share: self.running_share(0),
            vm2_cpu_share: self.running_share(1),
            wait_share: self.cpu_share(0, |vcpu| vcpu.values.waited_ns),
            converge_periods: self.converge_periods(profile),
            overhead_share: daemon.map(|daemon| ratio(daemon as f64, cycles as f64)),
            kernel_cycles_per_s: self.cycles_per_s().map(|(kernels, _)| kernels),
            wake_ups: self.wakes().count(),
            no_wake_p99: wake_p99.as_ref().err().cloned(),
            wake_p99_by_linux: wake_p99.ok(),
            means: self.means.clone(),
            warm_up_periods: self.warm_up,
            measured_periods: periods.len(),
            // Modelled time goes on as fast as vCPUs make it: their cycles by the CPUs that they had.
            modelled_period_s: ratio(
                cycles as f64 / profile_clock(profile) * elapsed / (ran as f64 / 1e9),
                periods.len() as f64,
            ),
            idle_share: mean(periods.iter().map(|period| period.idle_share)),
            pages_scanned: self.pages_scanned,
            pages_moved: self.pages_moved,
            steps: self.steps,
            left_out_periods: self.left_out,
            repeated: self.repeated,
            does_not_count: None,
        };
        row.does_not_count = self.why_stopped().or_else(|| why_not(&row, by_linux));
        row
    }

    /// The machine stopped it for a while.
    fn why_stopped(&self) -> Option<String> {
        let lengths = self.measured().iter().map(|period| period.elapsed_s).collect::<Samples>();
        let [shortest, longest] = lengths.interval()?;
        (longest > shortest * LATE)
            .then(|| format!("the machine stopped it: a period took {longest:.1} s, others {shortest:.1} s"))
    }
}

/// The cells of a workload that others are compared with.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByLinux<'c> {
    /// `linux`.
    pub balanced: Option<&'c Cell>,
    /// `linux-nobalance`.
    pub unbalanced: Option<&'c Cell>,
}

impl ByLinux<'_> {
    /// The CPU time that a policy has to give to the first VMs: the lower of both. AutoNUMA keeps vCPUs waiting for pages that it
    /// moves, those of `vm3` as well, whose time others then have.
    pub fn running_share(&self, vms: usize) -> f64 {
        // All have the same load, and which of them has more is chance.
        let share = |cell: &Cell| mean((0..vms).map(|vm| cell.running_share(vm)));
        [self.balanced, self.unbalanced].into_iter().flatten().map(share).fold(f64::INFINITY, f64::min)
    }
}

/// Cycles of a second.
fn profile_clock(profile: &CounterProfile) -> f64 {
    profile.clock_ghz * 1e9
}

/// What is compared: cycles per operation, or for several kinds of programs the mean of what each takes by what it takes
/// under `linux`.
pub fn score(
    profile: &CounterProfile,
    periods: &[Period],
    linux: Option<&Cell>,
    workload: Option<&Workload>,
    vm: usize,
) -> f64 {
    let own = costs(profile, periods, vm);
    let same =
        workload.is_none_or(|workload| workload.programs.iter().all(|kind| *kind == workload.programs[0]));
    match linux.filter(|_| !same) {
        Some(linux) => mean(own.iter().zip(costs(profile, linux.measured(), vm)).map(|(own, of)| own / of)),
        None => mean(own.into_iter()),
    }
}

fn why_not(row: &Row, by_linux: ByLinux<'_>) -> Option<String> {
    let Some(linux) = by_linux.balanced else {
        return Some("there is no linux row to compare its CPU time with".to_owned());
    };
    // A small setup may have one VM only.
    let vms = linux.periods.first().map_or(0, |period| period.vms.len()).clamp(1, 2);
    if row.policy == "linux" {
        // That is what the others' shares are compared with. It proves nothing if AutoNUMA slept.
        let least = goals::SCANNED;
        let slept = row.memory_intensive && row.pages_scanned < least;
        return slept.then(|| {
            format!("AutoNUMA looked at {} pages, less than the {least} that vm1 has", row.pages_scanned)
        });
    }
    let under_linux = by_linux.running_share(vms);
    for (vm, found) in [row.cpu_share, row.vm2_cpu_share].into_iter().enumerate().take(vms) {
        let (share, vm) = (ratio(found, under_linux), vm + 1);
        if share.is_nan() || share < goals::CPU_SHARE {
            let share = percent(share, 1);
            return Some(format!("vm{vm} had {share} of the CPU time that vm1 and vm2 have under linux"));
        }
    }
    let idle = row.idle_share > goals::IDLE && row.wait_share > goals::IDLE;
    idle.then(|| format!("CPUs were idle for {:.1} % of the time while vCPUs waited", row.idle_share * 100.0))
}

impl Run {
    /// Under the server's own profile.
    fn of_own<T>(&self, of: impl Fn(&Self, &CounterProfile) -> Vec<T>) -> Vec<T> {
        let own = profiles(&self.server.profile).unwrap_or_default();
        own.first().map(|own| of(self, own)).unwrap_or_default()
    }

    fn overheads(&self) -> Vec<Overhead> {
        self.of_own(Self::overhead)
    }

    fn cell(&self, workload: &str, policy: &str) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.workload == workload && cell.policy == policy)
    }

    fn by_linux(&self, workload: &str) -> ByLinux<'_> {
        ByLinux { balanced: self.cell(workload, "linux"), unbalanced: self.cell(workload, "linux-nobalance") }
    }

    /// The same run with the second last-level cache in place of the first.
    fn by_second(&self) -> Self {
        let mut seen = self.clone();
        let periods = seen.cells.iter_mut().flat_map(|cell| &mut cell.periods);
        for vcpu in periods.flat_map(|period| &mut period.vms).flatten() {
            // Only vCPUs with loads are counted.
            if let Some(counts) = vcpu.values.user.by_second() {
                vcpu.values.user = counts;
            }
        }
        seen
    }

    /// `observe` beside both of Linux's.
    fn observing(&self, own: &CounterProfile) -> Vec<Observing> {
        let mut all = Vec::new();
        for observe in self.cells.iter().filter(|cell| cell.policy == "observe") {
            for against in ["linux", "linux-nobalance"] {
                let Some(other) = self.cell(&observe.workload, against) else { continue };
                let linux = self.by_linux(&observe.workload);
                let (row, beside) = (observe.row(own, linux), other.row(own, linux));
                let kernels = observe.cycles_per_s().zip(other.cycles_per_s());
                all.push(Observing {
                    workload: observe.workload.clone(),
                    against,
                    vnumad: row.overhead_share.unwrap_or(f64::NAN),
                    kernels: kernels.map_or(f64::NAN, |((now, _), (before, all))| (now - before) / all),
                    programs: row.cycles_per_op / beside.cycles_per_op - 1.0,
                });
            }
        }
        all
    }

    /// All rows of a profile; of the candidates of `oracle` the best.
    fn rows(&self, profile: &CounterProfile) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        for cell in self.cells.iter().filter(|cell| cell.policy != committed::overhead::CELL) {
            let row = cell.row(profile, self.by_linux(&cell.workload));
            let before =
                rows.iter_mut().find(|known| known.workload == row.workload && known.policy == row.policy);
            let key = |row: &Row| (row.does_not_count.is_some(), row.cycles_per_op);
            match before {
                Some(known) if key(&row) < key(known) => *known = row,
                Some(_) => {}
                None => rows.push(row),
            }
        }
        rows
    }
}

/// Rows of a profile and workload.
struct Group<'a>(Vec<&'a Row>);

impl Group<'_> {
    fn row(&self, policy: &str) -> Option<&Row> {
        self.0.iter().find(|row| row.policy == policy).copied()
    }

    /// Only if it counts.
    fn cost(&self, policy: &str) -> Option<f64> {
        self.row(policy).filter(|row| row.does_not_count.is_none()).map(|row| row.cycles_per_op)
    }

    fn name(&self) -> String {
        self.0.first().map_or_else(String::new, |row| format!("{} under {}", row.workload, row.profile))
    }

    /// `vprobe` beside every peer.
    fn peers(&self, vprobe: f64) -> Goal {
        let peers = self.0.iter().filter(|row| !["vprobe", "oracle"].contains(&row.policy.as_str()));
        let behind = peers.filter_map(|row| Some((row, vprobe / self.cost(&row.policy)? - 1.0)));
        let worst = behind.max_by(|a, b| a.1.total_cmp(&b.1));
        Goal {
            goal: format!("{}: at most {:.0} % behind any peer", self.name(), goals::BEHIND_A_PEER * 100.0),
            found: worst.map_or_else(
                || "no peer counts".to_owned(),
                |(row, behind)| match behind > 0.0 {
                    true => format!("{:.2} % behind {}", behind * 100.0, row.policy),
                    false => format!("{:.2} % ahead of {}, the best", -behind * 100.0, row.policy),
                },
            ),
            met: worst.is_some_and(|(_, behind)| behind <= goals::BEHIND_A_PEER),
        }
    }

    fn intensive(&self) -> bool {
        self.0.iter().all(|row| row.memory_intensive)
    }

    /// The better one of Linux's rows that count.
    fn linux(&self) -> Option<f64> {
        [self.cost("linux"), self.cost("linux-nobalance")].into_iter().flatten().reduce(f64::min)
    }

    /// The gap to `oracle`, where there is one.
    fn gap(&self, vprobe: f64) -> Option<Goal> {
        let (Some(linux), Some(oracle)) = (self.linux(), self.cost("oracle")) else {
            return self.intensive().then(|| self.not_judged("the gap between Linux and the oracle"));
        };
        let recovered = (linux - vprobe) / (linux - oracle);
        (linux / oracle - 1.0 > goals::GAP).then(|| Goal {
            goal: format!(
                "{}: at least {:.0} % of the gap between Linux and the oracle is recovered",
                self.name(),
                goals::RECOVERED * 100.0
            ),
            found: format!("{:.1} % of {:.1} %", recovered * 100.0, (linux / oracle - 1.0) * 100.0),
            met: recovered >= goals::RECOVERED,
        })
    }

    fn without_memory(&self, vprobe: f64) -> Option<Goal> {
        if self.intensive() {
            return None;
        }
        let Some(linux) = self.linux() else { return Some(self.not_judged("the cost beside Linux")) };
        Some(Goal {
            goal: format!("{}: at most {:.0} % behind Linux", self.name(), goals::BEHIND_LINUX * 100.0),
            found: format!("{:+.2} %", (vprobe / linux - 1.0) * 100.0),
            met: vprobe / linux - 1.0 <= goals::BEHIND_LINUX,
        })
    }

    /// A goal that cannot be judged is not met.
    fn not_judged(&self, what: &str) -> Goal {
        let found = "neither row of Linux counts, or that of the oracle does not".to_owned();
        Goal { goal: format!("{}: {what} is judged", self.name()), found, met: false }
    }
}

/// All goals but that of [`overhead`].
pub fn judge(rows: &[Row]) -> Vec<Goal> {
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for row in rows {
        let key = (row.profile.as_str(), row.workload.as_str());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let (mut all, mut ahead) = (Vec::new(), None::<(f64, String)>);
    for (profile, workload) in keys {
        let group =
            Group(rows.iter().filter(|row| row.profile == profile && row.workload == workload).collect());
        let Some(vprobe) = group.cost("vprobe") else {
            let why = group.row("vprobe").and_then(|row| row.does_not_count.clone());
            let found = why.unwrap_or_else(|| "it is missing".to_owned());
            all.push(Goal { goal: format!("{}: the row of vprobe counts", group.name()), found, met: false });
            continue;
        };
        all.push(group.peers(vprobe));
        all.extend(group.gap(vprobe));
        all.extend(group.without_memory(vprobe));
        if let Some(credit) = group.cost("credit") {
            let found = credit / vprobe - 1.0;
            if ahead.as_ref().is_none_or(|(best, _)| found > *best) {
                ahead = Some((found, group.name()));
            }
        }
    }
    // Of a run without loads that use memory nothing can be said.
    if !rows.iter().any(|row| row.memory_intensive) {
        return all;
    }
    let found = |(best, where_): &(f64, String)| {
        let (more, less) = (percent(*best, 1), percent(best / (1.0 + best), 1));
        format!("{more} more cycles under credit, or {less} less under vprobe, {where_}")
    };
    all.push(Goal {
        goal: format!("at best at least {:.1} % ahead of credit", goals::AHEAD_OF_CREDIT * 100.0),
        found: ahead.as_ref().map_or_else(|| "no row of credit counts".to_owned(), found),
        met: ahead.is_some_and(|(best, _)| best >= goals::AHEAD_OF_CREDIT),
    });
    all
}

/// Rows for people.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<18}{:<9}{:<16}{:>10}{:>10}{:>8}{:>13}{:>7}{:>7}{:>7}{:>10}{:>9}{:>10}\n",
        "profile",
        "workload",
        "policy",
        "cycles/op",
        "vm2",
        "remote",
        "misses/1000",
        "migr",
        "cpu",
        "wait",
        "converge",
        "wake p99",
        "overhead"
    );
    let known = |value: Option<f64>| value.unwrap_or(f64::NAN);
    for row in rows {
        let placement = row.placement.as_ref().map_or_else(String::new, |name| format!(" {name}"));
        let why =
            row.does_not_count.as_ref().map_or_else(String::new, |why| format!("  does not count: {why}"));
        text += &format!(
            "{:<18}{:<9}{:<16}{:>10}{:>10}{:>8}{:>13}{:>7}{:>7}{:>7}{:>10}{:>9}{:>10}{placement}{why}\n",
            row.profile,
            row.workload,
            if row.means.as_deref() == Some("sched_ext") {
                format!("{}, scx", row.policy)
            } else {
                row.policy.clone()
            },
            shown(row.cycles_per_op, 3),
            shown(row.vm2_cycles_per_op, 3),
            percent(known(row.remote_share), 1),
            shown(row.llc_misses, 1),
            row.migrations,
            percent(row.cpu_share, 0),
            percent(row.wait_share, 0),
            row.converge_periods,
            shown(known(row.wake_p99_by_linux), 2),
            percent(known(row.overhead_share), 4),
        );
    }
    text
}

#[cfg(test)]
mod tests;
