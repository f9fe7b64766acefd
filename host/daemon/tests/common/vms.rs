//! What VMs in memory have that is real: vCPU threads that can be confined, and processes that can be killed.

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};
use vnuma_model::{GuestNode, MemoryBacking, Vcpu, VmDescription};

/// A thread that sleeps and wakes like an idle vCPU, until it is dropped.
pub struct VcpuThread {
    pub tid: i32,
    stop: Arc<AtomicBool>,
}

impl VcpuThread {
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            sender.send(gettid().as_raw()).expect("the test waits");
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(2));
            }
        });
        Self { tid: receiver.recv().expect("started"), stop }
    }

    /// Confines it to a CPU, behind the daemon's back.
    pub fn pin(&self, cpu: usize) {
        pin(self.tid, cpu);
    }
}

/// Confines a thread to a CPU.
pub fn pin(tid: i32, cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).expect("in range");
    sched_setaffinity(Pid::from_raw(tid), &set).expect("pinned");
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A process that stands for a VM's and can be killed.
pub struct Process(pub Child);

impl Process {
    pub fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().expect("sleep"))
    }

    pub fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    pub fn kill(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ended");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A VM of this process with guest nodes at home on these host nodes, a vCPU a thread, and vCPU `i` booted
/// on guest node `i` modulo their number.
pub fn describe(name: &str, pid: i32, homes: &[u32], tids: &[i32]) -> VmDescription {
    let memory = |home: u32| MemoryBacking {
        id: format!("ram{home}"),
        size_bytes: 1 << 28,
        policy: "bind".into(),
        host_nodes: vec![home],
        resident_kib: Vec::new(),
        mapping: None,
    };
    let node = |(id, home): (usize, &u32)| GuestNode {
        id: id as u32,
        memory_bytes: 1 << 28,
        memory: Some(memory(*home)),
    };
    let vcpu = |(index, tid): (usize, &i32)| Vcpu {
        index: index as u32,
        apic_id: index as u32,
        boot_node: (!homes.is_empty()).then(|| (index % homes.len()) as u32),
        tid: *tid,
    };
    VmDescription {
        name: name.into(),
        pid,
        guest_nodes: homes.iter().enumerate().map(node).collect(),
        vcpus: tids.iter().enumerate().map(vcpu).collect(),
        run_state: "running".into(),
        spare_slots: std::collections::BTreeMap::new(),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}
