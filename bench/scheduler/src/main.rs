//! What scx_vnuma does for guests as a host's scheduler: `make bench NAME=scheduler`. One program, two places: on the machine it judges
//! (`judge`), on the lab server it measures (`server`, `cost`), and is the guests (`guest`).

mod build;
mod code;
mod committed;
mod cost;
mod entitled;
mod judge;
mod load;
mod raw;
mod schedulers;
mod server;
mod vmm;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_figures::{ending, report::Files};

#[derive(Parser)]
#[command(name = "bench-scheduler", about = "What scx_vnuma does for guests as a host's scheduler")]
enum Command {
    /// On a server: measures loads under all schedulers, and prints a line of JSON for each run
    Server(server::Arguments),
    /// On a server: measures what an event costs scx_vnuma, and prints a line of JSON for each mode
    Cost(cost::Arguments),
    /// On the machine: rows and goals from what was measured
    Judge(Files),
    /// On a server: a guest
    Guest(vmm::Arguments),
}

fn main() -> ExitCode {
    ending::main(|command: Command| match command {
        Command::Server(arguments) => server::run(&arguments),
        Command::Cost(arguments) => cost::run(&arguments),
        Command::Judge(files) => judge::run(&files),
        Command::Guest(arguments) => vmm::run(&arguments),
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
