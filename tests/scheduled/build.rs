//! Compiles the BPF program; the object becomes part of the benchmark.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    vnuma_bpf_build::compile("src/bpf/wakes.bpf.c", &[], &[])
}
