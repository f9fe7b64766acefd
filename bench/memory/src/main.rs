//! What memory policies do for VMs whose memory is displaced: `make bench NAME=memory`. One program, three places: on the machine
//! it judges (`judge`), on the lab server it measures (`server`), in the guest it is the load (`guest`).

mod cause;
mod committed;
mod damon;
mod guest;
mod judge;
mod picture;
mod policy;
mod raw;
mod server;
mod size;
mod store;
mod vm;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_common::{ending, report::Files};

#[derive(Parser)]
#[command(name = "bench-memory", about = "What memory policies do for VMs whose memory is displaced")]
enum Command {
    /// On a server with counters: measures, and prints a line of JSON for each cell
    Server(server::Arguments),
    /// On the machine: rows, goals and a picture from what was measured
    Judge(Files),
    /// In the guest: a program that does what its standard input says
    Guest,
}

fn main() -> ExitCode {
    ending::main(|command: Command| match command {
        Command::Server(arguments) => server::run(&arguments),
        Command::Judge(files) => judge::run(&files),
        Command::Guest => guest::run(),
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
