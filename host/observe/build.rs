//! Compiles the BPF programs; the objects become part of the crate.

use std::{error::Error, fs, os::unix::fs::MetadataExt};

const HEADERS: &str = "../../abi/bpf/include";

fn main() -> Result<(), Box<dyn Error>> {
    // Tests of BPF need root. A build without it shows them as ignored, with the reason.
    println!("cargo::rustc-check-cfg=cfg(root)");
    if fs::metadata("/proc/self")?.uid() == 0 {
        println!("cargo::rustc-cfg=root");
    }
    vnuma_bpf_build::compile("src/location/bpf/vcpu_watch.bpf.c", &[HEADERS], &[])?;
    vnuma_bpf_build::compile("src/page_moves/bpf/page_moves.bpf.c", &[HEADERS], &[])?;
    // The verifier follows numbers of 32 bits only through instructions for them.
    vnuma_bpf_build::compile("src/tasks/bpf/tasks.bpf.c", &[HEADERS], &["-mcpu=v3"])
}
