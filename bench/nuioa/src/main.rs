//! What the place of a VM costs its workloads on passthrough devices: `make bench NAME=nuioa`. One program, four places: on the
//! machine it judges (`judge`), on the lab server it measures (`server`), on a second one it is the other end (`peer`), in guests it
//! drives the load (`guest`).

mod committed;
mod guest;
mod judge;
mod memcached;
mod peer;
mod picture;
mod raw;
mod server;
mod sockets;
mod ticks;
mod vm;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_common::{ending, report::Files};

#[derive(Parser)]
#[command(name = "bench-nuioa", about = "What the place of a VM costs its workloads on passthrough devices")]
enum Command {
    /// On a server with counters: measures, and prints a line of JSON for each cell
    Server(server::Arguments),
    /// On the machine: rows, goals and a picture from what was measured
    Judge(Files),
    /// In a guest: a workload that goes and halts as its standard input says
    Guest(guest::Arguments),
    /// In the guest that knows its devices: vnuma-guest, with rules for the workloads
    Agent,
    /// On the second server: the other end of workloads on the network, as its standard input says
    Peer,
    /// On the server: reads the other node's memory without end
    Neighbour(server::Neighbour),
}

fn main() -> ExitCode {
    ending::main(|command: Command| match command {
        Command::Server(arguments) => server::run(&arguments),
        Command::Judge(files) => judge::run(&files),
        Command::Guest(arguments) => guest::run(&arguments),
        Command::Agent => guest::agent::run(),
        Command::Peer => peer::run(),
        Command::Neighbour(arguments) => server::neighbour(&arguments),
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
