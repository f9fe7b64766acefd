//! The CPUs and nodes that all of a state is about.

use crate::value::{Kernel, Value, list};
use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use std::collections::BTreeSet;

const MOST_CPUS: usize = 64;
/// More nodes than a guest of the lab has.
pub const MOST_NODES: usize = 64;

/// CPUs and nodes of a kernel.
pub struct Shape {
    /// Online CPUs.
    pub cpus: Vec<usize>,
    /// Online nodes.
    pub nodes: Vec<usize>,
    /// Numbers that a node may have are below this.
    pub nr_nodes: usize,
    nr_cpus: usize,
    bare: Vec<usize>,
    /// Distances between nodes with CPUs: the kernel has no levels for others.
    distances: BTreeSet<i64>,
}

/// A number from 1 to `most`.
pub fn count(kernel: &Kernel, symbol: &str, most: usize) -> Result<usize> {
    let found = kernel.global(symbol, "unsigned int")?.number()?;
    let found = usize::try_from(found).ok().filter(|found| (1..=most).contains(found));
    found.with_context(|| format!("{symbol}: expected 1 to {most}"))
}

/// The nodes in a state, such as `N_CPU`.
pub fn nodes_in(kernel: &Kernel, state: &str, nr_nodes: usize) -> Result<Vec<usize>> {
    let index = usize::try_from(kernel.constant(state)?).context("a state of nodes")?;
    kernel.global("node_states", "nodemask_t")?.index(index)?.set(nr_nodes)
}

/// What `node_distance()` says.
pub fn distance(kernel: &Kernel, from: usize, to: usize) -> Result<i64> {
    let size = count(kernel, "numa_distance_cnt", MOST_NODES)?;
    let table = kernel.global("numa_distance", "unsigned char*")?;
    let table = table.target().context("a guest of the lab has distances")?;
    ensure!(from < size && to < size, "numa_distance_cnt: {size}, but there are nodes {from} and {to}");
    table.index(from * size + to)?.number()
}

impl Shape {
    /// Of the kernel as it is now.
    pub fn read(kernel: &Kernel) -> Result<Self> {
        let nr_cpus = count(kernel, "nr_cpu_ids", MOST_CPUS)?;
        let nr_nodes = count(kernel, "nr_node_ids", MOST_NODES)?;
        let cpus = kernel.global("__cpu_online_mask", "cpumask")?.set(nr_cpus)?;
        let nodes = nodes_in(kernel, "N_ONLINE", nr_nodes)?;
        ensure!(!cpus.is_empty() && !nodes.is_empty(), "no CPU or no node is online");
        let masks = kernel.global("node_to_cpumask_map", "cpumask*")?;
        let (mut bare, mut peopled) = (Vec::new(), Vec::new());
        for &node in &nodes {
            let is_bare = masks.index(node)?.target()?.set(nr_cpus)?.is_empty();
            let nodes = if is_bare { &mut bare } else { &mut peopled };
            nodes.push(node);
        }
        let mut distances = BTreeSet::new();
        for &from in &peopled {
            for &to in &peopled {
                distances.insert(distance(kernel, from, to)?);
            }
        }
        Ok(Self { cpus, nodes, nr_nodes, nr_cpus, bare, distances })
    }

    /// `0`, or `0 (bare)`: what a kernel has for a node without CPUs differs more often.
    pub fn node_name(&self, node: usize) -> String {
        if self.bare.contains(&node) { format!("{node} (bare)") } else { node.to_string() }
    }

    /// A level by its distance, and whether only a node without CPUs is the reason for it. Its number depends on such levels.
    pub fn level_name(&self, distance: i64) -> String {
        if self.distances.contains(&distance) { distance.to_string() } else { format!("{distance} (bare)") }
    }

    /// For each CPU those for which `of` gives the same.
    pub fn sharers<T: PartialEq>(&self, of: impl Fn(usize) -> Result<T>) -> Result<Vec<String>> {
        let all = self.cpus.iter().map(|cpu| of(*cpu)).collect::<Result<Vec<_>>>()?;
        let with = |one: &T| {
            let same = self.cpus.iter().zip(&all).filter(|(_, other)| *other == one);
            list(&same.map(|(cpu, _)| *cpu).collect::<Vec<_>>())
        };
        Ok(all.iter().map(with).collect())
    }

    /// A mask of CPUs.
    pub fn mask(&self, at: &Value<'_>) -> Result<Json> {
        Ok(at.bits(self.nr_cpus)?.into())
    }

    /// A mask that may not be there.
    pub fn mask_of(&self, pointer: &Value<'_>) -> Result<Json> {
        pointer.follow()?.map_or(Ok(Json::Null), |mask| self.mask(&mask))
    }
}
