//! The operator's tool. See docs/vnumactl.md. The program is [`main`]; [`read_arguments`] and [`Answer`] are its
//! parsers, open to fuzzing.

mod answer;
pub mod calibrate;
mod confinement;
mod devices;
mod doctor;
mod failure;
mod hardware;
mod memory;
mod migrate;
mod place;
mod policy;
mod progress;
mod record;
mod rehome;
pub mod replay;
mod resize;
mod setup;
mod table;
mod top;
mod vms;
mod watch;

pub use answer::Answer;
use clap::{
    Args, CommandFactory, Parser, Subcommand,
    builder::{OsStringValueParser, TypedValueParser},
};
use clap_complete::Shell;
use failure::Failure;
use serde::Serialize;
use std::{
    ffi::OsString,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};
use vnuma_api::{
    ApiError, AttachRequest, ErrorKind, EventKind, MemoryPolicyRequest, MoveRequest, PolicyRequest,
    ReplugRequest,
    operation::{self as op, Operation},
};
use vnuma_client::{Client, Error};
use vnuma_policy::scheduling::Policy;
use vnuma_process::qemu;

/// Shows where the vCPUs of the VMs on this host are and what is published to their guests, and moves them.
///
/// Exit status: 0 done; 1 vnumad refused or failed; 2 wrong usage; 3 vnumad cannot be reached;
/// 4 not permitted.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct Common {
    /// Socket of vnumad
    #[arg(long, global = true, value_name = "PATH", default_value = vnuma_api::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Print JSON; `watch` prints one object a line
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Show the host: nodes, CPUs, caches, memory, huge pages, distances, PCI devices
    Hardware,
    /// Show PCI devices with their nodes, links and names, and which VM has which device
    Devices,
    /// Show what is free on each node for VMs that are to be started
    Capacity,
    /// List the VMs of this host with the states of their vCPUs
    List,
    /// Show one VM: guest nodes and their homes, each vCPU, what was published
    Show {
        /// Name of the VM
        #[arg(value_parser = name())]
        vm: String,
    },
    /// Plug a topology channel into a running VM and publish its topology, now and after each change
    Attach {
        /// Name of the VM
        #[arg(value_parser = name())]
        vm: String,
        /// If its guest does not run yet, attach it as soon as it does, and return at once
        #[arg(long)]
        on_arrival: bool,
    },
    /// Unplug the topology channel; the guest keeps the topology that was published last
    Detach {
        /// Name of the VM
        #[arg(value_parser = name())]
        vm: String,
    },
    /// Confine a vCPU to the CPUs of a host node
    Move {
        /// Name of the VM
        #[arg(value_parser = name())]
        vm: String,
        /// APIC id of the vCPU, as `show` prints it
        #[arg(long, value_name = "N", value_parser = number(), allow_negative_numbers = true)]
        vcpu: u32,
        /// Host node, as `hardware` prints it
        #[arg(long, value_name = "H", value_parser = number(), allow_negative_numbers = true)]
        node: u32,
    },
    /// For a guest without the driver: plug a vCPU again, into a spare slot of the guest node that is right for it
    ///
    /// The vCPU gets another APIC id, and another CPU number in the guest. vCPU 0 cannot be replugged.
    Replug {
        /// Name of the VM
        vm: String,
        /// APIC id of the vCPU, as `show` prints it
        #[arg(long, value_name = "N")]
        vcpu: u32,
    },
    /// Decide where a VM goes that is to be started, reserve that, and print it for QEMU, libvirt or a program
    Place(place::Arguments),
    /// List the reservations of VMs
    Reservations,
    /// Give up the reservation of a VM that is not there
    Release {
        /// Name of the VM
        #[arg(value_parser = name())]
        vm: String,
    },
    /// Show which policies schedule vCPUs and what they did, or set the policy of a VM
    Policy {
        /// Name of the VM; all of them without it
        #[arg(value_parser = name())]
        vm: Option<String>,
        /// The policy: off, observe, credit, vcpu-p, lb, brm, vprobe-paper, vprobe
        #[arg(long, value_name = "P", requires = "vm")]
        set: Option<Policy>,
    },
    /// Show where the memory of a VM is and what of it is displaced, or set when that comes home
    Memory {
        /// Name of the VM
        #[arg(value_parser = name())]
        vm: String,
        /// The memory policy: none, periodic, amount, both, adaptive
        #[arg(long, value_name = "P")]
        set: Option<String>,
    },
    /// Give a guest node of a running VM another home: its memory, then what its guest is told, then its vCPUs
    ///
    /// Without options: show where its guest nodes are, and how far the last re-home is.
    Rehome(rehome::Arguments),
    /// Give a guest node of a running VM another size by its virtio-mem devices, or let vnumad size it
    ///
    /// Without --size and --auto: show how large its guest nodes are and may be, and how far the last changes are.
    Resize(resize::Arguments),
    /// Migrate a VM to another host: detach it, have QEMU or libvirt migrate it, and attach it again if that fails
    ///
    /// Without DEST: show how far the last migration is.
    Migrate(migrate::Arguments),
    /// Show all vCPUs with their policies, updated each period, until interrupted
    Top {
        /// Once, as a table
        #[arg(long)]
        once: bool,
    },
    /// Record the input of the policies, once a period, until interrupted
    Record {
        /// File to create
        file: PathBuf,
        /// End after so many periods
        #[arg(long, value_name = "N", value_parser = number_from(1), allow_negative_numbers = true)]
        periods: Option<u32>,
    },
    /// Run a policy on a recording, and show what it would have done
    Replay {
        /// A recording
        file: PathBuf,
        /// The policy, as with `policy --set`
        #[arg(long, value_name = "P")]
        policy: Policy,
    },
    /// Find this host's bounds between the types of vCPUs, by running loads alone and beside others
    Calibrate(calibrate::Arguments),
    /// Print events until interrupted
    Watch {
        /// Only events of these kinds: appeared, gone, attached, detached, changed, published, acknowledged, replugged,
        /// confined, memory, policy
        #[arg(long, value_name = "KIND,...", value_delimiter = ',')]
        events: Vec<EventKind>,
    },
    /// Show vnumad itself: how it learns locations, what it lost
    Daemon,
    /// Check the host and each VM: which capability is in use, why it is not the best, and what would help
    Doctor,
    /// Say what this host lacks for vnuma, and do it on request
    Setup(setup::Arguments),
    /// Print a shell's completion of vnumactl
    Completion {
        /// The shell
        shell: Shell,
    },
}

fn completion(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "vnumactl", &mut script);
    script
}

/// Of a VM's name. clap's own parser names neither the argument nor the value that is not UTF-8.
fn name() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|value| match value.into_string() {
        Ok(name) if name.is_empty() => Err("a VM has a name".to_owned()),
        other => other.map_err(|value| format!("{value:?} is not UTF-8")),
    })
}

/// Of a number, likewise.
fn number() -> impl TypedValueParser<Value = u32> {
    number_from(0)
}

fn number_from(least: u32) -> impl TypedValueParser<Value = u32> {
    let expected = move || format!("not a number from {least} to {}", u32::MAX);
    let read = move |digits: &str| digits.parse().ok().filter(|&number| number >= least);
    OsStringValueParser::new().try_map(move |value| value.to_str().and_then(read).ok_or_else(expected))
}

/// Understands a command line, the program's name included, and does nothing.
pub fn read_arguments(words: impl IntoIterator<Item = OsString>) -> Result<(), clap::Error> {
    Arguments::try_parse_from(words).map(drop)
}

/// The program.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(run(&arguments)),
        Err(error) => Err(Failure::Output(error)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has seen enough.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnumactl: {}", table::plain_lines(&error.to_string()));
            ExitCode::from(exit_status(&error))
        }
    }
}

fn exit_status(error: &Failure) -> u8 {
    match error {
        Failure::Client(Error::Unreachable { .. }) => 3,
        Failure::SetupRights
        | Failure::Client(
            Error::NotPermitted { .. } | Error::Refused(ApiError { error: ErrorKind::Forbidden, .. }),
        ) => 4,
        _ => 1,
    }
}

/// Asks vnumad, and prints its answers.
struct Asking {
    client: Client,
    json: bool,
}

impl Asking {
    async fn show<O: Operation>(
        &self,
        subject: O::Subject<'_>,
        input: &O::Input,
        text: impl Fn(&O::Output) -> String,
    ) -> Result<(), Failure> {
        print(self.json, &self.client.ask::<O>(subject, input).await?, text)
    }

    async fn doctor(&self) -> Result<(), Failure> {
        let daemon = self.client.ask::<op::Daemon>((), &()).await?;
        let host = self.client.ask::<op::Hardware>((), &()).await?;
        let vms = self.client.ask::<op::List>((), &()).await?;
        let sends = |pid| qemu::sends_channel(&qemu::command_line(pid));
        let mut checks = doctor::examine_with(&daemon, &host, &vms, &sends);
        checks.extend(confinement::checks(&vms, &confinement::of_process));
        print(self.json, &checks, |checks| doctor::text(checks))
    }
}

async fn run(arguments: &Arguments) -> Result<(), Failure> {
    let json = arguments.common.json;
    let to = Asking { client: Client::new(&arguments.common.socket), json };
    let client = &to.client;
    match &arguments.command {
        Command::Hardware => to.show::<op::Hardware>((), &(), hardware::text).await,
        Command::Devices => to.show::<op::Devices>((), &(), devices::text).await,
        Command::Capacity => to.show::<op::Capacity>((), &(), |nodes| devices::capacity(nodes)).await,
        Command::List => to.show::<op::List>((), &(), |vms| vms::list(vms)).await,
        Command::Show { vm } => to.show::<op::Show>(vm, &(), vms::show).await,
        Command::Attach { vm, on_arrival } => {
            let input = on_arrival.then_some(AttachRequest { on_arrival: true });
            to.show::<op::Attach>(vm, &input, vms::attached).await
        }
        Command::Detach { vm } => to.show::<op::Detach>(vm, &(), vms::detached).await,
        Command::Move { vm, vcpu, node } => {
            let input = MoveRequest { vcpu: *vcpu, node: *node };
            to.show::<op::MoveVcpu>(vm, &input, |vm| vms::moved(vm, *vcpu)).await
        }
        Command::Replug { vm, vcpu } => {
            to.show::<op::Replug>(vm, &ReplugRequest { vcpu: *vcpu }, vms::replugged).await
        }
        Command::Place(arguments) => place::run(client, arguments, json).await,
        Command::Reservations => to.show::<op::Placements>((), &(), |all| place::list(all)).await,
        Command::Release { vm } => to.show::<op::Release>(vm, &(), place::released).await,
        Command::Policy { vm: None, .. } => to.show::<op::Policies>((), &(), |vms| policy::list(vms)).await,
        Command::Policy { vm: Some(vm), set: None } => to.show::<op::ShowPolicy>(vm, &(), policy::show).await,
        Command::Policy { vm: Some(vm), set: Some(policy) } => {
            let input = PolicyRequest { policy: policy.to_string() };
            to.show::<op::SetPolicy>(vm, &input, policy::show).await
        }
        Command::Memory { vm, set: None } => to.show::<op::ShowMemory>(vm, &(), memory::show).await,
        Command::Memory { vm, set: Some(policy) } => {
            let input = MemoryPolicyRequest { policy: policy.clone() };
            to.show::<op::SetMemoryPolicy>(vm, &input, memory::show).await
        }
        Command::Rehome(arguments) => rehome::run(client, arguments, json).await,
        Command::Resize(arguments) => resize::run(client, arguments, json).await,
        Command::Migrate(arguments) => migrate::run(client, arguments, json).await,
        Command::Top { once } => top::run(client, json, *once).await,
        Command::Record { file, periods } => record::run(client, file, periods.map(u64::from)).await,
        Command::Replay { file, policy } => {
            let replayed = replay::file(file, *policy);
            let replayed = replayed.map_err(|source| Failure::Replay { path: file.clone(), source })?;
            print(json, &replayed, replay::text)
        }
        Command::Calibrate(arguments) => {
            let found = calibrate::run(arguments).map_err(Failure::Calibrate)?;
            print(json, &found, calibrate::text)?;
            let no_bounds = |problem| Failure::Calibrate(calibrate::CalibrateError::NoBounds(problem));
            found.problem.map_or(Ok(()), |problem| Err(no_bounds(problem)))
        }
        Command::Watch { events } => watch::run(client, events, json).await,
        Command::Daemon => to.show::<op::Daemon>((), &(), vms::daemon).await,
        Command::Doctor => to.doctor().await,
        Command::Setup(arguments) => setup::run(client, arguments, json).await,
        Command::Completion { shell } => io::stdout().write_all(&completion(*shell)).map_err(Failure::Output),
    }
}

fn print<T: Serialize>(json: bool, value: &T, text: impl Fn(&T) -> String) -> Result<(), Failure> {
    let text = if json {
        serde_json::to_string_pretty(value).map_err(|error| Failure::Output(error.into()))? + "\n"
    } else {
        text(value)
    };
    io::stdout().write_all(text.as_bytes()).map_err(Failure::Output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
    }

    const MANUAL: &str = include_str!("../../../docs/vnumactl.md");

    /// The text between a heading of the manual and the next one.
    fn section(heading: &str) -> &'static str {
        let rest =
            MANUAL.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no {heading}")).1;
        rest.split("\n## ").next().unwrap_or_default()
    }

    /// An option or argument as the manual writes it, `[...]` around what may be left out.
    fn word(argument: &clap::Arg) -> String {
        let value = argument.get_value_names().map(|names| names[0].to_string());
        let value = value.filter(|_| argument.get_action().takes_values()).unwrap_or_default();
        let word = match argument.get_long() {
            Some(long) => format!("--{long} {value}").trim_end().to_owned(),
            None => value,
        };
        if argument.is_required_set() { word } else { format!("[{word}]") }
    }

    #[test]
    fn the_manual_has_every_command_and_option() {
        let mut command = Arguments::command();
        command.build();
        let words = |command: &clap::Command, global: bool| -> Vec<String> {
            let own = |argument: &&clap::Arg| {
                argument.is_global_set() == global
                    && !["help", "version"].contains(&argument.get_id().as_str())
            };
            command.get_arguments().filter(own).map(word).collect()
        };
        let common = words(&command, true).join(" ");
        let commands: Vec<_> = command.get_subcommands().filter(|found| found.get_name() != "help").collect();
        let usage = |found: &&clap::Command| {
            let line = format!("vnumactl {common} {} {}", found.get_name(), words(found, false).join(" "));
            line.trim_end().to_owned()
        };
        let synopsis: Vec<_> =
            section("Synopsis").lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        assert_eq!(synopsis, commands.iter().map(usage).collect::<Vec<_>>());

        // A term, and a line that explains it.
        let terms = |heading| {
            let lines = section(heading).lines();
            let pairs = lines.clone().zip(lines.skip(1));
            let terms = pairs.filter(|(term, next)| term.starts_with('`') && next.starts_with(':'));
            terms.map(|(term, _)| term)
        };
        let described: Vec<_> = terms("Description").map(|line| line.trim_matches('`')).collect();
        let short = |found: &&clap::Command| {
            let line = format!("{} {}", found.get_name(), words(found, false).join(" "));
            line.trim_end().to_owned()
        };
        assert_eq!(described, commands.iter().map(short).collect::<Vec<_>>());

        let mut options: Vec<String> = words(&command, true);
        options.extend(
            commands
                .iter()
                .flat_map(|found| words(found, false))
                .filter(|word| word.trim_start_matches('[').starts_with('-')),
        );
        options.extend(["--help, --version".to_owned()]);
        let mut expected: Vec<_> = options.iter().map(|word| word.trim_matches(['[', ']'])).collect();
        expected.sort_unstable();
        expected.dedup();
        let mut found: Vec<_> = terms("Options").map(|line| line.replace('`', "")).collect();
        found.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_failure_has_its_exit_status() {
        let refused = |error| Failure::Client(Error::Refused(ApiError { error, message: String::new() }));
        assert_eq!(exit_status(&refused(ErrorKind::Forbidden)), 4);
        assert_eq!(exit_status(&refused(ErrorKind::NotFound)), 1);
        // tests/manual.rs has the same texts.
        for (failure, status, text) in [
            (Failure::SetupRights, 4, "setup --apply needs root"),
            (Failure::SetupFailed(2), 1, "2 of what was to be done failed"),
            (
                Failure::Migration { vm: "web".into(), destination: "tcp:b:4444".into() },
                1,
                "web: it did not migrate to tcp:b:4444",
            ),
        ] {
            assert_eq!((exit_status(&failure), failure.to_string()), (status, text.to_owned()));
        }
        let socket = PathBuf::from("/s");
        let source = io::ErrorKind::NotFound.into();
        assert_eq!(exit_status(&Error::Unreachable { socket, source }.into()), 3);
    }
}
