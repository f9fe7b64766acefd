//! `lab-exec SOCKET PROGRAM [ARGUMENT]...`: runs a program in a machine of the lab that another process has
//! (`Lab::serve` of `vnuma-lab-runner`); its output and status pass through, and it has no input.

use std::error::Error;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use vnuma_lab_agent::client::{Input, Session};
use vnuma_lab_agent::protocol::Exec;

/// Status where the machine cannot be asked, as env(1) and others have it.
const STATUS_FAILED: u8 = 125;

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("lab-exec: {error}");
        ExitCode::from(STATUS_FAILED)
    })
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("usage: lab-exec SOCKET PROGRAM [ARGUMENT]...")?;
    let stream = UnixStream::connect(&socket).map_err(|error| format!("{socket}: {error}"))?;
    let mut session = Session::open(io::BufReader::new(stream.try_clone()?), stream)?;
    let exec = Exec { argv: arguments.collect(), ..Exec::default() };
    let status = session.exec(&exec, Input::Null, &mut io::stdout(), &mut io::stderr())?;
    // Statuses of programs are within 0 to 255.
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)))
}
