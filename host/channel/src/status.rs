//! The guest's area of the channel.

use crate::layout::{Region, WORD};
use std::mem::offset_of;
use vnuma_abi_topology_channel::{
    GUEST_MAGIC, GUEST_OFFSET, Guest, MAX_SUPPORTED, MODE_FAST, MODE_SAFE, SECTION_DEVICES, SupportedSection,
};
use vnuma_model::DriverStatus;

/// Highest error number of Linux.
const MAX_ERRNO: i64 = 4095;

/// What the guest reports. All of it can be false: it is shown and measured, and decides nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestStatus {
    /// The generation that the kernel's maps agree with, 0 for none. It may be one that was never published.
    pub acknowledged: u64,
    /// What its driver reports of itself.
    pub driver: DriverStatus,
    /// Sections that the driver understands.
    pub supported: Vec<SupportedSection>,
}

impl GuestStatus {
    /// Reads the area, each word by one load. The guest can change it at any time.
    pub(crate) fn read(region: &Region) -> Self {
        let load = |field: usize| region.load(GUEST_OFFSET + field);
        if load(offset_of!(Guest, magic)) != GUEST_MAGIC {
            return Self::default();
        }
        let counts = load(offset_of!(Guest, nr_supported));
        let safe_mode = match (counts >> 32) as u32 {
            MODE_FAST => Some(false),
            MODE_SAFE => Some(true),
            _ => None,
        };
        let supported = Self::supported(usize::from(counts as u16).min(MAX_SUPPORTED), load);
        let version = load(offset_of!(Guest, driver_version));
        let refused = load(offset_of!(Guest, refused));
        let error = load(offset_of!(Guest, refused_error)).cast_signed();
        let errno = if (-MAX_ERRNO..0).contains(&error) { -error as i32 } else { 0 };
        // The error is of that generation only if no other came meanwhile; its own signal follows then.
        let same = load(offset_of!(Guest, refused)) == refused;
        Self {
            acknowledged: load(offset_of!(Guest, acknowledged)),
            driver: DriverStatus {
                safe_mode,
                version: Some([version >> 16, version >> 8 & 0xff, version & 0xff].map(|part| part as u16)),
                refused: (refused != 0 && same).then_some((refused, errno)),
                knows_devices: supported.iter().any(|section| section.kind == SECTION_DEVICES),
                device_changes: load(offset_of!(Guest, device_changes)),
            },
            supported,
        }
    }

    fn supported(count: usize, load: impl Fn(usize) -> u64) -> Vec<SupportedSection> {
        let entry = |index: usize| {
            let word = load(offset_of!(Guest, supported) + index / 2 * WORD);
            let half = (word >> (index % 2 * 32)) as u32;
            SupportedSection { kind: half as u16, version: (half >> 16) as u16 }
        };
        (0..count).map(entry).filter(|section| section.kind != 0).collect()
    }
}
