//! A guest that the machine itself emulates, without a server around it: the KVM of an emulated server runs a kernel that
//! checks itself far too slowly. What drives it runs on the machine.

use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vnuma_lab_agent::client::Input;
use vnuma_lab_agent::protocol::{Frame, ProtocolError, Request, VERSION};

use crate::binaries::Binaries;
use crate::file_error::file_error;
use crate::image::Image;
use crate::initramfs;
use crate::lab::{Lab, LabError};
use crate::progress::Progress;
use crate::qemu::{self, Accel, Guest};
use crate::retries;
use crate::run_directory::run_directory;

impl Lab {
    /// Boots a guest; a boot that fails is tried once more.
    pub fn boot_guest(guest: &Guest) -> Result<Self, LabError> {
        let image = Image::ensure(Progress::Show)?;
        let initramfs = initramfs::without_modules(&image, &Binaries::build()?)?;
        match try_boot(guest, &image, &initramfs) {
            Err(LabError::Boot { reason, tail }) => {
                retries::note("the guest", &reason, &tail);
                try_boot(guest, &image, &initramfs)
            }
            result => result,
        }
    }

    /// From now on other processes can run programs in this machine: `lab-exec SOCKET PROGRAM`, each no longer than `limit`.
    /// What is returned becomes true when one of them finds that only the emulator can have ended the machine.
    pub fn serve(self: &Arc<Self>, socket: &Path, limit: Duration) -> io::Result<Arc<AtomicBool>> {
        let (lab, listener) = (self.clone(), UnixListener::bind(socket)?);
        let ended = Arc::new(AtomicBool::new(false));
        let told = ended.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (lab, told) = (lab.clone(), told.clone());
                std::thread::spawn(move || {
                    // The other process says what it lacks.
                    let _ = answer(&lab, &stream, limit, &told);
                });
            }
        });
        Ok(ended)
    }
}

fn try_boot(guest: &Guest, image: &Image, initramfs: &[u8]) -> Result<Lab, LabError> {
    let started = Instant::now();
    let directory = run_directory()?;
    let path = directory.path().to_owned();
    let initramfs_path = path.join("initramfs");
    fs::write(&initramfs_path, initramfs).map_err(file_error(&initramfs_path))?;
    let files = qemu::Files {
        tree: &image.tree(),
        kernel: &guest.vmlinux,
        initramfs: &initramfs_path,
        root_disk: &image.root_disk(),
        directory: &path,
    };
    Lab::start(qemu::guest(guest, &files), directory, image, Accel::Tcg, None, started)
}

/// What a program writes, as frames.
struct Output<'a> {
    stream: &'a Mutex<UnixStream>,
    frame: fn(Vec<u8>) -> Frame,
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send(self.stream, &(self.frame)(bytes.to_vec())).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn send(stream: &Mutex<UnixStream>, frame: &Frame) -> Result<(), ProtocolError> {
    frame.write(&mut *stream.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Answers one request of a process, as the agent itself would.
fn answer(lab: &Lab, stream: &UnixStream, limit: Duration, ended: &AtomicBool) -> Result<(), ProtocolError> {
    let (mut reader, writer) = (BufReader::new(stream.try_clone()?), Mutex::new(stream.try_clone()?));
    send(&writer, &Frame::Hello(VERSION))?;
    let Some(Frame::Request(Request::Exec(exec))) = Frame::read(&mut reader)? else { return Ok(()) };
    let mut stdout = Output { stream: &writer, frame: Frame::Stdout };
    let mut stderr = Output { stream: &writer, frame: Frame::Stderr };
    let end = match lab.exec(&exec, Input::Null, &mut stdout, &mut stderr, limit) {
        Ok(status) => Frame::Exit(status),
        Err(error) => {
            ended.fetch_or(error.emulator_fault(), SeqCst);
            Frame::Error(error.to_string())
        }
    };
    send(&writer, &end)?;
    // What the other process still sends is not needed, but must not fail.
    io::copy(&mut reader.by_ref(), &mut io::sink())?;
    Ok(())
}
