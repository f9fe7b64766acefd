//! Programs and files in a VM, through its agent.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vnuma_lab_agent::client::{Input, Session};
use vnuma_lab_agent::protocol::{Exec, MAX_DATA};
use vnuma_lab_agent::terminal::{self, RawMode};
use vnuma_lab_agent::{VSOCK_PORT, vsock};

use crate::{STATUS_FAILED, state};

/// Time between two checks whether the VM can still answer.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Times that a running guest is asked for a connection. The kernel waits 2 s each time (`VSOCK_DEFAULT_CONNECT_TIMEOUT`), in which
/// a guest whose vCPUs share CPUs with many others may not get to answer.
const CONNECT_TRIES: u32 = 30;

/// A session with the agent of a VM.
pub type GuestSession = Session<BufReader<File>, File>;

/// Connects to the agent of the VM with a context id.
pub fn connect(cid: u32) -> Result<GuestSession> {
    let stream = vsock::connect_to(cid, VSOCK_PORT)?;
    let reader = BufReader::with_capacity(MAX_DATA, stream.try_clone()?);
    Ok(Session::open(reader, stream)?)
}

fn connect_by_name(name: &str) -> Result<GuestSession> {
    let cid = state::running_cid(name)?;
    patiently(CONNECT_TRIES, || connect(cid)).map_err(|error| state::explain_connect(name, error))
}

/// Tries again what took too long.
fn patiently<T>(tries: u32, mut connect: impl FnMut() -> Result<T>) -> Result<T> {
    let late = |error: &anyhow::Error| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
    };
    for _ in 1..tries {
        match connect() {
            Err(error) if late(&error) => {}
            result => return result,
        }
    }
    connect()
}

/// Runs a program; its streams and exit status pass through.
pub fn exec(name: &str, argv: Vec<String>) -> Result<ExitCode> {
    end_when_given_up(name);
    run(name, &Exec { argv, ..Exec::default() })
}

/// Ends this process with an error if KVM cannot run the VM any more: a request would never be answered.
fn end_when_given_up(name: &str) {
    let name = name.to_owned();
    std::thread::spawn(move || {
        loop {
            if let Some(error) = state::kvm_internal_error(&name) {
                eprintln!("lab-vm: {error}");
                std::process::exit(STATUS_FAILED.into());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    });
}

/// Gives a prompt.
pub fn shell(name: &str) -> Result<ExitCode> {
    let raw = RawMode::enter().context("terminal")?;
    let size = raw.as_ref().map(|_| terminal::size().unwrap_or((24, 80)));
    let env = std::env::var("TERM").map(|kind| ("TERM".to_owned(), kind)).into_iter().collect();
    let result = run(name, &Exec { argv: vec!["bash".into(), "-l".into()], env, terminal: size });
    drop(raw);
    result
}

fn run(name: &str, exec: &Exec) -> Result<ExitCode> {
    let mut session = connect_by_name(name)?;
    let stdin = io::stdin();
    let mut stdout = File::from(unbuffered_stdout()?);
    let input = Input::From(stdin.as_fd());
    let status = session
        .exec(exec, input, &mut stdout, &mut io::stderr())
        .map_err(|error| state::explain(name, error))?;
    // Statuses of programs are within 0 to 255.
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)))
}

/// Standard output without the line buffer that std puts before it: what comes is a frame each.
fn unbuffered_stdout() -> io::Result<std::os::fd::OwnedFd> {
    io::stdout().as_fd().try_clone_to_owned()
}

/// Copies a file into the VM.
pub fn put(name: &str, source: &Path, destination: &str) -> Result<()> {
    let file = File::open(source).with_context(|| source.display().to_string())?;
    let metadata = file.metadata().with_context(|| source.display().to_string())?;
    ensure!(metadata.is_file(), "{}: not a file; directories are not copied", source.display());
    let mode = metadata.permissions().mode() & 0o777;
    end_when_given_up(name);
    let mut session = connect_by_name(name)?;
    session.put(destination, mode, file.as_fd()).map_err(|error| state::explain(name, error))
}

/// Copies a file from the VM.
pub fn get(name: &str, source: &str, destination: &Path) -> Result<()> {
    let context = || destination.display().to_string();
    end_when_given_up(name);
    let mut session = connect_by_name(name)?;
    let mut temporary = destination.as_os_str().to_owned();
    temporary.push(".lab-get");
    let mut file = File::create(&temporary).with_context(context)?;
    let result = session.get(source, &mut file).map_err(|error| state::explain(name, error));
    if let Err(error) = result {
        fs::remove_file(&temporary).with_context(context)?;
        return Err(error);
    }
    fs::rename(&temporary, destination).with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_late_is_asked_again_and_one_that_refuses_is_not() {
        let ask = |kind: io::ErrorKind, late: u32| {
            let mut asked = 0;
            let result = patiently(5, || {
                asked += 1;
                if asked <= late { Err(io::Error::from(kind).into()) } else { Ok(()) }
            });
            (result.is_ok(), asked)
        };
        assert_eq!(ask(io::ErrorKind::TimedOut, 4), (true, 5));
        assert_eq!(ask(io::ErrorKind::TimedOut, 9), (false, 5));
        assert_eq!(ask(io::ErrorKind::ConnectionReset, 1), (false, 1));
    }
}
