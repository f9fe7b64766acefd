//! Figures.

use serde::Serialize;
use std::time::Duration;

/// Everything that was measured: wall clock, on this machine.
#[derive(Serialize)]
pub struct Report {
    /// A page fault that a handler of the same process serves, without any transport.
    pub local_fault_us: Option<Quantiles>,
    pub rows: Vec<Row>,
    pub transports: Vec<Transfer>,
}

/// Remote page faults.
#[derive(Serialize)]
pub struct Row {
    pub transport: &'static str,
    pub mode: &'static str,
    pub access: Option<&'static str>,
    pub threads: usize,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub faults_per_s: f64,
    /// Messages and bytes of a fault, frames' headers included.
    pub messages: f64,
    pub bytes: f64,
    /// How long the network side polls before it sleeps.
    pub spin_us: u64,
    /// A request and a page on the same transport, without a fault: of the floor only.
    pub exchange_us: Option<Quantiles>,
}

/// A transport by itself.
#[derive(Serialize)]
pub struct Transfer {
    pub transport: &'static str,
    pub spin_us: u64,
    pub size_bytes: usize,
    /// There and back, with as many bytes in both directions.
    pub round_trip_us: Quantiles,
    pub bandwidth_mib_per_s: f64,
}

/// Nearest rank.
#[derive(Clone, Copy, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub samples: usize,
}

impl Quantiles {
    /// Of at least one sample.
    pub fn of(samples: &mut [Duration]) -> Self {
        samples.sort_unstable();
        let at = |percent: usize| {
            let rank = (samples.len() * percent).div_ceil(100).clamp(1, samples.len());
            samples[rank - 1].as_nanos() as f64 / 1000.0
        };
        Self { p50: at(50), p90: at(90), p99: at(99), samples: samples.len() }
    }
}

impl Report {
    pub fn new() -> Self {
        Self { local_fault_us: None, rows: Vec::new(), transports: Vec::new() }
    }

    pub fn print(&self) {
        if let Some(fault) = &self.local_fault_us {
            println!(
                "local fault            p50 {:8.1}  p90 {:8.1}  p99 {:8.1} us",
                fault.p50, fault.p90, fault.p99
            );
        }
        for row in &self.rows {
            let Row { transport, mode, threads, spin_us, p50_us, p90_us, p99_us, messages, bytes, .. } = row;
            let access = row.access.unwrap_or("-");
            println!(
                "{mode} {transport:<8} {access} threads {threads} spin {spin_us:>3} p50 {p50_us:8.1}  p90 {p90_us:8.1}  \
                 p99 {p99_us:8.1} us, {:.0} faults/s, {messages:.1} messages, {bytes:.0} bytes",
                row.faults_per_s
            );
        }
        for row in &self.rows {
            if let Some(Quantiles { p50, p90, .. }) = row.exchange_us {
                println!("exchange {} spin {}: p50 {p50:.1} p90 {p90:.1} us", row.transport, row.spin_us);
            }
        }
        for Transfer { transport, spin_us, size_bytes, round_trip_us, bandwidth_mib_per_s } in
            &self.transports
        {
            println!(
                "{transport:<8} spin {spin_us:>3} {size_bytes:>8} B p50 {:8.1}  p90 {:8.1}  p99 {:8.1} us, \
                 {bandwidth_mib_per_s:8.0} MiB/s",
                round_trip_us.p50, round_trip_us.p90, round_trip_us.p99
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples_by_their_rank() {
        let mut samples: Vec<Duration> = (1..=200).rev().map(Duration::from_micros).collect();
        let Quantiles { p50, p90, p99, samples } = Quantiles::of(&mut samples);
        assert_eq!((p50, p90, p99, samples), (100.0, 180.0, 198.0, 200));
        let one = Quantiles::of(&mut [Duration::from_micros(7)]);
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
    }
}
