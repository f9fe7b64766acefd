//! AppArmor: may QEMUs of libvirt connect to vnumad's sockets, by which they get the channel's memory?
//!
//! libvirt makes a profile for each domain, of a template that includes an abstraction for all of them. Newer ones include what is in
//! a directory besides, where the package has its rule; older ones a file that is the operator's.

use crate::doctor::{Check, Level};
use std::path::Path;
use vnuma_api::{ChannelState, Vm};
use vnuma_process::apparmor;

/// Where vnumad's sockets are by default. Another `libvirt.socket_directory` is not known here.
pub const DIRECTORY: &str = "/run/vnuma/libvirt";
/// What has to be allowed.
pub const RULE: &str = "/run/vnuma/libvirt/*.sock rw,";
/// Such a socket. Its name is the number of QEMU's process.
const SOCKET: &str = "/run/vnuma/libvirt/1.sock";

/// The profile of a process that keeps it from these sockets.
pub fn of_process(pid: i32) -> Option<String> {
    apparmor::profile(pid).filter(|profile| is_denied(Path::new("/"), profile))
}

/// Does a profile keep its processes from these sockets? Not, where the kernel does not say.
pub fn is_denied(root: &Path, profile: &str) -> bool {
    apparmor::may_connect(root, profile, SOCKET) == Some(false)
}

/// A check of each VM of libvirt that could not be attached. `denied` is [`of_process`].
pub fn checks(vms: &[Vm], denied: &dyn Fn(i32) -> Option<String>) -> Vec<Check> {
    let without = vms.iter().filter(|vm| vm.backend == "libvirt" && vm.channel == ChannelState::None);
    let check = |vm: &Vm| {
        let profile = denied(vm.pid?)?;
        let check = Check::lower(
            Level::Missing,
            "apparmor",
            "denied",
            format!(
                "AppArmor's profile of its QEMU, {profile}, does not let it connect to vnumad's socket: it cannot be attached"
            ),
            format!(
                "vnumactl setup --apply, which allows {DIRECTORY}: another libvirt.socket_directory needs a rule of your own \
                 (docs/libvirt.md#apparmor)"
            ),
        );
        Some(Check { vm: Some(vm.name.clone()), ..check })
    };
    without.filter_map(check).collect()
}
