//! vCPUs of running guests under scx_vnuma, in both modes: CPU time as control groups say, the rescue of a vCPU that waits too
//! long, and with vnumad a scheduler that comes, changes its mode, dies, and finds another one, while VMs come and go.

use crate::{
    guest::{expect_check, wait_until_listed},
    policy::{BALANCING, CONFIGURATION, FAR, NEAR, start_near},
    threads::{Group, Loop, beat, expect_share, loaded, start, stop},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, Stdio},
};
use vnuma_model::Steal;
use vnuma_observe::scheduler::{DIRECTORY, Scheduler};
use vnuma_process::Class;
use vnuma_scenario::{HANG_LIMIT, Process, Vm, vnumactl, vnumad, wait_for};

/// Of a share of CPU time: a tick of the kernel is 4 ms, a slice 5 ms, and QEMU's other threads run, too.
const TOLERANCE: f64 = 0.07;
pub const PROGRAM: &str = "/usr/local/bin/scx_vnuma";
/// Its name in the kernel is another one.
const FOREIGN: &str = "/root/scx_other";

/// A VM whose vCPU never sleeps.
struct Guest {
    vm: Vm,
    vcpu: Loop,
    _busy: Process,
}

impl Guest {
    fn start(name: &str) -> Result<Self> {
        let vm = start_near(name)?;
        let busy = vm.spawn(&["sh", "-c", "dd if=/dev/zero of=/dev/null bs=8M"])?;
        Ok(Self { vcpu: Loop::of_vcpu(&vm), vm, _busy: busy })
    }
}

/// The parts that are wanted, of `vcpus` and `vnumad`.
pub fn run(wanted: impl Fn(&str) -> bool) -> Result<()> {
    if !wanted("vcpus") && !wanted("vnumad") {
        return Ok(());
    }
    // It would move the pages to the vCPUs.
    fs::write(BALANCING, "0").context(BALANCING)?;
    let guests = [Guest::start("first")?, Guest::start("second")?];
    for full in [false, true].into_iter().filter(|_| wanted("vcpus")) {
        without_vnumad(&guests, full).with_context(|| format!("full: {full}"))?;
    }
    fs::write(CONFIGURATION, "[policy]\nperiod_ms = 300\ndefault = \"vprobe\"\n").context(CONFIGURATION)?;
    if wanted("vnumad") { with_vnumad(guests) } else { Ok(()) }
}

/// The scheduler by itself.
fn without_vnumad([first, second]: &[Guest; 2], full: bool) -> Result<()> {
    let mode = if full { "full" } else { "partial" };
    let options = ["--starve-ms", "200", "--full"];
    let (mut process, scheduler) = start(&options[..if full { 3 } else { 2 }])?;
    let vcpus = [&first.vcpu, &second.vcpu];
    for vcpu in vcpus {
        if !full {
            vcpu.make_ext()?;
        }
        vcpu.allow("3")?;
    }
    shares(&scheduler, [first, second], mode)?;
    rescues(&scheduler, vcpus, full)?;
    if full {
        process.0.kill()?;
        process.0.wait()?;
        wait_for("the kernel to go on without it", HANG_LIMIT, || Ok(loaded()?.is_none()))?;
    } else {
        stop(process)?;
    }
    for vcpu in vcpus {
        vcpu.expect_to_run()?;
        if !full {
            vcpu.make_fair()?;
        }
        vcpu.allow(NEAR)?;
    }
    Ok(())
}

/// Two vCPUs on one CPU, of VMs whose control groups have other weights, and a limit.
fn shares(scheduler: &Scheduler, [first, second]: [&Guest; 2], mode: &str) -> Result<()> {
    let [one, other] = [first, second].map(|guest| Group::of_vm(&guest.vm));
    let expect = |what: &str, share: f64| {
        let what = format!("{mode} mode, {what}");
        expect_share(&what, Some(scheduler), &[&first.vcpu, &second.vcpu], (share, TOLERANCE))
    };
    one.write("cpu.weight", "300")?;
    expect("weight 300 beside 100", 0.75)?;
    one.write("cpu.weight", "100")?;
    other.write("cpu.weight", "300")?;
    expect("weight 100 beside 300, set while both run", 0.25)?;
    other.write("cpu.weight", "100")?;
    other.write("cpu.max", "20000 100000")?;
    expect("beside a limit of 20 %", 0.8)?;
    other.write("cpu.max", "max 100000")?;
    expect("the same without the limit", 0.5)
}

/// A vCPU waits for a CPU that another class has, and the only other one is never idle.
fn rescues(scheduler: &Scheduler, [waiting, busy]: [&Loop; 2], full: bool) -> Result<()> {
    busy.allow("3")?;
    let _hog = if full { Loop::start_real_time("2")? } else { Loop::start_fair("2")? };
    let before = scheduler.counts().starved;
    waiting.allow(NEAR)?;
    waiting.place(scheduler, Some("2"), 0)?;
    wait_for("the vCPU that waits too long to be stolen", HANG_LIMIT, || {
        waiting.again(scheduler)?;
        Ok(scheduler.counts().starved > before && waiting.cpu()? == 3)
    })?;
    waiting.expect_to_run()?;
    scheduler.forget(waiting.tid);
    println!("a vCPU that waited too long was stolen by a CPU that was busy");
    beat(scheduler)
}

pub fn load(options: &[&str]) -> Result<Process> {
    Ok(Process(Command::new(PROGRAM).args(options).stdin(Stdio::null()).spawn().context(PROGRAM)?))
}

pub fn maps() -> Result<Scheduler> {
    Ok(Scheduler::open(Path::new("/"), Path::new(DIRECTORY))?)
}

/// The vCPUs of these VMs, and no others, are scheduled by scx_vnuma, and run.
fn expect_scheduled(guests: &[&Guest], full: bool) -> Result<()> {
    let mut expected: Vec<(i32, i32)> = guests.iter().map(|guest| (guest.vcpu.tid, guest.vm.pid)).collect();
    expected.sort_unstable();
    let class = if full { Class::Other } else { Class::Ext };
    let mut last = String::new();
    wait_for("scx_vnuma to have the vCPUs", HANG_LIMIT, || {
        let Ok(scheduler) = maps() else { return Ok(false) };
        let mut threads = scheduler.threads();
        threads.sort_unstable();
        let classes = guests.iter().map(|guest| guest.vcpu.class()).collect::<Result<Vec<_>>>()?;
        last = format!("full: {}, threads {threads:?} of {classes:?}", scheduler.is_full());
        let all = classes.iter().all(|found| *found == class);
        Ok(scheduler.is_full() == full && threads == expected && all)
    })
    .with_context(|| format!("it has {last}; expected {expected:?} of {class:?}"))?;
    expect_check(None, "places", if full { "sched_ext, full" } else { "sched_ext, partial" }, "best")?;
    guests.iter().try_for_each(|guest| guest.vcpu.expect_to_run())
}

/// vnumad schedules them without scx_vnuma.
fn expect_affinities(guests: &[&Guest]) -> Result<()> {
    wait_for("vnumad to go on with affinities", HANG_LIMIT, || {
        let other = |guest: &&Guest| Ok::<_, anyhow::Error>(guest.vcpu.class()? == Class::Other);
        let all = guests.iter().map(other).collect::<Result<Vec<_>>>()?.into_iter().all(|other| other);
        Ok(all && expect_check(None, "places", "affinity", "reduced").is_ok())
    })?;
    guests.iter().try_for_each(|guest| guest.vcpu.expect_to_run())
}

/// With vnumad, and policies that act.
fn with_vnumad([first, second]: [Guest; 2]) -> Result<()> {
    let foreign = load_foreign()?;
    let mut daemon = vnumad(&["--config", CONFIGURATION])?;
    [&first, &second].iter().try_for_each(|guest| wait_until_listed(&guest.vm.name))?;
    let refused = Command::new(PROGRAM).stdin(Stdio::null()).output()?;
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && error.contains("`other`") && error.contains("EBUSY"), "{error}");
    expect_affinities(&[&first, &second]).context("another scheduler is loaded")?;
    let doctor = vnumactl(&["doctor"])?.to_string();
    ensure!(doctor.contains("another sched_ext scheduler is loaded, `other`"), "vnumactl doctor: {doctor}");
    drop(foreign);
    println!("another scheduler was loaded: scx_vnuma was refused, and vnumad went on with affinities");

    let mut process = load(&[])?;
    expect_scheduled(&[&first, &second], false)?;
    stop(process)?;
    expect_affinities(&[&first, &second]).context("scx_vnuma was stopped")?;
    process = load(&["--full"])?;
    expect_scheduled(&[&first, &second], true).context("partial mode, then full mode")?;
    println!("from partial to full mode while VMs run");
    for (policies, steal) in [
        (["credit", "vcpu-p"], Steal::Blindly),
        (["brm", "brm"], Steal::WithinPlaces),
        (["brm", "credit"], Steal::ByPressure),
        (["credit", "observe"], Steal::Blindly),
        (["vprobe", "vprobe"], Steal::ByPressure),
    ] {
        for (guest, policy) in [&first, &second].iter().zip(policies) {
            vnumactl(&["policy", &guest.vm.name, "--set", policy])?;
        }
        wait_for(&format!("{steal:?} with {policies:?}"), HANG_LIMIT, || Ok(maps()?.steals()? == steal))?;
    }
    println!("it was told to steal as the policies do");

    emulator_stays(&first)?;
    let third = Guest::start("third")?;
    wait_until_listed("third")?;
    expect_scheduled(&[&first, &second, &third], true).context("a VM has come")?;
    drop(daemon);
    ensure!(maps()?.threads().len() == 3, "after SIGKILL of vnumad");
    daemon = vnumad(&["--config", CONFIGURATION])?;
    expect_scheduled(&[&first, &second, &third], true).context("vnumad was killed, and is back")?;
    drop(first);
    expect_scheduled(&[&second, &third], true).context("a VM has gone")?;
    println!("in full mode: a VM came, vnumad was killed and is back, a VM went");

    process.0.kill()?;
    process.0.wait()?;
    expect_affinities(&[&second, &third]).context("scx_vnuma was killed")?;
    process = load(&[])?;
    expect_scheduled(&[&second, &third], false).context("full mode, killed, then partial mode")?;
    drop(second);
    expect_scheduled(&[&third], false).context("a VM has gone in partial mode")?;
    stop(process)?;
    expect_affinities(&[&third])?;
    drop(daemon);
    println!("from full to partial mode by SIGKILL, and a VM went");
    Ok(())
}

/// In full mode it has QEMU's other threads, too: their affinities are whose they are.
fn emulator_stays(guest: &Guest) -> Result<()> {
    let main = Loop::of_main_thread(&guest.vm);
    for (allowed, cpus) in [(FAR, &[1][..]), ("2", &[2]), (NEAR, &[2, 3])] {
        main.allow(allowed)?;
        let before = main.ran_ns()?;
        wait_for("QEMU's main thread to run where it may", HANG_LIMIT, || {
            Ok(main.ran_ns()? > before && cpus.contains(&main.cpu()?))
        })?;
    }
    println!("QEMU's main thread stays on its CPUs");
    Ok(())
}

/// A scheduler that the kernel knows by another name: a copy of scx_vnuma in which that is changed.
pub fn load_foreign() -> Result<Process> {
    fs::copy(PROGRAM, FOREIGN).context(FOREIGN)?;
    // The name fills 128 bytes of each variant, `partial` and `full`.
    let found = Command::new("grep")
        .args(["--only-matching", "--byte-offset", "--text", "--perl-regexp", "vnuma\\x00{123}", FOREIGN])
        .env("LC_ALL", "C")
        .output()?;
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    let file = fs::OpenOptions::new().write(true).open(FOREIGN).context(FOREIGN)?;
    let offsets: Vec<u64> = found.split(':').filter_map(offset).collect();
    ensure!(offsets.len() == 2, "the name is at {offsets:?} of {PROGRAM}");
    for at in offsets {
        file.write_all_at(b"other", at)?;
    }
    drop(file);
    let process = Process(Command::new(FOREIGN).stdin(Stdio::null()).spawn().context(FOREIGN)?);
    wait_for("the other scheduler to be loaded", HANG_LIMIT, || Ok(loaded()?.as_deref() == Some("other")))?;
    Ok(process)
}

/// The number at the end of what precedes a colon.
fn offset(part: &str) -> Option<u64> {
    part.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
