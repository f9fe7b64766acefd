//! A node's process.

use crate::{
    keys, network,
    options::{Arguments, Transport},
    outcome::Part,
    programs::{Done, Shared, Task},
};
use anyhow::{Context, Result, anyhow, bail};
use nix::sys::{prctl::set_pdeathsig, signal};
use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    io::{BufRead, Read, Write, stdin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_coherence::NodeId;
use vnuma_dsm_node::{Config, Copies, Happening, Node, Stats};
use vnuma_dsm_pager::{Options as Memory, PAGE_SIZE, Region};
use vnuma_dsm_transport::{Limits, Listener, Place, mesh};

/// Shards of a node, each with a thread.
const SHARDS: usize = 2;

/// How long a node that is alone on its host serves the others after its program has ended, as no message says when theirs have.
const LINGER: Duration = Duration::from_secs(2);

/// What the main thread waits for.
enum Event {
    /// The program of this generation has ended.
    Done(u32, Result<Done, String>),
    /// These are left, of this generation.
    Left(u32, Vec<u8>),
    /// The parent needs nothing more.
    End,
}

/// Says when its program is done, serves the others until its input ends, and then tells what it did.
pub fn run(arguments: &Arguments, number: u8) -> Result<()> {
    set_pdeathsig(signal::Signal::SIGKILL).context("prctl(PR_SET_PDEATHSIG)")?;
    if arguments.apart {
        network::leave()?;
        println!("apart");
        stdin().lock().read_line(&mut String::new()).context("standard input")?;
        network::configure(number)?;
    }
    if arguments.cut_ms.is_some() {
        park_on_sigbus()?;
    }
    let (sender, events) = channel();
    let end = sender.clone();
    thread::spawn(move || {
        let _ = stdin().read_to_end(&mut Vec::new());
        let _ = end.send(Event::End);
    });
    let mut run =
        Run { arguments, number, task: arguments.task()?, sender, generation: 0, stats: Stats::default() };
    let part = run.complete(&events)?;
    println!("part {}", serde_json::to_string(&part)?);
    Ok(())
}

/// Runs a node whose others are on other hosts.
pub fn run_alone(arguments: &Arguments, number: u8) -> Result<Part> {
    let (sender, events) = channel();
    let stats = Stats::default();
    Run { arguments, number, task: arguments.task()?, sender, generation: 0, stats }.complete(&events)
}

struct Run<'a> {
    arguments: &'a Arguments,
    number: u8,
    task: Task,
    sender: Sender<Event>,
    /// How often the program was started anew.
    generation: u32,
    /// Of the generations before.
    stats: Stats,
}

/// Nodes that are to do something else refuse each other.
fn digest(task: &Task, nodes: u8) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{task:?}, {nodes} nodes").hash(&mut hasher);
    hasher.finish()
}

/// A generation: a node, and the thread of its program.
struct Running {
    node: Arc<Node>,
    abandoned: Arc<AtomicBool>,
}

impl Run<'_> {
    fn complete(&mut self, events: &Receiver<Event>) -> Result<Part> {
        let members: Vec<u8> = (0..self.arguments.nodes).collect();
        let mut running = self.start(&members, None)?;
        let (mut resumed_from, mut done) = (None, None);
        let begin = Instant::now();
        loop {
            match events.recv()? {
                Event::Done(generation, outcome) if generation == self.generation => {
                    let mut part = outcome.map_err(|error| anyhow!("{error}"))?;
                    // The work that was done twice counts, too.
                    if resumed_from.is_some() {
                        part.taken = begin.elapsed();
                    }
                    done = Some(part);
                    self.tell_done();
                }
                Event::Left(generation, members) if generation == self.generation => {
                    if done.take().is_some() {
                        println!("again");
                    }
                    let from;
                    (running, from) = self.start_anew(running, &members)?;
                    resumed_from = Some(from);
                }
                Event::End => break,
                // Of a generation that is over.
                Event::Done(..) | Event::Left(..) => {}
            }
        }
        let Some(Done { moved_bytes, taken, idle, threads, guest }) = done else {
            bail!("the run has ended before the program")
        };
        self.stop(running);
        let (seconds, idle_s) = (taken.as_secs_f64(), idle.as_secs_f64());
        let stats = std::mem::take(&mut self.stats);
        Ok(Part { seconds, threads, idle_s, moved_bytes, resumed_from, guest, stats })
    }

    /// The parent says when all others are done, too.
    fn tell_done(&self) {
        if self.arguments.hosts.is_empty() {
            return println!("done");
        }
        let sender = self.sender.clone();
        thread::spawn(move || {
            thread::sleep(LINGER);
            let _ = sender.send(Event::End);
        });
    }

    /// Starts a node among these members, and its program.
    fn start(&self, members: &[u8], copies: Option<(Arc<Copies>, Sender<u64>)>) -> Result<Running> {
        let pages = self.task.pages(self.arguments.nodes);
        let memory = Memory { shards: SHARDS, ..Memory::default() };
        let region = Region::create(pages as usize * PAGE_SIZE, memory).context("the shared memory")?;
        let node = Arc::new(self.join(members, Arc::new(region))?);
        let region = Arc::clone(node.region());
        let (task, sender, generation) = (self.task, self.sender.clone(), self.generation);
        let (number, members, cut_ms) = (self.number, members.to_vec(), self.arguments.cut_ms);
        let (abandoned, cuts) = (Arc::new(AtomicBool::new(false)), Arc::clone(&node));
        let running = Running { node, abandoned: Arc::clone(&abandoned) };
        thread::spawn(move || {
            let place = members.iter().position(|member| *member == number).unwrap_or(0);
            let address = region.guest().as_ptr() as usize;
            let mut shared = Shared::new(address, pages, place, members.len(), abandoned);
            shared.region = Arc::downgrade(&region);
            // The node keeps it. A region that is not needed any more releases a thread that waits for one of its pages.
            drop(region);
            if let Some((copies, told)) = copies {
                let cut = shared.highest(copies.newest());
                copies.restore(cut, &members, |page, content| shared.put_back(page, content));
                shared.barrier();
                let _ = told.send(cut);
            }
            if generation == 0 {
                let node = Arc::clone(&cuts);
                shared.begun = Box::new(move || node.begin());
            }
            if let Some(cut_ms) = cut_ms {
                let cut = Box::new(move || cut(&cuts, number));
                shared.cuts = Some((Duration::from_millis(cut_ms), cut));
            }
            let _ = sender.send(Event::Done(generation, task.run(&shared)));
        });
        Ok(running)
    }

    /// Goes on with the members that are left, from their second copies. Says from which cut.
    fn start_anew(&mut self, old: Running, members: &[u8]) -> Result<(Running, u64)> {
        self.generation += 1;
        let copies = old.node.copies();
        let (told, cut) = channel();
        // The old node serves until all that are left have come here: they may not know of it yet.
        let running = self.start(members, Some((copies, told)))?;
        self.stop(old);
        let cut = cut
            .recv_timeout(Duration::from_secs(60))
            .context("the nodes that are left do not come together")?;
        say(&format!("node {}: goes on from cut {cut} on nodes {members:?}", self.number));
        Ok((running, cut))
    }

    /// Ends a node whose program is done, or does not go on.
    fn stop(&mut self, running: Running) {
        let Running { node, abandoned } = running;
        abandoned.store(true, Relaxed);
        // A thread that does not go on may still be about to touch the memory: it stays.
        std::mem::forget(Arc::clone(node.region()));
        // The program's thread has the node, too, for its cuts.
        self.stats.merge(&node.leave());
    }

    /// Connects this node to the other members.
    fn join(&self, members: &[u8], region: Arc<Region>) -> Result<Node> {
        let Self { arguments, number, generation, .. } = *self;
        let mut config = Config::new(number, arguments.nodes, region.pages());
        config.options = arguments.protocol()?;
        config.list_touches = arguments.touches;
        config.members = members.iter().map(|member| NodeId(*member)).collect();
        let place = |node: u8| -> Result<Place> {
            let address = || {
                let port = arguments.ports.get(usize::from(node)).context("--ports: too few")?;
                anyhow::Ok((arguments.address(node), *port).into())
            };
            Ok(match arguments.transport() {
                Transport::Shm => Place::Shm(arguments.directory.join(format!("{generation}-{node}"))),
                Transport::Tcp => Place::Tcp(address()?),
                Transport::Rdma => Place::Rdma(address()?),
                Transport::TcpTls => Place::Tls(address()?, keys::read(&arguments.directory, number)?),
            })
        };
        let mut hello = config.hello(&region);
        let run = arguments.cluster << 32 | u64::from(generation);
        hello.cluster = u128::from(digest(&self.task, arguments.nodes)) << 64 | u128::from(run);
        hello.incarnation = std::process::id().into();
        let others = members.iter().filter(|node| **node != number);
        let others = others.map(|node| Ok((*node, place(*node)?))).collect::<Result<BTreeMap<_, _>>>()?;
        let listener = Listener::bind(&place(number)?).context("listening")?;
        let limits = Limits { connect: Duration::from_secs(30), ..Limits::default() };
        let complain = |error| say(&format!("node {number}: {error}"));
        let lanes = mesh(&listener, &others, &hello, limits, complain)?;
        let (sender, cuts) = (self.sender.clone(), arguments.cut_ms.is_some());
        let over = AtomicBool::new(false);
        let told = move |happening: &Happening| {
            told(number, happening, cuts.then_some(Anew { generation, sender: &sender, over: &over }));
        };
        Ok(Node::start(&config, region, lanes, told)?)
    }
}

/// Makes second copies. If a node is lost, the main thread starts the program anew.
fn cut(node: &Node, number: u8) -> Result<bool, String> {
    match node.cut() {
        Ok(cut) => {
            say(&format!("node {number}: cut {cut} is complete"));
            Ok(true)
        }
        Err(error) => {
            say(&format!("node {number}: {error}"));
            Ok(false)
        }
    }
}

/// What starts a program anew.
struct Anew<'a> {
    generation: u32,
    sender: &'a Sender<Event>,
    /// It knows that this generation is over.
    over: &'a AtomicBool,
}

/// Without second copies the programs need all nodes, so what ends one node ends the run.
fn told(number: u8, happening: &Happening, anew: Option<Anew<'_>>) {
    // The others leave a generation that is over, some before this node does.
    let over = anew.as_ref().is_some_and(|anew| anew.over.load(Relaxed));
    if over || matches!(happening, Happening::PeerLeft { .. }) {
        return;
    }
    say(&format!("node {number}: {happening}"));
    match (happening, anew) {
        (Happening::Members { members, .. }, Some(Anew { generation, sender, over })) => {
            over.store(true, Relaxed);
            let _ = sender.send(Event::Left(generation, members.clone()));
        }
        (Happening::PageLost { .. }, Some(_)) => {}
        (Happening::Members { .. }, None) => {
            say(&format!("node {number}: the program needs all nodes"));
            std::process::exit(3);
        }
        (Happening::PageLost { .. } | Happening::Stopped { .. } | Happening::Failed { .. }, _) => {
            std::process::exit(3)
        }
        (Happening::PeerEnded { .. } | Happening::Protested { .. } | Happening::PeerLeft { .. }, _) => {}
    }
}

/// A line that is not mixed with those of other nodes.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("dsm-run: {text}\n").as_bytes());
}

/// A thread that touches a lost page waits for the end of the process: its program is started anew in another thread.
fn park_on_sigbus() -> Result<()> {
    extern "C" fn park(_: i32) {
        loop {
            nix::unistd::pause();
        }
    }
    let handler = signal::SigHandler::Handler(park);
    let action = signal::SigAction::new(handler, signal::SaFlags::empty(), signal::SigSet::empty());
    // SAFETY: the handler calls pause(2) only, which may be called in a handler.
    unsafe { signal::sigaction(signal::Signal::SIGBUS, &action) }.context("sigaction(SIGBUS)")?;
    Ok(())
}
