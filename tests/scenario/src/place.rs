//! Where vnumad and lab-vm have their files: on the lab server at their usual places, elsewhere below the folder that the
//! environment variable `LAB_VM_DIRECTORY` names, as lab-vm has it. A vnumad of that machine has other sockets.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable.
pub const DIRECTORY: &str = "LAB_VM_DIRECTORY";

fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).filter(|directory| !directory.is_empty()).map(PathBuf::from)
}

/// The directory of a VM.
pub(crate) fn vm(name: &str) -> PathBuf {
    directory().map_or_else(|| "/run/lab-vm".into(), |directory| directory.join("vm")).join(name)
}

/// vnumad, with its configuration.
pub(crate) fn vnumad() -> Result<Command> {
    let mut command = Command::new("vnumad");
    if let Some(directory) = directory() {
        let file = directory.join("vnumad.toml");
        fs::write(&file, configuration(&directory)).with_context(|| file.display().to_string())?;
        command.arg("--config").arg(file);
    }
    Ok(command)
}

fn configuration(directory: &Path) -> String {
    let path = |name| directory.join(name).display().to_string();
    let [socket, vms, records] = ["vnumad.sock", "qmp", "channels"].map(path);
    format!("[api]\nsocket = {socket:?}\n\n[vms]\ndirectory = {vms:?}\n\n[publish]\nrecords = {records:?}\n")
}

/// The arguments of vnumactl, with vnumad's socket.
pub(crate) fn vnumactl_arguments(arguments: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    if let Some(directory) = directory() {
        all.push(format!("--socket={}", directory.join("vnumad.sock").display()));
    }
    all
}

/// vnumactl with these arguments.
pub fn vnumactl_command(arguments: &[&str]) -> Command {
    let mut command = Command::new("vnumactl");
    command.args(vnumactl_arguments(arguments));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_of_a_vnumad_elsewhere_are_in_its_folder() {
        let text = configuration(Path::new("/run/x"));
        assert_eq!(
            text,
            "[api]\nsocket = \"/run/x/vnumad.sock\"\n\n[vms]\ndirectory = \"/run/x/qmp\"\n\n\
             [publish]\nrecords = \"/run/x/channels\"\n"
        );
    }
}
