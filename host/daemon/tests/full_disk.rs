//! A file system of records and sockets that is full, as `/run` may be.

mod common;

use common::{Daemon, http::ask, vms::Process, vms::describe, wait_for};
use serde_json::Value;
use std::{fs, io::Write, path::Path, process::Command};

/// A small file system.
struct Small(tempfile::TempDir);

impl Small {
    /// `None`, with the reason, where none can be mounted.
    fn mount() -> Option<Self> {
        let small = Self(tempfile::tempdir().expect("a directory"));
        let options = ["-t", "tmpfs", "-o", "size=256k,mode=755", "vnuma-test"];
        let mounted = Command::new("mount").args(options).arg(small.path()).output();
        match mounted {
            Ok(mounted) if mounted.status.success() => Some(small),
            Ok(mounted) => {
                eprintln!("skipped: no tmpfs can be mounted: {}", String::from_utf8_lossy(&mounted.stderr));
                None
            }
            Err(error) => {
                eprintln!("skipped: no tmpfs can be mounted: {error}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves no room.
    fn fill(&self) {
        let mut file = fs::File::create(self.path().join("filler")).expect("created");
        while file.write_all(&[1; 4096]).is_ok() {}
        assert!(fs::write(self.path().join("more"), "x").is_err(), "it is full");
        fs::remove_file(self.path().join("more")).expect("removed");
    }

    fn free(&self) {
        fs::remove_file(self.path().join("filler")).expect("removed");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // It may not be mounted.
        let _ = Command::new("umount").arg(self.path()).output();
    }
}

fn add(daemon: &Daemon, name: &str, pid: i32) {
    daemon.add(name, describe(name, pid, &[0, 1], &[pid]));
    wait_for("the VM", || show(daemon, name)["described"] == true);
}

fn show(daemon: &Daemon, name: &str) -> Value {
    ask(&daemon.socket, "GET", &format!("/v1/vms/{name}"), "").1
}

fn attach(daemon: &Daemon, name: &str) -> (u16, String) {
    let (status, answer) = ask(&daemon.socket, "POST", &format!("/v1/vms/{name}/attach"), "");
    (status, answer["message"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn a_full_file_system_of_records_stops_no_vnumad_and_loses_no_channel() {
    let Some(small) = Small::mount() else { return };
    let mut daemon = Daemon::start_with(None, |config| {
        config.records = small.path().join("channels");
        config.socket = small.path().join("api.sock");
    });
    let (own, other) = (std::process::id().cast_signed(), Process::start());
    add(&daemon, "served", own);
    assert_eq!(attach(&daemon, "served").0, 200);
    // From whose process the next vnumad takes it over.
    let _guest = daemon.guest("served");
    add(&daemon, "new", other.pid());
    small.fill();
    let (status, message) = attach(&daemon, "new");
    assert!(status >= 500 && message.contains("No space left on device"), "{status}: {message}");
    assert_eq!((show(&daemon, "served")["channel"].as_str(), daemon.records()), (Some("attached"), 1));
    let left = |name: &str| {
        fs::read_dir(small.path().join("channels"))
            .expect("there")
            .flatten()
            .any(|entry| entry.path().ends_with(name))
    };
    assert!(!left(&format!("{}.new", other.pid())), "half a record takes room");
    for full in [true, false] {
        daemon.stop();
        if full {
            // Others take what a vnumad that starts gives back for a moment.
            for lock in ["api.sock.lock", "channels.lock"] {
                fs::File::create(small.path().join(lock)).expect("there");
            }
            small.fill();
        } else {
            small.free();
        }
        daemon.restart();
        wait_for("its channel to be taken over", || show(&daemon, "served")["channel"] == "attached");
        wait_for("the other VM", || show(&daemon, "new")["described"] == true);
        assert_eq!(attach(&daemon, "new").0 == 200, !full);
    }
    assert_eq!(daemon.records(), 2);
}
