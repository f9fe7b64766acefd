//! The report of a measurement: counts, and modelled cycles under every profile that may price them.

use std::fmt::Write;

use vnuma_abi_lab_counters::{FULL, Header};
use vnuma_lab_pricing::{CounterProfile, Counts, Cycles, ProfileError, by_name, names, price};

use crate::counters::Measured;

/// A measurement with its prices.
#[derive(Debug, serde::Serialize)]
pub struct Report {
    /// The profile that the server counts with.
    pub profile: String,
    /// Whether one set in 16 or each was modelled.
    pub sampled: bool,
    /// What was counted.
    #[serde(flatten)]
    pub measured: Measured,
    /// Guest time from start to end, in nanoseconds.
    pub elapsed_ns: u64,
    /// Modelled cycles, the server's own profile first.
    pub modelled: Vec<Modelled>,
    /// Parts, such as the vCPUs of a VM.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
}

/// A part of what was measured.
#[derive(Debug, serde::Serialize)]
pub struct Part {
    /// What it is.
    pub name: String,
    /// Its thread.
    pub tid: i32,
    /// What was counted.
    #[serde(flatten)]
    pub measured: Measured,
}

/// Modelled cycles under one profile.
#[derive(Debug, serde::Serialize)]
pub struct Modelled {
    /// Its name.
    pub profile: String,
    /// What machine that is.
    pub title: String,
    /// The cycles and where they went.
    pub cycles: Cycles,
    /// Modelled cycles per instruction.
    pub cycles_per_instruction: f64,
    /// Nanoseconds of guest time per modelled nanosecond: how much slower the emulation is.
    pub dilation: f64,
}

impl Report {
    /// Prices a measurement.
    pub fn new(
        header: &Header,
        measured: Measured,
        elapsed_ns: u64,
        parts: Vec<Part>,
    ) -> Result<Self, ProfileError> {
        let own = by_name(header.profile_name())?;
        let shape = own.shape();
        let beside = shape.with_llc(header.second_sets, header.second_ways);
        let mut all = vec![modelled(&own, &measured, &measured.counts)];
        for name in names().filter(|name| *name != own.name) {
            let other = by_name(name)?;
            if other.shape() == shape {
                all.push(modelled(&other, &measured, &measured.counts));
            } else if let Some(counts) = measured.counts.by_second().filter(|_| other.shape() == beside) {
                all.push(modelled(&other, &measured, &counts));
            }
        }
        let modelled = all;
        let sampled = header.sample_shift != FULL;
        Ok(Self { profile: own.name, sampled, measured, elapsed_ns, modelled, parts })
    }

    /// The report as a table.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let counts = &self.measured.counts;
        let mut line = |name: &str, value: u64| {
            let _ = writeln!(out, "{value:>18}  {name}");
        };
        line("instructions", counts.instructions);
        line("loads", counts.loads);
        line("stores", counts.stores);
        line("LLC references", counts.llc_references);
        line("LLC misses", counts.llc_misses);
        line("  of them streamed", counts.llc_misses_streamed);
        if let Some(second) = &counts.second {
            line("misses of the second LLC", second.llc_misses);
            line("  of them streamed", second.llc_misses_streamed);
        }
        for (node, value) in counts.memory_by_node().into_iter().enumerate() {
            line(&format!("DRAM accesses, node {node}"), value);
        }
        for (what, by_node) in
            [("reads", &counts.mmio_reads_by_node), ("writes", &counts.mmio_writes_by_node)]
        {
            for (node, &value) in by_node.iter().enumerate().filter(|(_, value)| **value > 0) {
                line(&format!("MMIO {what}, node {node}"), value);
            }
        }
        line("MMIO accesses, other", counts.mmio_other);
        for part in &self.parts {
            let memory = part.measured.counts.memory_by_node();
            let _ = writeln!(out, "\n{} (thread {}): DRAM accesses by node {memory:?}", part.name, part.tid);
        }
        let _ = writeln!(
            out,
            "\n{:>18}  {:>9} {:>7} {:>7} {:>7} {:>7} {:>9}  modelled under profile",
            "modelled cycles", "per insn", "LLC", "local", "remote", "MMIO", "dilation"
        );
        for Modelled { profile, title, cycles, cycles_per_instruction, dilation } in &self.modelled {
            let share = |part: f64| if cycles.total > 0.0 { part / cycles.total * 100.0 } else { 0.0 };
            let _ = writeln!(
                out,
                "{:>18.0}  {cycles_per_instruction:>9.2} {:>6.1}% {:>6.1}% {:>6.1}% {:>6.1}% {dilation:>9.1}  {profile} ({title})",
                cycles.total,
                share(cycles.llc),
                share(cycles.local),
                share(cycles.remote),
                share(cycles.mmio_local + cycles.mmio_remote),
            );
        }
        out
    }
}

fn modelled(profile: &CounterProfile, measured: &Measured, counts: &Counts) -> Modelled {
    let cycles = price(counts, &profile.prices());
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    Modelled {
        profile: profile.name.clone(),
        title: profile.title.clone(),
        cycles,
        cycles_per_instruction: ratio(cycles.total, measured.counts.instructions as f64),
        dilation: ratio(measured.task_clock_ns as f64, cycles.total / profile.clock_ghz),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_lab_pricing::SecondLlc;

    fn header(profile: &str) -> Header {
        let mut bytes = vec![0; size_of::<Header>()];
        bytes[..8].copy_from_slice(&vnuma_abi_lab_counters::MAGIC.to_le_bytes());
        bytes[8] = vnuma_abi_lab_counters::VERSION_MAJOR as u8;
        let mut header = Header::from_bytes(&bytes).unwrap();
        header.profile[..profile.len()].copy_from_slice(profile.as_bytes());
        header
    }

    fn measured() -> Measured {
        let counts = Counts {
            instructions: 1000,
            base_cycles: 1000,
            llc_references: 100,
            llc_misses: 100,
            dram_by_class: vec![0, 100],
            streamed_by_class: vec![0, 0],
            dram_by_node: vec![0, 100],
            streamed_by_node: vec![0, 0],
            ..Counts::default()
        };
        Measured { counts, kernel_cycles: 0, task_clock_ns: 134_000 }
    }

    #[test]
    fn profiles_of_one_shape_price_one_measurement_differently() {
        let report = Report::new(&header("broadwell-2s"), measured(), 1, Vec::new()).unwrap();
        let names: Vec<_> = report.modelled.iter().map(|modelled| modelled.profile.as_str()).collect();
        assert_eq!(names, ["broadwell-2s", "broadwell-2s-high"]);
        assert!(report.modelled[0].cycles.total < report.modelled[1].cycles.total);
        // 1000 + 100 * 133.4 ns * 2.2 GHz = 30348 cycles = 13795 ns.
        assert!((report.modelled[0].cycles.total - 30348.0).abs() < 100.0);
        assert!((report.modelled[0].dilation - 134_000.0 / 13_795.0).abs() < 0.1);
        let table = report.table();
        assert!(table.contains("100  DRAM accesses, node 1"), "{table}");
        assert!(table.contains("broadwell-2s-high"), "{table}");
    }

    #[test]
    fn the_second_cache_is_priced_under_the_profiles_that_have_it() {
        let second = SecondLlc {
            llc_misses: 50,
            llc_misses_streamed: 0,
            dram_by_class: vec![50, 0],
            streamed_by_class: vec![0, 0],
        };
        let mut measured = measured();
        measured.counts.second = Some(second);
        let e5620 = by_name("vprobe-e5620").unwrap().shape();
        let mut header = header("broadwell-2s");
        (header.second_sets, header.second_ways) = (e5620.llc_sets, e5620.llc_ways);
        let report = Report::new(&header, measured.clone(), 1, Vec::new()).unwrap();
        let names: Vec<_> = report.modelled.iter().map(|modelled| modelled.profile.as_str()).collect();
        assert_eq!(names, ["broadwell-2s", "broadwell-2s-high", "vprobe-e5620"]);
        // 1000 + 50 hits of 42 cycles + 50 * 83.7 ns * 2.4 GHz.
        assert!((report.modelled[2].cycles.total - 13_144.0).abs() < 1.0, "{:?}", report.modelled[2]);
        assert!(report.table().contains("50  misses of the second LLC"), "{}", report.table());
        // Of another cache than the profile's.
        header.second_ways = 8;
        assert_eq!(Report::new(&header, measured, 1, Vec::new()).unwrap().modelled.len(), 2);
    }

    #[test]
    fn a_server_with_an_unknown_profile_is_refused() {
        let error = Report::new(&header("newer"), measured(), 1, Vec::new()).unwrap_err().to_string();
        assert!(error.contains("\"newer\""), "{error}");
    }
}
