//! On which host node a page of a guest lies: guest physical address to QEMU's virtual
//! address (`gpa2hva` of its monitor), then `move_pages(2)` without a target, which
//! only asks.

use crate::record::NOT_PRESENT;
use anyhow::{Context, Result};
use serde_json::json;
use std::collections::BTreeMap;
use vnuma_scenario::Monitor;

const PAGE_BYTES: u64 = 4096;
const LARGEST_PIECE_BYTES: u64 = 64 << 20;

/// QEMU's virtual address of a guest physical address.
fn host_virtual(monitor: &mut Monitor, gpa: u64) -> Result<u64> {
    let answer = monitor.execute(&json!({
        "execute": "human-monitor-command",
        "arguments": {"command-line": format!("gpa2hva {gpa:#x}")},
    }))?;
    parse_gpa2hva(answer.as_str().unwrap_or_default())
        .with_context(|| format!("gpa2hva {gpa:#x} answered {answer}"))
}

/// `Host virtual address for 0x100000 (ram0) is 0x7f2b1be00000`
fn parse_gpa2hva(answer: &str) -> Option<u64> {
    let address = answer.trim().strip_prefix("Host virtual address for ")?.rsplit_once(" is 0x")?.1;
    u64::from_str_radix(address, 16).ok()
}

/// Looks up pages of one guest.
pub struct Pages {
    pid: i32,
    monitor: Monitor,
    /// Pieces of guest memory that are contiguous in QEMU's: start, (bytes, virtual address).
    pieces: BTreeMap<u64, (u64, u64)>,
}

impl Pages {
    /// For the QEMU process `pid`.
    pub fn new(pid: i32, monitor: Monitor) -> Self {
        Self { pid, monitor, pieces: BTreeMap::new() }
    }

    fn address(&mut self, gpa: u64) -> Result<u64> {
        if let Some((start, (bytes, base))) = self.pieces.range(..=gpa).next_back()
            && gpa - start < *bytes
        {
            return Ok(base + (gpa - start));
        }
        let (start, bytes, base) = self.find_piece(gpa)?;
        self.pieces.insert(start, (bytes, base));
        Ok(base + (gpa - start))
    }

    /// The largest aligned piece around an address whose first and last page are as far apart in QEMU's memory as they are
    /// in the guest's. The monitor is slow, so that one question per page would not do.
    fn find_piece(&mut self, gpa: u64) -> Result<(u64, u64, u64)> {
        let mut bytes = LARGEST_PIECE_BYTES;
        while bytes > PAGE_BYTES {
            let start = gpa / bytes * bytes;
            let ends = [start, start + bytes - PAGE_BYTES].map(|gpa| host_virtual(&mut self.monitor, gpa));
            if let [Ok(first), Ok(last)] = ends
                && last.checked_sub(first) == Some(bytes - PAGE_BYTES)
            {
                return Ok((start, bytes, first));
            }
            bytes /= 4;
        }
        let start = gpa / PAGE_BYTES * PAGE_BYTES;
        Ok((start, PAGE_BYTES, host_virtual(&mut self.monitor, start)?))
    }

    /// The host node of each page; none for one that is not present, or that the host has not backed.
    pub fn nodes(&mut self, gpas: &[u64]) -> Result<Vec<Option<u32>>> {
        let address = |&gpa: &u64| if gpa == NOT_PRESENT { Ok(NOT_PRESENT) } else { self.address(gpa) };
        let addresses = gpas.iter().map(address).collect::<Result<Vec<_>>>()?;
        let mut status = vec![0i32; addresses.len()];
        // SAFETY: both arrays have `len` entries; without target nodes the kernel only writes `status`.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                self.pid,
                addresses.len(),
                addresses.as_ptr(),
                std::ptr::null::<i32>(),
                status.as_mut_ptr(),
                0,
            )
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error())
                .with_context(|| format!("move_pages of process {}", self.pid));
        }
        Ok(status.into_iter().map(|node| u32::try_from(node).ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitors_answer_is_read() {
        let answer = "Host virtual address for 0x100000 (ram0) is 0x7f2b1be00000\r\n";
        assert_eq!(parse_gpa2hva(answer), Some(0x7f2b_1be0_0000));
        assert_eq!(parse_gpa2hva("No memory is mapped at address 0xfffff0000"), None);
    }
}
