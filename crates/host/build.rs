//! Compiles the BPF program; the object becomes part of the crate.

use libbpf_cargo::SkeletonBuilder;
use std::{env, error::Error, fs, os::unix::fs::MetadataExt, path::PathBuf};

const SOURCE: &str = "src/location/bpf/vcpu_watch.bpf.c";
const HEADERS: &str = "../../abi/bpf/include";

fn main() -> Result<(), Box<dyn Error>> {
    // Tests of BPF need root. Whoever builds without it is shown them as ignored, with the reason.
    println!("cargo::rustc-check-cfg=cfg(root)");
    if fs::metadata("/proc/self")?.uid() == 0 {
        println!("cargo::rustc-cfg=root");
    }
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-changed={HEADERS}");
    println!("cargo::rerun-if-env-changed=CLANG");
    let object = PathBuf::from(env::var("OUT_DIR")?).join("vcpu_watch.bpf.o");
    // clang 14, the default of Debian 12, makes objects that libbpf's linker refuses.
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang-19".to_owned());
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    SkeletonBuilder::new()
        .source(SOURCE)
        .obj(object)
        .clang(&clang)
        // Debian keeps <asm/types.h> in the directory of the architecture, which clang does
        // not search for the bpf target.
        .clang_args([
            format!("-I{HEADERS}"),
            format!("-I/usr/include/{arch}-linux-gnu"),
            "-Wall".to_owned(),
            "-Werror".to_owned(),
        ])
        .build()
        .map_err(|error| format!("compiling {SOURCE} with {clang}: {error:#}").into())
}
