//! The network between servers: Ethernet frames over Unix sockets from QEMU to QEMU, so that it takes no address of
//! this machine. The first server has a hub in its QEMU that the others are connected to. In each server a bridge has the
//! card of that network and the server's address, 10.77.0.1/16 and on; VMs join it.

use std::sync::Arc;

use crate::run_directory::RunDirectory;

/// Addresses of VMs have the server's number in their third part.
pub(crate) const MOST_SERVERS: usize = 16;
/// Number of the hub; those of a profile's devices are smaller.
pub(crate) const HUB: usize = 100;

/// A server in a network.
#[derive(Clone)]
pub(crate) struct Member {
    /// Where the sockets are.
    directory: Arc<RunDirectory>,
    number: usize,
    servers: usize,
}

impl Member {
    /// One of some servers, numbered from 0.
    pub(crate) fn new(directory: Arc<RunDirectory>, number: usize, servers: usize) -> Self {
        Self { directory, number, servers }
    }

    /// Arguments for its QEMU.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        let socket = |number: usize| {
            let path = self.directory.path().join(format!("link{number}"));
            format!("addr.type=unix,addr.path={}", path.display().to_string().replace(',', ",,"))
        };
        if self.number == 0 {
            option("-netdev", format!("hubport,id=lan,hubid={HUB}"));
            for other in 1..self.servers {
                option("-netdev", format!("stream,id=link{other},server=on,{}", socket(other)));
                option("-netdev", format!("hubport,id=hub{other},hubid={HUB},netdev=link{other}"));
            }
        } else {
            // The first server may not have come that far.
            let retry = "reconnect-ms=200";
            option("-netdev", format!("stream,id=lan,server=off,{retry},{}", socket(self.number)));
        }
        let mac = format!("52:54:00:77:00:{:02x}", self.number + 1);
        option("-device", format!("virtio-net-pci,bus=pcie.0,netdev=lan,mac={mac},romfile="));
        arguments
    }

    /// What its init reads on the kernel's command line.
    pub(crate) fn words(&self) -> String {
        format!(" vnuma.server={}/{}", self.number, self.servers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_directory::run_directory;

    #[test]
    fn the_first_server_has_a_link_for_each_other() {
        let directory = Arc::new(run_directory().unwrap());
        let line = |number| Member::new(directory.clone(), number, 3).arguments().join(" ");
        let hub = line(0);
        for part in ["stream,id=link1,server=on,", "stream,id=link2,server=on,", "hubid=100,netdev=link2"] {
            assert!(hub.contains(part), "{part} is not in {hub}");
        }
        let path = directory.path().join("link2").display().to_string();
        let other = line(2);
        assert!(hub.contains(&path) && other.contains(&path), "{hub}\n{other}");
        assert!(other.contains("server=off") && other.contains("mac=52:54:00:77:00:03"), "{other}");
    }
}
