//! When a guest node gets another home by itself: its vCPUs have come to stay where its memory is not.
//!
//! If a vCPU goes to the home of another guest node, that node is published for it: a fine change. If it goes where no guest node is at
//! home, nothing can be published, and all its memory is remote for as long as it stays. Then the memory follows its vCPUs, and the new
//! home is published: a coarse change.
//!
//! ```text
//!   all vCPUs of a guest node run on one host node, no guest node's home ──▶ for `settle` ──▶ the accesses since then have cost
//!   MARGIN times what the move costs ──▶ re-home
//! ```
//!
//! | promise | by |
//! |---|---|
//! | nothing is moved for vCPUs that only pass | they have to stay for `settle`, and until being remote has cost more than the move would |
//! | in `t` seconds a guest node gets at most `1 + t / rest` other homes | it rests after each, and twice as long, up to [`LONGEST_REST_NS`], when it is wanted elsewhere soon after |

use crate::memory_move::{MARGIN, PAGE, PAGE_PRICE, TENTH_NS};
use crate::repatriation::{ASSUMED_ACCESSES, LONGEST_REST_NS, LOOK_PRICE};
use crate::world::VmId;
use std::collections::BTreeMap;
use vnuma_model::{GuestNodeId, HostNodeId, LOCAL_DISTANCE, Rest};

/// What an operator may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RehomeSettings {
    /// Guest nodes get other homes by themselves.
    pub auto: bool,
    /// Their vCPUs have to be elsewhere for so long, nanoseconds.
    pub settle_ns: u64,
    /// Between two re-homes of a guest node at least, nanoseconds.
    pub rest_ns: u64,
}

impl Default for RehomeSettings {
    fn default() -> Self {
        Self { auto: false, settle_ns: 60_000_000_000, rest_ns: 600_000_000_000 }
    }
}

/// A guest node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeView {
    /// Its number.
    pub guest_node: GuestNodeId,
    /// Where all of its vCPUs run, if that is one host node, no guest node of the VM is at home there, and its memory can go there.
    pub stays: Option<HostNodeId>,
    /// Its memory that is not there and can be moved, bytes.
    pub away_bytes: u64,
    /// All of its memory, bytes: all is looked at to move some.
    pub bytes: u64,
    /// Distance of its home from there.
    pub distance: u8,
    /// What a page of it would save in a second, in tenths of a local access. `None`: accesses are not counted.
    pub saving: Option<f64>,
}

/// Why a guest node gets another home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RehomeWhy {
    /// Its vCPUs have been there for so long, nanoseconds.
    pub stayed_ns: u64,
    /// What being remote has cost them since, nanoseconds.
    pub lost_ns: u64,
    /// What the move costs, nanoseconds.
    pub price_ns: u64,
    /// The accesses are assumed.
    pub assumed: bool,
}

/// What a guest node waits for whose vCPUs stay elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Patience {
    /// It rests, as it has got a home not long ago or could not get one: for so much longer, nanoseconds.
    Rests {
        /// How much longer.
        for_ns: u64,
    },
    /// Its vCPUs may go on.
    Settles {
        /// They have been there for so long, nanoseconds.
        stayed_ns: u64,
        /// They have to be there for so long.
        settle_ns: u64,
    },
    /// Being remote has cost less than twice what the move costs.
    #[strum(serialize = "cheap")]
    Costs(RehomeWhy),
    /// Nothing: it is decided after the next look.
    Due,
}

impl NodeView {
    fn price(&self) -> f64 {
        (self.away_bytes / PAGE) as f64 * PAGE_PRICE + (self.bytes / PAGE) as f64 * LOOK_PRICE
    }

    /// What being remote costs in a second.
    fn loss(&self) -> f64 {
        let farther = f64::from(self.distance) - f64::from(LOCAL_DISTANCE);
        (self.away_bytes / PAGE) as f64 * self.saving.unwrap_or(ASSUMED_ACCESSES * farther)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    /// Where its vCPUs stay, and since when.
    stays: Option<(HostNodeId, u64)>,
    /// What that has cost since then, in tenths of a local access, and until when it was counted.
    lost: (f64, u64),
    rest: Option<Rest>,
}

/// Decides which guest nodes get another home.
#[derive(Clone, Debug, Default)]
pub struct Rehomer {
    nodes: BTreeMap<(VmId, GuestNodeId), Remembered>,
}

impl Rehomer {
    /// A VM is gone.
    pub fn forget(&mut self, vm: VmId) {
        self.nodes.retain(|(known, _), _| *known != vm);
    }

    /// Where the guest nodes of a VM and their vCPUs are now. At most one gets another home: that which loses most. Whether it can is
    /// found out by trying; it rests in any case.
    pub fn decide(
        &mut self,
        settings: &RehomeSettings,
        vm: VmId,
        nodes: &[NodeView],
        now_ns: u64,
    ) -> Option<(GuestNodeId, HostNodeId, RehomeWhy)> {
        if !settings.auto {
            self.forget(vm);
            return None;
        }
        let present = |node: GuestNodeId| nodes.iter().any(|view| view.guest_node == node);
        self.nodes.retain(|(known, node), _| *known != vm || present(*node));
        let mut wanted: Option<(HostNodeId, RehomeWhy, NodeView)> = None;
        for view in nodes {
            let known = self.nodes.entry((vm, view.guest_node)).or_default();
            let Some((to, why)) = known.look(settings, view, now_ns) else { continue };
            if wanted.as_ref().is_none_or(|(_, most, _)| why.lost_ns > most.lost_ns) {
                wanted = Some((to, why, *view));
            }
        }
        let (to, why, view) = wanted?;
        self.nodes.entry((vm, view.guest_node)).or_default().rests(settings, now_ns);
        Some((view.guest_node, to, why))
    }

    /// What a guest node waits for. `None`: its vCPUs do not stay elsewhere, or its memory is there.
    pub fn waits_for(
        &self,
        settings: &RehomeSettings,
        vm: VmId,
        view: &NodeView,
        now_ns: u64,
    ) -> Option<Patience> {
        let mut known = self.nodes.get(&(vm, view.guest_node)).copied().unwrap_or_default();
        let (_, why) = known.take_in(view, now_ns)?;
        Some(match known.rest.and_then(|rest| rest.left_ns(now_ns)) {
            Some(for_ns) => Patience::Rests { for_ns },
            None if why.stayed_ns < settings.settle_ns => {
                Patience::Settles { stayed_ns: why.stayed_ns, settle_ns: settings.settle_ns }
            }
            None if !known.pays(view) => Patience::Costs(why),
            None => Patience::Due,
        })
    }

    /// A guest node has got another home for another reason, or one by itself was stopped: it rests.
    pub fn rehomed(&mut self, settings: &RehomeSettings, vm: VmId, guest_node: GuestNodeId, now_ns: u64) {
        if settings.auto {
            self.nodes.entry((vm, guest_node)).or_default().rests(settings, now_ns);
        }
    }
}

impl Remembered {
    /// Notes where its vCPUs are. Returns the new home, and why, if a re-home pays by now.
    fn look(
        &mut self,
        settings: &RehomeSettings,
        view: &NodeView,
        now_ns: u64,
    ) -> Option<(HostNodeId, RehomeWhy)> {
        let (to, why) = self.take_in(view, now_ns)?;
        let rests = self.rest.is_some_and(|rest| rest.left_ns(now_ns).is_some());
        let wanted = !rests && why.stayed_ns >= settings.settle_ns && self.pays(view);
        wanted.then_some((to, why))
    }

    fn pays(&self, view: &NodeView) -> bool {
        self.lost.0 > MARGIN * view.price()
    }

    /// Notes where its vCPUs are. Returns where they stay without their memory, and what that has cost.
    fn take_in(&mut self, view: &NodeView, now_ns: u64) -> Option<(HostNodeId, RehomeWhy)> {
        let at = view.stays.filter(|_| view.away_bytes >= PAGE);
        if self.stays.map(|(node, _)| node) != at {
            (self.stays, self.lost) = (at.map(|node| (node, now_ns)), (0.0, now_ns));
        }
        let (to, since_ns) = self.stays?;
        let seconds = now_ns.saturating_sub(self.lost.1) as f64 / 1e9;
        self.lost = (self.lost.0 + seconds * view.loss().max(0.0), now_ns.max(self.lost.1));
        let why = RehomeWhy {
            stayed_ns: now_ns.saturating_sub(since_ns),
            lost_ns: (self.lost.0 * TENTH_NS) as u64,
            price_ns: (view.price() * TENTH_NS) as u64,
            assumed: view.saving.is_none(),
        };
        Some((to, why))
    }

    fn rests(&mut self, settings: &RehomeSettings, now_ns: u64) {
        let longest_ns = LONGEST_REST_NS.max(settings.rest_ns);
        let recent = self.rest.filter(|rest| rest.is_recent(now_ns));
        self.rest.insert(recent.unwrap_or(Rest::new(settings.rest_ns, longest_ns))).begin(now_ns);
        (self.stays, self.lost) = (None, (0.0, now_ns));
    }
}
