//! The thread of a shard: faults, frames and timers become events, and commands are carried out.

use crate::{
    Config, NodeError,
    copies::Copies,
    happening::{Happening, protest},
    held::Held,
    lanes::{Incoming, Peers},
    pages::{Contents, Outgoing, Pages, Sabotage},
    saving::{Means, Saving},
    shared::Shared,
    stats::{Phase, Stats, Watch},
    timers::Timers,
    touches::Touches,
};
use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{self as wire, Delta};
use vnuma_coherence::{
    Access, Command, Cut, Cuts, Epoch, Event, Frame, Managers, Message, Node as Protocol, NodeId, NodeSet,
    Notice, Options, PageId, Protest, Purpose,
};
use vnuma_dsm_pager::{Access as Right, Fault, Follower, PageError, PageState, Region};
use vnuma_dsm_transport::Lane;

/// Between two looks at the limits of the lanes.
const TICK: Duration = Duration::from_millis(100);
/// Until a page that is pinned is looked at again.
const LATER_NS: u64 = 200_000;
/// Threads whose last page is remembered.
const THREADS: usize = 4096;
/// Frames of the next membership whose contents are kept until it is in force.
const STASH: usize = 256;

/// A thread waits for a page.
#[derive(Debug)]
struct Pending {
    since: Instant,
    write: bool,
}

#[derive(Debug)]
pub(crate) struct Shard {
    index: usize,
    protocol: Protocol,
    region: Arc<Region>,
    pages: Pages,
    peers: Peers,
    timers: Timers,
    shared: Arc<Shared>,
    stats: Stats,
    touches: Touches,
    watch: Watch,
    begin: Instant,
    spin: Duration,
    place: Follower,
    /// Nodes that the protocol suspects, one bit for each.
    suspected: u64,
    members: NodeSet,
    pending: HashMap<u64, Pending>,
    /// The page that each thread waited for last.
    last: HashMap<i32, u64>,
    managers: Managers,
    /// To whom this node sent its request for a page, and whether it wants to write.
    asked: HashMap<PageId, (NodeId, bool)>,
    faults: Vec<Fault>,
    /// Faults on pages that device code has pinned and other nodes want, each with when it came.
    aside: Vec<(Instant, Fault)>,
    inbox: Vec<Incoming>,
    held: Held,
    saving: Saving,
    commands: Vec<Command>,
    outgoing: Outgoing,
    /// Frames that no thread waits for: they are sent after all others.
    late: Vec<(NodeId, Frame)>,
    /// The grant that is being looked at, until its contents were used.
    current: Option<(PageId, Contents)>,
    /// Field and page of the message that is being looked at.
    named: Option<(&'static str, PageId)>,
    /// Contents of frames that the protocol looks at once the membership of this number is in force.
    stash: Vec<(Epoch, PageId, Contents)>,
    /// Mapped by the command before, which wakes.
    woken: Option<PageId>,
    ticked: Instant,
    halted: bool,
    /// Pages of a halted shard that can still be accessed, because device code holds them.
    held_back: Vec<u64>,
    /// What was done before is forgotten.
    forgot: bool,
    /// [`Options::direct_acks`].
    direct_acks: bool,
}

impl Shard {
    pub fn new(
        config: &Config,
        index: usize,
        region: Arc<Region>,
        lanes: BTreeMap<u8, Lane>,
        shared: Arc<Shared>,
        copies: Arc<Copies>,
    ) -> Result<Self, NodeError> {
        let members = config.members;
        let now = Instant::now();
        // The pages behind a stripe are another shard's.
        let options = Options { prefetch_within: region.stripe_pages(), ..config.options };
        Ok(Self {
            index,
            protocol: Protocol::new(NodeId(config.node), members, config.managers.clone(), options),
            pages: Pages::new(Arc::clone(&region), config.sabotage, config.pin_limit),
            region,
            peers: Peers::new(lanes).map_err(|source| NodeError::System { call: "epoll_create", source })?,
            timers: Timers::new()?,
            shared,
            stats: Stats::default(),
            touches: Touches::new(config.node, config.list_touches),
            watch: Watch::new(),
            begin: now,
            spin: config.spin,
            place: Follower::new(config.placement),
            suspected: 0,
            members,
            pending: HashMap::new(),
            last: HashMap::new(),
            managers: config.managers.clone(),
            asked: HashMap::new(),
            faults: Vec::new(),
            aside: Vec::new(),
            inbox: Vec::new(),
            held: Held::default(),
            saving: Saving::new(
                Cuts::new(NodeId(config.node), members, config.managers.clone()),
                copies,
                members,
            ),
            commands: Vec::new(),
            outgoing: Outgoing::new(),
            late: Vec::new(),
            current: None,
            named: None,
            stash: Vec::new(),
            woken: None,
            ticked: now,
            halted: false,
            held_back: Vec::new(),
            forgot: false,
            direct_acks: options.direct_acks,
        })
    }

    pub fn run(mut self) -> Stats {
        if catch_unwind(AssertUnwindSafe(|| self.serve())).is_err() {
            // The message of the panic was printed by then.
            let error = format!("the thread of shard {} panicked", self.index);
            self.shared.tell(Happening::Failed { error });
            self.shared.halt();
        }
        // A thread that waits for a page of this shard gets an error, whatever went wrong.
        if !self.shared.is_leaving() && catch_unwind(AssertUnwindSafe(|| self.refuse())).is_err() {
            eprintln!("the thread of shard {} panicked twice: threads would wait for ever", self.index);
            std::process::abort();
        }
        self.watch.turn(Phase::Wait, &mut self.stats.phases);
        self.peers.leave(self.protocol.view().epoch.0);
        self.stats.touches = self.touches.list;
        self.stats
    }

    fn serve(&mut self) {
        while !self.shared.is_leaving() {
            if let Err(error) = self.turn() {
                self.shared.tell(Happening::Failed { error: error.to_string() });
                if self.halted {
                    return;
                }
                self.shared.halt();
            }
            if self.shared.is_halted() && !self.halted {
                self.halt();
            }
            self.poison_held_back();
        }
    }

    /// Does nothing but answer faults with errors, after this shard has failed.
    fn refuse(&mut self) {
        self.halt();
        let (region, shared) = (Arc::clone(&self.region), Arc::clone(&self.shared));
        let wake = shared.wake_of(self.index);
        let others = [std::os::fd::AsFd::as_fd(wake), region.shard_fd(self.index)];
        while !shared.is_leaving() {
            self.poison_held_back();
            let outcome = self.peers.wait(&others, TICK, Duration::ZERO).map(|_| wake.read());
            let refused = self.take_faults();
            if let (Err(_), _) | (_, Err(_)) = (outcome, refused) {
                // Again and again, without a pause: a thread may still wait.
                std::thread::sleep(TICK);
            }
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Waits for something, and does what is to be done about all that is ready.
    fn turn(&mut self) -> Result<(), NodeError> {
        self.timers.arm(self.now())?;
        self.watch.turn(Phase::Wait, &mut self.stats.phases);
        let (region, shared) = (Arc::clone(&self.region), Arc::clone(&self.shared));
        let wake = shared.wake_of(self.index);
        let mut others = vec![std::os::fd::AsFd::as_fd(wake), self.timers.fd()];
        if self.peers.have_room() {
            others.push(region.shard_fd(self.index));
        }
        let late = self.pages.sabotage != Sabotage::None && self.pages.settle_late()?;
        // There is no event when device code lets go of a page.
        let waits = !self.held.is_empty() || !self.aside.is_empty() || !self.held_back.is_empty();
        let timeout = if late || waits { Duration::from_millis(1) } else { TICK };
        let poll = |source| NodeError::System { call: "poll", source };
        let ready = self.peers.wait(&others, timeout, self.spin).map_err(poll)?;
        if self.shared.is_forgotten() && !std::mem::replace(&mut self.forgot, true) {
            self.stats = Stats::default();
            self.touches.forget();
        }
        if ready.others.contains(&0) {
            let _ = wake.read();
            self.suspect()?;
        }
        if ready.others.contains(&2) {
            self.take_faults()?;
            self.peers.give_on(&self.shared);
        }
        if !ready.lanes.is_empty() {
            self.take_frames(&ready.lanes)?;
        }
        let now = self.now();
        while let Some(page) = self.timers.due(now) {
            self.take_timer(now, page)?;
        }
        if !self.held.is_empty() {
            self.take_held()?;
        }
        if !self.aside.is_empty() {
            self.take_aside()?;
        }
        if self.protocol.needs_flush() {
            self.step(Event::Flush)?;
        }
        self.go_on_with_cut()?;
        self.peers.give_on(&self.shared);
        self.send_late();
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            self.peers.tick(self.protocol.view().epoch.0, &self.shared);
            if !self.pending.is_empty() {
                self.peers.suspect_who_left(&self.shared);
            }
        }
        Ok(())
    }

    /// Another node looks for the owner elsewhere without it, which takes longer and is right as well.
    fn send_late(&mut self) {
        if self.late.is_empty() {
            return;
        }
        self.phase(Phase::Network);
        for (to, frame) in self.late.drain(..) {
            self.peers.send(to, frame, wire::Contents::None, &mut self.stats, &self.shared);
        }
        self.peers.give_on(&self.shared);
    }

    /// Tells the protocol whom this or another shard suspects.
    fn suspect(&mut self) -> Result<(), NodeError> {
        let new = NodeSet::from_bits(self.shared.suspects() & !self.suspected);
        self.suspected |= new.bits();
        new.iter().try_for_each(|node| self.step(Event::Suspect { node }))
    }

    fn take_faults(&mut self) -> Result<(), NodeError> {
        self.watch.turn(Phase::Pages, &mut self.stats.phases);
        // If this fails or panics in the middle, those that are left are answered later.
        let read = self.region.read_faults(self.index, &mut self.faults);
        self.faults.reverse();
        while let Some(fault) = self.faults.pop() {
            if self.halted {
                self.held_back.push(fault.page);
                continue;
            }
            let write = fault.access == Right::Write;
            if let Entry::Vacant(entry) = self.pending.entry(fault.page) {
                entry.insert(Pending { since: Instant::now(), write });
                *self.stats.pages.entry(fault.page).or_default() += 1;
            }
            let panics = matches!(self.pages.sabotage, Sabotage::Panic { page } if page == fault.page);
            assert!(!panics, "a panic on purpose");
            self.place.saw(fault.thread);
            self.progressed(fault.thread, fault.page)?;
            if self.must_wait(&fault) {
                self.aside.push((Instant::now(), fault));
                continue;
            }
            self.step(Event::Fault { page: PageId(fault.page), write })?;
        }
        read?;
        Ok(())
    }

    /// The protocol would give the page away, and device code has it.
    fn must_wait(&self, fault: &Fault) -> bool {
        is_pinned(&self.region, PageId(fault.page)) && self.protocol.is_wanted(PageId(fault.page))
    }

    /// Takes faults that waited for device code to let go of a page, or that have waited for as long as it may keep one.
    fn take_aside(&mut self) -> Result<(), NodeError> {
        for (since, fault) in std::mem::take(&mut self.aside) {
            if since.elapsed() < self.pages.pin_limit && self.must_wait(&fault) {
                self.aside.push((since, fault));
            } else {
                self.faults.push(fault);
            }
        }
        while let Some(fault) = self.faults.pop() {
            self.step(Event::Fault { page: PageId(fault.page), write: fault.access == Right::Write })?;
        }
        Ok(())
    }

    /// A thread faults on a page. So it has used the one that it waited for before, or waits for two at once, and then that one
    /// would be held for nothing.
    fn progressed(&mut self, thread: i32, page: u64) -> Result<(), NodeError> {
        if self.last.len() >= THREADS {
            self.last.clear();
        }
        match self.last.insert(thread, page) {
            Some(before) if before != page && !is_pinned(&self.region, PageId(before)) => {
                self.step(Event::Progress { page: PageId(before) })
            }
            _ => Ok(()),
        }
    }

    fn take_frames(&mut self, places: &[usize]) -> Result<(), NodeError> {
        self.watch.turn(Phase::Network, &mut self.stats.phases);
        let mut inbox = std::mem::take(&mut self.inbox);
        self.peers.receive(places, &mut inbox, &self.shared);
        for incoming in inbox.drain(..) {
            if self.held.is_full_of(incoming.from) {
                self.protest(incoming.from, "more frames than can wait for a pinned page".to_owned());
                continue;
            }
            let region = &self.region;
            if let Some(incoming) = self.held.pass(incoming, |page| is_pinned(region, page)) {
                self.take_frame(incoming)?;
            }
        }
        self.inbox = inbox;
        Ok(())
    }

    /// Takes what waited for device code to let go of a page.
    fn take_held(&mut self) -> Result<(), NodeError> {
        let region = &self.region;
        let ready = self.held.ready(self.pages.pin_limit, |page| is_pinned(region, page));
        ready.into_iter().try_for_each(|incoming| self.take_frame(incoming))
    }

    /// The time of a page has come. A copy that device code holds is looked at again a little later.
    fn take_timer(&mut self, now: u64, page: u64) -> Result<(), NodeError> {
        if is_pinned(&self.region, PageId(page)) {
            self.timers.set(page, now + LATER_NS);
            return Ok(());
        }
        self.step(Event::Timer { page: PageId(page) })
    }

    fn take_frame(&mut self, Incoming { from, frame, contents }: Incoming) -> Result<(), NodeError> {
        let inside =
            |page: PageId| page.0 < self.region.pages() && self.region.shard_of(page.0) == self.index;
        let foreign = frame.message.pages().find(|(_, page)| !inside(*page));
        if let Some((field, page)) = foreign {
            let text = format!("{field} {}: no page of this connection", page.0);
            self.protest(from, text);
            return Ok(());
        }
        if let Message::Cut(message) = frame.message {
            self.take_cut(from, &frame, message, contents);
            return Ok(());
        }
        self.named = frame.message.pages().next();
        if let Message::Grant(grant) = &frame.message
            && grant.to == self.protocol.id()
            && let Some((asked, write)) = self.asked.remove(&grant.page)
        {
            let manager = self.managers.manager(grant.page, self.members);
            self.stats.found(write || grant.owner, manager, asked, grant.from);
        }
        let (epoch, early) = (frame.epoch, self.protocol.early());
        if let (Message::Grant(grant), false) = (&frame.message, matches!(contents, Contents::None)) {
            self.current = Some((grant.page, contents));
        }
        self.step(Event::Receive { from, frame })?;
        self.named = None;
        if let Some((page, contents)) = self.current.take()
            && self.protocol.early() > early
        {
            // Those of a membership that did not come into force count for nothing.
            self.stash.retain(|(of, ..)| *of == epoch);
            if self.stash.len() < STASH {
                self.stash.push((epoch, page, contents));
            }
        }
        Ok(())
    }

    /// Begins the cut that the program wants, and gives on what is to be kept.
    fn go_on_with_cut(&mut self) -> Result<(), NodeError> {
        if let Some(number) = self.saving.due() {
            let mut commands = std::mem::take(&mut self.commands);
            let owned = self.protocol.owned_for_cut(&mut commands);
            let outcome = commands.drain(..).try_for_each(|command| self.carry_out(command));
            self.commands = commands;
            outcome?;
            self.saving.begin(number, owned);
        }
        if !self.saving.is_busy() {
            return Ok(());
        }
        let (own, epoch) = (self.protocol.id(), self.protocol.view().epoch);
        let Self { region, peers, stats, shared, .. } = self;
        self.saving.go_on(&mut Means { own, epoch, region, peers, stats, shared })
    }

    fn take_cut(&mut self, from: NodeId, frame: &Frame, message: Cut, contents: Contents) {
        if frame.epoch != self.protocol.view().epoch || !self.members.contains(from) {
            return;
        }
        let content = match contents {
            Contents::Page(page) => Some(page),
            Contents::None | Contents::Delta(_) => None,
        };
        self.saving.receive(from, message, content);
    }

    /// What came for a page: now or, if the protocol looks at the frame later, before.
    fn contents_of(&mut self, page: PageId) -> Contents {
        if self.current.as_ref().is_some_and(|(of, _)| *of == page) {
            return self.current.take().map_or(Contents::None, |(_, contents)| contents);
        }
        let now = self.protocol.view().epoch;
        match self.stash.iter().position(|(epoch, of, _)| (*epoch, *of) == (now, page)) {
            Some(index) => self.stash.remove(index).2,
            None => Contents::None,
        }
    }

    /// One event, and all that the protocol wants done about it. A shard that has halted does nothing more: what it had put off
    /// would give pages back to threads whose accesses are to fail.
    fn step(&mut self, event: Event) -> Result<(), NodeError> {
        if self.halted {
            return Ok(());
        }
        self.watch.turn(Phase::Protocol, &mut self.stats.phases);
        let mut commands = std::mem::take(&mut self.commands);
        self.protocol.step(self.now(), event, &mut commands);
        self.woken = None;
        let made_up = match self.pages.sabotage {
            Sabotage::SkipInvalidation => {
                skip_invalidations(self.protocol.id(), self.direct_acks, &mut commands)
            }
            _ => Vec::new(),
        };
        let outcome = commands.drain(..).try_for_each(|command| self.carry_out(command));
        self.commands = commands;
        outcome?;
        made_up.into_iter().try_for_each(|(from, frame)| self.step(Event::Receive { from, frame }))
    }

    fn phase(&mut self, phase: Phase) {
        self.watch.turn(phase, &mut self.stats.phases);
    }

    fn carry_out(&mut self, command: Command) -> Result<(), NodeError> {
        match command {
            Command::Send { to, frame } if matches!(frame.message, Message::OwnerIs { .. }) => {
                self.late.push((to, frame));
            }
            Command::Send { to, frame } => {
                self.phase(Phase::Network);
                if let Message::Request(request) = frame.message
                    && request.requester == self.protocol.id()
                    && request.purpose != Purpose::Prefetch
                {
                    self.asked.insert(request.page, (to, request.purpose == Purpose::Write));
                }
                self.peers.send(to, frame, wire::Contents::None, &mut self.stats, &self.shared);
            }
            Command::SendPage { to, frame, page, access } => self.send_page(to, frame, page, access)?,
            Command::Relay { to, frame } => self.relay(to, frame),
            Command::Install { page, access, payload: _, twin } => {
                self.phase(Phase::Pages);
                let contents = self.contents_of(page);
                self.pages.install(page.0, access, &contents, twin)?;
                if access != Access::None {
                    self.woken = Some(page);
                }
            }
            Command::SetAccess { page, access, twin } => {
                self.phase(Phase::Pages);
                self.stats.dropped += u64::from(access == Access::None);
                self.pages.set_access(page.0, access, twin)?;
                if access != Access::None {
                    self.woken = Some(page);
                }
            }
            Command::Wake { page } => self.wake(page)?,
            Command::SetTimer { page, at_ns } => self.timers.set(page.0, at_ns),
            Command::Poison { page } => {
                self.pending.remove(&page.0);
                self.shared.tell(Happening::PageLost { page: page.0 });
                self.pages.poison(page.0)?;
            }
            Command::Stop { reason } => {
                self.shared.tell(Happening::Stopped { reason });
                self.shared.halt();
            }
            Command::Members { members } => {
                let lost = self.members.minus(members);
                self.members = members;
                // Each shard agrees on its own. What one excludes, the others do not go on with.
                lost.iter().for_each(|node| self.shared.suspect(node.0));
                self.saving.end("a member was lost");
                self.shared.agreed(self.index, members);
            }
            Command::Protest { peer, reason } => {
                let (field, page) = self.named.unwrap_or(("message", PageId(0)));
                let text = format!("{field} {}: {}", page.0, protest(reason));
                match reason {
                    // The protocol tells an excluded node so if it does not know yet.
                    Protest::NoMember if !self.members.contains(peer) => {}
                    _ => self.protest(peer, text),
                }
            }
        }
        Ok(())
    }

    fn protest(&mut self, peer: NodeId, field: String) {
        self.shared.tell(Happening::Protested { peer: peer.0, field });
        self.peers.cut(peer);
        self.shared.suspect(peer.0);
    }

    fn send_page(&mut self, to: NodeId, frame: Frame, page: PageId, access: Access) -> Result<(), NodeError> {
        let Message::Grant(grant) = &frame.message else { return Ok(()) };
        let (owner, payload) = (grant.owner, grant.payload);
        self.phase(Phase::Pages);
        let payload = self.pages.read(page.0, access, payload, &mut self.outgoing)?;
        let pages = &self.pages;
        self.touches.gave(page.0, || pages.changed(page.0))?;
        if owner {
            self.pages.forget_twin(page.0);
        }
        self.phase(Phase::Network);
        self.peers.send_page(to, frame, payload, &self.outgoing, &mut self.stats, &self.shared);
        Ok(())
    }

    /// Passes a grant on, with what came beside it.
    fn relay(&mut self, to: NodeId, frame: Frame) {
        let Message::Grant(grant) = &frame.message else { return };
        self.phase(Phase::Network);
        let contents = self.contents_of(grant.page);
        let (peers, stats, shared) = (&mut self.peers, &mut self.stats, &self.shared);
        match &contents {
            Contents::None => peers.send(to, frame, wire::Contents::None, stats, shared),
            Contents::Page(page) => peers.send(to, frame, wire::Contents::Page(page), stats, shared),
            Contents::Delta(bytes) => {
                if let Ok(delta) = Delta::decode(bytes) {
                    peers.send(to, frame, wire::Contents::Delta(delta), stats, shared);
                }
            }
        }
    }

    fn wake(&mut self, page: PageId) -> Result<(), NodeError> {
        self.phase(Phase::Pages);
        if self.woken != Some(page) {
            self.region.wake(page.0)?;
        }
        if !self.protocol.waits(page)
            && let Some(Pending { since, write }) = self.pending.remove(&page.0)
        {
            let faults = if write { &mut self.stats.writes } else { &mut self.stats.reads };
            faults.add(since.elapsed());
            self.touches.served(page.0, write, since)?;
        }
        Ok(())
    }

    /// No access succeeds any more, and none waits.
    fn halt(&mut self) {
        self.halted = true;
        self.saving.end("this node has stopped");
        self.peers.keep(NodeSet::EMPTY);
        let own = |page: &u64| self.region.shard_of(*page) == self.index;
        let mapped = |page: &u64| self.region.state(*page).is_ok_and(|state| state != PageState::Invalid);
        let mut pages: Vec<u64> = (0..self.region.pages()).filter(own).filter(mapped).collect();
        pages.extend(self.pending.drain().map(|(page, _)| page));
        // Read together with one that was an error. The kernel does not tell of them again.
        pages.extend(self.faults.drain(..).map(|fault| fault.page));
        pages.extend(self.aside.drain(..).map(|(_, fault)| fault.page));
        self.held_back = pages;
        self.poison_held_back();
    }

    /// Takes from the guest what it can still access. A page that device code holds has to wait until that lets go of it.
    fn poison_held_back(&mut self) {
        for page in std::mem::take(&mut self.held_back) {
            match self.pages.poison_unless_pinned(page) {
                Ok(()) => {}
                Err(NodeError::Page(PageError::Pinned { .. })) => self.held_back.push(page),
                Err(error) => self.shared.tell(Happening::Failed { error: error.to_string() }),
            }
        }
    }
}

/// Takes invalidations out, and makes the acknowledgements up that come to this node ([`Sabotage::SkipInvalidation`]). Another node
/// that would wait for some is told that there are no copies.
fn skip_invalidations(own: NodeId, direct: bool, commands: &mut Vec<Command>) -> Vec<(NodeId, Frame)> {
    let mut made_up = Vec::new();
    let mut skip = |to: NodeId, epoch: Epoch, notice: &Notice| match *notice {
        Notice::Invalidate { page, owner } => {
            if !direct || owner == own {
                let message = Message::Notices(vec![Notice::Invalidated { page }]);
                made_up.push((to, Frame { epoch, message }));
            }
            false
        }
        Notice::Invalidated { .. } => true,
    };
    commands.retain_mut(|command| match command {
        Command::Send { frame: Frame { message: Message::Grant(grant), .. }, .. }
        | Command::SendPage { frame: Frame { message: Message::Grant(grant), .. }, .. } => {
            grant.copies = NodeSet::EMPTY;
            true
        }
        Command::Send { to, frame: Frame { epoch, message: Message::Notices(notices) } } => {
            notices.retain(|notice| skip(*to, *epoch, notice));
            !notices.is_empty()
        }
        _ => true,
    });
    made_up
}

/// A page that does not exist is not pinned.
fn is_pinned(region: &Region, page: PageId) -> bool {
    region.is_pinned(page.0).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_dsm_pager::{Cause, PAGE_SIZE, PagerError};

    const PAGES: u64 = 8;

    /// A shard without peers, or none where this process may not use userfaultfd.
    fn alone() -> Option<Shard> {
        let region = match Region::create(PAGES as usize * PAGE_SIZE, vnuma_dsm_pager::Options::default()) {
            Ok(region) => Arc::new(region),
            Err(error @ (PagerError::Denied { .. } | PagerError::Kernel { .. })) => {
                eprintln!("skipped: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let config = Config::new(0, 1, PAGES);
        let shared = Shared::new(1, config.members, Box::new(|_| {})).expect("shared");
        let copies = Copies::new(NodeId(0), config.members, config.managers.clone());
        let shard = Shard::new(&config, 0, region, BTreeMap::new(), Arc::new(shared), Arc::new(copies));
        Some(shard.expect("a shard"))
    }

    /// The first of several faults is an error. The kernel does not tell of the others again.
    #[test]
    fn faults_that_were_read_before_an_error_are_refused() {
        let Some(mut shard) = alone().filter(|shard| shard.region.features().poison) else { return };
        let fault = |page| Fault { page, access: Right::Read, cause: Cause::Missing, thread: 1 };
        shard.faults.extend([fault(2), fault(5)]);
        shard.halt();
        let states = [2, 4, 5].map(|page| shard.region.state(page).expect("a page"));
        assert_eq!(states, [PageState::Poisoned, PageState::Invalid, PageState::Poisoned]);
    }
}
