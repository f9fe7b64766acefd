//! Observe: what vCPU threads do to caches and memory, by the hardware counters of the host's CPUs.
//!
//! ```text
//!   detect ──▶ Events: the best source that this host has, and why better ones are passed over
//!                 │
//!   ThreadCounters::open(tid, &Events)   one group of counters for each thread: they count at the same time
//!                 │ read, once a period
//!                 ▼
//!   Counted: counts, scaled if the group shared the counters with others; or why there are none
//!                 │ of all threads
//!                 ▼
//!   Silence: does this source count at all, or is it given up for the next best one?
//! ```
//!
//! Until the counters of a thread are opened, nothing costs anything.
//!
//! The counters go on with their thread from CPU to CPU and count what it does in the guest as well as what the host's
//! kernel does for it: a guest's kernel and its programs are counted together.
//!
//! Beside that, [samples](ThreadSamples) of accesses with their physical addresses say where a thread's memory is. They are off
//! unless an operator asks for them, as each costs an interrupt.

mod detect;
mod events;
mod group;
mod period;
mod samples;
mod servers;
mod silence;

pub use detect::{Detected, detect, detect_by};
pub use events::{Code, Events, Source};
pub use group::{CounterError, ThreadCounters};
pub use period::Reading;
pub use samples::{Ibs, MemoryMap, Sampled, Shares, ThreadSamples};
pub use silence::{Change, Heard, PATIENCE, Silence};
