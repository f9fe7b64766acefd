//! QMP commands and what is read of their answers: only what is used here, as versions of QEMU differ in the rest.

use serde::{Deserialize, Serialize, Serializer, de::DeserializeOwned};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A command: what it is serialized to are its arguments.
pub(crate) trait Command: Serialize {
    /// Its answer.
    type Answer: DeserializeOwned;
    /// As QMP calls it.
    const NAME: &'static str;
}

/// An answer that says no more than that it was done.
#[derive(Debug, Deserialize)]
pub(crate) struct Empty {}

/// Declares a command: its QMP name, arguments as serialized (none between braces, or names of texts), and type of the answer.
macro_rules! command {
    ($type:ident {}, $name:literal, $answer:ty) => {
        #[derive(Serialize)]
        pub(crate) struct $type {}
        command!($type, $name, $answer);
    };
    ($(#[$doc:meta])* $type:ident { $($field:ident),+ }, $name:literal, $answer:ty) => {
        $(#[$doc])*
        #[derive(Serialize)]
        pub(crate) struct $type<'a> {
            $(pub(crate) $field: &'a str,)+
        }
        command!($type<'_>, $name, $answer);
    };
    ($type:ty, $name:expr, $answer:ty) => {
        impl Command for $type {
            type Answer = $answer;
            const NAME: &'static str = $name;
        }
    };
}

command!(QmpCapabilities {}, "qmp_capabilities", Empty);

command!(QueryName {}, "query-name", Name);

/// The name that QEMU was given, if any.
#[derive(Debug, Deserialize)]
pub(crate) struct Name {
    pub(crate) name: Option<String>,
}

/// A line for the human monitor. The answer is text.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HumanMonitorCommand<'a> {
    pub(crate) command_line: &'a str,
}
command!(HumanMonitorCommand<'_>, "human-monitor-command", String);

command!(QueryStatus {}, "query-status", Status);

#[derive(Debug, Deserialize)]
pub(crate) struct Status {
    pub(crate) status: String,
}

command!(QueryCpusFast {}, "query-cpus-fast", Vec<CpuInfo>);

/// A vCPU that is plugged.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CpuInfo {
    pub(crate) cpu_index: i64,
    pub(crate) qom_path: String,
    pub(crate) thread_id: i64,
    #[serde(default)]
    pub(crate) props: CpuProps,
}

/// Where it is plugged.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CpuProps {
    pub(crate) node_id: Option<i64>,
}

command!(QueryHotpluggableCpus {}, "query-hotpluggable-cpus", Vec<CpuSlot>);

/// A place where a vCPU is or can be plugged.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CpuSlot {
    /// What to plug.
    #[serde(rename = "type")]
    pub(crate) driver: String,
    /// Numbers of socket, core, node and so on: properties of the device to plug.
    props: BTreeMap<String, u32>,
    /// The vCPU that is there.
    qom_path: Option<String>,
}

impl CpuSlot {
    /// The guest node that it belongs to, if nothing is plugged.
    pub(crate) fn spare_node(&self) -> Option<u32> {
        self.props.get("node-id").copied().filter(|_| self.qom_path.is_none())
    }

    /// A name of its own for the vCPU that is plugged there.
    pub(crate) fn id(&self) -> String {
        let places = self.props.iter().filter(|(name, _)| *name != "node-id");
        places.fold("vnuma-vcpu".to_owned(), |id, (_, number)| format!("{id}-{number}"))
    }
}

/// A vCPU.
pub(crate) struct DeviceAddCpu<'a> {
    pub(crate) id: &'a str,
    pub(crate) slot: &'a CpuSlot,
}
command!(DeviceAddCpu<'_>, "device_add", Empty);

impl Serialize for DeviceAddCpu<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Last, so that no name of a property takes the place of these two.
        let mut arguments = json!(self.slot.props);
        arguments["driver"] = json!(self.slot.driver);
        arguments["id"] = json!(self.id);
        arguments.serialize(serializer)
    }
}

command!(QueryAcpiOspmStatus {}, "query-acpi-ospm-status", Vec<AcpiStatus>);

/// What the guest reported last of a slot (`_OST`).
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AcpiStatus {
    pub(crate) slot: String,
    pub(crate) slot_type: String,
    pub(crate) source: i64,
    pub(crate) status: i64,
}

command!(QueryMemdev {}, "query-memdev", Vec<Memdev>);

/// A memory backend.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Memdev {
    /// Absent for a backend that QEMU made for itself, in some versions.
    pub(crate) id: Option<String>,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) policy: String,
    #[serde(default)]
    pub(crate) host_nodes: Vec<i64>,
}

command!(QueryMemoryDevices {}, "query-memory-devices", Vec<MemoryDeviceInfo>);

/// A memory device. Versions of QEMU differ in the types.
#[derive(Debug, Deserialize)]
pub(crate) struct MemoryDeviceInfo {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) data: Value,
}

/// A virtio-mem device.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct VirtioMem {
    pub(crate) id: Option<String>,
    pub(crate) requested_size: u64,
    pub(crate) size: u64,
    pub(crate) max_size: u64,
    pub(crate) block_size: u64,
    pub(crate) node: i64,
    /// Path of its backend.
    pub(crate) memdev: String,
}

impl VirtioMem {
    pub(crate) fn of(data: &Value) -> Result<Self, String> {
        Self::deserialize(data).map_err(|error| error.to_string())
    }
}

/// A number, to be set.
#[derive(Serialize)]
pub(crate) struct QomSet<'a> {
    pub(crate) path: &'a str,
    pub(crate) property: &'a str,
    pub(crate) value: u64,
}
command!(QomSet<'_>, "qom-set", Empty);

command!(QueryPci {}, "query-pci", Vec<PciBus>);

/// A root bus.
#[derive(Debug, Deserialize)]
pub(crate) struct PciBus {
    pub(crate) devices: Vec<PciFunction>,
}

/// A PCI function, as the guest sees it now.
#[derive(Debug, Deserialize)]
pub(crate) struct PciFunction {
    pub(crate) bus: i64,
    pub(crate) slot: i64,
    pub(crate) function: i64,
    /// Empty for one that was given no id.
    #[serde(default)]
    pub(crate) qdev_id: String,
    pub(crate) pci_bridge: Option<PciBridge>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PciBridge {
    pub(crate) bus: PciBridgeBus,
    /// Absent if there are none.
    #[serde(default)]
    pub(crate) devices: Vec<PciFunction>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PciBridgeBus {
    /// Number of the bus behind it; 0 until the guest's firmware has given it one.
    pub(crate) secondary: i64,
}

command!(
    /// The properties of an object.
    QomList { path }, "qom-list", Vec<Property>
);

/// A property of an object. Those whose type is `child<...>` are objects themselves.
#[derive(Debug, Deserialize)]
pub(crate) struct Property {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
}

command!(
    /// A property of an object, of whatever type.
    QomGet { path, property }, "qom-get", Value
);

command!(
    /// Receives a descriptor that is sent with it, and keeps it under a name.
    GetFd { fdname }, "getfd", Empty
);

command!(
    /// Closes a descriptor by its name.
    CloseFd { fdname }, "closefd", Empty
);

/// A character device over a connected socket that QEMU was given under a name.
#[derive(Serialize)]
pub(crate) struct ChardevAdd<'a> {
    id: &'a str,
    backend: Value,
}
command!(ChardevAdd<'_>, "chardev-add", Value);

impl<'a> ChardevAdd<'a> {
    /// One that does nothing.
    pub(crate) fn null(id: &'a str) -> Self {
        Self { id, backend: json!({"type": "null", "data": {}}) }
    }

    pub(crate) fn over_fd(id: &'a str, fd_name: &str) -> Self {
        let addr = json!({"type": "fd", "data": {"str": fd_name}});
        Self { id, backend: json!({"type": "socket", "data": {"addr": addr, "server": false}}) }
    }
}

command!(ChardevRemove { id }, "chardev-remove", Empty);

command!(
    /// Asks the guest to let go of a device, by its id or path.
    DeviceDel { id }, "device_del", Empty
);

/// The topology channel's device.
#[derive(Serialize)]
pub(crate) struct DeviceAddChannel<'a> {
    driver: &'static str,
    id: &'a str,
    chardev: &'a str,
    bus: &'a str,
    vectors: u32,
    /// With `off`, the device would block live migration.
    master: &'static str,
}
command!(DeviceAddChannel<'_>, "device_add", Empty);

/// QEMU's type of the channel's device.
pub(crate) const CHANNEL_DRIVER: &str = "ivshmem-doorbell";

impl<'a> DeviceAddChannel<'a> {
    pub(crate) fn new(id: &'a str, chardev: &'a str, bus: &'a str, vectors: u32) -> Self {
        Self { driver: CHANNEL_DRIVER, id, chardev, bus, vectors, master: "on" }
    }
}

/// What a migration does beside sending memory.
#[derive(Serialize)]
pub(crate) struct MigrateSetCapabilities {
    capabilities: Vec<Value>,
}
command!(MigrateSetCapabilities, "migrate-set-capabilities", Empty);

impl MigrateSetCapabilities {
    pub(crate) fn of(capabilities: &[(&str, bool)]) -> Self {
        let state = |(name, state): &(&str, bool)| json!({"capability": name, "state": state});
        Self { capabilities: capabilities.iter().map(state).collect() }
    }
}

#[derive(Serialize)]
pub(crate) struct Migrate<'a> {
    pub(crate) uri: &'a str,
}
command!(Migrate<'_>, crate::error::MIGRATE, Empty);

command!(MigrateCancel {}, "migrate_cancel", Empty);

command!(MigrateStartPostcopy {}, "migrate-start-postcopy", Empty);

command!(QueryMigrate {}, "query-migrate", MigrationInfo);

/// The last migration. Versions of QEMU differ in the states.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MigrationInfo {
    /// Absent if there was none.
    pub(crate) status: Option<String>,
    pub(crate) ram: Option<MigrationRam>,
    pub(crate) downtime: Option<i64>,
    pub(crate) error_desc: Option<String>,
}

/// Its memory, bytes.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct MigrationRam {
    pub(crate) transferred: i64,
    pub(crate) remaining: i64,
    pub(crate) total: i64,
    pub(crate) dirty_sync_count: i64,
}
