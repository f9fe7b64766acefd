//! How an operator wants decisions to be made.

use crate::{
    SettlePolicy,
    rehome_policy::RehomeSettings,
    repatriation::MemorySettings,
    scheduling::{Policy, Settings},
    sizing::SizeSettings,
};

/// How an operator wants decisions to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policies {
    /// How patient publishing is.
    pub settle: SettlePolicy,
    /// How long a vCPU of a guest without a channel has to be astray to be replugged, nanoseconds. `None`: it is not.
    pub replug_after_ns: Option<u64>,
    /// How the vCPUs of a VM are scheduled until an operator says otherwise.
    pub schedule: Policy,
    /// Settings of these policies.
    pub settings: Settings,
    /// How displaced memory comes home.
    pub memory: MemorySettings,
    /// How guest nodes are sized by themselves.
    pub sizes: SizeSettings,
    /// When guest nodes get another home by themselves.
    pub rehome: RehomeSettings,
}
