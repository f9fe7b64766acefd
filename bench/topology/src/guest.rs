//! What a program of the guest sees: `/dev/vnuma`.

use crate::clock::{Moment, monotonic_ns};
use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use vnuma_abi_guest_device::{MAGIC, Page, SIZE};

const DEVICE: &str = "/dev/vnuma";

/// One generation, in the guest's own `CLOCK_MONOTONIC`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Sighting {
    /// Sixteen hex digits.
    pub generation: String,
    /// The interrupt of the channel came.
    pub interrupt_ns: u64,
    /// The kernel's maps agreed.
    pub applied_ns: u64,
    /// A program woke up from `poll()` and read the generation.
    pub seen_ns: u64,
    /// The clocks afterwards.
    pub moment: Moment,
}

/// The driver's page, mapped.
pub struct Device {
    file: File,
    page: NonNull<Page>,
}

impl Device {
    /// Opens and maps it.
    pub fn open() -> Result<Self> {
        let file = File::open(DEVICE).context(DEVICE)?;
        let length = SIZE.try_into()?;
        // SAFETY: a new mapping at an address that the kernel chooses; it lives as long as the process.
        let page = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0) };
        let device = Self { file, page: page.context("mmap of /dev/vnuma")?.cast() };
        // SAFETY: the mapping is SIZE bytes, more than a page, and readable.
        let magic = unsafe { (&raw const (*device.page.as_ptr()).magic).read_volatile() };
        ensure!(magic == MAGIC, "{DEVICE}: magic {magic:#x}, expected {MAGIC:#x}");
        Ok(device)
    }

    /// The generation alone, as a runtime would look at it on every allocation.
    pub fn generation(&self) -> u64 {
        // SAFETY: the field is aligned within a page-aligned mapping that lives as long as the process; the kernel
        // writes it with one store.
        let generation = unsafe { AtomicU64::from_ptr(&raw mut (*self.page.as_ptr()).generation) };
        generation.load(Ordering::Relaxed)
    }

    /// (generation, interrupt, applied) that belong together.
    fn state(&self) -> (u64, u64, u64) {
        let page = self.page.as_ptr();
        // SAFETY: as in `generation`.
        let sequence = unsafe { AtomicU32::from_ptr(&raw mut (*page).sequence) };
        loop {
            let before = sequence.load(Ordering::Acquire);
            // SAFETY: the fields lie in the mapping; whatever is torn is thrown away below.
            let state = unsafe {
                (
                    (&raw const (*page).generation).read_volatile(),
                    (&raw const (*page).interrupt_ns).read_volatile(),
                    (&raw const (*page).applied_ns).read_volatile(),
                )
            };
            fence(Ordering::Acquire);
            if before % 2 == 0 && sequence.load(Ordering::Relaxed) == before {
                return state;
            }
        }
    }
}

/// Prints a line for each generation, as a [`Sighting`], until its reader is gone; the first line is a [`Moment`].
pub fn follow() -> Result<()> {
    let mut device = Device::open()?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{}", serde_json::to_string(&Moment::now()?)?)?;
    stdout.flush()?;
    let mut buffer = [0; 8];
    device.file.read_exact(&mut buffer).context("read of /dev/vnuma")?;
    loop {
        let mut waiting = [PollFd::new(device.file.as_fd(), PollFlags::POLLPRI)];
        poll(&mut waiting, PollTimeout::NONE).context("poll of /dev/vnuma")?;
        let (generation, interrupt_ns, applied_ns) = device.state();
        let seen_ns = monotonic_ns()?;
        device.file.read_exact(&mut buffer).context("read of /dev/vnuma")?;
        let generation = format!("{generation:016x}");
        let sighting = Sighting { generation, interrupt_ns, applied_ns, seen_ns, moment: Moment::now()? };
        writeln!(stdout, "{}", serde_json::to_string(&sighting)?)?;
        stdout.flush()?;
    }
}
