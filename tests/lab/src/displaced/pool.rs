//! Pools of huge pages (hugetlbfs) of the server's nodes, and what a VM has of them.

use super::memory;
use anyhow::{Context, Result, ensure};
use std::fs;
use vnuma_scenario::Vm;

/// The pools of one size of pages.
pub struct Pool {
    pub page_kib: u64,
}

impl Pool {
    fn file(&self, node: u64, name: &str) -> String {
        format!("/sys/devices/system/node/node{node}/hugepages/hugepages-{}kB/{name}", self.page_kib)
    }

    fn read(&self, node: u64, name: &str) -> Result<u64> {
        let path = self.file(node, name);
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        text.trim().parse().with_context(|| format!("{path}: {text:?}"))
    }

    /// Gives a node's pool so many pages. Returns how many it had.
    pub fn set(&self, node: u64, pages: u64) -> Result<u64> {
        let (path, before) = (self.file(node, "nr_hugepages"), self.read(node, "nr_hugepages")?);
        fs::write(&path, pages.to_string()).with_context(|| path.clone())?;
        let now = self.read(node, "nr_hugepages")?;
        ensure!(now == pages, "{path}: {now} pages, {pages} were to be there");
        Ok(before)
    }

    /// Pages of a node's pool that are in use.
    pub fn taken(&self, node: u64) -> Result<u64> {
        Ok(self.read(node, "nr_hugepages")? - self.read(node, "free_hugepages")?)
    }

    /// vnumad shows the pages as the kernel does. Returns how many there are.
    pub fn is_shown(&self, vm: &Vm) -> Result<u64> {
        let pages = huge_pages(vm)?;
        let shown = memory()?;
        let nodes = shown["nodes"].as_array().context("no nodes")?;
        let places = nodes.iter().filter_map(|node| node["places"].as_array()).flatten();
        ensure!(
            places.clone().all(|place| place["pages"] == "pool" && place["page_kib"] == self.page_kib),
            "{shown}"
        );
        let bytes: u64 = places.filter_map(|place| place["size"]["bytes"].as_u64()).sum();
        let all = pages[0] + pages[1];
        ensure!(bytes == (all * self.page_kib) << 10, "{bytes} bytes are shown of {pages:?} pages: {shown}");
        println!("huge pages: {} on node 0, {} on node 1", pages[0], pages[1]);
        Ok(all)
    }
}

/// Huge pages of the VM on each node, by the kernel's count.
pub fn huge_pages(vm: &Vm) -> Result<[u64; 2]> {
    let path = format!("/proc/{}/numa_maps", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let lines = text.lines().filter(|line| line.split(' ').any(|word| word == "huge"));
    let words: Vec<&str> = lines.flat_map(|line| line.split(' ')).collect();
    let of = |node: usize| {
        let counts =
            words.iter().filter_map(|word| word.strip_prefix(&format!("N{node}="))?.parse::<u64>().ok());
        counts.sum()
    };
    Ok([of(0), of(1)])
}
