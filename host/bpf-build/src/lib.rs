//! Compiles BPF programs, for build scripts.

#![forbid(unsafe_code)]

use libbpf_cargo::SkeletonBuilder;
use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
};

/// Compiles a program. The object is `OUT_DIR/NAME.bpf.o` for a source of the name `NAME.bpf.c`.
///
/// `headers` are folders that are searched for headers, `flags` are more flags of clang. Cargo runs the build script again when
/// one of these folders, or the source's own, changes.
pub fn compile(source: &str, headers: &[&str], flags: &[&str]) -> Result<(), Box<dyn Error>> {
    let source = Path::new(source);
    let name = source.file_name().and_then(|name| name.to_str()?.strip_suffix(".bpf.c"));
    let name = name.ok_or_else(|| format!("{}: no name that ends with .bpf.c", source.display()))?;
    for folder in headers.iter().map(Path::new).chain(source.parent()) {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    println!("cargo::rerun-if-env-changed=CLANG");
    let object = PathBuf::from(env::var("OUT_DIR")?).join(format!("{name}.bpf.o"));
    // clang 14, the default of Debian 12, makes objects that libbpf's linker refuses.
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang-19".to_owned());
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    // Debian keeps <asm/types.h> in the directory of the architecture, which clang does not search for the bpf target.
    let system = format!("-I/usr/include/{arch}-linux-gnu");
    let arguments = headers.iter().map(|folder| format!("-I{folder}")).chain([system]);
    let always = ["-Wall", "-Werror"].iter().chain(flags).map(|flag| (*flag).to_owned());
    SkeletonBuilder::new()
        .source(source)
        .obj(object)
        .clang(&clang)
        .clang_args(arguments.chain(always))
        .build()
        .map_err(|error| format!("compiling {} with {clang}: {error:#}", source.display()).into())
}
