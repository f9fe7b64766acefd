//! vCPUs of a VM that does not answer, as the kernel shows them.
//!
//! KVM names the thread and the APIC id of each vCPU in debugfs
//! (`/sys/kernel/debug/kvm/PID-FD/vcpuAPIC/pid`). Where that is not to be had, QEMU's threads may
//! show by their names which vCPU they run (`CPU 3/KVM`, with `-name NAME,debug-threads=on`); that is
//! an index, and the APIC id can be another number.

use crate::process::Process;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    path::Path,
};
use vnuma_model::Vcpu;
use vnuma_process::procfs;

/// Where KVM shows its VMs.
pub(crate) const KVM: &str = "/sys/kernel/debug/kvm";

/// Most threads, vCPUs or VMs read.
const MAX_ENTRIES: usize = 8192;

/// Numbers and names of threads are shorter.
const FILE_LIMIT: u64 = 64;

/// vCPUs that were seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedVcpus {
    /// In rising order of APIC id; the nodes are not known.
    pub vcpus: Vec<Vcpu>,
    /// The APIC ids are KVM's own. If not, they are the numbers in the threads' names, and may be wrong.
    pub certain: bool,
}

/// The vCPUs of a process; its own threads only.
pub(crate) fn of(process: &Process) -> Option<ObservedVcpus> {
    if !process.is_certain() {
        return None;
    }
    let own = |tids: &BTreeMap<u32, i32>| tids.values().all(|&tid| process.has_thread(tid));
    let by_kvm = by_kvm(Path::new(KVM), process.pid()).filter(own);
    let certain = by_kvm.is_some();
    let tids = by_kvm.or_else(|| by_name(process.pid()).filter(own))?;
    let vcpu = |(number, tid)| Vcpu { index: number, apic_id: number, boot_node: None, tid };
    Some(ObservedVcpus { vcpus: tids.into_iter().map(vcpu).collect(), certain })
}

/// Threads by APIC id, from KVM. `None` unless KVM shows all vCPUs: one that never ran has no thread yet.
pub(crate) fn by_kvm(kvm: &Path, pid: i32) -> Option<BTreeMap<u32, i32>> {
    let own = format!("{pid}-");
    let mut vms = fs::read_dir(kvm).ok()?.take(MAX_ENTRIES).flatten();
    let vm = vms.find(|vm| vm.file_name().to_string_lossy().starts_with(&own))?;
    let mut tids = BTreeMap::new();
    for entry in fs::read_dir(vm.path()).ok()?.take(MAX_ENTRIES).flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("vcpu")?.parse().ok());
        let Some(apic_id) = number else { continue };
        let tid = read(&entry.path().join("pid"))?.trim().parse().ok().filter(|&tid| tid > 0)?;
        tids.insert(apic_id, tid);
    }
    (!tids.is_empty()).then_some(tids)
}

/// Threads by index, from their names. `None` if there are none, or two have one index.
pub(crate) fn by_name(pid: i32) -> Option<BTreeMap<u32, i32>> {
    let mut tids = BTreeMap::new();
    for tid in procfs::threads(pid).ok()? {
        // One that has ended meanwhile is no vCPU.
        let Ok(name) = procfs::read_thread(pid, tid, "comm", FILE_LIMIT) else { continue };
        let Some(index) = parse_name(&name) else { continue };
        if tids.insert(index, tid).is_some() {
            return None;
        }
    }
    (!tids.is_empty()).then_some(tids)
}

/// Index of the vCPU that a thread of this name runs.
pub fn parse_name(name: &str) -> Option<u32> {
    let name = name.trim_end().strip_prefix("CPU ")?;
    // As QEMU calls them with hardware and with software.
    let index = name.strip_suffix("/KVM").or_else(|| name.strip_suffix("/TCG"))?;
    index.bytes().all(|byte| byte.is_ascii_digit()).then(|| index.parse().ok())?
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(FILE_LIMIT).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_vcpu_threads_are_taken() {
        for (name, index) in [
            ("CPU 0/KVM\n", Some(0)),
            ("CPU 17/TCG", Some(17)),
            ("CPU +1/KVM", None),
            ("CPU /KVM", None),
            ("CPU 99999999999/KVM", None),
            ("CPU 1/KVMx", None),
            ("qemu-system-x86", None),
        ] {
            assert_eq!(parse_name(name), index, "{name}");
        }
    }

    #[test]
    fn kvm_tells_threads_by_apic_id() {
        let kvm = tempfile::tempdir().unwrap();
        let write = |vm: &str, vcpu: &str, tid: &str| {
            let directory = kvm.path().join(vm).join(vcpu);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("pid"), tid).unwrap();
        };
        assert_eq!(by_kvm(kvm.path(), 7), None);
        write("70-11", "vcpu0", "1\n");
        write("7-12", "vcpu0", "71\n");
        write("7-12", "vcpu4", "72\n");
        fs::write(kvm.path().join("7-12/halt_exits"), "9").unwrap();
        assert_eq!(by_kvm(kvm.path(), 7), Some(BTreeMap::from([(0, 71), (4, 72)])));
        for wrong in ["0", "-3", "x", ""] {
            write("7-12", "vcpu5", wrong);
            assert_eq!(by_kvm(kvm.path(), 7), None, "{wrong:?}");
        }
    }
}
