//! A domain of an unmodified libvirt is a VM like others: found, watched, moved by libvirt's own pins, attached by its hot-plug. Its
//! guest follows while vnumad and libvirtd are killed and started again, and it is gone when it has ended.

use crate::guest::{check, check_kernel_log, equip, listed, wait_until_listed, wait_until_seen};
use crate::virsh::{Libvirt, virsh};
use crate::{kept, limits};
use anyhow::{Context, Result, bail, ensure};
use std::{fs, process::Stdio, thread::sleep, time::Duration};
use vnuma_scenario::{HANG_LIMIT, Process, Vm, output, vnumactl, vnumactl_command, vnumad, wait_for};

pub(crate) const NAME: &str = "web";
pub(crate) const CID: u32 = 77;
pub(crate) const FILE: &str = "/root/web.xml";
const CONFIGURATION: &str = "/root/vnumad-libvirt.toml";
const KERNEL: &str = "/run/lab/kernels/6.12";

/// CPUs of each node, without CPU 0, on which VMs of the lab do not run.
const CPUS: [&str; 2] = ["1", "2-3"];

/// libvirt knows nothing of devices that are named on QEMU's command line only, and would keep QEMU from them.
pub(crate) const DEVICES: &str = "cgroup_device_acl = [ \"/dev/null\", \"/dev/full\", \"/dev/zero\", \"/dev/random\", \"/dev/urandom\", \
    \"/dev/ptmx\", \"/dev/kvm\", \"/dev/vda\", \"/dev/vhost-vsock\" ]\n";

/// A vnumad is killed, or stopped and then killed, so long after it was asked to attach.
const MOMENTS_MS: [u64; 3] = [5, 30, 120];

/// What the domain has of the lab: disk, agent, and a monitor for lab-vm that vnumad does not know of.
const SURROUNDINGS: [&str; 8] = [
    "-drive",
    "if=none,id=root,file=/dev/vda,format=raw,readonly=on,file.locking=off",
    "-device",
    "virtio-blk-pci,bus=pcie.0,addr=0x10,drive=root,modern-pio-notify=on",
    "-device",
    "vhost-vsock-pci,bus=pcie.0,addr=0x11,guest-cid=CID,modern-pio-notify=on",
    "-qmp",
    "unix:DIRECTORY/ctl.sock,server=on,wait=off",
];

pub(crate) const DOMAIN: &str = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>NAME</name><memory unit='MiB'>384</memory>
  <vcpu placement='static' cpuset='1-3'>2</vcpu>
  <cputune><emulatorpin cpuset='1-3'/></cputune>
  <numatune><memory mode='strict' nodeset='0-1'/>
    <memnode cellid='0' mode='strict' nodeset='0'/><memnode cellid='1' mode='strict' nodeset='1'/></numatune>
  <os><type arch='x86_64' machine='q35'>hvm</type>
    <kernel>KERNEL/vmlinux</kernel><initrd>KERNEL/initrd</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests init_on_alloc=0 pci=lastbus=0 vnuma.role=guest</cmdline></os>
  <features><acpi/><apic/></features>
  <cpu mode='host-passthrough'><topology sockets='2' cores='1' threads='1'/><numa>
    <cell id='0' cpus='0' memory='192' unit='MiB'/><cell id='1' cpus='1' memory='192' unit='MiB'/></numa></cpu>
  <devices><controller type='pci' index='0' model='pcie-root'/><controller type='pci' index='1' model='pcie-root-port'/>
    <controller type='usb' model='none'/><memballoon model='none'/>
    <serial type='file'><source path='DIRECTORY/console.log'/></serial></devices>
  <qemu:commandline>ARGUMENTS</qemu:commandline></domain>";

pub fn run() -> Result<()> {
    fs::write(CONFIGURATION, "[libvirt]\nuris = [\"qemu:///system\"]\n").context(CONFIGURATION)?;
    let mut libvirt = Libvirt::start(DEVICES)?;
    let vm = start()?;
    equip(&vm)?;
    place(&vm, 0, 0)?;
    place(&vm, 1, 1)?;
    let taints = taints()?;
    let daemon = start_vnumad()?;
    wait_until_listed(NAME)?;
    vnumactl(&["attach", NAME])?;
    expect(&vm, [0, 1])?;
    ensure!(has_channel()?, "virsh dumpxml does not show the channel's device");
    println!("the domain is found, attached by libvirt, and told");

    moves(&vm)?;
    let daemon = vnumad_is_killed(&vm, daemon)?;
    libvirtd_is_killed(&vm, &mut libvirt)?;
    let daemon = vnumad_is_killed_in_mid_attach(&vm, daemon)?;
    ensure!(self::taints()? == taints, "vnumad has tainted the domain: {}", self::taints()?);
    check_kernel_log(&vm)?;

    // Only the kernel reports its end.
    libvirt.kill();
    output("kill", &["-KILL", &vm.pid.to_string()])?;
    wait_until_gone()?;
    libvirt.restart()?;
    wait_for("libvirt to know that the domain has ended", HANG_LIMIT, || {
        Ok(virsh(&["list", "--name"])?.trim().is_empty())
    })?;
    drop(vm);
    let vm = start()?;
    wait_until_listed(NAME)?;
    virsh(&["destroy", NAME])?;
    wait_until_gone()?;
    println!("a domain that ends is gone, with libvirtd and without");
    drop((vm, daemon));
    Ok(())
}

/// What takes too long for every test run: a guest that has to be asked again, what libvirt does to a domain as a whole, and an
/// operator's limits.
pub fn run_slow() -> Result<()> {
    fs::write(CONFIGURATION, "[libvirt]\nuris = [\"qemu:///system\"]\n").context(CONFIGURATION)?;
    let _libvirt = Libvirt::start(DEVICES)?;
    let vm = start()?;
    let daemon = start_vnumad()?;
    wait_until_listed(NAME)?;
    vnumactl(&["attach", NAME])?;
    detached_while_it_boots(&vm)?;
    let vm = kept::run(vm)?;
    drop(daemon);
    virsh(&["destroy", NAME])?;
    drop(vm);
    limits::run()
}

/// A guest that boots does not see what it is asked for: vnumad asks again, and has the device back without a reset.
fn detached_while_it_boots(vm: &Vm) -> Result<()> {
    virsh(&["reset", NAME])?;
    let error = vnumactl(&["detach", NAME]).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(error.contains("it is asked again"), "a guest that boots has let go at once: {error:?}");
    let mut problem = String::new();
    wait_for("the guest to have been asked again, and to have let go", HANG_LIMIT, || {
        let shown = listed(NAME)?.context("it is gone")?;
        if let Some(said) = shown["problem"].as_str() {
            said.clone_into(&mut problem);
        }
        Ok(shown["channel"] == "none")
    })?;
    ensure!(problem.contains("asked for"), "nothing was said of it: {problem:?}");
    // It may have let go long before its first program runs.
    wait_for("the guest to have booted", HANG_LIMIT, || Ok(vm.exec(&["true"]).is_ok()))?;
    ensure!(!has_channel()?, "virsh dumpxml shows a device that was detached");
    println!("detached while it boots: {problem}; then it let go");
    Ok(())
}

/// Creates the domain and waits until its guest is up.
fn start() -> Result<Vm> {
    create(NAME, CID)
}

/// The same, as a VM that lab-vm knows by this name and context id.
pub(crate) fn create(lab_name: &str, cid: u32) -> Result<Vm> {
    create_as(NAME, lab_name, cid)
}

/// The same of a domain with another name.
pub(crate) fn create_as(name: &str, lab_name: &str, cid: u32) -> Result<Vm> {
    create_from(DOMAIN, name, lab_name, cid)
}

/// The same of a domain that is described otherwise.
pub(crate) fn create_from(domain: &str, name: &str, lab_name: &str, cid: u32) -> Result<Vm> {
    let directory = Vm::prepare(lab_name, cid)?.display().to_string();
    // QEMU makes its monitor there, as whichever user libvirt starts it.
    output("chmod", &["o+rwx", &directory])?;
    let words = SURROUNDINGS.map(|word| format!("<qemu:arg value='{word}'/>")).concat();
    let cid = cid.to_string();
    let parts = [
        ("ARGUMENTS", words.as_str()),
        ("NAME", name),
        ("CID", &cid),
        ("KERNEL", KERNEL),
        ("DIRECTORY", &directory),
    ];
    let text = parts.iter().fold(domain.to_owned(), |text, (from, to)| text.replace(from, to));
    fs::write(FILE, text).context(FILE)?;
    virsh(&["create", FILE])?;
    let path = format!("/run/libvirt/qemu/{name}.pid");
    let pid = fs::read_to_string(&path).with_context(|| path.clone())?;
    Vm::started(lab_name, pid.trim().parse().context(path)?)
}

fn start_vnumad() -> Result<Process> {
    vnumad(&["--config", CONFIGURATION])
}

/// Puts a vCPU on a node, as an operator does who uses no libvirt for that.
pub(crate) fn place(vm: &Vm, vcpu: usize, node: usize) -> Result<()> {
    output("taskset", &["-p", "-c", CPUS[node], &vm.threads[vcpu].to_string()]).map(drop)
}

/// vCPUs are on these nodes, and the guest uses them.
pub(crate) fn expect(vm: &Vm, nodes: [u64; 2]) -> Result<()> {
    wait_until_seen(NAME, &nodes.map(|node| (node, node, "true")))?;
    check(vm, &nodes)
}

/// What libvirt says that a vCPU is pinned to.
pub(crate) fn pin(vcpu: &str) -> Result<String> {
    let pins = virsh(&["vcpupin", NAME, "--live"])?;
    let line = pins.lines().find(|line| line.split_whitespace().next() == Some(vcpu));
    let pin = line.and_then(|line| line.split_whitespace().nth(1));
    pin.map(str::to_owned).with_context(|| format!("no pin of vCPU {vcpu}: {pins}"))
}

pub(crate) fn move_to(vcpu: &str, node: &str) -> Result<()> {
    vnumactl(&["move", NAME, "--vcpu", vcpu, "--node", node]).map(drop)
}

fn expect_refused(outcome: Result<()>, part: &str) -> Result<()> {
    let error = outcome.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(error.contains(part), "no {part:?} in {error:?}");
    Ok(())
}

/// As libvirt has them in its file of the domain. Arguments of the operator's are one.
fn taints() -> Result<String> {
    let path = format!("/run/libvirt/qemu/{NAME}.xml");
    let text = fs::read_to_string(&path).context(path)?;
    Ok(text.lines().filter(|line| line.contains("<taint")).map(str::trim).collect::<Vec<_>>().join(" "))
}

pub(crate) fn has_channel() -> Result<bool> {
    has_channel_of(NAME)
}

/// The same of a domain with another name.
pub(crate) fn has_channel_of(name: &str) -> Result<bool> {
    Ok(virsh(&["dumpxml", name])?.contains("<alias name='ua-vnuma'/>"))
}

/// By vnumad, which pins as libvirt does and within what the operator allows; by libvirt; by the affinity alone.
fn moves(vm: &Vm) -> Result<()> {
    move_to("0", "1")?;
    expect(vm, [1, 1])?;
    ensure!(pin("0")? == "2-3", "libvirt has not pinned vCPU 0: {}", pin("0")?);
    move_to("0", "0")?;
    expect(vm, [0, 1])?;
    ensure!(pin("0")? == "1", "not within <vcpu cpuset>: {}", pin("0")?);
    virsh(&["vcpupin", NAME, "0", "3", "--live"])?;
    expect(vm, [1, 1])?;
    expect_refused(move_to("0", "0"), "an operator's vcpupin lets its vCPU 0 run on CPUs 3 only, none of")?;
    place(vm, 1, 0)?;
    expect(vm, [1, 0])?;
    println!("the guest follows moves by vnumad, virsh and taskset; an operator's pin is a limit");
    Ok(())
}

/// With the last one gone a vCPU moves, and the next one tells.
fn vnumad_is_killed(vm: &Vm, daemon: Process) -> Result<Process> {
    drop(daemon);
    place(vm, 1, 1)?;
    let daemon = start_vnumad()?;
    wait_until_channel("attached")?;
    expect(vm, [1, 1])?;
    // vCPU 1 was pinned by nobody but by its affinity, so its limit is the domain's.
    move_to("1", "0")?;
    expect(vm, [1, 0])?;
    println!("a vnumad that is killed is followed by one that has its channel");
    Ok(daemon)
}

/// The guest follows without it, which needs only the kernel; moves wait for it.
fn libvirtd_is_killed(vm: &Vm, libvirt: &mut Libvirt) -> Result<()> {
    virsh(&["vcpupin", NAME, "0", "1-3", "--live"])?;
    place(vm, 0, 1)?;
    expect(vm, [1, 0])?;
    libvirt.signal("-STOP")?;
    place(vm, 0, 0)?;
    expect(vm, [0, 0]).context("while libvirtd is stopped")?;
    libvirt.signal("-CONT")?;
    place(vm, 0, 1)?;
    expect(vm, [1, 0])?;
    libvirt.kill();
    place(vm, 0, 0)?;
    expect(vm, [0, 0])?;
    wait_for("vnumad to notice that libvirt is gone", HANG_LIMIT, || {
        let Err(error) = move_to("1", "1") else { bail!("a vCPU was moved without libvirt") };
        Ok(format!("{error:#}").contains("not connected to what manages the VM"))
    })?;
    libvirt.restart()?;
    wait_until_listed(NAME)?;
    move_to("1", "1")?;
    expect(vm, [0, 1])?;
    println!("libvirtd is stopped, killed and started: the guest follows meanwhile, and is moved afterwards");
    Ok(())
}

/// Whenever that is, QEMU goes on, and another vnumad attaches the VM or has it attached.
fn vnumad_is_killed_in_mid_attach(vm: &Vm, daemon: Process) -> Result<Process> {
    let mut daemon = Some(daemon);
    for (moment, stopped) in MOMENTS_MS.into_iter().flat_map(|moment| [(moment, false), (moment, true)]) {
        detach()?;
        ensure!(!has_channel()?, "virsh dumpxml shows a device that was detached");
        let attach = vnumactl_command(&["attach", NAME]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let attach = Process(attach.context("vnumactl attach")?);
        sleep(Duration::from_millis(moment));
        if let Some(daemon) = daemon.as_ref().filter(|_| stopped) {
            output("kill", &["-STOP", &daemon.0.id().to_string()])?;
            vm.exec(&["true"]).context("the guest stands still while vnumad is stopped")?;
        }
        drop(daemon.take());
        vm.exec(&["true"]).context("the guest stands still")?;
        drop(attach);
        daemon = Some(start_vnumad()?);
        wait_until_listed(NAME)?;
        let came = has_channel()?;
        match vnumactl(&["attach", NAME]) {
            Err(error) if !format!("{error:#}").contains("attached") => return Err(error),
            _ => {}
        }
        wait_until_channel("attached")?;
        expect(vm, [0, 1])?;
        println!(
            "vnumad was {} {moment} ms after it was asked to attach: the device {}",
            if stopped { "stopped" } else { "killed" },
            if came { "came" } else { "did not come" }
        );
    }
    daemon.context("no vnumad")
}

/// A guest that is busy may let go of the device later than vnumactl waits for it.
pub(crate) fn detach() -> Result<()> {
    match vnumactl(&["detach", NAME]) {
        Err(error) if format!("{error:#}").contains("has not released") => wait_until_channel("none"),
        result => result.map(drop),
    }
}

fn wait_until_channel(state: &str) -> Result<()> {
    let mut last = None;
    wait_for(&format!("the channel to be {state}"), HANG_LIMIT, || {
        last = listed(NAME)?.map(|vm| vm["channel"].clone());
        Ok(last.as_ref().is_some_and(|channel| channel == state))
    })
    .with_context(|| format!("the channel is {last:?}"))
}

fn wait_until_gone() -> Result<()> {
    wait_for("the domain to be gone", HANG_LIMIT, || Ok(listed(NAME)?.is_none()))
}
