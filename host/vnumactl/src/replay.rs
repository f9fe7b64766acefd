//! Gives recorded periods to another policy, and shows what it would have done. A recording is untrusted: all of it is checked
//! before it is believed.
//!
//! What a recording cannot say is how the host would have answered: a vCPU that the policy would have moved makes the same
//! accesses in the same time as where it was. So a replay shows what a policy decides, not how much faster that is.

use crate::table::{Table, or_dash, plain};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};
use vnuma_api::{Observation, ObservedVcpu, PolicyStep};
use vnuma_model::{CpuLayout, CpuSet, HostTopology};
use vnuma_policy::scheduling::{
    Counts, CpuSample, Input, Machine, Place, Placed, Policy, Reach, Scheduler, Settings, VcpuKey,
    VcpuSample, analyzer::Bounds,
};

/// First line of a recording.
pub const HEADER: &str = "{\"vnuma_recording\":1}";
/// Longest line: a period of a host with 65536 vCPUs and 64 nodes is shorter.
const LINE_LIMIT: usize = 256 << 20;
/// Nodes of a host, CPUs and vCPUs that a period may have.
const MOST_NODES: usize = 1024;
const MOST_VCPUS: usize = 1 << 17;
/// Names are not longer.
const MOST_NAME: usize = 256;
/// Counts and times of a period are below this.
const MOST: u64 = 1 << 48;
/// Steps that are listed.
const SHOWN: usize = 200;

/// Why a recording cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// It cannot be read.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// It is none.
    #[error("line 1: not a recording of vnumactl: expected {HEADER}")]
    Header,
    /// A line that is no period.
    #[error("line {line}: {reason}")]
    Line {
        /// Which, from 1.
        line: usize,
        /// Why.
        reason: String,
    },
    /// Nothing to replay.
    #[error("no period was recorded: does any VM have a policy other than off? `observe` is enough")]
    Empty,
}

/// A step that the policy would have made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Seconds since the first period ended.
    pub seconds: f64,
    /// The VM.
    pub vm: String,
    /// The vCPU.
    pub vcpu: u32,
    /// What it would have done, and why.
    #[serde(flatten)]
    pub step: PolicyStep,
}

/// What it would have done for a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// The VM.
    pub vm: String,
    /// Policy that it had.
    pub recorded_policy: String,
    /// vCPUs.
    pub vcpus: usize,
    /// Steps.
    pub steps: u64,
    /// Accesses to memory in all periods, and how many left the node that the vCPU was on.
    pub accesses: u64,
    /// As it was.
    pub remote_recorded: u64,
    /// Where the policy would have had it.
    pub remote_replayed: u64,
    /// Nothing was counted in some periods: the place of its pages stood in for that.
    pub assumed: bool,
}

/// A replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replay {
    /// The policy.
    pub policy: String,
    /// Periods.
    pub periods: u64,
    /// VMs by name.
    pub vms: Vec<Summary>,
    /// Steps, the first ones.
    pub steps: Vec<Step>,
    /// Steps in all.
    pub step_count: u64,
}

/// Replays a file.
pub fn file(path: &Path, policy: Policy) -> Result<Replay, ReplayError> {
    read(BufReader::new(File::open(path)?), policy)
}

/// Replays a recording.
pub fn read(mut from: impl BufRead, policy: Policy) -> Result<Replay, ReplayError> {
    let mut line = String::new();
    let mut next = |number: usize, line: &mut String| -> Result<bool, ReplayError> {
        line.clear();
        let read = match from.by_ref().take(LINE_LIMIT as u64 + 1).read_line(line) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let reason = "not text in UTF-8".to_owned();
                return Err(ReplayError::Line { line: number, reason });
            }
            read => read?,
        };
        if read > LINE_LIMIT {
            let reason = format!("longer than {LINE_LIMIT} bytes");
            return Err(ReplayError::Line { line: number, reason });
        }
        Ok(read > 0)
    };
    let header = next(1, &mut line)?;
    if !header || line.trim_end() != HEADER {
        return Err(ReplayError::Header);
    }
    let mut player = Player::new(policy);
    let mut number = 1;
    loop {
        number += 1;
        if !next(number, &mut line)? {
            break;
        }
        // Whoever recorded may have been killed in the middle of the last line.
        if !line.ends_with('\n') {
            break;
        }
        let wrong = |reason: String| ReplayError::Line { line: number, reason: plain(&reason) };
        let observation: Observation =
            serde_json::from_str(&line).map_err(|error| wrong(with_column(&error)))?;
        check(&observation).map_err(wrong)?;
        player.period(observation);
    }
    if player.replay.periods == 0 {
        return Err(ReplayError::Empty);
    }
    Ok(player.end())
}

/// What is wrong with a line. Its number is the file's, not the parser's.
fn with_column(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let at = format!(" at line {} column {}", error.line(), error.column());
    match text.strip_suffix(&at) {
        Some(reason) => format!("column {}: {reason}", error.column()),
        None => text,
    }
}

/// What a replay relies on.
fn check(observation: &Observation) -> Result<(), String> {
    let Observation { period_ns, bounds, host, idle, vms, .. } = observation;
    if let Some((low, high)) = bounds.filter(|(low, high)| !(*low > 0.0 && low <= high && high.is_finite())) {
        return Err(format!("bounds = [{low}, {high}]: expected two numbers above 0, the lower one first"));
    }
    if !(1..MOST).contains(period_ns) {
        return Err(format!("period_ns = {period_ns}: expected 1 to {}", MOST - 1));
    }
    let ids: Vec<u32> = host.nodes.iter().map(|node| node.id).collect();
    if ids.is_empty() || ids.len() > MOST_NODES || !ids.is_sorted_by(|a, b| a < b) {
        return Err(format!(
            "host.nodes: expected 1 to {MOST_NODES} nodes in rising order, found {}",
            ids.len()
        ));
    }
    let mut seen = BTreeSet::new();
    if let Some(cpu) = host.nodes.iter().flat_map(|node| node.cpus.iter()).find(|cpu| !seen.insert(*cpu)) {
        return Err(format!("host.nodes: CPU {cpu} is on two nodes"));
    }
    if let Some((cpu, idle_ns)) = idle.iter().find(|(_, idle_ns)| *idle_ns >= MOST) {
        return Err(format!("idle: CPU {cpu}: {idle_ns} ns: expected less than {MOST}"));
    }
    if !idle.is_sorted_by(|a, b| a.0 < b.0) {
        return Err("idle: CPUs are not in rising order".to_owned());
    }
    let count: usize = vms.iter().map(|vm| vm.vcpus.len()).sum();
    if count > MOST_VCPUS {
        return Err(format!("vms: {count} vCPUs: expected {MOST_VCPUS} at most"));
    }
    let mut names = BTreeSet::new();
    for vm in vms {
        if vm.vm.len() > MOST_NAME || !names.insert(&vm.vm) {
            return Err(format!(
                "vms: name {:?}: too long, or there twice",
                vm.vm.chars().take(40).collect::<String>()
            ));
        }
        if !vm.vcpus.is_sorted_by(|a, b| a.vcpu < b.vcpu) {
            return Err(format!("vms: {}: vCPUs are not in rising order", vm.vm));
        }
        for vcpu in &vm.vcpus {
            check_vcpu(vcpu, ids.len())
                .map_err(|reason| format!("vms: {}: vCPU {}: {reason}", vm.vm, vcpu.vcpu))?;
        }
    }
    Ok(())
}

fn check_vcpu(vcpu: &ObservedVcpu, nodes: usize) -> Result<(), String> {
    let below = |name: &str, value: u64| match value < MOST {
        true => Ok(()),
        false => Err(format!("{name} = {value}: expected less than {MOST}")),
    };
    below("ran_ns", vcpu.ran_ns)?;
    below("waited_ns", vcpu.waited_ns)?;
    below("throttled_ns", vcpu.throttled_ns)?;
    let wanted_ns = vcpu.ran_ns + vcpu.waited_ns;
    if let Some(entitled_ns) = vcpu.entitled_ns.filter(|entitled_ns| *entitled_ns > wanted_ns) {
        return Err(format!("entitled_ns = {entitled_ns}: expected {wanted_ns} at most, which it wanted"));
    }
    if !(1..=10_000).contains(&vcpu.weight) {
        return Err(format!("weight = {}: expected 1 to 10000", vcpu.weight));
    }
    if let Some(cpu) = vcpu.cpu.filter(|cpu| *cpu > CpuSet::MAX_CPU) {
        return Err(format!("cpu = {cpu}: expected {} at most", CpuSet::MAX_CPU));
    }
    let Some(counts) = &vcpu.counts else { return Ok(()) };
    below("instructions", counts.instructions)?;
    below("llc_references", counts.llc_references)?;
    below("llc_misses", counts.llc_misses)?;
    if !counts.accesses.is_empty() && counts.accesses.len() != nodes {
        return Err(format!("accesses: {} nodes: expected none or {nodes}", counts.accesses.len()));
    }
    counts.accesses.iter().try_for_each(|&count| below("accesses", count))
}

/// Where the replay has confined a vCPU to.
struct Assigned {
    place: Place,
    cpus: CpuSet,
}

struct Player {
    scheduler: Scheduler,
    host: HostTopology,
    layout: CpuLayout,
    machine: Machine,
    first_ns: Option<u64>,
    /// Numbers of VMs, by name.
    ids: BTreeMap<String, u64>,
    assigned: BTreeMap<VcpuKey, Assigned>,
    summaries: BTreeMap<String, Summary>,
    replay: Replay,
}

impl Player {
    fn new(policy: Policy) -> Self {
        Self {
            scheduler: Scheduler::new(policy, Settings::default()),
            host: HostTopology::default(),
            layout: CpuLayout::default(),
            machine: Machine::default(),
            first_ns: None,
            ids: BTreeMap::new(),
            assigned: BTreeMap::new(),
            summaries: BTreeMap::new(),
            replay: Replay { policy: policy.to_string(), ..Replay::default() },
        }
    }

    fn end(mut self) -> Replay {
        self.replay.vms = self.summaries.into_values().collect();
        self.replay
    }

    fn period(&mut self, observation: Observation) {
        if observation.host != self.host || observation.layout != self.layout {
            self.machine = Machine::new(&observation.host, &observation.layout);
            // Its places are others, and so is what the policy remembers.
            self.assigned.clear();
            self.scheduler = Scheduler::new(self.scheduler.policy(), Settings::default());
            (self.host, self.layout) = (observation.host.clone(), observation.layout.clone());
        }
        if let Some((low, high)) = observation.bounds {
            self.scheduler.set_bounds(Bounds { low, high });
        }
        self.replay.periods += 1;
        let (samples, reaches, names) = self.samples(&observation);
        let idle = observation.idle.iter().map(|&(cpu, idle_ns)| CpuSample { cpu, idle_ns });
        let cpus: Vec<CpuSample> = idle.collect();
        let input = Input {
            machine: &self.machine,
            reaches: &reaches,
            cpus: &cpus,
            vcpus: &samples,
            period_ns: observation.period_ns,
        };
        let decision = self.scheduler.decide(&input);
        let masks: BTreeMap<VcpuKey, &CpuSet> = observation
            .vms
            .iter()
            .flat_map(|vm| vm.vcpus.iter().map(|vcpu| (self.key(&vm.vm, vcpu.vcpu), &vcpu.operator)))
            .collect();
        for placed in decision.steps {
            if let Some(mask) = masks.get(&placed.key) {
                self.step(&placed, mask, &names, observation.time_ns);
            }
        }
    }

    fn key(&self, vm: &str, vcpu: u32) -> VcpuKey {
        VcpuKey { vm: self.ids.get(vm).copied().unwrap_or_default(), vcpu }
    }

    /// The input, as it is where the replay has put vCPUs; and what became of accesses.
    fn samples(&mut self, observation: &Observation) -> (Vec<VcpuSample>, Vec<Reach>, BTreeMap<u64, String>) {
        let (mut samples, mut reaches, mut names) = (Vec::new(), Vec::new(), BTreeMap::new());
        for vm in &observation.vms {
            let fresh = self.ids.len() as u64 + 1;
            let id = *self.ids.entry(vm.vm.clone()).or_insert(fresh);
            names.insert(id, vm.vm.clone());
            let summary = self.summaries.entry(vm.vm.clone()).or_default();
            summary.vm.clone_from(&vm.vm);
            summary.recorded_policy.clone_from(&vm.policy);
            summary.vcpus = vm.vcpus.len();
            for vcpu in &vm.vcpus {
                let key = VcpuKey { vm: id, vcpu: vcpu.vcpu };
                let assigned = self.assigned.get(&key).filter(|known| known.cpus.is_subset(&vcpu.operator));
                let within = vcpu.cpu.filter(|cpu| assigned.is_none_or(|known| known.cpus.contains(*cpu)));
                let cpu = within.or_else(|| assigned?.cpus.iter().next());
                reaches.push(Reach::new(&self.machine, &vcpu.operator));
                let counts = vcpu.counts.as_ref().map(|counts| Counts {
                    instructions: counts.instructions,
                    llc_references: counts.llc_references,
                    llc_misses: counts.llc_misses,
                    accesses: counts.accesses.clone(),
                });
                if let Some(counts) = &counts {
                    let total: u64 = counts.accesses.iter().fold(0, |sum, count| sum.saturating_add(*count));
                    let remote = |cpu: Option<u32>| {
                        let node = cpu.and_then(|cpu| self.machine.node_of(cpu));
                        let local = node.and_then(|node| counts.accesses.get(node)).copied().unwrap_or(0);
                        total - local
                    };
                    summary.accesses = summary.accesses.saturating_add(total);
                    summary.remote_recorded = summary.remote_recorded.saturating_add(remote(vcpu.cpu));
                    summary.remote_replayed = summary.remote_replayed.saturating_add(remote(cpu));
                    summary.assumed |= vcpu.counts.as_ref().is_some_and(|counts| counts.assumed);
                }
                samples.push(VcpuSample {
                    key,
                    cpu,
                    assigned: assigned.map(|known| known.place),
                    reach: reaches.len() - 1,
                    real_time: vcpu.real_time,
                    managed: true,
                    weight: vcpu.weight,
                    ran_ns: vcpu.ran_ns,
                    waited_ns: vcpu.waited_ns,
                    throttled_ns: vcpu.throttled_ns,
                    entitled_ns: vcpu.entitled_ns.unwrap_or(vcpu.ran_ns + vcpu.waited_ns),
                    counts,
                });
            }
        }
        samples.sort_by_key(|sample| sample.key);
        (samples, reaches, names)
    }

    fn step(&mut self, placed: &Placed, mask: &CpuSet, names: &BTreeMap<u64, String>, time_ns: u64) {
        let cpus = placed.to.map(|place| self.machine.cpus(place, mask));
        match (placed.to, &cpus) {
            (Some(place), Some(cpus)) if !cpus.is_empty() => {
                self.assigned.insert(placed.key, Assigned { place, cpus: cpus.clone() });
            }
            (Some(_), _) => return,
            (None, _) => drop(self.assigned.remove(&placed.key)),
        }
        let vm = names.get(&placed.key.vm).cloned().unwrap_or_default();
        if let Some(summary) = self.summaries.get_mut(&vm) {
            summary.steps += 1;
        }
        self.replay.step_count += 1;
        if self.replay.steps.len() >= SHOWN {
            return;
        }
        let first_ns = *self.first_ns.get_or_insert(time_ns);
        let why = &placed.why;
        let step = PolicyStep {
            time_ns,
            policy: why.policy.to_string(),
            cause: why.cause.text().to_owned(),
            from: why.before.node,
            to: why.expected.node.filter(|_| placed.to.is_some()),
            cpus,
            pressure: why.pressure,
            remote_share: why.before.remote_share,
            expected_remote_share: why.expected.remote_share.filter(|_| placed.to.is_some()),
            caused_by: why.caused_by.and_then(|vm| names.get(&vm).cloned()),
        };
        let seconds = time_ns.saturating_sub(first_ns) as f64 / 1e9;
        self.replay.steps.push(Step { seconds, vm, vcpu: placed.key.vcpu, step });
    }
}

/// For people: a table of VMs, and the steps.
pub fn text(replay: &Replay) -> String {
    let Replay { policy, periods, vms, steps, step_count } = replay;
    let mut text = format!("{periods} periods through {policy}: {step_count} steps\n\n");
    let mut table = Table::new("VM  RECORDED  >VCPUS  >STEPS  >REMOTE AS IT WAS  >REMOTE THEN  FIGURES");
    let share = |remote: u64, all: u64| match all {
        0 => "-".to_owned(),
        _ => format!("{:.1} %", remote as f64 / all as f64 * 100.0),
    };
    for vm in vms {
        table.row([
            plain(&vm.vm),
            plain(&vm.recorded_policy),
            vm.vcpus.to_string(),
            vm.steps.to_string(),
            share(vm.remote_recorded, vm.accesses),
            share(vm.remote_replayed, vm.accesses),
            if vm.assumed { "assumed" } else { "counted" }.to_owned(),
        ]);
    }
    text += &table.text(0);
    if steps.is_empty() {
        return text;
    }
    text += "\n";
    let mut table = Table::new(">SECOND  VM  >VCPU  >FROM  >TO  CPUS  >REMOTE  >EXPECTED  WHY");
    let percent = crate::policy::percent;
    for Step { seconds, vm, vcpu, step } in steps {
        let because = step.caused_by.as_ref().map_or_else(String::new, |vm| format!(" (because of {vm})"));
        table.row([
            format!("{seconds:.1}"),
            plain(vm),
            vcpu.to_string(),
            or_dash(step.from),
            or_dash(step.to),
            step.cpus.as_ref().map_or_else(|| "operator's".to_owned(), ToString::to_string),
            percent(step.remote_share),
            percent(step.expected_remote_share),
            plain(&format!("{}{because}", step.cause)),
        ]);
    }
    text += &table.text(0);
    if *step_count > steps.len() as u64 {
        text += &format!("and {} more\n", step_count - steps.len() as u64);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vnuma_api::{ObservedCounts, ObservedVm};
    use vnuma_model::{DistanceMatrix, HostNode};

    fn observation(time_s: u64) -> Observation {
        let node = |id: u32| HostNode { id, cpus: (id * 4..id * 4 + 4).collect(), ..HostNode::default() };
        let counts = ObservedCounts {
            assumed: false,
            instructions: 1_000_000_000,
            llc_references: 30_000_000,
            llc_misses: 20_000_000,
            accesses: vec![0, 20_000_000],
        };
        let vcpu = |vcpu: u32| ObservedVcpu {
            vcpu,
            cpu: Some(vcpu),
            operator: "0-6".parse().expect("a list"),
            real_time: false,
            weight: 100,
            ran_ns: 1_000_000_000,
            waited_ns: 0,
            throttled_ns: 0,
            entitled_ns: Some(1_000_000_000),
            counts: Some(counts.clone()),
        };
        Observation {
            time_ns: time_s * 1_000_000_000,
            period_ns: 1_000_000_000,
            source: "per-node".into(),
            bounds: Some((3.0, 20.0)),
            host: HostTopology {
                nodes: vec![node(0), node(1)],
                distances: DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square"),
                ..HostTopology::default()
            },
            layout: CpuLayout::default(),
            idle: (0..8).map(|cpu| (cpu, 0)).collect(),
            vms: vec![ObservedVm {
                vm: "web".into(),
                policy: "observe".into(),
                vcpus: vec![vcpu(0), vcpu(1)],
            }],
        }
    }

    fn recording(observations: &[Observation]) -> String {
        let line = |observation| serde_json::to_string(observation).expect("JSON") + "\n";
        format!("{HEADER}\n{}", observations.iter().map(line).collect::<String>())
    }

    #[test]
    fn another_policy_is_shown_with_what_it_would_have_done() {
        let text_of = recording(&[observation(5), observation(6), observation(7)]);
        let replay = read(text_of.as_bytes(), Policy::Vprobe).expect("a recording");
        let vm = &replay.vms[0];
        assert_eq!((replay.periods, replay.step_count, vm.steps, vm.vcpus), (3, 2, 2, 2));
        // All was remote as it was; with the policy only the first period would have been.
        assert_eq!((vm.remote_recorded * 2 / vm.accesses, vm.remote_replayed * 3), (2, vm.accesses));
        let expected = "\
3 periods through vprobe: 2 steps

VM   RECORDED  VCPUS  STEPS  REMOTE AS IT WAS  REMOTE THEN  FIGURES
web  observe       2      2           100.0 %       33.3 %  counted

SECOND  VM   VCPU  FROM  TO  CPUS  REMOTE  EXPECTED  WHY
   0.0  web     0     0   1  4-6    100 %       0 %  its memory is there
   0.0  web     1     0   1  4-6    100 %       0 %  its memory is there
";
        assert_eq!(text(&replay), expected);
        let off = read(text_of.as_bytes(), Policy::Off).expect("a recording");
        assert_eq!((off.step_count, off.vms[0].remote_replayed), (0, off.vms[0].remote_recorded));
    }

    /// A line of a vnumad that knew no control groups.
    #[test]
    fn older_recordings_are_replayed() {
        let new = recording(&[observation(5), observation(6)]);
        let old = new.replace(",\"throttled_ns\":0,\"entitled_ns\":1000000000", "");
        let old = old.replace(",\"bounds\":[3.0,20.0]", "");
        assert!(["throttled", "entitled", "bounds"].iter().all(|field| !old.contains(field)), "{old}");
        let replay = |text: &str| read(text.as_bytes(), Policy::Vprobe).expect("a recording");
        assert_eq!(replay(&old), replay(&new));
    }

    /// It refers to the cache 30 times per thousand instructions, and nearly none of that misses.
    #[test]
    fn a_replay_has_the_bounds_of_its_host() {
        let steps = |bounds: Option<(f64, f64)>| {
            let mut period = Observation { bounds, ..observation(5) };
            for counts in period.vms[0].vcpus.iter_mut().flat_map(|vcpu| &mut vcpu.counts) {
                counts.llc_misses = 400_000;
                counts.accesses = vec![0, 400_000];
            }
            read(recording(&[period]).as_bytes(), Policy::VprobePaper).expect("a recording").step_count
        };
        assert_eq!([None, Some((3.0, 20.0)), Some((31.0, 50.0))].map(steps), [2, 2, 0]);
    }

    /// Two VMs on two nodes of four CPUs, eight vCPUs each. One has three times the weight of the other, and all of it is on
    /// node 0: by vCPUs both nodes have as much.
    #[test]
    fn a_replay_balances_what_vcpus_are_entitled_to() {
        let mut period = observation(5);
        let vcpu = |vm: usize, vcpu: u32, entitled_ns: Option<u64>| ObservedVcpu {
            vcpu,
            cpu: Some(vm as u32 * 4 + vcpu % 4),
            operator: "0-7".parse().expect("a list"),
            ran_ns: 500_000_000,
            waited_ns: 500_000_000,
            entitled_ns,
            counts: Some(ObservedCounts {
                accesses: vec![10_000_000, 10_000_000],
                ..period.vms[0].vcpus[0].counts.clone().expect("counted")
            }),
            ..period.vms[0].vcpus[0].clone()
        };
        let vms = |entitled_ns: [Option<u64>; 2]| -> Vec<ObservedVm> {
            let vm = |at: usize, name: &str| ObservedVm {
                vm: name.into(),
                policy: "observe".into(),
                vcpus: (0..8).map(|number| vcpu(at, number, entitled_ns[at])).collect(),
            };
            vec![vm(0, "heavy"), vm(1, "light")]
        };
        let by_count = vms([None, None]);
        let by_weight = vms([Some(750_000_000), Some(250_000_000)]);
        let mut moved = |vms: Vec<ObservedVm>| {
            period.vms = vms;
            let replay = read(recording(&[period.clone()]).as_bytes(), Policy::Vprobe).expect("a recording");
            replay.steps.iter().filter(|step| step.step.from != step.step.to).count()
        };
        assert_eq!(moved(by_count), 0);
        assert!(moved(by_weight) > 0);
    }

    #[test]
    fn a_host_that_loses_a_node_is_replayed() {
        let mut smaller = observation(6);
        smaller.host.nodes.pop();
        smaller.vms[0].vcpus.iter_mut().flat_map(|vcpu| &mut vcpu.counts).for_each(|counts| {
            counts.accesses.pop();
        });
        let text_of = recording(&[observation(5), smaller, observation(7)]);
        for &policy in Policy::ALL {
            assert_eq!(read(text_of.as_bytes(), policy).expect("a recording").periods, 3);
        }
    }

    #[test]
    fn a_line_that_was_cut_off_at_the_end_is_left_out() {
        let whole = recording(&[observation(5), observation(6)]);
        let cut = &whole[..whole.len() - 10];
        assert_eq!(read(cut.as_bytes(), Policy::Off).expect("a recording").periods, 1);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let error = |text: &str| read(text.as_bytes(), Policy::Vprobe).expect_err(text).to_string();
        assert!(error("").starts_with("line 1: not a recording"));
        assert!(error("{}\n").starts_with("line 1: not a recording"));
        assert!(error(&recording(&[])).starts_with("no period was recorded"));
        assert_eq!(error(&format!("{HEADER}\nnonsense\n")), "line 2: column 2: expected ident");
        assert_eq!(error(&format!("{HEADER}\n{{}}\n")), "line 2: column 2: missing field `time_ns`");
        let binary = [HEADER.as_bytes(), b"\n\xff\xfe\n"].concat();
        let of_binary = read(&binary[..], Policy::Vprobe).expect_err("not text").to_string();
        assert_eq!(of_binary, "line 2: not text in UTF-8");
        let broken = |change: &dyn Fn(&mut Observation)| {
            let mut bad = observation(6);
            change(&mut bad);
            error(&recording(&[observation(5), bad]))
        };
        let vcpu = |change: &dyn Fn(&mut ObservedVcpu)| broken(&|bad| change(&mut bad.vms[0].vcpus[1]));
        for (found, expected) in [
            (broken(&|bad| bad.period_ns = 0), "line 3: period_ns = 0: expected 1 to"),
            (broken(&|bad| bad.bounds = Some((4.0, 3.5))), "line 3: bounds = [4, 3.5]: expected two numbers"),
            (broken(&|bad| bad.bounds = Some((0.0, 3.5))), "line 3: bounds = [0, 3.5]: expected two numbers"),
            (broken(&|bad| bad.host.nodes.clear()), "line 3: host.nodes: expected 1 to 1024 nodes"),
            (broken(&|bad| bad.host.nodes[1].cpus.insert(0)), "line 3: host.nodes: CPU 0 is on two nodes"),
            (broken(&|bad| bad.idle.reverse()), "line 3: idle: CPUs are not in rising order"),
            (broken(&|bad| bad.idle[3].1 = u64::MAX), "line 3: idle: CPU 3: 18446744073709551615 ns"),
            (
                broken(&|bad| bad.vms.push(bad.vms[0].clone())),
                "line 3: vms: name \"web\": too long, or there twice",
            ),
            (broken(&|bad| bad.vms[0].vcpus.reverse()), "line 3: vms: web: vCPUs are not in rising order"),
            (vcpu(&|bad| bad.weight = 0), "line 3: vms: web: vCPU 1: weight = 0: expected 1 to 10000"),
            (
                vcpu(&|bad| bad.entitled_ns = Some(1_000_000_001)),
                "line 3: vms: web: vCPU 1: entitled_ns = 1000000001: expected 1000000000 at most",
            ),
            (
                vcpu(&|bad| bad.ran_ns = MOST),
                "line 3: vms: web: vCPU 1: ran_ns = 281474976710656: expected less",
            ),
            (
                vcpu(&|bad| bad.cpu = Some(9000)),
                "line 3: vms: web: vCPU 1: cpu = 9000: expected 8191 at most",
            ),
            (
                vcpu(&|bad| {
                    bad.counts = Some(ObservedCounts { accesses: vec![1], ..ObservedCounts::default() })
                }),
                "line 3: vms: web: vCPU 1: accesses: 1 nodes: expected none or 2",
            ),
        ] {
            assert!(found.starts_with(expected), "{found}");
        }
    }

    proptest! {
        #[test]
        fn any_file_is_survived(text in "(.|[0-9{}\\[\\]\",:\n]){0,400}", header in any::<bool>()) {
            let text = if header { format!("{HEADER}\n{text}\n") } else { text };
            let _ = read(text.as_bytes(), Policy::Vprobe);
        }

        /// Numbers of a recording are changed at random: it is refused, or replayed.
        #[test]
        fn any_numbers_are_survived(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0_u32..64), 1..8),
            policy in 0_usize..Policy::ALL.len(),
        ) {
            let mut text = recording(&[observation(5), observation(6), observation(7)]);
            for (at, number, shift) in changes {
                let digits: Vec<usize> = text.match_indices(|c: char| c.is_ascii_digit()).map(|(at, _)| at).collect();
                let at = digits[at.index(digits.len())];
                text.replace_range(at..=at, &(number >> shift).to_string());
            }
            if let Ok(replay) = read(text.as_bytes(), Policy::ALL[policy]) {
                let _ = super::text(&replay);
            }
        }
    }
}
