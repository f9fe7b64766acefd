//! The initial RAM disks: the init script, busybox, the kernel modules that are needed to reach the root file
//! system, and the lab's own programs, which therefore need not be baked into the root image.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::binaries::Binaries;
use crate::cpio::Archive;
use crate::file_error::{FileError, file_error};
use crate::image::{Image, Kernel};
use crate::recipe::Role;

/// Modules per role, `lab/image/initramfs.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Modules {
    server: Vec<String>,
    guest: Vec<String>,
    server_network: Vec<String>,
    guest_network: Vec<String>,
    svm: Vec<String>,
    vmx: Vec<String>,
}

/// Why there is no initial RAM disk.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
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
    let mut archive = base(image, &modules_of(image, image.server_kernel()), Role::Server, binaries)?;
    archive.file("lab/bin/lab-vm", 0o755, &program(&binaries.lab_vm)?);
    for unit in ["lab.target", "lab-agent.service"] {
        let path = crate::lab_dir().join("image/systemd").join(unit);
        archive.file(&format!("lab/systemd/{unit}"), 0o644, &read(&path)?);
    }
    for kernel in image.kernels() {
        let directory = format!("lab/kernels/{}", kernel.name);
        archive.file(&format!("{directory}/initrd"), 0o644, &guest(image, kernel, binaries)?);
        archive.symlink(&format!("{directory}/vmlinux"), &format!("/boot/vmlinux-{}", kernel.release));
    }
    Ok(archive.finish())
}

/// The initial RAM disk of guests with a kernel.
pub(crate) fn guest(image: &Image, kernel: &Kernel, binaries: &Binaries) -> Result<Vec<u8>, InitramfsError> {
    guest_with(image, &modules_of(image, kernel), binaries)
}

/// That of guests with a kernel that has its modules in this folder.
pub(crate) fn guest_with(
    image: &Image,
    modules: &Path,
    binaries: &Binaries,
) -> Result<Vec<u8>, InitramfsError> {
    Ok(base(image, modules, Role::Guest, binaries)?.finish())
}

fn modules_of(image: &Image, kernel: &Kernel) -> PathBuf {
    image.tree().join("usr/lib/modules").join(&kernel.release)
}

/// The initial RAM disk of a machine whose kernel has all that it needs built in.
pub(crate) fn without_modules(image: &Image, binaries: &Binaries) -> Result<Vec<u8>, InitramfsError> {
    let mut archive = programs(image, binaries)?;
    for list in ["server", "network", "svm", "vmx"] {
        archive.file(&format!("lab/modules/order.{list}"), 0o644, b"");
    }
    Ok(archive.finish())
}

/// What every one has.
fn programs(image: &Image, binaries: &Binaries) -> Result<Archive, InitramfsError> {
    let mut archive = Archive::default();
    // The kernel opens it for init before anything is mounted.
    archive.character_device("dev/console", 0o600, 5, 1);
    archive.file("init", 0o755, &read(&crate::lab_dir().join("image/init"))?);
    archive.file("lab/bin/busybox", 0o755, &read(&image.tree().join("usr/bin/busybox"))?);
    archive.symlink("bin/sh", "/lab/bin/busybox");
    archive.file("lab/bin/lab-agent", 0o755, &program(&binaries.lab_agent)?);
    Ok(archive)
}

/// The part that is common to server and guests.
fn base(image: &Image, folder: &Path, role: Role, binaries: &Binaries) -> Result<Archive, InitramfsError> {
    let mut archive = programs(image, binaries)?;
    let path = crate::lab_dir().join("image/initramfs.toml");
    let text = String::from_utf8_lossy(&read(&path)?).into_owned();
    let modules: Modules =
        toml::from_str(&text).map_err(|source| InitramfsError::Syntax { path, source: source.into() })?;
    let lists = match role {
        Role::Server => vec![
            ("server", modules.server),
            ("network", modules.server_network),
            ("svm", modules.svm),
            ("vmx", modules.vmx),
        ],
        Role::Guest => vec![("guest", modules.guest), ("network", modules.guest_network)],
    };
    add_modules(&mut archive, folder, &lists)?;
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
        for step in load_order(directory, wanted)? {
            if *list != lists[0].0 && first.contains(&step) {
                continue;
            }
            let name = file_stem(&step.file);
            let content = decompressed(&directory.join(&step.file))?;
            archive.file(&format!("lab/modules/{list}/{name}"), 0o644, &content);
            let kind = if step.optional { "optional" } else { "needed" };
            order.push_str(&format!("{kind} {list}/{name}\n"));
        }
        archive.file(&format!("lab/modules/order.{list}"), 0o644, order.as_bytes());
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(file_error(path))
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

/// A module to load.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    /// Its file, relative to the directory of the kernel's modules.
    file: String,
    /// Whether another module only wishes for it; it may fail, for example on a CPU it is not for.
    optional: bool,
}

fn program(path: &Path) -> Result<Vec<u8>, FileError> {
    crate::binaries::stripped(path).map_err(file_error(path))
}

/// What depmod knows of a kernel's modules.
struct ModuleIndex {
    path: PathBuf,
    /// File, and all files it depends on, nearest first, by name.
    files: HashMap<String, (String, Vec<String>)>,
    builtin: Vec<String>,
    /// Modules and aliases that are wished for before a module, by its name.
    wishes: HashMap<String, Vec<String>>,
    /// Names by alias; patterns are left out.
    aliases: HashMap<String, Vec<String>>,
}

impl ModuleIndex {
    fn read(directory: &Path) -> Result<Self, InitramfsError> {
        let text = |name: &str| {
            Ok::<_, FileError>(String::from_utf8_lossy(&read(&directory.join(name))?).into_owned())
        };
        let path = directory.join("modules.dep");
        let mut index = Self {
            path,
            files: HashMap::new(),
            builtin: text("modules.builtin")?.lines().map(canonical).collect(),
            wishes: HashMap::new(),
            aliases: HashMap::new(),
        };
        for (file, needs) in text("modules.dep")?.lines().filter_map(|line| line.split_once(':')) {
            let needs = needs.split_whitespace().map(str::to_owned).collect();
            index.files.insert(canonical(file), (file.to_owned(), needs));
        }
        // "softdep module pre: a b post: c"
        for line in text("modules.softdep")?.lines() {
            let mut words = line.split_whitespace().skip(1);
            let Some(module) = words.next() else { continue };
            let before = words.skip_while(|word| *word != "pre:").skip(1).take_while(|word| *word != "post:");
            index.wishes.entry(canonical(module)).or_default().extend(before.map(str::to_owned));
        }
        // "alias name module"
        for line in text("modules.alias")?.lines() {
            if let ["alias", alias, module] = line.split_whitespace().collect::<Vec<_>>()[..] {
                index.aliases.entry(alias.to_owned()).or_default().push(canonical(module));
            }
        }
        Ok(index)
    }

    /// Adds a module with all that comes before it; `false` if there is no such file.
    fn add(&self, name: &str, optional: bool, order: &mut Vec<Step>) -> bool {
        let Some((file, needs)) = self.files.get(name) else { return false };
        for file in needs.iter().rev().chain([file]) {
            if let Some(known) = order.iter_mut().find(|step| step.file == *file) {
                known.optional &= optional;
                continue;
            }
            // Wishes of wishes are not followed, so this ends.
            let wishes = self.wishes.get(&canonical(file)).filter(|_| !optional);
            for wish in wishes.into_iter().flatten() {
                let providers = self.aliases.get(wish).cloned().unwrap_or_else(|| vec![canonical(wish)]);
                for provider in providers {
                    self.add(&provider, true, order);
                }
            }
            order.push(Step { file: file.clone(), optional });
        }
        true
    }
}

/// The files of the wanted modules and of what they depend on or wish for, in the order to load them.
fn load_order(directory: &Path, wanted: &[String]) -> Result<Vec<Step>, InitramfsError> {
    let index = ModuleIndex::read(directory)?;
    let mut order = Vec::new();
    for module in wanted {
        let name = canonical(module);
        if !index.add(&name, false, &mut order) && !index.builtin.contains(&name) {
            return Err(InitramfsError::NoModule { path: index.path, module: module.clone() });
        }
    }
    Ok(order)
}

/// Decompressed here, as the machine that runs it is slower.
fn decompressed(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return Ok(read(path)?);
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

    fn tree(files: [(&str, &str); 4]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(format!("modules.{name}")), text).unwrap();
        }
        directory
    }

    fn order(files: [(&str, &str); 4], wanted: &[&str]) -> Result<Vec<String>, InitramfsError> {
        let wanted: Vec<String> = wanted.iter().map(|&name| name.to_owned()).collect();
        let steps = load_order(tree(files).path(), &wanted)?;
        let text = |step: Step| format!("{}{}", if step.optional { "?" } else { "" }, step.file);
        Ok(steps.into_iter().map(text).collect())
    }

    #[test]
    fn what_a_module_depends_on_is_loaded_before_it_and_once() {
        let dependencies =
            "k/a-b.ko.xz: k/c.ko.xz k/d.ko.xz\nk/c.ko.xz: k/d.ko.xz\nk/d.ko.xz:\nk/e.ko: k/d.ko.xz\n";
        let files = [("dep", dependencies), ("builtin", "k/v.ko\n"), ("softdep", ""), ("alias", "")];
        let order = order(files, &["a_b", "v", "e"]).unwrap();
        assert_eq!(order, ["k/d.ko.xz", "k/c.ko.xz", "k/a-b.ko.xz", "k/e.ko"]);
    }

    #[test]
    fn what_a_module_wishes_for_is_optional_unless_another_needs_it() {
        let files = [
            ("dep", "k/fs.ko: k/lib.ko\nk/lib.ko:\nk/sum.ko:\nk/fast_sum.ko:\nk/x.ko: k/fast_sum.ko\n"),
            ("builtin", ""),
            ("softdep", "# comment\nsoftdep lib pre: sum-alias nothing post: fs\n"),
            ("alias", "alias sum-alias fast_sum\nalias sum-alias sum\nalias pci:v* fs\n"),
        ];
        assert_eq!(order(files, &["fs"]).unwrap(), ["?k/fast_sum.ko", "?k/sum.ko", "k/lib.ko", "k/fs.ko"]);
        let both = order(files, &["fs", "x"]).unwrap();
        assert_eq!(both, ["k/fast_sum.ko", "?k/sum.ko", "k/lib.ko", "k/fs.ko", "k/x.ko"]);
    }

    #[test]
    fn a_module_that_is_not_there_is_named() {
        let files = [("dep", "k/a.ko:\n"), ("builtin", ""), ("softdep", ""), ("alias", "")];
        let error = order(files, &["zfs"]).unwrap_err().to_string();
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
