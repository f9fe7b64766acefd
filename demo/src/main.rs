//! The demonstration and its checker.
//!
//! `make demo` runs `vnuma-demo host` on the lab server. It starts two identical VMs, attaches one of them to
//! vnumad, lets `vnuma-demo move` (a process that vnumad knows nothing of) move
//! their vCPUs between host nodes, and runs `vnuma-demo touch` in both guests,
//! which allocates on what the guest kernel calls the local node. The host then
//! looks up every one of those pages. At the end one of them gets a device that is passed through, and `vnuma-demo buffers` in
//! its guest takes memory for it, which the host looks up, too.
//!
//! The checker shares nothing with vnumad: where a vCPU was comes from the kernel's own
//! scheduler trace, where a page is from `move_pages(2)`, and both carry the time
//! stamp counter, the one clock that host and guest have in common.

mod buffers;
mod checker;
mod device;
mod guest;
mod here;
mod host;
mod judge;
mod locations;
mod mover;
mod pages;
mod picture;
mod placed;
mod record;
mod report;
mod series;
mod svg;
mod updates;

use clap::Parser;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "vnuma-demo",
    about = "Shows a running VM following its NUMA topology, and one that does not"
)]
enum Command {
    /// On the lab server: run the whole demonstration and write the report
    Host(host::Arguments),
    /// On a machine with KVM and several nodes: the same, with everything removed at the end
    Here(here::Arguments),
    /// On the lab server: move vCPU threads between host nodes, by taskset and by load
    Move(mover::Arguments),
    /// In a guest: allocate without pause, reporting every page on standard output
    Touch(guest::Arguments),
    /// In a guest: take memory as a driver does for its device, and say where it is
    Buffers(buffers::Arguments),
}

/// Status of a run in which a guest has stopped; `make demo` runs that again.
const GUEST_STOPPED: u8 = 3;

fn main() -> ExitCode {
    let done = match Command::parse() {
        Command::Host(arguments) => host::run(&arguments),
        Command::Here(arguments) => here::run(&arguments),
        Command::Move(arguments) => mover::run(&arguments),
        Command::Touch(arguments) => guest::run(&arguments),
        Command::Buffers(arguments) => buffers::run(&arguments),
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("Error: {error:?}");
    status(&error).into()
}

/// The exit status of a run that failed.
fn status(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<host::GuestStopped>() {
        Some(_) => GUEST_STOPPED,
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_guest_that_has_stopped_has_a_status_of_its_own() {
        let error = || anyhow!("the program in a failed").context("looking up the pages of a");
        assert_eq!(status(&host::named(error(), None)), 1);
        let panicked = host::named(error(), Some("a"));
        assert_eq!(format!("{panicked}"), "the guest of a has stopped: its kernel has panicked");
        assert_eq!(status(&panicked), GUEST_STOPPED);
        assert_eq!(status(&panicked.context("vnumad's log is /x")), GUEST_STOPPED);
    }
}
