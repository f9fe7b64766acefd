//! Guests in control groups, and what they do in a window.

use crate::{
    code::Kind,
    committed::{Guests, Load, SLEEP_US, rounds},
    entitled::entitled,
    raw::Seen,
    vmm::operations,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use vnuma_bench_figures::stats::Samples;
use vnuma_scenario::{Lines, Process};
use vnuma_scheduled::{Group, Loop, Wakes, Yields};

/// Where the memory of guests is.
const MEMORY: &str = "/dev/shm";
/// Wake-ups are taken out of the kernel, and groups are looked at, each time that so much has passed.
const LOOK: Duration = Duration::from_millis(100);

/// A guest that runs.
struct Guest {
    // Ends with its standard input, or is killed when this is dropped.
    _process: Process,
    memory: PathBuf,
    vcpus: usize,
    tids: Vec<i32>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Left behind it takes a few pages.
        let _ = fs::remove_file(&self.memory);
    }
}

impl Guest {
    /// Starts one in a group, its vCPUs of the class SCHED_EXT: who has that while no scheduler is loaded is as of SCHED_OTHER.
    fn start(group: &Group, kind: Kind, vcpus: usize, name: &str, sleep_us: u64) -> Result<Self> {
        let memory = PathBuf::from(format!("{MEMORY}/bench-scheduler-{name}"));
        let name = format!("guest {name}");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["guest", "--kind", kind.into(), "--vcpus", &vcpus.to_string(), "--memory"]);
        command.arg(&memory).args(["--sleep-us", &sleep_us.to_string(), "--rounds"]);
        command.args(rounds(kind).map(|rounds| rounds.to_string()));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context(name.clone())?;
        let mut process = Process(child);
        let pid = process.0.id().cast_signed();
        let line = Lines::of_process(&mut process, name.clone())?.next("its vCPUs")?;
        let tids: Vec<i32> = serde_json::from_str(&line).with_context(|| format!("{name}: {line:?}"))?;
        ensure!(tids.len() == vcpus, "{name} has {} vCPUs", tids.len());
        for tid in &tids {
            let thread = Loop::of_thread_of(pid, *tid);
            thread.make_ext().with_context(|| name.clone())?;
        }
        group.take(&Loop::of_thread_of(pid, pid))?;
        Ok(Self { _process: process, memory, vcpus, tids })
    }

    fn operations(&self) -> Result<u64> {
        Ok(operations(&self.memory, self.vcpus)?.into_iter().map(u64::from).sum())
    }
}

/// All guests of a load.
pub struct Running {
    load: Load,
    // Guests end before their groups are removed.
    guests: Vec<Guest>,
    groups: Vec<Group>,
}

impl Running {
    /// Starts them.
    pub fn start(load: Load) -> Result<Self> {
        let (mut groups, mut guests) = (Vec::new(), Vec::new());
        for (number, of) in load.groups().iter().enumerate() {
            let group =
                Group::new(&format!("bench-{}-{number}", load.name()), "cpu.weight", &of.weight.to_string())?;
            if let Some(cpus) = of.quota {
                group.write("cpu.max", &format!("{} 100000", (cpus * 1e5) as u64))?;
            }
            guests.extend(start_in(&group, of, &format!("{}-{number}", load.name()), SLEEP_US)?);
            groups.push(group);
        }
        let running = Self { load, guests, groups };
        if let Some(cpus) = load.allowed() {
            running.tids().try_for_each(|tid| Loop::of_thread(tid).allow(cpus))?;
        }
        Ok(running)
    }

    /// Has them stand still, or go on: beside busy CPUs the kernel takes a minute of an emulated server to check a scheduler.
    pub fn stand_still(&self, still: bool) -> Result<()> {
        self.groups.iter().try_for_each(|group| group.write("cgroup.freeze", if still { "1" } else { "0" }))
    }

    fn tids(&self) -> impl Iterator<Item = i32> {
        self.guests.iter().flat_map(|guest| guest.tids.iter().copied())
    }

    fn operations(&self) -> Result<u64> {
        self.guests.iter().map(Guest::operations).sum()
    }

    fn used(&self) -> Result<Used> {
        let began = Instant::now();
        let of = |group: &Group| Ok(group.used_us()? as f64 / 1e6);
        let by_group_s = self.groups.iter().map(of).collect::<Result<_>>()?;
        Ok(Used { at: began + began.elapsed() / 2, by_group_s })
    }

    /// What they do in so many seconds.
    pub fn watch(&self, seconds: f64) -> Result<Seen> {
        let wakes = (self.load == Load::Wakes).then(|| Wakes::watch(self.tids())).transpose()?;
        let entitled = entitled_to(self.load);
        // What has windows of its own is read in the same order at both ends.
        let before = self.used()?;
        let (operations, yields) = (self.operations()?, Yields::read()?);
        let (mut waits, mut lag_s) = (Vec::new(), 0.0_f64);
        while before.at.elapsed().as_secs_f64() < seconds {
            thread::sleep(LOOK);
            if let Some(wakes) = &wakes {
                waits.extend(wakes.take()?);
            }
            if let Some(entitled) = &entitled {
                lag_s = lag_s.max(self.used()?.since(&before).behind_s(entitled));
            }
        }
        if let Some(wakes) = &wakes {
            waits.extend(wakes.take()?);
            waits.extend(wakes.pending()?);
        }
        let passed = self.used()?.since(&before);
        let ops = self.operations()?.saturating_sub(operations);
        let yields = Yields::read()?.since(yields);
        let found = waits.iter().map(|us| f64::from(*us)).collect::<Samples>();
        Ok(Seen {
            window_s: passed.window_s,
            ops,
            used_s: passed.by_group_s,
            lag_max_ms: entitled.map(|_| lag_s * 1e3),
            wakes: found.count(),
            wake_p99_us: found.percentile(99),
            wake_max_us: found.percentile(100),
            yields_tried: yields.tried,
            yields: yields.granted,
        })
    }
}

/// CPU time of groups up to a moment.
struct Used {
    at: Instant,
    by_group_s: Vec<f64>,
}

impl Used {
    fn since(&self, before: &Self) -> Passed {
        let both = self.by_group_s.iter().zip(&before.by_group_s);
        let by_group_s = both.map(|(now, before)| now - before).collect();
        Passed { window_s: (self.at - before.at).as_secs_f64(), by_group_s }
    }
}

/// What groups had of CPUs in so many seconds.
struct Passed {
    window_s: f64,
    by_group_s: Vec<f64>,
}

impl Passed {
    /// By how much the group that is most behind what it is entitled to is behind it.
    fn behind_s(&self, entitled: &[f64]) -> f64 {
        let behind = |(cpus, used): (&f64, &f64)| cpus * self.window_s - used;
        entitled.iter().zip(&self.by_group_s).map(behind).fold(0.0, f64::max)
    }
}

/// Guests of one kind in a group.
fn start_in(group: &Group, of: &Guests, name: &str, sleep_us: u64) -> Result<Vec<Guest>> {
    let start = |number| Guest::start(group, of.kind, of.vcpus, &format!("{name}-{number}"), sleep_us);
    (0..of.vms).map(start).collect()
}

/// Guests that run in a group of their own until this is dropped.
pub struct Apart(Vec<Guest>);

impl Apart {
    /// Starts them there.
    pub fn start(group: &Group, of: &Guests, name: &str, sleep_us: u64) -> Result<Self> {
        Ok(Self(start_in(group, of, name, sleep_us)?))
    }

    /// CPUs that their vCPUs may use.
    pub fn allow(&self, cpus: &str) -> Result<()> {
        let mut tids = self.0.iter().flat_map(|guest| guest.tids.iter());
        tids.try_for_each(|tid| Loop::of_thread(*tid).allow(cpus))
    }
}

/// CPUs that each group of a load is entitled to; none if that cannot be said.
pub fn entitled_to(load: Load) -> Option<Vec<f64>> {
    let cpus = load.shares()? as f64;
    let of = |guests: &Guests| {
        let threads = (guests.vms * guests.vcpus) as f64;
        (f64::from(guests.weight), guests.quota.unwrap_or(f64::MAX).min(threads).min(cpus))
    };
    Some(entitled(cpus, &load.groups().iter().map(of).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_entitled_to_all_cpus_and_no_more_than_they_can_use() {
        let of = |load| entitled_to(load).expect("its groups share CPUs");
        assert_eq!(of(Load::Loop), [1.0]);
        assert_eq!(of(Load::Quotas), [0.2, 1.5, 6.3]);
        let weights = of(Load::Weights);
        assert_eq!(weights[0], 2.0);
        assert!(
            (weights[1] / weights[2] - 3.0).abs() < 1e-9 && (weights.iter().sum::<f64>() - 8.0).abs() < 1e-9
        );
        assert_eq!(entitled_to(Load::Lock), None);
    }

    #[test]
    fn lag_is_that_of_the_group_that_is_most_behind() {
        let of = |by_group_s: &[f64]| Passed { window_s: 10.0, by_group_s: by_group_s.to_vec() };
        assert_eq!(of(&[10.5, 19.0]).behind_s(&[1.0, 2.0]), 1.0);
        assert_eq!(of(&[11.0]).behind_s(&[1.0]), 0.0);
    }
}
