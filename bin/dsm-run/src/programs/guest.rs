//! A guest of KVM that spans the nodes: its memory is the shared one, and each node runs one of its vCPUs.
//!
//! The vCPUs count under a lock, and each in a word of its own of a page that all of them write. After every 32 rounds they
//! change places: node `n` goes on with the vCPU of the node behind it, whose registers come through the shared memory, too.
//!
//! The guest is a few instructions of real mode, so it needs neither a kernel nor devices. KVM's faults on its memory are served
//! as those of threads are, and what takes a page from this node takes it from the second-level page tables of KVM as well.

use super::{Shared, WORDS, expect, fits};
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use nix::errno::Errno;

/// Pages of the guest; the first one belongs to the barrier of the nodes.
const CODE: usize = 2;
const LOCK: usize = 3;
const OWN: usize = 4;
/// Registers of vCPUs that change places.
const STATE: usize = 5;
/// Words of a vCPU's registers.
const REGISTERS: usize = 18;
/// A vCPU that writes here has done 32 rounds.
const PORT: u16 = 0x10;
/// Rounds between two of these.
const TURN: usize = 32;

/// ECX: rounds that are left. BX: address of the vCPU's own word.
const INSTRUCTIONS: [u8; 40] = [
    0xb8, 0x01, 0x00, // again: mov ax, 1
    0x87, 0x06, 0x00, 0x30, // xchg [0x3000], ax
    0x85, 0xc0, // test ax, ax
    0x75, 0xf5, // jnz again
    0x66, 0xff, 0x06, 0x08, 0x30, // inc dword [0x3008]
    0xc7, 0x06, 0x00, 0x30, 0x00, 0x00, // mov word [0x3000], 0
    0x66, 0xff, 0x07, // inc dword [bx]
    0x66, 0x49, // dec ecx
    0xf6, 0xc1, 0x1f, // test cl, 31
    0x75, 0xe0, // jnz again
    0xe6, 0x10, // out 0x10, al
    0x66, 0x85, 0xc9, // test ecx, ecx
    0x75, 0xd9, // jnz again
    0xf4, // hlt
];

/// A VM with the shared memory from address 0 on, and a vCPU in real mode.
struct Machine {
    // Closed first.
    vcpu: VcpuFd,
    _vm: VmFd,
}

fn failed(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> String {
    move |error| format!("{call}: {error}")
}

/// A KVM without these flags exists, and does not run such a guest.
fn expect_hardware() -> Result<(), String> {
    let flags =
        std::fs::read_to_string("/proc/cpuinfo").map_err(|error| format!("/proc/cpuinfo: {error}"))?;
    let has = |flag: &str| flags.split_ascii_whitespace().any(|word| word == flag);
    if has("vmx") || has("svm") {
        Ok(())
    } else {
        Err("/proc/cpuinfo: no flag vmx or svm: KVM cannot run the guest".to_owned())
    }
}

impl Machine {
    fn new(shared: &Shared) -> Result<Self, String> {
        expect_hardware()?;
        let kvm = Kvm::new().map_err(failed("/dev/kvm"))?;
        let vm = kvm.create_vm().map_err(failed("KVM_CREATE_VM"))?;
        // For Intel's CPUs, which emulate real mode with it: three pages that are no memory.
        vm.set_tss_address(0xfffb_d000).map_err(failed("KVM_SET_TSS_ADDR"))?;
        let memory = kvm_userspace_memory_region {
            slot: 0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: 0,
            memory_size: (shared.words * 8) as u64,
            userspace_addr: shared.address as u64,
        };
        // SAFETY: the region stays mapped at its address until the process ends. The guest accesses it as other threads do,
        // which use atomics only.
        unsafe { vm.set_user_memory_region(memory) }.map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        let vcpu = vm.create_vcpu(0).map_err(failed("KVM_CREATE_VCPU"))?;
        let mut special = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
        // It starts at the top of its memory otherwise, as after a reset.
        (special.cs.base, special.cs.selector) = (0, 0);
        vcpu.set_sregs(&special).map_err(failed("KVM_SET_SREGS"))?;
        Ok(Self { vcpu, _vm: vm })
    }

    /// Runs until the next turn. False when the vCPU has halted.
    fn turn(&mut self) -> Result<bool, String> {
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(PORT, _)) => return Ok(true),
                Ok(VcpuExit::Hlt) => return Ok(false),
                Ok(other) => return Err(format!("the guest has stopped: {other:?}")),
                Err(error) if error.errno() == Errno::EINTR as i32 => {}
                Err(error) => return Err(failed("KVM_RUN")(error)),
            }
        }
    }

    /// Ends the instruction that the vCPU has left KVM with: its registers are those behind it.
    fn settle(&mut self) -> Result<(), String> {
        self.vcpu.set_kvm_immediate_exit(1);
        let outcome = match self.vcpu.run() {
            Err(error) if error.errno() == Errno::EINTR as i32 => Ok(()),
            Err(error) => Err(failed("KVM_RUN")(error)),
            Ok(other) => Err(format!("the guest has gone on: {other:?}")),
        };
        self.vcpu.set_kvm_immediate_exit(0);
        outcome
    }

    /// Writes the registers of a vCPU for the node that goes on with it.
    fn give(&mut self, shared: &Shared, vcpu: usize) -> Result<(), String> {
        self.settle()?;
        let registers = self.vcpu.get_regs().map_err(failed("KVM_GET_REGS"))?;
        for (index, word) in words(&registers).into_iter().enumerate() {
            shared.store(STATE * WORDS + vcpu * REGISTERS + index, word);
        }
        Ok(())
    }

    /// Goes on with a vCPU.
    fn take(&mut self, shared: &Shared, vcpu: usize) -> Result<(), String> {
        let words = std::array::from_fn(|index| shared.load(STATE * WORDS + vcpu * REGISTERS + index));
        self.vcpu.set_regs(&registers(words)).map_err(failed("KVM_SET_REGS"))
    }
}

fn words(from: &kvm_regs) -> [u64; REGISTERS] {
    let kvm_regs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip,
        rflags,
    } = *from;
    [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags]
}

fn registers(from: [u64; REGISTERS]) -> kvm_regs {
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags] = from;
    kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags }
}

/// Address of a page.
fn address(page: usize) -> usize {
    page * WORDS * 8
}

pub fn guest(shared: &Shared, rounds: usize) -> Result<(), String> {
    fits(rounds, 1 << 24, "rounds")?;
    if shared.node == 0 {
        for (index, bytes) in INSTRUCTIONS.as_chunks::<8>().0.iter().enumerate() {
            shared.store(CODE * WORDS + index, u64::from_le_bytes(*bytes));
        }
    }
    let mut machine = Machine::new(shared)?;
    let mut vcpu = shared.node;
    let first = kvm_regs {
        rip: address(CODE) as u64,
        rbx: (address(OWN) + vcpu * 8) as u64,
        rcx: rounds as u64,
        // The bit that is always set.
        rflags: 2,
        ..kvm_regs::default()
    };
    machine.vcpu.set_regs(&first).map_err(failed("KVM_SET_REGS"))?;
    shared.barrier();
    // All vCPUs have as many turns.
    let mut turns = 0;
    while machine.turn()? {
        turns += 1;
        machine.give(shared, vcpu)?;
        shared.barrier();
        vcpu = (vcpu + 1) % shared.nodes;
        machine.take(shared, vcpu)?;
    }
    shared.barrier();
    expect("the number of turns", turns, (rounds.div_ceil(TURN)) as u64)?;
    expect("the lock", shared.load(LOCK * WORDS) & 0xffff, 0)?;
    expect("the counter", shared.load(LOCK * WORDS + 1), (rounds * shared.nodes) as u64)?;
    (0..shared.nodes)
        .try_for_each(|vcpu| expect("a vCPU's own word", shared.load(OWN * WORDS + vcpu), rounds as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_go_there_and_back() {
        let numbers = std::array::from_fn(|index| index as u64 + 1);
        assert_eq!(words(&registers(numbers)), numbers);
    }

    #[test]
    fn the_guest_uses_the_addresses_that_are_checked() {
        let has = |bytes: &[u8]| INSTRUCTIONS.windows(bytes.len()).any(|window| window == bytes);
        let [lock, counter] = [address(LOCK) as u16, address(LOCK) as u16 + 8].map(u16::to_le_bytes);
        assert!(has(&[0x87, 0x06, lock[0], lock[1]]) && has(&[0xff, 0x06, counter[0], counter[1]]));
        assert!(has(&[0xc7, 0x06, lock[0], lock[1], 0, 0]) && has(&[0xe6, PORT as u8]));
        assert_eq!((TURN, INSTRUCTIONS.len() % 8), (usize::from(INSTRUCTIONS[29]) + 1, 0));
    }
}
