//! The made-up host: a node for each of two CPUs of the machine.

use anyhow::Context;
use std::{fs, path::Path};

/// Nodes, and the CPU of each is the one of its number.
pub const NODES: usize = 2;

/// Writes its `sys` below `root`.
pub fn write(root: &Path) -> anyhow::Result<()> {
    let write = |path: &str, text: &str| {
        let path = root.join("sys/devices/system").join(path);
        let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, text));
        written.with_context(|| path.display().to_string())
    };
    write("cpu/online", "0-1\n")?;
    write("node/online", "0-1\n")?;
    for (node, distances) in [(0, "10 21\n"), (1, "21 10\n")] {
        write(&format!("node/node{node}/cpulist"), &format!("{node}\n"))?;
        write(&format!("node/node{node}/distance"), distances)?;
        let meminfo = format!("Node {node} MemTotal: 4194304 kB\nNode {node} MemFree: 2097152 kB\n");
        write(&format!("node/node{node}/meminfo"), &meminfo)?;
    }
    Ok(())
}
