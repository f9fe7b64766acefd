//! Loads whose counts are known beforehand: loops in assembly, so that neither compiler nor build profile
//! changes them.

use std::arch::asm;
use std::{io, ptr};

const LINE: usize = 64;
const PAGE: usize = 4096;
const MPOL_DEFAULT: libc::c_long = 0;
const MPOL_BIND: libc::c_long = 2;
const MPOL_MF_MOVE: libc::c_long = 2;
/// A block of a matrix, and so the length of its vector in bytes.
const BLOCK: usize = 64 << 10;

/// Memory on one node.
#[derive(Debug)]
pub struct Memory {
    address: *mut u8,
    bytes: usize,
}

impl Memory {
    /// Maps memory, bound to a node if one is given, in huge pages if asked for. It is not touched yet.
    pub fn map(bytes: usize, node: Option<usize>, huge: bool) -> io::Result<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = Self { address: address.cast(), bytes };
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the whole mapping made above; the advice changes no content.
        if unsafe { libc::madvise(address, bytes, advice) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if let Some(node) = node {
            let mask: u64 = 1_u64.checked_shl(node as u32).unwrap_or_default();
            // SAFETY: the whole mapping made above, and a mask of 64 bits that lives through the call.
            let result =
                unsafe { libc::syscall(libc::SYS_mbind, address, bytes, MPOL_BIND, &mask, 64_usize, 0) };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        if huge {
            memory.collapse()?;
        }
        Ok(memory)
    }

    /// Makes it of huge pages now. A fault alone falls back to small ones when no huge one is at hand, and where a load's lines lie
    /// in the caches would then differ from run to run.
    fn collapse(&self) -> io::Result<()> {
        for advice in [libc::MADV_POPULATE_WRITE, libc::MADV_COLLAPSE] {
            // SAFETY: the whole mapping, which is this value's own; neither advice changes its content.
            if unsafe { libc::madvise(self.address.cast(), self.bytes, advice) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it begins.
    pub fn address(&self) -> usize {
        self.address as usize
    }

    /// Its content.
    pub fn words(&mut self) -> &mut [usize] {
        // SAFETY: the mapping belongs to this value, is aligned to a page, and zero-filled.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.bytes / size_of::<usize>()) }
    }
}

/// Takes memory of this process to a node of its kernel, from where the kernel's balancing may take it elsewhere later.
pub fn bring_home(address: usize, bytes: usize, node: usize) -> io::Result<()> {
    let mask: u64 = 1_u64.checked_shl(node as u32).unwrap_or_default();
    let anywhere: *const u64 = ptr::null();
    for (policy, nodes, bits, flags) in
        [(MPOL_BIND, &raw const mask, 64_usize, MPOL_MF_MOVE), (MPOL_DEFAULT, anywhere, 0, 0)]
    {
        // SAFETY: neither policy nor place of pages changes their content; the kernel refuses what is no mapping. The mask of
        // 64 bits lives through the call.
        if unsafe { libc::syscall(libc::SYS_mbind, address, bytes, policy, nodes, bits, flags) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, which goes.
        unsafe { libc::munmap(self.address.cast(), self.bytes) };
    }
}

/// Places in memory that each hold the address of the next, in a circle.
#[derive(Debug)]
pub struct Chain {
    memory: Memory,
    next: usize,
    places: usize,
}

/// All numbers below `count` in random order, the same for a seed on every run (xorshift64).
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut random = seed | 1;
    for last in (1..count).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(last, (random % (last + 1) as u64) as usize);
    }
    order
}

impl Chain {
    /// Every line of the memory once, in random order.
    pub fn random(memory: Memory, seed: u64) -> Self {
        let places = memory.bytes / LINE;
        Self::through(memory, shuffled(places, seed).into_iter().map(|line| line * LINE))
    }

    /// One line of every page, in order.
    pub fn by_page(memory: Memory) -> Self {
        let places = memory.bytes / PAGE;
        Self::through(memory, (0..places).map(|page| page * PAGE))
    }

    fn through(mut memory: Memory, order: impl Iterator<Item = usize>) -> Self {
        let base = memory.address as usize;
        let (mut first, mut previous, mut places) = (None, None, 0);
        for offset in order {
            if let Some(previous) = previous {
                memory.words()[previous / size_of::<usize>()] = base + offset;
            }
            first.get_or_insert(offset);
            previous = Some(offset);
            places += 1;
        }
        let first = first.unwrap_or_default();
        if let Some(previous) = previous {
            memory.words()[previous / size_of::<usize>()] = base + first;
        }
        Self { next: base + first, memory, places }
    }

    /// The memory that it goes through.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// How many places it has.
    pub fn places(&self) -> usize {
        self.places
    }

    /// Follows the chain so many times, from where the last call ended: one load and three instructions each.
    pub fn follow(&mut self, accesses: u64) {
        debug_assert!(self.memory.bytes > 0 && self.places > 0);
        if accesses == 0 {
            return;
        }
        // SAFETY: every place of the chain holds the address of another one in the mapping, which outlives the
        // loop; nothing is written.
        unsafe {
            asm!(
                "2:",
                "mov {at}, [{at}]",
                "dec {left}",
                "jnz 2b",
                at = inout(reg) self.next,
                left = inout(reg) accesses => _,
                options(nostack, readonly)
            );
        }
    }
}

/// Reads all of the memory in order, word by word: one load and three instructions per 8 bytes.
pub fn stream(memory: &mut Memory) {
    read(memory.words());
}

/// Reads a part of memory in order, as [`stream`] does.
pub fn read(words: &[usize]) {
    let (at, end) = (words.as_ptr(), words.as_ptr_range().end);
    if words.is_empty() {
        return;
    }
    // SAFETY: reads the words of the slice only.
    unsafe {
        asm!(
            "2:",
            "mov {word}, [{at}]",
            "add {at}, 8",
            "cmp {at}, {end}",
            "jb 2b",
            at = inout(reg) at => _,
            end = in(reg) end,
            word = out(reg) _,
            options(nostack, readonly)
        );
    }
}

/// A matrix in blocks of as many words as the vector has.
#[derive(Debug)]
pub struct Matrix {
    memory: Memory,
    vector: Vec<usize>,
    order: Vec<usize>,
    next: usize,
}

impl Matrix {
    /// Of this memory, whose blocks are visited in random order.
    pub fn new(memory: Memory, seed: u64) -> Self {
        let blocks = memory.bytes() / BLOCK;
        let order = shuffled(blocks, seed);
        Self { memory, vector: vec![1; BLOCK / size_of::<usize>()], order, next: 0 }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        BLOCK
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> usize {
        self.order.len()
    }

    /// The next block by the vector: seven instructions and two loads per 8 bytes.
    pub fn multiply(&mut self) {
        let words = BLOCK / size_of::<usize>();
        let from = self.order[self.next] * words;
        self.next = (self.next + 1) % self.order.len();
        std::hint::black_box(dot(&self.memory.words()[from..from + words], &self.vector));
    }
}

/// Sum of products, in assembly so that no compiler changes its instructions: seven for each eight bytes.
fn dot(row: &[usize], vector: &[usize]) -> usize {
    let (at, with, end) = (row.as_ptr(), vector.as_ptr(), row.as_ptr_range().end);
    let mut sum = 0_usize;
    assert!(row.len() == vector.len() && !row.is_empty(), "a row is as long as the vector");
    // SAFETY: reads the words of two slices of one length, which is not 0.
    unsafe {
        asm!(
            "2:",
            "mov {word}, [{at}]",
            "imul {word}, [{with}]",
            "add {sum}, {word}",
            "add {at}, 8",
            "add {with}, 8",
            "cmp {at}, {end}",
            "jb 2b",
            at = inout(reg) at => _,
            with = inout(reg) with => _,
            end = in(reg) end,
            sum = inout(reg) sum,
            word = out(reg) _,
            options(nostack, readonly)
        );
    }
    sum
}

/// Writes every line of the memory, so that it is there.
pub fn touch(memory: &mut Memory) {
    let words = memory.words();
    for line in words.chunks_mut(LINE / size_of::<usize>()) {
        line[0] = 1;
    }
}

/// What is done with a device's register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The first one is read.
    Read,
    /// 0 is written to the one at this offset, a multiple of 4 in the first page.
    Write(usize),
}

/// Accesses a register in a device's memory BAR, `resource0` and the like in sysfs: one access to the device each time.
pub fn access_device(path: &std::path::Path, access: Access, times: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let offset = match access {
        Access::Read => 0,
        Access::Write(offset) => offset,
    };
    if offset >= PAGE || !offset.is_multiple_of(size_of::<u32>()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("no register at offset {offset:#x}"),
        ));
    }
    let file = std::fs::File::options().read(true).write(access != Access::Read).open(path)?;
    let protection =
        if access == Access::Read { libc::PROT_READ } else { libc::PROT_READ | libc::PROT_WRITE };
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let map = unsafe { libc::mmap(ptr::null_mut(), PAGE, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let register = map.cast::<u32>().wrapping_add(offset / size_of::<u32>());
    for _ in 0..times {
        match access {
            // SAFETY: a word of the mapping, as was checked; volatile, as a device answers.
            Access::Read => drop(unsafe { register.read_volatile() }),
            // SAFETY: the same, and the mapping can be written.
            Access::Write(_) => unsafe { register.write_volatile(0) },
        }
    }
    // SAFETY: the mapping was made above and is not used any more.
    unsafe { libc::munmap(map, PAGE) };
    Ok(())
}

/// Counts down: two instructions per round and no access.
pub fn compute(rounds: u64) {
    if rounds == 0 {
        return;
    }
    // SAFETY: registers only.
    unsafe {
        asm!("2:", "dec {left}", "jnz 2b", left = inout(reg) rounds => _, options(nomem, nostack));
    }
}

/// Fills the memory by one string instruction, `rep stosb`.
pub fn fill(memory: &mut Memory) {
    // SAFETY: writes the bytes of the mapping only.
    unsafe {
        asm!(
            "rep stosb",
            inout("rcx") memory.bytes => _,
            inout("rdi") memory.address => _,
            in("al") 0_u8,
            options(nostack)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visited(mut chain: Chain) -> Vec<usize> {
        let base = chain.memory.address as usize;
        let mut visited = Vec::new();
        for _ in 0..chain.places() {
            visited.push(chain.next - base);
            chain.follow(1);
        }
        assert_eq!(chain.next - base, visited[0], "the chain is a circle");
        visited
    }

    #[test]
    fn a_random_chain_visits_every_line_once() {
        let memory = Memory::map(64 * PAGE, None, false).unwrap();
        let mut visited = visited(Chain::random(memory, 7));
        let in_order = (0..64 * PAGE / LINE).map(|line| line * LINE).collect::<Vec<_>>();
        assert_ne!(visited, in_order);
        visited.sort_unstable();
        assert_eq!(visited, in_order);
    }

    #[test]
    fn a_chain_by_page_visits_every_page_in_order() {
        let memory = Memory::map(16 * PAGE, None, false).unwrap();
        assert_eq!(visited(Chain::by_page(memory)), (0..16).map(|page| page * PAGE).collect::<Vec<_>>());
    }

    #[test]
    fn filling_fills() {
        let mut memory = Memory::map(2 * PAGE, None, false).unwrap();
        touch(&mut memory);
        assert_eq!(memory.words()[8], 1);
        fill(&mut memory);
        assert!(memory.words().iter().all(|&word| word == 0));
        stream(&mut memory);
        compute(10);
    }

    #[test]
    fn products_are_summed() {
        assert_eq!(dot(&[1, 2, 3], &[4, 5, 6]), 32);
    }

    #[test]
    fn a_matrix_is_multiplied_block_by_block() {
        let mut memory = Memory::map(4 * BLOCK, None, false).expect("memory");
        touch(&mut memory);
        let mut matrix = Matrix::new(memory, 3);
        let mut seen: Vec<usize> = (0..4).map(|_| (matrix.order[matrix.next], matrix.multiply()).0).collect();
        seen.sort_unstable();
        assert_eq!((seen, matrix.next), (vec![0, 1, 2, 3], 0));
    }
}
