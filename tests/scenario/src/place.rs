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

/// vnumad with these arguments, and with a configuration that has what `--config` names of them.
pub(crate) fn vnumad(arguments: &[&str]) -> Result<Command> {
    let mut rest = arguments.to_vec();
    let text = match rest.iter().position(|&word| word == "--config") {
        Some(at) => {
            let file = rest.drain(at..rest.len().min(at + 2)).nth(1).context("--config without a file")?;
            fs::read_to_string(file).with_context(|| file.to_owned())?
        }
        None => directory().as_deref().map(configuration).unwrap_or_default(),
    };
    let file = directory().unwrap_or_else(|| "/run".into()).join("vnumad.toml");
    fs::write(&file, patient(&text)).with_context(|| file.display().to_string())?;
    let mut command = Command::new("vnumad");
    command.arg("--config").arg(file).args(rest);
    Ok(command)
}

/// QEMU on an emulated server may get no CPU for seconds, if the machine has other work: that is no fault of it.
fn patient(text: &str) -> String {
    const LIMIT: &str = "command_limit_ms = 30000\n";
    match text.split_once("[vms]\n") {
        _ if text.contains("command_limit_ms") => text.to_owned(),
        Some((before, after)) => format!("{before}[vms]\n{LIMIT}{after}"),
        None => format!("{text}\n[vms]\n{LIMIT}"),
    }
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
    fn a_vnumad_of_a_test_is_patient_unless_it_is_told_otherwise() {
        for (text, expected) in [
            ("", "\n[vms]\ncommand_limit_ms = 30000\n"),
            ("[a]\nb = 1\n", "[a]\nb = 1\n\n[vms]\ncommand_limit_ms = 30000\n"),
            ("[vms]\nsockets = []\n", "[vms]\ncommand_limit_ms = 30000\nsockets = []\n"),
            ("[vms]\ncommand_limit_ms = 1000\n", "[vms]\ncommand_limit_ms = 1000\n"),
        ] {
            assert_eq!(patient(text), expected);
        }
    }

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
