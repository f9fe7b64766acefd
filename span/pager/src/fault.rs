//! Messages of the kernel about faults.

use crate::{Access, PAGE_SIZE};

/// Bytes of a message.
pub(crate) const MESSAGE: usize = 32;
/// `UFFD_EVENT_PAGEFAULT`. Other events are asked for by features that the pager leaves off.
const PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;
const FLAG_MINOR: u64 = 1 << 2;

/// Why the kernel could not serve a fault itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The file has no memory there yet.
    Missing,
    /// The file has it, and it is not mapped for the guest.
    Unmapped,
    /// It is mapped, and write-protected.
    Protected,
}

/// A thread waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The page, counted from the beginning of the region.
    pub page: u64,
    /// What the thread wants to do. A thread that reads first and then writes faults twice.
    pub access: Access,
    /// Why it waits.
    pub cause: Cause,
    /// The thread, by its number in this process's PID namespace.
    pub thread: i32,
}

/// Reads a message. `start` is the address of the region, `pages` its length.
pub(crate) fn parse(message: &[u8; MESSAGE], start: usize, pages: u64) -> Result<Fault, String> {
    let word = |offset: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[offset..offset + 8]);
        u64::from_ne_bytes(bytes)
    };
    if message[0] != PAGEFAULT {
        return Err(format!("event {:#x}, which was not asked for", message[0]));
    }
    let (flags, address) = (word(8), word(16));
    let page = address.checked_sub(start as u64).map(|offset| offset / PAGE_SIZE as u64);
    let Some(page) = page.filter(|page| *page < pages) else {
        return Err(format!("a fault at {address:#x}, outside the region at {start:#x}"));
    };
    let cause = match (flags & FLAG_WP != 0, flags & FLAG_MINOR != 0) {
        (true, _) => Cause::Protected,
        (_, true) => Cause::Unmapped,
        _ => Cause::Missing,
    };
    // Only writes are stopped by write protection, whether or not the kernel says so.
    let write = flags & FLAG_WRITE != 0 || cause == Cause::Protected;
    let access = if write { Access::Write } else { Access::Read };
    Ok(Fault { page, access, cause, thread: word(24) as u32 as i32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(event: u8, flags: u64, address: u64, thread: u32) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        bytes[0] = event;
        bytes[8..16].copy_from_slice(&flags.to_ne_bytes());
        bytes[16..24].copy_from_slice(&address.to_ne_bytes());
        bytes[24..28].copy_from_slice(&thread.to_ne_bytes());
        bytes
    }

    #[test]
    fn every_cause_is_told_apart() {
        let parsed = |flags| parse(&message(PAGEFAULT, flags, 0x5000, 77), 0x4000, 2).expect("a fault");
        let fault = |access, cause| Fault { page: 1, access, cause, thread: 77 };
        assert_eq!(parsed(0), fault(Access::Read, Cause::Missing));
        assert_eq!(parsed(1), fault(Access::Write, Cause::Missing));
        assert_eq!(parsed(4), fault(Access::Read, Cause::Unmapped));
        assert_eq!(parsed(5), fault(Access::Write, Cause::Unmapped));
        assert_eq!(parsed(3), fault(Access::Write, Cause::Protected));
        assert_eq!(parsed(2), fault(Access::Write, Cause::Protected));
    }

    #[test]
    fn what_was_not_asked_for_is_refused() {
        let refusal = parse(&message(0x15, 0, 0x4000, 1), 0x4000, 2).expect_err("an event of another kind");
        assert_eq!(refusal, "event 0x15, which was not asked for");
        for address in [0x3fff, 0x6000, 0, u64::MAX] {
            let refusal = parse(&message(PAGEFAULT, 0, address, 1), 0x4000, 2).expect_err("outside");
            assert!(refusal.contains(&format!("{address:#x}")), "{refusal}");
        }
    }

    proptest! {
        #[test]
        fn a_parsed_page_is_inside(bytes: [u8; MESSAGE], start in 0..=usize::MAX / 2, pages in 0_u64..1 << 40) {
            if let Ok(fault) = parse(&bytes, start, pages) {
                prop_assert!(fault.page < pages);
            }
        }
    }
}
