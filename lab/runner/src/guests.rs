//! What VMs need on a machine that is not the lab's server, where lab-vm looks for it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::binaries::Binaries;
use crate::file_error::file_error;
use crate::image::Image;
use crate::initramfs;
use crate::lab::LabError;
use crate::progress::Progress;

/// Fills `directory` for VMs with the kernel of the image that has that name, such as `6.12`: the kernel, its initial RAM
/// disk, the root disk and the tree with QEMU (`lab/` in lab-vm's folder, see `lab/lab-vm/src/place.rs`). All but the RAM disk
/// are links into the cache.
pub fn guest_files(kernel: &str, directory: &Path) -> Result<(), LabError> {
    let image = Image::ensure(Progress::Show)?;
    let folder = directory.join("kernels").join(kernel);
    let error = |source| file_error(&folder)(source);
    let unknown = || error(io::Error::other("the image has no such kernel"));
    let kernel = image.kernel(kernel).ok_or_else(unknown)?;
    let initrd = initramfs::guest(&image, kernel, &Binaries::build()?)?;
    fs::create_dir_all(&folder).map_err(error)?;
    fs::write(folder.join("initrd"), initrd).map_err(error)?;
    let links = [
        (image.vmlinux(kernel), folder.join("vmlinux")),
        (image.root_disk(), directory.join("root.erofs")),
        (image.tree(), directory.join("tree")),
    ];
    for (target, link) in links {
        match fs::remove_file(&link) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(error(source).into()),
            _ => symlink(target, link).map_err(error)?,
        }
    }
    Ok(())
}
