//! CPUs and memory of the server itself, plugged and unplugged through the monitor of its QEMU.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use serde_json::{Value, json};
use vnuma_lab_agent::{MONITOR_PORT, find_port};
use vnuma_lab_qmp::Qmp;

use crate::host::parse_list;
use crate::plan::Memory;

const CPUS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";
/// What the kernel does with memory that is plugged.
const ONLINE_POLICY: &str = "/sys/devices/system/memory/auto_online_blocks";
/// How long the kernel may take to notice; a fraction of a second is usual.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Subcommand)]
pub enum Command {
    /// Plug a CPU into a free slot of NODE, bring it online and print its number
    PlugCpu {
        /// Node of the server
        node: usize,
        /// Leave it offline
        #[arg(long)]
        offline: bool,
    },
    /// Unplug the last CPU of NODE
    UnplugCpu {
        /// Node of the server
        node: usize,
    },
    /// Plug memory into NODE; the kernel brings it online. Prints the id of the module
    PlugMemory {
        /// Node of the server
        node: usize,
        /// How much, such as 512M; the kernel takes multiples of 128M
        #[arg(value_name = "SIZE")]
        memory: Memory,
        /// For programs only, not for the kernel itself, so that it can be unplugged again
        #[arg(long)]
        movable: bool,
    },
    /// Unplug a module of memory
    UnplugMemory {
        /// Its id
        id: String,
    },
    /// Run a command of the monitor and print its answer
    Qmp {
        /// Its name
        command: String,
        /// Its arguments, a JSON object
        #[arg(default_value = "{}")]
        arguments: String,
    },
}

/// Runs the subcommand.
pub fn run(command: &Command) -> Result<()> {
    let port = find_port(MONITOR_PORT).context("the server's profile has no [hotplug]")?;
    let mut qmp = Qmp::open_port(&port)?;
    match command {
        Command::PlugCpu { node, offline } => plug_cpu(&mut qmp, *node, *offline),
        Command::UnplugCpu { node } => unplug_cpu(&mut qmp, *node),
        Command::PlugMemory { node, memory, movable } => {
            let policy = fs::read_to_string(ONLINE_POLICY).context(ONLINE_POLICY)?;
            if *movable {
                fs::write(ONLINE_POLICY, "online_movable").context(ONLINE_POLICY)?;
            }
            let plugged = plug_memory(&mut qmp, *node, memory.mib);
            fs::write(ONLINE_POLICY, policy.trim()).context(ONLINE_POLICY)?;
            plugged
        }
        Command::UnplugMemory { id } => {
            delete(&mut qmp, id)?;
            qmp.run_with("object-del", &json!({ "id": backend(id) })).map(drop)
        }
        Command::Qmp { command, arguments } => {
            let arguments =
                serde_json::from_str(arguments).with_context(|| format!("no JSON: {arguments}"))?;
            println!("{}", qmp.run_with(command, &arguments)?);
            Ok(())
        }
    }
}

/// Places for a CPU on a node, in order, those that have one or those that have none.
fn slots(answer: &Value, node: usize, filled: bool) -> Vec<Value> {
    let fits = |slot: &&Value| slot["props"]["node-id"] == node && slot.get("qom-path").is_some() == filled;
    let mut slots: Vec<Value> = answer.as_array().into_iter().flatten().filter(fits).cloned().collect();
    slots.sort_by_key(|slot| slot["props"]["core-id"].as_u64());
    slots
}

fn plug_cpu(qmp: &mut Qmp, node: usize, offline: bool) -> Result<()> {
    let answer = qmp.run("query-hotpluggable-cpus")?;
    let free = slots(&answer, node, false);
    let slot = free.first().with_context(|| format!("node {node} has no free slot for a CPU"))?;
    let before = list(CPUS, "present")?;
    let mut arguments = slot["props"].clone();
    arguments["driver"] = slot["type"].clone();
    arguments["id"] = format!("cpu{node}.{}", slot["props"]["core-id"]).into();
    qmp.run_with("device_add", &arguments)?;
    let new = || Ok(list(CPUS, "present")?.into_iter().find(|cpu| !before.contains(cpu)));
    let cpu = wait_for("the kernel to see the CPU", new)?;
    if !offline {
        let path = PathBuf::from(CPUS).join(format!("cpu{cpu}/online"));
        // The file comes a moment after the CPU.
        wait_for("the CPU's file", || Ok(path.exists().then_some(())))?;
        // A udev may have been faster.
        if fs::read_to_string(&path)?.trim() != "1" {
            fs::write(&path, "1").with_context(|| path.display().to_string())?;
        }
    }
    println!("{cpu}");
    Ok(())
}

fn unplug_cpu(qmp: &mut Qmp, node: usize) -> Result<()> {
    let answer = qmp.run("query-hotpluggable-cpus")?;
    let filled = slots(&answer, node, true);
    let path = filled.last().and_then(|slot| slot["qom-path"].as_str());
    let path = path.with_context(|| format!("node {node} has no CPU"))?;
    let before = list(CPUS, "present")?.len();
    qmp.run_with("device_del", &json!({ "id": path }))?;
    wait_for(
        "the kernel to let go of the CPU",
        || Ok((list(CPUS, "present")?.len() < before).then_some(())),
    )?;
    // QEMU sends no event for a CPU; its slot becomes free.
    let count = filled.len();
    wait_for("QEMU to remove the CPU", || {
        let left = slots(&qmp.run("query-hotpluggable-cpus")?, node, true).len();
        Ok((left < count).then_some(()))
    })
}

/// Takes a module out and waits for the kernel to let go of it.
fn delete(qmp: &mut Qmp, id: &str) -> Result<()> {
    qmp.run_with("device_del", &json!({ "id": id }))?;
    let event = qmp
        .await_event_where(|event| is_deletion(event, id) || is_refusal(event, id))
        .with_context(|| format!("waiting for the end of {id}"))?;
    ensure!(
        is_deletion(&event, id),
        "the kernel does not let go of {id}: it uses that memory itself ({event})"
    );
    Ok(())
}

fn is_deletion(event: &Value, id: &str) -> bool {
    event["event"] == "DEVICE_DELETED" && event["data"]["device"] == id
}

/// Whether the kernel reports by ACPI (_OST) that a device stays. The number is "ejection in progress".
fn is_refusal(event: &Value, id: &str) -> bool {
    let info = &event["data"]["info"];
    event["event"] == "ACPI_DEVICE_OST"
        && info["device"] == id
        && info["status"].as_u64().is_some_and(|status| status != 0 && status != 0x84)
}

/// The backend of a module.
fn backend(id: &str) -> String {
    format!("{id}-ram")
}

fn plug_memory(qmp: &mut Qmp, node: usize, mib: usize) -> Result<()> {
    let modules = qmp.run("query-memory-devices")?;
    let taken = |id: &str| modules.as_array().into_iter().flatten().any(|module| module["data"]["id"] == id);
    let id = (0..).map(|number| format!("dimm{number}")).find(|id| !taken(id)).unwrap_or_default();
    let before = memory_kib(node)?;
    let size = mib << 20;
    let ram = backend(&id);
    qmp.run_with("object-add", &json!({ "qom-type": "memory-backend-ram", "id": ram, "size": size }))?;
    let module = json!({ "driver": "pc-dimm", "id": id, "memdev": ram, "node": node });
    if let Err(error) = qmp.run_with("device_add", &module) {
        // The first error is reported.
        let _ = qmp.run_with("object-del", &json!({ "id": ram }));
        return Err(error);
    }
    let promised = before + (mib << 10);
    wait_for("the memory to come online", || Ok((memory_kib(node)? >= promised).then_some(())))?;
    println!("{id}");
    Ok(())
}

/// Memory of a node that is online; 0 for a node that is not.
fn memory_kib(node: usize) -> Result<usize> {
    let path = Path::new(NODES).join(format!("node{node}/meminfo"));
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        text => text.with_context(|| path.display().to_string())?,
    };
    let total = text.lines().find_map(|line| line.split_once("MemTotal:"));
    let value = total.and_then(|(_, value)| value.trim().strip_suffix(" kB")?.parse().ok());
    value.with_context(|| format!("{}: no MemTotal", path.display()))
}

fn list(directory: &str, name: &str) -> Result<Vec<usize>> {
    let path = Path::new(directory).join(name);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    parse_list(text.trim()).with_context(|| format!("{}: \"{}\"", path.display(), text.trim()))
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure!(started.elapsed() < LIMIT, "{what}: not within {} s", LIMIT.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_and_removal_of_a_module_are_distinguished() {
        let ost = |id: &str, status: u64| json!({"event": "ACPI_DEVICE_OST", "data": {"info": {"device": id, "source": 3, "status": status}}});
        assert!(is_refusal(&ost("dimm0", 1), "dimm0"));
        for other in [ost("dimm0", 0), ost("dimm0", 0x84), ost("dimm1", 1)] {
            assert!(!is_refusal(&other, "dimm0"), "{other}");
        }
        let deleted = json!({"event": "DEVICE_DELETED", "data": {"device": "dimm0"}});
        assert!(is_deletion(&deleted, "dimm0") && !is_deletion(&deleted, "dimm1"));
    }

    #[test]
    fn slots_of_a_node_come_in_order_and_by_whether_they_are_filled() {
        let slot = |node: usize, core: usize| json!({"props": {"node-id": node, "core-id": core}});
        let mut filled = slot(1, 0);
        filled["qom-path"] = "/machine/x".into();
        let answer = json!([slot(1, 2), filled, slot(1, 1), slot(0, 0)]);
        assert_eq!(slots(&answer, 1, false), [slot(1, 1), slot(1, 2)]);
        assert_eq!(slots(&answer, 1, true), [filled]);
        assert!(slots(&answer, 2, false).is_empty());
    }
}
