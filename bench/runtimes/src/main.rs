//! What language runtimes and allocators in a VM lose when its vCPUs move: `make bench NAME=runtimes`. One program, three places: on
//! the machine it judges (`judge`), on the lab server it measures (`server`), in the guest it is a load (`guest`).

mod committed;
mod guest;
mod judge;
mod load;
mod mover;
mod picture;
mod raw;
mod server;
mod vm;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_common::{ending, report::Files};

#[derive(Parser)]
#[command(
    name = "bench-runtimes",
    about = "What language runtimes and allocators in a VM lose when its vCPUs move"
)]
enum Command {
    /// On a server with counters: measures, and prints a line of JSON for each cell
    Server(server::Arguments),
    /// On the machine: rows, goals and a picture from what was measured
    Judge(Files),
    /// In the guest: a load that does what its standard input says
    Guest(guest::Arguments),
}

fn main() -> ExitCode {
    ending::main(|command: Command| match command {
        Command::Server(arguments) => server::run(&arguments),
        Command::Judge(files) => judge::run(&files),
        Command::Guest(arguments) => guest::run(&arguments),
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
