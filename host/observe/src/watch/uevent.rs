//! Messages of the kernel about devices that come, go and change.

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, socket},
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// The kernel's own messages; udevd sends others to another group.
const KERNEL_GROUP: u32 = 1;

/// Longest message that is parsed; the kernel's have at most 2048 bytes and a path.
const MESSAGE_LIMIT: usize = 8192;

/// Most messages taken at once: a storm of them does not keep the caller.
const MESSAGES: usize = 1024;

/// Parts of the kernel whose devices a host's topology consists of.
const SUBSYSTEMS: [&str; 3] = ["cpu", "memory", "node"];

/// A parsed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uevent<'a> {
    /// `add`, `remove`, `online`, `offline`, `change` and others.
    pub action: &'a str,
    /// The device's directory below `/sys`.
    pub path: &'a str,
    /// What kind of device it is.
    pub subsystem: &'a str,
}

impl Uevent<'_> {
    /// May the host's topology be another one after it?
    pub fn concerns_topology(&self) -> bool {
        // A driver that binds a PCI function changes nothing, and happens often.
        let function = self.subsystem == "pci" && ["add", "remove"].contains(&self.action);
        SUBSYSTEMS.contains(&self.subsystem) || function
    }
}

/// A message: `ACTION@PATH`, then `KEY=VALUE` for the rest, each ended by a null byte. `None` if it is none, or does not
/// name a subsystem.
pub fn parse_uevent(message: &[u8]) -> Option<Uevent<'_>> {
    let mut fields = message.split(|&byte| byte == 0).map(|field| std::str::from_utf8(field).ok());
    let (action, path) = fields.next()??.split_once('@')?;
    let word = |byte: u8| byte.is_ascii_lowercase();
    if action.is_empty() || !action.bytes().all(word) || !path.starts_with('/') {
        return None;
    }
    let subsystem = fields.find_map(|field| field?.strip_prefix("SUBSYSTEM="))?;
    Some(Uevent { action, path, subsystem })
}

/// The kernel's messages, as they come.
#[derive(Debug)]
pub(super) struct Uevents {
    socket: OwnedFd,
}

impl Uevents {
    pub(super) fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = SockProtocol::NetlinkKObjectUEvent;
        let socket = socket(AddressFamily::Netlink, SockType::Datagram, flags, protocol)?;
        // The kernel chooses the number of this end.
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP))?;
        Ok(Self { socket })
    }

    /// Takes what has come. True if the host's topology may be another one; an error says that nothing will come any more.
    pub(super) fn take(&self) -> io::Result<bool> {
        let mut concerned = false;
        let mut message = [0; MESSAGE_LIMIT];
        for _ in 0..MESSAGES {
            match recvfrom::<NetlinkAddr>(self.socket.as_raw_fd(), &mut message) {
                Ok((length, sender)) => {
                    let sender = sender.map(|address| address.pid());
                    concerned |= is_reason(sender, message.get(..length).unwrap_or_default());
                }
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                // Some were lost: anything may have happened.
                Err(Errno::ENOBUFS) => concerned = true,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(concerned)
    }
}

impl AsFd for Uevents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether the kernel sent it, which is port 0. Messages of others are ignored.
fn is_reason(sender: Option<u32>, message: &[u8]) -> bool {
    sender == Some(0) && parse_uevent(message).is_some_and(|event| event.concerns_topology())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONLINE: &[u8] =
        b"online@/devices/system/cpu/cpu3\0ACTION=online\0DEVPATH=/devices/system/cpu/cpu3\0\
        SUBSYSTEM=cpu\0DRIVER=processor\0SEQNUM=4711\0";

    #[test]
    fn messages_are_taken_apart() {
        let event = Uevent { action: "online", path: "/devices/system/cpu/cpu3", subsystem: "cpu" };
        assert_eq!(parse_uevent(ONLINE), Some(event));
        for subsystem in ["cpu", "memory", "node"] {
            let message = format!("add@/devices/x\0SUBSYSTEM={subsystem}\0");
            assert!(parse_uevent(message.as_bytes()).unwrap().concerns_topology(), "{subsystem}");
        }
        let net = parse_uevent(b"add@/devices/x\0SUBSYSTEM=net\0").unwrap();
        assert!(!net.concerns_topology());
        for (action, concerns) in [("add", true), ("remove", true), ("bind", false), ("change", false)] {
            let message = format!("{action}@/devices/x\0SUBSYSTEM=pci\0");
            assert_eq!(parse_uevent(message.as_bytes()).unwrap().concerns_topology(), concerns, "{action}");
        }
        // A field that is not UTF-8 is no reason to miss the others.
        let odd = parse_uevent(b"change@/devices/x\0NAME=\xff\0SUBSYSTEM=memory").unwrap();
        assert!(odd.concerns_topology());
    }

    #[test]
    fn what_is_no_message_is_left_alone() {
        let udev = b"libudev\0\xfe\xed\xca\xfe\0SUBSYSTEM=cpu\0";
        for message in [
            &b""[..],
            b"\0",
            b"online",
            b"@/devices\0SUBSYSTEM=cpu",
            b"add@x\0SUBSYSTEM=cpu",
            b"add@/x",
            udev,
        ] {
            assert_eq!(parse_uevent(message), None, "{}", String::from_utf8_lossy(message));
        }
    }

    #[test]
    fn only_the_kernel_is_believed() {
        assert!(is_reason(Some(0), ONLINE));
        assert!(!is_reason(Some(4711), ONLINE));
        assert!(!is_reason(None, ONLINE));
    }

    proptest! {
        #[test]
        fn any_message_is_survived(message in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_uevent(&message);
        }

        #[test]
        fn what_was_understood_stands_in_the_message(message in "[a-z]{0,6}@?/?(.|SUBSYSTEM=|\0){0,40}") {
            if let Some(event) = parse_uevent(message.as_bytes()) {
                let begin = format!("{}@{}", event.action, event.path);
                prop_assert!(message.starts_with(&begin));
                let subsystem = format!("SUBSYSTEM={}", event.subsystem);
                prop_assert!(message.contains(&subsystem));
            }
        }
    }
}
