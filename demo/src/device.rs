//! At the end the static VM gets a device that is passed through, and is attached. Before that its guest's kernel knows no node of
//! the device, and takes buffers for it wherever it runs; then it takes them on the device's node.
//!
//! The checker shares nothing with vnumad here either: the server's kernel says on which node the device is, and
//! `move_pages(2)` on which the buffers are.

use crate::buffers::{Buffers, MAX_PAGES};
use crate::checker::GUEST_PROGRAM;
use crate::pages::Pages;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt;
use vnuma_scenario::{HANG_LIMIT, HostDevice, Monitor, Vm, device_of_class, pass_through, wait_for};

/// Of an NVMe disk.
const CLASS: &str = "0x010802";
/// The port that the channel leaves free.
const PORT: &str = "vnuma1";
/// What a guest's kernel says of a device whose node it does not know.
const NO_NODE: i64 = -1;

/// Gives the server's disk to VFIO.
pub fn prepare() -> Result<HostDevice> {
    let device = device_of_class(CLASS)?;
    ensure!(device.node.is_some(), "{}: the server's kernel knows no node of it", device.address);
    pass_through(&device.address)?;
    Ok(device)
}

/// Plugs it into the VM; what the guest makes of it. `attach` tells the guest; what it makes of it then.
pub fn told(vm: &Vm, device: &HostDevice, attach: impl FnOnce() -> Result<()>) -> Result<Told> {
    let host_node = device.node.context("a device without a node")?;
    // A monitor has one client at a time.
    vm.plug("disk", &device.address, PORT)?;
    let mut pages = Pages::new(vm.pid, Monitor::connect(&vm.monitor())?);
    let mut state = |wanted: fn(i64) -> bool| -> Result<State> {
        let mut last = None;
        wait_for("the guest to know its device", HANG_LIMIT, || {
            last = taken(vm)?;
            Ok(last.as_ref().is_some_and(|buffers| wanted(buffers.node)))
        })
        .with_context(|| format!("{last:?}"))?;
        let buffers = last.context("no device")?;
        State::of(&buffers, host_node, &pages.nodes(&buffers.pages)?)
    };
    let before = state(|_| true)?;
    attach()?;
    let after = state(|node| node != NO_NODE)?;
    Ok(Told { host_node, before, after })
}

/// None if the guest has no such device yet.
fn taken(vm: &Vm) -> Result<Option<Buffers>> {
    let text = vm.exec(&[GUEST_PROGRAM, "buffers", "--class", CLASS])?;
    let buffers: Option<Buffers> =
        serde_json::from_str(&text).with_context(|| format!("the program in {}", vm.name))?;
    let count = buffers.as_ref().map_or(0, |buffers| buffers.pages.len());
    ensure!(count <= MAX_PAGES, "the program in {} names {count} pages", vm.name);
    Ok(buffers)
}

/// What a guest makes of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct State {
    /// Node of the device by the guest's kernel; -1 for none.
    pub guest_node: i64,
    /// Buffers that were looked up, in pages.
    pub buffers: usize,
    /// Share of them on the host node that the device is on.
    pub local_share: f64,
}

impl State {
    /// `nodes`: the host nodes of the buffers.
    fn of(buffers: &Buffers, host_node: u32, nodes: &[Option<u32>]) -> Result<Self> {
        ensure!(!nodes.is_empty(), "the guest has taken no buffers");
        let local = nodes.iter().filter(|node| **node == Some(host_node)).count();
        let local_share = local as f64 / nodes.len() as f64;
        Ok(Self { guest_node: buffers.node, buffers: nodes.len(), local_share })
    }
}

/// What a guest knows of its device before and after the node is published.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Told {
    /// Host node of the device, by the server's kernel.
    pub host_node: u32,
    pub before: State,
    pub after: State,
}

impl Told {
    /// An error unless the guest knew nothing before, and all afterwards.
    pub fn check(&self) -> Result<()> {
        let Self { before, after, .. } = self;
        ensure!(before.guest_node == NO_NODE, "the guest knew a node of its device already: {before:?}");
        ensure!(before.local_share < 1.0, "all buffers were on the device's node already: {before:?}");
        ensure!(after.guest_node != NO_NODE && after.local_share == 1.0, "told of its device: {after:?}");
        Ok(())
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row =
            |name: &str, before: &str, after: &str| writeln!(f, "  {name:<44} {before:>14} {after:>14}");
        let node = |state: &State| match state.guest_node {
            NO_NODE => "unknown".to_owned(),
            node => node.to_string(),
        };
        let percent = |state: &State| format!("{:.2} %", state.local_share * 100.0);
        row("the static VM with a disk, then attached", "before", "after")?;
        row("node of the disk, as its guest knows it", &node(&self.before), &node(&self.after))?;
        row("buffers for the disk on its host node", &percent(&self.before), &percent(&self.after))?;
        writeln!(f, "  (passed through by VFIO, on host node {})", self.host_node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(guest_node: i64, nodes: &[Option<u32>]) -> State {
        let buffers = Buffers { node: guest_node, pages: vec![4096; nodes.len()] };
        State::of(&buffers, 1, nodes).unwrap()
    }

    #[test]
    fn buffers_are_local_on_the_host_node_of_the_device() {
        let before = state(-1, &[Some(0), Some(1), Some(2), None]);
        assert_eq!((before.local_share, before.buffers), (0.25, 4));
        let after = state(3, &[Some(1); 4]);
        let told = Told { host_node: 1, before, after };
        told.check().unwrap();
        let text = told.to_string();
        for part in ["unknown", " 3\n", "25.00 %", "100.00 %", "host node 1"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_guest_that_learns_nothing_shows_nothing() {
        let (lost, found) = (state(-1, &[Some(0), Some(1)]), state(1, &[Some(1); 2]));
        let check = |before, after| Told { host_node: 1, before, after }.check();
        check(lost, found).unwrap();
        for (before, after) in [
            (lost, lost),
            (found, found),
            (lost, state(0, &[Some(0); 2])),
            (lost, state(1, &[Some(1), None])),
            (state(-1, &[Some(1); 2]), found),
        ] {
            assert!(check(before, after).is_err(), "{before:?} {after:?}");
        }
        assert!(State::of(&Buffers { node: 1, pages: Vec::new() }, 1, &[]).is_err());
    }
}
