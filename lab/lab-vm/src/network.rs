//! Cards of VMs in the network that connects the servers of the lab, see `lab/runner/src/network.rs`: a tap device in the
//! server's bridge for each.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Made by the server's init.
const BRIDGE: &str = "lab0";

/// A card.
pub struct Nic {
    /// Its tap device in the server.
    pub tap: String,
    /// Its hardware address.
    pub mac: String,
    /// The VM's address, with the length of the network's prefix.
    pub address: String,
}

fn tap(cid: u32) -> String {
    format!("vm{cid}")
}

impl Nic {
    /// The card of the VM with a context id.
    pub fn new(cid: u32) -> Result<Self> {
        let words = fs::read_to_string("/proc/cmdline").context("/proc/cmdline")?;
        let server = server(&words).context(
            "--network: this server is in no network (\"cargo xtask lab run --servers N\" makes one)",
        )?;
        Self::of(server, cid)
    }

    fn of(server: u8, cid: u32) -> Result<Self> {
        ensure!(cid < 255, "--network: there are too many VMs");
        let site = server + 1;
        let mac = format!("52:54:00:77:{site:02x}:{cid:02x}");
        Ok(Self { tap: tap(cid), mac, address: format!("10.77.{site}.{cid}/16") })
    }

    /// Makes the tap device and puts it into the bridge.
    pub fn add(&self) -> Result<()> {
        ip(&["tuntap", "add", "dev", &self.tap, "mode", "tap"])?;
        ip(&["link", "set", &self.tap, "master", BRIDGE, "up"])
    }
}

/// Removes the tap device of a VM, if it is there.
pub fn remove(cid: u32) -> Result<()> {
    let tap = tap(cid);
    if Path::new("/sys/class/net").join(&tap).exists() {
        ip(&["link", "delete", &tap])?;
    }
    Ok(())
}

/// The number of this server, from its kernel's command line: `vnuma.server=0/2` is the first of two.
fn server(words: &str) -> Option<u8> {
    let word = words.split_whitespace().find_map(|word| word.strip_prefix("vnuma.server="))?;
    word.split_once('/')?.0.parse().ok().filter(|&number| number < 254)
}

fn ip(arguments: &[&str]) -> Result<()> {
    let shown = || format!("ip {}", arguments.join(" "));
    let output = Command::new("ip").args(arguments).output().with_context(shown)?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", shown(), error.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_of_all_servers_have_addresses_of_their_own() {
        let nic = Nic::of(1, 3).unwrap();
        assert_eq!((nic.mac.as_str(), nic.address.as_str()), ("52:54:00:77:02:03", "10.77.2.3/16"));
        assert!(Nic::of(0, 255).is_err());
        assert_eq!(server("quiet vnuma.server=1/2 x"), Some(1));
        assert_eq!([server("quiet"), server("vnuma.server=x/2"), server("vnuma.server=254/255")], [None; 3]);
    }
}
