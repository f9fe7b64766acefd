//! Where lab-vm runs and finds its files: on the lab's server at fixed places, elsewhere below the folder that the
//! environment variable `LAB_VM_DIRECTORY` names.
//!
//! ```text
//!                      on the server          elsewhere, below $LAB_VM_DIRECTORY
//! its VMs              /run/lab-vm            vm
//! links to monitors    /run/vnuma/qmp         qmp
//! kernels, RAM disks   /run/lab/kernels       lab/kernels
//! root disk            /dev/vda               lab/root.erofs
//! QEMU                 the system's           lab/tree: a root file system with it and its libraries
//! ```

use std::fs;
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "LAB_VM_DIRECTORY";
const QEMU: &str = "qemu-system-x86_64";
/// On the command line of the server's kernel.
const SERVER_WORD: &str = "vnuma.role=server";

fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).filter(|directory| !directory.is_empty()).map(PathBuf::from)
}

fn at(on_server: &str, elsewhere: &str) -> PathBuf {
    directory().map_or_else(|| on_server.into(), |directory| directory.join(elsewhere))
}

/// Directories of the VMs.
pub fn vms() -> PathBuf {
    at("/run/lab-vm", "vm")
}

/// Links to the monitors of VMs that are up.
pub fn qmp_links() -> PathBuf {
    at("/run/vnuma/qmp", "qmp")
}

/// Directories of the guests' kernels.
pub fn kernels() -> PathBuf {
    at("/run/lab/kernels", "lab/kernels")
}

/// The guests' root disk.
pub fn root_disk() -> PathBuf {
    at("/dev/vda", "lab/root.erofs")
}

/// The lowest context id of AF_VSOCK for a VM. 0 to 2 are reserved, and elsewhere the VMs of others begin there.
pub fn first_cid() -> u32 {
    if directory().is_none() { 3 } else { 0x564e_0000 }
}

/// Whether this is the lab's server, by the command line of its kernel.
pub fn is_lab_server() -> bool {
    fs::read_to_string("/proc/cmdline").is_ok_and(|words| words.split_whitespace().any(|w| w == SERVER_WORD))
}

/// The words that start QEMU.
pub fn qemu() -> Vec<String> {
    directory().map_or_else(|| vec![QEMU.into()], |directory| qemu_of(&directory.join("lab/tree")))
}

/// QEMU of a root file system, run with its libraries on this machine's kernel.
fn qemu_of(tree: &Path) -> Vec<String> {
    let path = |name: &str| tree.join(name).display().to_string();
    let libraries = path("usr/lib/x86_64-linux-gnu");
    let modules = format!("QEMU_MODULE_DIR={libraries}/qemu");
    let loader = path("usr/lib64/ld-linux-x86-64.so.2");
    let mut words = vec!["env".to_owned(), modules, loader];
    words.extend(["--library-path", &libraries, "--argv0", QEMU].map(str::to_owned));
    words.push(path(&format!("usr/bin/{QEMU}")));
    for data in ["usr/share/seabios", "usr/share/qemu"] {
        words.extend(["-L".to_owned(), path(data)]);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_that_of_the_tree_with_its_libraries() {
        let words = qemu_of(Path::new("/t")).join(" ");
        assert_eq!(
            words,
            "env QEMU_MODULE_DIR=/t/usr/lib/x86_64-linux-gnu/qemu /t/usr/lib64/ld-linux-x86-64.so.2 --library-path \
             /t/usr/lib/x86_64-linux-gnu --argv0 qemu-system-x86_64 /t/usr/bin/qemu-system-x86_64 \
             -L /t/usr/share/seabios -L /t/usr/share/qemu"
        );
    }
}
