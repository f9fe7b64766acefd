//! Paths of the interface.

/// The host.
pub const HARDWARE: &str = "/v1/hardware";
/// PCI functions and who has them.
pub const DEVICES: &str = "/v1/devices";
/// What is free on each node.
pub const CAPACITY: &str = "/v1/capacity";
/// The daemon itself.
pub const DAEMON: &str = "/v1/daemon";
/// All VMs.
pub const VMS: &str = "/v1/vms";
/// How the vCPUs of all VMs are scheduled.
pub const POLICIES: &str = "/v1/policies";
/// Reservations, and placements of VMs that are to be started.
pub const PLACEMENTS: &str = "/v1/placements";
/// What the policies are given, once a period.
pub const OBSERVATIONS: &str = "/v1/observations";
/// Events as they happen.
pub const WATCH: &str = "/v1/watch";

/// Metrics for Prometheus.
pub const METRICS: &str = "/metrics";

/// The description of the interface, as OpenAPI has it.
pub const OPENAPI: &str = "/openapi.json";

/// Path of a VM, or of an `action` on it. Bytes of the name that a path cannot hold are escaped.
pub fn vm_path(name: &str, action: Option<&str>) -> String {
    path_of(VMS, name, action)
}

pub(crate) fn path_of(all: &str, name: &str, action: Option<&str>) -> String {
    let mut path = format!("{all}/");
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~') {
            path.push(byte.into());
        } else {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    if let Some(action) = action {
        path.push('/');
        path.push_str(action);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place_in_the_path() {
        assert_eq!(vm_path("web-1", None), "/v1/vms/web-1");
        assert_eq!(vm_path("web-1", Some("move")), "/v1/vms/web-1/move");
        assert_eq!(vm_path("../a b?c#d/é", Some("move")), "/v1/vms/%2E%2E%2Fa%20b%3Fc%23d%2F%C3%A9/move");
    }
}
