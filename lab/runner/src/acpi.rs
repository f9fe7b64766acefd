//! ACPI tables of servers whose CPUs can be plugged while they run.
//!
//! A kernel that sees no hypervisor it knows takes a CPU that is absent at boot for one that can never come, unless ACPI
//! is of version 6.3 or newer and its table of CPUs (MADT) marks the CPU as online capable
//! (`acpi_is_processor_usable()`, arch/x86/kernel/acpi/boot.c, since 6.18 and in stable kernels). Servers with CPU hot-plug
//! do that; QEMU's tables are older. The kernel replaces MADT and FADT, which has the version, by these
//! (Documentation/admin-guide/acpi/initrd_table_override.rst). They are the same but for version and marks.

use crate::cpio::Archive;
use crate::profile::Profile;

const ENABLED: u32 = 1;
const ONLINE_CAPABLE: u32 = 2;
/// I/O APIC, the timer's and the PCI links' interrupts, and the NMI of all CPUs, as QEMU's q35 has them.
const INTERRUPTS: &[u8] = &[
    1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0, //
    2, 10, 0, 0, 2, 0, 0, 0, 0, 0, //
    2, 10, 0, 5, 5, 0, 0, 0, 0x0d, 0, //
    2, 10, 0, 9, 9, 0, 0, 0, 0x0d, 0, //
    2, 10, 0, 10, 10, 0, 0, 0, 0x0d, 0, //
    2, 10, 0, 11, 11, 0, 0, 0, 0x0d, 0, //
    4, 6, 0xff, 0, 0, 1,
];
/// FADT of QEMU's q35 behind the header, without addresses of other tables.
const FADT: &[u8] = &[
    0, 0, 0, 0, 0, 0, 0, 0, 0x01, 0, 0x09, 0, 0xb2, 0, 0, 0, 0x02, 0x03, 0, 0, 0, 0x06, 0, 0, 0, 0, 0,
    0, //
    0x04, 0x06, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x08, 0x06, 0, 0, 0x20, 0x06, 0, 0, 0, 0, 0, 0, 0x04, 0x02,
    0, //
    0x04, 0x10, 0, 0, 0, 0xff, 0x0f, 0xff, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0, 0x32, 0x02, 0, 0, 0xa5, 0x84,
    0x04, //
    0, 0x01, 0x08, 0, 0, 0xf9, 0x0c, 0, 0, 0, 0, 0, 0, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, //
    0, 0, 0, 0x01, 0x20, 0, 0, 0, 0x06, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x01, 0x10, 0,
    0, //
    0x04, 0x06, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, //
    0x01, 0x20, 0, 0, 0x08, 0x06, 0, 0, 0, 0, 0, 0, 0x01, 0x80, 0, 0, 0x20, 0x06, 0, 0, 0, 0, 0, 0, //
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, //
];
/// Fields of the FADT: offset of the addresses of FACS and DSDT, of the minor version, and of DSDT's address in 64 bits.
const FACS_AT: usize = 36;
const DSDT_AT: usize = 40;
const MINOR_AT: usize = 131;
const X_DSDT_AT: usize = 140;
/// Length of a FADT of version 6.3.
const FADT_BYTES: usize = 276;
/// q35 with this much memory or more has 2 GiB of it below 4 GiB, else all.
const SPLIT_BYTES: u64 = 0xb000_0000;
const LOW_BYTES: u64 = 0x8000_0000;
/// SeaBIOS puts the tables at the end of that. FACS is the first of them, DSDT the next.
const TABLES_BYTES: u64 = 0x2_0000;
const FACS_BYTES: u64 = 0x40;

/// What goes before the initial RAM disk of a server; nothing where its CPUs stay.
pub(crate) fn archive(profile: &Profile) -> Vec<u8> {
    if profile.hotplug.is_none() {
        return Vec::new();
    }
    let mut archive = Archive::default();
    archive.file("kernel/firmware/acpi/madt.aml", 0o644, &madt(profile));
    archive.file("kernel/firmware/acpi/fadt.aml", 0o644, &fadt(profile));
    archive.finish()
}

/// A table without length and checksum. Its OEM revision is newer than QEMU's, or the kernel keeps that.
fn header(signature: &[u8; 4], revision: u8) -> Vec<u8> {
    let mut table = signature.to_vec();
    table.extend([0, 0, 0, 0, revision, 0]);
    table.extend(b"BOCHS BXPC    ");
    table.extend(2_u32.to_le_bytes());
    table.extend(b"BXPC");
    table.extend(1_u32.to_le_bytes());
    table
}

fn finished(mut table: Vec<u8>) -> Vec<u8> {
    let length = table.len() as u32;
    table[4..8].copy_from_slice(&length.to_le_bytes());
    table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    table
}

fn fadt(profile: &Profile) -> Vec<u8> {
    let mut table = header(b"FACP", 6);
    table.extend(FADT);
    table.resize(FADT_BYTES, 0);
    let memory = (profile.memory_mib() as u64) << 20;
    let facs = if memory >= SPLIT_BYTES { LOW_BYTES } else { memory } - TABLES_BYTES;
    let dsdt = facs + FACS_BYTES;
    // Both lie below 4 GiB.
    table[FACS_AT..FACS_AT + 4].copy_from_slice(&(facs as u32).to_le_bytes());
    table[DSDT_AT..DSDT_AT + 4].copy_from_slice(&(dsdt as u32).to_le_bytes());
    table[X_DSDT_AT..X_DSDT_AT + 8].copy_from_slice(&dsdt.to_le_bytes());
    table[MINOR_AT] = 3;
    finished(table)
}

fn madt(profile: &Profile) -> Vec<u8> {
    let mut table = header(b"APIC", 5);
    table.extend(0xfee0_0000_u32.to_le_bytes());
    table.extend(1_u32.to_le_bytes()); // there are the two old interrupt controllers, too
    let cores = profile.cores_per_socket();
    let slots = (0..profile.nodes).flat_map(|node| (0..cores).map(move |core| (node, core)));
    for (number, (node, core)) in slots.enumerate() {
        let flags = if core < profile.cpus_per_node[node] { ENABLED } else { ONLINE_CAPABLE };
        table.extend([0, 8, number as u8, apic_id(cores, node, core)]);
        table.extend(flags.to_le_bytes());
    }
    table.extend(INTERRUPTS);
    finished(table)
}

/// Cores are numbered in as many bits as they need, sockets above. At most 64 CPUs: it always fits.
fn apic_id(cores: usize, socket: usize, core: usize) -> u8 {
    (socket * cores.next_power_of_two() + core) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER_BYTES: usize = 36;

    /// What QEMU 10.0 has for 3n4c-hotplug, read from /sys/firmware/acpi/tables of that server.
    const QEMUS_MADT: &str = "\
        41504943b800000003b4424f4348532042585043202020200100000042585043010000000000e0fe01000000000800000100000000080101 \
        010000000008020200000000000803040100000000080405010000000008050600000000000806080000000000080709000000000008080a \
        00000000010c00000000c0fe00000000020a00000200000000 00020a0005050000000d00020a0009090000000d00020a000a0a0000000d \
        00020a000b0b0000000d000406ff000001";
    const QEMUS_FADT: &str = "\
        46414350f400000003bc424f434853204258504320202020010000004258504301000000 0000fe7f4000fe7f01000900b200000002030000 \
        0006000000000000040600000000000000000000080600002006000000000000040200041000 0000ff0fff0f000000000000000032020000 \
        a584040001080000f90c0000000000000f00000000000000000000004000fe7f000000000120000000060000000000000000000000000000 \
        000000000110000004060000000000000000000000000000000000000000000000000000000000000120000008060000000000000180 0000 \
        2006000000000000000000000000000000000000";

    fn bytes(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let value = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(value).collect()
    }

    fn check(found: &[u8], mut expected: Vec<u8>, revision: u8) {
        assert_eq!(found.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        expected[4..8].copy_from_slice(&(found.len() as u32).to_le_bytes());
        (expected[8], expected[9], expected[24]) = (revision, found[9], 2);
        assert_eq!(found, expected);
    }

    #[test]
    fn the_tables_are_qemus_but_for_version_and_marks() {
        let profile = Profile::load("3n4c-hotplug").unwrap();
        let mut expected = bytes(QEMUS_MADT);
        for entry in (0..9).map(|number| HEADER_BYTES + 8 + 8 * number) {
            expected[entry + 4] = if expected[entry + 4] == ENABLED as u8 { 1 } else { 2 };
        }
        check(&madt(&profile), expected, 5);
        let mut expected = bytes(QEMUS_FADT);
        expected.resize(FADT_BYTES, 0);
        expected[MINOR_AT] = 3;
        check(&fadt(&profile), expected, 6);
    }

    #[test]
    fn a_server_whose_cpus_stay_keeps_its_table() {
        assert!(archive(&Profile::load("2n5c").unwrap()).is_empty());
    }
}
