//! A fleet of servers on which VMs start and stop, simulated: what share of them is near its devices, what share is refused
//! though it would fit, and how free resources are scattered, by vnuma's rules and by those of others.
//!
//! `cargo xtask bench fleet` runs it. The report has no measured figures: nothing runs.

mod fleet;
mod kubernetes;
mod nova;
mod random;
mod server;
mod vnuma;
mod workload;

use clap::Parser;
use fleet::{Outcome, run};
use serde::Serialize;
use server::{Model, Strategy};
use std::process::ExitCode;
use vnuma_bench_figures::ending;

/// Simulates a fleet and prints what each rule made of it.
#[derive(Parser)]
struct Arguments {
    /// Seed of arrivals, sizes and lifetimes, the same for each rule
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// VMs that start, and stop again
    #[arg(long, default_value_t = 10_000)]
    starts: u32,
    /// Servers
    #[arg(long, default_value_t = 8)]
    servers: usize,
    /// CPUs that are asked for, as a share of the fleet's
    #[arg(long, default_value_t = 0.95)]
    load: f64,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    kind: &'static str,
    seed: u64,
    starts: u32,
    servers: usize,
    load: f64,
    sizes: &'static str,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    server: &'static str,
    rule: &'static str,
    #[serde(flatten)]
    outcome: Outcome,
}

fn main() -> ExitCode {
    ending::main(simulate)
}

fn simulate(Arguments { seed, starts, servers, load, json }: Arguments) -> anyhow::Result<()> {
    anyhow::ensure!((1..=1_000_000).contains(&starts), "--starts {starts}: expected 1 to 1000000");
    anyhow::ensure!((1..=1000).contains(&servers), "--servers {servers}: expected 1 to 1000");
    anyhow::ensure!((0.01..=10.0).contains(&load), "--load {load}: expected 0.01 to 10");
    let mut rows = Vec::new();
    for model in Model::ALL {
        let workload = workload::generate(seed, starts, load, model, servers);
        let mut rules: [(&'static str, Box<dyn Strategy>); 6] = [
            ("vnuma", Box::new(vnuma::Vnuma::required())),
            ("vnuma-preferred", Box::new(vnuma::Vnuma::preferred())),
            ("nova-pack", Box::new(nova::Nova { pack: true })),
            ("nova-spread", Box::new(nova::Nova { pack: false })),
            ("kubernetes-best-effort", Box::new(kubernetes::BestEffort)),
            ("random", Box::new(random::Random::new(seed))),
        ];
        for (rule, strategy) in &mut rules {
            let outcome = run(model, servers, &workload, strategy.as_mut());
            rows.push(Row { server: model.name(), rule, outcome });
        }
    }
    if !json {
        print_table(&rows);
        return Ok(());
    }
    let kind = "simulated: no VM was started, and nothing was measured";
    let report = Report { kind, seed, starts, servers, load, sizes: workload::SOURCE, rows };
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

fn print_table(rows: &[Row]) {
    let heads = [
        "server",
        "rule",
        "started",
        "refused",
        "though it fits",
        "devices local",
        "home share",
        "split",
        "stranded",
    ];
    println!(
        "{:<10} {:<22} {:>8} {:>8} {:>14} {:>13} {:>10} {:>6} {:>8}",
        heads[0], heads[1], heads[2], heads[3], heads[4], heads[5], heads[6], heads[7], heads[8]
    );
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    for Row { server, rule, outcome } in rows {
        println!(
            "{server:<10} {rule:<22} {:>8} {:>8} {:>14} {:>13} {:>10} {:>6} {:>8}",
            outcome.started,
            percent(outcome.refused_share),
            percent(outcome.refused_though_it_fits_share),
            percent(outcome.devices_local_share),
            percent(outcome.vcpus_at_home_share),
            percent(outcome.split_share),
            percent(outcome.stranded_share),
        );
    }
}
