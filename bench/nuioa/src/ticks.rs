//! Interrupts of the timers of CPUs, of a server and of a guest.

use anyhow::{Context, Result};
use std::fs;

const INTERRUPTS: &str = "/proc/interrupts";
/// The line of the timers.
const TIMER: &str = "LOC:";

/// How many a CPU has had.
pub fn of_cpu(cpu: usize) -> Result<u64> {
    let text = fs::read_to_string(INTERRUPTS).context(INTERRUPTS)?;
    of_text(&text, cpu).with_context(|| format!("{INTERRUPTS}: no number of CPU {cpu} in {TIMER}"))
}

fn of_text(interrupts: &str, cpu: usize) -> Option<u64> {
    let line = interrupts.lines().find_map(|line| line.trim_start().strip_prefix(TIMER))?;
    line.split_whitespace().nth(cpu)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_those_of_the_cpu() {
        let text = "           CPU0       CPU1\n  0:  5  6  IO-APIC\nNMI:  0  0  Non-maskable\nLOC:  71  82  Local timer\n";
        assert_eq!((of_text(text, 0), of_text(text, 1), of_text(text, 2)), (Some(71), Some(82), None));
        assert_eq!(of_text("  0:  5  6  IO-APIC\n", 0), None);
    }
}
