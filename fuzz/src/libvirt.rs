//! XML of libvirt: of a domain, of the file that its driver keeps, and the mappings of its QEMU.

use crate::{expect_clear, expect_plain};
use std::collections::BTreeSet;
use vnuma_hypervisor::libvirt::mappings;
use vnuma_libvirt::{DomainXml, StatusFile};

/// What was understood is within its bounds; what was not is refused by name.
pub fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match DomainXml::parse("fuzz\u{1b}", &text) {
        Ok(domain) => check(&domain),
        Err(error) => expect_clear(&error.to_string()),
    }
    match StatusFile::parse("fuzz\u{1b}", &text) {
        Ok(status) => {
            assert!(status.pid > 0 && status.vcpus.values().all(|tid| *tid > 0) && !status.uuid.is_empty());
            assert!(status.vcpus.len() <= 8192 && status.sockets.len() <= 64);
        }
        Err(error) => expect_clear(&error.to_string()),
    }
    let nodes = [(0, 64 << 20), (1, 64 << 20), (7, 4096)];
    let found = mappings::find(&nodes, &text);
    let places: BTreeSet<u64> = found.values().copied().collect();
    assert_eq!(places.len(), found.len(), "two guest nodes in one place");
}

fn check(domain: &DomainXml) {
    assert!((1..=8192).contains(&domain.max_vcpus) && domain.cells.len() <= 128);
    assert!(domain.cells.windows(2).all(|pair| pair[0].id < pair[1].id));
    let nodes = (0..domain.max_vcpus).filter(|vcpu| domain.cell_of(*vcpu).is_some()).count();
    assert_eq!(nodes, domain.cells.iter().map(|cell| cell.vcpus.len()).sum::<usize>());
    domain.host_devices.iter().for_each(|device| expect_plain(&device.host));
    assert!(
        domain
            .vcpu_pins
            .values()
            .chain(&domain.cpuset)
            .chain(&domain.emulator_pin)
            .all(|set| !set.is_empty())
    );
}
