//! Live migration of a domain by libvirt, the mark of one that is to be attached, and pins that came from another host.
//!
//! The mark is in the domain's metadata, which goes with it. vnumad's own pins are not wanted at the destination, as they name CPUs of
//! this host: the domain gets other XML there, and keeps them here if it stays. A domain that was migrated by anybody else brings
//! them along, and they are taken back where it arrives.

use super::{
    connection::{LibvirtConnection, SHORT, XML},
    departure::Departure,
};
use crate::{Migrates, VmConnection, VmError, VmEvent};
use std::time::{Duration, Instant};
use vnuma_libvirt::{Ended, MARK_ELEMENT, MARK_NAMESPACE, PREFIX, xml_for_elsewhere};
use vnuma_model::{Destinations, MigrationProgress, MigrationStatus};

/// libvirt says that a domain has left after the end of its process: of a migration that was begun here, and of any.
const OUTCOME_LIMIT: Duration = Duration::from_secs(30);
const LEFT_LIMIT: Duration = Duration::from_secs(3);
/// Between two looks for it.
const PAUSE: Duration = Duration::from_millis(50);

/// `virDomainState`: paused; `virDomainPausedReason`: the guest runs at the destination, and its memory follows.
const POST_COPY: (i32, &[i32]) = (3, &[12, 13]);

/// libvirts that are elsewhere. Others run a program that the URI names (`qemu+ext:`), or are not QEMU's; so do these parameters, here
/// or there.
pub(super) const DESTINATIONS: Destinations = Destinations {
    schemes: &["qemu+tls://", "qemu+ssh://", "qemu+libssh2://", "qemu+tcp://", "qemu+unix://"],
    programs: &["command", "netcat"],
};

impl LibvirtConnection {
    /// What the domain is to run by at its destination, if not by what it runs by here.
    fn xml_for_elsewhere(&self) -> Result<Option<String>, VmError> {
        if self.xml()?.own_pins.is_empty() {
            return Ok(None);
        }
        let text = self.domain.migratable_xml(XML).map_err(|cause| self.failed(cause))?;
        let edited = xml_for_elsewhere(&self.domain_name, &text);
        edited.map_err(|cause| VmError::Libvirt { vm: self.name.clone(), reason: cause.to_string() })
    }
}

impl Migrates for LibvirtConnection {
    fn is_marked(&mut self) -> Result<bool, VmError> {
        Ok(self.xml()?.marked)
    }

    fn mark(&mut self, marked: bool) -> Result<(), VmError> {
        if self.xml()?.marked == marked {
            return Ok(());
        }
        let element = marked.then_some(MARK_ELEMENT);
        let set = self.domain.set_metadata(element, PREFIX, MARK_NAMESPACE, XML);
        set.map_err(|cause| self.failed(cause))
    }

    fn migrate(&mut self, destination: &str, post_copy: bool) -> Result<(), VmError> {
        if self.departure.as_ref().is_some_and(Departure::is_under_way) {
            let reason = "a migration of it is under way".to_owned();
            return Err(VmError::Libvirt { vm: self.name.clone(), reason });
        }
        let xml = self.xml_for_elsewhere()?;
        let migrating = self.domain.migrate(destination, post_copy, xml.as_deref());
        let migrating = migrating.map_err(|cause| self.failed(cause))?;
        self.departure =
            Some(Departure { migrating, progress: MigrationProgress::default(), cancelled: false });
        Ok(())
    }

    fn progress(&mut self) -> Result<MigrationProgress, VmError> {
        let now = match self.departure.as_ref().map(|departure| departure.migrating.ended()) {
            // libvirt may say nothing of the domain any more.
            Some(Some(_)) => MigrationProgress::default(),
            _ => self.domain.progress(XML).map_err(|cause| self.failed(cause))?,
        };
        // Else begun by a vnumad before this one, or by somebody else.
        let Some(departure) = &mut self.departure else { return Ok(now) };
        if now.status == MigrationStatus::Active {
            departure.progress = now;
        }
        let (progress, cancelled) = (departure.progress.clone(), departure.cancelled);
        let (status, problem) = match departure.migrating.ended() {
            None => {
                let state = self.domain.state(SHORT).map_err(|cause| self.failed(cause))?;
                let switched = state.state == POST_COPY.0 && POST_COPY.1.contains(&state.reason);
                let status = match (switched, cancelled) {
                    (true, _) => MigrationStatus::PostCopy,
                    (false, true) => MigrationStatus::Cancelling,
                    (false, false) => MigrationStatus::Active,
                };
                (status, None)
            }
            Some(Ended::There) => (MigrationStatus::Completed, None),
            Some(Ended::Cancelled) => (MigrationStatus::Cancelled, None),
            // What was cancelled early fails in other words.
            Some(Ended::Failed(_)) if cancelled => (MigrationStatus::Cancelled, None),
            Some(Ended::Failed(error)) => (MigrationStatus::Failed, Some(error.clone())),
        };
        Ok(MigrationProgress { status, problem, ..progress })
    }

    fn cancel(&mut self) -> Result<(), VmError> {
        if self.departure.as_ref().is_some_and(|departure| !departure.is_under_way()) {
            return Ok(());
        }
        self.domain.abort_job(XML).map_err(|cause| self.failed(cause))?;
        if let Some(departure) = &mut self.departure {
            departure.cancelled = true;
        }
        Ok(())
    }

    fn start_post_copy(&mut self) -> Result<(), VmError> {
        self.domain.start_post_copy(XML).map_err(|cause| self.failed(cause))
    }

    fn is_leaving(&self) -> bool {
        self.departure.as_ref().is_some_and(Departure::may_have_left)
    }

    fn has_left(&mut self) -> bool {
        let under_way = self.departure.as_ref().is_some_and(Departure::is_under_way);
        let until = Instant::now() + if under_way { OUTCOME_LIMIT } else { LEFT_LIMIT };
        loop {
            match self.departure.as_ref().map(|departure| departure.migrating.ended()) {
                Some(Some(Ended::There)) => return true,
                Some(Some(Ended::Cancelled | Ended::Failed(_))) if under_way => return false,
                _ => {}
            }
            // Of any other end libvirt says that as well.
            match self.poll_event(PAUSE) {
                Ok(Some(VmEvent::Left)) => return true,
                Ok(Some(VmEvent::Shutdown | VmEvent::Disconnected)) | Err(_) => return false,
                Ok(Some(_)) => {}
                Ok(None) if Instant::now() > until => return false,
                Ok(None) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_libvirts_that_run_nothing_are_taken() {
        for good in [
            "qemu+ssh://root@b/system",
            "qemu+tls://b/system",
            "qemu+unix:///system?socket=/run/other/libvirt-sock",
            "qemu+ssh://b/system?keyfile=/root/key&no_tty=1",
        ] {
            assert_eq!(DESTINATIONS.check(good), Ok(()), "{good}");
        }
        for bad in [
            "tcp:b:4444",
            "qemu:///system",
            "qemu+ext://b/system?command=/bin/sh",
            "qemu+ssh://b/system?command=/bin/sh",
            "qemu+ssh://b/system?no_tty=1&Command=/bin/sh",
            "qemu+ssh://b/system?no_tty=1;netcat=/bin/sh",
            "qemu+ssh://b/system?c%6fmmand=/bin/sh",
            "qemu+ssh://b/system ?x",
            "xen+ssh://b/",
            "qemu+ssh://",
        ] {
            assert!(DESTINATIONS.check(bad).is_err(), "{bad}");
        }
    }
}
