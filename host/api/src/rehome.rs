//! Guest nodes that get another home.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of a request for another home.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RehomeRequest {
    /// The guest node.
    pub guest_node: u32,
    /// Host node that is to be its home.
    pub node: u32,
    /// Say what would be done, and do nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// Also move vCPUs that others have confined to another node.
    #[serde(default)]
    pub move_pinned: bool,
}

/// Where the guest nodes of a VM are, and the last re-home.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Rehome {
    /// The VM.
    pub vm: String,
    /// Its guest nodes in rising order.
    pub guest_nodes: Vec<GuestNodeHome>,
    /// The last re-home that this vnumad has planned or begun, if there is one.
    pub rehome: Option<RehomeState>,
}

/// Where a guest node is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GuestNodeHome {
    /// Its number.
    pub id: u32,
    /// Host node that most of its memory is on.
    pub home: Option<u32>,
    /// Host nodes that QEMU's policy takes new pages from, if it has one that names nodes.
    pub bound: Vec<u32>,
    /// Its resident memory, by host node.
    pub places: Vec<NodeBytes>,
    /// Its vCPUs run where no guest node of the VM is at home, and its memory does not follow them; or null.
    pub stays: Option<MemoryStays>,
}

/// Memory that does not follow its vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct MemoryStays {
    /// Host nodes that the vCPUs run on.
    pub vcpus_on: Vec<u32>,
    /// Why: `manual`, `spread`, `vfio`, `pool`, `bound`, `cpuset`, `no-memory`, `no-room`, `vprobe`, `ksm`, `shared`, `rehome`,
    /// `resize`, `migration`, `unknown`, `not-seen`, `rests`, `settles`, `cheap` or `due`.
    pub reason: String,
    /// The same in words.
    pub text: String,
}

/// Memory on a host node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NodeBytes {
    /// The host node.
    pub node: u32,
    /// How much.
    pub bytes: u64,
}

/// How far a re-home is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RehomeState {
    /// The guest node.
    pub guest_node: u32,
    /// Its new home.
    pub node: u32,
    /// `planned`, `memory`, `topology`, `vcpus`; or ended: `done`, `stopped`, `failed`.
    pub state: String,
    /// Resident memory of the guest node, bytes.
    pub total_bytes: u64,
    /// What of it is on the new home, bytes.
    pub there_bytes: u64,
    /// APIC ids of its vCPUs.
    pub vcpus: Vec<u32>,
    /// Those that are being moved.
    pub vcpus_left: Vec<u32>,
    /// Why, if a policy and no operator wants it.
    pub why: Option<String>,
    /// What could not be done.
    pub problem: Option<String>,
    /// What an operator should know.
    pub notes: Vec<String>,
}

impl RehomeState {
    /// It goes on by itself.
    pub fn is_active(&self) -> bool {
        ["memory", "topology", "vcpus"].contains(&self.state.as_str())
    }
}
