//! Rust mirror of `include/vnuma/sched.h`: the maps that scx_vnuma shares with the program that decides. They are written and read as
//! bytes, in the machine's own order.

/// [`Header::magic`].
pub const MAGIC: u32 = 0x764e_756d;
/// [`Header::version`].
pub const VERSION: u32 = 3;
/// CPUs that the layouts have room for.
pub const MAX_CPUS: usize = 8192;
/// Nodes that the layouts have room for.
pub const MAX_NODES: usize = 64;
/// Most threads with an assignment.
pub const MAX_THREADS: u32 = 65536;
/// Words of a mask of CPUs.
pub const MASK_WORDS: usize = 128;
/// [`Assignment::flags`]: the thread has a place.
pub const PLACED: u32 = 1;
/// [`Assignment::pressure`]: not counted.
pub const NO_PRESSURE: u32 = 0;
/// [`Header::steal`]: of the own node first, of the longest queue there, the thread with the least pressure.
pub const STEAL_PRESSURE: u32 = 0;
/// [`Header::steal`]: the first thread of the next CPU that has any, whatever its node.
pub const STEAL_BLIND: u32 = 1;
/// [`Header::steal`]: the same, but a thread with a place only by CPUs of that.
pub const STEAL_PLACE: u32 = 2;
/// Index of a count: threads taken to their place.
pub const COUNT_PLACED: u32 = 0;
/// Index of a count: stolen within a node.
pub const COUNT_LOCAL: u32 = 1;
/// Index of a count: stolen from another node.
pub const COUNT_REMOTE: u32 = 2;
/// Index of a count: stolen because they had waited too long.
pub const COUNT_STARVED: u32 = 3;
/// Index of a count: ran on before others.
pub const COUNT_KEPT: u32 = 4;
/// Index of a count: waits for a `cpu.max`.
pub const COUNT_THROTTLED: u32 = 5;
/// Index of a count: took a CPU from another thread when they woke.
pub const COUNT_PREEMPTED: u32 = 6;
/// Number of counts.
pub const COUNTS: u32 = 7;

/// `struct vnuma_sched_header`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of this struct.
    pub header_size: u32,
    /// Bytes of [`Assignment`].
    pub assignment_size: u32,
    /// 1: all threads of the host are scheduled.
    pub full: u32,
    /// Which thread is stolen: [`STEAL_PRESSURE`], [`STEAL_BLIND`] or [`STEAL_PLACE`].
    pub steal: u32,
    /// Differs with each start of the scheduler.
    pub instance: u64,
    /// When the program that decides was alive last, of `CLOCK_MONOTONIC`; 0: never.
    pub heartbeat_ns: u64,
    /// Places hold so long after the heartbeat.
    pub keep_ns: u64,
    /// A thread that waits longer is stolen whatever its pressure.
    pub starve_ns: u64,
    /// Time that a thread runs before others have their turn.
    pub slice_ns: u64,
}

/// What is decided of a thread: `struct vnuma_sched_assignment`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Differs from the one before: the thread is taken to its place, once. Never 0.
    pub epoch: u64,
    /// Process of the thread.
    pub pid: u32,
    /// [`PLACED`].
    pub flags: u32,
    /// LLC references in a million instructions.
    pub pressure: u32,
    /// 0.
    pub reserved: u32,
    /// CPUs of its place.
    pub cpus: [u64; MASK_WORDS],
}

/// `struct vnuma_sched_topology`.
#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Nodes.
    pub nr_nodes: u32,
    /// 0.
    pub reserved: u32,
    /// Node of each CPU, by position; `nr_nodes`: none.
    pub node_of: [u16; MAX_CPUS],
    /// CPUs that have no tick while they run one thread.
    pub tickless: [u64; MASK_WORDS],
    /// Of each node the others, the nearest first.
    pub nearest: [u8; MAX_NODES * MAX_NODES],
}

/// `struct vnuma_sched_exit`.
#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// `enum scx_exit_kind`; 0: it has not ended.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// Of the kind.
    pub code: u64,
    /// The kernel's word for the kind.
    pub reason: [u8; 64],
    /// The kernel's message, or that of the program.
    pub message: [u8; 256],
}

/// The bytes of numbers, one after the other.
struct Writer<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Writer<N> {
    fn new() -> Self {
        Self { bytes: [0; N], at: 0 }
    }

    fn put(&mut self, value: &[u8]) {
        self.bytes[self.at..self.at + value.len()].copy_from_slice(value);
        self.at += value.len();
    }
}

/// Numbers of bytes, one after the other. What is beyond the end is 0.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        let (now, rest) = self.0.split_at(N.min(self.0.len()));
        value[..now.len()].copy_from_slice(now);
        self.0 = rest;
        value
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }
}

impl Header {
    /// As the map has it.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        let mut writer = Writer::new();
        let words = [self.magic, self.version, self.header_size, self.assignment_size, self.full, self.steal];
        words.iter().for_each(|word| writer.put(&word.to_ne_bytes()));
        let words = [self.instance, self.heartbeat_ns, self.keep_ns, self.starve_ns, self.slice_ns];
        words.iter().for_each(|word| writer.put(&word.to_ne_bytes()));
        writer.bytes
    }

    /// Of what the map has, whoever made it: see the magic, the version and the sizes first.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut reader = Reader(bytes);
        Self {
            magic: reader.u32(),
            version: reader.u32(),
            header_size: reader.u32(),
            assignment_size: reader.u32(),
            full: reader.u32(),
            steal: reader.u32(),
            instance: reader.u64(),
            heartbeat_ns: reader.u64(),
            keep_ns: reader.u64(),
            starve_ns: reader.u64(),
            slice_ns: reader.u64(),
        }
    }
}

impl Assignment {
    /// As the map has it.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        let mut writer = Writer::new();
        writer.put(&self.epoch.to_ne_bytes());
        let words = [self.pid, self.flags, self.pressure, self.reserved];
        words.iter().for_each(|word| writer.put(&word.to_ne_bytes()));
        self.cpus.iter().for_each(|word| writer.put(&word.to_ne_bytes()));
        writer.bytes
    }

    /// Of what the map has.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut reader = Reader(bytes);
        Self {
            epoch: reader.u64(),
            pid: reader.u32(),
            flags: reader.u32(),
            pressure: reader.u32(),
            reserved: reader.u32(),
            cpus: core::array::from_fn(|_| reader.u64()),
        }
    }
}

impl Topology {
    /// As the map has it, given piece by piece: it is too large for the stack of some threads.
    pub fn write(&self, mut put: impl FnMut(&[u8])) {
        put(&self.nr_nodes.to_ne_bytes());
        put(&self.reserved.to_ne_bytes());
        self.node_of.iter().for_each(|value| put(&value.to_ne_bytes()));
        self.tickless.iter().for_each(|value| put(&value.to_ne_bytes()));
        put(&self.nearest);
    }
}

impl Exit {
    /// Of what the map has.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut reader = Reader(bytes);
        Self {
            kind: reader.u32(),
            reserved: reader.u32(),
            code: reader.u64(),
            reason: reader.take(),
            message: reader.take(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            header_size: 1,
            assignment_size: 2,
            full: 3,
            steal: 4,
            instance: 5,
            heartbeat_ns: 6,
            keep_ns: 7,
            starve_ns: 8,
            slice_ns: 9,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), header);
        let cpus = core::array::from_fn(|at| at as u64 * 3);
        let assignment = Assignment { epoch: 1, pid: 2, flags: 3, pressure: 4, reserved: 5, cpus };
        assert_eq!(Assignment::from_bytes(&assignment.to_bytes()), assignment);
        assert_eq!(Header::from_bytes(&[1]), Header { magic: 1, ..Header::default() }, "too short");
    }
}
