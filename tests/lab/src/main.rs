//! Scenarios that run on the lab server. Each ends with an error that says what was
//! expected and what was seen.

mod confined;
mod crowd;
mod displaced;
mod flips;
mod follow;
mod guest;
mod hostile;
mod hot;
mod hotplug;
mod hotspot;
mod kept;
mod kills;
mod libvirt;
mod libvirt_migrate;
mod lifecycle;
mod limits;
mod machine;
mod manual;
mod memory;
mod migrate;
mod migrate_times;
mod moving;
mod numactl;
mod others;
mod packages;
mod pages;
mod placement;
mod plugged;
mod policy;
mod policy_scx;
mod programs;
mod readings;
mod rehome;
mod rehome_auto;
mod replug;
mod resize;
mod runtimes;
mod scheduler;
mod shapes;
mod soak;
mod states;
mod stopped;
mod told;
mod units;
mod vcpus;
mod virsh;
mod workload;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use vnuma_lab_agent::emulator::ended_guest;
use vnuma_scheduled as threads;

/// Exit status of a scenario that the emulated processor of the server has ended. The caller may try it once more.
const EMULATOR_FAULT: u8 = 75;

#[derive(Parser)]
#[command(name = "lab-scenario", about = "Plays a scenario on the lab server and checks what happens")]
struct Arguments {
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// A guest follows random moves of its vCPUs; its kernel's maps are checked after each
    Follow(follow::Arguments),
    /// What vnumactl shows of vCPUs that are published, that cannot be, or that run on no home
    States,
    /// What post-copy displaces comes home
    PostCopied,
    /// Displaced memory comes home, whatever displaced it
    Displaced,
    /// Displaced huge pages of a pool come home as whole ones
    Pooled,
    /// A page of 1 GiB goes from node to node as a whole
    Gigantic,
    /// The hottest displaced memory comes home first
    Hot,
    /// In a guest of `hot`: reads memory without end
    #[command(hide = true)]
    Warm,
    /// A guest node of a running VM gets another home
    Rehome,
    /// The memory of a guest node goes after vCPUs that have come to stay elsewhere
    RehomeAuto,
    /// Guest nodes of a running VM grow and shrink
    Resize,
    /// Memory that was plugged is looked at, comes home and is re-homed
    Plugged,
    /// VMs as they are: UMA, unbound memory, several guest nodes with one home
    Shapes,
    /// A guest scribbles over its channel and rings without end
    Hostile,
    /// In a guest of `hostile`: does that, until it is killed
    #[command(hide = true)]
    Scribble,
    /// A guest without the driver follows by replugged vCPUs
    Replug,
    /// CPUs, memory and a node of the host come and go while vnumad runs
    Hotplug,
    /// A domain of libvirt is found, moved and attached; vnumad, libvirtd and the domain come and go
    Libvirt,
    /// A guest that boots is asked again for the channel's device; no policy leaves what libvirt's XML says of threads and memory
    LibvirtLimits,
    /// A domain with a load migrates to another libvirt and back
    LibvirtMigrate,
    /// VMs come and go while vnumad runs
    Lifecycle,
    /// A VM with a load migrates to another QEMU and back
    Migrate,
    /// Migrations again and again; each one is a line of JSON
    MigrateTimes(migrate_times::Arguments),
    /// The demonstration on the machine itself, to its end and interrupted
    Machine,
    /// What programs of other runtimes read of the topology, and whether they follow it by themselves
    Programs,
    /// Programs of a guest follow its topology by libvnuma and by libnuma
    Runtimes,
    /// Eden of a Java VM in a guest follows its topology
    Hotspot {
        /// Which Java there is an archive of
        #[arg(long)]
        version: String,
    },
    /// The Debian packages are installed, upgraded while a VM runs, and purged; the server has systemd
    Packages,
    /// A domain that AppArmor confines is attached by the packaged vnumad; a part of `packages`
    Confined,
    /// VMs are started as `vnumactl place` prints them
    Placement,
    /// A scheduling policy takes a vCPU to its memory, and gives its operator's CPUs back
    Policy,
    /// The scheduler of vCPU threads, with threads that are no vCPUs and with those of VMs
    Scheduler(scheduler::Arguments),
    /// In a guest of `scheduler`: threads wait for each other without end
    #[command(hide = true)]
    Barriers,
    /// Policies, masks, schedulers, vnumad and VMs come, go and change at random, for long
    Soak(soak::Arguments),
    /// QEMUs are stopped, used by somebody else, and killed in mid-attach
    Stopped,
    /// A guest is told the nodes of devices that are passed through to it
    Told,
    /// vnuma-guest places programs of systemd, and is stopped and killed by it; the server has systemd
    Units,
    /// vnumad is killed again and again while vCPUs move
    Kills(kills::Arguments),
    /// vnumad is killed again and again while memory moves
    Moving(moving::Arguments),
}

fn main() -> ExitCode {
    let Err(error) = play(Arguments::parse().scenario) else { return ExitCode::SUCCESS };
    let error = format!("Error: {error:?}");
    // In the standard output, of which the end is shown again after all tests.
    println!("{error}");
    show_kernel_log();
    if ended_guest(&error) { EMULATOR_FAULT.into() } else { ExitCode::FAILURE }
}

/// What the server's kernel said last: a QEMU that it has killed says nothing itself.
fn show_kernel_log() {
    const LINES: usize = 25;
    let log = vnuma_scenario::output("dmesg", &[]).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    println!(
        "The end of the server's kernel log:\n{}",
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    );
}

fn play(scenario: Scenario) -> anyhow::Result<()> {
    match scenario {
        Scenario::Follow(arguments) => follow::run(&arguments),
        Scenario::States => states::run(),
        Scenario::Hostile => hostile::run(),
        Scenario::Scribble => hostile::scribble(),
        Scenario::Displaced => displaced::run(),
        Scenario::Gigantic => displaced::gigantic::run(),
        Scenario::Pooled => displaced::pooled::run(),
        Scenario::PostCopied => displaced::arrival::run(),
        Scenario::Hot => hot::run(),
        Scenario::Warm => hot::warm(),
        Scenario::Rehome => rehome::run(),
        Scenario::RehomeAuto => rehome_auto::run(),
        Scenario::Resize => resize::run(),
        Scenario::Plugged => plugged::run(),
        Scenario::Moving(arguments) => moving::run(&arguments),
        Scenario::Shapes => shapes::run(),
        Scenario::Kills(arguments) => kills::run(&arguments),
        Scenario::Replug => replug::run(),
        Scenario::Migrate => migrate::run(),
        Scenario::MigrateTimes(arguments) => migrate_times::run(&arguments),
        Scenario::Machine => machine::run(),
        Scenario::Hotspot { version } => hotspot::run(&version),
        Scenario::Programs => programs::run(),
        Scenario::Runtimes => runtimes::run(),
        Scenario::Packages => packages::run(),
        Scenario::Confined => packages::confined(),
        Scenario::Placement => placement::run(),
        Scenario::Policy => policy::run(),
        Scenario::Scheduler(arguments) => scheduler::run(&arguments),
        Scenario::Barriers => scheduler::yields::wait_for_others(),
        Scenario::Soak(arguments) => soak::run(&arguments),
        Scenario::Stopped => stopped::run(),
        Scenario::Told => told::run(),
        Scenario::Units => units::run(),
        Scenario::Hotplug => hotplug::run(),
        Scenario::Libvirt => libvirt::run(),
        Scenario::LibvirtLimits => libvirt::run_slow(),
        Scenario::LibvirtMigrate => libvirt_migrate::run(),
        Scenario::Lifecycle => lifecycle::run(),
    }
}
