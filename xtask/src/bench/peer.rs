//! Runs a program on a lab server, or on two: one has counters, and its other end is on the second one. Those talk by this machine, as
//! their own network is measured.

use anyhow::{Context, Result, ensure};
use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
    path::PathBuf,
    thread,
    time::Duration,
};
use vnuma_lab_runner::{Counters, Exec, Input, Lab};
use vnuma_scenario::waiting;

/// A line of the first server that is for the second one.
const REQUEST: &str = "{\"peer\":";

/// Only ends a hang.
const HANG: Duration = Duration::from_secs(3600);

/// Boots a server, with hardware counters if they are given, and puts these files there: here, there.
pub fn boot(server: &str, counters: Option<&Counters>, files: &[(PathBuf, String)]) -> Result<Lab> {
    let _waiting = waiting(&format!("a lab server {server} to boot and get its programs"));
    let lab = Lab::boot_with(server, counters)?;
    files.iter().try_for_each(|(here, there)| lab.put(here, there, HANG))?;
    Ok(lab)
}

/// Runs a script on a server; its messages are shown. What it prints.
pub fn sh(lab: &Lab, script: &str) -> Result<String> {
    let (_waiting, mut output) = (waiting(script), Vec::new());
    let argv = ["env", "RUST_LOG=error", "sh", "-c", script].map(str::to_owned).into();
    run_on(lab, argv, Input::Null, &mut output, HANG)?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Runs a program on a server to its end.
pub fn run_on(
    lab: &Lab,
    argv: Vec<String>,
    input: Input<'_>,
    output: &mut dyn Write,
    hang: Duration,
) -> Result<()> {
    let name = argv.join(" ");
    let exec = Exec { argv, ..Exec::default() };
    let status = lab.exec(&exec, input, output, &mut io::stderr(), hang).with_context(|| name.clone())?;
    ensure!(status == 0, "{name}: status {status}");
    Ok(())
}

/// Runs a program on each of them. Results of the first one go to the file.
pub fn run(labs: [&Lab; 2], argvs: [Vec<String>; 2], results: File, hang: Duration) -> Result<()> {
    let ([first, second], [measures, answers]) = (labs, argvs);
    let (requests, requested) = io::pipe().context("a pipe")?;
    let (answer, mut answered) = io::pipe().context("a pipe")?;
    let mut output = Output { results, requests: requested, line: Vec::new() };
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            let ended = run_on(second, answers, Input::From(requests.as_fd()), &mut answered, hang);
            // The first server then waits for no answer any more.
            drop(answered);
            ended
        });
        let measured = run_on(first, measures, Input::From(answer.as_fd()), &mut output, hang);
        drop(output);
        let ended = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        measured.and(ended)
    })
}

/// What the first server says: results go to the file, requests to the second server.
struct Output<R, P> {
    results: R,
    requests: P,
    line: Vec<u8>,
}

impl<R: Write, P: Write> Write for Output<R, P> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            self.line.push(byte);
            if byte != b'\n' {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            match line.strip_prefix(REQUEST.as_bytes()) {
                // What is within: `"halt"}` and the end of the line.
                Some(request) => {
                    let request = request.strip_suffix(b"}\n").unwrap_or(request);
                    self.requests.write_all(&[request, b"\n"].concat())?;
                }
                None => self.results.write_all(&line)?,
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.results.flush().and_then(|()| self.requests.flush())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_to_the_second_server_and_results_to_the_file() {
        let mut output = Output { results: Vec::new(), requests: Vec::new(), line: Vec::new() };
        for piece in [
            "{\"server\":{}}\n{\"pe",
            "er\":\"halt\"}\n{\"peer\":{\"start\":\"memcached\"}}\n",
            "{\"cell\":1}\n",
        ] {
            output.write_all(piece.as_bytes()).unwrap();
        }
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        assert_eq!(text(output.results), "{\"server\":{}}\n{\"cell\":1}\n");
        assert_eq!(text(output.requests), "\"halt\"\n{\"start\":\"memcached\"}\n");
    }
}
