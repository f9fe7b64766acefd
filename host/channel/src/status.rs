//! The guest's area of the channel.

use crate::layout::{Region, WORD};
use std::{fmt, mem::offset_of};
use vnuma_abi_topology_channel::{
    GUEST_MAGIC, GUEST_OFFSET, Guest, MAX_SUPPORTED, MODE_FAST, MODE_NONE, MODE_SAFE, SupportedSection,
};

/// Highest error number of Linux.
const MAX_ERRNO: i64 = 4095;

/// How the driver changes the kernel's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverMode {
    /// It applies nothing.
    None,
    /// In place.
    Fast,
    /// By CPU hotplug.
    Safe,
}

/// Of the guest's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverVersion(u32);

impl DriverVersion {
    /// Major, minor and patch.
    pub fn parts(self) -> [u16; 3] {
        [(self.0 >> 16) as u16, (self.0 >> 8 & 0xff) as u16, (self.0 & 0xff) as u16]
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// What the guest reports. All of it can be false: it is shown and measured, and decides nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestStatus {
    /// The generation that the kernel's maps agree with, 0 for none. It may be one that was never published.
    pub acknowledged: u64,
    /// The last generation that the driver refused or applied in part only, and the error number, 0 if that is none.
    pub refused: Option<(u64, i32)>,
    /// `None` without a driver.
    pub mode: Option<DriverMode>,
    /// `None` without a driver.
    pub driver_version: Option<DriverVersion>,
    /// Sections that the driver understands.
    pub supported: Vec<SupportedSection>,
    /// PCI devices that came or went in the guest, as it counts them.
    pub device_changes: u64,
}

impl GuestStatus {
    /// Reads the area, each word by one load. The guest can change it meanwhile.
    pub(crate) fn read(region: &Region) -> Self {
        let load = |field: usize| region.load(GUEST_OFFSET + field);
        if load(offset_of!(Guest, magic)) != GUEST_MAGIC {
            return Self::default();
        }
        let counts = load(offset_of!(Guest, nr_supported));
        let mode = match (counts >> 32) as u32 {
            MODE_NONE => Some(DriverMode::None),
            MODE_FAST => Some(DriverMode::Fast),
            MODE_SAFE => Some(DriverMode::Safe),
            _ => None,
        };
        let refused = load(offset_of!(Guest, refused));
        let error = load(offset_of!(Guest, refused_error)).cast_signed();
        let errno = if (-MAX_ERRNO..0).contains(&error) { -error as i32 } else { 0 };
        // The error is of that generation only if no other came meanwhile; its own signal follows then.
        let same = load(offset_of!(Guest, refused)) == refused;
        Self {
            acknowledged: load(offset_of!(Guest, acknowledged)),
            refused: (refused != 0 && same).then_some((refused, errno)),
            mode,
            driver_version: Some(DriverVersion(load(offset_of!(Guest, driver_version)) as u32)),
            supported: Self::supported(usize::from(counts as u16).min(MAX_SUPPORTED), load),
            device_changes: load(offset_of!(Guest, device_changes)),
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
