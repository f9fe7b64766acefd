//! Where the pages of a VM are on the server, and taking them elsewhere: guest physical addresses to addresses of QEMU, and
//! `move_pages(2)`.

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::{cmp::Reverse, fs::File, io, ops::Range, os::unix::fs::FileExt};
use vnuma_scenario::{Monitor, Vm};

const PAGE: u64 = 4096;
/// Memory is placed in pieces of this size, which the server may have as huge pages.
const PIECE: u64 = 2 << 20;
const PAGES: usize = (PIECE / PAGE) as usize;
/// An address that is memory in every guest.
const SOME_ADDRESS: u64 = 1 << 20;
/// Pages of a call.
const BATCH: usize = 4096;
/// Times that pages are moved until enough are in their place.
const ATTEMPTS: usize = 8;
/// Share of a program's pages that has to be in its place.
const ENOUGH: f64 = 0.995;
const MOVE_ALL: libc::c_int = 4;

/// The memory of a VM.
pub struct GuestMemory {
    pid: i32,
    /// Where QEMU has the first byte of each guest node; a UMA VM has one.
    bases: Vec<u64>,
    /// Of each guest node.
    bytes: u64,
    process: File,
}

/// The node of each piece, and whether a program uses it.
pub type Pieces = Vec<(usize, bool)>;

impl GuestMemory {
    /// Of a VM with so many bytes, all below 2 GiB, so that they are in one range of the guest, an equal part for each node.
    pub fn of(vm: &Vm, bytes: u64, nodes: usize) -> Result<Self> {
        let bytes = bytes / nodes as u64;
        let mut monitor = Monitor::connect(&vm.monitor())?;
        let mut bases = Vec::new();
        for node in 0..nodes as u64 {
            let line = format!("gpa2hva {:#x}", node * bytes + SOME_ADDRESS);
            let command = json!({"execute": "human-monitor-command", "arguments": {"command-line": line}});
            let answer = monitor.execute(&command)?;
            let text = answer.as_str().unwrap_or_default();
            let address =
                text.trim().rsplit_once("is 0x").and_then(|(_, hex)| u64::from_str_radix(hex, 16).ok());
            bases.push(address.with_context(|| format!("QEMU answered {text:?} to {line}"))? - SOME_ADDRESS);
        }
        let path = format!("/proc/{}/mem", vm.pid);
        let process = File::open(&path).context(path)?;
        Ok(Self { pid: vm.pid, bases, bytes, process })
    }

    fn pieces_of_node(&self) -> usize {
        (self.bytes / PIECE) as usize
    }

    /// Guest physical memory of a guest node.
    pub fn of_node(&self, node: usize) -> Range<u64> {
        node as u64 * self.bytes..(node as u64 + 1) * self.bytes
    }

    /// The addresses of each guest node in QEMU.
    pub fn in_qemu(&self) -> Vec<Range<u64>> {
        self.bases.iter().map(|base| *base..base + self.bytes).collect()
    }

    /// Reads a word of the guest.
    pub fn word(&self, guest: u64) -> Result<u64> {
        let base = self.bases.get((guest / self.bytes) as usize);
        let base = base.with_context(|| format!("the guest has no memory at {guest:#x}"))?;
        let mut bytes = [0; 8];
        self.process
            .read_exact_at(&mut bytes, base + guest % self.bytes)
            .context("reading the guest's memory")?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Where every so manyth page of each guest node is; none for pages that the guest has never touched, or gave back.
    pub fn where_it_is(&self, every: usize) -> Result<Vec<Vec<Option<usize>>>> {
        let of = |base: &u64| self.nodes_at((*base..base + self.bytes).step_by(PAGE as usize * every));
        self.bases.iter().map(of).collect()
    }

    /// Where the pages of ranges of guest physical memory are.
    pub fn where_are(&self, ranges: &[(u64, u64)]) -> Result<Vec<Option<usize>>> {
        let pages = ranges.iter().flat_map(|(start, length)| (*start..start + length).step_by(PAGE as usize));
        let address = |guest: u64| {
            let base = self.bases.get((guest / self.bytes) as usize);
            Ok(base.with_context(|| format!("the guest has no memory at {guest:#x}"))? + guest % self.bytes)
        };
        self.nodes_at(pages.map(address).collect::<Result<Vec<_>>>()?.into_iter())
    }

    fn nodes_at(&self, addresses: impl Iterator<Item = u64>) -> Result<Vec<Option<usize>>> {
        let addresses: Vec<u64> = addresses.collect();
        let mut nodes = Vec::with_capacity(addresses.len());
        for batch in addresses.chunks(BATCH) {
            // Below 0: no page is there.
            nodes.extend(self.call(batch, None)?.into_iter().map(|status| usize::try_from(status).ok()));
        }
        Ok(nodes)
    }

    /// The node of each piece, when each guest node is on the server's node of the same number.
    pub fn at_home(&self) -> Pieces {
        (0..self.bases.len()).flat_map(|node| vec![(node, true); self.pieces_of_node()]).collect()
    }

    /// The node of each piece, when the memory of each program (ranges of guest physical memory) belongs on one of these nodes, by
    /// position. The rest lies on all of them in turn.
    pub fn pieces(&self, programs: &[(&[(u64, u64)], usize)], nodes: &[usize]) -> Pieces {
        let mut used = vec![vec![0_u64; nodes.len()]; self.bases.len() * self.pieces_of_node()];
        for (ranges, node) in programs {
            for page in
                ranges.iter().flat_map(|(start, length)| (*start..start + length).step_by(PAGE as usize))
            {
                if let Some(piece) = used.get_mut((page / PIECE) as usize) {
                    piece[*node] += 1;
                }
            }
        }
        let node = |(at, used): (usize, &Vec<u64>)| {
            // Of nodes with as many pages, the first.
            let most = used.iter().enumerate().max_by_key(|(position, pages)| (**pages, Reverse(*position)));
            match most {
                Some((position, &pages)) if pages > 0 => (nodes[position], true),
                _ => (nodes[at % nodes.len()], false),
            }
        };
        used.iter().enumerate().map(node).collect()
    }

    /// Takes all pages to their nodes. Pages that the guest has never touched are nowhere.
    pub fn place(&self, pieces: &Pieces) -> Result<()> {
        let mut share = 0.0;
        for attempt in 0..ATTEMPTS {
            if attempt == 0 {
                // A huge page goes as one, by its first address.
                let heads: Vec<(u64, usize)> =
                    self.addresses(pieces).step_by(PAGES).map(|(at, node, _)| (at, node)).collect();
                self.move_to(&heads)?;
            }
            let (wrong, found) = self.wrong(pieces)?;
            share = found;
            if share >= ENOUGH && attempt > 0 || wrong.is_empty() {
                return Ok(());
            }
            self.move_to(&wrong)?;
        }
        bail!("only {:.2} % of the programs' pages could be moved to their nodes", share * 100.0)
    }

    fn addresses<'a>(&'a self, pieces: &'a Pieces) -> impl Iterator<Item = (u64, usize, bool)> + 'a {
        let all = pieces.iter().enumerate().flat_map(|(piece, &(node, used))| {
            let (node_of, at) = (piece / self.pieces_of_node(), piece % self.pieces_of_node());
            let start = self.bases.get(node_of).copied().unwrap_or_default() + at as u64 * PIECE;
            (0..PAGES as u64).map(move |page| (start + page * PAGE, node, used))
        });
        all.into_iter()
    }

    /// Pages that are elsewhere, and the share of the programs' pages that are right.
    fn wrong(&self, pieces: &Pieces) -> Result<(Vec<(u64, usize)>, f64)> {
        let all: Vec<(u64, usize, bool)> = self.addresses(pieces).collect();
        let (mut wrong, mut right_used, mut used_pages) = (Vec::new(), 0_u64, 0_u64);
        for batch in all.chunks(BATCH) {
            let addresses: Vec<u64> = batch.iter().map(|(address, _, _)| *address).collect();
            let status = self.call(&addresses, None)?;
            for (&(address, node, used), status) in batch.iter().zip(status) {
                // Below 0: no page is there.
                let right = status < 0 || status as usize == node;
                used_pages += u64::from(used);
                right_used += u64::from(used && right);
                if !right {
                    wrong.push((address, node));
                }
            }
        }
        Ok((wrong, right_used as f64 / used_pages.max(1) as f64))
    }

    fn move_to(&self, pages: &[(u64, usize)]) -> Result<()> {
        for batch in pages.chunks(BATCH) {
            let addresses: Vec<u64> = batch.iter().map(|(address, _)| *address).collect();
            let nodes: Vec<libc::c_int> = batch.iter().map(|(_, node)| *node as libc::c_int).collect();
            self.call(&addresses, Some(&nodes))?;
        }
        Ok(())
    }

    /// `move_pages(2)`. Without nodes it tells where each page is.
    fn call(&self, addresses: &[u64], nodes: Option<&[libc::c_int]>) -> Result<Vec<libc::c_int>> {
        ensure!(nodes.is_none_or(|nodes| nodes.len() == addresses.len()), "as many nodes as addresses");
        let mut status: Vec<libc::c_int> = vec![-1; addresses.len()];
        let nodes = nodes.map_or(std::ptr::null(), <[libc::c_int]>::as_ptr);
        // SAFETY: three arrays of this length that live through the call, the second one possibly none; addresses are of the
        // other process and only looked up there.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                self.pid,
                addresses.len(),
                addresses.as_ptr(),
                nodes,
                status.as_mut_ptr(),
                MOVE_ALL,
            )
        };
        // A positive number is how many pages were not moved.
        if result < 0 {
            return Err(io::Error::last_os_error())
                .with_context(|| format!("move_pages of process {}", self.pid));
        }
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(nodes: usize) -> GuestMemory {
        let process = File::open("/proc/self/mem").expect("own memory");
        GuestMemory {
            pid: 0,
            bases: vec![0x1000_0000, 0x4000_0000][..nodes].into(),
            bytes: 4 * PIECE,
            process,
        }
    }

    #[test]
    fn a_piece_is_on_the_node_that_most_of_its_used_pages_are_for() {
        let page = |number: u64, count: u64| (number * PAGE, count * PAGE);
        let [first, second] = [[page(0, 4), page(1024, 1)], [page(4, 3), page(1025, 1)]];
        let third = [page(1536, 512)];
        let programs: [(&[(u64, u64)], usize); 3] = [(&first, 0), (&second, 1), (&third, 3)];
        // The second piece is not used, and the third one by two as much.
        let expected = [(0, true), (1, false), (0, true), (5, true)];
        assert_eq!(memory(1).pieces(&programs, &[0, 1, 4, 5]), expected);
    }

    #[test]
    fn addresses_of_each_guest_node_are_where_qemu_has_it() {
        let memory = memory(2);
        let pieces = memory.at_home();
        assert_eq!(pieces.iter().map(|(node, _)| *node).collect::<Vec<_>>(), [0, 0, 0, 0, 1, 1, 1, 1]);
        let first: Vec<(u64, usize)> =
            memory.addresses(&pieces).step_by(PAGES).map(|(at, node, _)| (at, node)).collect();
        assert_eq!((first[0], first[3]), ((0x1000_0000, 0), (0x1000_0000 + 3 * PIECE, 0)));
        assert_eq!((first[4], first[7]), ((0x4000_0000, 1), (0x4000_0000 + 3 * PIECE, 1)));
        assert_eq!((memory.of_node(0), memory.of_node(1)), (0..4 * PIECE, 4 * PIECE..8 * PIECE));
        assert!(memory.word(8 * PIECE).is_err(), "the guest ends before that");
    }
}
