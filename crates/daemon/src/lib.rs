//! vnumad keeps the guests of a host informed of their true NUMA topology.
//!
//! ```text
//!            observe                 decide              act, tell
//!  inotify ─▶ discovery ─┐
//!  QMP ─▶ vm_thread ─────┼─▶ daemon ─▶ vm ─▶ placement ─▶ tell ─▶ the guest
//!  BPF ─▶ locations ─────┘     ▲                          act  ─▶ the vCPU's thread
//!                              │
//!                             api ◀─▶ vnumactl
//! ```
//!
//! One task ([`daemon`]) owns everything that is known. What can block runs elsewhere: a thread per VM
//! talks to its hypervisor and searches its process, the API's tasks and the watcher of locations send messages. Threads
//! are looked at a few at a time. So a QEMU that does not answer, or has very many vCPUs, holds up nobody but itself.

mod act;
mod api;
pub mod config;
mod daemon;
mod discovery;
mod epoch;
mod error;
mod limits;
mod listener;
mod locations;
mod message;
mod pulse;
mod readiness;
mod records;
mod report;
mod rights;
mod server;
mod socket;
mod tell;
mod vm;
mod vm_thread;
mod watchers;

pub use config::Config;
pub use records::parse_record;
pub use server::{BackendFactory, run};
pub use socket::SocketError;
