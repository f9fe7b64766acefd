//! Guest nodes that grow and shrink.

use crate::NodeBytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of a request for another size of a guest node: `size_bytes`, or `auto`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeRequest {
    /// The guest node.
    pub guest_node: u32,
    /// What it is to have, with what it booted with, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// vnumad sizes it by what is free on its home, within these bounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<AutoSize>,
    /// Say what would be done, and do nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Bounds of a guest node, with what it booted with, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AutoSize {
    /// At least.
    pub least_bytes: u64,
    /// At most; none: all that can be plugged.
    #[serde(default)]
    pub most_bytes: Option<u64>,
}

/// How large the guest nodes of a VM are, and may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Sizes {
    /// The VM.
    pub vm: String,
    /// Its guest nodes in rising order.
    pub guest_nodes: Vec<GuestNodeSize>,
}

/// How large a guest node is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GuestNodeSize {
    /// Its number.
    pub id: u32,
    /// Host node that its plugged memory comes from: that of QEMU's policy, or its home.
    pub plugs_from: Option<u32>,
    /// What it booted with, bytes.
    pub boot_bytes: u64,
    /// What can be plugged beside that; none without a virtio-mem device.
    pub pluggable: Option<Pluggable>,
    /// The last change that this vnumad has planned or begun, if there is one.
    pub resize: Option<ResizeState>,
}

/// The virtio-mem devices of a guest node, together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Pluggable {
    /// What its guest is to have of them, bytes.
    pub requested_bytes: u64,
    /// What it has.
    pub plugged_bytes: u64,
    /// The most that it can have.
    pub most_bytes: u64,
    /// What is plugged is a multiple of this.
    pub block_bytes: u64,
    /// How many there are.
    pub devices: usize,
    /// What of it is there, by host node.
    pub places: Vec<NodeBytes>,
    /// vnumad sizes it by what is free on its home, within these bounds of what is plugged.
    pub auto: Option<SizeBounds>,
}

/// Bounds of what is plugged, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct SizeBounds {
    /// At least.
    pub least_bytes: u64,
    /// At most.
    pub most_bytes: u64,
}

/// How far a change is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ResizeState {
    /// `planned`, `asked` (QEMU), `waiting` (for the guest); or ended: `done`, `partly`, `stopped`, `failed`.
    pub state: String,
    /// What was plugged before, bytes.
    pub before_bytes: u64,
    /// What is to be plugged, bytes.
    pub bytes: u64,
    /// Who wants that.
    pub by: String,
    /// What was not done.
    pub problem: Option<String>,
}

impl ResizeState {
    /// It goes on by itself.
    pub fn is_active(&self) -> bool {
        ["asked", "waiting"].contains(&self.state.as_str())
    }
}
