//! Displaced memory comes home.
//!
//! A page is displaced when it is on another host node than the home of its guest node. Policies say when such pages are moved:
//!
//! | policy | when | from |
//! |---|---|---|
//! | `none` | never | |
//! | `periodic` | every 900 s | *Memory Flipping* (INFOCOM 2019), section IV.B |
//! | `amount` | 3 % of the VM's memory is displaced: 500 MB of 16 GB there | the same |
//! | `both` | whichever comes first | |
//! | `adaptive` | within a minute the move saves twice its price | here |
//!
//! `adaptive` moves the hottest displaced pages first, where [hotness can be watched](crate::hotness). Counted accesses are divided
//! among pages in proportion to their hotness, so a page without accesses is not worth its move. Where accesses are not counted,
//! every page is assumed to have the same number. A cold page then comes last and is still moved, as it may be hot later.
//!
//! What starts is a round. It goes on, a move at a time, until nothing that can be moved is displaced.
//!
//! ```text
//!   an observation ──▶ displaced, by guest node and host node ──▶ round? ──▶ the dearest of it, or the largest ──▶ a move
//!                         less what rests                                        at most the rate, and the room at home
//! ```
//!
//! | promise | by |
//! |---|---|
//! | one VM's memory takes nothing from others | the host's rate is divided evenly, and each VM has a [budget](crate::memory_budget) of its own |
//! | in `t` seconds a VM is moved at most `(t + SAVED_S) * rate / VMs`, or `LEAST` more than `t * rate / VMs` | the budget |
//! | a home keeps its [reserve](NodeMemory::reserve_kib) | what is free is looked at here and during the move |
//! | what cannot be moved is not tried for ever | it rests for a minute, and each time twice as long, up to an hour |

use crate::hotness::{Heat, Piece};
use crate::memory_budget::MemoryBudget;
use crate::memory_move::{
    HORIZON_NS, HomeCause, HomeWhy, LEAST, MARGIN, MemoryPolicy, MemoryReason, MoveMemory, NodeMemory, PAGE,
    PAGE_PRICE, TENTH_NS,
};
use crate::world::VmId;
use std::{collections::BTreeMap, sync::Arc};
use vnuma_model::{GuestNodeId, HostNodeId, LOCAL_DISTANCE, Rest};

/// What an operator may set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemorySettings {
    /// Policy of a VM until an operator sets another one.
    pub policy: MemoryPolicy,
    /// Of `periodic` and `both`, nanoseconds.
    pub period_ns: u64,
    /// Of `amount` and `both`, part of the VM's memory in thousandths.
    pub amount_permille: u64,
    /// Bytes that may be moved in a second, of all VMs together.
    pub bytes_per_s: u64,
    /// Between two observations of a VM that has a policy, nanoseconds.
    pub observe_ns: u64,
    /// CPU time that observations of a VM may take, in thousandths of a CPU.
    pub cost_permille: u64,
    /// `adaptive` has watched how hot memory is.
    pub hotness: bool,
}

impl MemorySettings {
    /// How long to wait after something that took so much CPU time.
    pub(crate) fn rest_ns(&self, cost_ns: u64) -> u64 {
        cost_ns.saturating_mul(1000) / self.cost_permille.max(1)
    }
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            policy: MemoryPolicy::None,
            period_ns: 900_000_000_000,
            amount_permille: 30,
            bytes_per_s: 256 << 20,
            observe_ns: 60_000_000_000,
            cost_permille: 1,
            hotness: true,
        }
    }
}

/// A displaced page is taken to be accessed so often in a second where nothing is counted. An assumption: it makes a move from a
/// node at distance 21 pay as soon as about 1 % of a guest node is displaced.
pub const ASSUMED_ACCESSES: f64 = 10.0;
/// The price of looking at a page, displaced or not, in tenths of a local access: 0.2 us. An assumption, on the high side.
pub const LOOK_PRICE: f64 = 20.0;
/// How long memory rests that could not be moved, at first, nanoseconds.
pub const FIRST_REST_NS: u64 = 60_000_000_000;
/// The longest such rest, nanoseconds.
pub const LONGEST_REST_NS: u64 = 3_600_000_000_000;

/// Displaced memory of a guest node that is on one host node, and can be moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Stray {
    /// The host node.
    pub node: HostNodeId,
    /// How much, most likely.
    pub bytes: u64,
    /// At most.
    pub high: u64,
    /// Its distance from the home.
    pub distance: u8,
    /// What a page saves in a second when it is at home, in tenths of a local access. `None`: accesses are not counted.
    pub saving: Option<f64>,
    /// How hot it is, if that was watched.
    pub heat: Option<Heat>,
}

/// Memory of a guest node: what it booted with, or a device of it.
#[derive(Clone, Debug, PartialEq)]
pub struct HomeArea {
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// Its home.
    pub home: HostNodeId,
    /// Its addresses: the first, and the one after the last.
    pub within: (u64, u64),
    /// Size of its pages, KiB: those of a pool, or the smallest.
    pub page_kib: u64,
    /// What is displaced.
    pub strays: Vec<Stray>,
    /// Memory of the home: of its pool of such pages, if they are of one.
    pub room: NodeMemory,
}

impl HomeArea {
    /// Size of a page, bytes.
    fn page(&self) -> u64 {
        self.page_kib.saturating_mul(1024).max(PAGE)
    }

    /// The price of moving so much of the memory at these addresses, in tenths of a local access.
    fn price(&self, bytes: u64, (start, end): (u64, u64)) -> f64 {
        let looked = (end.saturating_sub(start) / self.page()) as f64;
        (bytes / PAGE) as f64 * PAGE_PRICE + looked * LOOK_PRICE
    }
}

/// Everything that a decision is made of.
#[derive(Clone, Copy, Debug)]
pub struct HomeInput<'a> {
    /// The VM.
    pub vm: VmId,
    /// Its policy.
    pub policy: MemoryPolicy,
    /// VMs that share the host's rate, this one included.
    pub sharers: usize,
    /// Memory of the VM, bytes.
    pub memory_bytes: u64,
    /// Its memory that may come home.
    pub areas: &'a [HomeArea],
    /// A move may begin: none is under way, and its pages were looked at since.
    pub ready: bool,
    /// When its pages were looked at.
    pub now_ns: u64,
}

/// Displaced memory that can be moved now.
#[derive(Clone, Debug)]
struct Candidate<'a> {
    area: &'a HomeArea,
    stray: &'a Stray,
    /// How much of it is to be moved, most likely and at most.
    bytes: u64,
    high: u64,
    /// What a page saves in a second, tenths; of the hottest, if that is known.
    saving: f64,
    /// Its parts by heat, the hottest first, each with what a page of it saves.
    parts: Option<Vec<(Piece, f64)>>,
}

impl<'a> Candidate<'a> {
    /// `None`: for this policy there is nothing to move.
    fn new(policy: MemoryPolicy, area: &'a HomeArea, stray: &'a Stray) -> Option<Self> {
        let farther = f64::from(stray.distance) - f64::from(LOCAL_DISTANCE);
        let saving = stray.saving.unwrap_or(ASSUMED_ACCESSES * farther);
        let whole = Self { area, stray, bytes: stray.bytes, high: stray.high, saving, parts: None };
        if policy != MemoryPolicy::Adaptive {
            return Some(whole);
        }
        match stray.heat.as_ref().filter(|heat| !heat.pieces.is_empty()) {
            None => Some(whole).filter(Self::pays),
            Some(heat) if stray.saving.is_none() => {
                Some(whole).filter(Self::pays).map(|whole| whole.by(heat))
            }
            Some(heat) => whole.by(heat).those_that_pay(),
        }
    }

    /// The hottest comes first. What it saves is divided by heat where that is counted.
    fn by(self, heat: &Heat) -> Self {
        let hotter = |piece: &Piece| match heat.mean > 0.0 {
            true => self.saving * f64::from(piece.accesses) / heat.mean,
            false => 0.0,
        };
        let counted = self.stray.saving.is_some();
        let of = |piece: &Piece| (*piece, if counted { hotter(piece) } else { self.saving });
        let parts = heat.pieces.iter().map(of).collect();
        Self { saving: heat.pieces.first().map_or(0.0, hotter), parts: Some(parts), ..self }
    }

    /// Leaves out the parts that are accessed too rarely to pay. `None`: less than a page is left.
    fn those_that_pay(mut self) -> Option<Self> {
        let (parts, area) = (self.parts.as_mut()?, self.area);
        parts.retain(|(piece, saving)| {
            let pages = (piece.bytes / PAGE) as f64;
            does_pay(pages * saving, area.price(piece.bytes, piece.within))
        });
        let bytes = parts.iter().fold(0_u64, |sum, (piece, _)| sum.saturating_add(piece.bytes));
        // The upper bound shrinks in the same ratio.
        let high = u128::from(self.high) * u128::from(bytes) / u128::from(self.bytes.max(1));
        (self.bytes, self.high) = (bytes, u64::try_from(high).unwrap_or(u64::MAX).max(bytes));
        Some(self).filter(|left| left.bytes >= area.page())
    }

    fn place(&self) -> Place {
        (self.area.within.0, self.stray.node)
    }

    fn pays(&self) -> bool {
        does_pay((self.bytes / PAGE) as f64 * self.saving, self.area.price(self.bytes, self.area.within))
    }

    /// The price of moving so many bytes of it, and what that saves in a second, in tenths of a local access.
    fn figures(&self, bytes: u64) -> (f64, f64) {
        let Some(parts) = &self.parts else {
            let (moved, all) = (bytes.min(self.bytes), self.bytes as f64);
            let price = self.area.price(self.bytes, self.area.within) * moved as f64 / all;
            return (price, moved as f64 / PAGE as f64 * self.saving);
        };
        let (mut left, mut sums) = (bytes, (0.0, 0.0));
        for (piece, saving) in parts {
            let moved = piece.bytes.min(left);
            left -= moved;
            let part = moved as f64 / piece.bytes.max(1) as f64;
            sums.0 += self.area.price(piece.bytes, piece.within) * part;
            sums.1 += moved as f64 / PAGE as f64 * saving;
        }
        sums
    }
}

/// Does a move pay that costs `price` and saves `saving` in a second?
fn does_pay(saving: f64, price: f64) -> bool {
    saving * (HORIZON_NS as f64 / 1e9) > MARGIN * price
}

/// Memory of a guest node, by its first address, and the host node that it is on.
type Place = (u64, HostNodeId);

/// What is remembered of a VM.
#[derive(Clone, Debug)]
pub struct Remembered {
    budget: MemoryBudget,
    /// Until when the budget was filled.
    counted_ns: u64,
    /// When the last round began or, before the first one, the policy.
    round_ns: u64,
    /// What made the present round begin.
    round: Option<HomeCause>,
    /// Rests of memory that could not be moved.
    rests: BTreeMap<Place, Rest>,
}

/// Decides which memory comes home.
#[derive(Clone, Debug, Default)]
pub struct Repatriator {
    vms: BTreeMap<VmId, Remembered>,
}

impl Repatriator {
    /// A VM is gone, or has another policy.
    pub fn forget(&mut self, vm: VmId) {
        self.vms.remove(&vm);
    }

    /// Is its memory being brought home, with all the moves that this takes?
    pub fn in_round(&self, vm: VmId) -> bool {
        self.vms.get(&vm).is_some_and(|known| known.round.is_some())
    }

    /// Until when memory that could not be moved rests; the longest of it.
    pub fn rests_until_ns(&self, vm: VmId, now_ns: u64) -> Option<u64> {
        let rests = self.vms.get(&vm)?.rests.values().map(Rest::until_ns);
        rests.filter(|until_ns| *until_ns > now_ns).max()
    }

    /// What follows from an observation of a VM: at most one move, and what is to be remembered if it is made.
    pub fn weigh(
        &self,
        settings: &MemorySettings,
        input: &HomeInput<'_>,
    ) -> (Option<MoveMemory>, Option<Remembered>) {
        if input.policy == MemoryPolicy::None {
            return (None, None);
        }
        let now_ns = input.now_ns;
        let fresh = || Remembered {
            budget: MemoryBudget::default(),
            counted_ns: now_ns,
            round_ns: now_ns,
            round: None,
            rests: BTreeMap::new(),
        };
        let mut known = self.vms.get(&input.vm).cloned().unwrap_or_else(fresh);
        let order = known.decide(settings, input);
        (order, Some(known))
    }

    /// Remembers what followed from an observation.
    pub fn remember(&mut self, vm: VmId, next: Option<Remembered>) {
        match next {
            Some(next) => drop(self.vms.insert(vm, next)),
            None => self.forget(vm),
        }
    }

    /// A move has ended, after which so many bytes had moved, and so many had not.
    pub fn ended(&mut self, vm: VmId, order: &MoveMemory, moved: u64, stayed: u64, now_ns: u64) {
        let (Some(known), MemoryReason::Home(_)) = (self.vms.get_mut(&vm), &order.why) else { return };
        let start = order.within.map_or(0, |(start, _)| start);
        let place = (start, order.from);
        if moved == 0 || stayed > moved {
            known.rest(place, now_ns);
        } else {
            known.rests.remove(&place);
        }
    }
}

impl Remembered {
    fn decide(&mut self, settings: &MemorySettings, input: &HomeInput<'_>) -> Option<MoveMemory> {
        let (known, now_ns) = (self, input.now_ns);
        // A page moves as a whole, so that at least one can be saved up for.
        let page = input.areas.iter().map(HomeArea::page).max().unwrap_or(PAGE);
        let elapsed_ns = now_ns.saturating_sub(known.counted_ns);
        known.budget.earn((settings.bytes_per_s, input.sharers), elapsed_ns, page);
        known.counted_ns = known.counted_ns.max(now_ns);
        let strays = known.strays(input);
        let displaced_bytes = strays.iter().fold(0_u64, |sum, (_, stray)| sum.saturating_add(stray.bytes));
        let of = |(area, stray)| Candidate::new(input.policy, area, stray);
        let mut candidates: Vec<Candidate<'_>> = strays.into_iter().filter_map(of).collect();
        if candidates.is_empty() {
            known.round = None;
            return None;
        }
        if known.round.is_none() {
            known.round = known.cause(settings, input, displaced_bytes);
            known.round_ns = if known.round.is_some() { now_ns } else { known.round_ns };
        }
        let cause = known.round.filter(|_| input.ready)?;
        // The dearest first, then the largest.
        candidates.sort_by(|a, b| {
            let by_saving = b.saving.total_cmp(&a.saving).then(b.bytes.cmp(&a.bytes));
            by_saving.then(a.place().cmp(&b.place()))
        });
        let mut moves = candidates.iter().filter_map(|one| known.order(input.policy, cause, one, now_ns));
        let mut order = moves.next()?;
        if let MemoryReason::Home(why) = &mut order.why {
            why.displaced_bytes = displaced_bytes;
        }
        Some(order)
    }

    /// Displaced memory that does not rest.
    fn strays<'a>(&self, input: &HomeInput<'a>) -> Vec<(&'a HomeArea, &'a Stray)> {
        let rests = |place| self.rests.get(&place).is_some_and(|rest| rest.left_ns(input.now_ns).is_some());
        let all = input.areas.iter().flat_map(|area| area.strays.iter().map(move |stray| (area, stray)));
        let here =
            |(area, stray): &(&HomeArea, &Stray)| stray.bytes >= area.page() && stray.node != area.home;
        all.filter(here).filter(|(area, stray)| !rests((area.within.0, stray.node))).collect()
    }

    /// What makes a round begin, if one does.
    fn cause(
        &self,
        settings: &MemorySettings,
        input: &HomeInput<'_>,
        displaced_bytes: u64,
    ) -> Option<HomeCause> {
        let over = input.now_ns >= self.round_ns.saturating_add(settings.period_ns);
        let amount = u128::from(input.memory_bytes) * u128::from(settings.amount_permille) / 1000;
        let period = || over.then_some(HomeCause::Period);
        let amount = || (u128::from(displaced_bytes) >= amount.max(1)).then_some(HomeCause::Amount);
        match input.policy {
            MemoryPolicy::None => None,
            MemoryPolicy::Periodic => period(),
            MemoryPolicy::Amount => amount(),
            MemoryPolicy::Both => amount().or_else(period),
            MemoryPolicy::Adaptive => Some(HomeCause::Pays),
        }
    }

    fn rest(&mut self, place: Place, now_ns: u64) {
        let rest = self.rests.entry(place).or_insert(Rest::new(FIRST_REST_NS, LONGEST_REST_NS));
        rest.begin(now_ns);
    }

    /// `None`: there is no room at home, and it rests; or the rate does not allow it yet.
    fn order(
        &mut self,
        policy: MemoryPolicy,
        cause: HomeCause,
        one: &Candidate<'_>,
        now_ns: u64,
    ) -> Option<MoveMemory> {
        let (stray, area) = (one.stray, one.area);
        let most = one.high.max(one.bytes);
        let page = area.page();
        let least = LEAST.max(page).min(most);
        let room = area.room.available_of(area.page_kib);
        if room < least {
            self.rest(one.place(), now_ns);
            return None;
        }
        let bytes = most.min(self.budget.left()).min(room) / page * page;
        if bytes < least / page * page || bytes == 0 {
            return None;
        }
        self.budget.spend(bytes);
        let (price, saving) = one.figures(bytes);
        let why = HomeWhy {
            policy,
            cause,
            guest_node: area.guest_node,
            displaced_bytes: 0,
            price_ns: price * TENTH_NS,
            saving_ns_per_s: saving * TENTH_NS,
            assumed: stray.saving.is_none(),
            hottest_first: one.parts.is_some(),
        };
        let parts = one.parts.as_ref().map(|parts| parts.iter().map(|(piece, _)| piece.within));
        Some(MoveMemory {
            from: stray.node,
            to: area.home,
            bytes,
            page_kib: area.page_kib,
            reserve_kib: area.room.reserve_of(area.page_kib),
            within: Some(area.within),
            parts: parts.map(Arc::from_iter),
            why: MemoryReason::Home(why),
        })
    }
}
