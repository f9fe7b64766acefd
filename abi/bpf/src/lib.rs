//! Rust mirrors of what BPF programs and user space share: `include/vnuma/vcpu_event.h`, the record that the monitor's
//! program puts into its ring buffer, and `include/vnuma/page_moves.h`; in [`sched`], `include/vnuma/sched.h`; in [`tasks`],
//! `include/vnuma/tasks.h`.

#![forbid(unsafe_code)]
#![no_std]

pub mod sched;
pub mod tasks;

/// [`VcpuEvent::kind`]: the thread is put on another CPU.
pub const MIGRATED: u32 = 1;
/// [`VcpuEvent::kind`]: its allowed CPUs changed.
pub const AFFINITY: u32 = 2;
/// [`VcpuEvent::kind`]: it has ended and is not watched any more.
pub const EXITED: u32 = 3;

/// Thread ids are below this (`PID_MAX_LIMIT` of 64-bit kernels).
pub const PIDS: u32 = 1 << 22;
/// Bits of each of them in the 64-bit words of the map `watched`.
pub const WATCHED_BITS: u32 = 2;
/// Value in the map `watched`: a move to another node wakes who takes records.
pub const WAKES: u8 = 1;
/// Value in the map `watched`: the record of such a move waits until something else does.
pub const WAITS: u8 = 2;
/// Value in the map `watched`: nothing but the thread's end makes a record.
pub const PASSED: u8 = 3;

/// Entries of the map `masks`, each for the threads whose ids have this remainder: the allowed CPUs of the last record, or 0.
pub const MASKS: u32 = 1 << 16;

/// Index in the map `counts`: records put into the ring buffer.
pub const COUNT_REPORTED: u32 = 0;
/// Index in the map `counts`: records that found the ring buffer full.
pub const COUNT_DROPPED: u32 = 1;

/// Index in the map `moves`: the thread whose moves of pages count, in the initial PID namespace.
pub const PAGE_MOVES_THREAD: u32 = 0;
/// Index in the map `moves`: nanoseconds of the longest one since user space set it to 0.
pub const PAGE_MOVES_LONGEST_NS: u32 = 1;

/// `struct vnuma_vcpu_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuEvent {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// Thread id in the initial PID namespace.
    pub tid: u32,
    /// [`MIGRATED`], [`AFFINITY`] or [`EXITED`].
    pub kind: u32,
    /// CPU that it goes to, or is on.
    pub cpu: u32,
    /// 0.
    pub reserved: u32,
}
