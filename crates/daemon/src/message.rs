//! What reaches the task that owns the state.

use crate::{act::MovePlan, error::Refusal, vm_thread::Report};
use tokio::sync::{mpsc, oneshot};
use vnuma_api::{Daemon, Event, Replugged, Vm};

/// Number of a connection to a hypervisor; never used twice.
pub(crate) type ConnectionId = u64;

/// Where the answer to a request goes. Nobody waiting for it any more is no error.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// A message.
#[derive(Debug)]
pub(crate) enum Message {
    /// From the thread of a VM.
    Vm { id: ConnectionId, report: Report },
    /// A guest has rung.
    Rung { id: ConnectionId },
    /// A directory of sockets has changed.
    Rescan,
    /// From a client.
    Request(Request),
}

/// What a client asks for.
#[derive(Debug)]
pub(crate) enum Request {
    List {
        reply: Reply<Vec<Vm>>,
    },
    Show {
        vm: String,
        reply: Reply<Vm>,
    },
    Daemon {
        reply: Reply<Daemon>,
    },
    Attach {
        vm: String,
        reply: Reply<Vm>,
    },
    Detach {
        vm: String,
        reply: Reply<Vm>,
    },
    /// Everything that a move needs; the move itself is made elsewhere, as it can block.
    PlanMove {
        vm: String,
        vcpu: u32,
        node: u32,
        reply: Reply<MovePlan>,
    },
    /// A vCPU was moved: look where it is.
    Look {
        id: ConnectionId,
        vcpu: u32,
        reply: Reply<Vm>,
    },
    Replug {
        vm: String,
        vcpu: u32,
        reply: Reply<Replugged>,
    },
    Watch {
        reply: Reply<mpsc::Receiver<Event>>,
    },
}
