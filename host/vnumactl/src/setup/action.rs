//! Something that is done to a host.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

/// Paths are absolute; they are taken below a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A value for the kernel, until the next boot.
    Set {
        /// File below `/proc/sys` or `/sys`.
        path: String,
        /// What is written.
        value: String,
    },
    /// A file that has one line, so that it is so after the next boot, too.
    Keep {
        /// File below `/etc`.
        path: String,
        /// Its line.
        line: String,
    },
    /// A line at the end of a file that may have others.
    Append {
        /// File below `/etc`.
        path: String,
        /// The line.
        line: String,
    },
    /// A directory that everybody may enter.
    MakeDirectory(String),
    /// A program.
    Run(Vec<String>),
}

/// What a shell takes as one word.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set { path, value } => write!(f, "echo {} > {}", quoted(value), quoted(path)),
            Self::Keep { path, line } => write!(f, "echo {} > {}", quoted(line), quoted(path)),
            Self::Append { path, line } => write!(f, "echo {} >> {}", quoted(line), quoted(path)),
            Self::MakeDirectory(path) => write!(f, "install -d -m 755 {}", quoted(path)),
            Self::Run(words) => {
                f.write_str(&words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "))
            }
        }
    }
}

impl Action {
    /// Does it.
    pub fn carry_out(&self, root: &Path, run: &dyn Fn(&[&str]) -> io::Result<String>) -> io::Result<()> {
        let below = |path: &str| root.join(path.trim_start_matches('/'));
        match self {
            Self::Set { path, value } => fs::write(below(path), value),
            Self::Keep { path, line } => {
                let path = below(path);
                path.parent().map_or(Ok(()), fs::create_dir_all)?;
                // A reader finds the old one, or all of the new one.
                let new = path.with_extension("vnuma-new");
                fs::write(&new, format!("{line}\n"))?;
                fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
                fs::rename(&new, &path)
            }
            Self::Append { path, line } => {
                let path = below(path);
                path.parent().map_or(Ok(()), fs::create_dir_all)?;
                let mut file = File::options().append(true).create(true).open(path)?;
                file.write_all(format!("{line}\n").as_bytes())
            }
            Self::MakeDirectory(path) => {
                let path = below(path);
                fs::DirBuilder::new().recursive(true).mode(0o755).create(&path)?;
                // Whatever the umask is.
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            }
            Self::Run(words) => run(&words.iter().map(String::as_str).collect::<Vec<_>>()).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_would_do_the_same() {
        let root = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(root.path().join("proc/sys/kernel")).expect("created");
        fs::create_dir_all(root.path().join("etc")).expect("created");
        fs::write(root.path().join("etc/more"), "first\n").expect("written");
        let actions = [
            Action::Set { path: "/proc/sys/kernel/numa_balancing".into(), value: "0".into() },
            Action::Keep {
                path: "/etc/sysctl.d/60-vnuma.conf".into(),
                line: "kernel.numa_balancing = 0".into(),
            },
            Action::Append { path: "/etc/more".into(), line: "second line".into() },
            Action::MakeDirectory("/run/vnuma/qmp".into()),
        ];
        let nothing = |_: &[&str]| -> io::Result<String> { panic!("no program") };
        let done = || {
            let mode = |path: &str| {
                fs::metadata(root.path().join(path)).expect("there").permissions().mode() & 0o7777
            };
            let read = |path: &str| fs::read_to_string(root.path().join(path)).expect("there");
            (
                read("proc/sys/kernel/numa_balancing").trim().to_owned(),
                read("etc/sysctl.d/60-vnuma.conf"),
                read("etc/more"),
                mode("run/vnuma/qmp"),
            )
        };
        for action in &actions {
            action.carry_out(root.path(), &nothing).expect("done");
        }
        let by_us = done();
        fs::remove_dir_all(root.path().join("run")).expect("removed");
        fs::write(root.path().join("etc/more"), "first\n").expect("written");
        for action in &actions {
            let line = action.to_string().replace(" /", &format!(" {}/", root.path().display()));
            let status = std::process::Command::new("sh").args(["-ec", &line]).status().expect("sh");
            assert!(status.success(), "{line}");
        }
        assert_eq!(done(), by_us);
        assert_eq!(
            by_us,
            ("0".into(), "kernel.numa_balancing = 0\n".into(), "first\nsecond line\n".into(), 0o755)
        );
    }

    #[test]
    fn what_fails_is_an_error() {
        let root = tempfile::tempdir().expect("a directory");
        let missing = Action::Set { path: "/sys/no/such/file".into(), value: "1".into() };
        let refuse = |words: &[&str]| -> io::Result<String> { Err(io::Error::other(words.join(" "))) };
        assert!(missing.carry_out(root.path(), &refuse).is_err());
        let run = Action::Run(vec!["modprobe".into(), "kvm it's".into()]);
        assert_eq!(run.to_string(), r"modprobe 'kvm it'\''s'");
        let error = run.carry_out(root.path(), &refuse).expect_err("refused").to_string();
        assert_eq!(error, "modprobe kvm it's");
    }
}
