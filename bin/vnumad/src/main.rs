//! vnumad
fn main() {}
