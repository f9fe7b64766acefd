//! Pages of a VM's memory: where the kernel has them, by its own count, and taking some of them elsewhere.

use anyhow::{Context, Result, ensure};
use std::{collections::BTreeMap, fs, os::fd::AsFd};
use vnuma_process::{PAGES_AT_ONCE, PageState, find_pages, move_pages, open_pidfd};
use vnuma_scenario::Vm;

const PAGE: u64 = 4096;

/// Memory of a VM in its QEMU.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pid: i32,
    start: u64,
    end: u64,
}

impl Mapping {
    /// The one that begins there.
    pub fn at(vm: &Vm, start: u64) -> Result<Self> {
        let path = format!("/proc/{}/maps", vm.pid);
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        let end = text.lines().find_map(|line| {
            let (first, rest) = line.split_once('-')?;
            let its = u64::from_str_radix(first, 16) == Ok(start);
            u64::from_str_radix(rest.split(' ').next()?, 16).ok().filter(|_| its)
        });
        Ok(Self { pid: vm.pid, start, end: end.with_context(|| format!("{path}: nothing at {start:x}"))? })
    }

    /// The largest one that QEMU binds to a node.
    pub fn bound_to(vm: &Vm, node: u64) -> Result<Self> {
        let text = numa_maps(vm.pid)?;
        let policy = format!("bind:{node}");
        let bound = text.lines().filter(|line| line.split(' ').nth(1) == Some(&policy));
        let largest = bound.max_by_key(|line| places(line).values().sum::<u64>());
        let line = largest.with_context(|| format!("no memory of {} is bound to node {node}", vm.name))?;
        Self::at(vm, address(line).context("numa_maps: no address")?)
    }

    /// Its first address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How many of these pages are on a node.
    pub fn count(&self, pages: &[u64], node: u64) -> Result<usize> {
        let pidfd = open_pidfd(self.pid).context("QEMU")?;
        let mut count = 0;
        for pages in pages.chunks(PAGES_AT_ONCE) {
            let found = find_pages(pidfd.as_fd(), self.pid, pages).context("move_pages")?;
            count += found
                .into_iter()
                .filter(|at| matches!(at, PageState::On(on) if u64::from(*on) == node))
                .count();
        }
        Ok(count)
    }

    /// Takes these pages to a node.
    pub fn take(&self, pages: &[u64], node: u64) -> Result<()> {
        let pidfd = open_pidfd(self.pid).context("QEMU")?;
        let node = u32::try_from(node).context("a node's number")?;
        for pages in pages.chunks(PAGES_AT_ONCE) {
            move_pages(pidfd.as_fd(), self.pid, pages, node).context("move_pages")?;
        }
        Ok(())
    }

    /// Its pages by host node, bytes.
    pub fn places(&self) -> Result<BTreeMap<u64, u64>> {
        let text = numa_maps(self.pid)?;
        let line = text.lines().find(|line| address(line) == Some(self.start));
        Ok(places(line.with_context(|| format!("numa_maps: nothing at {:x}", self.start))?))
    }

    /// Those on one node, bytes.
    pub fn on(&self, node: u64) -> Result<u64> {
        Ok(self.places()?.get(&node).copied().unwrap_or(0))
    }

    /// Takes about so much of it from one node to another. The kernel does so on request.
    pub fn displace(&self, from: u64, to: u64, bytes: u64) -> Result<u64> {
        let pidfd = open_pidfd(self.pid).context("QEMU")?;
        let node = |node: u64| u32::try_from(node).context("a node's number");
        let (from, to) = (PageState::On(node(from)?), node(to)?);
        let (mut at, mut moved) = (self.start, 0);
        while at < self.end && moved < bytes {
            let end = self.end.min(at + PAGES_AT_ONCE as u64 * PAGE);
            let all: Vec<u64> = (at..end).step_by(PAGE as usize).collect();
            let found = find_pages(pidfd.as_fd(), self.pid, &all).context("move_pages")?;
            let there: Vec<u64> =
                all.into_iter().zip(found).filter(|(_, at)| *at == from).map(|(page, _)| page).collect();
            if !there.is_empty() {
                move_pages(pidfd.as_fd(), self.pid, &there, to).context("move_pages")?;
                let now = find_pages(pidfd.as_fd(), self.pid, &there).context("move_pages")?;
                moved += now.into_iter().filter(|state| *state == PageState::On(to)).count() as u64 * PAGE;
            }
            at = end;
        }
        ensure!(moved >= bytes, "{moved} of {bytes} bytes could be displaced");
        Ok(moved)
    }
}

fn numa_maps(pid: i32) -> Result<String> {
    let path = format!("/proc/{pid}/numa_maps");
    fs::read_to_string(&path).context(path)
}

fn address(line: &str) -> Option<u64> {
    line.split(' ').next().and_then(|address| u64::from_str_radix(address, 16).ok())
}

/// Of a line of numa_maps, bytes by node: small pages, or huge ones that count as such.
fn places(line: &str) -> BTreeMap<u64, u64> {
    let place = |word: &str| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        Some((node.parse().ok()?, pages.parse::<u64>().ok()? * PAGE))
    };
    line.split_ascii_whitespace().filter_map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_says_what_is_where() {
        let line = "7f63afe00000 bind:0 anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4";
        assert_eq!(address(line), Some(0x7f63_afe0_0000));
        assert_eq!(places(line), BTreeMap::from([(0, 2 * PAGE), (1, PAGE)]));
        assert_eq!((address("x"), places("7f default")), (None, BTreeMap::new()));
    }
}
