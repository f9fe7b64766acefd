//! A VM with a running load migrates again and again between two hosts, and its guest is told each time: the part of
//! `make bench NAME=migrate` that runs on the server. Each migration is a line of JSON.

use crate::{
    libvirt_migrate as domains,
    migrate::{self, Host, Load, MARK, NAME, POST_COPY, Watched},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{fs, time::Instant};
use vnuma_scenario::{Vm, wait_for};

#[derive(clap::Args)]
pub struct Arguments {
    /// Domains of libvirt instead of QEMUs with a monitor of their own
    #[arg(long)]
    libvirt: bool,
    /// How often it migrates in each way
    #[arg(long)]
    rounds: usize,
}

/// How a VM migrates.
#[derive(Clone, Copy)]
enum Way {
    /// By `vnumactl migrate`.
    Precopy,
    PostCopy,
    /// By QMP or virsh, with the channel's device on both sides.
    Plugged,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::PostCopy => "post-copy",
            Self::Plugged => "plugged",
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.libvirt { of_libvirt(arguments.rounds) } else { of_qmp(arguments.rounds) }
}

fn print(backend: &str, way: &str, watched: &Watched, done: &Value) -> Result<()> {
    let told_ms = watched.took()?.as_secs_f64() * 1e3;
    println!(
        "{}",
        json!({"backend": backend, "mode": way, "told_ms": told_ms, "downtime_ms": done["downtime_ms"]})
    );
    Ok(())
}

/// What it takes to tell the guest of a VM at rest: its channel is taken from it and given back, by which migrations are judged.
fn yardstick(backend: &str, host: &Host) -> Result<()> {
    host.insist(&["detach", NAME])?;
    let began = Instant::now();
    host.insist(&["attach", NAME])?;
    host.wait_until_told()?;
    println!("{}", json!({"backend": backend, "attach_ms": began.elapsed().as_secs_f64() * 1e3}));
    Ok(())
}

fn of_qmp(rounds: usize) -> Result<()> {
    let hosts = &migrate::HOSTS;
    let vnumads = [hosts[0].start_vnumad()?, hosts[1].start_vnumad()?];
    let mut vm = migrate::boot(&hosts[0])?;
    hosts[0].begin(&vm)?;
    let load = Load::start(&vm)?;
    let ways = [Way::Precopy, Way::PostCopy, Way::Plugged];
    let all = (0..rounds).flat_map(|_| ways);
    for (number, way) in all.enumerate() {
        let (from, to) = (&hosts[number % 2], &hosts[(number + 1) % 2]);
        let there = migrate_qmp(way, from, to)
            .with_context(|| fs::read_to_string(to.path("qemu.log")).unwrap_or_default())
            .with_context(|| format!("{}, migration {number}", way.name()))?;
        // Its QEMU was left where it stood.
        drop(std::mem::replace(&mut vm, there));
        yardstick("qmp", to)?;
    }
    load.check(&vm)?;
    drop((vm, vnumads));
    Ok(())
}

fn migrate_qmp(way: Way, from: &Host, to: &Host) -> Result<Vm> {
    // Both sides have to allow post-copy, and a side that has done so once does.
    let pid = match way {
        Way::Plugged => to.receive(from, &["-global", POST_COPY])?,
        _ => to.receive(from, &["-global", POST_COPY, "-chardev", MARK])?,
    };
    let arrives = |vm: &Value| vm["run_state"] == "inmigrate";
    match way {
        Way::Plugged => {
            to.wait_until("the other vnumad to find the VM", |vm| vm.is_some_and(arrives))?;
            to.insist(&["attach", NAME])?;
        }
        _ => to.wait_until("the other vnumad to see the mark", |vm| {
            vm.is_some_and(|vm| arrives(vm) && vm["attach_on_arrival"] == true)
        })?,
    }
    if let Way::PostCopy = way {
        from.slow_down()?;
    }
    let watched = Watched::start(to)?;
    let done = match way {
        Way::Precopy => from.migrate(to, &[])?,
        Way::PostCopy => from.migrate(to, &["--post-copy"])?,
        Way::Plugged => {
            let command = json!({"execute": "migrate", "arguments": {"uri": to.destination()}});
            from.monitor()?.execute(&command)?;
            Value::Null
        }
    };
    print("qmp", way.name(), &watched, &done)?;
    drop(watched);
    from.wait_until("the VM to be forgotten where it was", |vm| vm.is_none())?;
    to.wait_until_told()?;
    Vm::started(to.lab_name, pid)
}

fn of_libvirt(rounds: usize) -> Result<()> {
    let server = domains::Server::start()?;
    let mut vm = server.begin()?;
    let load = Load::start(&vm)?;
    for number in 0..3 * rounds {
        let way = [Way::Precopy, Way::PostCopy, Way::Plugged][number / rounds];
        let (from, to) = (number % 2, (number + 1) % 2);
        domains::set_speed(from, matches!(way, Way::PostCopy))?;
        let (host, other) = (&domains::HOSTS[from], &domains::HOSTS[to]);
        Vm::prepare(other.lab_name, other.cid)?;
        let watched = Watched::start(other)?;
        let uri = domains::uri_for(from);
        let done = match way {
            Way::Precopy => host.ask(&["migrate", NAME, uri]),
            Way::PostCopy => host.ask(&["migrate", NAME, uri, "--post-copy"]),
            Way::Plugged => {
                domains::virsh(from, &["migrate", "--live", NAME, uri]).map(|_| json!({"state": "done"}))
            }
        };
        let done = done.with_context(|| format!("{}, migration {number}", way.name()))?;
        ensure!(done["state"] == "done", "{done}");
        print("libvirt", way.name(), &watched, &done)?;
        drop(watched);
        host.wait_until("the domain to be forgotten where it was", |vm| vm.is_none())?;
        other.wait_until_told()?;
        let mut there = None;
        wait_for("the domain's process", vnuma_scenario::HANG_LIMIT, || {
            there = domains::running(to).ok();
            Ok(there.is_some())
        })?;
        drop(std::mem::replace(&mut vm, there.context("no process")?));
        yardstick("libvirt", other)?;
    }
    load.check(&vm)?;
    drop((vm, server));
    Ok(())
}
