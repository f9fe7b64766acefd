//! The client's side of a session with an agent.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::protocol::{Exec, Frame, MAX_DATA, ProtocolError, Request, STDIN_WINDOW, VERSION};
use crate::terminal;

/// Milliseconds between two checks of the input thread whether the request has ended.
const INPUT_POLL_MS: u16 = 50;

/// Why a request was not done.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The stream of frames is broken.
    #[error("agent: {0}")]
    Protocol(#[from] ProtocolError),
    /// The agent is gone: its machine died, or the agent did.
    #[error("agent: the connection ended")]
    Gone,
    /// The agent speaks another version.
    #[error("agent: speaks version {found} of the protocol, expected {VERSION}")]
    Version {
        /// What it speaks.
        found: u32,
    },
    /// A frame that does not belong here.
    #[error("agent: unexpected frame {0}")]
    Unexpected(String),
    /// The agent could not do it.
    #[error("{0}")]
    Refused(String),
    /// A local file or stream failed.
    #[error("{what}: {source}")]
    Local {
        /// Which.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Where the input of a program comes from.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// There is none.
    Null,
    /// A file, pipe or terminal.
    From(BorrowedFd<'a>),
}

/// A connection to an agent.
#[derive(Debug)]
pub struct Session<R, W> {
    reader: R,
    writer: W,
}

impl<R: Read, W: Write + Send> Session<R, W> {
    /// Waits for the agent's greeting.
    pub fn open(mut reader: R, writer: W) -> Result<Self, ClientError> {
        match Frame::read(&mut reader)? {
            Some(Frame::Hello(VERSION)) => Ok(Self { reader, writer }),
            Some(Frame::Hello(found)) => Err(ClientError::Version { found }),
            Some(frame) => Err(unexpected(&frame)),
            None => Err(ClientError::Gone),
        }
    }

    /// Runs a program, passing its streams through as they come, and gives its exit status.
    pub fn exec(
        &mut self,
        exec: &Exec,
        input: Input<'_>,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
    ) -> Result<i32, ClientError> {
        self.request(Request::Exec(exec.clone()), input, stdout, stderr)
    }

    /// Writes a file in the machine.
    pub fn put(&mut self, path: &str, mode: u32, content: BorrowedFd<'_>) -> Result<(), ClientError> {
        let request = Request::Put { path: path.into(), mode };
        self.request(request, Input::From(content), &mut io::sink(), &mut io::sink()).map(drop)
    }

    /// Reads a file of the machine.
    pub fn get(&mut self, path: &str, content: &mut dyn Write) -> Result<(), ClientError> {
        let request = Request::Get { path: path.into() };
        self.request(request, Input::Null, content, &mut io::sink()).map(drop)
    }

    fn request(
        &mut self,
        request: Request,
        input: Input<'_>,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
    ) -> Result<i32, ClientError> {
        let Self { reader, writer } = self;
        Frame::Request(request).write(writer)?;
        let (writer, window) = (Mutex::new(writer), Window::new());
        let result = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let result = send_input(input, &writer, &window);
                if result.is_err() {
                    // The program must not wait for ever for input that cannot be read.
                    let _ = send(&writer, &Frame::StdinEnd);
                }
                result
            });
            let result = receive(reader, &window, stdout, stderr);
            window.end();
            // Errors of the input only matter if the agent did not end the request by itself.
            let input_result = sender.join().unwrap_or(Ok(()));
            result.and_then(|result| match result {
                Ended::Exit(status) => input_result.map(|()| Ended::Exit(status)),
                refused => Ok(refused),
            })
        });
        let result = result?;
        Frame::Close.write(&mut *writer.into_inner().unwrap_or_else(PoisonError::into_inner))?;
        match result {
            Ended::Exit(status) => Ok(status),
            Ended::Refused(text) => Err(ClientError::Refused(text)),
        }
    }
}

/// How the agent ended a request.
enum Ended {
    Exit(i32),
    Refused(String),
}

fn unexpected(frame: &Frame) -> ClientError {
    ClientError::Unexpected(format!("{frame:?}").chars().take(100).collect())
}

fn receive(
    reader: &mut impl Read,
    window: &Window,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<Ended, ClientError> {
    let local = |what| move |source| ClientError::Local { what, source };
    loop {
        match Frame::read(reader)?.ok_or(ClientError::Gone)? {
            Frame::Stdout(bytes) => {
                stdout.write_all(&bytes).and_then(|()| stdout.flush()).map_err(local("stdout"))?;
            }
            Frame::Stderr(bytes) => {
                stderr.write_all(&bytes).and_then(|()| stderr.flush()).map_err(local("stderr"))?;
            }
            Frame::Credit(bytes) => window.grow(bytes as usize),
            Frame::Exit(status) => return Ok(Ended::Exit(status)),
            Frame::Error(text) => return Ok(Ended::Refused(text)),
            frame => return Err(unexpected(&frame)),
        }
    }
}

fn send(writer: &Mutex<&mut impl Write>, frame: &Frame) -> Result<(), ProtocolError> {
    frame.write(&mut **writer.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Sends input until it ends or the request does, and changes of the terminal's size.
fn send_input(input: Input<'_>, writer: &Mutex<&mut impl Write>, window: &Window) -> Result<(), ClientError> {
    let send = |frame: Frame| send(writer, &frame);
    let local = |source: io::Error| ClientError::Local { what: "stdin", source };
    let Input::From(source) = input else { return Ok(send(Frame::StdinEnd)?) };
    let mut buffer = vec![0; MAX_DATA];
    let mut size = terminal::size();
    while !window.ended() {
        let now = terminal::size();
        if let (true, Some((rows, columns))) = (now != size, now) {
            send(Frame::Resize(rows, columns))?;
        }
        size = now;
        let mut polled = [PollFd::new(source.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::from(INPUT_POLL_MS)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
            Ok(_) => {}
            Err(errno) => return Err(local(errno.into())),
        }
        let allowed = window.wait(buffer.len());
        if allowed == 0 {
            break;
        }
        match nix::unistd::read(source, &mut buffer[..allowed]) {
            // EIO: the terminal is gone.
            Ok(0) | Err(nix::errno::Errno::EIO) => return Ok(send(Frame::StdinEnd)?),
            Ok(length) => {
                window.shrink(length);
                send(Frame::Stdin(buffer[..length].to_vec()))?;
            }
            Err(nix::errno::Errno::EINTR | nix::errno::Errno::EAGAIN) => {}
            Err(errno) => return Err(local(errno.into())),
        }
    }
    Ok(())
}

/// Bytes of stdin that may be sent, and whether the request has ended.
struct Window {
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Window {
    fn new() -> Self {
        Self { state: Mutex::new((STDIN_WINDOW, false)), changed: Condvar::new() }
    }

    fn update(&self, change: impl FnOnce(&mut (usize, bool))) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// An agent that gives more credit than was used gains nothing by it.
    fn grow(&self, bytes: usize) {
        self.update(|(free, _)| *free = free.saturating_add(bytes).min(STDIN_WINDOW));
    }

    fn shrink(&self, bytes: usize) {
        self.update(|(free, _)| *free = free.saturating_sub(bytes));
    }

    fn end(&self) {
        self.update(|(_, ended)| *ended = true);
    }

    fn ended(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Waits until something may be sent; how much, at most `wanted`, or 0 when the request has ended.
    fn wait(&self, wanted: usize) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match *state {
                (_, true) => return 0,
                (0, false) => {}
                (free, false) => return free.min(wanted),
            }
            let waited = self.changed.wait_timeout(state, Duration::from_millis(u64::from(INPUT_POLL_MS)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
