//! Builds the guest driver, `guest/driver`, for a kernel of the image: in the image's tree, whose compiler and
//! headers belong to that kernel. What was built is cached under the hash of its sources.

use std::fs;
use std::path::{Path, PathBuf};

use nix::fcntl::FlockArg;

use crate::cache::{cache_dir, hash, lock, remove_tree, try_lock};
use crate::children::ScratchDir;
use crate::file_error::{FileError, file_error};
use crate::image::{Image, ImageError};
use crate::kbuild::{self, KbuildError};
use crate::kernels::{AddedKernel, DebugKernel};
use crate::progress::Progress;

/// Folders of the checkout that the build needs, at the same places relative to each other.
const FOLDERS: [&str; 3] = ["guest/driver", "abi/topology-channel/include", "abi/guest-device/include"];
/// Everything below the present folder: the tree stays as it is. `$1`: the kernel's release.
const DKMS: &str = r#"
    make --silent DESTDIR="$PWD/root" dkms-tree
    mkdir dkms
    dkms build vnuma/$(sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' dkms.conf) -k "$1" \
        --sourcetree "$PWD/root/usr/src" --dkmstree "$PWD/dkms"
    module=$(find dkms -path "*/$1/*/module/vnuma.ko*")
    case $(modinfo -F vermagic "$module") in "$1 "*) ;; *) echo "not for $1: $module"; exit 1 ;; esac
"#;
/// Fails if the compiler, sparse, kernel-doc or modpost has anything to say. `$1`: the kernel's release. sparse 0.6.4 does not know
/// `__typeof_unqual__` of newer headers, nor that what they make of MODULE_LICENSE() and its like is constant.
const CHECK: &str = r#"
    chmod +x ../../sparse
    make --no-print-directory KDIR="/lib/modules/$1/build" W=1 KBUILD_CHECKSRC=2 CHECK="$PWD/../../sparse" \
        CF=-D__typeof_unqual__=__typeof__ modules readers >log 2>&1 || { cat log; exit 1; }
    grep -q 'CHECK .*main\.c' log || { echo "sparse did not run"; cat log; exit 1; }
    ! grep -v 'bad constant expression' log | grep -E 'warning:|error:|WARNING'
"#;
/// What is built.
const TARGETS: [&str; 3] = ["modules", "check-tools", "readers"];
/// Builds that are kept in the cache.
const KEPT: usize = 16;

/// Why there is no driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The image has no such kernel.
    #[error("kernel \"{name}\" is not in the image; there are: {known}")]
    Kernel {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// It does not build.
    #[error(transparent)]
    Build(#[from] KbuildError),
}

/// Builds the driver for the kernel of the image with that name, such as `6.12`; path of `vnuma.ko`.
pub fn build(kernel: &str) -> Result<PathBuf, DriverError> {
    Ok(built(kernel)?.join("vnuma.ko"))
}

/// Builds the driver's check tools, which run in guests of that kernel; the directory that they are in.
pub fn tools(kernel: &str) -> Result<PathBuf, DriverError> {
    Ok(built(kernel)?.join("test"))
}

/// Builds the driver and its check tools for a debug kernel, on this machine and by the compiler that built that; the directory, as
/// [`tools`] and [`build`] have it.
pub fn built_for_debug(kernel: &DebugKernel) -> Result<PathBuf, DriverError> {
    let sources = sources(&crate::lab_dir().join(".."))?;
    // The folder's name has the hash of the kernel.
    let name = hash(&kernel.build_folder().display().to_string(), &sources);
    let words = [&DebugKernel::MAKE[..], &TARGETS[..]].concat();
    keep(&name, || Ok(kbuild::make_here(&kernel.build_folder(), &sources, "guest/driver", &words)?))
}

/// Builds them for a kernel of Debian that the image does not have.
pub fn built_for_added(kernel: &AddedKernel) -> Result<PathBuf, DriverError> {
    let sources = sources(&crate::lab_dir().join(".."))?;
    let (image, layer, release) = (kernel.image(), kernel.root(), kernel.release());
    let make = || kbuild::make_over(image, &layer, release, &sources, "guest/driver", &TARGETS);
    keep(&hash(release, &sources), || Ok(make()?))
}

/// Has DKMS build the driver, as its README says, for the kernel of the image with that name.
pub fn build_with_dkms(kernel: &str) -> Result<(), DriverError> {
    let image = Image::ensure(Progress::Show)?;
    let release = release(&image, kernel)?;
    let sources = sources(&crate::lab_dir().join(".."))?;
    kbuild::run(&image, release, &sources, "guest/driver", &["sh", "-euc", DKMS, "sh", release])?;
    Ok(())
}

/// Checks the driver's sources as the kernel's maintainers do, with the kernel of the image that has that name.
pub fn check(kernel: &str) -> Result<(), DriverError> {
    const SPARSE: &str = "/usr/bin/sparse";
    let image = Image::ensure(Progress::Show)?;
    let release = release(&image, kernel)?;
    let mut sources = sources(&crate::lab_dir().join(".."))?;
    sources.push((PathBuf::from("sparse"), fs::read(SPARSE).map_err(file_error(Path::new(SPARSE)))?));
    kbuild::run(&image, release, &sources, "guest/driver", &["sh", "-euc", CHECK, "sh", release])?;
    Ok(())
}

fn release<'a>(image: &'a Image, name: &str) -> Result<&'a str, DriverError> {
    image.kernel(name).map(|kernel| kernel.release.as_str()).ok_or_else(|| {
        let known = image.kernels().iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>().join(", ");
        DriverError::Kernel { name: name.to_owned(), known }
    })
}

/// The directory of the cache with what was built.
fn built(name: &str) -> Result<PathBuf, DriverError> {
    let image = Image::ensure(Progress::Show)?;
    let release = release(&image, name)?;
    let checkout = crate::lab_dir().join("..");
    let sources = sources(&checkout)?;
    keep(&hash(release, &sources), || Ok(kbuild::make(&image, release, &sources, "guest/driver", &TARGETS)?))
}

/// The directory of the cache with what was built under a hash, or is built now.
fn keep(hash: &str, build: impl FnOnce() -> Result<ScratchDir, DriverError>) -> Result<PathBuf, DriverError> {
    let results = cache_dir().join("driver");
    let result = results.join(hash);
    let _lock = lock(&result, FlockArg::LockExclusive).map_err(file_error(&result))?;
    if !result.join("vnuma.ko").exists() {
        let scratch = build()?;
        install(&scratch.path().join("guest/driver"), &result)?;
        prune(&results, hash);
    }
    Ok(result)
}

/// Path within the checkout and content of everything that the build needs, sorted.
fn sources(checkout: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>, DriverError> {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(PathBuf::from).collect();
    while let Some(folder) = folders.pop() {
        let path = checkout.join(&folder);
        for entry in fs::read_dir(&path).map_err(file_error(&path))? {
            let entry = entry.map_err(file_error(&path))?;
            let name = folder.join(entry.file_name());
            let kind = entry.file_type().map_err(file_error(&entry.path()))?;
            if kind.is_dir() {
                folders.push(name);
            } else if kind.is_file() && is_source(&name) {
                let content = fs::read(entry.path()).map_err(file_error(&entry.path()))?;
                files.push((name, content));
            }
        }
    }
    files.sort();
    Ok(files)
}

/// What builds in the checkout leave behind is no source.
fn is_source(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    matches!(extension, Some("c" | "h" | "S" | "conf")) && !name.ends_with(".mod.c")
        || matches!(name, "Kbuild" | "Makefile")
}

/// Copies what was built beside the result and renames it.
fn install(from: &Path, result: &Path) -> Result<(), DriverError> {
    let temporary = result.with_extension("tmp");
    remove_tree(&temporary).map_err(file_error(&temporary))?;
    fs::create_dir_all(temporary.join("test")).map_err(file_error(&temporary))?;
    let scratch = ScratchDir::from_path(temporary.clone());
    for (module, to) in [("vnuma.ko", "vnuma.ko"), ("test/readers/vnuma-readers.ko", "test/vnuma-readers.ko")]
    {
        fs::copy(from.join(module), temporary.join(to)).map_err(file_error(&from.join(module)))?;
    }
    let tests = from.join("test");
    for entry in fs::read_dir(&tests).map_err(file_error(&tests))?.flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && !is_source(&entry.path()) {
            let target = temporary.join("test").join(entry.file_name());
            fs::copy(entry.path(), &target).map_err(file_error(&entry.path()))?;
        }
    }
    fs::rename(&temporary, result).map_err(file_error(result))?;
    scratch.disarm();
    Ok(())
}

/// Removes all but the newest unused builds; what cannot be removed is tried again next time.
fn prune(results: &Path, keep: &str) {
    let entries = fs::read_dir(results).into_iter().flatten().flatten();
    let mut builds: Vec<_> = entries
        .filter(|entry| entry.path().is_dir() && entry.file_name() != keep)
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    builds.sort();
    let old = builds.len().saturating_sub(KEPT);
    for (_, path) in &builds[..old] {
        if let Ok(Some(_exclusive)) = try_lock(path) {
            let _ = remove_tree(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_builds_leave_behind_is_no_source() {
        for name in ["main.c", "vnuma.h", "Kbuild", "Makefile", "dkms.conf"] {
            assert!(is_source(Path::new(name)), "{name}");
        }
        for name in ["main.o", "vnuma.mod.c", "vnuma.ko", ".main.o.cmd", "Module.symvers", "test/vnuma-check"]
        {
            assert!(!is_source(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn the_sources_of_the_project_are_found() {
        let sources = sources(&crate::lab_dir().join("..")).unwrap();
        let has = |name: &str| sources.iter().any(|(path, _)| path == Path::new(name));
        assert!(has("guest/driver/Kbuild"));
        assert!(has("abi/topology-channel/include/vnuma/topology_channel.h"));
    }
}
