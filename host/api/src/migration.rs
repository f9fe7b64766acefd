//! VMs that migrate to another host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of an attach. It may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AttachRequest {
    /// If its guest does not run yet: attach it as soon as it does, and answer at once.
    pub on_arrival: bool,
}

/// Body of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Where to: `tcp:HOST:PORT`, `unix:PATH` or `vsock:CID:PORT` of a QEMU that waits, or for a domain of libvirt the URI of another
    /// libvirt.
    pub destination: String,
    /// Have the guest go on there before its memory is there.
    #[serde(default)]
    pub post_copy: bool,
}

/// How far the last migration of a VM is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Migration {
    /// The VM.
    pub vm: String,
    /// Where to.
    pub destination: String,
    /// The guest goes on there before its memory is there.
    pub post_copy: bool,
    /// It had a topology channel, which it gets again if it stays.
    pub attached: bool,
    /// `detaching`, `starting`, `sending`, `post-copy`, `cancelling`, `returning`; or ended: `done`, `cancelled`, `failed`.
    pub state: String,
    /// What was sent, bytes.
    pub sent_bytes: u64,
    /// What is to be sent, bytes. It grows while the guest writes.
    pub left_bytes: u64,
    /// The VM's memory, bytes.
    pub total_bytes: u64,
    /// How often the memory was gone through.
    pub passes: u64,
    /// How long the guest stood still, or is expected to, milliseconds.
    pub downtime_ms: Option<u64>,
    /// Why it failed, or what is in its way.
    pub problem: Option<String>,
}

impl Migration {
    /// It goes on by itself.
    pub fn is_active(&self) -> bool {
        !["done", "cancelled", "failed"].contains(&self.state.as_str())
    }
}
