//! Every interleaving of a few nodes and accesses, by stateright: the code that ships, not a copy of it.
#[path = "../common/mod.rs"]
mod common;
mod ends;
mod parts;
mod runs;
mod system;
