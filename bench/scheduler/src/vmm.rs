//! A guest without QEMU: one process, a thread for each vCPU, memory that is a file, so that others read its counts without asking it.

use crate::code::{self, COUNTS, Kind, LINE, MEMORY, NUMBER, ROUNDS, SLEEP_PORT};
use anyhow::{Context, Result, bail};
use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use nix::{
    sys::mman::{MapFlags, ProtFlags, mmap},
    unistd::gettid,
};
use std::{
    fs::{File, OpenOptions},
    io::Read,
    num::NonZeroUsize,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

/// Type, granularity and limit of flat segments of 32 bits: code that can be read, data that can be written.
const CODE_TYPE: u8 = 11;
const DATA_TYPE: u8 = 3;
/// Protection is on (Intel SDM, volume 3, 2.5).
const CR0_PE: u64 = 1;
/// Bit 1 of EFLAGS is always 1; interrupts are off.
const RFLAGS: u64 = 2;

/// The register of an APIC that enables it, and what it is then (Intel SDM, volume 3, 12.9).
const SPURIOUS: usize = 0xf0;
const ENABLED: u32 = 0x1ff;

#[derive(clap::Args)]
pub struct Arguments {
    /// What it does
    #[arg(long)]
    kind: Kind,
    /// Its vCPUs
    #[arg(long)]
    vcpus: u8,
    /// Its memory
    #[arg(long)]
    memory: PathBuf,
    /// Rounds of the critical section, of what is between two, and of spinning
    #[arg(long, num_args = 3, value_names = ["CRITICAL", "OTHER", "SPIN"])]
    rounds: Vec<u32>,
    /// How long a vCPU sleeps, us
    #[arg(long, default_value_t = 0)]
    sleep_us: u64,
}

/// Prints the threads of its vCPUs, and runs until the standard input ends.
pub fn run(arguments: &Arguments) -> Result<()> {
    let file = memory(arguments)?;
    let vm = machine(&file)?;
    let (tell, told) = mpsc::channel();
    let (failed, failure) = mpsc::channel();
    let vcpu = |number| vcpu(&vm, arguments.kind, number).with_context(|| format!("vCPU {number}"));
    let vcpus = (0..arguments.vcpus).map(vcpu).collect::<Result<Vec<_>>>()?;
    vcpus.iter().try_for_each(enable_apic)?;
    for (number, mut vcpu) in vcpus.into_iter().enumerate() {
        let (tell, failed) = (tell.clone(), failed.clone());
        let sleep = Duration::from_micros(arguments.sleep_us);
        thread::Builder::new().name(format!("vcpu{number}")).spawn(move || {
            // The receivers live as long as the process.
            let _ = tell.send(gettid().as_raw());
            let error = go(&mut vcpu, sleep).err();
            let _ = failed.send(format!("vCPU {number}: {error:?}"));
        })?;
    }
    let tids = told.iter().take(arguments.vcpus.into()).collect::<Vec<i32>>();
    println!("{}", serde_json::to_string(&tids)?);
    thread::spawn(move || {
        // Whatever it was: there is no more of it.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    bail!("{}", failure.recv()?)
}

/// Its file, with the code, the rounds and the numbers of its vCPUs.
fn memory(arguments: &Arguments) -> Result<File> {
    let path = &arguments.memory;
    let at = || path.display().to_string();
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.with_context(at)?;
    file.set_len(MEMORY as u64).with_context(at)?;
    let put = |bytes: &[u8], offset: u64| file.write_all_at(bytes, offset).with_context(at);
    put(code::all(), code::CODE)?;
    for (number, rounds) in arguments.rounds.iter().enumerate() {
        put(&rounds.max(&1).to_le_bytes(), ROUNDS + 4 * number as u64)?;
    }
    for number in 0..u32::from(arguments.vcpus) {
        put(&number.to_le_bytes(), COUNTS + LINE * u64::from(number) + NUMBER)?;
    }
    Ok(file)
}

fn machine(file: &File) -> Result<VmFd> {
    let vm = Kvm::new().and_then(|kvm| kvm.create_vm()).context("/dev/kvm")?;
    // With KVM's own interrupt controllers a vCPU that halts sleeps in the kernel, and another one can kick it.
    vm.create_irq_chip().context("interrupt controllers")?;
    let size = NonZeroUsize::new(MEMORY).context("memory")?;
    // SAFETY: a new mapping, of a place that the kernel chooses.
    let mapped = unsafe {
        mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, file, 0)
    };
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: mapped.context("mapping the memory")?.as_ptr().addr() as u64,
    };
    // SAFETY: the region is mapped, has this size, and stays until the process ends.
    unsafe { vm.set_user_memory_region(region) }.context("the memory")?;
    Ok(vm)
}

/// At the beginning of its code, with its counts in EBP.
fn vcpu(vm: &VmFd, kind: Kind, number: u8) -> Result<VcpuFd> {
    let vcpu = vm.create_vcpu(number.into())?;
    let mut sregs = vcpu.get_sregs()?;
    sregs.cr0 |= CR0_PE;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss]
    {
        (segment.base, segment.limit, segment.selector) = (0, u32::MAX, 16);
        (segment.type_, segment.present, segment.s) = (DATA_TYPE, 1, 1);
        (segment.db, segment.g, segment.l, segment.dpl) = (1, 1, 0, 0);
    }
    (sregs.cs.selector, sregs.cs.type_) = (8, CODE_TYPE);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    regs.rip = code::CODE + kind.entry();
    regs.rbp = COUNTS + LINE * u64::from(number);
    regs.rflags = RFLAGS;
    vcpu.set_regs(&regs)?;
    // Others than the first one wait for an IPI that starts them.
    vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })?;
    Ok(vcpu)
}

/// As a guest's kernel does it. Once all vCPUs are there: KVM finds no other one that is to be kicked.
fn enable_apic(vcpu: &VcpuFd) -> Result<()> {
    let mut lapic = vcpu.get_lapic().context("an APIC")?;
    for (register, byte) in lapic.regs[SPURIOUS..].iter_mut().zip(ENABLED.to_le_bytes()) {
        *register = byte.cast_signed();
    }
    vcpu.set_lapic(&lapic).context("an APIC")
}

fn go(vcpu: &mut VcpuFd, sleep: Duration) -> Result<()> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(SLEEP_PORT, _)) => thread::sleep(sleep),
            Ok(other) => bail!("{other:?}"),
            Err(error) if matches!(error.errno(), nix::libc::EINTR | nix::libc::EAGAIN) => {}
            Err(error) => return Err(error).context("KVM_RUN"),
        }
    }
}

/// The counts of a guest's vCPUs: what each has done since it started.
pub fn operations(memory: &Path, vcpus: usize) -> Result<Vec<u32>> {
    let at = || memory.display().to_string();
    let file = File::open(memory).with_context(at)?;
    let of = |number: usize| {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, COUNTS + LINE * number as u64).with_context(at)?;
        Ok(u32::from_le_bytes(bytes))
    };
    (0..vcpus).map(of).collect()
}
