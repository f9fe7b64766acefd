//! What the place of a VM costs its workloads on passthrough devices: `make bench NAME=nuioa`. One program, three places: on the
//! machine it judges (`judge`), on the lab server it measures (`server`), in guests it drives the load (`guest`).

mod committed;
mod guest;
mod judge;
mod picture;
mod raw;
mod server;
mod vm;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "bench-nuioa", about = "What the place of a VM costs its workloads on passthrough devices")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// On a server with counters: measures, and prints a line of JSON for each cell
    Server(server::Arguments),
    /// On the machine: rows, goals and a picture from what was measured
    Judge(judge::Arguments),
    /// In a guest: a workload that goes and halts as its standard input says
    Guest(guest::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Server(arguments) => server::run(&arguments),
        Command::Judge(arguments) => judge::run(&arguments),
        Command::Guest(arguments) => guest::run(&arguments),
    }
}
