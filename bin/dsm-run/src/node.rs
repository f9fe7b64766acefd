//! A node's process.

use crate::{
    options::{Arguments, Transport},
    programs::{PAGES, Shared},
};
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeMap,
    io::{Read, stdin},
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_dsm_node::{Config, Happening, Node};
use vnuma_dsm_pager::{Options as Memory, PAGE_SIZE, Region};
use vnuma_dsm_transport::{Limits, Listener, Place, mesh};

/// Shards of a node, each with a thread.
const SHARDS: usize = 2;

/// Says when its program is done, serves the others until its input ends, and then tells what it did.
pub fn run(arguments: &Arguments, number: u8) -> Result<()> {
    let memory = Memory { shards: SHARDS, ..Memory::default() };
    let region = Arc::new(Region::create(PAGES as usize * PAGE_SIZE, memory).context("the shared memory")?);
    let mut config = Config::new(number, arguments.nodes, PAGES);
    config.options = arguments.protocol()?;
    let place = |node: u8| -> Result<Place> {
        Ok(match arguments.transport {
            Transport::Shm => Place::Shm(arguments.directory.join(node.to_string())),
            Transport::Tcp => {
                let port = arguments.ports.get(usize::from(node)).context("--ports: too few")?;
                Place::Tcp((Ipv4Addr::LOCALHOST, *port).into())
            }
        })
    };
    let mut hello = config.hello(&region);
    hello.cluster = arguments.cluster.into();
    hello.incarnation = std::process::id().into();
    let others = (0..arguments.nodes).filter(|node| *node != number);
    let others = others.map(|node| Ok((node, place(node)?))).collect::<Result<BTreeMap<_, _>>>()?;
    let listener = Listener::bind(&place(number)?).context("listening")?;
    let limits = Limits { connect: Duration::from_secs(30), ..Limits::default() };
    let complain = |error| eprintln!("dsm-run: node {number}: {error}");
    let lanes = mesh(&listener, &others, &hello, limits, complain)?;
    let node = Node::start(&config, region, lanes, move |happening| told(number, happening))?;
    let address = node.region().guest().as_ptr() as usize;
    let shared = Shared::new(address, number.into(), arguments.nodes.into());
    let begin = Instant::now();
    let outcome = arguments.program.run(&shared, arguments.size);
    let seconds = begin.elapsed().as_secs_f64();
    ensure!(outcome.is_ok(), "{}", outcome.err().unwrap_or_default());
    println!("done {seconds}");
    stdin().read_to_end(&mut Vec::new()).context("standard input")?;
    println!("stats {}", serde_json::to_string(&node.stop())?);
    Ok(())
}

/// The programs need all nodes, so what ends one node ends the run.
fn told(number: u8, happening: &Happening) {
    if let Happening::PeerLeft { .. } = happening {
        return;
    }
    eprintln!("dsm-run: node {number}: {happening}");
    match happening {
        Happening::Members { .. } => {
            eprintln!("dsm-run: node {number}: the program needs all nodes");
            std::process::exit(3);
        }
        Happening::PageLost { .. } | Happening::Stopped { .. } | Happening::Failed { .. } => {
            std::process::exit(3)
        }
        Happening::PeerEnded { .. } | Happening::Protested { .. } | Happening::PeerLeft { .. } => {}
    }
}
