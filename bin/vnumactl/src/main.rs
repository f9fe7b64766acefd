//! vnumactl
fn main() {}
