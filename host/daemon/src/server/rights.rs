//! Who may act. Everybody who can connect may read. The peer's credentials come from the kernel.

use crate::core::Refusal;
use nix::libc;
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};
use tokio::net::UnixStream;
use vnuma_api::operation::Right;

/// Most groups of a process, as the kernel has it (NGROUPS_MAX).
const MAX_GROUPS: usize = 65_536;

/// A user id that does not exist, for peers whom the kernel does not name. They may not act.
const NOBODY: u32 = u32::MAX;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) uid: u32,
    pub(crate) may_act: bool,
    /// It may have the memory of a VM sent to another host.
    pub(crate) may_send: bool,
}

impl Peer {
    /// Root, or the user that vnumad runs as: what they do to vnumad they could do without asking it.
    pub(crate) fn is_trusted(&self) -> bool {
        self.may_send
    }

    /// Whether it has this right.
    pub(crate) fn check(&self, right: Right, group: Option<&str>) -> Result<(), Refusal> {
        let (has, act, group) = match right {
            Right::Read => return Ok(()),
            Right::Act(act) => (self.may_act, act, group),
            // Not the group's.
            Right::Send(act) => (self.may_send, act, None),
        };
        let who = match group {
            None => "root or the user that vnumad runs as".to_owned(),
            Some(group) => {
                format!("root, the user that vnumad runs as, or a member of group `{group}` (api.act_group)")
            }
        };
        if has { Ok(()) } else { Err(Refusal::Forbidden { act, who, uid: self.uid }) }
    }
}

/// Who may act: root, the user that vnumad runs as, and a group if one is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) uid: u32,
    pub(crate) group: Option<u32>,
}

impl Rights {
    /// The peer of a connection, by its credentials when it connected.
    pub(crate) fn of(&self, stream: &UnixStream) -> Peer {
        let Ok(peer) = stream.peer_cred() else {
            return Peer { uid: NOBODY, may_act: false, may_send: false };
        };
        let in_group =
            |group| peer.gid() == group || groups(stream.as_fd()).is_ok_and(|all| all.contains(&group));
        let may_send = peer.uid() == 0 || peer.uid() == self.uid;
        let may_act = may_send || self.group.is_some_and(in_group);
        Peer { uid: peer.uid(), may_act, may_send }
    }
}

/// Groups of the peer besides its first.
fn groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut length =
            libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(libc::socklen_t::MAX);
        // SAFETY: the kernel writes at most `length` bytes, which is what `groups` has room for.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = length as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // Too little room: the kernel has said how much it needs.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() || count > MAX_GROUPS {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}
