//! A driver for NVMe disks in user space: reads blocks at random, one at a time, in the way of SPDK, which Debian does not package.
//! A command is two writes to registers: the doorbell of its submission queue and, when it has completed, that of the completion
//! queue (NVM Express Base Specification 1.4, 3 and 4).
//!
//! Between two looks at the completion queue it sleeps. How long the disk takes is the emulator's time, and spinning would count it.

use super::{Load, Place, pci, process};
use crate::committed::SEED;
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs::{self, File, OpenOptions},
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
    ptr,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{Ordering, fence},
    },
    thread,
    time::{Duration, Instant},
};

/// Registers of the controller, by offset.
const CAPABILITIES: usize = 0x00;
const CONFIGURATION: usize = 0x14;
const STATUS: usize = 0x1c;
const ADMIN_SIZES: usize = 0x24;
const ADMIN_SUBMISSION: usize = 0x28;
const ADMIN_COMPLETION: usize = 0x30;
const DOORBELLS: usize = 0x1000;
/// Bytes of the BAR that are used: a page of registers, one of doorbells.
const BAR: usize = 0x2000;
/// Entries of each queue.
const ENTRIES: usize = 32;
/// Within the huge page: queues and the buffer.
const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;
const BUFFER: usize = 16 * PAGE;
/// Blocks of 512 bytes in a read, and on the disk (lab/runner/src/qemu.rs: 64 MiB).
const BLOCKS: u64 = 8;
const DISK_BLOCKS: u64 = (64 << 20) / 512;
/// Opcodes.
const CREATE_SUBMISSION: u32 = 0x01;
const READ: u32 = 0x02;
const CREATE_COMPLETION: u32 = 0x05;
/// Of `/proc/self/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
/// Longer than a command takes as a rule, so that each has one look.
const PAUSE: Duration = Duration::from_micros(500);
const HANG: Duration = Duration::from_secs(60);

/// A mapping that is there as long as the process.
#[derive(Clone, Copy)]
struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, and one thread at a time uses it.
unsafe impl Send for Mapping {}

impl Mapping {
    fn at<T: Copy>(self, offset: usize) -> *mut T {
        assert!(
            offset + size_of::<T>() <= self.bytes && offset.is_multiple_of(align_of::<T>()),
            "{offset:#x}"
        );
        self.start.wrapping_add(offset).cast()
    }

    fn read<T: Copy>(self, offset: usize) -> T {
        // SAFETY: within the mapping, and aligned; the device may write at the same time, which a volatile load allows for.
        unsafe { self.at::<T>(offset).read_volatile() }
    }

    fn write<T: Copy>(self, offset: usize, value: T) {
        // SAFETY: within the mapping, and aligned.
        unsafe { self.at::<T>(offset).write_volatile(value) }
    }

    fn new(bytes: usize, flags: i32, file: Option<&File>) -> Result<Self> {
        let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, descriptor, 0) };
        ensure!(start != libc::MAP_FAILED, "mmap of {bytes} bytes: {}", std::io::Error::last_os_error());
        Ok(Self { start: start.cast(), bytes })
    }

    /// A huge page of a guest node, and its physical address, which is the device's, too.
    fn huge(place: Place) -> Result<(Self, u64)> {
        let path = format!("{}/node{}/hugepages/hugepages-2048kB/nr_hugepages", super::NODES, place.node);
        if fs::read_to_string(&path).with_context(|| path.clone())?.trim() == "0" {
            fs::write(&path, "1").with_context(|| path.clone())?;
        }
        // The thread is on its CPU, so that the page is of its node.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_POPULATE;
        let memory = Self::new(HUGE, flags, None)?;
        let mut entry = [0; 8];
        let index = memory.start as u64 / PAGE as u64;
        File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, index * 8)?;
        let entry = u64::from_le_bytes(entry);
        ensure!(entry & PRESENT != 0 && entry & FRAME != 0, "/proc/self/pagemap: {entry:#x} of a huge page");
        Ok((memory, (entry & FRAME) * PAGE as u64))
    }
}

/// A pair of queues.
struct Queues {
    /// Where they are in the huge page.
    submission: usize,
    completion: usize,
    number: usize,
    tail: usize,
    head: usize,
    phase: u32,
}

struct Disk {
    registers: Mapping,
    memory: Mapping,
    address: u64,
    /// Bytes between doorbells.
    stride: usize,
    random: u64,
    /// Says that the process drives the device, as with SPDK.
    _uio: File,
}

impl Disk {
    fn open(device: &Path, place: Place) -> Result<(Self, Queues)> {
        process::run("modprobe", &["uio_pci_generic"])?;
        pci::bind(device, Some("uio_pci_generic"))?;
        let uio = format!("/dev/{}", pci::only_name(&device.join("uio"))?);
        let uio = File::open(&uio).context(uio)?;
        pci::enable(device)?;
        let path = device.join("resource0");
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.with_context(|| path.display().to_string())?;
        let registers = Mapping::new(BAR, libc::MAP_SHARED, Some(&file))?;
        let (memory, address) = Mapping::huge(place)?;
        let stride = 4 << (registers.read::<u64>(CAPABILITIES) >> 32 & 0xf);
        let disk = Self { registers, memory, address, stride, random: SEED, _uio: uio };
        disk.reset()?;
        let mut admin = Queues::new(0, 0);
        let io = Queues::new(1, 2 * PAGE);
        let shape = (ENTRIES as u32 - 1) << 16 | 1;
        // Contiguous, and no interrupts.
        disk.command(&mut admin, [CREATE_COMPLETION, 0], io.completion, [shape, 1, 0])?;
        disk.command(&mut admin, [CREATE_SUBMISSION, 0], io.submission, [shape, 1 << 16 | 1, 0])?;
        Ok((disk, io))
    }

    /// Begins anew, with the admin queues at the beginning of the huge page.
    fn reset(&self) -> Result<()> {
        let ready = |wanted: u32| {
            let end = Instant::now() + HANG;
            while self.registers.read::<u32>(STATUS) & 1 != wanted {
                ensure!(Instant::now() < end, "the disk's CSTS is {:#x}", self.registers.read::<u32>(STATUS));
                thread::sleep(PAUSE);
            }
            Ok(())
        };
        self.registers.write(CONFIGURATION, 0_u32);
        ready(0)?;
        let last = ENTRIES as u32 - 1;
        self.registers.write(ADMIN_SIZES, last << 16 | last);
        self.registers.write(ADMIN_SUBMISSION, self.address);
        self.registers.write(ADMIN_COMPLETION, self.address + PAGE as u64);
        // Entries of 64 and of 16 bytes, and enabled.
        self.registers.write(CONFIGURATION, 4_u32 << 20 | 6 << 16 | 1);
        ready(1)
    }

    fn doorbell(&self, number: usize, value: usize) {
        // What the device reads is in memory before it is told.
        fence(Ordering::SeqCst);
        self.registers.write(DOORBELLS + number * self.stride, value as u32);
    }

    /// Submits a command and waits until it has completed.
    fn command(&self, queues: &mut Queues, head: [u32; 2], data: usize, words: [u32; 3]) -> Result<()> {
        let entry = queues.submission + queues.tail * 64;
        let [opcode, namespace] = head;
        for word in 0..16 {
            self.memory.write(entry + word * 4, 0_u32);
        }
        self.memory.write(entry, opcode | (queues.tail as u32) << 16);
        self.memory.write(entry + 4, namespace);
        self.memory.write(entry + 24, self.address + data as u64);
        for (word, value) in words.into_iter().enumerate() {
            self.memory.write(entry + 40 + word * 4, value);
        }
        queues.tail = (queues.tail + 1) % ENTRIES;
        self.doorbell(2 * queues.number, queues.tail);
        let status = self.wait(queues)?;
        queues.head = (queues.head + 1) % ENTRIES;
        if queues.head == 0 {
            queues.phase ^= 1;
        }
        self.doorbell(2 * queues.number + 1, queues.head);
        ensure!(status >> 1 == 0, "the disk refused the command {opcode:#x}: status {:#x}", status >> 1);
        Ok(())
    }

    /// The status of the next completion, with its phase in bit 0.
    fn wait(&self, queues: &Queues) -> Result<u32> {
        let mut sleeps = 0;
        loop {
            let status = self.memory.read::<u32>(queues.completion + queues.head * 16 + 12) >> 16;
            if status & 1 == queues.phase {
                return Ok(status);
            }
            sleeps += 1;
            if sleeps > HANG.as_micros() / PAUSE.as_micros() {
                bail!("the disk has not completed a command");
            }
            thread::sleep(PAUSE);
        }
    }

    /// Reads a block at random.
    fn read(&mut self, queues: &mut Queues) -> Result<()> {
        // Numerical Recipes' generator; its upper bits are used.
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let block = (self.random >> 16) % (DISK_BLOCKS / BLOCKS) * BLOCKS;
        self.command(queues, [READ, 1], BUFFER, [block as u32, 0, BLOCKS as u32 - 1])?;
        for line in 0..PAGE / 64 {
            self.memory.read::<u64>(BUFFER + line * 64);
        }
        Ok(())
    }
}

impl Queues {
    /// A submission queue, and a completion queue on the page behind it.
    fn new(number: usize, at: usize) -> Self {
        Self { submission: at, completion: at + PAGE, number, tail: 0, head: 0, phase: 1 }
    }
}

#[derive(Default)]
struct State {
    goes: bool,
    /// The thread is between two blocks, and waits.
    halted: bool,
    done: u64,
    failed: Option<String>,
}

/// A thread that reads.
pub struct Reader {
    state: Arc<(Mutex<State>, Condvar)>,
}

impl Reader {
    pub fn start(device: &Path, place: Place) -> Result<Self> {
        let state = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let (shared, device) = (state.clone(), device.to_owned());
        thread::spawn(move || {
            if let Err(error) = work(&device, place, &shared) {
                let mut state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
                (state.failed, state.halted) = (Some(format!("{error:#}")), true);
                shared.1.notify_all();
            }
        });
        let reader = Self { state };
        reader.halted()?;
        Ok(reader)
    }

    /// Waits until the thread does; what it has done since.
    fn halted(&self) -> Result<u64> {
        let mut state = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.halted {
            state = self.state.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = &state.failed {
            bail!("{error}");
        }
        Ok(std::mem::take(&mut state.done))
    }

    fn set(&self, goes: bool) {
        let mut state = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.goes = goes;
        if goes && state.failed.is_none() {
            state.halted = false;
        }
        self.state.1.notify_all();
    }
}

fn work(device: &Path, place: Place, shared: &(Mutex<State>, Condvar)) -> Result<()> {
    super::pin(&[place.cpu])?;
    let (mut disk, mut queues) = Disk::open(device, place)?;
    if place.by_agent {
        // Only its memory knows of NUMA.
        super::pin(&[place.cpu, place.other])?;
    }
    loop {
        let mut state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.goes {
            state.halted = true;
            shared.1.notify_all();
            state = shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        disk.read(&mut queues)?;
        shared.0.lock().unwrap_or_else(PoisonError::into_inner).done += 1;
    }
}

impl Load for Reader {
    fn go(&mut self) -> Result<()> {
        self.set(true);
        Ok(())
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        self.set(false);
        self.halted().map(Some)
    }

    fn process(&self) -> Option<u32> {
        Some(std::process::id())
    }
}
