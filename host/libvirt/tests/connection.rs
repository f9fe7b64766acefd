//! Connections to the driver for tests that is in the library itself. Skipped where there is no libvirt.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{sync::Arc, time::Duration};
use vnuma_libvirt::{Connection, Library};

const LIMIT: Duration = Duration::from_secs(60);

fn connection(uri: &str) -> Option<Connection> {
    let library = Library::load().inspect_err(|error| println!("skipped: {error}")).ok()?;
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let changes = Arc::new(EventFd::from_value_and_flags(0, flags).expect("an eventfd"));
    Some(Connection::new(library, uri, changes).expect("a connection"))
}

#[test]
fn a_list_counts_until_something_changes() {
    let Some(connection) = connection("test:///default") else { return };
    assert!(connection.may_have_changed(), "nothing was listed yet");
    assert_eq!(connection.list(LIMIT).expect("listed").len(), 1);
    assert!(!connection.may_have_changed(), "nothing has changed");
    assert!(!connection.may_have_changed(), "asking changes nothing");
}

#[test]
fn without_a_connection_no_list_counts() {
    let Some(connection) = connection("test:///no/such/file") else { return };
    for _ in 0..2 {
        assert!(connection.may_have_changed());
        assert!(connection.list(LIMIT).is_err());
    }
}
