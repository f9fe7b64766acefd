//! A migration of a domain to another host.

use vnuma_libvirt::{Ended, Migrating};
use vnuma_model::MigrationProgress;

/// A migration that was begun.
#[derive(Debug)]
pub(super) struct Departure {
    pub(super) migrating: Migrating,
    /// As libvirt said last. After the end it says nothing.
    pub(super) progress: MigrationProgress,
    pub(super) cancelled: bool,
}

impl Departure {
    /// libvirt has not said what became of it.
    pub(super) fn is_under_way(&self) -> bool {
        self.migrating.ended().is_none()
    }

    /// The domain may be elsewhere, or is: libvirt has not said what became of it, or that it has succeeded.
    pub(super) fn may_have_left(&self) -> bool {
        matches!(self.migrating.ended(), None | Some(Ended::There))
    }
}
