//! Nodes, their memory and a network between them, in one thread. Tests, the model and the simulation share it.
//!
//! A page is one number here: how many writes it has seen. The checker looks at the memory only, never at the protocol.
#![allow(dead_code, reason = "each test program uses another part")]

use std::collections::VecDeque;
use vnuma_coherence::{
    Access, Command, Event, Frame, Grant, Managers, Message, Node, NodeId, NodeSet, Notice, Options, PageId,
    Payload, Protest,
};

/// What travels beside a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Data {
    Page(u64),
    /// Content that it starts from, content that it leads to.
    Delta(u64, u64),
}

/// A message on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Packet {
    pub frame: Frame,
    pub data: Option<Data>,
}

/// A page in the memory of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cell {
    pub access: Access,
    pub value: u64,
    pub twin: Option<u64>,
    pub poisoned: bool,
    /// Threads were woken since the last look.
    pub woken: bool,
    /// The time of a timer that was set.
    pub timer: Option<u64>,
}

/// A fault of the shell or the protocol, put in on purpose: the checker must find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Broken {
    #[default]
    No,
    /// A node acknowledges invalidations and keeps its copy.
    KeepCopy,
    /// An invalidation is not sent, and its acknowledgement is made up.
    SkipInvalidation,
    /// A writer is not told who still has a copy, and does not wait.
    ForgetCopies,
    /// The owner reads the page before it takes the access of local threads away.
    CopyThenDrop,
    /// A message is lost.
    LoseGrants,
    /// A difference starts from whatever the sender has, not from what the receiver has.
    StaleTwin,
    /// Threads are not woken.
    LoseWakes,
    /// The hold time never ends, neither by the clock nor because a thread goes on.
    StopClock,
    /// All pages are said to be lost when a node is.
    LoseAll,
}

/// All nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cluster {
    pub nodes: Vec<Node>,
    /// By node, then by page.
    pub memory: Vec<Vec<Cell>>,
    /// By sender and receiver: `from * nodes + to`.
    pub network: Vec<VecDeque<Packet>>,
    /// What was wrong: read by the checker.
    pub wrong: Vec<String>,
    pub broken: Broken,
    /// Accesses that are not taken away yet, for [`Broken::CopyThenDrop`].
    pub late: Vec<(usize, usize, Access)>,
    /// Nodes that were killed.
    pub dead: Vec<bool>,
    /// Nodes that were killed, have stopped or were ever suspected: what only they have may get lost.
    pub doubtful: NodeSet,
    /// Pages that a node had when it was killed or stopped, or that were on their way to or from a doubtful node while others were to
    /// drop their copies. Others may still do so because of what was sent.
    pub taken_along: Vec<bool>,
    /// Pages that may get lost: for a moment nobody had them but doubtful nodes.
    pub excused: Vec<bool>,
    pub sent: u64,
    pub sent_data: u64,
}

/// Pages spread evenly over nodes, in ranges.
pub fn managers(nodes: usize, pages: u64) -> Managers {
    let each = pages.div_ceil(nodes as u64);
    let mut left = pages;
    let mut ranges = Vec::new();
    for node in 0..nodes {
        let count = each.min(left);
        if count > 0 {
            ranges.push((count, NodeId(node as u8)));
        }
        left -= count;
    }
    Managers::new(&ranges).unwrap()
}

impl Cluster {
    pub fn new(count: usize, managers: &Managers, options: Options) -> Self {
        let members = NodeSet::first(count);
        let node = |id| Node::new(NodeId(id as u8), members, managers.clone(), options);
        Self {
            nodes: (0..count).map(node).collect(),
            memory: vec![vec![Cell::default(); managers.pages() as usize]; count],
            network: vec![VecDeque::new(); count * count],
            wrong: Vec::new(),
            broken: Broken::No,
            late: Vec::new(),
            dead: vec![false; count],
            doubtful: NodeSet::EMPTY,
            taken_along: vec![false; managers.pages() as usize],
            excused: vec![false; managers.pages() as usize],
            sent: 0,
            sent_data: 0,
        }
    }

    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Gives an event to a node and carries out what it wants. Returns the commands, for a look.
    pub fn event(&mut self, node: usize, now: u64, event: Event) -> Vec<Command> {
        self.event_with(node, now, event, None)
    }

    fn event_with(&mut self, node: usize, now: u64, event: Event, data: Option<Data>) -> Vec<Command> {
        let mut commands = Vec::new();
        if let Event::Suspect { node } = event {
            self.doubt(node);
        }
        self.nodes[node].step(now, event, &mut commands);
        for command in &commands {
            self.carry_out(node, command, data);
        }
        if !self.doubtful.is_empty() {
            commands.iter().filter_map(page_of).for_each(|page| self.excuse_page(page));
        }
        commands
    }

    fn doubt(&mut self, node: NodeId) {
        self.doubtful.insert(node);
        let given = self.grants(usize::from(node.0)).filter(|grant| !grant.copies.is_empty());
        let given: Vec<_> = given.map(|grant| grant.page.0 as usize).collect();
        given.into_iter().for_each(|page| self.taken_along[page] = true);
        self.excuse();
    }

    fn excuse(&mut self) {
        (0..self.excused.len()).for_each(|page| self.excuse_page(page));
    }

    /// Finds out if nobody has the page but doubtful nodes. It looks at the memory and at what is on its way.
    fn excuse_page(&mut self, page: usize) {
        let safe = |node: usize| {
            self.memory[node][page].access != Access::None && !self.doubtful.contains(NodeId(node as u8))
        };
        if !self.excused[page] && !(0..self.count()).any(safe) {
            let on_its_way = |node: &NodeId| self.carries(usize::from(node.0), page);
            let theirs = self.doubtful.iter().any(|node| self.has(node, page) || on_its_way(&node));
            self.excused[page] = theirs || self.taken_along[page];
        }
    }

    /// A node is gone, with what it has.
    fn leaves(&mut self, node: usize) {
        let node = NodeId(node as u8);
        self.doubt(node);
        for page in 0..self.taken_along.len() {
            self.taken_along[page] |= !self.dead[usize::from(node.0)] && self.has(node, page);
        }
    }

    /// True if a node has the page. The manager of a page that it has not touched itself has it, and has not mapped it.
    fn has(&self, node: NodeId, page: usize) -> bool {
        let (memory, protocol) = (&self.memory[usize::from(node.0)], &self.nodes[usize::from(node.0)]);
        memory[page].access != Access::None || protocol.is_owner(PageId(page as u64))
    }

    /// True if the page is on its way from or to the node.
    fn carries(&self, node: usize, page: usize) -> bool {
        self.grants(node).any(|grant| grant.page.0 == page as u64)
    }

    /// Grants that are on their way from or to the node.
    fn grants(&self, node: usize) -> impl Iterator<Item = &Grant> {
        let count = self.count();
        let pairs = (0..count).flat_map(move |other| [other * count + node, node * count + other]);
        pairs.flat_map(|pair| &self.network[pair]).filter_map(|packet| match &packet.frame.message {
            Message::Grant(grant) => Some(grant),
            _ => None,
        })
    }

    /// Delivers the oldest message of a pair.
    pub fn deliver(&mut self, from: usize, to: usize, now: u64) -> Vec<Command> {
        let count = self.count();
        let Some(packet) = self.network[from * count + to].pop_front() else {
            return Vec::new();
        };
        if self.dead[to] {
            return Vec::new();
        }
        let event = Event::Receive { from: NodeId(from as u8), frame: packet.frame };
        self.event_with(to, now, event, packet.data)
    }

    /// Nodes whose memory counts: alive, and members of the newest view that is in force anywhere.
    pub fn counts(&self) -> NodeSet {
        let newest =
            self.nodes.iter().map(Node::view).max_by_key(|view| view.epoch).expect("there are nodes");
        let alive =
            |node: &NodeId| !self.dead[usize::from(node.0)] && !self.nodes[usize::from(node.0)].is_stopped();
        newest.members.iter().filter(alive).collect()
    }

    /// Kills a node. What it has sent may still arrive.
    pub fn kill(&mut self, node: usize) {
        self.leaves(node);
        self.dead[node] = true;
        for from in 0..self.count() {
            let at = from * self.count() + node;
            self.network[at].clear();
        }
        self.memory[node].iter_mut().for_each(|cell| *cell = Cell::default());
    }

    /// Pairs with a message on its way.
    pub fn deliverable(&self) -> impl Iterator<Item = (usize, usize)> {
        let count = self.count();
        self.network
            .iter()
            .enumerate()
            .filter(|(_, queue)| !queue.is_empty())
            .map(move |(at, _)| (at / count, at % count))
    }

    fn carry_out(&mut self, node: usize, command: &Command, data: Option<Data>) {
        match command {
            Command::Send { to, frame } => self.post(node, *to, frame, None),
            Command::Relay { to, frame } => self.post(node, *to, frame, data),
            Command::SendPage { to, frame, page, access } => {
                self.send_page(node, *to, frame, page.0 as usize, *access);
            }
            Command::Install { page, access, payload, twin } => {
                self.install(node, page.0 as usize, *payload, data);
                self.set_access(node, page.0 as usize, *access, *twin);
            }
            Command::SetAccess { page, access, twin } => {
                if self.broken == Broken::KeepCopy && *access == Access::None {
                    return;
                }
                self.set_access(node, page.0 as usize, *access, *twin);
            }
            Command::Wake { page } if self.broken != Broken::LoseWakes => {
                self.memory[node][page.0 as usize].woken = true;
            }
            Command::Wake { .. } => {}
            Command::SetTimer { page, at_ns } => self.memory[node][page.0 as usize].timer = Some(*at_ns),
            Command::Poison { page } => {
                let cell = &mut self.memory[node][page.0 as usize];
                (cell.poisoned, cell.woken, cell.access) = (true, true, Access::None);
            }
            Command::Stop { .. } => {
                self.leaves(node);
                self.memory[node].iter_mut().for_each(|cell| cell.access = Access::None);
            }
            Command::Members { .. } if self.broken == Broken::LoseAll => {
                self.memory[node].iter_mut().for_each(|cell| (cell.poisoned, cell.woken) = (true, true));
            }
            Command::Members { .. } => {}
            Command::Protest { peer, reason } => self.protest(node, *peer, *reason),
        }
    }

    fn protest(&mut self, node: usize, peer: NodeId, reason: Protest) {
        self.wrong.push(format!("node {node} protests against {}: {reason:?}", peer.0));
    }

    fn set_access(&mut self, node: usize, page: usize, access: Access, twin: bool) {
        let cell = &mut self.memory[node][page];
        if twin {
            cell.twin = Some(cell.value);
        }
        cell.access = access;
    }

    fn send_page(&mut self, node: usize, to: NodeId, frame: &Frame, page: usize, access: Access) {
        let Message::Grant(grant) = &frame.message else {
            return self.wrong.push("contents with a message that has none".to_owned());
        };
        if self.broken == Broken::CopyThenDrop {
            self.late.push((node, page, access));
        } else {
            self.memory[node][page].access = access;
        }
        let cell = self.memory[node][page];
        let data = match grant.payload {
            Payload::None => return self.wrong.push("SendPage without contents".to_owned()),
            Payload::Page => Data::Page(cell.value),
            Payload::Delta { .. } if self.broken == Broken::StaleTwin => Data::Delta(cell.value, cell.value),
            Payload::Delta { .. } => Data::Delta(cell.twin.unwrap_or(u64::MAX), cell.value),
        };
        self.sent_data += 1;
        self.post(node, to, frame, Some(data));
    }

    fn install(&mut self, node: usize, page: usize, payload: Payload, data: Option<Data>) {
        let cell = &mut self.memory[node][page];
        match (payload, data) {
            (Payload::Page, Some(Data::Page(value))) => cell.value = value,
            (Payload::Delta { .. }, Some(Data::Delta(base, value))) => {
                if base != cell.value && self.broken != Broken::StaleTwin {
                    self.wrong.push(format!(
                        "node {node} page {page}: difference to {base}, memory has {}",
                        cell.value
                    ));
                }
                // A difference changes what is there by what it says, whatever it was made from.
                cell.value = cell.value.wrapping_add(value.wrapping_sub(base));
            }
            other => self.wrong.push(format!("node {node} page {page}: contents {other:?}")),
        }
    }

    fn post(&mut self, from: usize, to: NodeId, frame: &Frame, data: Option<Data>) {
        let count = self.count();
        let mut packet = Packet { frame: frame.clone(), data };
        if let (Broken::ForgetCopies, Message::Grant(grant)) = (self.broken, &mut packet.frame.message) {
            grant.copies = NodeSet::EMPTY;
        }
        if self.broken == Broken::LoseGrants && matches!(frame.message, Message::Grant(_)) {
            return;
        }
        if self.broken == Broken::SkipInvalidation
            && let Message::Notices(notices) = &frame.message
            && let [Notice::Invalidate { page, .. }] = notices[..]
        {
            let frame =
                Frame { epoch: frame.epoch, message: Message::Notices(vec![Notice::Invalidated { page }]) };
            self.network[usize::from(to.0) * count + from].push_back(Packet { frame, data: None });
            return;
        }
        if let Message::Grant(grant) = &frame.message
            && !grant.copies.is_empty()
            && (self.doubtful.contains(to) || self.doubtful.contains(NodeId(from as u8)))
        {
            // It may get lost on its way, and the copies are dropped all the same.
            self.taken_along[grant.page.0 as usize] = true;
        }
        if self.dead[usize::from(to.0)] || self.nodes[usize::from(to.0)].is_stopped() {
            if let Message::Grant(grant) = &frame.message {
                let page = grant.page.0 as usize;
                let safe = |node: usize| {
                    !self.doubtful.contains(NodeId(node as u8))
                        && self.memory[node][page].access != Access::None
                };
                self.excused[page] |= !(0..count).any(safe);
            }
            return;
        }
        self.sent += 1;
        self.network[from * count + usize::from(to.0)].push_back(packet);
    }

    /// A thread uses a page, if the memory lets it: a write counts one more. False if it would fault.
    pub fn access(&mut self, node: usize, page: usize, write: bool) -> bool {
        let cell = &mut self.memory[node][page];
        let needed = if write { Access::Write } else { Access::Read };
        if cell.access < needed {
            return false;
        }
        if write {
            cell.value += 1;
        }
        true
    }

    /// Faults until the access succeeds, with nothing else going on. Returns the messages that it took.
    pub fn settle(&mut self, node: usize, page: usize, write: bool) -> Vec<Message> {
        let mut messages = Vec::new();
        for _ in 0..100 {
            if self.access(node, page, write) {
                let commands = self.event(node, 0, Event::Progress { page: PageId(page as u64) });
                collect(&commands, &mut messages);
                self.drain(&mut messages);
                return messages;
            }
            let commands = self.event(node, 0, Event::Fault { page: PageId(page as u64), write });
            collect(&commands, &mut messages);
            self.drain(&mut messages);
        }
        panic!("node {node} page {page}: the fault is not served: {:?}", self.memory[node][page]);
    }

    /// Faults until the access succeeds, where all messages take the same time. Returns how many followed one another, and how many
    /// there were.
    pub fn turns(&mut self, node: usize, page: usize, write: bool) -> (usize, u64) {
        let before = self.sent;
        let mut asks = true;
        for turns in 0..100 {
            if self.access(node, page, write) {
                self.event(node, 0, Event::Progress { page: PageId(page as u64) });
                self.drain(&mut Vec::new());
                return (turns, self.sent - before);
            }
            if std::mem::replace(&mut asks, false) || std::mem::take(&mut self.memory[node][page].woken) {
                self.event(node, 0, Event::Fault { page: PageId(page as u64), write });
            }
            (0..self.count()).for_each(|node| drop(self.event(node, 0, Event::Flush)));
            let counts: Vec<_> = self.network.iter().map(VecDeque::len).collect();
            for (pair, count) in counts.into_iter().enumerate() {
                let (from, to) = (pair / self.count(), pair % self.count());
                (0..count).for_each(|_| drop(self.deliver(from, to, 0)));
            }
        }
        panic!("node {node} page {page}: the fault is not served: {:?}", self.memory[node][page]);
    }

    /// Delivers everything and flushes, in a fixed order.
    pub fn drain(&mut self, messages: &mut Vec<Message>) {
        loop {
            let next = self.deliverable().next();
            if let Some((from, to)) = next {
                let commands = self.deliver(from, to, 0);
                collect(&commands, messages);
                continue;
            }
            let Some(node) = (0..self.count()).find(|node| self.nodes[*node].needs_flush()) else {
                return;
            };
            let commands = self.event(node, 0, Event::Flush);
            collect(&commands, messages);
        }
    }
}

/// The page that a command maps, unmaps or gives away.
fn page_of(command: &Command) -> Option<usize> {
    let page = match command {
        Command::Install { page, .. } | Command::SetAccess { page, .. } | Command::Poison { page } => *page,
        _ => match command.sends()?.1 {
            Message::Grant(grant) => grant.page,
            _ => return None,
        },
    };
    Some(page.0 as usize)
}

fn collect(commands: &[Command], messages: &mut Vec<Message>) {
    messages.extend(commands.iter().filter_map(|command| Some(command.sends()?.1.clone())));
}

/// Looks at the memory of all nodes: one writer or any number of readers, and all see the last write.
/// `last` is how many writes each page has seen; `counts` says whose memory counts.
pub fn check(memory: &[Vec<Cell>], last: &[u64], counts: impl Fn(usize) -> bool) -> Result<(), String> {
    for (page, last) in last.iter().enumerate() {
        let cells = memory
            .iter()
            .enumerate()
            .filter(|(node, _)| counts(*node))
            .map(|(node, cells)| (node, cells[page]));
        let mapped: Vec<_> = cells.filter(|(_, cell)| cell.access != Access::None).collect();
        if mapped.len() > 1 && mapped.iter().any(|(_, cell)| cell.access == Access::Write) {
            return Err(format!("single writer: page {page}: {mapped:?}"));
        }
        if let Some((node, cell)) = mapped.iter().find(|(_, cell)| cell.value != *last) {
            return Err(format!(
                "data value: page {page}: node {node} has {}, the last write is {last}",
                cell.value
            ));
        }
    }
    Ok(())
}

/// Pages that are said to be lost, though somebody who was never in doubt had them all the time.
pub fn lost_for_nothing(cluster: &Cluster) -> Option<String> {
    cluster.memory.iter().enumerate().find_map(|(node, cells)| {
        let page = (0..cells.len()).find(|page| cells[*page].poisoned && !cluster.excused[*page])?;
        Some(format!("lost for nothing: page {page}, on node {node}"))
    })
}
