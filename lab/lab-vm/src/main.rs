//! lab-vm
fn main() {}
