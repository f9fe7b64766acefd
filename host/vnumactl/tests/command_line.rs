//! Nonsense on the command line: refused before anything is asked, with the argument and the value named.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    process::Command,
};

fn refused(arguments: &[&OsStr]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vnumactl")).args(arguments).output().expect("runs");
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    error
}

#[test]
fn what_makes_no_sense_is_named() {
    for (line, expected) in [
        ("sow web", "unrecognized subcommand 'sow'"),
        ("show", "<VM>"),
        ("show web db", "unexpected argument 'db'"),
        ("list --jsn", "unexpected argument '--jsn'"),
        ("move web --vcpu 1", "--node <H>"),
        (
            "move web --vcpu x --node 0",
            "invalid value 'x' for '--vcpu <N>': not a number from 0 to 4294967295",
        ),
        ("move web --vcpu -1 --node 0", "invalid value '-1' for '--vcpu <N>'"),
        ("move web --vcpu 4294967296 --node 0", "invalid value '4294967296' for '--vcpu <N>'"),
        ("move web --vcpu 0 --node 1.5", "invalid value '1.5' for '--node <H>'"),
        ("move web --vcpu 0 --vcpu 1 --node 0", "'--vcpu <N>' cannot be used multiple times"),
    ] {
        let words: Vec<&OsStr> = line.split(' ').map(OsStr::new).collect();
        let error = refused(&words);
        assert!(error.contains(expected), "{line}: {error:?} should say {expected:?}");
    }
}

#[test]
fn names_that_are_none_are_named() {
    let error = refused(&["show".as_ref(), "".as_ref()]);
    assert!(error.contains("'<VM>'") && error.contains("a VM has a name"), "{error}");
    let odd = OsString::from(OsStr::from_bytes(b"web\xff"));
    for words in [vec!["show".as_ref(), odd.as_os_str()], vec!["attach".as_ref(), odd.as_os_str()]] {
        let error = refused(&words);
        assert!(error.contains("'<VM>'") && error.contains(r#""web\xFF" is not UTF-8"#), "{error}");
    }
    let error =
        refused(&["move".as_ref(), "web".as_ref(), "--vcpu".as_ref(), &odd, "--node".as_ref(), "0".as_ref()]);
    assert!(error.contains("'--vcpu <N>': not a number"), "{error}");
}

/// Each shell loads its script, and completes a command by it. Skipped where a shell is missing.
#[test]
fn shells_load_their_completions() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_vnumactl")).parent().expect("a folder");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap_or_default());
    let scripts = [
        (
            "bash",
            "source FILE && COMP_WORDS=(vnumactl mig) COMP_CWORD=1 && _vnumactl vnumactl mig vnumactl && echo ${COMPREPLY[@]}",
        ),
        ("zsh", "autoload -U compinit && compinit -D && source FILE && whence -w _vnumactl && echo migrate"),
        ("fish", "source FILE; complete --do-complete 'vnumactl mig'"),
    ];
    for (shell, script) in scripts {
        if Command::new(shell).args(["-c", "exit"]).output().is_err() {
            println!("skipped: this needs {shell}");
            continue;
        }
        let output = Command::new("vnumactl").env("PATH", &path).args(["completion", shell]).output();
        let file = folder.path().join(shell);
        std::fs::write(&file, output.expect("it runs").stdout).expect("written");
        let script = script.replace("FILE", &file.display().to_string());
        let done = Command::new(shell).args(["-c", &script]).env("PATH", &path).output().expect("it runs");
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("migrate"), "{shell}: {said} {done:?}");
    }
}
