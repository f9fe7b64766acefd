//! The lab's own programs, built from the checkout when they are needed.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

/// Where the programs are.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// Runs in the server and in its guests.
    pub lab_agent: PathBuf,
    /// Runs in the server.
    pub lab_vm: PathBuf,
}

/// Why a program could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// cargo cannot be started.
    #[error("{cargo}: {source}")]
    Start {
        /// The program.
        cargo: String,
        /// Why.
        source: io::Error,
    },
    /// cargo failed; it has said why.
    #[error("cargo build {packages} failed with {status}")]
    Failed {
        /// What was to be built.
        packages: String,
        /// How it ended.
        status: std::process::ExitStatus,
    },
    /// The folder of programs lacks one.
    #[error("{PROGRAMS}: there is no {path}")]
    NotThere {
        /// What was looked for.
        path: String,
    },
    /// There is no such program in what was built.
    #[error("cargo build {packages} made no program {name}")]
    Missing {
        /// What was built.
        packages: String,
        /// What was looked for.
        name: String,
    },
}

/// The variable that names a folder in which programs are by their names. The caller that sets it has built them, and nothing is built then but
/// for release.
const PROGRAMS: &str = "VNUMA_PROGRAMS";

/// A line of cargo's `--message-format=json`; other lines have other fields.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
}

impl Binaries {
    /// Builds them.
    pub fn build() -> Result<Self, BuildError> {
        let mut built = build(&[("vnuma-lab-agent", "lab-agent"), ("lab-vm", "lab-vm")])?;
        // In the order of the request.
        let (lab_vm, lab_agent) = (built.pop().unwrap_or_default(), built.pop().unwrap_or_default());
        Ok(Self { lab_agent, lab_vm })
    }
}

/// A program without what only debuggers read, which would be most of an initial RAM disk.
pub(crate) fn stripped(path: &Path) -> io::Result<Vec<u8>> {
    let output = tempfile::NamedTempFile::new()?;
    let status = Command::new("strip").arg("-o").arg(output.path()).arg(path).status()?;
    // binutils belong to every compiler, but a program with symbols does as well.
    std::fs::read(if status.success() { output.path() } else { path })
}

/// Builds programs of the workspace, each given as package and program name, and returns their paths. Names of programs are
/// unique in it.
pub fn build(programs: &[(&str, &str)]) -> Result<Vec<PathBuf>, BuildError> {
    given(programs).unwrap_or_else(|| build_with(Command::new(cargo()), programs, &[]))
}

/// Like [`build`], for a demonstration of a minute: what is optimized for long tests is not, which would take a fifth of the time.
///
/// `behind`: only on CPUs that nothing else wants, for building beside the image. Unpacking its packages switches
/// between processes all the time, and waits at each switch, three times as long in all, if compilers run, even at a low priority.
pub fn build_quickly(programs: &[(&str, &str)], behind: bool) -> Result<Vec<PathBuf>, BuildError> {
    let mut command = Command::new(if behind { "chrt".to_owned() } else { cargo() });
    if behind {
        command.args(["--idle", "0"]).arg(cargo());
    }
    let plain = ["vnuma-policy", "tokio"].map(|package| format!("profile.dev.package.{package}.opt-level=0"));
    let options = ["--config", &plain[0], "--config", &plain[1]];
    given(programs).unwrap_or_else(|| build_with(command, programs, &options))
}

/// Those that were built before.
fn given(programs: &[(&str, &str)]) -> Option<Result<Vec<PathBuf>, BuildError>> {
    let folder = std::env::var_os(PROGRAMS)?;
    let find = |(_, program): &(&str, &str)| existing(&PathBuf::from(&folder).join(program));
    Some(programs.iter().map(find).collect())
}

/// Like [`build`], as users build them: for programs that are measured.
pub fn build_release(programs: &[(&str, &str)]) -> Result<Vec<PathBuf>, BuildError> {
    build_with(Command::new(cargo()), programs, &["--release"])
}

/// Without links: a program finds others beside itself.
fn existing(path: &Path) -> Result<PathBuf, BuildError> {
    path.canonicalize().map_err(|_| BuildError::NotThere { path: path.display().to_string() })
}

pub(crate) fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

fn build_with(
    mut command: Command,
    programs: &[(&str, &str)],
    options: &[&str],
) -> Result<Vec<PathBuf>, BuildError> {
    // The whole workspace is selected with all features, whatever is to be built: cargo builds a dependency anew for another set of
    // features, and the features are those that the selected packages want together.
    command.args([
        "build",
        "--quiet",
        "--message-format=json-render-diagnostics",
        "--workspace",
        "--all-features",
    ]);
    command.args(options);
    for (_, program) in programs {
        command.args(["--bin", program]);
    }
    command.current_dir(crate::lab_dir().join("..")).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().map_err(|source| BuildError::Start { cargo: cargo(), source })?;
    let packages = programs.iter().map(|(package, _)| *package).collect::<Vec<_>>().join(" ");
    if !output.status.success() {
        return Err(BuildError::Failed { packages, status: output.status });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let built: Vec<PathBuf> =
        text.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok()?.executable).collect();
    let find = |(_, program): &(&str, &str)| {
        let found = built.iter().find(|path| path.file_name() == Path::new(program).file_name());
        let missing = || BuildError::Missing { packages: packages.clone(), name: (*program).to_owned() };
        found.cloned().ok_or_else(missing)
    };
    programs.iter().map(find).collect()
}
