//! What control groups (cgroup v2) say of CPU time. Their creators choose their names.

use super::{SysfsError, parse, tree::Tree};
use std::path::{Path, PathBuf};

/// Where systemd and all distributions of today mount them.
const MOUNT: &str = "sys/fs/cgroup";

/// A control group in which the scheduler divides CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuControl {
    /// `cpu.weight`, 1 to 10000. A group that may only run when nothing else does (`cpu.idle`) has 1.
    pub weight: u32,
    /// `cpu.max`, thousandths of a CPU. `None`: no limit.
    pub limit_permille: Option<u64>,
}

/// Reads the control group at `path`, as `/proc/PID/cgroup` shows it: from the root, which is empty. `None`: there is no such
/// group, or it is none to the scheduler, as the controller `cpu` is not enabled for it.
pub fn read_cpu_control(root: &Path, path: &str) -> Result<Option<CpuControl>, SysfsError> {
    let tree = Tree::new(root);
    let directory = directory(&tree, path)?;
    let Some(weight) = tree.parsed(&directory.join("cpu.weight"), parse::cpu_weight)? else {
        return Ok(None);
    };
    // A kernel without CONFIG_CFS_BANDWIDTH has no limits.
    let limit_permille = tree.parsed(&directory.join("cpu.max"), parse::cpu_max)?.flatten();
    Ok(Some(CpuControl { weight, limit_permille }))
}

/// May threads of a process in this control group be in others?
pub fn may_be_threaded(root: &Path, path: &str) -> Result<bool, SysfsError> {
    let tree = Tree::new(root);
    let kind = tree.text(&directory(&tree, path)?.join("cgroup.type"))?;
    // The root has no type, and may have threads in groups of their own.
    Ok(kind.is_none_or(|kind| kind.trim() != "domain"))
}

fn directory(tree: &Tree, path: &str) -> Result<PathBuf, SysfsError> {
    let mount = tree.path(MOUNT);
    if path.split('/').any(|name| name == "..") {
        return Err(SysfsError::value(&mount, path, "a control group outside of those that vnumad can see"));
    }
    Ok(mount.join(path.trim_start_matches('/')))
}
