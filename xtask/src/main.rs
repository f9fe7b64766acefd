//! Everything that `make` calls. `cargo xtask help` lists it.

mod bench;
mod build;
mod changed;
mod checks;
mod counts;
mod deb;
mod demo;
#[cfg(test)]
mod documents;
mod fuzz;
mod kernel_users;
mod lab;
mod layers;
mod outcome;
#[cfg(test)]
mod seam;
mod setup;
mod steps;
mod suite;
mod turns;

use clap::Parser;
use std::process::ExitCode;
use vnuma_bench_figures::ending;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Builds, demonstrates, tests and measures vnuma"
)]
enum Command {
    /// The emulated NUMA server
    #[command(subcommand)]
    Lab(Box<lab::LabCommand>),
    /// Install what building and testing need
    Setup,
    /// A running VM follows its NUMA topology, an otherwise identical one does not
    Demo(demo::Arguments),
    /// Debian packages of everything, in target/deb
    Deb(deb::Arguments),
    /// One benchmark; without NAME: which there are
    Bench(bench::Arguments),
    /// Feed the parsers inputs that are made to break them; all targets, or those that are named
    ///
    /// One target after another, a line each: how many inputs it was fed, how many edges of the program (COVERAGE) and
    /// counts of them (FEATURES) were reached, and what the inputs that reach them come to (CORPUS). What is found
    /// stays in target/fuzz/corpus for the next run.
    ///
    ///   cargo xtask fuzz                            all of them, a minute each, as in make soak
    ///   cargo xtask fuzz config qmp --seconds 600   two of them, longer
    ///   cargo xtask fuzz config --keep              make finds of earlier runs part of fuzz/corpus/config
    ///
    /// A target that fails leaves its input in target/fuzz/crashes and says how to feed it again. Mend the bug and copy
    /// the input to fuzz/corpus/TARGET: make test feeds it from then on.
    #[command(verbatim_doc_comment)]
    Fuzz(fuzz::Arguments),
    /// Format, lints, unit, property and lab tests, recorded servers: what CI runs
    Test(checks::TestArguments),
    /// Format, clippy and tests of what has changed since main, and of what depends on it
    Check,
    /// Counts of the tree, such as circles of imports, with their limits and what they are made of
    Counts,
    /// What of a kernel's source asks for the node of a CPU or the CPUs of a node: functions, macros, and how often they call what
    ///
    /// Each has a verdict in guest/driver/kernel-users.txt. `make soak NAME=kernel-users` checks that on Debian's sources.
    KernelUsers(kernel_users::Arguments),
    /// The host topology reader on recorded servers, beside lstopo
    Servers,
    /// The long runs: property tests with many cases, fuzz targets, hundreds of moves, a long demonstration
    Soak(checks::SoakArguments),
}

fn main() -> ExitCode {
    let command = match ending::arguments() {
        Ok(command) => command,
        Err(status) => return status,
    };
    let result = match command {
        Command::Lab(command) => lab::main(*command),
        Command::Setup => setup::packages().map(|()| ExitCode::SUCCESS),
        Command::Demo(arguments) => demo::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Deb(arguments) => deb::run_all(&arguments).map(|packages| {
            packages.iter().for_each(|package| println!("deb: {}", package.display()));
            ExitCode::SUCCESS
        }),
        Command::Bench(arguments) => Ok(ending::end(bench::run(&arguments))),
        Command::Counts => counts::run().map(|()| ExitCode::SUCCESS),
        Command::KernelUsers(arguments) => kernel_users::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Servers => checks::servers().map(|()| ExitCode::SUCCESS),
        Command::Fuzz(arguments) => fuzz::main(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Soak(arguments) => checks::soak(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Check => checks::check().map(|()| ExitCode::SUCCESS),
        Command::Test(arguments) => checks::test(&arguments).map(|()| ExitCode::SUCCESS),
    };
    match result {
        Ok(status) => status,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
