//! Names of PCI devices, from the file that lspci uses (package pci.ids).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    path::Path,
};

/// Where distributions have it.
const FILES: [&str; 2] = ["usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids"];
/// The file has 1.5 MB.
const MOST_BYTES: u64 = 16 << 20;
/// Longest name that is taken, in characters.
const MOST_NAME: usize = 120;

/// Names of some devices. What the file does not have has no name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciNames {
    vendors: BTreeMap<u16, String>,
    devices: BTreeMap<(u16, u16), String>,
    /// By base class and subclass.
    classes: BTreeMap<u16, String>,
    base_classes: BTreeMap<u8, String>,
}

impl PciNames {
    /// Of a vendor.
    pub fn vendor(&self, vendor: u16) -> Option<&str> {
        self.vendors.get(&vendor).map(String::as_str)
    }

    /// Of a device of a vendor.
    pub fn device(&self, vendor: u16, device: u16) -> Option<&str> {
        self.devices.get(&(vendor, device)).map(String::as_str)
    }

    /// Of a class code of 24 bits: that of its subclass or, if that has none, of its base class.
    pub fn class(&self, class: u32) -> Option<&str> {
        let [_, base, sub, _] = class.to_be_bytes();
        let name = self.classes.get(&u16::from_be_bytes([base, sub]));
        name.or_else(|| self.base_classes.get(&base)).map(String::as_str)
    }
}

/// Names of these devices (vendor, device) and of all classes, from the file below `root`; none without a file.
pub fn read(root: &Path, wanted: &BTreeSet<(u16, u16)>) -> PciNames {
    let opened = FILES.iter().find_map(|file| File::open(root.join(file)).ok());
    let Some(file) = opened.filter(|file| file.metadata().is_ok_and(|found| found.is_file())) else {
        return PciNames::default();
    };
    let mut bytes = Vec::new();
    // A name is a convenience: without the file, or with half of it, numbers are shown.
    let _ = file.take(MOST_BYTES).read_to_end(&mut bytes);
    parse(&String::from_utf8_lossy(&bytes), wanted)
}

/// What the lines below a line without indentation are about.
enum Section {
    Vendor(u16),
    Class(u8),
    Other,
}

/// Takes the names of these devices and of all classes. A line that is none of the file's kinds counts for nothing.
pub fn parse(text: &str, wanted: &BTreeSet<(u16, u16)>) -> PciNames {
    let vendors: BTreeSet<u16> = wanted.iter().map(|(vendor, _)| *vendor).collect();
    let mut names = PciNames::default();
    let mut section = Section::Other;
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let Some(indented) = line.strip_prefix('\t') else {
            section = head(line, &vendors, &mut names);
            continue;
        };
        // Subsystems and programming interfaces are two tabs in.
        match section {
            Section::Vendor(vendor) => {
                if let Some((device, name)) =
                    entry(indented, 4).filter(|(device, _)| wanted.contains(&(vendor, *device)))
                {
                    names.devices.insert((vendor, device), name);
                }
            }
            Section::Class(base) => {
                if let Some((sub, name)) = entry(indented, 2) {
                    names.classes.insert(u16::from(base) << 8 | sub, name);
                }
            }
            Section::Other => {}
        }
    }
    names
}

fn head(line: &str, vendors: &BTreeSet<u16>, names: &mut PciNames) -> Section {
    if let Some((base, name)) = line.strip_prefix("C ").and_then(|rest| entry(rest, 2)) {
        // Two digits.
        let base = base as u8;
        names.base_classes.insert(base, name);
        return Section::Class(base);
    }
    match entry(line, 4) {
        Some((vendor, name)) if vendors.contains(&vendor) => {
            names.vendors.insert(vendor, name);
            Section::Vendor(vendor)
        }
        _ => Section::Other,
    }
}

/// A number of so many hexadecimal digits, two blanks, and a name.
fn entry(line: &str, digits: usize) -> Option<(u16, String)> {
    let (number, name) = line.split_once("  ")?;
    let plain = number.len() == digits && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u16::from_str_radix(number, 16).ok().filter(|_| plain)?;
    let name: String = name.trim().chars().filter(|c| !c.is_control()).take(MOST_NAME).collect();
    (!name.is_empty()).then_some((number, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# comment
8086  Intel Corporation
\t10c9  82576 Gigabit Network Connection
\t\t8086 a03c  Gigabit ET Dual Port Server Adapter
\t10ca  82576 Virtual Function
1b36  Red Hat, Inc.
\t0010  QEMU NVM Express Controller
1000  Other
\t10c9  Other's

C 02  Network controller
\t00  Ethernet controller
C 01  Mass storage controller
\t08  Non-Volatile memory controller
\t\t02  NVM Express
";

    #[test]
    fn the_names_of_what_is_wanted_are_found() {
        let names = parse(TEXT, &[(0x8086, 0x10c9), (0x1b36, 0x0010), (0x1b36, 0x0011)].into());
        assert_eq!(names.vendor(0x8086), Some("Intel Corporation"));
        assert_eq!(names.device(0x8086, 0x10c9), Some("82576 Gigabit Network Connection"));
        assert_eq!(names.device(0x1b36, 0x0010), Some("QEMU NVM Express Controller"));
        assert_eq!(
            (names.device(0x1b36, 0x0011), names.device(0x1000, 0x10c9), names.vendor(0x1000)),
            (None, None, None)
        );
        assert_eq!(names.class(0x01_08_02), Some("Non-Volatile memory controller"));
        assert_eq!((names.class(0x02_80_00), names.class(0x03_00_00)), (Some("Network controller"), None));
    }

    #[test]
    fn names_are_short_and_printable() {
        let text = format!("8086  a\u{1b}[2J{}\n80867  x\n808  y\n+086  z\n8087  \n", "x".repeat(500));
        let names = parse(&text, &[(0x8086, 0), (0x8087, 0), (0x86, 0)].into());
        let name = names.vendor(0x8086).expect("a name");
        assert!(name.starts_with("a[2Jx") && name.chars().count() == MOST_NAME, "{name}");
        assert_eq!((names.vendor(0x8087), names.vendor(0x86)), (None, None));
    }

    #[test]
    fn without_a_file_nothing_has_a_name() {
        assert_eq!(read(Path::new("/nonexistent"), &[(0x8086, 0x10c9)].into()), PciNames::default());
    }
}
