//! Processes and directories of this run that must not outlive it.
//!
//! Whatever ends this process ends its children: `SIGKILL` and crashes by the kernel (`PR_SET_PDEATHSIG`),
//! an interrupt by [`end_on_signals`], an error or a panic by the owners' `Drop`.
//!
//! `PR_SET_PDEATHSIG` acts on the death of the *thread* that forked, hence one thread that lives as long as
//! the process starts every child.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// What is to be ended and removed.
struct Registry {
    groups: Vec<i32>,
    directories: Vec<PathBuf>,
}

fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: Mutex<Registry> = Mutex::new(Registry { groups: Vec::new(), directories: Vec::new() });
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

type Job = (Command, Sender<io::Result<Child>>);

fn spawner() -> &'static Mutex<Sender<Job>> {
    static SPAWNER: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (sender, jobs) = channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in jobs {
                // It fails if the caller is gone; the child then ends with this process.
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    })
}

/// A child in a process group of its own that ends with this process, and with this value.
#[derive(Debug)]
pub(crate) struct GroupChild {
    child: Child,
}

impl GroupChild {
    /// Starts `command`.
    pub(crate) fn spawn(mut command: Command) -> io::Result<Self> {
        command.process_group(0);
        // SAFETY: prctl() with these arguments is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                let result = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
            });
        }
        let (sender, answer) = channel();
        let lost = || io::Error::other("the thread that starts children has ended");
        // The registry is held over the start, so that a signal cannot come between it and the entry.
        let mut registry = registry();
        let jobs = spawner().lock().unwrap_or_else(PoisonError::into_inner);
        jobs.send((command, sender)).map_err(|_| lost())?;
        let child = answer.recv().map_err(|_| lost())??;
        registry.groups.push(child.id() as i32);
        Ok(Self { child })
    }

    /// The child itself.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Ends the whole group and waits for the child.
    pub(crate) fn kill(&mut self) {
        let group = self.child.id() as i32;
        let mut registry = registry();
        if let Some(position) = registry.groups.iter().position(|&known| known == group) {
            registry.groups.swap_remove(position);
            // The child is not waited for yet, so its number cannot belong to anybody else. Members of the group
            // may have gone already.
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            drop(registry);
            let _ = self.child.wait();
        }
    }
}

impl Drop for GroupChild {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A temporary directory that is removed at the end, an interrupt included.
#[derive(Debug)]
pub(crate) struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    /// Takes over a directory.
    pub(crate) fn from_path(path: PathBuf) -> Self {
        registry().directories.push(path.clone());
        Self { path }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// It stays: it was renamed to its final place.
    pub(crate) fn disarm(self) {
        registry().directories.retain(|path| *path != self.path);
        std::mem::forget(self);
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        registry().directories.retain(|path| *path != self.path);
        if let Err(error) = crate::cache::remove_tree(&self.path) {
            eprintln!("lab: cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Makes SIGINT, SIGTERM and SIGHUP end the children, remove the temporary directories and exit with
/// 128 + signal. Programs that use the runner call it once at their start.
pub fn end_on_signals() -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            vnuma_lab_agent::terminal::restore();
            let registry = registry();
            for &group in &registry.groups {
                // It may have ended by itself.
                let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            }
            for directory in &registry.directories {
                let _ = crate::cache::remove_tree(directory);
            }
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it_and_ends_with_its_value() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let mut child = std::thread::spawn(move || GroupChild::spawn(command).unwrap()).join().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert!(child.child().try_wait().unwrap().is_none(), "ended with the thread");
        let started = Instant::now();
        child.kill();
        assert!(child.child().try_wait().unwrap().is_some());
        assert!(started.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        assert!(GroupChild::spawn(Command::new("/nowhere/program")).is_err());
    }

    #[test]
    fn a_scratch_directory_goes_unless_disarmed() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).unwrap();
            ScratchDir::from_path(path)
        };
        let (gone, kept) = (make("gone"), make("kept"));
        let (gone_path, kept_path) = (gone.path().to_owned(), kept.path().to_owned());
        drop(gone);
        kept.disarm();
        assert!(!gone_path.exists());
        assert!(kept_path.exists());
    }
}
