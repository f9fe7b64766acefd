//! Schedulers of scx (sched_ext), which crates.io has the sources of: built on this machine, for the lab's servers and for guests. Each is
//! kept in the cache.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use nix::fcntl::FlockArg;

use crate::binaries::cargo;
use crate::cache::{cache_dir, lock};
use crate::children::{GroupChild, ScratchDir};
use crate::file_error::{FileError, file_error};

/// Of all of them.
const VERSION: &str = "1.1.4";
/// Lines of what cargo says that an error has.
const SHOWN: usize = 2;

/// Why there is no such scheduler.
#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// It does not build.
    #[error("cargo install {program} failed with {status}: {said} (all of it: {})", log.display())]
    Build {
        /// Its name.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// What was wrong.
        said: String,
        /// All that was said.
        log: PathBuf,
    },
}

/// Finds schedulers by the names of their programs, such as `scx_rusty`, or builds them: some ten minutes for four, as what they have in
/// common is built once.
pub fn schedulers_of_scx(programs: &[&str]) -> Result<Vec<Result<PathBuf, SchedulerError>>, FileError> {
    if programs.is_empty() {
        return Ok(Vec::new());
    }
    let folder = cache_dir().join("schedulers").join(format!("scx-{VERSION}"));
    let _lock = lock(&folder, FlockArg::LockExclusive).map_err(file_error(&folder))?;
    fs::create_dir_all(&folder).map_err(file_error(&folder))?;
    // What an interrupted run left is of use to this one, and is removed at the end.
    let target = ScratchDir::from_path(folder.join("target"));
    let find = |program: &&str| {
        let built = folder.join(program);
        if built.exists() {
            return Ok(built);
        }
        eprintln!("lab: building {program} {VERSION} of crates.io (once)");
        let root = ScratchDir::from_path(folder.join(format!("{program}.new")));
        install(program, root.path(), target.path(), &folder.join(format!("{program}.log")))?;
        let made = root.path().join("bin").join(program);
        fs::rename(&made, &built).map_err(file_error(&made))?;
        Ok(built)
    };
    Ok(programs.iter().map(find).collect())
}

/// Builds one with the compiler that the project's own BPF programs are built with.
fn install(program: &str, root: &Path, target: &Path, log: &Path) -> Result<(), SchedulerError> {
    let output = File::create(log).map_err(file_error(log))?;
    let mut command = Command::new(cargo());
    command.args(["install", "--quiet", "--locked", "--version", VERSION, program, "--root"]).arg(root);
    command.arg("--target-dir").arg(target).env("BPF_CLANG", "clang-19").stdin(Stdio::null());
    command.stdout(output.try_clone().map_err(file_error(log))?).stderr(output);
    let mut child = GroupChild::spawn(command).map_err(file_error(Path::new("cargo")))?;
    let status = child.child().wait().map_err(file_error(Path::new("cargo")))?;
    if status.success() {
        return Ok(());
    }
    let text = fs::read_to_string(log).map_err(file_error(log))?;
    Err(SchedulerError::Build { program: program.to_owned(), status, said: errors(&text), log: log.into() })
}

/// The first lines that are errors, or the last ones if none is.
fn errors(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let is_error = |line: &&&str| ["error:", "error[", "fatal error"].iter().any(|word| line.contains(word));
    let mut found: Vec<&str> = lines.iter().filter(is_error).take(SHOWN).copied().collect();
    if found.is_empty() {
        found.extend(&lines[lines.len().saturating_sub(SHOWN)..]);
    }
    found.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_fails_is_named_by_its_first_errors() {
        let text = "warning: one\n\nerror: failed to run custom build command for `scx_lavd v1.1.4`\n  --- stderr\n\
                    main.bpf.c:7:2: fatal error: 'vmlinux.h' file not found\nerror: three\n";
        let expected = "error: failed to run custom build command for `scx_lavd v1.1.4`; \
                        main.bpf.c:7:2: fatal error: 'vmlinux.h' file not found";
        assert_eq!(errors(text), expected);
        assert_eq!(errors("one\ntwo\n\nthree\n"), "two; three");
        assert_eq!(errors(""), "");
    }
}
