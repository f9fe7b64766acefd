//! What a kernel knows of nodes: a value of JSON for each structure that is made of them.
//!
//! What has no name of its own, as a number that only says who shares something, is shown as the CPUs that share it. What
//! changes while the kernel runs is left out.

use crate::shape::{MOST_NODES, Shape, count, distance, nodes_in};
use crate::value::{Kernel, Value, list};
use crate::{cpus, devices, workqueues};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};

const STATES: [&str; 5] = ["N_POSSIBLE", "N_ONLINE", "N_NORMAL_MEMORY", "N_MEMORY", "N_CPU"];
const MEMORY: [(&str, &str); 3] =
    [("node_reclaim_distance", "int"), ("top_tier_adistance", "int"), ("nr_online_nodes", "unsigned int")];
const TIMERS: [(&str, &str); 2] =
    [("tmigr_hierarchy_levels", "unsigned int"), ("tmigr_crossnode_level", "unsigned int")];
const SCHEDULER: [(&str, &str); 10] = [
    ("sched_domains_numa_levels", "int"),
    ("sched_numa_node_levels", "int"),
    ("sched_max_numa_distance", "int"),
    ("sched_numa_topology_type", "int"),
    ("x86_topology_update", "_Bool"),
    ("x86_has_numa_in_package", "_Bool"),
    // Keys of code: how often each is on.
    ("sched_numa_balancing", "atomic_t"),
    ("sched_smt_present", "atomic_t"),
    ("sched_cluster_active", "atomic_t"),
    ("sched_asym_cpucapacity", "atomic_t"),
];
/// Distances are bytes.
const MOST_LEVELS: usize = 256;

type Object = Map<String, Json>;

/// Those of the symbols that this kernel has, as numbers.
fn globals(kernel: &Kernel, symbols: &[(&str, &str)]) -> Result<Object> {
    let here = symbols.iter().filter(|(symbol, _)| kernel.has(symbol));
    here.map(|(symbol, kind)| Ok(((*symbol).to_owned(), kernel.global(symbol, kind)?.number()?.into())))
        .collect()
}

/// All of it.
pub fn read(kernel: &Kernel) -> Result<Json> {
    let shape = Shape::read(kernel)?;
    let nodes = shape.nodes.iter().map(|node| Ok((shape.node_name(*node), node_of(kernel, &shape, *node)?)));
    Ok(json!({
        "states": states(kernel, &shape)?,
        "scheduler": scheduler(kernel, &shape)?,
        "memory": globals(kernel, &MEMORY)?,
        "timers": globals(kernel, &TIMERS)?,
        "workqueues": workqueues::read(kernel, &shape)?,
        "queues": devices::queues(kernel, &shape)?,
        "cpu": cpus::read(kernel, &shape)?,
        "node": nodes.collect::<Result<Object>>()?,
    }))
}

fn states(kernel: &Kernel, shape: &Shape) -> Result<Object> {
    let of = |name: &&str| Ok(((*name).to_owned(), list(&nodes_in(kernel, name, shape.nr_nodes)?).into()));
    STATES.iter().map(of).collect()
}

fn node_of(kernel: &Kernel, shape: &Shape, node: usize) -> Result<Json> {
    let cpus = kernel.global("node_to_cpumask_map", "cpumask*")?.index(node)?;
    let data = kernel.global("node_data", "pglist_data*")?.index(node)?.target()?;
    let kthread = |field: &str| -> Result<Json> {
        let task = data.field(field)?.follow()?;
        task.map_or(Ok(Json::Null), |task| shape.mask(&task.field("cpus_mask")?))
    };
    let distances = shape.nodes.iter().map(|to| distance(kernel, node, *to)).collect::<Result<Vec<_>>>()?;
    let zones = zonelist(&data)?;
    Ok(json!({
        "cpus": shape.mask_of(&cpus)?,
        "distances": distances,
        "masks": masks(kernel, shape, node)?,
        "kswapd": kthread("kswapd")?,
        "kcompactd": kthread("kcompactd")?,
        "zonelist": by_distance(kernel, node, &zones)?,
        "zonelist order": zones.iter().map(|(_, zone)| zone.as_str()).collect::<Vec<_>>().join(" "),
        "pages": pages(kernel, shape, &data)?,
        "demotion": demotion(kernel, shape, node)?,
        "tier": tier(&data)?,
    }))
}

/// The scheduler's masks of a node, by level.
fn masks(kernel: &Kernel, shape: &Shape, node: usize) -> Result<Json> {
    let Some(masks) = kernel.global("sched_domains_numa_masks", "cpumask***")?.follow()? else {
        return Ok(Json::Null);
    };
    let mut all = Object::new();
    for (level, distance) in domain_distances(kernel)?.into_iter().enumerate() {
        let mask = match masks.index(level)?.follow()? {
            Some(of_nodes) => shape.mask_of(&of_nodes.index(node)?)?,
            None => Json::Null,
        };
        let twice = all.insert(shape.level_name(distance), mask);
        ensure!(twice.is_none(), "sched_domains_numa_distance: {distance} is there twice");
    }
    Ok(all.into())
}

fn domain_distances(kernel: &Kernel) -> Result<Vec<i64>> {
    level_distances(kernel, "sched_domains_numa_distance", "sched_domains_numa_levels")
}

fn level_distances(kernel: &Kernel, symbol: &str, number: &str) -> Result<Vec<i64>> {
    let distances = kernel.global(symbol, "int*")?.target()?;
    (0..count(kernel, number, MOST_LEVELS)?).map(|level| distances.index(level)?.number()).collect()
}

/// In which order the allocator looks at zones: each with its node.
fn zonelist(data: &Value<'_>) -> Result<Vec<(usize, String)>> {
    let mut order = Vec::new();
    let entries = data.field("node_zonelists")?.index(0)?.field("_zonerefs")?;
    // A zone has an entry.
    for entry in 0..8 * MOST_NODES {
        let Some(zone) = entries.index(entry)?.field("zone")?.follow()? else { return Ok(order) };
        let node = zone.field("node")?.number()?;
        order.push((usize::try_from(node)?, format!("{node}:{}", zone.field("name")?.text()?)));
    }
    anyhow::bail!("node_zonelists: no end after {} zones", order.len())
}

/// The same without what depends on more than distances: nodes that are as far follow each other by number.
fn by_distance(kernel: &Kernel, from: usize, order: &[(usize, String)]) -> Result<Vec<String>> {
    let mut runs: Vec<(i64, Vec<&(usize, String)>)> = Vec::new();
    for zone in order {
        let far = distance(kernel, from, zone.0)?;
        match runs.last_mut() {
            Some((last, run)) if *last == far => run.push(zone),
            _ => runs.push((far, vec![zone])),
        }
    }
    let text = |(far, mut run): (i64, Vec<&(usize, String)>)| {
        run.sort_by_key(|(node, _)| *node);
        format!("{far}: {}", run.iter().map(|(_, zone)| zone.as_str()).collect::<Vec<_>>().join(" "))
    };
    Ok(runs.into_iter().map(text).collect())
}

/// Among how many CPUs each zone divides the pages that lists of CPUs may hold (`zone_highsize()`). The pages themselves depend on
/// how much memory the kernel has found, which is not the same at each boot.
fn pages(kernel: &Kernel, shape: &Shape, data: &Value<'_>) -> Result<Json> {
    let mut zones = Object::new();
    let low = usize::try_from(kernel.constant("WMARK_LOW")?)?;
    for index in 0..usize::try_from(kernel.constant("__MAX_NR_ZONES")?)? {
        let zone = data.field("node_zones")?.index(index)?;
        if zone.field("managed_pages")?.number()? == 0 {
            continue;
        }
        let low = zone.field("_watermark")?.index(low)?.number()?;
        let of_cpu = |cpu: &usize| -> Result<Json> {
            let lists = zone.field("per_cpu_pageset")?.target_of(*cpu)?;
            let high = lists.field(if lists.has("high_min") { "high_min" } else { "high" })?.number()?;
            let batch = lists.field("batch")?.number()?;
            // The least is four batches.
            Ok(if high <= 4 * batch { "least".into() } else { ((low + high / 2) / high).into() })
        };
        let all = shape.cpus.iter().map(of_cpu).collect::<Result<Json>>()?;
        zones.insert(zone.field("name")?.text()?, all);
    }
    Ok(zones.into())
}

/// The memory tier of a node, by the distance that it begins at.
fn tier(data: &Value<'_>) -> Result<Json> {
    let tier = data.field("memtier")?.follow()?;
    tier.map_or(Ok(Json::Null), |tier| Ok(tier.field("adistance_start")?.number()?.into()))
}

/// The nodes that pages of a node are demoted to.
fn demotion(kernel: &Kernel, shape: &Shape, node: usize) -> Result<Json> {
    if !kernel.has("node_demotion") {
        return Ok(Json::Null);
    }
    let Some(targets) = kernel.global("node_demotion", "demotion_nodes*")?.follow()? else {
        return Ok(Json::Null);
    };
    Ok(targets.index(node)?.field("preferred")?.bits(shape.nr_nodes)?.into())
}

fn scheduler(kernel: &Kernel, shape: &Shape) -> Result<Object> {
    let mut all = globals(kernel, &SCHEDULER)?;
    if kernel.has("sched_numa_node_distance") {
        let own = level_distances(kernel, "sched_numa_node_distance", "sched_numa_node_levels")?;
        let own: Object = own.into_iter().map(|one| (shape.level_name(one), true.into())).collect();
        all.insert("node distances".into(), own.into());
    }
    all.insert("levels".into(), topology(kernel, shape)?);
    Ok(all)
}

/// The scheduler's list of levels, from CPUs of a core to the farthest nodes: by number those within a node, then by distance.
fn topology(kernel: &Kernel, shape: &Shape) -> Result<Json> {
    let list = kernel.global("sched_domain_topology", "sched_domain_topology_level*")?.target()?;
    let distances = domain_distances(kernel)?;
    let function = |address| kernel.function(address).unwrap_or("unknown").to_owned();
    let mut levels = Object::new();
    for index in 0..MOST_LEVELS + 8 {
        let level = list.index(index)?;
        let mask = level.field("mask")?.word()?;
        if mask == 0 {
            return Ok(levels.into());
        }
        let name = match usize::try_from(level.field("numa_level")?.number()?) {
            Ok(numa) if numa > 0 => {
                let distance =
                    distances.get(numa).with_context(|| format!("numa_level {numa}: no such level"))?;
                format!("to {}", shape.level_name(*distance))
            }
            _ => index.to_string(),
        };
        let flags = level.field("sd_flags")?.word()?;
        let one = json!({
            "mask": function(mask),
            "sd_flags": if flags == 0 { Json::Null } else { function(flags).into() },
            "flags": if level.has("flags") { level.field("flags")?.number()?.into() } else { Json::Null },
            "name": if level.has("name") { level.field("name")?.text()?.into() } else { Json::Null },
        });
        let twice = levels.insert(name, one);
        ensure!(twice.is_none(), "sched_domain_topology: level {index} is there twice");
    }
    anyhow::bail!("sched_domain_topology: no end after {} levels", levels.len())
}
