//! What a backend lists: VMs, and what their hypervisors can do.

use std::{fmt, sync::Arc};

/// Names a VM to the backend that found it. To everybody else it is text to show, compare and copy: what stands in it
/// is the backend's own affair.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmHandle(Arc<str>);

impl VmHandle {
    /// A handle, begun with the name of the backend so that none is taken for another's: `qmp:/run/vnuma/qmp/a.sock`.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of its backend.
    pub fn backend(&self) -> &str {
        self.0.split_once(':').map_or("", |(backend, _)| backend)
    }
}

impl From<&str> for VmHandle {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<String> for VmHandle {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl fmt::Display for VmHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A VM that can be connected to, or what may turn out to be one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmCandidate {
    /// The backend's name for it.
    pub handle: VmHandle,
    /// Its name by its place, until it reports its own.
    pub name: String,
    /// Differs when another VM may be behind the same handle.
    pub instance: u64,
    /// What its hypervisor can do.
    pub abilities: Abilities,
}

impl VmCandidate {
    /// One whose hypervisor can do nothing but what each can.
    pub fn new(handle: impl Into<VmHandle>, name: impl Into<String>, instance: u64) -> Self {
        Self { handle: handle.into(), name: name.into(), instance, abilities: Abilities::default() }
    }

    /// Sets what the hypervisor can do.
    pub fn with(self, abilities: Abilities) -> Self {
        Self { abilities, ..self }
    }
}

/// What a VM's hypervisor or manager can do beyond what each can. Code that has to know asks this, and not which backend a
/// VM is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Another program answers for it, whatever the hypervisor does: a probe that is answered shows nothing of its main loop.
    pub answered_for: bool,
    /// The VM's manager keeps pins of its own, so that vCPUs are confined by asking for that.
    pub pins: bool,
    /// The destinations that the VM can migrate to, if it can migrate.
    pub migrates: Option<Destinations>,
}

/// Destinations that a VM can migrate to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destinations {
    /// What a destination begins with. Others could make the hypervisor run a program, or need a descriptor.
    pub schemes: &'static [&'static str],
    /// Parameters of a URI that name a program to be run.
    pub programs: &'static [&'static str],
}

/// Longest destination.
const MAX_DESTINATION: usize = 512;

impl Destinations {
    /// An error says why the VM cannot migrate there.
    pub fn check(&self, destination: &str) -> Result<(), String> {
        let begins = |scheme: &&str| destination.len() > scheme.len() && destination.starts_with(*scheme);
        if !self.schemes.iter().any(begins) {
            return Err(format!("it does not begin with {}", self.schemes.join(", ")));
        }
        if destination.len() > MAX_DESTINATION {
            return Err(format!("it is longer than {MAX_DESTINATION} bytes"));
        }
        if destination.chars().any(|char| char.is_control() || char.is_whitespace()) {
            return Err("it has a blank or a control character".to_owned());
        }
        if self.programs.is_empty() {
            return Ok(());
        }
        let parameters = destination.split_once('?').map(|(_, parameters)| parameters).unwrap_or_default();
        for parameter in parameters.split(['&', ';']) {
            let name = parameter.split('=').next().unwrap_or_default();
            if name.contains('%') || self.programs.iter().any(|program| name.eq_ignore_ascii_case(program)) {
                return Err(format!("its parameter {name} could name a program to be run"));
            }
        }
        Ok(())
    }
}
