//! One command on one server, from boot to stop.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vnuma_lab_agent::client::Input;
use vnuma_lab_agent::protocol::Exec;
use vnuma_lab_agent::terminal::{self, RawMode};

use crate::counters::Counters;
use crate::file_error::file_error;
use crate::lab::{Lab, LabError};
use crate::qemu::Init;

/// How long a command may run unless it is said otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// How long the copy of one file may take.
const COPY_LIMIT: Duration = Duration::from_secs(300);

/// A command to run on a server.
#[derive(Clone, Debug)]
pub struct LabRun {
    /// Name of a profile, or path of one.
    pub profile: String,
    /// Hardware counters of the server.
    pub counters: Option<Counters>,
    /// Process 1 of the server.
    pub init: Init,
    /// Servers of the profile that are booted with a network between them; the command runs on the first. 0: one
    /// server, and no network.
    pub servers: usize,
    /// Files to copy into the server before: here, there.
    pub puts: Vec<(PathBuf, String)>,
    /// Files to copy from the server after, whatever the status of the command: there, here.
    pub gets: Vec<(String, PathBuf)>,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Environment variables for it.
    pub env: Vec<(String, String)>,
    /// How long it may run.
    pub timeout: Duration,
    /// Where its input comes from.
    pub stdin: Stdin,
    /// Whether its output is passed through or collected.
    pub capture: bool,
}

/// Where the input of a command comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdin {
    /// There is none.
    Null,
    /// That of this process.
    Inherit,
    /// That of this process, on a terminal of the server if it is a terminal.
    Terminal,
}

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Its exit status, 128 + signal if a signal ended it.
    pub status: i32,
    /// Its output, if it was collected.
    pub stdout: Vec<u8>,
    /// Its error output, if it was collected.
    pub stderr: Vec<u8>,
}

impl Default for LabRun {
    fn default() -> Self {
        Self {
            profile: crate::DEFAULT_PROFILE.into(),
            counters: None,
            init: Init::Fast,
            servers: 0,
            puts: Vec::new(),
            gets: Vec::new(),
            command: Vec::new(),
            env: Vec::new(),
            timeout: DEFAULT_TIMEOUT,
            stdin: Stdin::Null,
            capture: false,
        }
    }
}

impl LabRun {
    /// Boots a server, or several, runs the command and stops them. Counters, systemd and several servers exclude each
    /// other.
    pub fn run(&self) -> Result<Output, LabError> {
        let labs = match (self.servers, self.init) {
            (0, Init::Fast) => vec![Lab::boot_with(&self.profile, self.counters.as_ref())?],
            (0, Init::Systemd) => vec![Lab::boot_systemd(&self.profile)?],
            (servers, _) => Lab::boot_cluster(&vec![self.profile.as_str(); servers])?,
        };
        // Asking for 0 servers is one server, so there is a first.
        self.run_in(&labs[0])
    }

    /// Runs the command in a server that is up already; `profile` has no meaning then.
    pub fn run_in(&self, lab: &Lab) -> Result<Output, LabError> {
        for (source, destination) in &self.puts {
            lab.put(source, destination, COPY_LIMIT)?;
        }
        let mut output = Output::default();
        output.status = if self.capture {
            self.exec(lab, &mut output.stdout, &mut output.stderr)?
        } else {
            self.exec(lab, &mut io::stdout().lock(), &mut io::stderr().lock())?
        };
        for (source, destination) in &self.gets {
            lab.get(source, destination, COPY_LIMIT)?;
        }
        Ok(output)
    }

    fn exec(&self, lab: &Lab, stdout: &mut dyn Write, stderr: &mut dyn Write) -> Result<i32, LabError> {
        let mut exec = Exec { argv: self.command.clone(), env: self.env.clone(), terminal: None };
        let stdin = io::stdin();
        let _raw = if self.stdin == Stdin::Terminal {
            let raw = RawMode::enter().map_err(file_error(Path::new("terminal")))?;
            exec.terminal = raw.as_ref().map(|_| terminal::size().unwrap_or((24, 80)));
            if let Ok(kind) = std::env::var("TERM") {
                exec.env.push(("TERM".into(), kind));
            }
            raw
        } else {
            None
        };
        let input = if self.stdin == Stdin::Null { Input::Null } else { Input::From(stdin.as_fd()) };
        lab.exec(&exec, input, stdout, stderr, self.timeout)
    }
}
