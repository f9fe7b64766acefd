//! Faults of an emulated processor, as the console of its machine shows them.

/// What QEMU says when KVM gives a VM up that touches a register of a device while an event of its processor is not delivered
/// (`KVM_INTERNAL_ERROR_DELIVERY_EV` of include/uapi/linux/kvm.h). No guest can cause that on hardware: after a page fault in a guest TCG
/// leaves its kind in EXITINTINFO at the next exit, without the bit that says that it is valid, and KVM looks at the kind alone
/// (`svm_check_emulate_instruction` of arch/x86/kvm/svm/svm.c). So a guest ends that writes a register after a page fault and has no other
/// exit in between. The faster the machine, the fewer interrupts come between the two.
const EVENT_LEFT_BEHIND: &str = "KVM internal error. Suberror: 3";

/// Whether an error that shows what QEMU and the console of a guest said is the fault of the emulated processor, so that what failed
/// may be tried once more.
pub fn ended_guest(error: &str) -> bool {
    error.contains(EVENT_LEFT_BEHIND) || stale_breakpoint(error) || event_at_entry(error)
}

/// How a kernel of x86 calls a fault that it cannot handle, as the stack is not its own (`exc_double_fault` of arch/x86/kernel/traps.c).
const DOUBLE_FAULT: &str = "Oops: double fault";
/// The first instruction of a system call, which still has the program's stack.
const ENTRY: &str = "RIP: 0010:entry_SYSCALL_64+0x0/";

/// Whether a kernel died of an event at the first instruction of a system call. Hardware delivers none there but those that have a
/// stack of their own, as interrupts are off; an event that TCG has left behind is delivered all the same.
fn event_at_entry(console: &str) -> bool {
    let Some(start) = console.find(DOUBLE_FAULT) else { return false };
    console[start..].lines().find(|line| line.contains("RIP: ")).is_some_and(|line| line.contains(ENTRY))
}

/// The kernel's message about an unexpected breakpoint on x86 (`exc_int3` of arch/x86/kernel/traps.c).
const BREAKPOINT: &str = "int3: 0000";

/// Whether a kernel died of a breakpoint that its memory does not hold.
///
/// A kernel that changes its own code puts a breakpoint there meanwhile (`smp_text_poke_batch_finish` of arch/x86/kernel/alternative.c).
/// TCG throws away what it has translated of a page before it writes to it. A CPU that translates the same code between the two
/// keeps the breakpoint for good. On hardware the byte before the instruction that follows is the breakpoint, 0xcc.
pub fn stale_breakpoint(console: &str) -> bool {
    let Some(start) = console.find(BREAKPOINT) else { return false };
    let code = console[start..].lines().find_map(|line| line.split_once("Code: "));
    let bytes: Vec<_> = code.map_or("", |(_, bytes)| bytes).split_whitespace().collect();
    let next = bytes.iter().position(|byte| byte.starts_with('<'));
    next.and_then(|next| bytes.get(next.checked_sub(1)?)).is_some_and(|&byte| byte != "cc")
}

/// How the lab says that the processor of a machine has given up on a fault in the handling of a fault.
pub const TRIPLE_FAULT: &str = "processor: triple fault";
/// What a kernel says before that if it has come to a fault itself.
const KERNEL_SAYS: [&str; 4] = ["Kernel panic", "Oops", "BUG: ", "PANIC: "];

/// Whether a machine has ended by a triple fault of which its kernel had no chance to say anything.
///
/// A kernel of x86 has a stack of its own for double faults, and says where it was. TCG leaves an event of a guest behind when a page of
/// that guest is mapped at that moment ([`ended_guest`]), and delivers it to what runs next, the host in the middle of its switch to the
/// guest among them, where hardware holds events back.
pub fn silent_triple_fault(console: &str) -> bool {
    console.contains(TRIPLE_FAULT) && !KERNEL_SAYS.iter().any(|said| console.contains(said))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_triple_fault_without_a_word_is_the_emulators() {
        let fault = format!("  console: [   28.9] kvm: vcpu0\n  {TRIPLE_FAULT}\n");
        assert!(silent_triple_fault(&fault));
        assert!(!silent_triple_fault("  console: [   28.9] kvm: vcpu0\n"));
        for said in [
            "Kernel panic - not syncing",
            "Oops: 0000",
            "BUG: unable to handle page fault",
            "PANIC: double fault",
        ] {
            assert!(!silent_triple_fault(&format!("  console: {said}\n{fault}")), "{said}");
        }
    }

    /// The end of a server's console, as the lab shows it.
    fn died(what: &str, code: &str) -> String {
        format!(
            "  console: [  286.987202] Oops: {what} [#1] SMP NOPTI\n  \
             console: [  286.987232] RIP: 0010:put_prev_task_idle+0x13/0x40\n  \
             console: [  286.987265] Code: 53 48 89 fb e8 9e 97 fe ff {code} 48 89 df 5b e9\n  \
             console: [  286.987508] Kernel panic - not syncing: Fatal exception in interrupt\n"
        )
    }

    #[test]
    fn a_breakpoint_that_is_not_in_memory_is_the_emulators() {
        assert!(stale_breakpoint(&died("int3: 0000", "eb <09>")));
    }

    #[test]
    fn a_guest_that_kvm_gave_up_with_an_event_ended_by_the_emulator() {
        assert!(ended_guest(
            "VM \"a\": KVM cannot run it any more: KVM internal error. Suberror: 3; extra data[0]"
        ));
        assert!(ended_guest(&died("int3: 0000", "eb <09>")));
        assert!(!ended_guest("VM \"a\": KVM cannot run it any more: KVM internal error. Suberror: 1"));
    }

    #[test]
    fn an_event_where_hardware_delivers_none_is_the_emulators() {
        let died = |what: &str, at: &str| {
            format!(
                "  [ 1597.925348] traps: PANIC: double fault, error_code: 0x0\n  [ 1597.927434] Oops: {what}: 0000 [#1]\n  \
                 [ 1597.945840] RIP: 0010:{at}/0x2b\n  [ 1597.993551] RIP: 0010:entry_SYSCALL_64+0x0/0x2b\n"
            )
        };
        assert!(ended_guest(&died("double fault", "entry_SYSCALL_64+0x0")));
        assert!(!ended_guest(&died("double fault", "entry_SYSCALL_64+0x9")));
        assert!(!ended_guest(&died("double fault", "vnuma_update+0x0")));
        assert!(!ended_guest(&died("general protection fault", "entry_SYSCALL_64+0x0")));
        assert!(!ended_guest("Oops: double fault"));
    }

    #[test]
    fn one_that_is_in_memory_and_other_faults_are_the_kernels() {
        for (what, code) in [
            ("int3: 0000", "cc <09>"),
            ("int3: 0000", "cc 09"),
            ("invalid opcode: 0000", "eb <09>"),
            ("general protection fault: 0000", "eb <09>"),
        ] {
            assert!(!stale_breakpoint(&died(what, code)), "{what}, {code}");
        }
        assert!(!stale_breakpoint("Oops: int3: 0000 [#1]\nCode: Unable to access opcode bytes at 0x13.\n"));
        assert!(!stale_breakpoint("Oops: int3: 0000 [#1]\nCode: <09> 48\n"));
        assert!(!stale_breakpoint("int3: 0000"));
    }
}
