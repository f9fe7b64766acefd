//! Compiles the BPF program; the object becomes part of `lab-sched-ext`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    vnuma_bpf_build::compile("src/bpf/by_node.bpf.c", &[], &[])
}
