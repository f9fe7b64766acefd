//! See docs/vnuma-guest.md.

use anyhow::Context;
use clap::{Parser, Subcommand};
use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};
use vnuma_guest::{
    journal,
    list::list,
    rules::Rules,
    run::{self, Options, Places},
};

/// Runs I/O-heavy programs on the NUMA node of their device.
///
/// vnuma-guest runs in a guest (or on any Linux machine). It finds programs that drive devices past the kernel: those that run
/// code of a kernel-bypass library (libvma, libibverbs, libfabric, DPDK), and those that have a VFIO, UIO or verbs file
/// open. While the node of their device has CPU time and memory to spare, it confines them to that node's CPUs, moves their
/// memory there and keeps the device's interrupts there. When the node is busy, it gives back what they had.
///
/// Nothing else is touched, and nothing is left when it ends, however it ends.
///
/// Look first, then try, then run:
///   vnuma-guest list                 what was found, where it belongs, and why it is not there
///   vnuma-guest run --dry-run        what would be done, as it happens
///   vnuma-guest run                  until SIGTERM or SIGINT
#[derive(Parser)]
#[command(name = "vnuma-guest", version, verbatim_doc_comment)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Where proc, sys and run are
    #[arg(long, global = true, hide = true, default_value = "/")]
    root: PathBuf,
    /// Directory of the journal
    #[arg(long, global = true, hide = true, default_value = journal::DIRECTORY)]
    journal: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Place programs until SIGTERM, SIGINT or SIGHUP, then undo everything
    Run {
        /// Rules [default: /etc/vnuma/vnuma-guest.toml, if there is one]
        #[arg(long, value_name = "FILE")]
        rules: Option<PathBuf>,
        /// Say what would be done, and do nothing
        #[arg(long)]
        dry_run: bool,
        /// Seconds between two looks, 1 to 3600 [default: interval_s of the rules, 5]
        #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
        interval: Option<u64>,
    },
    /// Show nodes, programs that were found, and interrupts of devices
    List {
        /// Rules [default: /etc/vnuma/vnuma-guest.toml, if there is one]
        #[arg(long, value_name = "FILE")]
        rules: Option<PathBuf>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Undo what a vnuma-guest that was killed has left
    Undo,
    /// Check rules, and say what is wrong with them
    CheckRules {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Wait for the end of the input, and undo what is left
    #[command(hide = true)]
    Guard,
}

fn main() -> ExitCode {
    match start(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnuma-guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(Arguments { command, root, journal }: Arguments) -> anyhow::Result<()> {
    let places = Places { root, journal };
    match command {
        Command::Run { rules, dry_run, interval } => {
            let mut rules = Rules::load(rules.as_deref())?;
            rules.interval = interval.map_or(rules.interval, Duration::from_secs);
            run::run(&Options { rules, dry_run, places })
        }
        Command::List { rules, json } => {
            let rules = Rules::load(rules.as_deref())?;
            // Only root can read it.
            let changes = journal::read(&places.journal, &places.root).unwrap_or_default();
            let list = list(&places.root, &rules, &changes);
            if list.hidden > 0 {
                eprintln!("vnuma-guest: {} processes cannot be looked at, for lack of rights", list.hidden);
            }
            let text = if json { serde_json::to_string_pretty(&list)? + "\n" } else { list.to_string() };
            io::stdout().write_all(text.as_bytes()).context("standard output")
        }
        Command::Undo => {
            if !run::undo_left(&places)? {
                eprintln!("vnuma-guest: nothing is left to undo");
            }
            Ok(())
        }
        Command::CheckRules { file } => Rules::load(Some(&file)).map(drop).map_err(Into::into),
        Command::Guard => run::guard(&places),
    }
}
