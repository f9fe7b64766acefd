//! What a kernel has for each CPU: its node, what it shares, its scheduling domains, its timers.

use crate::shape::Shape;
use crate::value::{Kernel, Value, list};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value as Json, json};

/// Masks of CPUs by CPU; not each kernel has all of them.
const MASKS: [&str; 5] =
    ["cpu_sibling_map", "cpu_core_map", "cpu_die_map", "cpu_llc_shared_map", "cpu_l2c_shared_map"];
/// Numbers that only say which CPUs have the same one.
const CLASSES: [&str; 2] = ["sd_llc_id", "sd_share_id"];
/// Pointers that say which CPUs have the same object.
const SHARED: [&str; 2] = ["sd_llc_shared", "sd_balance_shared"];
/// Domains that are found without the whole chain.
const DOMAINS: [&str; 4] = ["sd_llc", "sd_numa", "sd_asym_packing", "sd_asym_cpucapacity"];
/// What the domains' makers set, and nothing changes later. `llc_max` is the highest id of a cache, and depends on which CPU was the last
/// to join the others.
const SETTINGS: [&str; 9] = [
    "flags",
    "level",
    "span_weight",
    "min_interval",
    "max_interval",
    "busy_factor",
    "imbalance_pct",
    "cache_nice_tries",
    "imb_numa_nr",
];
/// More than there are domains or groups of 64 CPUs.
const MOST: usize = 320;
/// The entry of a CPU's segments that says its node (`GDT_ENTRY_CPUNODE`).
const GDT_NODE: usize = 15;

/// For each online CPU.
pub fn read(kernel: &Kernel, shape: &Shape) -> Result<Map<String, Json>> {
    let mut shared = Vec::new();
    for name in CLASSES.into_iter().filter(|name| kernel.has(name)) {
        shared.push((name, shape.sharers(|cpu| kernel.per_cpu(name, cpu)?.number())?));
    }
    for name in SHARED.into_iter().filter(|name| kernel.has(name)) {
        shared.push((name, shape.sharers(|cpu| kernel.per_cpu(name, cpu)?.word())?));
    }
    let timers = if kernel.has("tmigr_cpu") { timers(kernel, shape)? } else { Vec::new() };
    let mut cpus = Map::new();
    for (index, &cpu) in shape.cpus.iter().enumerate() {
        let mut one = maps(kernel, shape, cpu)?;
        for (name, with) in &shared {
            one.insert(format!("{name} shared with"), with[index].clone().into());
        }
        one.insert("domains".into(), domains(kernel, shape, cpu)?);
        for name in DOMAINS.into_iter().filter(|name| kernel.has(name)) {
            let domain = kernel.per_cpu(name, cpu)?.follow()?;
            one.insert(name.into(), domain.map_or(Ok(Json::Null), |domain| span(shape, &domain))?);
        }
        one.insert("caches".into(), caches(kernel, shape, cpu)?);
        if let Some(groups) = timers.get(index) {
            one.insert("timers".into(), groups.clone());
        }
        cpus.insert(cpu.to_string(), one.into());
    }
    Ok(cpus)
}

fn maps(kernel: &Kernel, shape: &Shape, cpu: usize) -> Result<Map<String, Json>> {
    let number = |symbol: &str| -> Result<Json> { Ok(kernel.per_cpu(symbol, cpu)?.number()?.into()) };
    let mut one = Map::new();
    for symbol in ["x86_cpu_to_node_map", "numa_node", "sd_llc_size"] {
        one.insert(symbol.into(), number(symbol)?);
    }
    // One socket for each vCPU: the number of a CPU is that of its APIC.
    let of_apic = kernel.global("__apicid_to_node", "short int")?.index(cpu)?.number()?;
    one.insert("__apicid_to_node".into(), of_apic.into());
    let entry = kernel.per_cpu("gdt_page", cpu)?.field("gdt")?.index(GDT_NODE)?.word()?;
    // The limit of a segment: the CPU below, its node above 12 bits.
    let limit = entry & 0xffff | (entry >> 48 & 0xf) << 16;
    one.insert("getcpu".into(), json!({ "cpu": limit & 0xfff, "node": limit >> 12 }));
    if let Some(device) = kernel.per_cpu("cpu_sys_devices", cpu)?.follow()? {
        one.insert("device".into(), device.field("numa_node")?.number()?.into());
        let whole = device.container("cpu", "dev")?;
        one.insert("link".into(), whole.field("node_id")?.number()?.into());
    }
    for name in MASKS.into_iter().filter(|name| kernel.has(name)) {
        one.insert(name.into(), shape.mask_of(&kernel.per_cpu(name, cpu)?)?);
    }
    if kernel.has("system_page_pool") {
        let pool = kernel.per_cpu("system_page_pool", cpu)?;
        let pool = if pool.has("pool") { pool.field("pool")? } else { pool };
        one.insert("page pool".into(), pool.target()?.field("p")?.field("nid")?.number()?.into());
    }
    let pools = kernel.per_cpu("cpu_worker_pools", cpu)?;
    let nodes = (0..2).map(|index| Ok(Json::from(pools.index(index)?.field("node")?.number()?)));
    one.insert("worker pools".into(), nodes.collect::<Result<Json>>()?);
    let root = kernel.per_cpu("runqueues", cpu)?.field("rd")?.target()?;
    one.insert("root domain".into(), shape.mask_of(&root.field("span")?)?);
    Ok(one)
}

/// The CPUs of a domain: right behind it, which BTF does not say of each kernel.
fn span(shape: &Shape, domain: &Value<'_>) -> Result<Json> {
    shape.mask(&domain.index(1)?)
}

fn domains(kernel: &Kernel, shape: &Shape, cpu: usize) -> Result<Json> {
    let mut chain = Vec::new();
    let mut next = kernel.per_cpu("runqueues", cpu)?.field("sd")?.follow()?;
    while let Some(domain) = next {
        if chain.len() == MOST {
            bail!("runqueues of CPU {cpu}.sd: no end after {MOST} domains");
        }
        let mut one = Map::new();
        for field in SETTINGS.into_iter().filter(|field| domain.has(field)) {
            one.insert(field.into(), domain.field(field)?.number()?.into());
        }
        if domain.has("name") {
            one.insert("name".into(), domain.field("name")?.text()?.into());
        }
        one.insert("span".into(), span(shape, &domain)?);
        one.insert("groups".into(), groups(shape, &domain.field("groups")?.target()?)?);
        chain.push(Json::from(one));
        next = domain.field("parent")?.follow()?;
    }
    Ok(chain.into())
}

/// The groups of a domain, from that of the CPU on.
fn groups(shape: &Shape, first: &Value<'_>) -> Result<Json> {
    let (mut all, mut group) = (Vec::new(), first.clone());
    loop {
        let mut one = Map::new();
        for field in ["group_weight", "cores", "flags"].into_iter().filter(|field| group.has(field)) {
            one.insert(field.into(), group.field(field)?.number()?.into());
        }
        one.insert("cpus".into(), shape.mask(&group.field("cpumask")?)?);
        let balance = group.field("sgc")?.target()?.field("cpumask")?;
        one.insert("balance".into(), shape.mask(&balance)?);
        all.push(Json::from(one));
        group = group.field("next")?.target()?;
        if group.address() == first.address() {
            return Ok(all.into());
        }
        if all.len() == MOST {
            bail!("sched_group.next: no end after {MOST} groups");
        }
    }
}

fn caches(kernel: &Kernel, shape: &Shape, cpu: usize) -> Result<Json> {
    let info = kernel.per_cpu("ci_cpu_cacheinfo", cpu)?;
    let leaves = info.field("num_leaves")?.number()?;
    let Some(list) = info.field("info_list")?.follow()? else { return Ok(Json::Null) };
    let one = |index: i64| -> Result<Json> {
        let leaf = list.index(usize::try_from(index)?)?;
        Ok(json!({
            "level": leaf.field("level")?.number()?,
            "type": leaf.field("type")?.number()?,
            "shared": shape.mask(&leaf.field("shared_cpu_map")?)?,
        }))
    };
    (0..leaves.min(16)).map(one).collect()
}

/// The groups within which a CPU hands on its timers, from the nearest: their node, and the CPUs that are in the same ones.
fn timers(kernel: &Kernel, shape: &Shape) -> Result<Vec<Json>> {
    let chain = |cpu: usize| -> Result<Vec<(u64, i64)>> {
        let mut groups = Vec::new();
        let mut next = kernel.per_cpu("tmigr_cpu", cpu)?.field("tmgroup")?.follow()?;
        while let Some(group) = next {
            if groups.len() == MOST {
                bail!("tmigr_cpu of CPU {cpu}.tmgroup: no end after {MOST} groups");
            }
            groups.push((group.address(), group.field("numa_node")?.number()?));
            next = group.field("parent")?.follow()?;
        }
        Ok(groups)
    };
    let chains = shape.cpus.iter().map(|cpu| chain(*cpu)).collect::<Result<Vec<_>>>()?;
    let members = |level: usize, address: u64| {
        let with = chains.iter().map(|chain| chain.get(level).is_some_and(|(other, _)| *other == address));
        let with = shape.cpus.iter().zip(with).filter(|(_, with)| *with).map(|(cpu, _)| *cpu);
        list(&with.collect::<Vec<_>>())
    };
    let shown = |chain: &Vec<(u64, i64)>| -> Json {
        let groups = chain.iter().enumerate();
        groups
            .map(|(level, (address, node))| json!({ "node": node, "cpus": members(level, *address) }))
            .collect()
    };
    chains.iter().map(|chain| Ok(shown(chain))).collect::<Result<Vec<_>>>().context("tmigr_cpu")
}
