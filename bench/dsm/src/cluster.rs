//! Nodes of the protocol: node 0 in this process, the others in processes of their own, as on other hosts. In one process
//! they would share what they do not share elsewhere: a page that one takes from its threads is flushed from all CPUs on which
//! threads of the others run.

use crate::{
    peer::{Kind, local_address, patient},
    place,
    protocol::{self, word},
    replay::{self, Step},
    spent::Spent,
};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write, stdin},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use vnuma_coherence::{Managers, NodeId, Options};
use vnuma_dsm_node::{Config, Found, Node};
use vnuma_dsm_pager::{Options as Memory, PAGE_SIZE, Region};
use vnuma_dsm_transport::{Identity, Limits, Listener, Place, Reserved, mesh, node_name};

/// Shards of a node.
const SHARDS: usize = 2;
/// What a process says that is connected to all others.
const READY: &str = "ready";

/// What a process is told that is one of the other nodes.
#[derive(Args, Clone, Debug)]
pub struct Seat {
    /// This process is a node
    #[arg(long = "node", hide = true)]
    node: Option<u8>,
    #[arg(long, hide = true, default_value = "")]
    kind: String,
    #[arg(long, hide = true, default_value = "")]
    protocol: String,
    /// Where sockets and keys are
    #[arg(id = "sockets", long, hide = true, default_value = ".")]
    directory: PathBuf,
    #[arg(long, hide = true, value_delimiter = ',')]
    addresses: Vec<SocketAddr>,
    /// How many pages which node manages, NODE:PAGES
    #[arg(long, hide = true, value_delimiter = ',')]
    managed: Vec<String>,
    /// What the nodes do in turn
    #[arg(long, hide = true)]
    steps: Option<PathBuf>,
    /// The limits that nodes have by default, which a busy machine may reach
    #[arg(long, hide = true)]
    impatient: bool,
}

/// What the nodes of a cluster are.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Who manages the next so many pages. Nodes are those that manage some, and those below them.
    pub managed: Vec<(u8, usize)>,
    /// The node on the CPU of node 0, if there is one. All others are on the other CPU.
    pub beside: Option<u8>,
    /// What the nodes do in turn, in a file.
    pub steps: Option<PathBuf>,
    /// The nodes suspect each other as soon as they do by default.
    pub impatient: bool,
}

impl Shape {
    /// Three nodes, of which node 1 manages all pages.
    pub fn three() -> Self {
        Self { managed: vec![(1, protocol::PAGES), (2, 0)], beside: None, steps: None, impatient: false }
    }

    fn nodes(&self) -> u8 {
        self.managed.iter().map(|(node, _)| node + 1).max().unwrap_or(0)
    }
}

/// Another node.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Node 0, and the others.
pub struct Cluster {
    own: Node,
    /// What node 0 does in turn with the others.
    steps: Vec<Step>,
    others: Vec<Other>,
}

/// How often nodes were started anew, in this process.
static BEGUN_AGAIN: AtomicUsize = AtomicUsize::new(0);

/// How often nodes did not find each other within 10 s, and were started anew.
pub fn begun_again() -> usize {
    BEGUN_AGAIN.load(SeqCst)
}

impl Cluster {
    /// With one of the protocols of [`protocol::modes`]. Of hundreds of clusters one may not come together, as a process does not get
    /// a CPU for seconds. That is told, and tried once more.
    pub fn new(kind: Kind, mode: &str, shape: &Shape) -> Result<Self> {
        Self::begin(kind, mode, shape).or_else(|error| {
            eprintln!("bench-dsm: {} {mode}: nodes are started anew: {error:#}", kind.name());
            BEGUN_AGAIN.fetch_add(1, SeqCst);
            Self::begin(kind, mode, shape)
        })
    }

    fn begin(kind: Kind, mode: &str, shape: &Shape) -> Result<Self> {
        let nodes = shape.nodes();
        let directory = tempfile::tempdir()?;
        keys(directory.path(), nodes)?;
        // Kept until all nodes listen.
        let reserved = Reserved::new(local_address(kind).into(), nodes.into())?;
        let seat = |node| Seat {
            node: Some(node),
            kind: kind.name().to_owned(),
            protocol: mode.to_owned(),
            directory: directory.path().to_owned(),
            addresses: reserved.addresses().to_vec(),
            managed: shape.managed.iter().map(|(node, pages)| format!("{node}:{pages}")).collect(),
            steps: shape.steps.clone(),
            impatient: shape.impatient,
        };
        let start = |node| Other::start(&seat(node), shape.beside == Some(node));
        let others = (1..nodes).map(start).collect::<Result<_>>()?;
        let mut cluster = Self { steps: seat(0).read_steps()?, own: seat(0).join()?, others };
        for other in &mut cluster.others {
            let answer = other.hear()?;
            ensure!(answer == READY, "a node begins with {answer:?}");
        }
        Ok(cluster)
    }

    /// The node whose threads are measured.
    pub fn own(&self) -> &Node {
        &self.own
    }

    /// Node 1 or 2 writes these pages, one after the other.
    pub fn write(&mut self, node: usize, pages: impl Iterator<Item = usize>) -> Result<()> {
        let pages: Vec<_> = pages.map(|page| page.to_string()).collect();
        let answer = self.others[node - 1].ask(&format!("write {}", pages.join(" ")))?;
        ensure!(answer == "done", "node {node} answers {answer:?}");
        Ok(())
    }

    /// Sends a signal to the process of node 1 or 2.
    pub fn signal(&self, node: usize, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.others[node - 1].child.id())?;
        kill(Pid::from_raw(id), signal).with_context(|| format!("node {node}: {signal}"))
    }

    /// A node takes these steps, which are all its own, and says how long each has taken.
    pub fn take(&mut self, node: u8, steps: std::ops::Range<usize>) -> Result<Vec<Duration>> {
        match node.checked_sub(1) {
            None => Ok(replay::take(&self.own, &self.steps[steps])),
            Some(other) => {
                let answer =
                    self.others[usize::from(other)].ask(&format!("take {} {}", steps.start, steps.end))?;
                answer.split(' ').map(|ns| Ok(Duration::from_nanos(ns.parse()?))).collect()
            }
        }
    }

    /// Where requests of all nodes for ownership have found the owner. The nodes leave.
    pub fn found(mut self) -> Result<Found> {
        let mut found = self.own.leave().found_by_writes;
        for other in &mut self.others {
            let answer = other.ask("found")?;
            let numbers: Vec<u64> = answer.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let [manager, hint, elsewhere] = numbers[..] else { anyhow::bail!("{answer:?}") };
            found.manager += manager;
            found.hint += hint;
            found.elsewhere += elsewhere;
        }
        Ok(found)
    }

    /// What node 0 has spent, and what all others have.
    pub fn spent(&mut self) -> Result<[Spent; 2]> {
        let mut elsewhere = Spent::default();
        for other in &mut self.others {
            elsewhere = elsewhere + other.ask("spent")?.parse()?;
        }
        Ok([Spent::now(&self.own)?, elsewhere])
    }
}

impl Other {
    fn start(seat: &Seat, measured: bool) -> Result<Self> {
        let addresses: Vec<_> = seat.addresses.iter().map(ToString::to_string).collect();
        let mut child = Command::new(std::env::current_exe()?);
        child
            .args(["--node", &seat.node.unwrap_or(0).to_string(), "--kind", &seat.kind])
            .args(["--protocol", &seat.protocol, "--addresses", &addresses.join(","), "--sockets"])
            .arg(&seat.directory)
            .args(["--managed", &seat.managed.join(",")])
            .args(seat.steps.iter().flat_map(|path| ["--steps".as_ref(), path.as_os_str()]))
            .args(seat.impatient.then_some("--impatient"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // A process inherits the CPUs of the thread that starts it.
        if !measured {
            place::elsewhere()?;
        }
        let child = child.spawn();
        place::measured()?;
        let mut child = child.context("a node's process")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = BufReader::new(output.context("standard output")?);
        Ok(Self { child, input: input.context("standard input")?, output })
    }

    fn ask(&mut self, line: &str) -> Result<String> {
        writeln!(self.input, "{line}").context("a node's process")?;
        self.hear()
    }

    fn hear(&mut self) -> Result<String> {
        let mut answer = String::new();
        ensure!(self.output.read_line(&mut answer)? > 0, "a node's process has ended");
        Ok(answer.trim().to_owned())
    }
}

impl Seat {
    /// Is this process one of the other nodes? Then it serves until its input ends.
    pub fn serve(&self) -> Result<bool> {
        if self.node.is_none() {
            return Ok(false);
        }
        let (node, steps) = (self.join()?, self.read_steps()?);
        println!("{READY}");
        for line in stdin().lock().lines() {
            let line = line?;
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["write", ref pages @ ..] => {
                    for page in pages {
                        word(&node, page.parse()?, 0).fetch_add(1, SeqCst);
                    }
                    println!("done");
                }
                ["take", begin, end] => {
                    let taken = replay::take(&node, &steps[begin.parse()?..end.parse()?]);
                    let taken: Vec<_> = taken.iter().map(|taken| taken.as_nanos().to_string()).collect();
                    println!("{}", taken.join(" "));
                }
                ["found"] => {
                    let Found { manager, hint, elsewhere } = node.leave().found_by_writes;
                    println!("{manager} {hint} {elsewhere}");
                }
                _ => println!("{}", Spent::now(&node)?),
            }
        }
        Ok(true)
    }

    fn read_steps(&self) -> Result<Vec<Step>> {
        self.steps.as_ref().map_or_else(|| Ok(Vec::new()), |path| replay::read(path))
    }

    fn managers(&self) -> Result<Managers> {
        let range = |text: &String| -> Result<(u64, NodeId)> {
            let (node, pages) = text.split_once(':').context("--managed: NODE:PAGES")?;
            Ok((pages.parse()?, NodeId(node.parse()?)))
        };
        let ranges = self.managed.iter().map(range).collect::<Result<Vec<_>>>()?;
        Ok(Managers::new(&ranges.into_iter().filter(|(pages, _)| *pages > 0).collect::<Vec<_>>())?)
    }

    fn join(&self) -> Result<Node> {
        let number = self.node.context("--node")?;
        let kind = Kind::named(&self.kind)?;
        let identity = read_keys(&self.directory, number)?;
        let place = |node: u8| -> Result<Place> {
            let address = self.addresses.get(usize::from(node)).copied().context("--addresses: too few");
            Ok(match kind {
                Kind::Tcp => Place::Tcp(address?),
                Kind::Tls => Place::Tls(address?, identity.clone()),
                Kind::Shm => Place::Shm(self.directory.join(node.to_string())),
                Kind::Rdma => Place::Rdma(address?),
            })
        };
        let nodes = u8::try_from(self.addresses.len())?;
        let others = (0..nodes).filter(|node| *node != number);
        let others = others.map(|node| Ok((node, place(node)?))).collect::<Result<BTreeMap<_, _>>>()?;
        let memory = Memory { shards: SHARDS, ..Memory::default() };
        let managers = self.managers()?;
        let pages = managers.pages();
        let region = Arc::new(Region::create(usize::try_from(pages)? * PAGE_SIZE, memory)?);
        let mut config = Config::new(number, nodes, pages);
        config.options = options(&self.protocol)?;
        config.managers = managers;
        let listener = Listener::bind(&place(number)?)?;
        let complain = |error| eprintln!("{error}");
        let limits = if self.impatient { Limits::default() } else { patient() };
        let lanes = mesh(&listener, &others, &config.hello(&region), limits, complain)?;
        Ok(Node::start(&config, region, lanes, |_| {})?)
    }
}

fn options(mode: &str) -> Result<Options> {
    let found = protocol::modes().into_iter().find(|(name, _)| *name == mode);
    Ok(found.with_context(|| format!("--protocol {mode:?}"))?.1)
}

/// Writes keys of nodes that believe each other.
fn keys(directory: &Path, nodes: u8) -> Result<()> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    fs::write(directory.join("authority"), issuer.der())?;
    for node in 0..nodes {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![node_name(node)])?.signed_by(&key, &issuer)?;
        fs::write(directory.join(format!("certificate-{node}")), certificate.der())?;
        fs::write(directory.join(format!("key-{node}")), key.serialize_der())?;
    }
    Ok(())
}

fn read_keys(directory: &Path, node: u8) -> Result<Identity> {
    let read = |name: String| fs::read(directory.join(&name)).context(name);
    let authority = CertificateDer::from(read("authority".to_owned())?);
    let certificate = CertificateDer::from(read(format!("certificate-{node}"))?);
    let key = PrivatePkcs8KeyDer::from(read(format!("key-{node}"))?).into();
    Identity::new(&[authority], vec![certificate], key)
        .map_err(|error| anyhow!("keys of node {node}: {error}"))
}
