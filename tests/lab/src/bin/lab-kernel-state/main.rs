//! What the kernel of a guest knows of NUMA nodes, read from its memory, and compared with a guest that booted so.
//!
//! Moves change the kernel's maps in place. This shows all that was made of them at boot: `show` prints it in a guest, `compare`
//! compares two of these, and `play` has a guest on the lab server move and compares each topology that it comes to with a boot.
//! `keeps.txt` lists what differs, and why.

mod btf;
mod compare;
mod cpus;
mod devices;
mod memory;
mod play;
mod shape;
mod state;
mod value;
mod workqueues;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

#[derive(Parser)]
#[command(
    name = "lab-kernel-state",
    about = "What a kernel knows of NUMA nodes, and what differs from a boot"
)]
enum Command {
    /// Print what this kernel knows, as JSON
    Show {
        /// In one line for each line of standard input
        #[arg(long)]
        follow: bool,
    },
    /// Compare a kernel that booted with a topology with one that came to it, both as `show` prints them
    Compare {
        /// The one that booted
        booted: PathBuf,
        /// The one that came to it
        moved: PathBuf,
        /// The same before it came to it. Without this all counts as kept
        #[arg(long)]
        before: Option<PathBuf>,
    },
    /// On the lab server: move a guest, and compare each topology that it comes to with a boot
    Play(play::Arguments),
}

fn kernel() -> Result<value::Kernel> {
    let text = |path: &str| fs::read_to_string(path).with_context(|| path.to_owned());
    let memory = memory::Memory::open(Box::new(File::open("/proc/kcore").context("/proc/kcore")?))?;
    // Both are needed to the end.
    let symbols = memory::Symbols::parse(text("/proc/kallsyms")?.leak())?;
    let types = "/sys/kernel/btf/vmlinux";
    let btf = btf::Btf::parse(fs::read(types).context(types)?.leak()).context(types)?;
    Ok(value::Kernel::new(memory, symbols, btf))
}

fn show(follow: bool) -> Result<()> {
    let kernel = kernel()?;
    let release = "/proc/sys/kernel/osrelease";
    let release = fs::read_to_string(release).context(release)?;
    let read = || -> Result<serde_json::Value> {
        let mut state = state::read(&kernel)?;
        state["release"] = release.trim().into();
        Ok(state)
    };
    if !follow {
        println!("{:#}", read()?);
        return Ok(());
    }
    for line in std::io::stdin().lines() {
        line.context("standard input")?;
        println!("{}", read()?);
    }
    Ok(())
}

fn compare(booted: &Path, moved: &Path, before: Option<&Path>) -> Result<()> {
    let read = |path: &Path| -> Result<serde_json::Value> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    };
    let (booted, moved) = (read(booted)?, read(moved)?);
    let before = before.map_or_else(|| Ok(moved.clone()), read)?;
    let case = compare::Case { booted: &booted, moved: &moved, before: &before };
    let unknown = play::judge(&mut compare::Known::read()?, "moved", &case)?;
    ensure!(unknown == 0, "{unknown} differences are not in the list");
    Ok(())
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Show { follow } => show(follow),
        Command::Compare { booted, moved, before } => compare(&booted, &moved, before.as_deref()),
        Command::Play(arguments) => play::run(&arguments),
    }
}
