//! A placement as `vnumactl place` prints it for QEMU: lines of options, and a script in comments that pins the threads of the
//! QEMU whose PID is its argument.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What is in the file.
#[derive(Debug, PartialEq, Eq)]
pub struct Placement {
    /// Options of QEMU, a group for each line.
    pub options: Vec<Vec<String>>,
    script: String,
}

/// Reads the placement of a VM.
pub fn read(path: &Path, name: &str) -> Result<Placement> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let placement = parse(&text);
    let words = placement.options.concat();
    let named = words.windows(2).find(|pair| pair[0] == "-name").map(|pair| pair[1].as_str());
    let found = named.and_then(|value| value.split(',').next()).unwrap_or_default();
    ensure!(found == name, "{}: -name: \"{found}\", expected \"{name}\"", path.display());
    Ok(placement)
}

fn parse(text: &str) -> Placement {
    let (mut options, mut script) = (Vec::new(), String::new());
    for line in text.lines() {
        match line.strip_prefix('#') {
            Some(comment) => script.extend([comment.strip_prefix(' ').unwrap_or(comment), "\n"]),
            None => options.push(line.split_ascii_whitespace().map(str::to_owned).collect()),
        }
    }
    options.retain(|group: &Vec<String>| !group.is_empty());
    Placement { options, script }
}

impl Placement {
    /// Pins the threads of its QEMU.
    pub fn pin(&self, pid: i32) -> Result<()> {
        let mut shell = Command::new("sh")
            .args(["-s", &pid.to_string()])
            .stdin(Stdio::piped())
            .spawn()
            .context("sh -s")?;
        let written =
            shell.stdin.take().context("sh -s: no standard input")?.write_all(self.script.as_bytes());
        let status = shell.wait().context("sh -s")?;
        ensure!(status.success(), "the script that pins threads: {status}");
        written.context("sh -s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "-name a,debug-threads=on\n-m 1G  -smp 2\n\n# pid=$1\n#\n#   taskset $pid\n";

    #[test]
    fn comments_are_the_script() {
        let Placement { options, script } = parse(TEXT);
        assert_eq!(options.concat().join(" "), "-name a,debug-threads=on -m 1G -smp 2");
        assert_eq!((options.len(), script.as_str()), (2, "pid=$1\n\n  taskset $pid\n"));
    }

    #[test]
    fn a_placement_of_another_vm_is_refused() {
        let path = std::env::temp_dir().join(format!("lab-vm-placement-{}", std::process::id()));
        fs::write(&path, TEXT).unwrap();
        let (own, other) = (read(&path, "a"), read(&path, "b"));
        fs::remove_file(&path).unwrap();
        assert!(own.is_ok());
        assert!(other.unwrap_err().to_string().ends_with("-name: \"a\", expected \"b\""));
    }

    #[test]
    fn a_script_that_fails_is_an_error() {
        let pin = |script: &str| Placement { options: Vec::new(), script: script.to_owned() }.pin(7);
        assert!(pin("test \"$1\" = 7\n").is_ok());
        assert!(pin("exit 3\n").unwrap_err().to_string().contains("exit status: 3"));
    }
}
