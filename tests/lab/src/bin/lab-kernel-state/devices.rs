//! What devices' queues know of nodes.

use crate::shape::Shape;
use crate::value::Kernel;
use anyhow::{Result, bail};
use serde_json::{Map, Value as Json, json};

/// More than a guest of the lab has queues of disks.
const MOST: usize = 1024;

/// The queues of each disk: the node of their memory, and the CPUs that use them. They are found by the list of those that are to
/// be told when a CPU goes.
pub fn queues(kernel: &Kernel, shape: &Shape) -> Result<Map<String, Json>> {
    let state = usize::try_from(kernel.constant("CPUHP_AP_BLK_MQ_ONLINE")?)?;
    let mut next =
        kernel.global("cpuhp_hp_states", "cpuhp_step")?.index(state)?.field("list")?.field("first")?;
    let mut all = Map::new();
    for _ in 0..MOST {
        let Some(link) = next.follow()? else { return Ok(all) };
        let queue = link.container("blk_mq_hw_ctx", "cpuhp_online")?;
        let disk = queue.field("queue")?.target()?.field("disk")?.follow()?;
        let name = disk.map_or(Ok("none".to_owned()), |disk| disk.field("disk_name")?.text())?;
        let one = json!({ "node": queue.field("numa_node")?.number()?, "cpus": shape.mask_of(&queue.field("cpumask")?)? });
        all.insert(format!("{name} {}", queue.field("queue_num")?.number()?), one);
        next = link.field("next")?;
    }
    bail!("cpuhp_hp_states[{state}].list: no end after {MOST} queues")
}
