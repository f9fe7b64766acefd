//! The program in the guest. One process per CPU, bound to it, allocates evenly over
//! time: it gives a batch of pages back to the kernel, touches them again, so that the kernel
//! allocates each on the node that it calls local, and reports where they came to
//! lie in guest physical memory. A batch is kept until the host has looked it up.
//!
//! Each process also keeps pages that it allocated at the start and goes on writing;
//! they show what the guest's AutoNUMA makes of the change.
//!
//! Processes and not threads: giving pages back in a shared address space
//! interrupts every CPU that uses it, which is what a VM does worst.

use crate::record::{Kind, MAX_PAGES, NOT_PRESENT, Page, Record};
use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use std::arch::x86_64::{__cpuid_count, _rdtsc};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

const PAGE_SIZE: usize = 4096;
const BATCH_PAGES: usize = 32;
/// Time between two batches. Without a pause an emulated server would be short of CPUs, and a guest that has to wait for
/// one learns late where it runs: what is to be shown would be the emulation.
const BATCH_PERIOD: Duration = Duration::from_millis(40);
/// Batches that a process may have waiting for the host's answer.
const BATCHES: usize = 16;
const RESIDENT_PAGES: usize = 256;
const RESIDENT_PERIOD: Duration = Duration::from_secs(1);
/// The host answers within milliseconds; this only ends a process whose host is gone.
const ANSWER_LIMIT_MS: u16 = 60_000;
/// Not an answer: the host has seen enough.
pub const STOP: u32 = u32::MAX;
const PAGEMAP_PRESENT: u64 = 1 << 63;
const PAGEMAP_FRAME: u64 = (1 << 55) - 1;

#[derive(clap::Args)]
pub struct Arguments {
    /// Stop after this many seconds
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Be the process of this CPU; without it: start one for every online CPU
    #[arg(long)]
    cpu: Option<usize>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    match arguments.cpu {
        Some(cpu) => allocate(cpu, Instant::now() + Duration::from_secs(arguments.seconds)),
        None => run_all(arguments.seconds),
    }
}

fn run_all(seconds: u64) -> Result<()> {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").context("online CPUs")?;
    let cpus: vnuma_model::CpuSet = online.parse().context("/sys/devices/system/cpu/online")?;
    let mut children: Vec<Child> = Vec::new();
    let mut inputs = HashMap::new();
    for cpu in cpus.iter() {
        let apic_id = bind(cpu as usize)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["touch", "--cpu", &cpu.to_string(), "--seconds", &seconds.to_string()])
            .stdin(Stdio::piped())
            .spawn()
            .with_context(|| format!("the process of CPU {cpu}"))?;
        inputs.insert(apic_id, child.stdin.take().context("no standard input")?);
        children.push(child);
    }
    // Standard input stays open at the other end; leaving main ends its reader.
    std::thread::spawn(move || forward_answers(inputs));
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "a process failed: {status}");
    }
    Ok(())
}

/// The host answers each fresh record with the APIC id of its vCPU. At its [`STOP`] the processes lose their input, and end.
fn forward_answers(mut inputs: HashMap<u32, ChildStdin>) {
    let mut bytes = [0u8; 4];
    while stdin().read_exact(&mut bytes).is_ok() {
        let answer = u32::from_le_bytes(bytes);
        if answer == STOP {
            break;
        }
        if let Some(input) = inputs.get_mut(&answer) {
            // A process that has ended needs no answer.
            let _ = input.write_all(&[1]);
        }
    }
}

/// Binds the caller to a CPU and returns its x2APIC id (CPUID leaf 0xb, EDX).
pub fn bind(cpu: usize) -> Result<u32> {
    let mut only = CpuSet::new();
    only.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &only).with_context(|| format!("binding to CPU {cpu}"))?;
    Ok(__cpuid_count(0xb, 0).edx)
}

/// Answers that have come; waits for one when `wait` says so. `None`: there will be none any more.
fn answers(wait: bool) -> Result<Option<usize>> {
    let input = stdin();
    let mut polled = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    let limit = if wait { PollTimeout::from(ANSWER_LIMIT_MS) } else { PollTimeout::ZERO };
    if poll(&mut polled, limit)? == 0 {
        ensure!(!wait, "the host has not answered for {ANSWER_LIMIT_MS} ms");
        return Ok(Some(0));
    }
    let mut bytes = [0u8; BATCHES];
    let count = nix::unistd::read(input.as_fd(), &mut bytes)?;
    Ok((count > 0).then_some(count))
}

fn allocate(cpu: usize, deadline: Instant) -> Result<()> {
    let apic_id = bind(cpu)?;
    let pagemap = File::open("/proc/self/pagemap").context("/proc/self/pagemap")?;
    let mut resident = Arena::new(RESIDENT_PAGES)?;
    let mut fresh = Arena::new(BATCHES * BATCH_PAGES)?;
    resident.touch(0, RESIDENT_PAGES);
    let (mut next_resident, mut next) = (Instant::now(), Instant::now());
    let mut waiting = 0;
    for batch in (0..BATCHES).cycle() {
        // One that is late does not catch up: pages are samples, evenly over time.
        next = (next + BATCH_PERIOD).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        if Instant::now() >= deadline {
            return Ok(());
        }
        let Some(answers) = answers(waiting == BATCHES)? else { return Ok(()) };
        waiting -= answers;
        let first = batch * BATCH_PAGES;
        fresh.discard(first, BATCH_PAGES)?;
        let times = fresh.touch(first, BATCH_PAGES);
        send(Kind::Fresh, apic_id, fresh.locate(&pagemap, first, &times)?)?;
        waiting += 1;
        resident.touch(batch * RESIDENT_PAGES / BATCHES, RESIDENT_PAGES / BATCHES);
        if Instant::now() >= next_resident {
            let times = resident.touch(0, RESIDENT_PAGES);
            for pages in resident.locate(&pagemap, 0, &times)?.chunks(MAX_PAGES) {
                send(Kind::Resident, apic_id, pages.to_vec())?;
            }
            next_resident = Instant::now() + RESIDENT_PERIOD;
        }
    }
    unreachable!("the batches go round for ever")
}

fn send(kind: Kind, apic_id: u32, pages: Vec<Page>) -> Result<()> {
    let mut bytes = Vec::new();
    Record { kind, apic_id, pages }.write(&mut bytes)?;
    // One write of at most PIPE_BUF bytes: the processes share the pipe, and such writes stay whole (pipe(7)).
    let written = nix::unistd::write(stdout(), &bytes)?;
    ensure!(written == bytes.len(), "wrote {written} of {} bytes", bytes.len());
    Ok(())
}

/// Anonymous memory in 4 KiB pages, never merged into huge ones.
pub struct Arena {
    start: *mut u8,
    pages: usize,
}

impl Arena {
    pub fn new(pages: usize) -> Result<Self> {
        let bytes = pages * PAGE_SIZE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("mmap");
        }
        // SAFETY: the range is the mapping made above.
        if unsafe { libc::madvise(start, bytes, libc::MADV_NOHUGEPAGE) } != 0 {
            return Err(std::io::Error::last_os_error()).context("madvise(MADV_NOHUGEPAGE)");
        }
        Ok(Self { start: start.cast(), pages })
    }

    fn address(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages);
        // SAFETY: the page lies inside the mapping, which lives as long as `self`.
        unsafe { self.start.add(page * PAGE_SIZE) }
    }

    /// Gives pages back to the kernel; the next touch allocates anew.
    fn discard(&mut self, first: usize, count: usize) -> Result<()> {
        assert!(first + count <= self.pages);
        // SAFETY: the range lies inside the mapping, and no reference into it exists.
        let result =
            unsafe { libc::madvise(self.address(first).cast(), count * PAGE_SIZE, libc::MADV_DONTNEED) };
        if result != 0 {
            return Err(std::io::Error::last_os_error()).context("madvise(MADV_DONTNEED)");
        }
        Ok(())
    }

    /// Writes one byte of each page; the time stamp counter before and after each.
    pub fn touch(&mut self, first: usize, count: usize) -> Vec<(u64, u64)> {
        (first..first + count)
            .map(|page| {
                let address = self.address(page);
                // SAFETY: RDTSC has no effect on memory.
                let before = unsafe { _rdtsc() };
                // SAFETY: the address lies inside the mapping, which is writable and not shared.
                unsafe { address.write_volatile(address.read_volatile().wrapping_add(1)) };
                // SAFETY: as above.
                (before, unsafe { _rdtsc() })
            })
            .collect()
    }

    /// Where the touched pages lie in guest physical memory.
    pub fn locate(&self, pagemap: &File, first: usize, times: &[(u64, u64)]) -> Result<Vec<Page>> {
        let mut entries = vec![0u8; times.len() * 8];
        let offset = self.address(first) as usize / PAGE_SIZE * 8;
        pagemap.read_exact_at(&mut entries, offset as u64).context("/proc/self/pagemap")?;
        let mut pages = Vec::with_capacity(times.len());
        for (entry, &(before_tsc, after_tsc)) in entries.chunks_exact(8).zip(times) {
            let entry = u64::from_ne_bytes(entry.try_into().expect("eight bytes"));
            let frame = entry & PAGEMAP_FRAME;
            // A page that AutoNUMA is migrating at this very moment is not present; no page of ours lies at 0.
            let present = entry & PAGEMAP_PRESENT != 0;
            ensure!(!present || frame != 0, "/proc/self/pagemap hides page frames: run as root");
            let gpa = if present { frame * PAGE_SIZE as u64 } else { NOT_PRESENT };
            pages.push(Page { before_tsc, after_tsc, gpa });
        }
        Ok(pages)
    }
}
