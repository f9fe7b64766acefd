//! A VM of KVM on this node: the shared memory is its memory, and some of the guest's vCPUs run here.
//!
//! The memory is there twice, at two guest addresses.

use super::Shared;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use nix::errno::Errno;

/// Numbers that are a vCPU's registers.
pub const REGISTERS: usize = 18;
/// Where the guest finds its memory: both are the same pages of the host.
const ADDRESSES: [u64; 2] = [0, 1 << 30];
const PAGE_BYTES: usize = 4096;

/// A VM with the shared memory.
pub struct Machine {
    vm: VmFd,
    bytes: usize,
}

/// A vCPU in real mode.
pub struct Vcpu(VcpuFd);

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
    /// Without vCPUs. KVM logs which pages they write.
    pub fn new(shared: &Shared) -> Result<Self, String> {
        expect_hardware()?;
        let kvm = Kvm::new().map_err(failed("/dev/kvm"))?;
        let vm = kvm.create_vm().map_err(failed("KVM_CREATE_VM"))?;
        // For Intel's CPUs, which emulate real mode with it: three pages that are no memory.
        vm.set_tss_address(0xfffb_d000).map_err(failed("KVM_SET_TSS_ADDR"))?;
        let bytes = shared.words * 8;
        for (slot, guest_phys_addr) in (0..).zip(ADDRESSES) {
            let memory = kvm_userspace_memory_region {
                slot,
                flags: KVM_MEM_LOG_DIRTY_PAGES,
                guest_phys_addr,
                memory_size: bytes as u64,
                userspace_addr: shared.address as u64,
            };
            // SAFETY: the region stays mapped at its address until the process ends. The guest accesses it as other threads do,
            // which use atomics only.
            unsafe { vm.set_user_memory_region(memory) }.map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        }
        Ok(Self { vm, bytes })
    }

    /// Adds a vCPU. `number` is its place among those of this node; every other one has its data at the second address.
    pub fn vcpu(&self, number: usize) -> Result<Vcpu, String> {
        let vcpu = self.vm.create_vcpu(number as u64).map_err(failed("KVM_CREATE_VCPU"))?;
        let mut special = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
        // It starts at the top of its memory otherwise, as after a reset.
        (special.cs.base, special.cs.selector) = (0, 0);
        special.ds.base = ADDRESSES[number % ADDRESSES.len()];
        vcpu.set_sregs(&special).map_err(failed("KVM_SET_SREGS"))?;
        Ok(Vcpu(vcpu))
    }

    /// Pages that the vCPUs of this node have written since the last call, at each of the two addresses, as KVM's log of dirty
    /// pages has them. The log is empty afterwards.
    pub fn take_dirty(&self) -> Result<[Vec<usize>; 2], String> {
        let mut dirty = [const { Vec::new() }; ADDRESSES.len()];
        for (slot, dirty) in (0..).zip(&mut dirty) {
            let log = self.vm.get_dirty_log(slot, self.bytes).map_err(failed("KVM_GET_DIRTY_LOG"))?;
            dirty.extend(pages(&log).filter(|page| *page < self.bytes / PAGE_BYTES));
        }
        Ok(dirty)
    }
}

/// The bits that are set.
fn pages(log: &[u64]) -> impl Iterator<Item = usize> {
    (0..log.len() * 64).filter(|page| log[page / 64] >> (page % 64) & 1 == 1)
}

impl Vcpu {
    /// Runs until the guest writes to this port. False when the vCPU has halted.
    pub fn turn(&mut self, port: u16) -> Result<bool, String> {
        loop {
            match self.0.run() {
                Ok(VcpuExit::IoOut(written, _)) if written == port => return Ok(true),
                Ok(VcpuExit::Hlt) => return Ok(false),
                Ok(other) => return Err(format!("the guest has stopped: {other:?}")),
                Err(error) if error.errno() == Errno::EINTR as i32 => {}
                Err(error) => return Err(failed("KVM_RUN")(error)),
            }
        }
    }

    /// Ends the instruction that the vCPU has left KVM with: its registers are those behind it.
    fn settle(&mut self) -> Result<(), String> {
        self.0.set_kvm_immediate_exit(1);
        let outcome = match self.0.run() {
            Err(error) if error.errno() == Errno::EINTR as i32 => Ok(()),
            Err(error) => Err(failed("KVM_RUN")(error)),
            Ok(other) => Err(format!("the guest has gone on: {other:?}")),
        };
        self.0.set_kvm_immediate_exit(0);
        outcome
    }

    /// Its registers, for the node that goes on with it.
    pub fn give(&mut self) -> Result<[u64; REGISTERS], String> {
        self.settle()?;
        Ok(words(&self.0.get_regs().map_err(failed("KVM_GET_REGS"))?))
    }

    /// Goes on as the vCPU with these registers.
    pub fn take(&mut self, from: [u64; REGISTERS]) -> Result<(), String> {
        self.begin(&registers(from))
    }

    /// Begins with these registers.
    pub fn begin(&mut self, registers: &kvm_regs) -> Result<(), String> {
        self.0.set_regs(registers).map_err(failed("KVM_SET_REGS"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_go_there_and_back() {
        let numbers = std::array::from_fn(|index| index as u64 + 1);
        assert_eq!(words(&registers(numbers)), numbers);
    }

    #[test]
    fn a_log_has_a_bit_for_each_page() {
        let seen: Vec<usize> = pages(&[1 << 3 | 1 << 63, 0, 1]).collect();
        assert_eq!(seen, [3, 63, 128]);
        assert_eq!(pages(&[]).count(), 0);
    }
}
