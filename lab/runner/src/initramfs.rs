//! The initial RAM disks: the init script, busybox, the kernel modules that are needed to reach the root file
//! system, and the lab's own programs, which therefore need not be baked into the root image.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::binaries::Binaries;
use crate::cpio::Archive;
use crate::image::{Image, Kernel};
use crate::recipe::Role;

/// Modules per role, `lab/image/initramfs.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Modules {
    server: Vec<String>,
    guest: Vec<String>,
    svm: Vec<String>,
    vmx: Vec<String>,
}

/// Why there is no initial RAM disk.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `initramfs.toml` is wrong.
    #[error("{path}: {source}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A module is neither built in nor there.
    #[error("{path}: no module {module}")]
    NoModule {
        /// The list of modules.
        path: PathBuf,
        /// What was looked for.
        module: String,
    },
    /// xz cannot decompress a module.
    #[error("xz -dc {path}: {reason}")]
    Decompress {
        /// The module.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// The initial RAM disk of the server, with those of its guests inside.
pub(crate) fn server(image: &Image, binaries: &Binaries) -> Result<Vec<u8>, InitramfsError> {
    let mut archive = base(image, image.server_kernel(), binaries)?;
    archive.file("lab/bin/lab-vm", 0o755, &read(&binaries.lab_vm)?);
    for kernel in image.kernels().iter().filter(|kernel| kernel.role == Role::Guest) {
        let directory = format!("lab/kernels/{}", kernel.name);
        let guest = base(image, kernel, binaries)?.finish();
        archive.file(&format!("{directory}/initrd"), 0o644, &guest);
        archive.symlink(&format!("{directory}/vmlinuz"), &format!("/boot/vmlinuz-{}", kernel.release));
    }
    Ok(archive.finish())
}

/// The part that is common to server and guests.
fn base(image: &Image, kernel: &Kernel, binaries: &Binaries) -> Result<Archive, InitramfsError> {
    let folder = crate::lab_dir().join("image");
    let mut archive = Archive::default();
    // The kernel opens it for init before anything is mounted.
    archive.character_device("dev/console", 0o600, 5, 1);
    archive.file("init", 0o755, &read(&folder.join("init"))?);
    archive.file("lab/bin/busybox", 0o755, &read(&image.tree().join("usr/bin/busybox"))?);
    archive.symlink("bin/sh", "/lab/bin/busybox");
    archive.file("lab/bin/lab-agent", 0o755, &read(&binaries.lab_agent)?);
    let path = folder.join("initramfs.toml");
    let text = String::from_utf8_lossy(&read(&path)?).into_owned();
    let modules: Modules =
        toml::from_str(&text).map_err(|source| InitramfsError::Syntax { path, source: source.into() })?;
    let lists = match kernel.role {
        Role::Server => vec![("server", modules.server), ("svm", modules.svm), ("vmx", modules.vmx)],
        Role::Guest => vec![("guest", modules.guest)],
    };
    add_modules(&mut archive, &image.tree().join("usr/lib/modules").join(&kernel.release), &lists)?;
    Ok(archive)
}

/// Adds the modules of each list and `order.<list>`, the files of the list in the order to load them; what an
/// earlier list loads is left out.
fn add_modules(
    archive: &mut Archive,
    directory: &Path,
    lists: &[(&str, Vec<String>)],
) -> Result<(), InitramfsError> {
    let first = load_order(directory, lists.first().map_or(&[], |(_, wanted)| wanted))?;
    for (list, wanted) in lists {
        let mut order = String::new();
        for module in load_order(directory, wanted)? {
            if *list != lists[0].0 && first.contains(&module) {
                continue;
            }
            let name = file_stem(&module);
            archive.file(&format!("lab/modules/{list}/{name}"), 0o644, &decompressed(&directory.join(&module))?);
            order.push_str(&format!("{list}/{name}\n"));
        }
        archive.file(&format!("lab/modules/order.{list}"), 0o644, order.as_bytes());
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    fs::read(path).map_err(|source| InitramfsError::Read { path: path.into(), source })
}

/// `kernel/fs/erofs/erofs.ko.xz` -> `erofs.ko`
fn file_stem(module: &str) -> &str {
    let file = module.rsplit('/').next().unwrap_or(module);
    file.find(".ko").map_or(file, |position| &file[..position + 3])
}

/// Name as the kernel has it: dashes and underscores are the same.
fn canonical(module: &str) -> String {
    file_stem(module).trim_end_matches(".ko").replace('-', "_")
}

/// The files of the wanted modules and of what they depend on, in the order to load them.
fn load_order(directory: &Path, wanted: &[String]) -> Result<Vec<String>, InitramfsError> {
    let path = directory.join("modules.dep");
    let dependencies = String::from_utf8_lossy(&read(&path)?).into_owned();
    let builtin = String::from_utf8_lossy(&read(&directory.join("modules.builtin"))?).into_owned();
    // "file: file file ...", each with all it depends on, nearest first.
    let lines: HashMap<String, (&str, Vec<&str>)> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| (canonical(file), (file, needs.split_whitespace().collect())))
        .collect();
    let mut order: Vec<String> = Vec::new();
    for module in wanted {
        let Some((file, needs)) = lines.get(&canonical(module)) else {
            if builtin.lines().any(|line| canonical(line) == canonical(module)) {
                continue;
            }
            return Err(InitramfsError::NoModule { path, module: module.clone() });
        };
        for file in needs.iter().rev().chain([file]) {
            if !order.iter().any(|known| known == file) {
                order.push((*file).to_owned());
            }
        }
    }
    Ok(order)
}

/// Decompressed here, as the machine that runs it is slower.
fn decompressed(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return read(path);
    }
    let error = |reason: String| InitramfsError::Decompress { path: path.into(), reason };
    let output = Command::new("xz").arg("-dc").arg(path).output().map_err(|e| error(e.to_string()))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(error(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(dependencies: &str, builtin: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("modules.dep"), dependencies).unwrap();
        fs::write(directory.path().join("modules.builtin"), builtin).unwrap();
        directory
    }

    #[test]
    fn what_a_module_depends_on_is_loaded_before_it_and_once() {
        let tree = tree(
            "k/a-b.ko.xz: k/c.ko.xz k/d.ko.xz\nk/c.ko.xz: k/d.ko.xz\nk/d.ko.xz:\nk/e.ko: k/d.ko.xz\n",
            "k/v.ko\n",
        );
        let wanted = ["a_b", "v", "e"].map(str::to_owned);
        let order = load_order(tree.path(), &wanted).unwrap();
        assert_eq!(order, ["k/d.ko.xz", "k/c.ko.xz", "k/a-b.ko.xz", "k/e.ko"]);
    }

    #[test]
    fn a_module_that_is_not_there_is_named() {
        let tree = tree("k/a.ko:\n", "");
        let error = load_order(tree.path(), &["zfs".to_owned()]).unwrap_err().to_string();
        assert!(error.ends_with("no module zfs"), "{error}");
    }

    #[test]
    fn a_broken_module_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m.ko.xz");
        fs::write(&path, "no xz").unwrap();
        let error = decompressed(&path).unwrap_err().to_string();
        assert!(error.contains("m.ko.xz"), "{error}");
    }
}
