//! A channel's device that its guest has not let go of.

/// A device that is to be unplugged. It is forgotten with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unplug {
    /// How often the guest was asked and has kept the device.
    pub ignored: u32,
    /// Its guest is asked no more.
    pub given_up: bool,
    /// When the guest was asked for the first time.
    pub since_ns: u64,
    /// When it has kept the device last.
    pub kept_ns: u64,
}

impl Unplug {
    /// The guest is asked for the first time now.
    pub fn new(now_ns: u64) -> Self {
        Self { ignored: 0, given_up: false, since_ns: now_ns, kept_ns: now_ns }
    }

    /// The guest was asked, and has kept the device.
    pub fn kept(&mut self, now_ns: u64) {
        (self.ignored, self.kept_ns) = (self.ignored.saturating_add(1), now_ns);
    }
}
