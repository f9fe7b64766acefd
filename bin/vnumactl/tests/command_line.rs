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
