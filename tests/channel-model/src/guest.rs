use crate::{ReadError, SUPPORTED, Topology, WORD, read};
use nix::{
    cmsg_space,
    sys::{
        eventfd::EventFd,
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
};
use std::{
    fs::File,
    io::{self, IoSliceMut},
    mem::offset_of,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::FileExt,
    },
};
use vnuma_abi_topology_channel::{
    GUEST_MAGIC, GUEST_OFFSET, Guest, MODE_FAST, MODE_SAFE,
    ivshmem::{ACKNOWLEDGE_VECTOR, GUEST_PEER, HOST_PEER, VECTORS},
};

/// The driver's version that [`GuestEnd::announce`] names: 1.2.3.
const DRIVER_VERSION: u32 = 0x1_0203;

/// What a device gets from the ivshmem server.
#[derive(Debug)]
pub struct GuestEnd {
    /// The shared memory.
    pub memory: File,
    /// Signalled by the guest.
    pub host_vectors: Vec<EventFd>,
    /// Interrupts of the guest.
    pub guest_vectors: Vec<EventFd>,
}

impl GuestEnd {
    /// Reads all messages, in the order and with the strictness of QEMU. They have to be there already.
    pub fn connect(socket: &OwnedFd) -> io::Result<Self> {
        expect(receive(socket)?, 0, "version")?;
        expect(receive(socket)?, GUEST_PEER.into(), "own peer number")?;
        let memory = File::from(expect_with(receive(socket)?, -1, "shared memory")?);
        let vectors = |peer: u16| {
            let vector = |_| {
                let descriptor = expect_with(receive(socket)?, peer.into(), "vector")?;
                // SAFETY: the descriptor was just received, belongs to nobody else, and a
                // vector of this protocol is an eventfd.
                Ok(unsafe { EventFd::from_owned_fd(descriptor) })
            };
            (0..VECTORS).map(vector).collect::<io::Result<Vec<_>>>()
        };
        Ok(Self { memory, host_vectors: vectors(HOST_PEER)?, guest_vectors: vectors(GUEST_PEER)? })
    }

    /// Reads the current topology.
    pub fn read(&self) -> Result<Topology, ReadError> {
        read(|offset| {
            let mut word = [0; 8];
            // A word that cannot be read makes no valid header or slot.
            let _ = self.memory.read_exact_at(&mut word, offset as u64);
            u64::from_le_bytes(word)
        })
    }

    /// Writes the guest's area, as a driver does that starts.
    pub fn announce(&self, mode: u32) -> io::Result<()> {
        self.store(offset_of!(Guest, magic), 0)?;
        let counts = SUPPORTED.len() as u64 | u64::from(mode) << 32;
        self.store(offset_of!(Guest, nr_supported), counts)?;
        self.store(offset_of!(Guest, driver_version), DRIVER_VERSION.into())?;
        let entry = |section: &vnuma_abi_topology_channel::SupportedSection| {
            u64::from(section.kind) | u64::from(section.version) << 16
        };
        for (index, two) in SUPPORTED.chunks(2).enumerate() {
            let pair = two.iter().rev().fold(0, |word, section| word << 32 | entry(section));
            self.store(offset_of!(Guest, supported) + index * WORD, pair)?;
        }
        self.store(offset_of!(Guest, acknowledged), 0)?;
        self.store(offset_of!(Guest, refused), 0)?;
        self.store(offset_of!(Guest, magic), GUEST_MAGIC)
    }

    /// Says that the kernel's maps agree with a generation, as a driver in fast mode does.
    pub fn acknowledge(&self, generation: u64) -> io::Result<()> {
        self.announce(MODE_FAST)?;
        self.store_acknowledged(generation)?;
        self.ring()
    }

    /// The same in safe mode.
    pub fn acknowledge_safely(&self, generation: u64) -> io::Result<()> {
        self.announce(MODE_SAFE)?;
        self.store_acknowledged(generation)?;
        self.ring()
    }

    /// Refuses a generation.
    pub fn refuse(&self, generation: u64, errno: i32) -> io::Result<()> {
        self.store(offset_of!(Guest, refused_error), (-i64::from(errno)).cast_unsigned())?;
        self.store(offset_of!(Guest, refused), generation)?;
        self.ring()
    }

    /// Changes the area without signalling it.
    pub fn store_acknowledged(&self, generation: u64) -> io::Result<()> {
        self.store(offset_of!(Guest, acknowledged), generation)
    }

    /// Signals that the guest's area has changed.
    pub fn ring(&self) -> io::Result<()> {
        self.host_vectors[ACKNOWLEDGE_VECTOR].write(1)?;
        Ok(())
    }

    /// Stores a word in the guest's area.
    pub fn store(&self, offset: usize, value: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(WORD), "offset {offset}");
        self.memory.write_all_at(&value.to_le_bytes(), (GUEST_OFFSET + offset) as u64)
    }
}

fn expect(message: (i64, Option<OwnedFd>), value: i64, what: &str) -> io::Result<()> {
    match message {
        (found, None) if found == value => Ok(()),
        other => Err(io::Error::other(format!("{what}: {other:?}"))),
    }
}

fn expect_with(message: (i64, Option<OwnedFd>), value: i64, what: &str) -> io::Result<OwnedFd> {
    match message {
        (found, Some(descriptor)) if found == value => Ok(descriptor),
        other => Err(io::Error::other(format!("{what}: {other:?}"))),
    }
}

/// The next message, as QEMU's `ivshmem_recv_msg` reads it.
fn receive(socket: &OwnedFd) -> io::Result<(i64, Option<OwnedFd>)> {
    let mut bytes = [0; 8];
    let mut space = cmsg_space!([i32; 4]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    let (length, mut descriptors) = (message.bytes, Vec::new());
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just made these descriptors for this process.
            descriptors.extend(raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
        }
    }
    if length != bytes.len() || descriptors.len() > 1 {
        return Err(io::Error::other(format!("{length} bytes with {} descriptors", descriptors.len())));
    }
    Ok((i64::from_le_bytes(bytes), descriptors.pop()))
}
