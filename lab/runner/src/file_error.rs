//! The error of a file, which most of what is done here can end with.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A file or folder that cannot be read, written or made.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct FileError {
    path: PathBuf,
    source: io::Error,
}

/// Makes it of what the system says of this file.
pub(crate) fn file_error(path: &Path) -> impl FnOnce(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError { path, source }
}
