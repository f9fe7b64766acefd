//! `vnuma-sim`: runs the simulation.

#![forbid(unsafe_code)]

use clap::{Parser, ValueEnum};
use std::{
    io::{IsTerminal, Write},
    process::ExitCode,
    time::{Duration, Instant},
};
use vnuma_sim::{Fault, Outcome, Settings, Simulation};

/// Runs vnumad's core among simulated VMs that misbehave, and checks what it does. A seed always gives the same run.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds to run, one after the other.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Run this seed twice, and compare every command.
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seed", "seeds"])]
    replay: Option<u64>,
    /// VMs.
    #[arg(long, default_value_t = 2000)]
    vms: usize,
    /// Events before faults end.
    #[arg(long, default_value_t = 300_000)]
    events: u64,
    /// Start no further seed after so many seconds.
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Put in a fault on purpose: the run must find it.
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// Put in each fault in turn.
    #[arg(long, conflicts_with_all = ["fault", "replay"])]
    faults: bool,
    /// Print all events and commands in which this text occurs, such as `tid: 2010` or `Publish(17,`.
    #[arg(long, value_name = "TEXT")]
    trace: Option<String>,
    /// Print each result as a line of JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let good = if arguments.faults {
        Fault::value_variants().iter().filter(|fault| !found(&arguments, **fault)).count() == 0
    } else if let Some(seed) = arguments.replay {
        replayed(&arguments, seed)
    } else {
        all_hold(&arguments)
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn settings(arguments: &Arguments, seed: u64) -> Settings {
    Settings { seed, vms: arguments.vms, events: arguments.events, fault: arguments.fault }
}

/// Runs one seed, and says how fast that was.
fn run(settings: Settings, arguments: &Arguments) -> Outcome {
    let begun = Instant::now();
    let mut shown = begun;
    let terminal = std::io::stderr().is_terminal();
    let simulation = Simulation::new(settings).traced(arguments.trace.clone());
    let outcome = simulation.run(|events| {
        if terminal && events % 1024 < 8 && shown.elapsed() > Duration::from_millis(200) {
            shown = Instant::now();
            eprint!("\rseed {}: {events} of {} events", settings.seed, settings.events);
            let _ = std::io::stderr().flush();
        }
    });
    if terminal {
        eprint!("\r\x1b[K");
    }
    let taken = begun.elapsed().as_secs_f64();
    if arguments.json {
        println!("{}", serde_json::json!({ "outcome": outcome, "wall_s": taken }));
    } else {
        println!(
            "seed {}: {} events in {taken:.1} s ({:.0} per second), {:.0} simulated seconds, {} VMs, {} commands, {} \
             checks, hash {}",
            outcome.seed,
            outcome.events,
            outcome.events as f64 / taken,
            outcome.simulated_s,
            settings.vms,
            outcome.commands,
            outcome.checks,
            outcome.hash
        );
    }
    outcome
}

fn all_hold(arguments: &Arguments) -> bool {
    let begun = Instant::now();
    let mut counts = std::collections::BTreeMap::<&str, u64>::new();
    for seed in arguments.seed..arguments.seed.saturating_add(arguments.seeds) {
        if arguments.seconds.is_some_and(|seconds| begun.elapsed().as_secs() >= seconds) {
            break;
        }
        let outcome = run(settings(arguments, seed), arguments);
        if let Some(broken) = &outcome.broken {
            let Arguments { vms, events, .. } = arguments;
            eprintln!("seed {seed}: {broken}");
            eprintln!("again: cargo run -p vnuma-sim -- --seed {seed} --vms {vms} --events {events}");
            return arguments.fault.is_some();
        }
        for (what, count) in outcome.counts {
            *counts.entry(what).or_default() += count;
        }
    }
    if !arguments.json {
        let list: Vec<_> = counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        println!("{}", list.join(", "));
    }
    if let Some(fault) = arguments.fault {
        eprintln!("the fault {fault:?} was not found");
    }
    arguments.fault.is_none()
}

fn replayed(arguments: &Arguments, seed: u64) -> bool {
    let first = run(settings(arguments, seed), arguments);
    let second = run(settings(arguments, seed), arguments);
    let same = (&first.hash, first.events, &first.broken) == (&second.hash, second.events, &second.broken);
    if !same {
        eprintln!("seed {seed}: the second run differs from the first");
    }
    same && first.broken.is_none()
}

/// Is a fault found that was put in?
fn found(arguments: &Arguments, fault: Fault) -> bool {
    let settings = Settings { fault: Some(fault), ..settings(arguments, arguments.seed) };
    let outcome = Simulation::new(settings).run(|_| {});
    match &outcome.broken {
        Some(broken) => println!("{fault:?}: found after {} events: {broken}", outcome.events),
        None => println!("{fault:?}: NOT found in {} events ({} strikes)", outcome.events, outcome.strikes),
    }
    outcome.broken.is_some()
}
