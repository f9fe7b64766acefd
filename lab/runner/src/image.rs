//! The root image: built once from Debian packages, cached under the hash of its recipe.
//!
//! ```text
//! cache_dir()/lab/<hash>/tree/        the root file system as a directory, usable as a chroot; with boot/vmlinux-*, the
//!                                     kernels unpacked
//!                        root.erofs   the same, packed; read-only disk of the server and of its VMs
//! cache_dir()/lab/<hash>.lock         exclusive while it is built or removed, shared while it is used
//! cache_dir()/lab/<hash>.tmp/         a build under way, or what an interrupted one left
//! ```

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::fcntl::FlockArg;

use crate::cache::{Lock, cache_dir, lock, remove_tree, try_lock};
use crate::children::{GroupChild, ScratchDir};
use crate::file_error::{FileError, file_error};
use crate::kernel::{self, KernelError};
use crate::mirror::debian_mirror;
use crate::progress::{Meter, Progress};
use crate::recipe::{Recipe, RecipeError, Role};

/// Stages that mmdebstrap reports ("I: ..." lines), unpacking the kernels and packing the disk.
const BUILD_STEPS: u64 = 13;

/// A kernel's files in /boot, before its release: as Debian has it, and unpacked.
const PACKED: &str = "vmlinuz-";
const UNPACKED: &str = "vmlinux-";

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The recipe is wrong.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A file of the cache cannot be handled.
    #[error(transparent)]
    File(#[from] FileError),
    /// A tool cannot be started.
    #[error("{tool} cannot be started: {source} (the packages needed are in lab/host-packages.txt)")]
    Tool {
        /// Its name.
        tool: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A tool failed.
    #[error("{tool} failed with {status}; its last lines:\n{tail}")]
    Failed {
        /// Its name.
        tool: &'static str,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The end of its output.
        tail: String,
    },
    /// A boot file is not what it should be.
    #[error("{path}: {source}")]
    Unpack {
        /// The boot file.
        path: PathBuf,
        /// What is wrong with it.
        source: KernelError,
    },
    /// Only root can make device nodes and owners of files.
    #[error(
        "the lab's image can only be built by root (it is a Debian root file system); run this once as root"
    )]
    NotRoot,
    /// The image does not have what the recipe promises.
    #[error("the image has {found} kernels named \"{name}\" in /boot, expected exactly 1")]
    Kernel {
        /// Its name in the recipe.
        name: String,
        /// How many fit.
        found: usize,
    },
}

/// A kernel of the image.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name in the recipe, such as `6.12`.
    pub name: String,
    /// Its full release, such as `6.12.107+deb13-amd64`.
    pub release: String,
    /// What it is for.
    pub role: Role,
}

/// The root image; it cannot be pruned while this value lives.
#[derive(Clone, Debug)]
pub struct Image {
    directory: PathBuf,
    kernels: Vec<Kernel>,
    _lock: Arc<Lock>,
}

/// Whether this process can do without what only tests need.
static WITHOUT_TESTS: AtomicBool = AtomicBool::new(false);
/// The recipe of this process, whatever others build meanwhile: what is built in an image belongs to its kernels.
static CHOSEN: OnceLock<Recipe> = OnceLock::new();

impl Image {
    /// From now on this process takes an image without what only tests and benchmarks need, if the whole one is not there. To build that
    /// takes about half the time.
    pub fn without_tests() {
        WITHOUT_TESTS.store(true, Ordering::Relaxed);
    }

    /// Whether the image of the present recipe is in the cache.
    pub fn is_built() -> Result<bool, ImageError> {
        let images = cache_dir().join("lab");
        Ok(images.join(Self::recipe(&images)?.hash).exists())
    }

    fn recipe(images: &Path) -> Result<Recipe, ImageError> {
        if let Some(chosen) = CHOSEN.get() {
            return Ok(chosen.clone());
        }
        let whole = Recipe::read(&crate::lab_dir().join("image/recipe.toml"))?;
        let is_there = images.join(&whole.hash).exists();
        let small = WITHOUT_TESTS.load(Ordering::Relaxed) && !is_there;
        Ok(CHOSEN.get_or_init(|| if small { whole.without_tests() } else { whole }).clone())
    }

    /// Finds the image of the present recipe in the cache or builds it, and prunes images of older recipes.
    pub fn ensure(progress: Progress) -> Result<Self, ImageError> {
        let images = cache_dir().join("lab");
        let recipe = Self::recipe(&images)?;
        let directory = images.join(&recipe.hash);
        let mut shared = lock(&directory, FlockArg::LockShared).map_err(file_error(&directory))?;
        if !directory.exists() {
            drop(shared);
            let exclusive = lock_with_notice(&directory, progress).map_err(file_error(&directory))?;
            // Another process may have built it while this one waited.
            if !directory.exists() {
                build(&recipe, &directory, progress)?;
            }
            drop(exclusive);
            shared = lock(&directory, FlockArg::LockShared).map_err(file_error(&directory))?;
        }
        prune(&images, &recipe.hash);
        let kernels = find_kernels(&recipe, &directory.join("tree"))?;
        Ok(Self { directory, kernels, _lock: Arc::new(shared) })
    }

    /// The root file system as a directory: a chroot with compiler and kernel headers. Not to be changed.
    pub fn tree(&self) -> PathBuf {
        self.directory.join("tree")
    }

    /// The packed root file system.
    pub fn root_disk(&self) -> PathBuf {
        self.directory.join("root.erofs")
    }

    /// All kernels.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The kernel that the server runs.
    pub fn server_kernel(&self) -> &Kernel {
        // `Recipe::check` made sure that there is one.
        self.kernels.iter().find(|kernel| kernel.role == Role::Server).unwrap_or(&self.kernels[0])
    }

    /// The kernel with a name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// The file that a kernel is booted from.
    pub fn vmlinux(&self, kernel: &Kernel) -> PathBuf {
        self.tree().join("boot").join(format!("{UNPACKED}{}", kernel.release))
    }
}

/// Waits for the exclusive lock, and says so if that takes time.
fn lock_with_notice(directory: &Path, progress: Progress) -> io::Result<Lock> {
    if let Some(lock) = try_lock(directory)? {
        return Ok(lock);
    }
    if progress == Progress::Show {
        eprintln!("lab: another process builds the image; waiting for it");
    }
    lock(directory, FlockArg::LockExclusive)
}

fn build(recipe: &Recipe, directory: &Path, progress: Progress) -> Result<(), ImageError> {
    if !nix::unistd::geteuid().is_root() {
        return Err(ImageError::NotRoot);
    }
    let temporary = directory.with_extension("tmp");
    remove_tree(&temporary).map_err(file_error(&temporary))?;
    fs::create_dir_all(&temporary).map_err(file_error(&temporary))?;
    let scratch = ScratchDir::from_path(temporary.clone());
    let mut meter = Meter::new(progress, "lab: building the image (once, some minutes)", BUILD_STEPS);
    bootstrap(recipe, &temporary.join("tree"), &mut meter)?;
    meter.step("unpacking the kernels");
    unpack_kernels(&temporary.join("tree/boot"))?;
    meter.step("packing the disk");
    pack(&temporary, &mut meter)?;
    fs::rename(&temporary, directory).map_err(file_error(directory))?;
    scratch.disarm();
    meter.finish();
    Ok(())
}

/// Fills the directory `tree` with the packages of the recipe.
fn bootstrap(recipe: &Recipe, tree: &Path, meter: &mut Meter) -> Result<(), ImageError> {
    let (mirror, components) = (debian_mirror(), recipe.components.join(" "));
    let source = |suite: &String| format!("deb {mirror} {suite} {components}\n");
    let sources: String = recipe.suites.iter().map(source).collect();
    // Mounts that mmdebstrap makes inside the tree go with its mount namespace, however it ends.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "mmdebstrap", "--mode=root", "--variant=apt"]);
    command.arg("--aptopt=Apt::Install-Recommends \"false\"");
    command.args(recipe.exclude_paths.iter().map(|path| format!("--dpkgopt=path-exclude={path}")));
    command.arg(format!("--include={}", recipe.all_packages().join(",")));
    command.arg(&recipe.suites[0]).arg(tree).arg("-");
    // The lab makes initial RAM disks of its own; Debian's hook for them honours this.
    command.env("INITRD", "No").env("LC_ALL", "C");
    run_tool("mmdebstrap", command, Some(&sources), meter)
}

/// Puts the kernel that each boot file packs beside it.
fn unpack_kernels(boot: &Path) -> Result<(), ImageError> {
    for name in file_names(boot)? {
        let Some(release) = name.strip_prefix(PACKED) else { continue };
        let (packed, unpacked) = (boot.join(&name), boot.join(format!("{UNPACKED}{release}")));
        let file = fs::read(&packed).map_err(file_error(&packed))?;
        let kernel = kernel::vmlinux(&file).map_err(|source| ImageError::Unpack { path: packed, source })?;
        fs::write(&unpacked, kernel).map_err(file_error(&unpacked))?;
    }
    Ok(())
}

fn file_names(directory: &Path) -> Result<Vec<String>, ImageError> {
    let entries = fs::read_dir(directory).map_err(file_error(directory))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Packs `tree` into `root.erofs`, uncompressed: decompression is dear under emulation.
fn pack(directory: &Path, meter: &mut Meter) -> Result<(), ImageError> {
    let mut command = Command::new("mkfs.erofs");
    command.args([
        "--quiet",
        "-T0",
        "--exclude-regex=^boot/(initrd|vmlinuz)",
        "--exclude-regex=^var/cache/apt/",
    ]);
    command.arg(directory.join("root.erofs")).arg(directory.join("tree"));
    run_tool("mkfs.erofs", command, None, meter)
}

/// Runs a tool to its end; its "I: " lines are steps of the meter, its last lines part of the error.
fn run_tool(
    tool: &'static str,
    mut command: Command,
    input: Option<&str>,
    meter: &mut Meter,
) -> Result<(), ImageError> {
    let tool_error = |source| ImageError::Tool { tool, source };
    let (reader, writer) = io::pipe().map_err(tool_error)?;
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(writer.try_clone().map_err(tool_error)?).stderr(writer);
    let mut child = GroupChild::spawn(command).map_err(tool_error)?;
    if let (Some(input), Some(mut stdin)) = (input, child.child().stdin.take()) {
        // A tool that does not read its input says why by its output and status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let lines = read_lines(reader);
    let mut tail = std::collections::VecDeque::new();
    let status = loop {
        match lines.recv_timeout(Duration::from_millis(500)) {
            Ok(line) => {
                if let Some(stage) = line.strip_prefix("I: ") {
                    meter.step(stage);
                }
                tail.push_back(line);
                if tail.len() > 30 {
                    tail.pop_front();
                }
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => meter.tick(),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                break child.child().wait().map_err(tool_error)?;
            }
        }
    };
    if status.success() {
        return Ok(());
    }
    let tail = tail.into_iter().map(|line| format!("  {line}\n")).collect();
    Err(ImageError::Failed { tool, status, tail })
}

/// Lines of a pipe, as they come; ends with the last writer.
fn read_lines(reader: io::PipeReader) -> std::sync::mpsc::Receiver<String> {
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if sender.send(text).is_err() {
                return;
            }
            line.clear();
        }
    });
    lines
}

/// Finds the release of each kernel of the recipe in `/boot`.
fn find_kernels(recipe: &Recipe, tree: &Path) -> Result<Vec<Kernel>, ImageError> {
    let names = file_names(&tree.join("boot"))?;
    let releases: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix(UNPACKED)).collect();
    let find = |kernel: &crate::recipe::KernelRecipe| {
        let fits = |release: &&&str| {
            release
                .strip_prefix(&kernel.name)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let found: Vec<_> = releases.iter().filter(fits).collect();
        match found[..] {
            [release] => {
                Ok(Kernel { name: kernel.name.clone(), release: release.to_string(), role: kernel.role })
            }
            _ => Err(ImageError::Kernel { name: kernel.name.clone(), found: found.len() }),
        }
    };
    recipe.kernels.iter().map(find).collect()
}

/// Removes images of other recipes and remains of interrupted builds, as far as they are unused. An
/// entry that cannot be removed is no reason to fail; it is tried again next time.
fn prune(images: &Path, keep: &str) {
    for entry in fs::read_dir(images).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(hash) = name.split('.').next().filter(|hash| is_hash(hash) && *hash != keep) else {
            continue;
        };
        let directory = images.join(hash);
        let Ok(Some(_exclusive)) = try_lock(&directory) else { continue };
        let removed = remove_tree(&directory).and_then(|()| remove_tree(&directory.with_extension("tmp")));
        // The lock file stays: removing it would let two processes hold "the" lock. It is empty.
        if let Err(error) = removed {
            eprintln!("lab: cannot remove {}: {error}", directory.display());
        }
    }
}

fn is_hash(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prune_keeps_the_present_image_those_in_use_and_strangers() {
        let directory = tempfile::tempdir().unwrap();
        let names =
            ["0123456789abcdef", "1123456789abcdef", "2123456789abcdef", "2123456789abcdef.tmp", "other"];
        for name in names {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        let used = lock(&directory.path().join("1123456789abcdef"), FlockArg::LockShared).unwrap();
        prune(directory.path(), "0123456789abcdef");
        let there = |name: &str| directory.path().join(name).exists();
        assert_eq!(names.map(there), [true, true, false, false, true]);
        drop(used);
        prune(directory.path(), "0123456789abcdef");
        assert_eq!(names.map(there), [true, false, false, false, true]);
    }

    #[test]
    fn a_failing_tool_is_reported_with_its_last_lines() {
        let mut command = Command::new("sh");
        command.args(["-c", "cat; echo I: stage; echo why it failed >&2; exit 3"]);
        let mut meter = Meter::new(Progress::Silent, "test", 1);
        let error = run_tool("sh", command, Some("input\n"), &mut meter).unwrap_err().to_string();
        assert!(error.contains("why it failed") && error.contains("input") && error.contains("3"), "{error}");
    }
}
