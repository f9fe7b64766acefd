//! Guest nodes grow and shrink by their virtio-mem devices.
//!
//! ```text
//!   wanted ──QEMU was asked──▶ asked ──all of it was answered──▶ waiting ──the guest has it──▶ done
//!     │                          │                                  └─── it does no more ───▶ partly: what it has is asked for
//!     ├──── QEMU refuses ────────┴──▶ failed
//!     └──── an operator ends any of these ──▶ stopping ──QEMU answers──▶ stopped: what it has is asked for
//! ```
//!
//! The hypervisor has what was asked for (`requested-size`) and what the guest has. Nothing else is remembered: wherever a vnumad
//! ends, the next one sees both.
//!
//! The controller ([`decide_size`]) plugs memory where the host has some on the home of a guest node and unplugs it where the host
//! lacks it, as the system that *When eXtended Para-Virtualization (XPV) Meets NUMA* uses in section 5.4.2.
//!
//! | promise | by |
//! |---|---|
//! | no guest node gets what others were promised | it grows by what is free less what is plugged and was not touched yet |
//! | guest nodes of one home do not take the same memory | what is free is divided by their number |
//! | nothing goes up and down | it shrinks below one bound of what is free, and grows above a higher one, to that bound |
//! | what a guest does not do is not asked for ever | it rests for a minute, and each time twice as long, up to an hour |

use crate::task::TaskId;
use vnuma_model::{GuestNodeId, MemoryDevice};

/// A guest that has plugged or unplugged nothing for so long does no more.
pub const PATIENCE_NS: u64 = 30_000_000_000;
/// How long a guest node is left alone that did not do what it was asked for: at first, and at most.
pub(crate) const FIRST_REST_NS: u64 = 60_000_000_000;
pub(crate) const LONGEST_REST_NS: u64 = 3_600_000_000_000;

/// How guest nodes are sized by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeSettings {
    /// Guest nodes are, until an operator says otherwise.
    pub auto: bool,
    /// Guest nodes shrink while less of their home is free, thousandths of its memory, beyond its reserve.
    pub low_permille: u64,
    /// They grow while more is.
    pub high_permille: u64,
    /// Least time between two changes of a guest node that make it larger.
    pub pause_ns: u64,
    /// Least that is plugged, thousandths of what can be.
    pub least_permille: u64,
    /// Most that is plugged, thousandths of what can be.
    pub most_permille: u64,
}

impl Default for SizeSettings {
    fn default() -> Self {
        Self {
            auto: false,
            low_permille: 50,
            high_permille: 150,
            pause_ns: 60_000_000_000,
            least_permille: 0,
            most_permille: 1000,
        }
    }
}

/// What may be plugged of a guest node, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeBounds {
    /// At least.
    pub least: u64,
    /// At most.
    pub most: u64,
}

/// A guest node that is sized by itself, and its home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeInput {
    /// What its guest is to have of its devices, bytes.
    pub requested: u64,
    /// What it has.
    pub plugged: u64,
    /// Sizes are multiples of this, bytes.
    pub block: u64,
    /// Its operator's.
    pub bounds: SizeBounds,
    /// Memory of the home, bytes.
    pub home_total: u64,
    /// What is free there beyond its reserve, bytes; less than nothing if that is used.
    pub home_free: i64,
    /// What guest nodes with that home have plugged and not touched yet, bytes: it may be taken at any time.
    pub promised: u64,
    /// Guest nodes that are sized by themselves with that home, this one included.
    pub sharers: usize,
    /// When it was changed last.
    pub changed_ns: Option<u64>,
    /// It is not changed until then.
    pub rests_until_ns: u64,
    /// When all of this was seen.
    pub now_ns: u64,
}

/// What of its devices a guest node is to have, if that is to change.
pub fn decide_size(settings: &SizeSettings, input: &SizeInput) -> Option<u64> {
    let SizeInput { requested, block, bounds, now_ns, .. } = *input;
    if requested != input.plugged || block == 0 || now_ns < input.rests_until_ns {
        return None;
    }
    let share = |permille: u64| {
        let bytes = u128::from(input.home_total) * u128::from(permille) / 1000;
        i64::try_from(bytes).unwrap_or(i64::MAX)
    };
    let sharers = input.sharers.max(1) as u64;
    let least = bounds.least.div_ceil(block).saturating_mul(block);
    let most = bounds.most.max(least) / block * block;
    let low = share(settings.low_permille);
    // What unplugs a block more than it has to must not plug that again.
    let high = share(settings.high_permille).max(low.saturating_add_unsigned(block));
    if requested > most || (input.home_free < low && requested > least) {
        let lacking = u64::try_from(low.saturating_sub(input.home_free)).unwrap_or(0);
        let less = lacking.div_ceil(sharers).div_ceil(block).saturating_mul(block);
        let size = requested.saturating_sub(less).max(least).min(most);
        return (size < requested).then_some(size);
    }
    let rested =
        input.changed_ns.is_none_or(|changed_ns| now_ns >= changed_ns.saturating_add(settings.pause_ns));
    let free = input.home_free.saturating_sub_unsigned(input.promised);
    if free > high && requested < most && rested {
        let more = free.abs_diff(high) / sharers / block * block;
        let size = requested.saturating_add(more).min(most);
        return (size > requested).then_some(size);
    }
    // The operator's least does not wait for the higher bound.
    (requested < least && free >= low).then_some(least)
}

/// Who wants another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum SizedBy {
    /// An operator.
    #[strum(to_string = "an operator")]
    Operator,
    /// The controller.
    #[strum(to_string = "what is free on its home")]
    Policy,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ResizePhase {
    /// The hypervisor is to be asked.
    #[strum(serialize = "asked")]
    Wanted,
    /// The hypervisor was asked.
    Asked,
    /// The guest plugs or unplugs.
    Waiting,
    /// The guest has what was wanted.
    Done,
    /// The guest has plugged or unplugged a part, and does no more.
    Partly,
    /// An operator ends it. What the guest has not done is not to be wanted any more.
    #[strum(serialize = "stopped")]
    Stopping,
    /// An operator has ended it.
    Stopped,
    /// The hypervisor refused it.
    Failed,
}

impl ResizePhase {
    /// For the API.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What the hypervisor is to be asked for: of a device, by its id, so many bytes.
pub type Request = (String, u64);

/// A guest node that grows or shrinks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// What its guest had of its devices, bytes.
    pub before: u64,
    /// What it is to have.
    pub bytes: u64,
    /// Who wants that.
    pub by: SizedBy,
    /// What was not done, and why.
    pub problem: Option<String>,
    phase: ResizePhase,
    /// What the hypervisor was asked under these ids, and has not answered.
    unanswered: Vec<TaskId>,
    /// What the guest had when that changed last, and when that was.
    last: (u64, u64),
}

impl Resize {
    /// One that begins.
    pub fn new(guest_node: GuestNodeId, before: u64, bytes: u64, by: SizedBy, now_ns: u64) -> Self {
        let (phase, last) = (ResizePhase::Wanted, (before, now_ns));
        Self { guest_node, before, bytes, by, problem: None, phase, unanswered: Vec::new(), last }
    }

    /// How far it is.
    pub fn phase(&self) -> ResizePhase {
        self.phase
    }

    /// It has not ended.
    pub fn is_active(&self) -> bool {
        matches!(self.phase, ResizePhase::Wanted | ResizePhase::Asked | ResizePhase::Waiting)
    }

    /// The hypervisor is asked for something of it.
    pub fn asked(&mut self, task: TaskId) {
        self.unanswered.push(task);
    }

    /// Has the hypervisor yet to answer that?
    pub fn waits_for(&self, task: TaskId) -> bool {
        self.unanswered.contains(&task)
    }

    /// The hypervisor has answered, or refused.
    pub fn answered(&mut self, task: TaskId, outcome: Result<(), String>) {
        self.unanswered.retain(|known| *known != task);
        match outcome {
            _ if self.phase != ResizePhase::Asked => {}
            Ok(()) if self.unanswered.is_empty() => self.phase = ResizePhase::Waiting,
            Ok(()) => {}
            Err(problem) => (self.phase, self.problem) = (ResizePhase::Failed, Some(problem)),
        }
    }

    /// The hypervisor will not answer. What the guest does shows whether it was reached.
    pub fn connection_lost(&mut self) {
        if !std::mem::take(&mut self.unanswered).is_empty() && self.phase == ResizePhase::Asked {
            self.phase = ResizePhase::Waiting;
        }
    }

    /// Ends it on an operator's request: the guest keeps what it has by now.
    pub fn stop(&mut self) {
        if self.is_active() {
            self.phase = ResizePhase::Stopping;
        }
    }

    /// What the hypervisor is to be asked for now. `devices` are those of the guest node as they were described last.
    pub fn next(&mut self, devices: &[&MemoryDevice], now_ns: u64) -> Vec<Request> {
        let (plugged, requested) = sums(devices);
        if self.phase == ResizePhase::Wanted {
            let requests = spread(devices, self.bytes);
            self.phase = if requests.is_empty() { ResizePhase::Waiting } else { ResizePhase::Asked };
            self.last = (plugged, now_ns);
            return requests;
        }
        if self.phase == ResizePhase::Stopping {
            self.phase = ResizePhase::Stopped;
            // Of what was asked last the description may know nothing yet.
            return devices
                .iter()
                .filter_map(|device| Some((device.id.clone()?, device.plugged_bytes)))
                .collect();
        }
        if self.phase != ResizePhase::Waiting {
            return Vec::new();
        }
        if plugged != self.last.0 {
            self.last = (plugged, now_ns);
        }
        if plugged == self.bytes && requested == self.bytes {
            self.phase = ResizePhase::Done;
        } else if now_ns >= self.last.1.saturating_add(PATIENCE_NS) {
            self.phase = ResizePhase::Partly;
            let what = if self.bytes > self.before { "plugged" } else { "unplugged" };
            self.problem =
                Some(format!("the guest has {what} nothing more for {} s", PATIENCE_NS / 1_000_000_000));
            return withdraw(devices);
        }
        Vec::new()
    }
}

/// What a guest has of devices, and what it is to have, bytes.
pub fn sums(devices: &[&MemoryDevice]) -> (u64, u64) {
    devices.iter().fold((0, 0), |(plugged, requested), device| {
        (
            u64::saturating_add(plugged, device.plugged_bytes),
            u64::saturating_add(requested, device.requested_bytes),
        )
    })
}

/// The most that devices which can be asked have together, bytes.
pub fn most(devices: &[&MemoryDevice]) -> u64 {
    devices.iter().fold(0, |sum, device| sum.saturating_add(largest(device)))
}

/// Largest size of a device; one that cannot be asked stays as it is.
fn largest(device: &MemoryDevice) -> u64 {
    match (&device.id, device.block_bytes) {
        (Some(_), block @ 1..) => device.memory.size_bytes / block * block,
        _ => device.requested_bytes,
    }
}

/// What of each device is to be plugged so that all have `bytes` together: what is there stays, the first ones grow, the last ones
/// shrink. Devices that stay as they are, are left out. It may fall short where sizes of blocks differ.
pub fn spread(devices: &[&MemoryDevice], bytes: u64) -> Vec<Request> {
    let (_, total) = sums(devices);
    let (mut more, mut less) = (bytes.saturating_sub(total), total.saturating_sub(bytes));
    let mut requests = Vec::new();
    let mut change = |device: &MemoryDevice, shrink: bool| {
        let (Some(id), block @ 1..) = (&device.id, device.block_bytes) else { return };
        let size = device.requested_bytes;
        let left = if shrink { &mut less } else { &mut more };
        let room = if shrink { size } else { largest(device).saturating_sub(size) };
        let part = room.min(*left) / block * block;
        if part > 0 {
            *left -= part;
            requests.push((id.clone(), if shrink { size - part } else { size + part }));
        }
    };
    devices.iter().for_each(|device| change(device, false));
    devices.iter().rev().for_each(|device| change(device, true));
    requests
}

/// What to ask the hypervisor for so that the part that was not done is not wanted any more.
fn withdraw(devices: &[&MemoryDevice]) -> Vec<Request> {
    let open = devices.iter().filter(|device| device.requested_bytes != device.plugged_bytes);
    open.filter_map(|device| Some((device.id.clone()?, device.plugged_bytes))).collect()
}
