//! On the lab server: every workload under every policy, in one VM, which is attached when those without vnuma are measured.

use crate::{
    committed::{
        By, CLASSES, Cell as Wanted, HOST_CPUS, JUDGED_RATE, Policy, REDUCED_RATES, SETTLE_S, Workload,
        cells, interval_s, window_s,
    },
    mover::Mover,
    raw::{self, Cell, Change, Line, Sample},
    vm::Machine,
};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use std::{
    fs, thread,
    time::{Duration, Instant},
};
use vnuma_abi_lab_counters::Header;
use vnuma_bench_common::{
    cells::{Cells, Options, print},
    host::affine,
    report::Form,
    talk::Talk,
    threads::{Counted, Values},
};
use vnuma_lab_pricing::{CounterProfile, by_name};

/// Time between two samples.
const SAMPLE: Duration = Duration::from_secs(1);
/// Time between two looks where vCPUs are that a balancer moves.
const LOOK: Duration = Duration::from_millis(100);

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these workloads
    #[arg(long)]
    workload: Vec<Workload>,
    /// Only these policies
    #[arg(long)]
    policy: Vec<Policy>,
    /// Only so many changes a minute, for a VM of 16 vCPUs
    #[arg(long)]
    changes: Vec<u32>,
    /// Only changes that come about like this
    #[arg(long)]
    by: Vec<By>,
    /// Only with the guest's AutoNUMA like this
    #[arg(long, value_name = "SWITCH")]
    autonuma: Vec<Switch>,
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    options: Options,
}

/// Of the guest's AutoNUMA.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let wanted = wanted(arguments);
    ensure!(!wanted.is_empty(), "there is no such cell");
    let header = lab_count::server::header()?;
    let profile = by_name(header.profile_name())?;
    affine(0, HOST_CPUS)?;
    let mut machines = Machines::new(&header, &profile, arguments.form.smoke)?;
    let mut cells = Cells::printed(&arguments.options)?;
    for one in wanted {
        cells.measure(&name_of(one), || {
            let cell = machines.cell(one)?;
            let shown = summary(&cell, profile.clock_ghz);
            Ok((Line::Cell(Cell { commit: arguments.options.commit.clone(), ..cell }), shown))
        })?;
    }
    cells.end()
}

fn name_of(cell: Wanted) -> String {
    let without = if cell.autonuma { "" } else { ", AutoNUMA off" };
    let Wanted { workload, policy, rate, by, take, .. } = cell;
    let again = if take == 0 { String::new() } else { format!(", take {}", take + 1) };
    let (workload, policy, by) = (workload.name(), policy.name(), by.name());
    format!("{workload}, {policy}, {rate} changes a minute by {by}{without}{again}")
}

/// The VM of now, which is that of all policies that are no black boxes, and of one state of the guest's AutoNUMA.
struct Machines {
    counted: Counted,
    /// Only to see that it works.
    smoke: bool,
    now: Option<(Machine, Policy)>,
    /// What is printed once there is a VM to ask.
    server: Option<raw::Server>,
}

impl Machines {
    fn new(header: &Header, profile: &CounterProfile, smoke: bool) -> Result<Self> {
        let second_llc = (header.second_sets > 0).then_some((header.second_sets, header.second_ways));
        let counted = if second_llc.is_some() { Counted::SecondLlc } else { Counted::Programs };
        let server = raw::Server {
            profile: profile.name.clone(),
            second_llc,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            guest_kernel: String::new(),
            java: String::new(),
        };
        Ok(Self { counted: counted(CLASSES), smoke, now: None, server: Some(server) })
    }

    /// Measures a cell. One that fails gets another VM when it is tried again, as whatever made it fail may still be there.
    fn cell(&mut self, one: Wanted) -> Result<Cell> {
        let length = Length::of(one, self.smoke);
        let machine = self.of(one.policy, one.autonuma)?;
        let measured = cell(machine, one, length);
        if measured.is_err() {
            if let Some(console) = machine.console_if_ended() {
                eprintln!("the VM has ended; the end of its console:\n{console}");
            }
            self.now = None;
        }
        measured
    }

    /// The one of a policy. That of a black box has nothing in its memory yet. The guest's AutoNUMA is not switched later: its kernel
    /// rewrites its scheduler's code then, in the middle of which an emulated CPU can die (lab/README.md), as two VMs presumably did.
    fn of(&mut self, policy: Policy, autonuma: bool) -> Result<&mut Machine> {
        let is_other = |(now, of): &(Machine, Policy)| {
            of.is_black_box() || now.autonuma != autonuma || (now.is_attached() && !policy.is_attached())
        };
        if policy.is_black_box() || self.now.as_ref().is_some_and(is_other) {
            // It ends before another one of its name starts.
            self.now = None;
        }
        if self.now.is_none() {
            eprintln!("starting the VM");
            let machine = Machine::start(policy, autonuma, self.counted)?;
            let java = machine.unpack_java().unwrap_or_else(|error| format!("{error:#}"));
            if let Some(server) = self.server.take() {
                print(&Line::Server(raw::Server { guest_kernel: machine.kernel()?, java, ..server }))?;
            }
            self.now = Some((machine, policy));
        }
        let (machine, _) = self.now.as_mut().context("no VM")?;
        if policy.is_attached() && !machine.is_attached() {
            eprintln!("attaching the VM");
            machine.attach()?;
        }
        Ok(machine)
    }
}

fn wanted(arguments: &Arguments) -> Vec<Wanted> {
    let Arguments { workload, policy, changes, by, autonuma, form, .. } = arguments;
    if form.smoke {
        let of = |policy, rate| Wanted {
            workload: Workload::Stream,
            policy,
            rate,
            by: By::Hand,
            autonuma: true,
            take: 0,
        };
        return vec![of(Policy::Ideal, 0), of(Policy::Full, JUDGED_RATE)];
    }
    // What is named is measured, whatever the form has. What is not is that of the form.
    let is_wanted = |one: &Wanted| {
        let chosen = |named: bool, is_empty: bool, of_form: bool| named || is_empty && (form.full || of_form);
        let switch = if one.autonuma { Switch::On } else { Switch::Off };
        chosen(
            workload.contains(&one.workload),
            workload.is_empty(),
            Workload::REDUCED.contains(&one.workload),
        ) && chosen(policy.contains(&one.policy), policy.is_empty(), Policy::REDUCED.contains(&one.policy))
            && chosen(changes.contains(&one.rate), changes.is_empty(), REDUCED_RATES.contains(&one.rate))
            && chosen(by.contains(&one.by), by.is_empty(), one.by == By::Hand)
            && chosen(autonuma.contains(&switch), autonuma.is_empty(), one.autonuma)
    };
    cells(true).into_iter().filter(is_wanted).collect()
}

/// What is shown while it goes on: cycles are those of the server's profile.
fn summary(cell: &Cell, clock_ghz: f64) -> String {
    let sum = |of: fn(&Values) -> u64| cell.vcpus.iter().map(of).sum::<u64>() as f64;
    let cycles = sum(|vcpu| vcpu.program_cycles.unwrap_or(0));
    let (local, remote) = cell
        .samples
        .iter()
        .flat_map(|sample| &sample.accesses)
        .fold((0, 0), |sum, one| (sum.0 + one[0], sum.1 + one[1]));
    format!(
        "{} operations of {:.0} cycles, {:.1} % remote, dilation {:.0}, {} pages migrated",
        cell.operations,
        cycles / cell.operations.max(1) as f64,
        remote as f64 / (local + remote).max(1) as f64 * 100.0,
        sum(|vcpu| vcpu.ran_ns) * clock_ghz / sum(|vcpu| vcpu.cycles).max(1.0),
        cell.pages_migrated
    )
}

/// How long a cell takes, seconds of the guest.
#[derive(Clone, Copy)]
struct Length {
    warm_up_s: u64,
    settle_s: u64,
    window_s: f64,
}

impl Length {
    fn of(cell: Wanted, smoke: bool) -> Self {
        match smoke {
            true => Self { warm_up_s: 1, settle_s: 1, window_s: 6.0 },
            false => Self {
                warm_up_s: cell.workload.warm_up_s(),
                settle_s: SETTLE_S,
                window_s: window_s(cell.rate),
            },
        }
    }
}

fn cell(machine: &mut Machine, wanted: Wanted, length: Length) -> Result<Cell> {
    let Wanted { workload, policy, rate, by, autonuma, take } = wanted;
    machine.go_home()?;
    let mut load = machine.load(workload, policy)?;
    load.ask::<u64>("go")?;
    thread::sleep(Duration::from_secs(length.warm_up_s));
    let mover = (rate > 0).then(|| Mover::start(machine, by)).transpose()?;
    if mover.is_some() {
        thread::sleep(Duration::from_secs(length.settle_s));
    }
    let migrated = machine.migrated()?;
    let measured = measure(machine, &mut load, (rate, length.window_s), mover)?;
    let told = machine.is_attached().then(|| machine.is_told()).transpose()?;
    let pages_migrated = machine.migrated()?.saturating_sub(migrated);
    load.end()?;
    let Measured { operations, vcpus, observed: Observed { changes, samples, window_s } } = measured;
    Ok(Cell {
        workload,
        policy,
        changes_per_minute: rate,
        by,
        autonuma,
        take,
        window_s,
        operations,
        vcpus,
        changes,
        samples,
        pages_migrated,
        told,
        commit: String::new(),
    })
}

struct Measured {
    operations: u64,
    vcpus: Vec<Values>,
    observed: Observed,
}

struct Observed {
    changes: Vec<Change>,
    samples: Vec<Sample>,
    window_s: f64,
}

/// Halted at both ends, so that operations and counts are of the same time.
fn measure(
    machine: &mut Machine,
    load: &mut Talk,
    rate: (u32, f64),
    mover: Option<Mover>,
) -> Result<Measured> {
    let operations: u64 = load.ask("pause")?;
    let before = machine.read()?;
    load.ask::<u64>("go")?;
    let observed = observe(machine, &before, rate, mover)?;
    let operations = load.ask::<u64>("pause")?.saturating_sub(operations);
    let after = machine.read()?;
    ensure!(operations > 0, "the load did nothing in {:.0} s", observed.window_s);
    let vcpus = after.iter().zip(&before).map(|(after, before)| after.since(before)).collect();
    Ok(Measured { operations, vcpus, observed })
}

/// Has vCPUs moved and takes samples until the window ends. vCPUs stay where they are then.
fn observe(
    machine: &mut Machine,
    before: &[Values],
    (rate, window_s): (u32, f64),
    mover: Option<Mover>,
) -> Result<Observed> {
    let interval_s = interval_s(rate);
    let (mut changes, mut samples): (Vec<Change>, Vec<Sample>) = (Vec::new(), Vec::new());
    let (began, mut last) = (Instant::now(), before.to_vec());
    let (mut mover, mut turns) = (mover, 0);
    let turn_s =
        interval_s.zip(mover.as_ref()).map(|(interval, mover)| interval * mover.moved_by_turn() as f64);
    while began.elapsed().as_secs_f64() < window_s {
        let mut moved = Vec::new();
        if let Some(mover) = &mut mover {
            moved.extend(mover.look(machine)?);
            if turn_s.is_some_and(|turn_s| began.elapsed().as_secs_f64() >= turn_s * turns as f64) {
                moved.extend(mover.turn(machine, turns)?);
                turns += 1;
            }
        }
        let at_s = began.elapsed().as_secs_f64();
        changes.extend(moved.into_iter().map(|(vcpu, node)| Change { at_s, vcpu, node }));
        let next = began + SAMPLE * (samples.len() as u32 + 1);
        let turn = turn_s.map(|turn_s| began + Duration::from_secs_f64(turn_s * turns as f64));
        let look = matches!(mover, Some(Mover::Balancer(_))).then(|| Instant::now() + LOOK);
        let until = turn.into_iter().chain(look).fold(next, Instant::min);
        thread::sleep(until.saturating_duration_since(Instant::now()));
        if Instant::now() >= next {
            let now = machine.read()?;
            let accesses = now.iter().zip(&last).map(|(now, last)| accesses(&now.since(last))).collect();
            samples.push(Sample { at_s: began.elapsed().as_secs_f64(), accesses });
            last = now;
        }
    }
    mover.map_or(Ok(()), |mover| mover.end(machine))?;
    Ok(Observed { changes, samples, window_s: began.elapsed().as_secs_f64() })
}

/// Local and remote ones of programs.
fn accesses(values: &Values) -> [u64; 2] {
    let lists = [&values.user.dram_by_class, &values.user.streamed_by_class];
    let local = lists.iter().filter_map(|list| list.first()).sum();
    [local, lists.iter().flat_map(|list| list.iter().skip(1)).sum()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_is_measured() {
        let none = || Arguments {
            workload: Vec::new(),
            policy: Vec::new(),
            changes: Vec::new(),
            by: Vec::new(),
            autonuma: Vec::new(),
            form: Form::default(),
            options: Options::default(),
        };
        assert_eq!(wanted(&none()), cells(false));
        assert_eq!(wanted(&Arguments { form: Form { full: true, smoke: false }, ..none() }), cells(true));
        let full = Arguments { policy: vec![Policy::Full], ..none() };
        assert!(wanted(&full).iter().all(|cell| Workload::REDUCED.contains(&cell.workload)));
        let one = || Arguments { policy: vec![Policy::VnumaOs], workload: vec![Workload::Orders], ..none() };
        let of = |policy, rate| Wanted {
            workload: Workload::Orders,
            policy,
            rate,
            by: By::Hand,
            autonuma: true,
            take: 0,
        };
        assert_eq!(wanted(&one()), [0, 20].map(|rate| of(Policy::VnumaOs, rate)));
        let often = Arguments { changes: vec![200], policy: vec![Policy::Full], ..one() };
        assert_eq!(wanted(&often), [of(Policy::Full, 200)]);
        let off = wanted(&Arguments { autonuma: vec![Switch::Off], ..none() });
        assert!(off.len() == cells(false).len() && off.iter().all(|cell| !cell.autonuma));
        // One that the reduced form does not have is measured as those that it has.
        let named = |workload| Arguments { workload: vec![workload], ..none() };
        let like = |workload| {
            let of = |cell: Wanted| (cell.policy, cell.rate);
            wanted(&named(workload)).into_iter().filter(|cell| cell.take == 0).map(of).collect::<Vec<_>>()
        };
        assert_eq!(like(Workload::OrdersZ), like(Workload::Orders));
        assert_eq!(like(Workload::OrdersZ).len(), 7);
    }

    #[test]
    fn accesses_are_local_in_the_first_class_only() {
        let mut values = Values::default();
        values.user.dram_by_class = vec![5, 7];
        values.user.streamed_by_class = vec![11, 13];
        assert_eq!(accesses(&values), [16, 20]);
    }
}
