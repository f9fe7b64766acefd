//! The agent's side of a session: one request after the other.
//!
//! The thread of the connection only reads frames, so that it sees at once when the client goes away.
//! Per program there are threads for its output, its input, and its end.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::outlet::Outlet;
use crate::program::Program;
use crate::protocol::{Exec, Frame, MAX_DATA, ProtocolError, Request, VERSION};

/// Serves a connection until it ends.
pub fn serve<C: Connection>(connection: &C) -> Result<(), ProtocolError> {
    let mut reader = connection.reader()?;
    Frame::Hello(VERSION).write(&mut connection.writer()?)?;
    while let Some(frame) = Frame::read(&mut reader)? {
        match frame {
            Frame::Request(request) => {
                let outlet = Outlet::new(connection.writer()?);
                if !answer(request, &outlet, &mut reader)? {
                    return Ok(());
                }
            }
            // What was under way when the last request ended.
            Frame::Stdin(_) | Frame::StdinEnd | Frame::Resize(..) | Frame::Close => {}
            frame => return Err(io::Error::other(format!("unexpected frame {frame:?}")).into()),
        }
    }
    Ok(())
}

/// A stream in both directions that can be taken apart.
pub trait Connection {
    /// For reading.
    fn reader(&self) -> io::Result<impl Read>;
    /// For writing.
    fn writer(&self) -> io::Result<Box<dyn Write + Send>>;
}

impl Connection for File {
    fn reader(&self) -> io::Result<impl Read> {
        Ok(io::BufReader::with_capacity(MAX_DATA, self.try_clone()?))
    }

    fn writer(&self) -> io::Result<Box<dyn Write + Send>> {
        Ok(Box::new(self.try_clone()?))
    }
}

impl Connection for std::os::unix::net::UnixStream {
    fn reader(&self) -> io::Result<impl Read> {
        Ok(io::BufReader::with_capacity(MAX_DATA, self.try_clone()?))
    }

    fn writer(&self) -> io::Result<Box<dyn Write + Send>> {
        Ok(Box::new(self.try_clone()?))
    }
}

/// Answers one request; `false` if the client went away meanwhile.
fn answer(request: Request, outlet: &Outlet, reader: &mut impl Read) -> Result<bool, ProtocolError> {
    match request {
        Request::Exec(exec) => run(&exec, outlet, reader),
        Request::Put { path, mode } => {
            let (input, content) = channel();
            let outlet = outlet.clone();
            let done = std::thread::spawn(move || {
                let frame = match put(&path, mode, &content, &outlet) {
                    Ok(()) => Frame::Exit(0),
                    Err(error) => Frame::Error(format!("{path}: {error}")),
                };
                outlet.end(&frame);
            });
            let there = feed(reader, &input, |_, _| {});
            drop(input);
            // Also when the connection broke: what was half written is gone before the next request.
            // A panic of the thread was reported on the console.
            let _ = done.join();
            there
        }
        Request::Get { path } => {
            let result = get(&path, outlet);
            let error = |error| Frame::Error(format!("{path}: {error}"));
            outlet.end(&result.map_or_else(error, |()| Frame::Exit(0)));
            Ok(true)
        }
    }
}

fn run(exec: &Exec, outlet: &Outlet, reader: &mut impl Read) -> Result<bool, ProtocolError> {
    let program = match Program::start(exec, outlet) {
        Ok(program) => program,
        Err(error) => {
            let name = exec.argv.first().map_or("", String::as_str);
            outlet.send(&Frame::Stderr(format!("lab-agent: {name}: {error}\n").into_bytes()));
            outlet.end(&Frame::Exit(match error.kind() {
                io::ErrorKind::NotFound => crate::protocol::STATUS_NOT_FOUND,
                _ => crate::protocol::STATUS_CANNOT_START,
            }));
            return Ok(true);
        }
    };
    let result = feed(reader, program.input(), |rows, columns| program.resize(rows, columns));
    if !matches!(result, Ok(true)) {
        program.hang_up();
    }
    result
}

/// Passes input on until the client closes the request (`true`) or goes away (`false`).
fn feed(
    reader: &mut impl Read,
    input: &Sender<Option<Vec<u8>>>,
    resize: impl Fn(u16, u16),
) -> Result<bool, ProtocolError> {
    while let Some(frame) = Frame::read(reader)? {
        // Sending fails when the program has ended; the client will see that soon.
        match frame {
            Frame::Stdin(bytes) => drop(input.send(Some(bytes))),
            Frame::StdinEnd => drop(input.send(None)),
            Frame::Resize(rows, columns) => resize(rows, columns),
            Frame::Close => return Ok(true),
            frame => return Err(io::Error::other(format!("unexpected frame {frame:?}")).into()),
        }
    }
    Ok(false)
}

fn put(path: &str, mode: u32, content: &Receiver<Option<Vec<u8>>>, outlet: &Outlet) -> io::Result<()> {
    let target = Path::new(path);
    if !target.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path must be absolute"));
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    // A new file beside it and a rename: a program that runs from the old one is not disturbed, and a
    // transfer that was cut leaves the old one.
    let mut name = target.as_os_str().to_owned();
    name.push(".lab-put");
    let temporary = Path::new(&name);
    if let Err(error) = fs::remove_file(temporary)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let file = File::options().write(true).create_new(true).mode(mode & 0o7777).open(temporary)?;
    let result = receive(file, mode, content, outlet).and_then(|()| fs::rename(temporary, target));
    if result.is_err() {
        // The first error says more than one of tidying up.
        let _ = fs::remove_file(temporary);
    }
    result
}

fn receive(
    mut file: File,
    mode: u32,
    content: &Receiver<Option<Vec<u8>>>,
    outlet: &Outlet,
) -> io::Result<()> {
    while let Ok(chunk) = content.recv() {
        let Some(bytes) = chunk else {
            // The mode of open() is subject to the umask.
            return file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode & 0o7777));
        };
        file.write_all(&bytes)?;
        outlet.send(&Frame::Credit(bytes.len() as u32));
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the transfer was cut"))
}

fn get(path: &str, outlet: &Outlet) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; MAX_DATA];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        if !outlet.send(&Frame::Stdout(buffer[..length].to_vec())) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
    }
}
