//! PCI functions of the host that a VM has, and the addresses that its guest has for them.
//!
//! ```text
//!  /machine/peripheral/ID      type vfio-pci, property `host`  ──▶ function of the host
//!  query-pci                   `qdev_id` ID                    ──▶ bus, device, function in the guest
//!  /machine/peripheral-anon/…  properties `addr`, `parent_bus` ──▶ the same for devices without an id
//! ```
//!
//! The guest's firmware and kernel number the buses, so an address can change when the guest boots. QEMU knows no PCI domain but
//! 0.

use crate::{
    VmError,
    check::{check_length, value},
    client::Client,
    commands::{PciBus, PciFunction, QomGet, QomList, QueryPci},
};
use serde_json::Value;
use std::collections::BTreeMap;
use vnuma_model::{PciAddress, VmDevice, is_pci_address};

/// Devices with an id, and those without.
const PERIPHERAL: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// QEMU's types of a device that is passed through begin so.
const PASSED_THROUGH: &str = "child<vfio-pci";
/// Buses of which every machine has one, as bus 0.
const ROOT_BUSES: [&str; 2] = ["pcie.0", "pci.0"];
/// Most devices of a VM that are looked at.
const MAX_DEVICES: usize = 256;

/// The devices of a VM. A QEMU that refuses to tell has none.
pub(crate) fn devices(client: &mut Client) -> Result<Vec<VmDevice>, VmError> {
    let mut found = Vec::new();
    for (container, with_id) in PERIPHERAL.into_iter().zip([true, false]) {
        let Some(children) = told(client.execute(&QomList { path: container }))? else {
            continue;
        };
        for child in children.into_iter().filter(|child| child.kind.starts_with(PASSED_THROUGH)) {
            check_length(client, "qom-list", "name", &child.name)?;
            found.push((child.name, with_id));
        }
    }
    if found.is_empty() {
        return Ok(Vec::new());
    }
    if found.len() > MAX_DEVICES {
        let reason = format!("more than {MAX_DEVICES} devices that are passed through");
        return Err(value(client, "qom-list", "the answer", found.len(), reason));
    }
    let functions =
        told(client.execute(&QueryPci {}))?.map(|buses| Functions::of(&buses)).unwrap_or_default();
    let mut devices = Vec::new();
    for (name, with_id) in found {
        let path = format!("{}/{name}", PERIPHERAL[usize::from(!with_id)]);
        let Some(host) = host_address(client, &path)? else { continue };
        let guest = if with_id { functions.address(&name) } else { anonymous(client, &path, &functions)? };
        devices.push(VmDevice { host, guest });
    }
    Ok(devices)
}

/// An answer, unless QEMU refused to give one: it may have no such object or command.
fn told<T>(answer: Result<T, VmError>) -> Result<Option<T>, VmError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(VmError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A property that is text, if there is one.
fn text(client: &mut Client, path: &str, property: &str) -> Result<String, VmError> {
    let found = told(client.execute(&QomGet { path, property }))?;
    Ok(found.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned())
}

/// The function of the host that is behind a device. It is given by its address or by its directory below `/sys`.
fn host_address(client: &mut Client, path: &str) -> Result<Option<String>, VmError> {
    let host = text(client, path, "host")?;
    if is_pci_address(&host) {
        return Ok(Some(host));
    }
    let directory = text(client, path, "sysfsdev")?;
    let name = directory.rsplit('/').next().unwrap_or_default();
    let known = is_pci_address(name);
    if !known {
        tracing::debug!(vm = client.vm(), path, "it is not known which device of the host this is");
    }
    Ok(known.then(|| name.to_owned()))
}

/// The address of a device that has no id, by the bus that it is on.
fn anonymous(client: &mut Client, path: &str, functions: &Functions) -> Result<Option<PciAddress>, VmError> {
    let place = told(client.execute(&QomGet { path, property: "addr" }))?;
    let Some(devfn) = place.as_ref().and_then(Value::as_u64).and_then(|place| u8::try_from(place).ok())
    else {
        return Ok(None);
    };
    let bus = text(client, path, "parent_bus")?;
    Ok(functions.bus(&bus).map(|bus| PciAddress { segment: 0, bus, devfn }))
}

/// What a guest's firmware made of the PCI functions that have an id.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Functions {
    addresses: BTreeMap<String, PciAddress>,
    /// The bus behind each bridge.
    secondary: BTreeMap<String, u8>,
}

impl Functions {
    /// From the answer to `query-pci`.
    pub fn parse(answer: &str) -> serde_json::Result<Self> {
        Ok(Self::of(&serde_json::from_str::<Vec<PciBus>>(answer)?))
    }

    fn of(buses: &[PciBus]) -> Self {
        let mut functions = Self::default();
        buses.iter().for_each(|bus| functions.add(&bus.devices, false));
        functions
    }

    /// `behind`: they are behind a bridge. Until the firmware has numbered its bus, that is bus 0, too.
    fn add(&mut self, found: &[PciFunction], behind: bool) {
        for function in found {
            let numbers = (u8::try_from(function.bus), u8::try_from(function.slot), function.function);
            if let (Ok(bus), Ok(slot @ 0..32), low @ 0..8) = numbers
                && !function.qdev_id.is_empty()
                && !(behind && bus == 0)
            {
                let address = PciAddress { segment: 0, bus, devfn: slot << 3 | low as u8 };
                self.addresses.insert(function.qdev_id.clone(), address);
            }
            if let Some(bridge) = &function.pci_bridge {
                if let (Ok(bus @ 1..), false) =
                    (u8::try_from(bridge.bus.secondary), function.qdev_id.is_empty())
                {
                    self.secondary.insert(function.qdev_id.clone(), bus);
                }
                self.add(&bridge.devices, true);
            }
        }
    }

    fn address(&self, id: &str) -> Option<PciAddress> {
        self.addresses.get(id).copied()
    }

    /// The number of a bus, by its path: a root bus, or one behind a bridge with an id.
    fn bus(&self, path: &str) -> Option<u8> {
        let (owner, name) = path.rsplit_once('/')?;
        match owner.strip_prefix(PERIPHERAL[0]).and_then(|rest| rest.strip_prefix('/')) {
            Some(bridge) => self.secondary.get(bridge).copied(),
            None => ROOT_BUSES.contains(&name).then_some(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    /// As QEMU 10 tells it, with what does not matter here left out.
    fn answer() -> String {
        let function = |id: &str, bus, slot| {
            json!({"bus": bus, "slot": slot, "function": 0, "qdev_id": id, "id": {"device": 1, "vendor": 2},
                "class_info": {"class": 0, "desc": "x"}, "irq": 0, "regions": []})
        };
        let bridge = |id: &str, slot, secondary, devices: Vec<Value>| {
            let mut bridge = function(id, 0, slot);
            bridge["pci_bridge"] = json!({"bus": {"number": 0, "secondary": secondary, "subordinate": secondary},
                "devices": devices});
            bridge
        };
        let empty = json!({"bus": 0, "slot": 4, "function": 0, "qdev_id": "empty", "pci_bridge":
            {"bus": {"number": 0, "secondary": 3, "subordinate": 3}}});
        json!([{"bus": 0, "devices": [
            function("", 0, 0),
            function("disk", 0, 31),
            bridge("rp0", 1, 1, vec![function("nic", 1, 0)]),
            bridge("rp1", 2, 0, vec![function("early", 0, 0)]),
            empty,
        ]}, {"bus": 128, "devices": [function("far", 128, 5)]}])
        .to_string()
    }

    #[test]
    fn functions_are_found_behind_bridges() {
        let functions = Functions::parse(&answer()).unwrap();
        let address = |id: &str| functions.address(id).map(|address| address.to_string());
        assert_eq!(address("nic").as_deref(), Some("0000:01:00.0"));
        assert_eq!(address("disk").as_deref(), Some("0000:00:1f.0"));
        assert_eq!(address("far").as_deref(), Some("0000:80:05.0"));
        assert_eq!(address("early"), None, "its bus has no number yet");
        assert_eq!((address("none"), address("")), (None, None));
    }

    #[test]
    fn buses_are_found_by_their_path() {
        let functions = Functions::parse(&answer()).unwrap();
        for (path, bus) in [
            ("/machine/q35/pcihost/pcie.0", Some(0)),
            ("/machine/i440fx/pci.0", Some(0)),
            ("/machine/peripheral/rp0/rp0", Some(1)),
            ("/machine/peripheral/empty/pcie.9", Some(3)),
            ("/machine/peripheral/rp1/rp1", None),
            ("/machine/peripheral-anon/device[2]/pcie.1", None),
            ("/machine/unattached/device[3]/pxb", None),
            ("", None),
        ] {
            assert_eq!(functions.bus(path), bus, "{path}");
        }
    }

    proptest! {
        #[test]
        fn numbers_that_cannot_be_are_no_addresses(bus in any::<i64>(), slot in any::<i64>(), function in any::<i64>()) {
            let answer = json!([{"bus": 0, "devices": [{"bus": bus, "slot": slot, "function": function, "qdev_id": "a"}]}]);
            let functions = Functions::parse(&answer.to_string()).unwrap();
            let possible = (0..256).contains(&bus) && (0..32).contains(&slot) && (0..8).contains(&function);
            prop_assert_eq!(functions.address("a").is_some(), possible);
        }
    }
}
