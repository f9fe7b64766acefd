//! How fast a guest follows its topology, and what that costs: the part of `make bench NAME=topology` that runs on the lab
//! server and in its guests. Each command prints one JSON object.

mod abuse;
mod clock;
mod cost;
mod daemon;
mod figures;
mod floor;
mod guest;
mod moves;
mod overhead;
mod replug;
mod work;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_figures::ending;

#[derive(Parser)]
#[command(name = "bench-topology", about = "Figures of a guest that follows its topology")]
enum Command {
    /// On the server: latencies of one guest kernel, idle and loaded, and whether it ended up wrong
    Moves(moves::Arguments),
    /// On the server: latencies of the peer, a vCPU that is unplugged and plugged again
    Replug(replug::Arguments),
    /// On the server: how often vnumad wakes up while nothing changes
    Daemon(daemon::Arguments),
    /// On a server with counters: what a guest's own work costs with vnuma and without
    Overhead(overhead::Arguments),
    /// In a guest: a line for each generation, as a program sees it
    Follow,
    /// In a guest: waits until a node has other CPUs
    AwaitCpu {
        /// Guest node
        #[arg(long)]
        node: u32,
    },
    /// On the server: what a VM that is moved for ever, or whose guest rings for ever, costs another one
    Abuse(abuse::Arguments),
    /// In a guest: a fixed amount of work on each CPU
    Work {
        /// Of which kind
        kind: work::Kind,
        /// On this CPU only
        #[arg(long)]
        cpu: Option<usize>,
    },
    /// In a guest: how long its kernel takes to rebuild its scheduler domains
    Rebuild {
        /// How often
        #[arg(long)]
        times: usize,
    },
    /// In a guest: what it costs a program to see that nothing has changed
    Cost,
}

fn main() -> ExitCode {
    ending::main(|command: Command| match command {
        Command::Moves(arguments) => moves::run(&arguments),
        Command::Replug(arguments) => replug::run(&arguments),
        Command::AwaitCpu { node } => replug::await_cpu(node),
        Command::Daemon(arguments) => daemon::run(&arguments),
        Command::Overhead(arguments) => overhead::run(&arguments),
        Command::Follow => guest::follow(),
        Command::Abuse(arguments) => abuse::run(&arguments),
        Command::Work { kind, cpu: None } => work::run(kind),
        Command::Work { kind, cpu: Some(cpu) } => work::on_cpu(cpu, kind),
        Command::Rebuild { times } => floor::rebuild(times),
        Command::Cost => cost::run(),
    })
}
