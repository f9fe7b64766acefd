//! The command line.

use crate::programs::{Access, Block, Program, Scope, Task, VCPUS};
use clap::{Parser, ValueEnum};
use serde::Serialize;
use std::{net::Ipv4Addr, path::PathBuf};
use vnuma_coherence::Options;

/// Where nodes with a network of their own listen.
pub const PORT: u16 = 8300;
/// The largest `--size`. What is more than a program can do in a lifetime is a mistake.
const MOST: u64 = 1_000_000_000_000;

/// Runs a program on several nodes that share one memory.
///
/// Each node is a process of its own on this machine, in a network namespace of its own where that is permitted. Its threads
/// read and write the shared memory like any other; page faults fetch what is elsewhere. Every program compares its result
/// with that of a sequential one, and fails if they differ.
///
/// Examples:
///   dsm-run --nodes 3 lock-counter
///   dsm-run --nodes 2 --transport tcp --mode ivy --stats pagerank
///   dsm-run --nodes 2 --without deltas --stats false-sharing
///   dsm-run --nodes 3 --cut-ms 100 --size 50000 pagerank
///   dsm-run --nodes 4 --block 4MiB --scope global --access write memory
///   dsm-run --nodes 2 --vcpus 4 guest
///   dsm-run --nodes 2 --make-keys keys
///   dsm-run --hosts 192.0.2.1,192.0.2.2 --host 0 --keys keys pagerank
#[derive(Parser, Clone, Debug)]
#[command(version, verbatim_doc_comment)]
pub struct Arguments {
    /// Number of nodes
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u8).range(1..=16),
        conflicts_with = "hosts"
    )]
    pub nodes: u8,
    /// Run one node here, and know where the others are: the IPv4 address of each, in their order
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',', requires = "host")]
    pub hosts: Vec<Ipv4Addr>,
    /// Which of --hosts this is, from 0
    #[arg(long, value_name = "N", requires = "hosts")]
    pub host: Option<u8>,
    /// How the nodes are connected
    ///
    /// Default: shm; tcp-tls with --hosts.
    #[arg(long, value_enum)]
    transport: Option<Transport>,
    /// With --hosts: a directory with the authority's certificate, and this node's with its key
    #[arg(long, value_name = "DIR", requires = "hosts")]
    pub keys: Option<PathBuf>,
    /// Run nothing: write an authority's certificate, and those of --nodes nodes with their keys, into a new directory
    #[arg(long, value_name = "DIR", conflicts_with = "hosts")]
    pub make_keys: Option<PathBuf>,
    /// Whether each node has a network namespace of its own
    #[arg(long, value_enum, default_value_t = Namespaces::Auto)]
    pub namespaces: Namespaces,
    /// The protocol: GiantVM's, or this project's
    #[arg(long, value_enum, default_value_t = Mode::Default)]
    pub mode: Mode,
    /// Leave out a part of the default protocol; may be given several times
    #[arg(long, value_enum, value_name = "OPTION")]
    pub without: Vec<Part>,
    /// Also print what the nodes did: faults, messages, bytes, where the time went, pages with most faults
    #[arg(long)]
    pub stats: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    /// With --json: also list each page that a thread waited for
    #[arg(long, requires = "json")]
    pub touches: bool,
    /// How much the program does; each program has a default
    #[arg(long, value_name = "COUNT", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(..=MOST))]
    pub size: Option<usize>,
    /// pagerank: make second copies at the first barrier after so many milliseconds, and continue from them when a node is lost
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub cut_ms: Option<u64>,
    /// memory: the size of a block [default: 4KiB]
    #[arg(long, value_enum, ignore_case = true)]
    pub block: Option<Block>,
    /// memory: whose block it is [default: local]
    #[arg(long, value_enum)]
    pub scope: Option<Scope>,
    /// memory: what is done with it [default: write]
    #[arg(long, value_enum)]
    pub access: Option<Access>,
    /// guest: vCPUs on each node [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=i64::from(VCPUS)))]
    pub vcpus: Option<u8>,
    /// What to run
    #[arg(
        value_enum,
        required = false,
        required_unless_present = "make_keys",
        default_value_if("make_keys", clap::builder::ArgPredicate::IsPresent, "pi")
    )]
    pub program: Program,
    /// This process is a node
    #[arg(long, hide = true)]
    pub node: Option<u8>,
    /// Where the nodes meet, and their keys are
    #[arg(long, hide = true, default_value = ".")]
    pub directory: PathBuf,
    /// Ports of the nodes
    #[arg(long, hide = true, value_delimiter = ',')]
    pub ports: Vec<u16>,
    /// The parent has made namespaces
    #[arg(long, hide = true)]
    pub apart: bool,
    /// Tells this run from others
    #[arg(long, hide = true, default_value_t = 0)]
    pub cluster: u64,
}

/// How the nodes are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Rings in shared memory
    Shm,
    /// TCP without encryption
    Tcp,
    /// TLS 1.3 on TCP, with keys made for this run or those of --keys
    TcpTls,
    /// RDMA, between hosts
    Rdma,
}

/// Whether each node has a network namespace of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Namespaces {
    /// Where that is permitted
    Auto,
    /// An error where it is not
    Always,
    /// The nodes use the loopback of this machine
    Never,
}

/// The protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// GiantVM's protocol, message for message
    Ivy,
    /// All that this project adds
    Default,
}

/// What the default protocol adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The owner answers the requester
    DirectReply,
    /// A request goes to the owner that the requester knows
    OwnerHints,
    /// A writer that has the content gets no data
    UpgradeWithoutData,
    /// A page that is read and then written in turn is handed over at the read
    Migratory,
    /// Tell nodes that had a page who gets it next
    TellOwners,
    /// Differences instead of pages
    Deltas,
    /// Pages ahead of a sequential reader
    Prefetch,
    /// A page is kept until its thread has used it
    Hold,
    /// Invalidations share messages
    BatchInvalidations,
    /// Copies are acknowledged to the node that writes
    DirectAcks,
}

impl Arguments {
    /// The program and how much of it.
    pub fn task(&self) -> anyhow::Result<Task> {
        let of_memory = [self.block.is_some(), self.scope.is_some(), self.access.is_some()];
        anyhow::ensure!(
            self.program == Program::Memory || of_memory == [false; 3],
            "--block, --scope, --access: only with the program memory"
        );
        anyhow::ensure!(
            self.program == Program::PageRank || self.cut_ms.is_none(),
            "--cut-ms: only with the program pagerank"
        );
        anyhow::ensure!(
            self.program == Program::Guest || self.vcpus.is_none(),
            "--vcpus: only with the program guest"
        );
        Ok(Task {
            program: self.program,
            size: self.size,
            block: self.block.unwrap_or(Block::Page),
            scope: self.scope.unwrap_or(Scope::Local),
            access: self.access.unwrap_or(Access::Write),
            vcpus: self.vcpus.unwrap_or(2),
        })
    }

    /// How the nodes are connected: what leaves the host is encrypted, unless it is asked for otherwise.
    pub fn transport(&self) -> Transport {
        let default = if self.hosts.is_empty() { Transport::Shm } else { Transport::TcpTls };
        self.transport.unwrap_or(default)
    }

    /// The address of a node, where they are connected by TCP or RDMA.
    pub fn address(&self, node: u8) -> Ipv4Addr {
        match self.hosts.get(usize::from(node)) {
            Some(address) => *address,
            None if self.apart => crate::network::address(node),
            None => Ipv4Addr::LOCALHOST,
        }
    }

    /// The arguments of the node that runs here, if others run on other hosts, and its number.
    pub fn alone(&self) -> anyhow::Result<Option<(Self, u8)>> {
        let transport = self.transport();
        let Some(host) = self.host else {
            anyhow::ensure!(transport != Transport::Rdma, "--transport rdma: only with --hosts");
            return Ok(None);
        };
        anyhow::ensure!(transport != Transport::Shm, "--transport shm: not with --hosts");
        if transport == Transport::TcpTls {
            anyhow::ensure!(
                self.keys.is_some(),
                "--hosts: --keys DIR is needed (dsm-run --make-keys DIR makes them), or --transport tcp, \
                 which anybody on the network can read and write"
            );
        } else {
            anyhow::ensure!(self.keys.is_none(), "--keys: only with --transport tcp-tls");
        }
        anyhow::ensure!(self.cut_ms.is_none(), "--cut-ms: not with --hosts");
        let nodes = u8::try_from(self.hosts.len()).unwrap_or(u8::MAX);
        anyhow::ensure!(nodes <= 16, "--hosts: {nodes} addresses, at most 16");
        anyhow::ensure!(host < nodes, "--host {host}: --hosts has {nodes} addresses, and the first is 0");
        let ports = vec![PORT; nodes.into()];
        let directory = self.keys.clone().unwrap_or_else(|| self.directory.clone());
        Ok(Some((Self { nodes, ports, directory, ..self.clone() }, host)))
    }

    /// The switches of the protocol.
    pub fn protocol(&self) -> anyhow::Result<Options> {
        if self.mode == Mode::Ivy {
            anyhow::ensure!(self.without.is_empty(), "--without: --mode ivy has none of these parts");
            return Ok(Options::ivy());
        }
        let mut options = Options::default();
        for part in &self.without {
            match part {
                Part::DirectReply => options.direct_reply = false,
                Part::OwnerHints => options.owner_hints = false,
                Part::UpgradeWithoutData => options.upgrade_without_data = false,
                Part::Migratory => options.migratory = false,
                Part::TellOwners => options.tell_owners = false,
                Part::Deltas => options.deltas = false,
                Part::Prefetch => options.prefetch_pages = 0,
                Part::Hold => options.hold_ns = 0,
                Part::BatchInvalidations => options.batch_invalidations = false,
                Part::DirectAcks => options.direct_acks = false,
            }
        }
        Ok(options)
    }
}
