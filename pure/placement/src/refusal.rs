//! Why a VM cannot be placed: which node lacks what, how much, and what would fit.

use crate::{request::RequestError, size::shown_bytes};
use serde::{Deserialize, Serialize};
use std::fmt;
use vnuma_model::HostNodeId;

/// A device that is not local, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Remote {
    /// Its address.
    pub device: String,
    /// Why.
    pub reason: String,
}

/// What is lacking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// CPUs.
    Cpus,
    /// Memory of the page size, bytes.
    Memory,
    /// Units of memory: each guest node with vCPUs needs one.
    Units,
    /// Guest nodes: a guest cannot have more.
    GuestNodes,
}

/// Something that is lacking.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lack {
    /// The node; none for the whole host.
    pub node: Option<HostNodeId>,
    /// What.
    pub resource: Resource,
    /// How much is needed.
    pub needed: u64,
    /// How much there is.
    pub there: u64,
    /// The page size, bytes.
    pub page_bytes: u64,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "host node {node} ")?,
            None => write!(f, "the host ")?,
        }
        let (needed, there, short) = (self.needed, self.there, self.needed.saturating_sub(self.there));
        let page = shown_bytes(self.page_bytes);
        match self.resource {
            Resource::Cpus => write!(f, "lacks {short} CPUs: {needed} are needed, {there} are free"),
            Resource::Memory => {
                let [short, needed, there] = [short, needed, there].map(shown_bytes);
                write!(f, "lacks {short} of memory in pages of {page}: {needed} are needed, {there} are free")
            }
            Resource::Units => write!(
                f,
                "has free CPUs on so many nodes that the VM would need {needed} guest nodes, and its memory suffices for {there} \
                 with pages of {page}"
            ),
            Resource::GuestNodes => {
                write!(f, "could give it {needed} guest nodes, and a guest can have {there}")
            }
        }
    }
}

/// A VM that would fit. It was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fits {
    /// vCPUs.
    pub vcpus: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Page size, bytes.
    pub page_bytes: u64,
    /// With devices that are not local.
    pub remote: bool,
}

impl fmt::Display for Fits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (memory, page) = (shown_bytes(self.memory_bytes), shown_bytes(self.page_bytes));
        write!(f, "{} vCPUs with {memory} in pages of {page}", self.vcpus)?;
        if self.remote { write!(f, ", with devices that are not local") } else { Ok(()) }
    }
}

/// Why a VM cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What is lacking, at least one.
    pub lacks: Vec<Lack>,
    /// What would fit; empty if nothing was found.
    pub would_fit: Vec<Fits>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |texts: Vec<String>| texts.join("; ");
        write!(f, "{}", list(self.lacks.iter().map(Lack::to_string).collect()))?;
        match self.would_fit.is_empty() {
            true => Ok(()),
            false => write!(f, "; would fit: {}", list(self.would_fit.iter().map(Fits::to_string).collect())),
        }
    }
}

/// Why there is no placement.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlaceError {
    /// The request makes no sense on this host.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// It does not fit.
    #[error("{0}")]
    Refused(Refusal),
}
