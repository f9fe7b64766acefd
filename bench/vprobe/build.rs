//! Compiles the BPF program; the object becomes part of the benchmark.

use libbpf_cargo::SkeletonBuilder;
use std::{env, error::Error, path::PathBuf};

const SOURCE: &str = "src/bpf/wakes.bpf.c";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=CLANG");
    let object = PathBuf::from(env::var("OUT_DIR")?).join("wakes.bpf.o");
    // As in crates/host: clang 14 makes objects that libbpf's linker refuses, and <asm/types.h> is in a directory that clang
    // does not search.
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang-19".to_owned());
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    SkeletonBuilder::new()
        .source(SOURCE)
        .obj(object)
        .clang(&clang)
        .clang_args([format!("-I/usr/include/{arch}-linux-gnu"), "-Wall".to_owned(), "-Werror".to_owned()])
        .build()
        .map_err(|error| format!("compiling {SOURCE} with {clang}: {error:#}").into())
}
