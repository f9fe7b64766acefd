//! Policies, for people.

use crate::table::{Table, or_dash, plain};
use vnuma_api::{MemoryMoves, OtherThreads, Scheduling, VcpuScheduling};

/// One line a VM.
pub fn list(vms: &[Scheduling]) -> String {
    if vms.is_empty() {
        return "no VMs\n".to_owned();
    }
    let mut table = Table::new("NAME  POLICY  >VCPUS  >CONFINED  >MOVES  >REMOTE  >WAITING");
    for vm in vms {
        let confined = vm.vcpus.iter().filter(|vcpu| vcpu.policy_cpus.is_some()).count();
        let moves: u64 = vm.vcpus.iter().map(|vcpu| vcpu.moves).sum();
        table.row([
            plain(&vm.vm),
            plain(&vm.policy),
            vm.vcpus.len().to_string(),
            confined.to_string(),
            moves.to_string(),
            percent(mean(vm, |vcpu| vcpu.remote_share)),
            percent(mean(vm, |vcpu| vcpu.wait_share)),
        ]);
    }
    table.text(0)
}

fn mean(vm: &Scheduling, of: impl Fn(&VcpuScheduling) -> Option<f64>) -> Option<f64> {
    let known: Vec<f64> = vm.vcpus.iter().filter_map(of).collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}

/// All of a VM.
pub fn show(vm: &Scheduling) -> String {
    let mut text = format!("{}: policy {}", plain(&vm.vm), plain(&vm.policy));
    let mut set_by: Vec<&str> = vm.vcpus.iter().filter_map(|vcpu| vcpu.set_by.as_deref()).collect();
    set_by.sort_unstable();
    set_by.dedup();
    if !set_by.is_empty() {
        text += &format!(", by {}", plain(&set_by.join(" and ")));
    }
    text += "\n";
    if vm.vcpus.is_empty() {
        return text;
    }
    text += "\n";
    let mut table = Table::new(
        ">VCPU  >NODE  STANDING  CPUS  OPERATOR'S  >PRESSURE  TYPE  >MEMORY  >REMOTE  >RAN  >WAITED  >THROTTLED  FIGURES  >MOVES",
    );
    for vcpu in &vm.vcpus {
        let text = |value: &Option<String>| value.as_deref().map_or_else(|| "-".to_owned(), plain);
        table.row(vec![
            vcpu.vcpu.to_string(),
            or_dash(vcpu.node),
            text(&vcpu.standing),
            or_dash(vcpu.policy_cpus.as_ref().or(vcpu.operator_cpus.as_ref())),
            or_dash(vcpu.operator_cpus.as_ref()),
            vcpu.pressure.map_or_else(|| "-".to_owned(), |pressure| format!("{pressure:.1}")),
            text(&vcpu.kind),
            or_dash(vcpu.affinity),
            percent(vcpu.remote_share),
            percent(vcpu.ran_share),
            percent(vcpu.wait_share),
            percent(vcpu.throttled_share),
            quality(vcpu),
            vcpu.moves.to_string(),
        ]);
    }
    text += &table.text(2);
    if let Some(others) = &vm.others {
        text += &others_text(others);
    }
    if let Some(memory) = &vm.memory {
        text += &memory_text(memory);
    }
    let last: Vec<_> = vm.vcpus.iter().filter_map(|vcpu| Some(vcpu.last.as_ref()?.text(vcpu.vcpu))).collect();
    if !last.is_empty() {
        text += "\nLast steps\n";
        last.iter().for_each(|step| text += &format!("  {}\n", plain(step)));
    }
    text
}

fn others_text(others: &OtherThreads) -> String {
    let mut text = String::new();
    if let Some(cpus) = &others.cpus {
        text += &format!("\nThreads that run no vCPU: {} follow to CPUs {cpus}\n", others.threads);
    }
    if let Some(problem) = &others.problem {
        text += &format!("\nThreads that run no vCPU cannot follow: {}\n", plain(problem));
    }
    text
}

fn memory_text(memory: &MemoryMoves) -> String {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let mut text = format!("\nMemory: {} moved, in {} moves", mib(memory.bytes), memory.moves);
    if !memory.last.ended {
        text += &format!("; under way: {}", mib(memory.last.moved_bytes));
    }
    text + &format!("\n  {}\n", plain(&memory.last.text()))
}

/// Where the figures of a vCPU come from.
pub fn quality(vcpu: &VcpuScheduling) -> String {
    let quality = vcpu.quality.as_deref().map_or_else(|| "none yet".to_owned(), plain);
    match vcpu.counted_permille {
        Some(permille) if permille < 1000 => format!("{quality} {} %", permille / 10),
        _ => quality,
    }
}

/// A share in percent.
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{MemoryStep, PolicyStep};

    fn vm() -> Scheduling {
        let cpus = |list: &str| Some(list.parse().expect("a list"));
        let step = PolicyStep {
            policy: "vprobe".into(),
            cause: "its memory is there".into(),
            from: Some(0),
            to: Some(1),
            cpus: cpus("4-7"),
            remote_share: Some(1.0),
            expected_remote_share: Some(0.0),
            ..PolicyStep::default()
        };
        let counted = VcpuScheduling {
            vcpu: 0,
            node: Some(1),
            standing: Some("free".into()),
            quality: Some("counted".into()),
            counted_permille: Some(505),
            pressure: Some(21.25),
            kind: Some("LLC-T".into()),
            affinity: Some(1),
            remote_share: Some(0.041),
            ran_share: Some(0.98),
            wait_share: Some(0.02),
            throttled_share: Some(0.25),
            entitled_share: Some(1.0),
            weight: Some(100),
            operator_cpus: cpus("0-7"),
            policy_cpus: cpus("4-7"),
            set_by: Some("sched_ext".into()),
            moves: 1,
            last: Some(step),
        };
        let new = VcpuScheduling { vcpu: 1, ..VcpuScheduling::default() };
        let others = OtherThreads { threads: 5, cpus: cpus("4-7"), problem: None };
        let (vcpus, others) = (vec![counted, new], Some(others));
        Scheduling { vm: "web\u{1b}".into(), policy: "vprobe".into(), vcpus, others, ..Scheduling::default() }
    }

    #[test]
    fn a_vm_is_shown_with_its_last_steps() {
        let expected = "\
web\u{fffd}: policy vprobe, by sched_ext

  VCPU  NODE  STANDING  CPUS  OPERATOR'S  PRESSURE  TYPE   MEMORY  REMOTE   RAN  WAITED  THROTTLED  FIGURES       MOVES
     0     1  free      4-7   0-7             21.2  LLC-T       1     4 %  98 %     2 %       25 %  counted 50 %      1
     1     -  -         -     -                  -  -           -       -     -       -          -  none yet          0

Threads that run no vCPU: 5 follow to CPUs 4-7

Last steps
  vCPU 0 is confined to CPUs 4-7 of node 1, by vprobe: its memory is there; remote share 100 % on node 0, 0 % expected on node 1
";
        assert_eq!(show(&vm()), expected);
    }

    #[test]
    fn what_was_moved_of_its_memory_is_shown() {
        let step = MemoryStep {
            policy: "vprobe".into(),
            cause: "its vCPUs may not run there".into(),
            from: 1,
            to: 0,
            bytes: 64 << 20,
            moved_bytes: 16 << 20,
            shared_pages: 3,
            problem: Some("it was\u{1b} stopped".into()),
            ..MemoryStep::default()
        };
        let shown = |ended| {
            let last = MemoryStep { ended, ..step.clone() };
            let vm = Scheduling { memory: Some(MemoryMoves { moves: 2, bytes: 80 << 20, last }), ..vm() };
            show(&vm).split("\n\n").find(|part| part.starts_with("Memory")).map(str::to_owned)
        };
        let ended = "Memory: 80.0 MiB moved, in 2 moves\n  16.0 MiB of 64.0 MiB were moved from node 1 to 0; \
                     3 pages are shared with other processes; it was\u{fffd} stopped";
        assert_eq!(shown(true).as_deref(), Some(ended));
        let begun = "Memory: 80.0 MiB moved, in 2 moves; under way: 16.0 MiB\n  64.0 MiB go from node 1 to 0, by vprobe: \
                     its vCPUs may not run there; remote share 0 %, 0 % expected; 0 ms of work, 0 ms a second saved";
        assert_eq!(shown(false).as_deref(), Some(begun));
    }

    #[test]
    fn a_list_sums_up() {
        let off = Scheduling { vm: "db".into(), policy: "off".into(), ..Scheduling::default() };
        let expected = "\
NAME  POLICY  VCPUS  CONFINED  MOVES  REMOTE  WAITING
web\u{fffd}  vprobe      2         1      1     4 %      2 %
db    off         0         0      0       -        -
";
        assert_eq!(list(&[vm(), off]), expected);
        assert_eq!(list(&[]), "no VMs\n");
    }
}
