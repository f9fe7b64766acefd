//! Compiles the BPF program; the object becomes part of the program.

use std::error::Error;

const SOURCE: &str = "src/bpf/scx_vnuma.bpf.c";
const HEADERS: &str = "../../abi/bpf/include";

fn main() -> Result<(), Box<dyn Error>> {
    // For atomic operations that return a value.
    vnuma_bpf_build::compile(SOURCE, &[HEADERS], &["-mcpu=v3"])
}
