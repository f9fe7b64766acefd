//! Kernels beside those of the image, `lab/kernels`: some that check themselves (lockdep, KASAN and others), built on this machine
//! of Debian's sources, and other flavours of Debian's. Each is kept in the cache, under the hash of what makes it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use nix::fcntl::FlockArg;

use crate::binaries::{Binaries, BuildError};
use crate::cache::{cache_dir, hash, lock, remove_tree};
use crate::children::{GroupChild, ScratchDir};
use crate::file_error::{FileError, file_error};
use crate::image::{Image, ImageError};
use crate::initramfs::{self, InitramfsError};
use crate::kernel::{self, KernelError};
use crate::mirror::debian_mirror;
use crate::progress::Progress;

/// Versions of debug kernels, and the releases of Debian that have their sources.
const SOURCES: [(&str, &str); 3] = [("6.1", "bookworm"), ("6.12", "trixie"), ("7.3", "trixie-backports")];
/// Names of added kernels, their flavours, and the releases of Debian that have them.
const ADDED: [(&str, &str, &str); 1] = [("6.12-rt", "rt-amd64", "trixie")];
/// What modprobe reads, for a kernel that has all built in.
const MODULE_FILES: [&str; 6] = [
    "modules.alias.bin",
    "modules.builtin",
    "modules.builtin.alias.bin",
    "modules.builtin.bin",
    "modules.dep.bin",
    "modules.symbols.bin",
];

/// Why there is no such kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelsError {
    /// None of that name is known.
    #[error("lab/kernels has no {0}")]
    Unknown(String),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The lab's own programs do not build.
    #[error(transparent)]
    Programs(#[from] BuildError),
    /// No initial RAM disk.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A boot file is not what it should be.
    #[error("{path}: {source}")]
    Unpack {
        /// The boot file.
        path: PathBuf,
        /// What is wrong with it.
        source: KernelError,
    },
    /// It cannot be made.
    #[error(
        "{script} failed with {status}; what it needs is in lab/kernels/packages.txt, its output in {log}"
    )]
    Made {
        /// What makes it.
        script: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        log: PathBuf,
    },
}

/// A kernel that checks itself.
#[derive(Clone, Debug)]
pub struct DebugKernel {
    directory: PathBuf,
    release: String,
}

impl DebugKernel {
    /// What `make` has to be told for its modules: the compiler, which Kbuild does not remember, and that they need no types, for which
    /// pahole would have to be there.
    pub(crate) const MAKE: [&str; 2] = ["LLVM=-19", "CONFIG_DEBUG_INFO_BTF_MODULES="];

    /// Finds that of a version, such as `6.12`, or builds it, which takes a quarter of an hour.
    pub fn ensure(version: &str) -> Result<Self, KernelsError> {
        let known = SOURCES.iter().find(|(known, _)| *known == version);
        let (_, debian) = known.ok_or_else(|| KernelsError::Unknown(format!("debug kernel {version}")))?;
        let mut files = vec!["debug.sh".to_owned(), "debug.config".to_owned()];
        files.push(format!("debug-{version}.config"));
        files.retain(|file| folder().join(file).exists());
        let mirror = debian_mirror();
        let configs: Vec<String> =
            files[1..].iter().map(|file| folder().join(file).display().to_string()).collect();
        let arguments = [&[version.to_owned(), (*debian).to_owned(), mirror], &configs[..]].concat();
        let directory = made(&format!("debug-{version}"), &files, &arguments)?;
        let release = only_entry(&directory.join("root/lib/modules"))?;
        Ok(Self { directory, release })
    }

    /// The file that it is booted from.
    pub fn vmlinux(&self) -> PathBuf {
        self.directory.join("build/vmlinux")
    }

    /// The folder that modules are built with (`KDIR`).
    pub fn build_folder(&self) -> PathBuf {
        self.directory.join("build")
    }

    /// The program that runs the selftests of sched_ext that this kernel's source has, for the image's kernel of that version.
    pub fn sched_ext_selftests(&self, version: &str) -> Result<PathBuf, KernelsError> {
        let image = Image::ensure(Progress::Show)?;
        let unknown = || KernelsError::Unknown(format!("selftests for {version}"));
        let vmlinux = image.vmlinux(image.kernel(version).ok_or_else(unknown)?);
        let vmlinux = fs::canonicalize(&vmlinux).map_err(file_error(&vmlinux))?;
        let arguments = [self.directory.join("source"), vmlinux].map(|path| path.display().to_string());
        let directory = made(&format!("selftests-{version}"), &["selftests.sh".to_owned()], &arguments)?;
        Ok(directory.join("runner"))
    }

    /// Files that modprobe reads in the guest: here, there.
    pub fn module_files(&self) -> Vec<(PathBuf, String)> {
        let folder = format!("lib/modules/{}", self.release);
        let here = self.directory.join("root").join(&folder);
        let file = |name: &&str| (here.join(name), format!("/{folder}/{name}"));
        MODULE_FILES.iter().map(file).filter(|(here, _)| here.exists()).collect()
    }
}

/// A kernel of Debian that the image does not have.
#[derive(Clone, Debug)]
pub struct AddedKernel {
    directory: PathBuf,
    release: String,
    image: Image,
}

impl AddedKernel {
    /// Finds that of a name, such as `6.12-rt`, or fetches it.
    pub fn ensure(name: &str) -> Result<Self, KernelsError> {
        let known = ADDED.iter().find(|(known, _, _)| *known == name);
        let (_, flavour, debian) = known.ok_or_else(|| KernelsError::Unknown(name.to_owned()))?;
        let arguments = [(*flavour).to_owned(), (*debian).to_owned(), debian_mirror()];
        let directory = made(name, &["added.sh".to_owned()], &arguments)?;
        let release = only_entry(&directory.join("root/usr/lib/modules"))?;
        Ok(Self { directory, release, image: Image::ensure(Progress::Show)? })
    }

    /// Its name for itself.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// What the image's tree lacks of it, to be mounted over that.
    pub(crate) fn root(&self) -> PathBuf {
        self.directory.join("root")
    }

    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// Leaves in `folder` what lab-vm starts a guest from.
    pub fn guest_files(&self, folder: &Path) -> Result<(), KernelsError> {
        let path = self.root().join("boot").join(format!("vmlinuz-{}", self.release));
        let packed = fs::read(&path).map_err(file_error(&path))?;
        let vmlinux = kernel::vmlinux(&packed).map_err(|source| KernelsError::Unpack { path, source })?;
        let modules = self.root().join("usr/lib/modules").join(&self.release);
        let initrd = initramfs::guest_with(&self.image, &modules, &Binaries::build()?)?;
        for (name, content) in [("vmlinux", vmlinux), ("initrd", initrd)] {
            let path = folder.join(name);
            fs::write(&path, content).map_err(file_error(&path))?;
        }
        Ok(())
    }
}

fn folder() -> PathBuf {
    let folder = crate::lab_dir().join("kernels");
    // make and tar run elsewhere.
    fs::canonicalize(&folder).unwrap_or(folder)
}

/// The name of what a folder has one of.
fn only_entry(folder: &Path) -> Result<String, FileError> {
    let mut entries = fs::read_dir(folder).map_err(file_error(folder))?.flatten();
    let nothing = || file_error(folder)(io::Error::other("it has no kernel"));
    Ok(entries.next().ok_or_else(nothing)?.file_name().to_string_lossy().into_owned())
}

/// The directory of the cache with what the first of these files, a script, has made with those arguments or makes now.
fn made(name: &str, files: &[String], arguments: &[String]) -> Result<PathBuf, KernelsError> {
    let read = |file: &String| {
        let path = folder().join(file);
        fs::read(&path).map(|text| (PathBuf::from(file), text)).map_err(file_error(&path))
    };
    let parts: Vec<_> = files.iter().map(read).collect::<Result<_, _>>()?;
    let directory = cache_dir().join("kernels").join(format!("{name}-{}", hash(name, &parts)));
    let _lock = lock(&directory, FlockArg::LockExclusive).map_err(file_error(&directory))?;
    // Not renamed at the end: what modules are built with has the folder's name in it.
    let complete = directory.join("complete");
    if complete.exists() {
        return Ok(directory);
    }
    eprintln!("lab: making kernel {name} (once; a debug kernel takes a quarter of an hour)");
    remove_tree(&directory).map_err(file_error(&directory))?;
    fs::create_dir_all(&directory).map_err(file_error(&directory))?;
    let scratch = ScratchDir::from_path(directory.clone());
    // A version has dots of its own.
    let log =
        directory.with_file_name(format!("{}.log", directory.file_name().unwrap_or_default().display()));
    let output = fs::File::create(&log).map_err(file_error(&log))?;
    let mut command = Command::new("sh");
    command.arg(folder().join(&files[0])).args(arguments).current_dir(&directory);
    // The settings of a make that calls this are not meant for that one.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    command.env("PAHOLE", pahole(&directory)?);
    command.stdin(Stdio::null()).stdout(output.try_clone().map_err(file_error(&log))?).stderr(output);
    let mut child = GroupChild::spawn(command).map_err(file_error(Path::new("sh")))?;
    let status = child.child().wait().map_err(file_error(Path::new("sh")))?;
    if !status.success() {
        return Err(KernelsError::Made { script: files[0].clone(), status, log });
    }
    fs::write(&complete, "").map_err(file_error(&complete))?;
    scratch.disarm();
    Ok(directory)
}

/// The image's pahole: that of Debian 12 does not know all of a newer kernel's types.
fn pahole(folder: &Path) -> Result<PathBuf, KernelsError> {
    use std::os::unix::fs::PermissionsExt;
    let tree = Image::ensure(Progress::Show)?.tree();
    let path = folder.join("pahole");
    let text = format!(
        "#!/bin/sh\ntree={}\nexec $tree/usr/lib64/ld-linux-x86-64.so.2 --library-path $tree/usr/lib/x86_64-linux-gnu \
         $tree/usr/bin/pahole \"$@\"\n",
        fs::canonicalize(&tree).map_err(file_error(&tree))?.display()
    );
    fs::write(&path, text).map_err(file_error(&path))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(file_error(&path))?;
    Ok(path)
}
