//! What AppArmor lets another process do, as the kernel says.
//!
//! The kernel answers by a file: what is to be looked up is written to it, and its answer is read from it. Nothing is changed by that,
//! and no right is needed.

use crate::procfs;
use std::{
    fs::{self, OpenOptions},
    io::{Read, Write},
    path::Path,
};

/// A label has names of profiles, which are paths; one of libvirt's has some 50 bytes.
const LABEL_LIMIT: u64 = 4096;
/// The answer is four short lines.
const ANSWER_LIMIT: u64 = 256;
/// Where the kernel answers.
const ACCESS: &str = "sys/kernel/security/apparmor/.access";
/// Where a kernel says that profiles may be asked for connections to sockets: Linux 6.17, and Ubuntu's before it.
const V9_FEATURE: &str = "sys/kernel/security/apparmor/features/network_v9/af_unix";
const UBUNTU_FEATURE: &str = "sys/kernel/security/apparmor/features/network/af_unix";
/// In the kernel `AA_CLASS_FILE` and `AA_CLASS_NETV9`, and `AA_MAY_WRITE` and `AA_MAY_READ`.
const FILE: u8 = 2;
const NETWORK: u8 = 15;
const READ_AND_WRITE: u32 = 6;

/// The profile that confines a process. `None` if none does, or if that cannot be read.
pub fn profile(pid: i32) -> Option<String> {
    let read = |file| procfs::read_process(pid, file, LABEL_LIMIT).ok();
    let label = read("attr/apparmor/current").or_else(|| read("attr/current"))?;
    confining(&label).map(str::to_owned)
}

/// The name in a label that confines: `NAME (enforce)`. One that only complains does not.
pub fn confining(label: &str) -> Option<&str> {
    let (name, mode) = label.trim_end_matches(['\n', '\0']).strip_suffix(')')?.rsplit_once(" (")?;
    matches!(mode, "enforce" | "kill").then_some(name).filter(|name| !name.is_empty())
}

/// Does this kernel ask profiles for connections to sockets that have a name, if they were made for that?
pub fn kernel_asks(root: &Path) -> bool {
    [V9_FEATURE, UBUNTU_FEATURE].into_iter().any(|feature| says_yes(root, feature))
}

fn says_yes(root: &Path, feature: &str) -> bool {
    fs::read_to_string(root.join(feature)).is_ok_and(|value| value.trim() == "yes")
}

/// May a process with this profile connect to a socket of this path? `None` if the kernel does not say. `root` is where the kernel's files
/// are.
pub fn may_connect(root: &Path, profile: &str, path: &str) -> Option<bool> {
    if !kernel_asks(root) {
        return Some(true);
    }
    // Of a profile that was not made for that, everything is allowed in this class.
    if !says_yes(root, UBUNTU_FEATURE) && ask(root, profile, &[NETWORK])? & READ_AND_WRITE == READ_AND_WRITE {
        return Some(true);
    }
    let file = [&[FILE], path.as_bytes()].concat();
    Some(ask(root, profile, &file)? & READ_AND_WRITE == READ_AND_WRITE)
}

/// What the kernel lets a process with this profile do: a class and what is looked up in it.
fn ask(root: &Path, profile: &str, what: &[u8]) -> Option<u32> {
    if profile.contains('\0') || what.contains(&0) {
        return None;
    }
    let mut file = OpenOptions::new().read(true).write(true).open(root.join(ACCESS)).ok()?;
    let question = [b"label\0", profile.as_bytes(), b"\0", what].concat();
    // Of one call: the kernel takes the first one for all of it.
    (file.write(&question).ok()? == question.len()).then_some(())?;
    let mut answer = String::new();
    file.take(ANSWER_LIMIT).read_to_string(&mut answer).ok()?;
    allowed(&answer)
}

/// What is allowed and not denied, by the kernel's answer.
fn allowed(answer: &str) -> Option<u32> {
    let value = |key: &str| {
        let line = answer.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" 0x"))?;
        u32::from_str_radix(line.trim(), 16).ok()
    };
    Some(value("allow")? & !value("deny")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_names_the_profile_that_confines() {
        let name = "libvirt-0f3c8a4e-1f2b-4c53-9d0e-1a2b3c4d5e6f";
        assert_eq!(confining(&format!("{name} (enforce)\n")), Some(name));
        assert_eq!(confining("/usr/bin/a (b) (kill)"), Some("/usr/bin/a (b)"));
        for none in [
            "unconfined\n",
            "docker (unconfined)\n",
            "libvirtd (complain)\n",
            " (enforce)",
            "(enforce)",
            "",
            "\0",
        ] {
            assert_eq!(confining(none), None, "{none:?}");
        }
    }

    #[test]
    fn what_is_denied_is_not_allowed() {
        let answer = |allow, deny| {
            format!("allow 0x{allow:08x}\ndeny 0x{deny:08x}\naudit 0x00000000\nquiet 0x00000000\n")
        };
        assert_eq!(allowed(&answer(6, 0)), Some(6));
        assert_eq!(allowed(&answer(0xffff, 2)), Some(0xfffd));
        for bad in [
            "",
            "allow 0x6\n",
            "allow 6\ndeny 0\n",
            "allow 0xzz\ndeny 0x0\n",
            "allow 0x1ffffffff\ndeny 0x0\n",
        ] {
            assert_eq!(allowed(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_kernel_that_does_not_ask_lets_everybody_connect() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(may_connect(root.path(), "a", "/b"), Some(true));
        assert_eq!(profile(-1), None);
        let feature = root.path().join(V9_FEATURE);
        fs::create_dir_all(feature.parent().expect("a folder")).expect("created");
        fs::write(feature, "yes\n").expect("written");
        assert!(kernel_asks(root.path()));
        assert_eq!(
            may_connect(root.path(), "a", "/b"),
            None,
            "it asks, and does not say what it lets through"
        );
        assert_eq!(ask(root.path(), "a\0", b"/b"), None);
    }
}
