//! The errors in docs/vnumad.md are those that vnumad makes.

use std::{fs, path::Path, process::Command};
use vnuma_daemon::SocketError;
use vnuma_test_kit::{errors, host::write_host};

/// What vnumad says with this configuration, which it refuses.
fn error(directory: &Path, config: &str) -> String {
    let path = directory.join("vnumad.toml");
    fs::write(&path, config).expect("written");
    let mut vnumad = Command::new(env!("CARGO_BIN_EXE_vnumad"));
    let output = vnumad.arg("--config").arg(path).arg("--root").arg(directory).output().expect("runs");
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{error}");
    let last = error.lines().find_map(|line| line.strip_prefix("vnumad: "));
    last.unwrap_or_else(|| panic!("no error: {error}")).to_owned()
}

#[test]
fn the_manual_names_errors_by_their_text() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    write_host(path);
    let socket = path.join("vnumad.sock");
    fs::write(&socket, "").expect("written");
    let records = path.join("channels");
    let with = |lines: &str| {
        format!(
            "[observe]\nlocation = \"poll\"\n[publish]\nrecords = {records:?}\n[api]\nsocket = {socket:?}\n{lines}"
        )
    };
    let mut made = vec![error(path, "[publish]\ndwell = 5\n"), error(path, &with(""))];
    let owner = || " (process 7)".to_owned();
    made.push(SocketError::InUse { socket: socket.clone(), owner: owner() }.to_string());
    made.push(SocketError::RecordsInUse { directory: records.clone(), owner: owner() }.to_string());
    let foreign = std::io::Error::other("mode = 777");
    made.push(
        SocketError::System { path: records.clone(), act: "keeping records there", source: foreign }
            .to_string(),
    );
    fs::remove_file(&socket).expect("removed");
    made.push(error(path, &with("group = \"no-such-group\"\n")));
    let taken = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = taken.local_addr().expect("an address");
    made.push(error(path, &with(&format!("[metrics]\nlisten = \"{address}\"\n"))));
    fs::remove_dir_all(path.join("sys")).expect("removed");
    made.push(error(path, &with("")));
    errors::compare(include_str!("../../../docs/vnumad.md"), &made);
}

/// The options of a synopsis or of a list of them, each once.
fn options(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| c.is_whitespace() || "[]`,".contains(c));
    let mut options: Vec<_> = words.filter(|word| word.starts_with("--")).collect();
    options.sort_unstable();
    options.dedup();
    options
}

#[test]
fn the_manual_has_every_option() {
    let manual = include_str!("../../../docs/vnumad.md");
    let section = |heading: &str| {
        let rest =
            manual.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no {heading}")).1;
        rest.split("\n## ").next().unwrap_or_default()
    };
    let help = Command::new(env!("CARGO_BIN_EXE_vnumad")).arg("--help").output().expect("runs");
    let help = String::from_utf8(help.stdout).expect("UTF-8");
    let (_, list) = help.split_once("\nOptions:\n").expect("clap's list of options");
    let terms: Vec<_> = section("Options").lines().filter(|line| line.starts_with('`')).collect();
    let offered: Vec<_> = list.lines().filter(|line| line.trim_start().starts_with('-')).collect();
    assert_eq!(options(&terms.join("\n")), options(&offered.join("\n")));
    let mut synopsis = options(section("Synopsis"));
    synopsis.extend(["--help", "--version"]);
    synopsis.sort_unstable();
    assert_eq!(synopsis, options(&offered.join("\n")));
}
