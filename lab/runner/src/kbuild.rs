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
    let scratch = written(&image.tree().join("var/tmp"), sources)?;
    let inside = Path::new("/var/tmp").join(scratch.path().file_name().unwrap_or_default());
    // objtool of newer kernels wants /proc; the mount goes with its namespace.
    let script = r#"mount -t proc proc "$1/proc" && folder=$2 && tree=$1 && shift 2 &&
        exec chroot "$tree" env -C "$folder" "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(image.tree());
    command.arg(inside.join(folder)).args(words);
    // The settings of a make that calls this are not meant for that one.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    finish(command, folder, release, words)?;
    Ok(scratch)
}

/// Makes `targets` in the image's tree with another folder mounted over it, which has the kernel that they are for.
pub(crate) fn make_over(
    image: &Image,
    layer: &Path,
    release: &str,
    sources: &[(PathBuf, Vec<u8>)],
    folder: &str,
    targets: &[&str],
) -> Result<ScratchDir, KbuildError> {
    let scratch = written(&std::env::temp_dir(), sources)?;
    let build = format!("KDIR=/lib/modules/{release}/build");
    let words = [&["make", "--no-print-directory", build.as_str()], targets].concat();
    // The mounts go with their namespace.
    let script = r#"sources=$3 folder=/srv/$4
        mount -t tmpfs tmpfs /mnt && mkdir /mnt/root &&
        mount -t overlay -o "lowerdir=$2:$1" overlay /mnt/root && mount -t proc proc /mnt/root/proc &&
        mount -t tmpfs tmpfs /mnt/root/tmp && mount --bind "$sources" /mnt/root/srv && shift 4 &&
        exec chroot /mnt/root env -C "$folder" "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(image.tree());
    command.arg(layer).arg(scratch.path()).arg(folder).args(&words);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    finish(command, folder, release, &words)?;
    Ok(scratch)
}

/// Makes `targets` in `folder` of the sources by this machine's compiler, for a kernel that it has built in `kdir`.
pub(crate) fn make_here(
    kdir: &Path,
    sources: &[(PathBuf, Vec<u8>)],
    folder: &str,
    targets: &[&str],
) -> Result<ScratchDir, KbuildError> {
    let scratch = written(&std::env::temp_dir(), sources)?;
    let build = format!("KDIR={}", kdir.display());
    let words = [&["make", "--no-print-directory", build.as_str()], targets].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir(scratch.path().join(folder));
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    finish(command, folder, &kdir.display().to_string(), &words)?;
    Ok(scratch)
}

/// Writes the sources into a folder of their own.
fn written(parent: &Path, sources: &[(PathBuf, Vec<u8>)]) -> Result<ScratchDir, FileError> {
    let temporary = tempfile::Builder::new().prefix("vnuma-build-").tempdir_in(parent);
    let scratch = ScratchDir::from_path(temporary.map_err(file_error(parent))?.keep());
    for (name, content) in sources {
        let path = scratch.path().join(name);
        let write = || -> io::Result<()> {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&path, content)
        };
        write().map_err(file_error(&path))?;
    }
    Ok(scratch)
}

/// Runs it to its end.
fn finish(mut command: Command, folder: &str, release: &str, words: &[&str]) -> Result<(), KbuildError> {
    let program = command.get_program().to_owned();
    let output = command.output().map_err(file_error(Path::new(&program)))?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    Err(KbuildError::Make {
        folder: folder.to_owned(),
        release: release.to_owned(),
        command: words.first().copied().unwrap_or_default().to_owned(),
        status: output.status,
        output: String::from_utf8_lossy(&text).into_owned(),
    })
}
