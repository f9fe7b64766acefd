//! Where the pages of VMs lie, for policies of hosts whose counters do not say which node an access goes to. Counting walks
//! the page tables of a process, so it is done in a thread of its own, and seldom.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use vnuma_hypervisor::resident::read_resident;
use vnuma_placement::world::VmId;
use vnuma_process::spawn_worker;
use vnuma_topology::HostNodeId;

/// Least time between two passes over all VMs. It is longer where a pass takes long: at most one part in [`PART`] of the time.
const PAUSE: Duration = Duration::from_secs(10);
const PART: u32 = 50;

type Pages = Vec<(HostNodeId, u64)>;

#[derive(Debug)]
enum Order {
    Watch(VmId, i32),
    Unwatch(VmId),
}

/// A thread that counts pages of the VMs that it is given.
#[derive(Debug)]
pub(super) struct PageReader {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    known: Arc<Mutex<HashMap<VmId, Pages>>>,
}

impl PageReader {
    pub(super) fn start() -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let known = Arc::new(Mutex::new(HashMap::new()));
        let theirs = Arc::clone(&known);
        let thread = spawn_worker("pages", move || run(&received, &theirs))?;
        Ok(Self { orders: Some(orders), thread: Some(thread), known })
    }

    /// Counts the pages of this process of a VM, now and every now and then.
    pub(super) fn watch(&self, vm: VmId, pid: i32) {
        self.order(Order::Watch(vm, pid));
    }

    pub(super) fn unwatch(&self, vm: VmId) {
        self.order(Order::Unwatch(vm));
    }

    /// What was counted last, KiB by node; nothing yet, or nothing any more, if it is empty.
    pub(super) fn of(&self, vm: VmId) -> Pages {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&vm).cloned().unwrap_or_default()
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // Fails only after the thread's end.
            let _ = orders.send(order);
        }
    }
}

impl Drop for PageReader {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked, and the panic has been reported.
            let _ = thread.join();
        }
    }
}

fn run(orders: &mpsc::Receiver<Order>, known: &Mutex<HashMap<VmId, Pages>>) {
    let mut vms: HashMap<VmId, i32> = HashMap::new();
    let note = |vm: VmId, pages: Option<Pages>| {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        match pages {
            Some(pages) => drop(known.insert(vm, pages)),
            None => drop(known.remove(&vm)),
        }
    };
    let mut pass_at = Instant::now() + PAUSE;
    loop {
        let order = match vms.is_empty() {
            true => orders.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
            false => orders.recv_timeout(pass_at.saturating_duration_since(Instant::now())),
        };
        match order {
            Ok(Order::Watch(vm, pid)) => {
                if vms.insert(vm, pid) != Some(pid) {
                    note(vm, read_resident(pid).ok());
                }
            }
            Ok(Order::Unwatch(vm)) => {
                vms.remove(&vm);
                note(vm, None);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let begun = Instant::now();
                for (vm, pid) in &vms {
                    note(*vm, read_resident(*pid).ok());
                }
                pass_at = Instant::now() + PAUSE.max(begun.elapsed() * PART);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}
