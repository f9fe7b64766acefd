//! What the guests run: 32-bit code without paging, at [`CODE`]. Each vCPU has a line of memory with its counts, to which EBP points.
//!
//! The guests with locks wait as guests of Linux do that have paravirtual spinlocks: they spin for a while, ask for a yield to the holder
//! (`KVM_HC_SCHED_YIELD`), and halt until the one before them kicks them (`KVM_HC_KICK_CPU`, which asks for a yield, too).

use std::arch::global_asm;

/// Where the code is in the guest's memory.
pub const CODE: u64 = 0x1000;
/// Rounds of the critical section, rounds between two, and rounds of spinning before a vCPU sleeps: 32 bits each.
pub const ROUNDS: u64 = 0x8000;
/// Counts of each vCPU, a line each.
pub const COUNTS: u64 = 0x10000;
/// Bytes of a line.
pub const LINE: u64 = 64;
/// Operations, kicks, yields that were asked for, halts: 32 bits each, at the beginning of a line. The number of the vCPU is at its end.
pub const NUMBER: u64 = 56;
/// The port of guests that want to sleep.
pub const SLEEP_PORT: u16 = 0x10;
/// Of all guests.
pub const MEMORY: usize = 0x20000;

// 0x9000: the next ticket; 0x9040: the ticket that has the lock; 0x9080: the number of the vCPU that holds it, and 1;
// 0xa000: for each of 16 tickets a line with the number of the vCPU that sleeps until it has it, and 1.
global_asm!(
    ".pushsection .rodata.bench_scheduler_guests, \"a\"",
    ".global bench_scheduler_lock, bench_scheduler_loop, bench_scheduler_wake, bench_scheduler_end",
    ".code32",
    "bench_scheduler_lock:",
    "14: mov ecx, [0x8004]",
    "15: dec ecx",
    "jnz 15b",
    "mov eax, 1",
    "lock xadd [0x9000], eax",
    "mov esi, eax",
    "mov edi, eax",
    "and edi, 15",
    "shl edi, 6",
    // Spins.
    "20: mov ecx, [0x8008]",
    "21: cmp [0x9040], esi",
    "je 30f",
    "pause",
    "dec ecx",
    "jnz 21b",
    // Says that it sleeps, and looks again.
    "mov eax, [ebp + 56]",
    "inc eax",
    "xchg [edi + 0xa000], eax",
    "cmp [0x9040], esi",
    "je 30f",
    "mov ebx, [0x9080]",
    "dec ebx",
    "js 22f",
    "inc dword ptr [ebp + 8]",
    "mov eax, 11",
    ".byte 0x0f, 0x01, 0xd9",
    "cmp [0x9040], esi",
    "je 30f",
    "22: inc dword ptr [ebp + 12]",
    "hlt",
    "jmp 20b",
    // Has the lock.
    "30: mov dword ptr [edi + 0xa000], 0",
    "mov eax, [ebp + 56]",
    "inc eax",
    "mov [0x9080], eax",
    "mov ecx, [0x8000]",
    "31: dec ecx",
    "jnz 31b",
    "mov dword ptr [0x9080], 0",
    "lea eax, [esi + 1]",
    "mov [0x9040], eax",
    "and eax, 15",
    "shl eax, 6",
    "xor edx, edx",
    "xchg [eax + 0xa000], edx",
    "test edx, edx",
    "jz 32f",
    "lea ecx, [edx - 1]",
    "xor ebx, ebx",
    "inc dword ptr [ebp + 4]",
    "mov eax, 5",
    ".byte 0x0f, 0x01, 0xd9",
    "32: inc dword ptr [ebp]",
    "jmp 14b",
    "bench_scheduler_loop:",
    "40: mov ecx, [0x8004]",
    "41: dec ecx",
    "jnz 41b",
    "inc dword ptr [ebp]",
    "jmp 40b",
    "bench_scheduler_wake:",
    "50: mov ecx, [0x8004]",
    "51: dec ecx",
    "jnz 51b",
    "inc dword ptr [ebp]",
    "out 0x10, al",
    "jmp 50b",
    "bench_scheduler_end:",
    ".code64",
    ".popsection",
);

unsafe extern "C" {
    static bench_scheduler_lock: u8;
    static bench_scheduler_loop: u8;
    static bench_scheduler_wake: u8;
    static bench_scheduler_end: u8;
}

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Kind {
    /// Its vCPUs want one lock again and again
    Lock,
    /// They count without end
    Loop,
    /// They sleep most of the time
    Wake,
}

impl Kind {
    /// Where its code begins in what [`all`] returns.
    pub fn entry(self) -> u64 {
        let begin = match self {
            Self::Lock => &raw const bench_scheduler_lock,
            Self::Loop => &raw const bench_scheduler_loop,
            Self::Wake => &raw const bench_scheduler_wake,
        };
        (begin.addr() - (&raw const bench_scheduler_lock).addr()) as u64
    }
}

/// The code of all of them.
pub fn all() -> &'static [u8] {
    let (begin, end) = (&raw const bench_scheduler_lock, &raw const bench_scheduler_end);
    // SAFETY: both symbols are in one section of this program, the second after the first, and what is between them is never written.
    unsafe { std::slice::from_raw_parts(begin, end.addr() - begin.addr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_fits_and_has_what_guests_ask_for() {
        let code = all();
        assert!((100..(ROUNDS - CODE) as usize).contains(&code.len()), "{} bytes", code.len());
        let count = |bytes: &[u8]| code.windows(bytes.len()).filter(|found| *found == bytes).count();
        assert_eq!(count(&[0x0f, 0x01, 0xd9]), 2, "hypercalls");
        assert_eq!(count(&[0xe6, SLEEP_PORT as u8]), 1, "sleeps");
        let entries = [Kind::Lock, Kind::Loop, Kind::Wake].map(Kind::entry);
        assert!(entries[0] == 0 && entries.is_sorted() && entries[2] < code.len() as u64, "{entries:?}");
    }
}
