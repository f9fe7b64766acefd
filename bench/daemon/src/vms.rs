//! The VMs of a row: processes that end with the bench.

use crate::board::{Board, Place};
use anyhow::{Context, ensure};
use nix::sys::{prctl::set_pdeathsig, signal::Signal};
use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Of each VM.
pub const VCPUS: usize = 16;
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(120);

/// Has the process killed when the thread ends that starts it.
pub fn end_with_us(command: &mut Command) {
    // SAFETY: one system call, which is all that is done between fork and exec.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
}

/// VMs whose processes are killed when this is dropped.
pub struct Vms {
    children: Vec<Child>,
    board: Board,
    /// Of their QMP sockets.
    pub directory: PathBuf,
}

impl Vms {
    /// Starts so many, below `directory`.
    pub fn start(count: usize, directory: &Path) -> anyhow::Result<Self> {
        let (sockets, board_path) = (directory.join("qmp"), directory.join("board"));
        fs::create_dir_all(&sockets)?;
        let board = Board::create(&board_path, count * VCPUS)?;
        let mut vms = Self { children: Vec::new(), board, directory: sockets };
        let program = std::env::current_exe()?;
        for number in 0..count {
            let mut command = Command::new(&program);
            command.arg("qemu").arg("--socket").arg(vms.socket(number)).arg("--board").arg(&board_path);
            command.args(["--first", &(number * VCPUS).to_string(), "--vcpus", &VCPUS.to_string()]);
            command.args(["--", "-uuid", &uuid(number).0]);
            command.stdin(Stdio::null()).stdout(Stdio::null());
            end_with_us(&mut command);
            vms.children.push(command.spawn().context("starting a VM")?);
        }
        let end = Instant::now() + HANG;
        while !(0..count).all(|number| vms.socket(number).exists()) {
            ensure!(Instant::now() < end, "the VMs do not come up");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(vms)
    }

    /// A VM's QMP socket.
    pub fn socket(&self, number: usize) -> PathBuf {
        self.directory.join(format!("{}.sock", name(number)))
    }

    /// The process of a VM.
    pub fn pid(&self, number: usize) -> Option<u32> {
        self.children.get(number).map(Child::id)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.children.len()
    }

    /// All vCPUs, VM by VM.
    pub fn places(&self) -> &[Place] {
        self.board.places()
    }
}

impl Drop for Vms {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// What a VM is called.
pub fn name(number: usize) -> String {
    format!("vm{number:04}")
}

/// Its UUID, as text and as bytes.
pub fn uuid(number: usize) -> (String, [u8; 16]) {
    let mut bytes = [0; 16];
    bytes[6] = 0x40;
    bytes[8..].copy_from_slice(&(0x8000_0000_0000_0000 | number as u64).to_be_bytes());
    (format!("00000000-0000-4000-8000-{number:012x}"), bytes)
}
