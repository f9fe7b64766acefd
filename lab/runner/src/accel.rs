//! What runs the server: KVM where it truly works, else TCG.
//!
//! The presence of `/dev/kvm` says little: there are kinds that hang with a stock kernel. KVM is used where
//! `/proc/cpuinfo` has vmx or svm and a trial boots the server's kernel to a CPU that has it too, as the server
//! runs VMs itself.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::children::GroupChild;
use crate::qemu::{self, Accel};

/// How long the trial may take; with a KVM that works it takes a second or two.
const TRIAL_LIMIT: Duration = Duration::from_secs(30);
/// What the init script says when the CPU of the trial has vmx or svm.
const TRIAL_GOOD: &str = "vnuma-trial-nested-kvm";

/// Decides once per process; says what was decided and why, to a terminal only, as stderr belongs to the command
/// that runs in the lab.
pub(crate) fn choose(tree: &Path, kernel: &Path, initramfs: &Path) -> Accel {
    static CHOICE: OnceLock<Accel> = OnceLock::new();
    *CHOICE.get_or_init(|| {
        let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let (accel, reason) = if !has_virtualization(&flags) {
            (Accel::Tcg, "the CPU has neither vmx nor svm".to_owned())
        } else {
            match boots(qemu::trial(Accel::Kvm, tree, kernel, initramfs), TRIAL_LIMIT) {
                Ok(()) => (Accel::Kvm, "a trial boot worked".to_owned()),
                Err(reason) => (Accel::Tcg, format!("KVM's trial boot failed: {reason}")),
            }
        };
        if std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            eprintln!("lab: using {accel:?}: {reason}");
        }
        accel
    })
}

fn has_virtualization(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    flags.flat_map(str::split_whitespace).any(|flag| flag == "vmx" || flag == "svm")
}

/// Lines of a trial's console that its error shows.
const SHOWN_LINES: usize = 20;

/// Runs a trial.
pub(crate) fn boots(mut command: Command, limit: Duration) -> Result<(), String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = GroupChild::spawn(command).map_err(|error| error.to_string())?;
    let stdout = child.child().stdout.take();
    let output = std::thread::spawn(move || {
        let mut text = Vec::new();
        // The trial prints some lines only; what was read before an error counts.
        let _ = stdout.map(|stdout| stdout.take(1 << 20).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let started = Instant::now();
    let ended = loop {
        match child.child().try_wait() {
            Ok(Some(_)) => break true,
            Ok(None) if started.elapsed() < limit => std::thread::sleep(Duration::from_millis(50)),
            Ok(None) => break false,
            Err(error) => return Err(error.to_string()),
        }
    };
    child.kill();
    let text = output.join().unwrap_or_default();
    if text.contains(TRIAL_GOOD) {
        return Ok(());
    }
    let shown: Vec<&str> = text.lines().rev().take(SHOWN_LINES).collect();
    let shown: String = shown.iter().rev().map(|line| format!("\n  {line}")).collect();
    Err(if ended {
        format!("it ended without a working nested KVM, its last lines:{shown}")
    } else {
        format!("no end after {limit:?}, its last lines:{shown}")
    })
}

/// The same with a second try, as for any boot of the lab: printed and counted.
#[cfg(all(test, feature = "lab-tests"))]
pub(crate) fn boots_in_two_tries(command: impl Fn() -> Command, limit: Duration) -> Result<(), String> {
    boots(command(), limit).or_else(|reason| {
        crate::retries::note("a trial", &reason, "");
        boots(command(), limit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualization_is_a_whole_word_among_the_flags() {
        assert!(has_virtualization("model name\t: x\nflags\t\t: fpu svm lm\n"));
        assert!(has_virtualization("flags : vmx"));
        assert!(!has_virtualization("model name\t: vmx svm\nflags\t\t: fpu vmx_x svmx\nvmx flags : vnmi\n"));
    }

    #[cfg(feature = "lab-tests")]
    #[test]
    fn the_trial_boots_and_finds_nested_kvm() {
        let image = crate::Image::ensure(crate::Progress::Show).unwrap();
        let initramfs = tempfile::NamedTempFile::new().unwrap();
        let content = crate::initramfs::server(&image, &crate::Binaries::build().unwrap()).unwrap();
        fs::write(initramfs.path(), content).unwrap();
        let kernel = image.vmlinux(image.server_kernel());
        // TCG stands in for a KVM that works; it emulates svm as well.
        let trial = || qemu::trial(Accel::Tcg, &image.tree(), &kernel, initramfs.path());
        boots_in_two_tries(trial, Duration::from_secs(120)).unwrap();
    }

    #[test]
    fn a_trial_needs_the_marker_in_time() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let limit = Duration::from_secs(20);
        assert_eq!(boots(shell("echo vnuma-trial-nested-kvm"), limit), Ok(()));
        assert!(boots(shell("echo vnuma-trial-no-nested-kvm"), limit).is_err());
        let hang = boots(shell("sleep 1000"), Duration::from_millis(200)).unwrap_err();
        assert!(hang.starts_with("no end"), "{hang}");
    }
}
