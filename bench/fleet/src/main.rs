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
use serde_json::json;
use server::{Model, Strategy};
use std::process::ExitCode;
use vnuma_bench_figures::{
    cells::{Cells, Options},
    ending,
    goals::Limit,
    report::{self, Results},
};

/// Simulates a fleet and prints what each rule made of it.
#[derive(Parser)]
struct Arguments {
    /// Seed of arrivals, sizes and lifetimes, the same for each rule
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// VMs that start, and stop again [default: 10000, of a short form 200]
    #[arg(long)]
    starts: Option<u32>,
    /// Servers
    #[arg(long, default_value_t = 8)]
    servers: usize,
    /// CPUs that are asked for, as a share of the fleet's
    #[arg(long, default_value_t = 0.95)]
    load: f64,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    results: Results,
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

fn simulate(Arguments { seed, starts, servers, load, options, results }: Arguments) -> anyhow::Result<()> {
    let starts = starts.unwrap_or(if results.form.smoke { 200 } else { 10_000 });
    anyhow::ensure!((1..=1_000_000).contains(&starts), "--starts {starts}: expected 1 to 1000000");
    anyhow::ensure!((1..=1000).contains(&servers), "--servers {servers}: expected 1 to 1000");
    anyhow::ensure!((0.01..=10.0).contains(&load), "--load {load}: expected 0.01 to 10");
    let (mut rows, mut cells) = (Vec::new(), Cells::stored(&options)?);
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
            let server = model.name();
            let fleet = format!("seed {seed}, {starts} VMs, {servers} servers, load {load}");
            let outcome = cells.measure(&format!("{server}, {rule}, {fleet}"), || {
                let outcome = run(model, servers, &workload, strategy.as_mut());
                let shown = format!("{} VMs started", outcome.started);
                Ok((outcome, shown))
            })?;
            rows.extend(outcome.map(|outcome| Row { server, rule, outcome }));
        }
    }
    let columns = "server rule started refused_share:4 refused_though_it_fits_share:4 devices_local_share:4 \
        vcpus_at_home_share:4 split_share:4 stranded_share:4";
    let report = json!({
        "kind": "simulated: no VM was started, and nothing was measured",
        "commit": options.commit,
        "measured_by": cells.measured_by,
        "seed": seed,
        "starts": starts,
        "servers": servers,
        "load": load,
        "sizes": workload::SOURCE,
        "rows": rows,
    });
    // Nothing is expected of it: what rules make of a fleet is compared.
    results.end::<Limit>(&report, &report::table(columns, &rows), &[])?;
    cells.end()
}
