//! Asks a guest to release its channel's device, again and again until it does.
//!
//! A guest that boots or stands still does not see a request, nor does its kernel see it afterwards. But QEMU passes on the same request
//! again: at once, or after 5 s, by how it plugs into that port. (If the first one was made before the guest ran at all, it does not,
//! and a reset of the guest takes the device.) So the guest is asked again: at first soon, as most guests boot that fast, and not
//! without end.

use vnuma_model::Backoff;

const SECOND_NS: u64 = 1_000_000_000;

/// Pause between the first request and the second one, and the longest pause. QEMU may refuse to ask sooner.
const FIRST_PAUSE_NS: u64 = 6 * SECOND_NS;
const LAST_PAUSE_NS: u64 = 30 * SECOND_NS;

/// How long a guest is asked in all. A boot takes less.
pub const UNPLUG_LIMIT_NS: u64 = 600 * SECOND_NS;

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnplugStep {
    /// The guest is asked again.
    Ask,
    /// It is asked no more.
    GiveUp,
}

/// A device that is to be unplugged. It is forgotten with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unplug {
    ignored: u32,
    pauses: Backoff,
    next_ns: u64,
    /// `None`: it was given up.
    until_ns: Option<u64>,
}

impl Unplug {
    /// The guest is asked for the first time now.
    pub fn new(now_ns: u64) -> Self {
        let until_ns = Some(now_ns.saturating_add(UNPLUG_LIMIT_NS));
        Self {
            ignored: 0,
            pauses: Backoff::new(FIRST_PAUSE_NS, LAST_PAUSE_NS),
            next_ns: now_ns.saturating_add(FIRST_PAUSE_NS),
            until_ns,
        }
    }

    /// How often the guest was asked and has kept the device.
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// It is asked no more.
    pub fn is_given_up(&self) -> bool {
        self.until_ns.is_none()
    }

    /// The guest was asked, and has kept the device.
    pub fn kept(&mut self, now_ns: u64) {
        self.ignored = self.ignored.saturating_add(1);
        self.next_ns = now_ns.saturating_add(self.pauses.pause());
    }

    /// Stops asking.
    pub fn give_up(&mut self) {
        self.until_ns = None;
    }

    /// The step that is due now, if one is. `answers`: the hypervisor can be asked.
    pub fn step(&self, answers: bool, now_ns: u64) -> Option<UnplugStep> {
        match self.until_ns? <= now_ns {
            true => Some(UnplugStep::GiveUp),
            false => (answers && self.next_ns <= now_ns).then_some(UnplugStep::Ask),
        }
    }

    /// When something is due, if nothing else happens.
    pub fn deadline_ns(&self, answers: bool) -> Option<u64> {
        let until_ns = self.until_ns?;
        Some(if answers { until_ns.min(self.next_ns) } else { until_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// When it was asked, and when it was given up, if it was. Each answer takes so long, and its hypervisor answers by turns.
    fn asked(took_ns: &[u64], silences_ns: &[u64]) -> (Vec<u64>, Option<u64>) {
        let (mut unplug, mut now_ns, mut asked) = (Unplug::new(0), 0, vec![0]);
        let (mut took_ns, mut silences_ns) = (took_ns.iter().cycle(), silences_ns.iter().cycle());
        now_ns += took_ns.next().copied().unwrap_or_default();
        unplug.kept(now_ns);
        while let Some(due_ns) = unplug.deadline_ns(true) {
            now_ns = now_ns.max(due_ns) + silences_ns.next().copied().unwrap_or_default();
            match unplug.step(true, now_ns) {
                Some(UnplugStep::Ask) => {
                    asked.push(now_ns);
                    now_ns += took_ns.next().copied().unwrap_or_default();
                    unplug.kept(now_ns);
                }
                Some(UnplugStep::GiveUp) => {
                    unplug.give_up();
                    return (asked, Some(now_ns));
                }
                None => {}
            }
        }
        (asked, None)
    }

    #[test]
    fn a_guest_that_never_lets_go_is_asked_a_bounded_number_of_times() {
        let (asked, given_up) = asked(&[SECOND_NS], &[0]);
        let seconds: Vec<u64> = asked.iter().take(5).map(|asked_ns| asked_ns / SECOND_NS).collect();
        assert_eq!(seconds, [0, 7, 20, 45, 76]);
        assert_eq!((asked.len(), given_up), (21, Some(UNPLUG_LIMIT_NS)));
    }

    #[test]
    fn nobody_is_asked_who_does_not_answer_but_it_is_given_up_all_the_same() {
        let mut unplug = Unplug::new(0);
        unplug.kept(SECOND_NS);
        assert_eq!(unplug.step(false, 100 * SECOND_NS), None);
        assert_eq!(unplug.deadline_ns(false), Some(UNPLUG_LIMIT_NS));
        assert_eq!(unplug.step(true, 100 * SECOND_NS), Some(UnplugStep::Ask), "as soon as it answers");
        assert_eq!(unplug.step(false, UNPLUG_LIMIT_NS), Some(UnplugStep::GiveUp));
        unplug.give_up();
        assert!(unplug.is_given_up());
        assert_eq!((unplug.step(true, u64::MAX), unplug.deadline_ns(true)), (None, None));
    }

    proptest! {
        /// Whatever answers and silences take.
        #[test]
        fn it_is_asked_neither_too_soon_nor_without_end(
            took_ns in prop::collection::vec(0..20 * SECOND_NS, 1..8),
            silences_ns in prop::collection::vec(0..100 * SECOND_NS, 1..8),
        ) {
            let (asked, given_up) = asked(&took_ns, &silences_ns);
            let soon = |pair: &[u64]| pair[1] - pair[0] < FIRST_PAUSE_NS;
            prop_assert!(!asked.windows(2).any(soon), "{asked:?}");
            prop_assert!(asked.len() as u64 <= UNPLUG_LIMIT_NS / FIRST_PAUSE_NS);
            prop_assert!(asked.iter().all(|asked_ns| *asked_ns < UNPLUG_LIMIT_NS));
            prop_assert!(given_up.is_some_and(|given_up_ns| given_up_ns >= UNPLUG_LIMIT_NS), "{given_up:?}");
        }
    }
}
