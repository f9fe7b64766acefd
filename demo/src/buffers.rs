//! The program in the guest that takes memory as a driver does for its device: on the node that the kernel has for the device, or
//! on that of the CPU that it runs on if the kernel knows none (`dev_to_node()`).

use crate::guest::{Arena, bind};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use vnuma_scenario::PCI_DEVICES;

/// On each CPU, as a driver has a queue for each.
const PAGES_PER_CPU: usize = 64;
/// More than any VM of the demonstration has.
pub const MAX_PAGES: usize = 1 << 20;
/// `MPOL_PREFERRED` of set_mempolicy(2).
const PREFERRED: i64 = 1;

#[derive(clap::Args)]
pub struct Arguments {
    /// Class of the device, as `/sys` has it
    #[arg(long)]
    class: String,
}

/// What the program has found and taken.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffers {
    /// `numa_node` of the device; -1 if the kernel knows none.
    pub node: i64,
    /// Guest physical addresses of the pages.
    pub pages: Vec<u64>,
}

/// Prints the [`Buffers`] as JSON, or `null` if there is no such device yet.
pub fn run(arguments: &Arguments) -> Result<()> {
    let found = device(Path::new(PCI_DEVICES), &arguments.class)?;
    let buffers = found.map(|device| take(&device)).transpose()?;
    println!("{}", serde_json::to_string(&buffers)?);
    Ok(())
}

fn device(directory: &Path, class: &str) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        // A device that goes has no class any more.
        if fs::read_to_string(path.join("class")).is_ok_and(|text| text.trim() == class) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

fn take(device: &Path) -> Result<Buffers> {
    let file = device.join("numa_node");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let node: i64 = text.trim().parse().with_context(|| format!("{}: {text:?}", file.display()))?;
    let online = fs::read_to_string("/sys/devices/system/cpu/online").context("online CPUs")?;
    let cpus: vnuma_model::CpuSet = online.parse().context("/sys/devices/system/cpu/online")?;
    let pagemap = File::open("/proc/self/pagemap").context("/proc/self/pagemap")?;
    let mut arena = Arena::new(cpus.len() * PAGES_PER_CPU)?;
    let mut pages = Vec::new();
    for (number, cpu) in cpus.iter().enumerate() {
        bind(cpu as usize)?;
        prefer(node)?;
        let first = number * PAGES_PER_CPU;
        let times = arena.touch(first, PAGES_PER_CPU);
        pages.extend(arena.locate(&pagemap, first, &times)?.iter().map(|page| page.gpa));
    }
    Ok(Buffers { node, pages })
}

/// New memory comes from a node, as long as that has any; nothing is said for -1.
fn prefer(node: i64) -> Result<()> {
    let Ok(node) = u32::try_from(node) else { return Ok(()) };
    ensure!(node < u64::BITS, "node {node}");
    let mask = 1_u64 << node;
    // SAFETY: the kernel reads one word of the mask, which lives until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, &raw const mask, u64::BITS + 1) };
    if result != 0 {
        return Err(std::io::Error::last_os_error()).with_context(|| format!("set_mempolicy to node {node}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_its_class() {
        let directory = tempfile::tempdir().unwrap();
        for (name, class) in [("a", "0x020000\n"), ("b", "0x010802\n")] {
            fs::create_dir(directory.path().join(name)).unwrap();
            fs::write(directory.path().join(name).join("class"), class).unwrap();
        }
        fs::create_dir(directory.path().join("c")).unwrap();
        let found = |class| device(directory.path(), class).unwrap();
        assert_eq!(found("0x010802"), Some(directory.path().join("b")));
        assert_eq!(found("0x030000"), None);
    }
}
