//! Live migration of a VM by its QEMU, and the mark of a VM that is to be attached as soon as it runs.
//!
//! QEMU carries commands out in their order. So when `migrate` was not answered in time, the answer to `query-migrate` shows what
//! has become of it.

use crate::{
    VmError,
    check::value,
    client::Client,
    commands::{
        ChardevAdd, ChardevRemove, Migrate, MigrateCancel, MigrateSetCapabilities, MigrateStartPostcopy,
        MigrationInfo, QomList, QueryMigrate, QueryStatus,
    },
    error::MIGRATE,
};
use vnuma_model::{Destinations, MigrationProgress, MigrationStatus};
use vnuma_process::text::sanitize_short;

/// Id of a character device that does nothing. A QEMU that has it is attached as soon as its guest runs. It goes with QEMU's process,
/// and is not migrated.
pub(crate) const MARK: &str = "vnuma-attach";
/// Where QEMU lists its character devices.
const CHARDEVS: &str = "/chardevs";
/// Others (`exec:`, `fd:`) make QEMU run a program, or need a descriptor.
pub(crate) const DESTINATIONS: Destinations =
    Destinations { schemes: &["tcp:", "unix:", "vsock:"], programs: &[] };

/// The command by which an operator has QEMU go on after the network broke in post-copy.
pub const GO_ON: &str = "migrate-recover";

/// Begins a migration. Without an answer to that it is asked what has become of it.
pub(crate) fn begin(client: &mut Client, destination: &str, post_copy: bool) -> Result<(), VmError> {
    // With a return path the source knows whether the destination has all of it.
    let capabilities = MigrateSetCapabilities::of(&[("return-path", true), ("postcopy-ram", post_copy)]);
    loop {
        match client.execute(&capabilities) {
            // A second order does no harm.
            Err(VmError::Timeout { .. }) if client.has_time() => {}
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    let unanswered = match client.execute(&Migrate { uri: destination }) {
        Err(error @ VmError::Timeout { .. }) => error,
        outcome => return outcome.map(drop),
    };
    let id = client.last_id();
    loop {
        match client.execute(&QueryMigrate {}) {
            Err(VmError::Timeout { .. }) if client.has_time() => {}
            Err(VmError::Timeout { .. }) => return Err(unanswered),
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    match client.take_late_refusal(id) {
        Some(reason) => {
            Err(VmError::Refused { vm: client.vm().to_owned(), command: MIGRATE.to_owned(), reason })
        }
        None => Ok(()),
    }
}

/// How far it is.
pub(crate) fn progress(client: &mut Client) -> Result<MigrationProgress, VmError> {
    let info = client.execute(&QueryMigrate {})?;
    read(info).map_err(|(field, found, reason)| value(client, "query-migrate", field, found, reason))
}

/// What is wrong: the field, what it is, and why it cannot be.
type Wrong = (&'static str, String, &'static str);

fn read(info: MigrationInfo) -> Result<MigrationProgress, Wrong> {
    let status = match info.status.as_deref() {
        None | Some("none") => MigrationStatus::None,
        Some("setup" | "wait-unplug") => MigrationStatus::Setup,
        Some("active" | "pre-switchover" | "device") => MigrationStatus::Active,
        Some("postcopy-active" | "postcopy-device") => MigrationStatus::PostCopy,
        Some("postcopy-paused" | "postcopy-recover" | "postcopy-recover-setup") => {
            MigrationStatus::PostCopyPaused
        }
        Some("cancelling") => MigrationStatus::Cancelling,
        Some("cancelled") => MigrationStatus::Cancelled,
        Some("completed") => MigrationStatus::Completed,
        Some("failed" | "failing") => MigrationStatus::Failed,
        Some(other) => return Err(("status", other.to_owned(), "not a state of a migration")),
    };
    let size = |field: &'static str, found: i64| {
        u64::try_from(found).map_err(|_| (field, found.to_string(), "it is negative"))
    };
    let ram = info.ram.unwrap_or_default();
    Ok(MigrationProgress {
        status,
        sent_bytes: size("ram.transferred", ram.transferred)?,
        left_bytes: size("ram.remaining", ram.remaining)?,
        total_bytes: size("ram.total", ram.total)?,
        passes: size("ram.dirty-sync-count", ram.dirty_sync_count)?,
        downtime_ms: info.downtime.map(|found| size("downtime", found)).transpose()?,
        problem: info.error_desc.map(|text| sanitize_short(&text)),
    })
}

/// Has the migration given up. QEMU says that it is done, also if there is none.
pub(crate) fn cancel(client: &mut Client) -> Result<(), VmError> {
    client.execute(&MigrateCancel {}).map(drop)
}

/// Has the guest go on at the destination now, and its memory follow.
pub(crate) fn switch(client: &mut Client) -> Result<(), VmError> {
    client.execute(&MigrateStartPostcopy {}).map(drop)
}

/// Is it marked to be attached?
pub(crate) fn is_marked(client: &mut Client) -> Result<bool, VmError> {
    let chardevs = match client.execute(&QomList { path: CHARDEVS }) {
        // A QEMU that has never had one.
        Err(VmError::Refused { .. }) => return Ok(false),
        other => other?,
    };
    Ok(chardevs.iter().any(|child| child.name == MARK && child.kind == "child<chardev-null>"))
}

/// Marks it to be attached as soon as it runs, or takes the mark away.
pub(crate) fn mark(client: &mut Client, wanted: bool) -> Result<(), VmError> {
    let act = |client: &mut Client| match wanted {
        true => client.execute(&ChardevAdd::null(MARK)).map(drop),
        false => client.execute(&ChardevRemove { id: MARK }).map(drop),
    };
    loop {
        match act(client) {
            // A second order does no harm: it is refused.
            Err(VmError::Timeout { .. }) if client.has_time() => {}
            // It is so already.
            Err(VmError::Refused { .. }) if is_marked(client)? == wanted => break,
            Err(error) => return Err(error),
            Ok(()) => break,
        }
    }
    if wanted && client.execute(&QueryStatus {})?.status == "inmigrate" {
        // Both sides have to allow it. A host that cannot do it refuses, and all but post-copy works all the same.
        match client.execute(&MigrateSetCapabilities::of(&[("postcopy-ram", true)])) {
            Ok(_) => {}
            Err(VmError::Refused { vm, reason, .. }) => {
                tracing::debug!(vm, reason, "a migration with post-copy cannot come in");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn info(value: Value) -> Result<MigrationProgress, Wrong> {
        read(serde_json::from_value(value).expect("an answer"))
    }

    #[test]
    fn what_qemu_says_is_understood() {
        let ram = json!({"transferred": 7, "remaining": 8, "total": 9, "dirty-sync-count": 2, "mbps": 1.5});
        let all = info(json!({"status": "active", "ram": ram, "downtime": 30, "new": []})).unwrap();
        let expected = MigrationProgress {
            status: MigrationStatus::Active,
            sent_bytes: 7,
            left_bytes: 8,
            total_bytes: 9,
            passes: 2,
            downtime_ms: Some(30),
            problem: None,
        };
        assert_eq!(all, expected);
        for (text, status) in [
            ("setup", MigrationStatus::Setup),
            ("pre-switchover", MigrationStatus::Active),
            ("postcopy-active", MigrationStatus::PostCopy),
            ("postcopy-paused", MigrationStatus::PostCopyPaused),
            ("cancelling", MigrationStatus::Cancelling),
            ("cancelled", MigrationStatus::Cancelled),
            ("completed", MigrationStatus::Completed),
            ("failed", MigrationStatus::Failed),
        ] {
            assert_eq!(info(json!({"status": text})).unwrap().status, status, "{text}");
        }
        assert_eq!(info(json!({})).unwrap().status, MigrationStatus::None);
        let failed = info(json!({"status": "failed", "error-desc": "no\u{1b}[2J route"})).unwrap();
        assert_eq!(failed.problem.as_deref(), Some("no\\u{1b}[2J route"));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_field() {
        for (answer, field) in [
            (json!({"status": "flying"}), "status"),
            (json!({"status": "active", "downtime": -1}), "downtime"),
            (json!({"ram": {"transferred": -1}}), "ram.transferred"),
            (json!({"ram": {"remaining": -2}}), "ram.remaining"),
            (json!({"ram": {"total": -3}}), "ram.total"),
            (json!({"ram": {"dirty-sync-count": -4}}), "ram.dirty-sync-count"),
        ] {
            assert_eq!(info(answer.clone()).unwrap_err().0, field, "{answer}");
        }
        for answer in [json!([]), json!({"status": 7}), json!({"ram": {"total": "x"}}), json!({"ram": 1.5})] {
            assert!(serde_json::from_value::<MigrationInfo>(answer.clone()).is_err(), "{answer}");
        }
    }

    #[test]
    fn only_destinations_that_run_nothing_are_taken() {
        for good in ["tcp:host:4444", "tcp:[::1]:4444", "unix:/run/in.sock", "vsock:3:4444"] {
            assert_eq!(DESTINATIONS.check(good), Ok(()), "{good}");
        }
        let long = format!("tcp:{}", "x".repeat(512));
        for bad in
            ["", "tcp:", "host:4444", "exec:rm -r /", "fd:x", "file:/x", "tcp:a b:1", "tcp:a\n:1", &long]
        {
            assert!(DESTINATIONS.check(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_destination_is_survived(text in "\\PC{0,40}") {
            let _ = DESTINATIONS.check(&text);
        }
    }
}
