//! Live migration of a domain to another host's libvirt.
//!
//! libvirt migrates within one call, which lasts until the domain is at its destination. That call has a thread of its own; how far it
//! is, and its end, are asked for from others. It is a migration from daemon to daemon (`VIR_MIGRATE_PEER2PEER`), which goes on when
//! the process that asked for it has ended.

use crate::{
    Domain, LibvirtError,
    api::{self, TypedParameter, migrate},
    domain::succeeded,
};
use std::{
    cell::OnceCell,
    ffi::{CString, c_uint},
    ptr,
    sync::mpsc::{Receiver, TryRecvError},
    time::Duration,
};
use vnuma_model::{MigrationProgress, MigrationStatus};

/// Most figures of a job that are read.
const MAX_FIGURES: usize = 256;

/// A migration that was begun.
#[derive(Debug)]
pub struct Migrating {
    outcome: Receiver<Result<(), LibvirtError>>,
    ended: OnceCell<Ended>,
}

/// What became of a migration.
#[derive(Debug)]
pub enum Ended {
    /// The domain is at its destination.
    There,
    /// It was cancelled.
    Cancelled,
    /// It failed.
    Failed(String),
}

impl Migrating {
    /// What became of it; `None` while it is under way.
    pub fn ended(&self) -> Option<&Ended> {
        let ended = match self.outcome.try_recv() {
            Err(TryRecvError::Empty) => return self.ended.get(),
            Err(TryRecvError::Disconnected) => {
                Ended::Failed("the thread of the call has panicked".to_owned())
            }
            Ok(Ok(())) => Ended::There,
            Ok(Err(LibvirtError::Refused { code: api::ERROR_ABORTED, .. })) => Ended::Cancelled,
            Ok(Err(error)) => Ended::Failed(error.to_string()),
        };
        Some(self.ended.get_or_init(|| ended))
    }
}

fn add(progress: &mut MigrationProgress, field: &str, value: u64) {
    // VIR_DOMAIN_JOB_MEMORY_* and VIR_DOMAIN_JOB_DOWNTIME
    match field {
        "memory_processed" => progress.sent_bytes = value,
        "memory_remaining" => progress.left_bytes = value,
        "memory_total" => progress.total_bytes = value,
        "memory_iteration" => progress.passes = value,
        "downtime" => progress.downtime_ms = Some(value),
        _ => {}
    }
}

impl Domain {
    /// Begins to migrate it to the libvirt of a URI. A domain that is defined here is defined there instead. It runs there by `xml`, if
    /// that is given, in which nothing may differ that its guest sees.
    pub fn migrate(
        &self,
        destination: &str,
        post_copy: bool,
        xml: Option<&str>,
    ) -> Result<Migrating, LibvirtError> {
        const CALL: &str = "virDomainMigrateToURI3";
        let text = |text: &str| CString::new(text).map_err(|_| self.bad_text(CALL));
        let (destination, xml) = (text(destination)?, xml.map(text).transpose()?);
        let outcome = self.call_long("libvirt-migrate", CALL, move |library, domain| {
            // SAFETY: the domain is held for the call.
            let persistent = unsafe { (library.api.is_persistent)(domain) } == 1;
            let mut flags = migrate::LIVE | migrate::PEER2PEER;
            if persistent {
                flags |= migrate::PERSIST_DEST | migrate::UNDEFINE_SOURCE;
            }
            if post_copy {
                flags |= migrate::POSTCOPY;
            }
            let parameter = xml.as_ref().map(|xml| TypedParameter::text(migrate::DEST_XML, xml));
            let (count, parameters) =
                (parameter.iter().len() as c_uint, parameter.as_slice().as_ptr().cast_mut());
            // SAFETY: the domain is held for the call, the URI ends with a zero, as does the text of the parameter, if there is one.
            // The library only reads parameters.
            succeeded(unsafe {
                (library.api.migrate)(domain, destination.as_ptr(), parameters, count, flags)
            })
        })?;
        Ok(Migrating { outcome, ended: OnceCell::new() })
    }

    /// How far what libvirt does to it now is. That is taken for a migration.
    pub fn progress(&self, limit: Duration) -> Result<MigrationProgress, LibvirtError> {
        self.call("virDomainGetJobStats", limit, |library, domain| {
            let (mut kind, mut count, mut parameters) = (0, 0, ptr::null_mut::<TypedParameter>());
            // SAFETY: the domain is held for the call, which writes an array of its own making, with its length.
            let result = unsafe {
                (library.api.job_stats)(domain, &raw mut kind, &raw mut parameters, &raw mut count, 0)
            };
            if result < 0 {
                return None;
            }
            // VIR_DOMAIN_JOB_BOUNDED and VIR_DOMAIN_JOB_UNBOUNDED
            let status = if matches!(kind, 1 | 2) { MigrationStatus::Active } else { MigrationStatus::None };
            let mut progress = MigrationProgress { status, ..MigrationProgress::default() };
            for at in 0..usize::try_from(count).unwrap_or(0).min(MAX_FIGURES) {
                // SAFETY: the array has `count` parameters.
                let parameter = unsafe { &*parameters.add(at) };
                if parameter.kind == api::TYPE_ULLONG {
                    let field = parameter.field.map(|byte| byte as u8);
                    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
                    add(&mut progress, &String::from_utf8_lossy(&field[..end]), parameter.value);
                }
            }
            // SAFETY: the array is the caller's to free, once.
            unsafe { (library.api.free_parameters)(parameters, count) };
            Some(progress)
        })
    }

    /// Has what libvirt does to it given up.
    pub fn abort_job(&self, limit: Duration) -> Result<(), LibvirtError> {
        self.call("virDomainAbortJob", limit, |library, domain| {
            // SAFETY: the domain is held for the call.
            succeeded(unsafe { (library.api.abort_job)(domain) })
        })
    }

    /// Has the guest of a domain that migrates go on at the destination.
    pub fn start_post_copy(&self, limit: Duration) -> Result<(), LibvirtError> {
        self.call("virDomainMigrateStartPostCopy", limit, |library, domain| {
            // SAFETY: the domain is held for the call.
            succeeded(unsafe { (library.api.start_post_copy)(domain, 0) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{self, Sender};

    type Outcome = Result<(), LibvirtError>;

    fn migrating(outcome: Option<Outcome>) -> (Sender<Outcome>, Migrating) {
        let (sender, received) = mpsc::channel();
        outcome.into_iter().for_each(|outcome| sender.send(outcome).unwrap());
        (sender, Migrating { outcome: received, ended: OnceCell::new() })
    }

    #[test]
    fn what_became_of_it_is_told_from_libvirts_error() {
        let refused = |code| {
            let (uri, call, reason) = ("qemu:///system".to_owned(), "x", "y".to_owned());
            Some(Err(LibvirtError::Refused { uri, call, reason, code }))
        };
        let (sender, under_way) = migrating(None);
        assert!(under_way.ended().is_none());
        drop(sender);
        assert!(matches!(under_way.ended(), Some(Ended::Failed(why)) if why.contains("panicked")));
        assert!(matches!(migrating(Some(Ok(()))).1.ended(), Some(Ended::There)));
        assert!(matches!(migrating(refused(api::ERROR_ABORTED)).1.ended(), Some(Ended::Cancelled)));
        let (sender, failed) = migrating(refused(1));
        let is_known = || matches!(failed.ended(), Some(Ended::Failed(why)) if why.contains("refused"));
        assert!(is_known() && is_known(), "for good");
        drop(sender);
        assert!(is_known());
    }

    #[test]
    fn figures_are_known_by_their_names() {
        let mut progress = MigrationProgress::default();
        let figures = [
            ("memory_processed", 1),
            ("memory_remaining", 2),
            ("memory_total", 3),
            ("memory_iteration", 4),
            ("downtime", 5),
            ("disk_total", 6),
        ];
        figures.iter().for_each(|(field, value)| add(&mut progress, field, *value));
        let expected = MigrationProgress {
            sent_bytes: 1,
            left_bytes: 2,
            total_bytes: 3,
            passes: 4,
            downtime_ms: Some(5),
            ..MigrationProgress::default()
        };
        assert_eq!(progress, expected);
    }

    #[test]
    fn a_parameter_has_the_size_of_libvirts() {
        // 80 bytes of name, a number, and a union that is aligned to eight.
        assert_eq!(size_of::<TypedParameter>(), 96);
        assert_eq!(std::mem::offset_of!(TypedParameter, value), 88);
        let text = c"<domain/>";
        let parameter = TypedParameter::text(migrate::DEST_XML, text);
        // SAFETY: a name ends with a zero, and is as long as the structure at most.
        let name = unsafe { std::ffi::CStr::from_ptr(parameter.field.as_ptr()) };
        assert_eq!((name, parameter.kind, parameter.value), (c"destination_xml", 7, text.as_ptr() as u64));
    }
}
