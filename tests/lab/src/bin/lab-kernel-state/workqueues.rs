//! What workqueues know of nodes.

use crate::shape::Shape;
use crate::value::Kernel;
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value as Json, json};

/// More than a kernel has workqueues.
const MOST: usize = 4096;

/// The CPUs by node, and what follows from them.
pub fn read(kernel: &Kernel, shape: &Shape) -> Result<Map<String, Json>> {
    let mut all = Map::new();
    if kernel.has("wq_numa_possible_cpumask") {
        let masks = kernel.global("wq_numa_possible_cpumask", "cpumask**")?.follow()?;
        let mask =
            |node: &usize| masks.as_ref().map_or(Ok(Json::Null), |masks| shape.mask_of(&masks.index(*node)?));
        all.insert("pods".into(), shape.nodes.iter().map(mask).collect::<Result<Json>>()?);
    }
    if kernel.has("wq_pod_types") {
        all.insert("pods".into(), pods(kernel, shape)?);
        all.insert("limits".into(), limits(kernel, shape)?);
    }
    Ok(all)
}

/// CPUs that share the workers of what is to stay on a node.
fn pods(kernel: &Kernel, shape: &Shape) -> Result<Json> {
    let kind = usize::try_from(kernel.constant("WQ_AFFN_NUMA")?)?;
    let pods = kernel.global("wq_pod_types", "wq_pod_type")?.index(kind)?;
    let count = pods.field("nr_pods")?.number()?;
    let (cpus, nodes) = (pods.field("pod_cpus")?.target()?, pods.field("pod_node")?.target()?);
    let pod = |index: i64| -> Result<Json> {
        let index = usize::try_from(index)?;
        Ok(json!({ "cpus": shape.mask_of(&cpus.index(index)?)?, "node": nodes.index(index)?.number()? }))
    };
    (0..count.min(shape.nr_nodes as i64)).map(pod).collect()
}

/// How many work items of each workqueue that is not bound to CPUs may run on each node at a time.
fn limits(kernel: &Kernel, shape: &Shape) -> Result<Json> {
    let unbound = kernel.constant("WQ_UNBOUND")?;
    let head = kernel.global("workqueues", "list_head")?;
    let (mut all, mut link) = (Map::new(), head.field("next")?.target()?);
    for _ in 0..MOST {
        if link.address() == head.address() {
            return Ok(all.into());
        }
        let queue = link.container("workqueue_struct", "list")?;
        if queue.field("flags")?.number()? & unbound != 0 {
            let name = queue.field("name")?.text().context("workqueues")?;
            let limits = queue.field("node_nr_active")?;
            let of_node = |node: &usize| -> Result<Json> {
                Ok(limits.index(*node)?.target()?.field("max")?.number()?.into())
            };
            all.insert(name, shape.nodes.iter().map(of_node).collect::<Result<Json>>()?);
        }
        link = link.field("next")?.target()?;
    }
    bail!("workqueues: no end after {MOST}")
}
