//! Whether the machine itself can take the place of the emulated server, and whether it shall.

use anyhow::{Result, bail};
use nix::unistd::Uid;
use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::path::Path;
use vnuma_scenario::home_nodes;

/// Where the demonstration is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// On the machine if it can and the user says so.
    Ask,
    /// On the machine.
    Here,
    /// On the emulated server.
    Lab,
}

/// Why this user cannot run it on the machine, by the files below `root`: it takes root, a KVM that works, and two nodes
/// with CPUs and memory.
pub fn unsuited(root: &Path, user: Uid) -> Option<String> {
    if !user.is_root() {
        return Some(format!("it needs root, and this is user {user}"));
    }
    let flags = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let mut flags = flags.lines().filter(|line| line.starts_with("flags")).flat_map(str::split_whitespace);
    // There are kinds of /dev/kvm without either that hang with a stock kernel.
    if !flags.any(|flag| flag == "vmx" || flag == "svm") {
        return Some("its CPU has neither vmx nor svm".to_owned());
    }
    if let Err(error) = File::options().read(true).write(true).open(root.join("dev/kvm")) {
        return Some(format!("/dev/kvm: {error}"));
    }
    match home_nodes(root) {
        Ok(nodes) if nodes.len() >= 2 => None,
        Ok(nodes) => Some(format!("only {} of its NUMA nodes has CPUs and memory", nodes.len())),
        Err(error) => Some(format!("{error:#}")),
    }
}

/// Whether it shall run on the machine. Asks only on a terminal, and only if the machine can.
pub fn decide(
    choice: Choice,
    unsuited: Option<String>,
    terminal: bool,
    input: &mut dyn BufRead,
    output: &mut dyn Write,
) -> Result<bool> {
    match (choice, unsuited) {
        (Choice::Lab, _) => return Ok(false),
        (Choice::Here, None) => return Ok(true),
        (Choice::Here, Some(why)) => bail!("--here: this machine cannot run the demonstration: {why}"),
        (Choice::Ask, None) if terminal => {}
        (Choice::Ask, _) => return Ok(false),
    }
    writeln!(
        output,
        "This machine has KVM and several NUMA nodes.\n\
         The demonstration can run on it: as root it starts two VMs and a vnumad of their own, moves the VMs' threads\n\
         between the nodes, and removes everything at the end. Nothing else is touched."
    )?;
    write!(output, "Run on this machine instead of the emulated server? [y/N] ")?;
    output.flush()?;
    let mut answer = String::new();
    input.read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these CPUs on its nodes, all of which have memory.
    fn machine(flags: &str, kvm: bool, cpus: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/cpuinfo", &format!("model name\t: svm vmx\nflags\t\t: {flags}\n"));
        if kvm {
            write("dev/kvm", "");
        }
        let all = format!("0-{}\n", cpus.len() - 1);
        write("sys/devices/system/node/online", &all);
        write("sys/devices/system/node/has_memory", &all);
        for (node, cpus) in cpus.iter().enumerate() {
            write(&format!("sys/devices/system/node/node{node}/cpulist"), &format!("{cpus}\n"));
        }
        root
    }

    #[test]
    fn it_takes_kvm_and_two_nodes() {
        let root = Uid::from_raw(0);
        let unsuited = |flags, kvm, cpus: &[&str]| unsuited(machine(flags, kvm, cpus).path(), root);
        assert_eq!(unsuited("fpu svm", true, &["0-1", "2-3"]), None);
        assert_eq!(unsuited("fpu vmx", true, &["0-1", "", "2-3"]), None);
        let lacking = [
            (unsuited("fpu", true, &["0", "1"]), "neither vmx nor svm"),
            (unsuited("svm", false, &["0", "1"]), "/dev/kvm"),
            (unsuited("svm", true, &["0-3"]), "only 1"),
            (unsuited("svm", true, &["0-3", ""]), "only 1"),
            (unsuited("svm", true, &["0-3", "x"]), "node1/cpulist"),
        ];
        for (why, part) in lacking {
            assert!(why.as_ref().is_some_and(|why| why.contains(part)), "{why:?}, expected {part}");
        }
    }

    #[test]
    fn it_takes_root() {
        let machine = machine("svm", true, &["0-1", "2-3"]);
        let why = unsuited(machine.path(), Uid::from_raw(1000));
        assert_eq!(why.as_deref(), Some("it needs root, and this is user 1000"));
    }

    fn decided(choice: Choice, suited: bool, terminal: bool, answer: &str) -> (Option<bool>, String) {
        let unsuited = (!suited).then(|| "of a reason".to_owned());
        let mut output = Vec::new();
        let decided = decide(choice, unsuited, terminal, &mut answer.as_bytes(), &mut output);
        (decided.ok(), String::from_utf8(output).unwrap())
    }

    #[test]
    fn only_a_yes_on_a_terminal_or_an_option_takes_the_machine() {
        for (answer, expected) in [("y\n", true), ("Yes\n", true), ("\n", false), ("n\n", false), ("", false)]
        {
            let (decided, output) = decided(Choice::Ask, true, true, answer);
            assert_eq!(decided, Some(expected), "{answer:?}");
            assert!(output.contains("two VMs") && output.ends_with("[y/N] "), "{output}");
        }
        let silent = [
            (Choice::Ask, true, false, Some(false)),
            (Choice::Ask, false, true, Some(false)),
            (Choice::Lab, true, true, Some(false)),
            (Choice::Here, true, true, Some(true)),
            (Choice::Here, true, false, Some(true)),
            (Choice::Here, false, true, None),
        ];
        for (choice, suited, terminal, expected) in silent {
            let seen = decided(choice, suited, terminal, "y\n");
            assert_eq!(seen, (expected, String::new()), "{choice:?} {suited} {terminal}");
        }
    }
}
