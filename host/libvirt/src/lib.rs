//! libvirt, as far as vnumad needs it: domains that run, their XML, events, hot-plug, pins and migration.
//!
//! - **Loaded at run time** ([`Library::load`]): programs that use this crate run on hosts without libvirt.
//! - **Calls have limits.** A call to a daemon that hangs, or for a domain that is locked, returns after the limit; the work
//!   goes on in a thread of its own ([`Connection`], [`Domain`]). Calls that hang do not keep those for other domains waiting.
//! - **Connections come and go** with the daemon. One that breaks is opened again after a pause that grows.
//! - **What libvirt writes is not trusted to be well-formed**: XML of domains ([`DomainXml`]) and the files that libvirt keeps of
//!   running ones ([`StatusFile`]) are bounded, and refused with domain, element and value.
//!
//! It does not know what a VM is; `vnuma-hypervisor` makes VMs of domains.

mod api;
mod connection;
mod domain;
mod domain_xml;
mod error;
mod events;
mod lane;
mod library;
mod migration;
mod own_pins;
mod pins;
mod slots;
mod status;
mod xml;

pub use connection::{Connection, Listed};
pub use domain::{Domain, DomainState};
pub use domain_xml::{
    Binding, Cell, DomainXml, HostPci, MARK_ELEMENT, MARK_NAMESPACE, PREFIX, Port, Shmem, Topology,
};
pub use error::LibvirtError;
pub use events::DomainEvent;
pub use library::Library;
pub use migration::{Ended, Migrating};
pub use own_pins::{OwnPin, PINS_NAMESPACE, pins_element};
pub use pins::{TakingBack, Wanted, xml_for_elsewhere};
pub use status::{FoundStatus, StatusError, StatusFile, StatusPlaces};
pub use xml::XmlError;
