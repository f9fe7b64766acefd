//! The VM, the program in its guest, and its balloon.

use crate::{
    committed::{AT_HOME, CLASSES, Cause, MEMORY_MIB, Means, NODES, OTHERS_AT_HOME, PART_MIB, WHOLE_MIB},
    raw::Pass,
};
use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::{
    fs, thread,
    time::{Duration, Instant},
};
use vnuma_bench_common::{
    guest_memory::GuestMemory,
    host::affine,
    talk::Talk,
    threads::{Counted, Thread},
};
use vnuma_scenario::{HANG_LIMIT, Monitor, Vm, wait_for};

/// Its name.
pub const NAME: &str = "displaced";
const PROGRAM: &str = "/root/bench-memory";
/// A free port of the VM.
const PORT: &str = "vnuma1";
const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_balloon";
/// When so little came back to the host in so long a time, that is all.
const STILL: (u64, Duration) = (4 << 20, Duration::from_secs(3));
/// Every so manyth page is looked at while periods go on.
const SAMPLE: usize = 16;
const PAGE: u64 = 4096;
/// What the guest has left when its balloon is full, MiB.
const LEFT_MIB: u64 = 320;

/// A VM that runs.
pub struct Machine {
    /// Ends before the VM, which it would call dead.
    talk: Option<Talk>,
    /// It.
    pub vm: Vm,
    /// Where its memory is.
    pub memory: GuestMemory,
    vcpu: Thread,
    monitor: Monitor,
    /// Its balloon's name for the guest's kernel.
    balloon: String,
}

/// What is displaced and what is there, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// On the home of another guest node.
    pub displaced: u64,
    /// All.
    pub resident: u64,
}

impl Machine {
    /// Boots it, with a balloon that reports free pages if the cause is that or has no use of one.
    pub fn start(cause: Cause) -> Result<Self> {
        let size = format!("{MEMORY_MIB}M");
        let machine = Self::boot(&["--memory", &size, "--unbound"], MEMORY_MIB, cause != Cause::Balloon)?;
        machine.bring_home()?;
        machine.with_program()
    }

    /// Boots one whose memory is bound to its home, with all of its memory or, for virtio-mem, with the smaller part of it.
    pub fn sized(means: Means) -> Result<Self> {
        let (boot, part) = (WHOLE_MIB - PART_MIB, format!("{PART_MIB}M"));
        let machine = match means {
            Means::VirtioMem => {
                Self::boot(&["--memory", &format!("{}M", boot * 2), "--pluggable", &part], boot * 2, false)
            }
            _ => Self::boot(&["--memory", &format!("{}M", WHOLE_MIB * 2)], WHOLE_MIB * 2, false),
        }?;
        machine.put_home()?;
        machine.with_program()
    }

    fn boot(shape: &[&str], boot_mib: u64, reports: bool) -> Result<Self> {
        let shape = [&["--nodes", "2", "--vcpus", "2"], shape].concat();
        let vm = Vm::start(NAME, &shape.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        ensure!(vm.threads.len() == NODES, "{} vCPU threads", vm.threads.len());
        vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
        // It asks QEMU by the same monitor, which has one client at a time.
        let memory = GuestMemory::of(&vm, boot_mib << 20, NODES)?;
        let mut monitor = Monitor::connect(&vm.monitor())?;
        let device = json!({
            "driver": "virtio-balloon-pci", "id": "balloon", "bus": PORT, "free-page-reporting": reports,
            // KVM gives a guest up now and then that notifies a queue by MMIO under emulation (lab/lab-vm/src/qemu.rs).
            "modern-pio-notify": true,
        });
        monitor.execute(&json!({"execute": "device_add", "arguments": device}))?;
        let load = format!(
            "for i in $(seq 100); do for one in {DRIVER}/virtio*; do [ -e $one ] && basename $one && exit; done; \
             modprobe virtio_balloon; sleep 0.3; done; exit 1"
        );
        let balloon = vm.exec(&["sh", "-c", &load]).context("the balloon's driver")?.trim().to_owned();
        let vcpu = Thread::count(vm.pid, vm.threads[0], Counted::Programs(CLASSES))?;
        let machine = Self { vm, memory, vcpu, monitor, balloon, talk: None };
        machine.report(false)?;
        Ok(machine)
    }

    fn with_program(mut self) -> Result<Self> {
        self.talk = Some(Talk::with(self.vm.spawn(&[PROGRAM, "guest"])?, "the program in the guest")?);
        Ok(self)
    }

    /// Has the program do something.
    pub fn ask<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        self.talk.as_mut().context("there is no program in the guest")?.ask(what)
    }

    /// The same, counted.
    pub fn pass(&mut self, what: &str) -> Result<Pass> {
        let before = self.vcpu.read()?;
        let operations = self.ask(what)?;
        Ok(Pass { operations, counts: self.vcpu.read()?.since(&before).user })
    }

    /// Modelled cycles of vCPU 0 and its time on a CPU, by which the dilation is known.
    pub fn cycles_and_time(&self) -> Result<(u64, u64)> {
        let values = self.vcpu.read()?;
        Ok((values.cycles, values.ran_ns))
    }

    /// Lets vCPU 0 run on this CPU.
    pub fn put(&self, cpu: u32) -> Result<()> {
        affine(self.vm.threads[0], &[cpu])
    }

    /// Lets QEMU's other threads run on this CPU. Those that it starts run where the one does that starts them.
    pub fn put_others(&self, cpu: u32) -> Result<()> {
        let path = format!("/proc/{}/task", self.vm.pid);
        for entry in fs::read_dir(&path).with_context(|| path.clone())? {
            let tid = entry?.file_name().to_string_lossy().parse().with_context(|| path.clone())?;
            // A thread of a pool may have ended since the list was read.
            if !self.vm.threads.contains(&tid) && affine(tid, &[cpu]).is_err() {
                ensure!(!fs::exists(format!("{path}/{tid}"))?, "thread {tid} cannot run on CPU {cpu}");
            }
        }
        Ok(())
    }

    /// Everything at home: threads and pages.
    pub fn bring_home(&self) -> Result<()> {
        self.put_home()?;
        self.memory.place(&self.memory.at_home())
    }

    /// Threads at home.
    pub fn put_home(&self) -> Result<()> {
        for (&thread, cpu) in self.vm.threads.iter().zip(AT_HOME) {
            affine(thread, &[cpu])?;
        }
        self.put_others(OTHERS_AT_HOME)
    }

    /// Where its memory is: a sample, or all pages.
    pub fn layout(&self, all: bool) -> Result<Layout> {
        let every = if all { 1 } else { SAMPLE };
        let nodes = self.memory.where_it_is(every)?;
        let each = every as u64 * PAGE;
        let of = |home: usize, node: &Option<usize>| match node {
            Some(node) => (u64::from(*node != home) * each, each),
            None => (0, 0),
        };
        let all =
            nodes.iter().enumerate().flat_map(|(home, nodes)| nodes.iter().map(move |node| of(home, node)));
        let (displaced, resident) = all.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        Ok(Layout { displaced, resident })
    }

    /// Memory of QEMU that is there, as the kernel counts it.
    fn resident(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.vm.pid);
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        Ok(kib.with_context(|| format!("{path}: no VmRSS"))? << 10)
    }

    /// Lets the guest's driver work with the balloon, or not: without it no free page is reported.
    pub fn report(&self, on: bool) -> Result<()> {
        let (file, balloon) = (if on { "bind" } else { "unbind" }, &self.balloon);
        let line = format!(
            "[ -e {DRIVER}/{balloon} ] && is=bind || is=unbind; \
                            [ $is = {file} ] || echo {balloon} > {DRIVER}/{file}"
        );
        self.vm.exec(&["sh", "-c", &line]).map(drop).context("the balloon's driver")
    }

    /// Waits until the guest's free pages are reported, so that the host has taken them back. How much it was.
    pub fn give_back_by_reports(&self) -> Result<u64> {
        let before = self.resident()?;
        self.report(true)?;
        let end = Instant::now() + HANG_LIMIT;
        let (mut last, mut since) = (before, Instant::now());
        while since.elapsed() < STILL.1 && Instant::now() < end {
            thread::sleep(Duration::from_millis(300));
            let now = self.resident()?;
            if now + STILL.0 < last {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(before.saturating_sub(last))
    }

    /// Inflates the balloon by most of the guest's memory, and deflates it. How much the host has taken back.
    pub fn give_back_by_balloon(&mut self) -> Result<u64> {
        self.report(true)?;
        let before = self.resident()?;
        self.inflate(LEFT_MIB)?;
        let after = self.resident()?;
        self.inflate(MEMORY_MIB)?;
        Ok(before.saturating_sub(after))
    }

    /// Leaves the guest so much.
    pub fn inflate(&mut self, left_mib: u64) -> Result<()> {
        let bytes = left_mib << 20;
        self.monitor.execute(&json!({"execute": "balloon", "arguments": {"value": bytes}}))?;
        wait_for(&format!("the balloon to leave {left_mib} MiB"), HANG_LIMIT, || {
            let shown: Value = self.monitor.execute(&json!({"execute": "query-balloon"}))?;
            Ok(shown["actual"] == bytes)
        })
    }
}
