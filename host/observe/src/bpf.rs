//! Loads BPF programs.

use libbpf_rs::{ErrorKind, PrintLevel};
use std::{fs, os::unix::fs::MetadataExt, path::Path};

/// Types of the running kernel; programs are fitted to them when they are loaded.
const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";

/// Inode of the initial PID namespace (`PROC_PID_INIT_INO` in include/linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

/// Call this before anything is loaded. The error explains why no program can be used here.
pub(crate) fn prepare() -> Result<(), String> {
    if !Path::new(KERNEL_BTF).exists() {
        return Err(format!("the kernel has no BTF ({KERNEL_BTF} is missing)"));
    }
    // Programs see thread numbers of the initial namespace, /proc those of ours.
    match fs::metadata("/proc/self/ns/pid") {
        Ok(namespace) if namespace.ino() == INITIAL_PID_NAMESPACE => {}
        Ok(_) => return Err("this process runs in a PID namespace of its own".to_owned()),
        Err(error) => return Err(format!("/proc/self/ns/pid: {error}")),
    }
    libbpf_rs::set_print(Some((PrintLevel::Debug, log)));
    Ok(())
}

/// What an error means for an operator.
pub(crate) fn words(error: &libbpf_rs::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            format!("not permitted: CAP_BPF and CAP_PERFMON are needed ({error})")
        }
        _ => format!("{error:#}"),
    }
}

fn log(level: PrintLevel, text: String) {
    let text = text.trim_end();
    match level {
        PrintLevel::Debug => tracing::trace!("libbpf: {text}"),
        PrintLevel::Info | PrintLevel::Warn => tracing::debug!("libbpf: {text}"),
    }
}
