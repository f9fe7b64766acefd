//! Numbers that vnumad gives to what it knows.

/// Number of a VM, or of what may turn out to be one. Never used twice.
pub type VmId = u64;
/// Number of a connection to a hypervisor. Never used twice.
pub type ConnectionId = u64;
/// Number of a request that waits for an answer. Never used twice.
pub type RequestId = u64;
