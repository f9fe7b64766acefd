//! Starts virtual machines in the server of the lab: stock QEMU with a QMP socket, stock kernel, guest nodes bound to
//! the server's nodes. It stands for what an operator's own tooling does; vnuma's daemon knows nothing of it.

mod cgroup;
mod host;
#[cfg(test)]
mod manual;
mod network;
mod place;
mod placement;
mod plan;
mod qemu;
mod server;
mod session;
mod state;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::plan::Request;

/// Exit status when lab-vm itself failed rather than the program in the guest.
const STATUS_FAILED: u8 = 125;

#[derive(Parser)]
#[command(name = "lab-vm", about = "Virtual machines in the server of the lab")]
enum Command {
    /// Start a VM and wait until its agent answers
    Start {
        #[command(flatten)]
        request: Request,
        /// Take the machine, its nodes, memory and devices from FILE, as `vnumactl place` prints it for QEMU
        #[arg(long, value_name = "FILE", conflicts_with_all = ["nodes", "vcpus", "place", "memory", "unbound", "uma", "spare_slots", "cores", "pluggable"])]
        placement: Option<PathBuf>,
        /// Print QEMU's command line
        #[arg(long)]
        verbose: bool,
    },
    /// Run COMMAND in the VM as root; streams and exit status pass through
    Exec {
        /// Its name
        name: String,
        /// The program and its arguments (no shell line: use sh -c for one)
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Give a prompt in the VM
    Shell {
        /// Its name
        name: String,
    },
    /// Copy the server's file SRC to DST in the VM, with its permissions
    Put {
        /// Its name
        name: String,
        /// File in the server
        #[arg(value_name = "SRC")]
        source: PathBuf,
        /// Absolute path in the VM
        #[arg(value_name = "DST")]
        destination: String,
    },
    /// Copy the VM's file SRC to DST in the server
    Get {
        /// Its name
        name: String,
        /// Absolute path in the VM
        #[arg(value_name = "SRC")]
        source: String,
        /// File in the server
        #[arg(value_name = "DST")]
        destination: PathBuf,
    },
    /// Reset the VM and wait until its agent answers again
    Reset {
        /// Its name
        name: String,
    },
    /// Stop the VM at once
    Stop {
        /// Its name
        name: String,
    },
    /// Plug CPUs and memory into the server itself, where its profile has [hotplug]
    #[command(subcommand)]
    Server(server::Command),
    /// List the VMs: name, process, state
    List,
    /// Print the VM's console
    Log {
        /// Its name
        name: String,
    },
    /// Say by exit status 0 or 1 whether a fault of the emulated processor has ended the VM
    Fault {
        /// Its name
        name: String,
    },
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("lab-vm: {error:#}");
            ExitCode::from(STATUS_FAILED)
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Start { request, placement, verbose } => {
            vm::start(&request, placement.as_deref(), verbose)?;
        }
        Command::Exec { name, command } => return session::exec(&name, command),
        Command::Shell { name } => return session::shell(&name),
        Command::Put { name, source, destination } => session::put(&name, &source, &destination)?,
        Command::Get { name, source, destination } => session::get(&name, &source, &destination)?,
        Command::Reset { name } => vm::reset(&name)?,
        Command::Stop { name } => vm::stop(&name)?,
        Command::Server(command) => server::run(&command)?,
        Command::List => vm::list()?,
        Command::Log { name } => vm::log(&name)?,
        Command::Fault { name } => {
            state::existing(&name)?;
            return Ok(ExitCode::from(u8::from(!state::emulator_ended(&name))));
        }
    }
    Ok(ExitCode::SUCCESS)
}
