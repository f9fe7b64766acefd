//! What policies of vCPUs do for VMs on a NUMA server: `make bench NAME=vprobe`. One program, three places: on the machine it
//! judges (`judge`, `full`), on the lab server it measures (`server`, `measure`), in guests it is the load (`load`).

mod committed;
mod database;
mod full;
mod host;
mod judge;
mod load;
mod picture;
mod raw;
mod server;
mod team;
mod vms;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_common::{ending, guest_memory, report::Files, threads};

#[derive(Parser)]
#[command(name = "bench-vprobe", about = "What policies of vCPUs do for VMs on a NUMA server")]
enum Command {
    /// On a server with counters: measures, and prints a line of JSON for each cell
    Server(server::Arguments),
    /// On the machine: rows, goals and a picture from what was measured
    Judge(Files),
    /// On a server with counters: measures cells of the full run, and prints a line of JSON for each
    Measure(full::measure::Arguments),
    /// On the machine: what the full run has, and what it needs
    Full(full::Arguments),
    /// In a guest: a program that runs for ever
    Load(load::Arguments),
}

fn main() -> ExitCode {
    ending::main(|command: Command| match command {
        Command::Server(arguments) => server::run(&arguments),
        Command::Judge(files) => judge::run(&files),
        Command::Measure(arguments) => full::measure::run(&arguments),
        Command::Full(arguments) => full::run(&arguments),
        Command::Load(arguments) => load::run(&arguments),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Command::command().debug_assert();
    }
}
