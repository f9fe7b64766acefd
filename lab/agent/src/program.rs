//! A program that the agent runs for a client.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::outlet::Outlet;
use crate::protocol::{Exec, Frame, MAX_DATA};

/// How long output may stay silent after the end of a program before it counts as complete although
/// something that the program started still holds it open, in milliseconds.
const SILENCE_MS: u16 = 100;

/// How long a program whose client went away may clean up.
const HANG_UP_GRACE: Duration = Duration::from_secs(2);

/// A running program.
pub(crate) struct Program {
    group: Pid,
    /// Whether the program has not been waited for, so that its number is its own.
    alive: Arc<Mutex<bool>>,
    input: Sender<Option<Vec<u8>>>,
    terminal: Option<File>,
}

impl Program {
    /// Starts it; from here its output, its credits and at last its exit status go to the outlet.
    pub(crate) fn start(exec: &Exec, outlet: &Outlet) -> io::Result<Self> {
        let Some((program, arguments)) = exec.argv.split_first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no program is named"));
        };
        let mut command = Command::new(program);
        command.args(arguments).envs(exec.env.iter().map(|(name, value)| (name, value)));
        let terminal = exec.terminal.map(|size| attach_terminal(&mut command, size)).transpose()?;
        if terminal.is_none() {
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let has_terminal = terminal.is_some();
        // SAFETY: setsid() and ioctl() are async-signal-safe and touch no memory of this process.
        unsafe {
            command.pre_exec(move || {
                nix::unistd::setsid()?;
                if has_terminal && libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        // It holds the slave side of the terminal, whose end is to be seen.
        drop(command);
        let ended = Arc::new(AtomicBool::new(false));
        let (input, chunks) = channel();
        let mut pumps = Vec::new();
        if let Some(terminal) = &terminal {
            feed(terminal.try_clone()?, chunks, outlet, true);
            pumps.push(pump(terminal.try_clone()?, Frame::Stdout, outlet, &ended));
        } else if let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        {
            feed(OwnedFd::from(stdin).into(), chunks, outlet, false);
            pumps.push(pump(OwnedFd::from(stdout).into(), Frame::Stdout, outlet, &ended));
            pumps.push(pump(OwnedFd::from(stderr).into(), Frame::Stderr, outlet, &ended));
        }
        let group = Pid::from_raw(child.id() as i32);
        let alive = Arc::new(Mutex::new(true));
        await_end(child, alive.clone(), ended, pumps, outlet.clone());
        Ok(Self { group, alive, input, terminal })
    }

    /// Where its input goes; `None` is the end of it.
    pub(crate) fn input(&self) -> &Sender<Option<Vec<u8>>> {
        &self.input
    }

    /// Its terminal has another size now.
    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        if let Some(terminal) = &self.terminal {
            set_size(terminal, (rows, columns));
        }
    }

    /// Its client went away: ends it and what it started.
    pub(crate) fn hang_up(self) {
        self.signal(Signal::SIGHUP);
        std::thread::spawn(move || {
            std::thread::sleep(HANG_UP_GRACE);
            self.signal(Signal::SIGKILL);
        });
    }

    fn signal(&self, signal: Signal) {
        if *self.alive.lock().unwrap_or_else(PoisonError::into_inner) {
            // It may have ended just now.
            let _ = killpg(self.group, signal);
        }
    }
}

/// Gives the command a new terminal; its master side comes back.
fn attach_terminal(command: &mut Command, size: (u16, u16)) -> io::Result<File> {
    let pty = nix::pty::openpty(None, None)?;
    let master = File::from(pty.master);
    set_size(&master, size);
    nix::fcntl::fcntl(&master, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    command.stdin(pty.slave.try_clone()?).stdout(pty.slave.try_clone()?).stderr(pty.slave);
    Ok(master)
}

fn set_size(terminal: &File, (ws_row, ws_col): (u16, u16)) {
    let size = libc::winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize from the address given, which is one. A failure leaves the old size.
    unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) };
}

/// Sends what comes from `source` until it ends.
fn pump(
    mut source: File,
    frame: fn(Vec<u8>) -> Frame,
    outlet: &Outlet,
    ended: &Arc<AtomicBool>,
) -> std::thread::JoinHandle<()> {
    let (outlet, ended) = (outlet.clone(), ended.clone());
    std::thread::spawn(move || {
        let mut buffer = vec![0; MAX_DATA];
        loop {
            // Before the poll: what was written before the end is then seen by the poll or a later one.
            let was_ended = ended.load(Ordering::Acquire);
            let mut polled = [PollFd::new(source.as_fd(), PollFlags::POLLIN)];
            match poll(&mut polled, PollTimeout::from(SILENCE_MS)) {
                Ok(0) if was_ended => return,
                Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
                Ok(_) => {}
                Err(_) => return,
            }
            match source.read(&mut buffer) {
                Ok(length) if length > 0 => {
                    if !outlet.send(&frame(buffer[..length].to_vec())) {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // EIO is the end of a terminal.
                Ok(_) | Err(_) => return,
            }
        }
    })
}

/// Writes input to `sink`. The thread is not waited for: a child of the program can hold its input open.
fn feed(mut sink: File, chunks: Receiver<Option<Vec<u8>>>, outlet: &Outlet, terminal: bool) {
    let outlet = outlet.clone();
    std::thread::spawn(move || {
        while let Ok(Some(bytes)) = chunks.recv() {
            if sink.write_all(&bytes).is_err() {
                return;
            }
            outlet.send(&Frame::Credit(bytes.len() as u32));
        }
        if terminal {
            // A terminal has no end of file of its own; ^D is one for a reader of lines.
            let _ = sink.write_all(&[4]);
        }
    });
}

/// Waits for the end of the program and of its output, and reports it.
fn await_end(
    mut child: Child,
    alive: Arc<Mutex<bool>>,
    ended: Arc<AtomicBool>,
    pumps: Vec<std::thread::JoinHandle<()>>,
    outlet: Outlet,
) {
    std::thread::spawn(move || {
        let pid = Pid::from_raw(child.id() as i32);
        // Only check first, so that no reused number is signalled.
        while waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
            == Err(nix::errno::Errno::EINTR)
        {}
        *alive.lock().unwrap_or_else(PoisonError::into_inner) = false;
        let status = child.wait();
        ended.store(true, Ordering::Release);
        for pump in pumps {
            // A panic of the thread was reported on the console.
            let _ = pump.join();
        }
        outlet.end(&match status {
            Ok(status) => Frame::Exit(exit_code(status)),
            Err(error) => Frame::Error(format!("cannot wait for the program: {error}")),
        });
    });
}

/// As shells have it: 128 + signal for a program ended by one.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(255)
}
