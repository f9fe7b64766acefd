//! What can go wrong with a region.

use crate::PAGE_SIZE;
use nix::errno::Errno;
use std::io;

/// Why a region could not be made, or be served.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// This process may not use userfaultfd for faults of the kernel, as a vCPU's are.
    #[error(
        "userfaultfd is not permitted: set vm.unprivileged_userfaultfd to 1, or give this user access to \
         /dev/userfaultfd, or run with CAP_SYS_PTRACE ({source})"
    )]
    Denied {
        /// What `/dev/userfaultfd` said.
        source: io::Error,
    },
    /// The kernel is too old, or built without it.
    #[error("the kernel lacks {missing}, which Linux has since {since}")]
    Kernel {
        /// What is missing.
        missing: &'static str,
        /// The oldest Linux that has it.
        since: &'static str,
    },
    /// A length that is not a positive multiple of the page size.
    #[error("a region of {len} bytes: the length must be a positive multiple of {PAGE_SIZE}")]
    Length {
        /// The length in bytes.
        len: usize,
    },
    /// A number of shards that makes no sense.
    #[error("{shards} shards: there must be at least 1 and at most {limit}")]
    Shards {
        /// The number.
        shards: usize,
        /// The largest number, given the length.
        limit: usize,
    },
    /// The system's pages have another size than the pages of the region.
    #[error("the page size of this machine is {size} bytes, expected {PAGE_SIZE}")]
    PageSize {
        /// Its page size in bytes.
        size: i64,
    },
    /// The memory cannot be locked.
    #[error(
        "{len} bytes cannot be kept from swap: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) or leave \
         `lock` off ({source})"
    )]
    Lock {
        /// Bytes.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// A message of the kernel that the pager does not know.
    #[error("userfaultfd of shard {shard}: {detail}")]
    Message {
        /// The shard.
        shard: usize,
        /// What it was.
        detail: String,
    },
    /// The system refused.
    #[error("{call}: {source}")]
    System {
        /// The system call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl PagerError {
    pub(crate) fn system(call: &'static str, error: Errno) -> Self {
        Self::System { call, source: error.into() }
    }
}
