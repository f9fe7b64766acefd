//! Directories for the files of a run.

use std::fs;
use std::path::Path;

use crate::cache::{Lock, try_lock};
use crate::children::ScratchDir;
use crate::file_error::{FileError, file_error};

/// A directory that goes with this value, and at a signal ([`crate::end_on_signals`]).
pub struct RunDirectory {
    directory: ScratchDir,
    _lock: Lock,
}

impl RunDirectory {
    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Makes a directory for the files of a run; its lock shows that the run lives. Remains of runs that were killed
/// are removed.
pub fn run_directory() -> Result<RunDirectory, FileError> {
    const PREFIX: &str = "vnuma-lab-";
    let parent = std::env::temp_dir();
    for entry in fs::read_dir(&parent).map_err(file_error(&parent))?.flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX) && path.is_dir();
        // The lock lies inside: it goes with the directory.
        if ours && let Ok(Some(_dead)) = try_lock(&path.join("run")) {
            // Another process may be removing it as well.
            let _ = crate::cache::remove_tree(&path);
        }
    }
    loop {
        let path = tempfile::Builder::new().prefix(PREFIX).tempdir().map_err(file_error(&parent))?.keep();
        let directory = ScratchDir::from_path(path);
        // Another process that cleans up may have taken it for a dead one just now; then the next is tried.
        match try_lock(&directory.path().join("run")).map_err(file_error(directory.path()))? {
            Some(lock) if directory.path().exists() => return Ok(RunDirectory { directory, _lock: lock }),
            _ => {}
        }
    }
}
