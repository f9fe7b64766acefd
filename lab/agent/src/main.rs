//! The agent of a machine of the lab, started by the init script of its initial RAM disk:
//!
//! ```text
//! lab-agent init SERVICE   as process 1: reaps orphans and runs the agent; its end powers the machine off
//! lab-agent SERVICE        the agent; SERVICE is `ports` (virtio ports, in the server) or `vsock` (in a guest)
//! ```

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::wait::wait;
use vnuma_lab_agent::session::serve;
use vnuma_lab_agent::{PORT_PREFIX, PORTS, VSOCK_PORT, find_port, vsock};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["init", service] => init(service),
        ["ports"] => serve_ports(),
        ["vsock"] => serve_vsock(),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: lab-agent [init] ports|vsock")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Process 1.
fn init(service: &str) -> io::Result<()> {
    let agent = Command::new(std::env::current_exe()?).arg(service).spawn()?.id();
    loop {
        match wait() {
            Ok(status) if status.pid().is_some_and(|pid| pid.as_raw() as u32 == agent) => {
                eprintln!("lab-agent: the agent has ended ({status:?}); powering off");
                reboot(RebootMode::RB_POWER_OFF)?;
            }
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Serves each virtio port of the lab for ever; ends when one cannot be served.
fn serve_ports() -> io::Result<()> {
    let _kept = keep_kvm_as_it_is()
        .inspect_err(|error| eprintln!("lab-agent: /dev/kvm: {error}; KVM patches itself with each VM"));
    let (sender, failures) = std::sync::mpsc::channel();
    for number in 0..PORTS {
        let path = find_port(&format!("{PORT_PREFIX}{number}"))?;
        let sender = sender.clone();
        std::thread::spawn(move || {
            let error = serve_port(&path).err();
            // The receiver lives as long as the process.
            let _ = sender.send(io::Error::other(format!("{}: {error:?}", path.display())));
        });
    }
    Err(failures.recv().unwrap_or_else(|_| io::Error::other("no port is served any more")))
}

/// A vCPU that never runs and whose APIC therefore stays disabled. As long as there is one, KVM's code for that case stays
/// switched in (`apic_sw_disabled` in arch/x86/kvm/lapic.c); otherwise the kernel patches it in and out as VMs come, and
/// TCG, which translates code while another CPU patches it, now and then runs a breakpoint that is long gone.
fn keep_kvm_as_it_is() -> Result<(VmFd, VcpuFd), kvm_ioctls::Error> {
    let vm = Kvm::new()?.create_vm()?;
    vm.create_irq_chip()?;
    let vcpu = vm.create_vcpu(0)?;
    Ok((vm, vcpu))
}

fn serve_port(path: &Path) -> io::Result<()> {
    loop {
        let port = File::options().read(true).write(true).open(path)?;
        await_host(&port)?;
        if let Err(error) = serve(&port) {
            eprintln!("lab-agent: {}: {error}", path.display());
        }
    }
}

/// Waits until the other end of the port is open: what is written before is lost.
fn await_host(port: &File) -> io::Result<()> {
    loop {
        let mut polled = [PollFd::new(std::os::fd::AsFd::as_fd(port), PollFlags::POLLOUT)];
        poll(&mut polled, PollTimeout::ZERO)?;
        let events = polled[0].revents().unwrap_or(PollFlags::empty());
        if events.contains(PollFlags::POLLOUT) && !events.contains(PollFlags::POLLHUP) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Serves every connection from the server.
fn serve_vsock() -> io::Result<()> {
    let listener = vsock::listen_at(VSOCK_PORT)?;
    loop {
        match vsock::accept_at(&listener) {
            Ok(connection) => {
                std::thread::spawn(move || {
                    if let Err(error) = serve(&connection) {
                        eprintln!("lab-agent: connection: {error}");
                    }
                });
            }
            Err(error) => {
                // Too many descriptors, for example; that passes.
                eprintln!("lab-agent: vsock: {error}");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}
