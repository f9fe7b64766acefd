//! `cargo xtask lab`: the emulated NUMA server.

#[cfg(test)]
mod manual;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use vnuma_lab_runner::{
    Counters, DEFAULT_PROFILE, Image, Init, LabError, LabRun, Progress, Stdin, end_on_signals,
};

/// Exit status when the command did not end in time, as timeout(1) has it.
const STATUS_TIMEOUT: u8 = 124;
/// Exit status when the lab itself failed, as env(1) and others have it.
const STATUS_LAB: u8 = 125;

#[derive(Subcommand)]
pub enum LabCommand {
    /// Boot a server, run COMMAND on it as root and stop it; streams and exit status pass through
    Run(RunArguments),
    /// Boot a server and give a prompt on it
    Shell(ShellArguments),
    /// Build the root image if it is missing, and print its path
    Image,
}

#[derive(Args)]
pub struct RunArguments {
    #[command(flatten)]
    server: Server,
    /// Copy the server's file SRC to DST here afterwards, whatever the exit status
    #[arg(long, value_name = "SRC:DST", value_parser = pair)]
    get: Vec<(String, String)>,
    /// Stop the server when COMMAND has not ended after so many seconds (exit status 124)
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    timeout: u64,
    /// The program and its arguments (no shell line: use sh -c for one)
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Args)]
pub struct ShellArguments {
    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Server {
    /// A name in lab/profiles, or the path of a .toml file [default: 4n8c, or the one of the counter profile]
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
    /// Give the server hardware counters and modelled costs of this machine of lab/pricing/profiles; with :full after
    /// the name every set of its caches is modelled, not one in 16
    #[arg(long, value_name = "PROFILE")]
    counters: Option<Counters>,
    /// Boot with systemd as process 1, which takes longer
    #[arg(long, conflicts_with = "counters")]
    systemd: bool,
    /// Boot so many servers with a network between them, server0, server1 ...; the command runs on the first
    #[arg(long, value_name = "N", conflicts_with_all = ["counters", "systemd"], value_parser = clap::value_parser!(u8).range(1..=16))]
    servers: Option<u8>,
    /// Copy the file SRC to DST on the server before
    #[arg(long, value_name = "SRC:DST", value_parser = pair)]
    put: Vec<(String, String)>,
}

/// `SRC:DST`
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once(':') {
        Some((source, destination)) if !source.is_empty() && !destination.is_empty() => {
            Ok((source.to_owned(), destination.to_owned()))
        }
        _ => Err("expected SRC:DST".to_owned()),
    }
}

/// Runs the subcommand.
pub fn main(command: LabCommand) -> Result<ExitCode> {
    end_on_signals().context("signal handlers")?;
    match command {
        LabCommand::Run(arguments) => {
            let gets = arguments.get.into_iter().map(|(from, to)| (from, PathBuf::from(to))).collect();
            let timeout = Duration::from_secs(arguments.timeout);
            let run = LabRun {
                gets,
                timeout,
                command: arguments.command,
                stdin: Stdin::Inherit,
                ..run(arguments.server)
            };
            Ok(finish(run.run()))
        }
        LabCommand::Shell(arguments) => {
            // No time limit at a prompt.
            let timeout = Duration::from_secs(7 * 24 * 3600);
            let command = vec!["bash".to_owned(), "-l".to_owned()];
            let run = LabRun { timeout, command, stdin: Stdin::Terminal, ..run(arguments.server) };
            Ok(finish(run.run()))
        }
        LabCommand::Image => {
            let image = Image::ensure(Progress::Show)?;
            println!("{}", image.tree().display());
            for kernel in image.kernels() {
                println!("kernel {} ({:?}): {}", kernel.name, kernel.role, kernel.release);
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn run(server: Server) -> LabRun {
    let puts = server.put.into_iter().map(|(from, to)| (PathBuf::from(from), to)).collect();
    let own = server.counters.as_ref().map_or(DEFAULT_PROFILE, |counters| &counters.profile.machine);
    let profile = server.profile.unwrap_or_else(|| own.to_owned());
    let init = if server.systemd { Init::Systemd } else { Init::Fast };
    let servers = server.servers.map_or(0, usize::from);
    LabRun { profile, counters: server.counters, init, servers, puts, ..LabRun::default() }
}

fn finish(result: Result<vnuma_lab_runner::Output, LabError>) -> ExitCode {
    match result {
        // Statuses of programs are within 0 to 255.
        Ok(output) => ExitCode::from(u8::try_from(output.status).unwrap_or(u8::MAX)),
        Err(error) => {
            eprintln!("lab: {error}");
            let timeout = matches!(error, LabError::Timeout { .. });
            ExitCode::from(if timeout { STATUS_TIMEOUT } else { STATUS_LAB })
        }
    }
}
