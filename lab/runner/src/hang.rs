//! What a server that hangs can be asked before it is stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use vnuma_lab_agent::protocol::Exec;
use vnuma_lab_qmp::Qmp;

/// How long the server's kernel has for its part.
pub(crate) const KERNEL_LIMIT: Duration = Duration::from_secs(30);
/// How long QEMU has for an answer.
const MONITOR_LIMIT: Duration = Duration::from_secs(5);

/// Processes that wait for the kernel, where CPUs are, and what the kernel has said of either. Interrupts and the clock are read twice:
/// a CPU without a timer does not count on.
const LOOK: &str = "ps -eLo pid,tid,stat,psr,wchan:32,args --sort=pid | grep -v ']$' | cut -c1-160; \
    for look in 1 2; do cat /proc/uptime; grep -E 'CPU|LOC|RES|CAL|TLB' /proc/interrupts; sleep 1; done; \
    dmesg -C; echo w > /proc/sysrq-trigger; echo l > /proc/sysrq-trigger; echo q > /proc/sysrq-trigger; sleep 1; \
    dmesg | cut -c1-160 | grep -vE '(R[0-9A-D][0-9A-Z]|RSP|RBP|Code|FS|CS|CR2): |\\]   \\.|\\] active timers|clock [0-7]:|^(, .*|)$'";

/// The command that asks the server's kernel.
pub(crate) fn look() -> Exec {
    Exec { argv: ["sh", "-c", LOOK].map(str::to_owned).into(), ..Exec::default() }
}

/// Between looks for CPUs that wait for what has come, and how many in a row are one too many: a server's kernel has a timer of four seconds
/// on each CPU.
pub(crate) const WATCH_INTERVAL: Duration = Duration::from_secs(20);
const MOST_LOOKS: u32 = 3;

/// Looks for CPUs that no program could leave so.
#[derive(Default)]
pub(crate) struct Watch(BTreeMap<usize, (Waits, u32)>);

/// What a CPU's timer was set to, and what its interrupt controller holds back. One that goes on sets its timer to something else.
type Waits = (Option<u64>, String);

impl Watch {
    /// CPUs that wait for what has come at this look and at those before.
    pub(crate) fn look(&mut self, cpus: &str) -> Vec<usize> {
        let waiting = waiting(cpus);
        self.0.retain(|cpu, (before, _)| waiting.get(cpu) == Some(before));
        for (cpu, waits) in waiting {
            self.0.entry(cpu).or_insert((waits, 0)).1 += 1;
        }
        self.0.iter().filter(|(_, (_, looks))| *looks >= MOST_LOOKS).map(|(&cpu, _)| cpu).collect()
    }
}

/// CPUs that are halted and take interrupts, while their interrupt controller holds one back or their timer has fired and was not set again.
fn waiting(cpus: &str) -> BTreeMap<usize, Waits> {
    let (mut halted, mut has_come, mut cpu) = (BTreeSet::new(), BTreeMap::new(), 0);
    for line in cpus.lines().map(str::trim) {
        let Some(rest) = line.strip_prefix("CPU#") else {
            // Bit 9 of the flags is that for interrupts.
            let flags = line.split(' ').find_map(|word| word.strip_prefix("RFL="));
            let flags = flags.and_then(|flags| u64::from_str_radix(flags, 16).ok());
            if line.ends_with("HLT=1") && flags.is_some_and(|flags| flags & 0x200 != 0) {
                halted.insert(cpu);
            }
            continue;
        };
        cpu = rest.split(':').next().and_then(|number| number.parse().ok()).unwrap_or_default();
        let interrupts = rest.split_once("IRR").map_or("", |(_, interrupts)| interrupts.trim());
        let held = !interrupts.is_empty() && !interrupts.contains("none");
        let count = |name| -> Option<u64> {
            let number = rest.split_once(name)?.1.split(|c: char| !c.is_ascii_digit()).next()?;
            number.parse().ok()
        };
        let fired =
            count("initial_count = ").is_some_and(|count| count > 0) && count("current_count = ") == Some(0);
        if held || fired {
            has_come.insert(cpu, (count("initial_count = "), interrupts.to_owned()));
        }
    }
    has_come.retain(|cpu, _| halted.contains(cpu));
    has_come
}

/// Where QEMU says that the CPUs are.
pub(crate) fn cpus(monitor: &Path) -> String {
    let look = || -> anyhow::Result<String> {
        let mut monitor = Qmp::connect_within(monitor, MONITOR_LIMIT)?;
        let mut show = |what: &str, cpu: usize| -> anyhow::Result<String> {
            let arguments = serde_json::json!({ "command-line": what, "cpu-index": cpu });
            let shown = monitor.run_with("human-monitor-command", &arguments)?;
            Ok(shown.as_str().unwrap_or_default().to_owned())
        };
        let registers = show("info registers -a", 0)?;
        let mut text = shown(&registers);
        for cpu in 0..registers.lines().filter(|line| line.starts_with("CPU#")).count() {
            text.push_str(&format!("  CPU#{cpu}: {}\n", pending(&show("info lapic", cpu)?)));
        }
        Ok(text)
    };
    look().unwrap_or_else(|error| format!("  {error:#}\n"))
}

/// A line per CPU of QEMU's pages of registers: where it is, whether it takes interrupts, whether it is halted.
fn shown(registers: &str) -> String {
    let lines = registers.lines().map(str::trim);
    let kept = lines.filter(|line| line.starts_with("CPU#") || line.starts_with("RIP="));
    kept.map(|line| format!("  {line}\n")).collect()
}

/// What a CPU's interrupt controller serves, what it has not delivered, and its timer, of QEMU's page about it.
fn pending(lapic: &str) -> String {
    let lines = lapic.lines().map(str::trim);
    let kept: Vec<_> =
        lines.filter(|line| ["Timer", "ISR", "IRR"].iter().any(|name| line.starts_with(name))).collect();
    kept.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_place_of_a_cpu_is_shown() {
        let text = "\nCPU#0\r\nRAX=0 RBX=0\r\nRIP=ffffffff81 RFL=00000246 HLT=1\r\nES =0000\r\n";
        assert_eq!(shown(text), "  CPU#0\n  RIP=ffffffff81 RFL=00000246 HLT=1\n");
    }

    #[test]
    fn what_is_not_delivered_is_shown() {
        let text = "\r\nLVT0 \t 0x00010700\r\nTimer\t initial_count = 7 current_count = 5\r\nISR\t (none)\r\nIRR\t 236 \r\n\r\n\
                    APR 0x00 TPR 0x00\r\n";
        assert_eq!(pending(text), "Timer\t initial_count = 7 current_count = 5, ISR\t (none), IRR\t 236");
    }

    /// A CPU: its flags, whether it is halted, what its timer was set to and has left, what its interrupt controller holds back.
    type Cpu = (&'static str, u8, u32, u32, &'static str);
    const IDLE: Cpu = ("00000202", 1, 99, 1, "(none)");
    const HELD: Cpu = ("00000246", 1, 99, 1, "236 ");
    const FIRED: Cpu = ("00000246", 1, 99, 0, "(none)");

    fn page(cpus: &[Cpu]) -> String {
        let place = |(cpu, (flags, halted, ..)): (usize, &Cpu)| {
            format!("  CPU#{cpu}\n  RIP=ffffffff821b8d0f RFL={flags} [-------] CPL=0 HLT={halted}\n")
        };
        let controller = |(cpu, (_, _, set, left, held)): (usize, &Cpu)| {
            format!(
                "  CPU#{cpu}: Timer\t DCR=0x3 (divide by 16) initial_count = {set} current_count = {left}, ISR\t (none), IRR\t {held}\n"
            )
        };
        let all = || cpus.iter().enumerate();
        all().map(place).chain(all().map(controller)).collect()
    }

    #[test]
    fn a_cpu_waits_for_what_has_come() {
        let waiting = |cpus: &str| waiting(cpus).into_keys().collect::<Vec<_>>();
        assert_eq!(waiting(&page(&[IDLE, HELD, FIRED])), [1, 2]);
        for other in [
            IDLE,
            // It runs, takes no interrupts, or has stopped its timer.
            ("00000246", 0, 99, 0, "236 "),
            ("00000046", 1, 99, 0, "236 "),
            ("00000246", 1, 0, 0, "(none)"),
        ] {
            assert_eq!(waiting(&page(&[HELD, other])), [0], "{other:?}");
        }
        assert_eq!(waiting("  /run/qmp.sock: No such file or directory\n"), [0; 0]);
    }

    #[test]
    fn only_cpus_that_wait_for_long_are_left_so() {
        let mut watch = Watch::default();
        let [waits, idle] = [[IDLE, FIRED], [IDLE, IDLE]].map(|cpus| page(&cpus));
        for look in [&waits, &waits, &idle, &waits, &waits] {
            assert_eq!(watch.look(look), [0; 0]);
        }
        assert_eq!(watch.look(&waits), [1]);
    }

    #[test]
    fn a_cpu_that_sets_its_timer_goes_on() {
        let mut watch = Watch::default();
        for set in [99, 98, 97, 96] {
            // It was looked at when the timer had fired, each time.
            assert_eq!(watch.look(&page(&[("00000246", 1, set, 0, "(none)")])), [0; 0], "{set}");
        }
    }

    #[test]
    fn a_monitor_that_is_gone_is_said() {
        let text = cpus(Path::new("/nonexistent/qmp.sock"));
        assert!(text.starts_with("  /nonexistent/qmp.sock: No such file"), "{text}");
    }
}
