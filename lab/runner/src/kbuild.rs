//! Builds kernel modules in the image's tree, whose compilers and headers belong to the image's kernels.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::children::ScratchDir;
use crate::file_error::{FileError, file_error};
use crate::image::Image;

/// Why a module was not built.
#[derive(Debug, thiserror::Error)]
pub enum KbuildError {
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The compiler, make or dkms failed.
    #[error("{folder} for {release}: `{command}` failed with {status}:\n{output}")]
    Make {
        /// The folder of the module.
        folder: String,
        /// The kernel.
        release: String,
        /// The program that was run.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said.
        output: String,
    },
}

/// Makes `targets` in `folder` of the sources (path within the checkout, content); the folder of the tree that stands for the
/// checkout, with what was built.
pub(crate) fn make(
    image: &Image,
    release: &str,
    sources: &[(PathBuf, Vec<u8>)],
    folder: &str,
    targets: &[&str],
) -> Result<ScratchDir, KbuildError> {
    let build = format!("KDIR=/lib/modules/{release}/build");
    let command = [&["make", "--no-print-directory", build.as_str()], targets].concat();
    run(image, release, sources, folder, &command)
}

/// Writes the sources into a folder of the tree and runs a command in `folder` of it.
pub(crate) fn run(
    image: &Image,
    release: &str,
    sources: &[(PathBuf, Vec<u8>)],
    folder: &str,
    words: &[&str],
) -> Result<ScratchDir, KbuildError> {
    let parent = image.tree().join("var/tmp");
    let temporary = tempfile::Builder::new().prefix("vnuma-build-").tempdir_in(&parent);
    let scratch = ScratchDir::from_path(temporary.map_err(file_error(&parent))?.keep());
    for (name, content) in sources {
        let path = scratch.path().join(name);
        let write = || -> io::Result<()> {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&path, content)
        };
        write().map_err(file_error(&path))?;
    }
    let inside = Path::new("/var/tmp").join(scratch.path().file_name().unwrap_or_default());
    // objtool of newer kernels wants /proc; the mount goes with its namespace.
    let script = r#"mount -t proc proc "$1/proc" && folder=$2 && tree=$1 && shift 2 &&
        exec chroot "$tree" env -C "$folder" "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(image.tree());
    command.arg(inside.join(folder)).args(words);
    // The settings of a make that calls this are not meant for that one.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    let output = command.output().map_err(file_error(Path::new("unshare")))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        return Err(KbuildError::Make {
            folder: folder.to_owned(),
            release: release.to_owned(),
            command: words.first().copied().unwrap_or_default().to_owned(),
            status: output.status,
            output: String::from_utf8_lossy(&text).into_owned(),
        });
    }
    Ok(scratch)
}
