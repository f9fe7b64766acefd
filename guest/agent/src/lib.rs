//! Runs I/O-heavy programs of a guest on the NUMA node of their device while that node has CPU time and memory to spare, and
//! lets them go when it has not.
//!
//! | module | what it does |
//! |---|---|
//! | [`core`] | decides: a [`Snapshot`](core::Snapshot) in, a [`Plan`](core::Plan) out; no I/O and no clock |
//! | [`observe`] | makes the snapshot from `/proc` and `/sys` below a root |
//! | [`act`] | carries a plan out: control groups, affinities, memory, interrupts |
//! | [`journal`] | what has been changed, written before it is; everything in it can be undone by another process |
//! | [`rules`] | the operator's file |
//! | [`run`] | the loop, its guard, and signals |
//!
//! The principle is that of *Optimized Resource Allocation on Virtualized Non-Uniform I/O Architectures* (CCGrid 2022),
//! section V. docs/vnuma-guest.md is the manual.

pub mod act;
pub mod core;
pub mod ends;
pub mod files;
pub mod journal;
pub mod list;
pub mod observe;
pub mod rules;
pub mod run;
