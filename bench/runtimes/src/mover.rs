//! Who takes vCPUs to other nodes: this program, one at a time, or the server's scheduler, which takes them away from other load.

use crate::{
    committed::{AWAY_AT_FIRST, By, COMPETITORS, CPUS, TURNS},
    vm::Machine,
};
use anyhow::{Context, Result};
use nix::unistd::gettid;
use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    thread::{self, JoinHandle},
};
use vnuma_bench_common::host::affine;
use vnuma_scenario::HANG_LIMIT;

/// What moves vCPUs while it is there.
pub enum Mover {
    /// This program.
    Hand,
    /// The server's scheduler.
    Balancer(Competitors),
}

impl Mover {
    /// From all vCPUs at home to where a load with changes finds them.
    pub fn start(machine: &mut Machine, by: By) -> Result<Self> {
        match by {
            By::Hand => {
                AWAY_AT_FIRST.iter().try_for_each(|vcpu| machine.turn(*vcpu).map(drop))?;
                Ok(Self::Hand)
            }
            By::Balancer => {
                let competitors = Competitors::start()?;
                machine.release()?;
                Ok(Self::Balancer(competitors))
            }
        }
    }

    /// vCPUs that come to another node by one turn. A balancer has one on the node of the other load and three on the other node, and
    /// then the opposite.
    pub fn moved_by_turn(&self) -> usize {
        match self {
            Self::Hand => 1,
            Self::Balancer(_) => 2,
        }
    }

    /// One turn. vCPUs that are on another node now, and which: a balancer takes its time.
    pub fn turn(&mut self, machine: &mut Machine, number: usize) -> Result<Vec<(usize, usize)>> {
        match self {
            Self::Hand => {
                let vcpu = TURNS[number % TURNS.len()];
                Ok(vec![(vcpu, machine.turn(vcpu)?)])
            }
            Self::Balancer(competitors) => competitors.turn().map(|()| Vec::new()),
        }
    }

    /// vCPUs that came to another node since the look before, and which.
    pub fn look(&self, machine: &mut Machine) -> Result<Vec<(usize, usize)>> {
        match self {
            Self::Hand => Ok(Vec::new()),
            Self::Balancer(_) => machine.look(),
        }
    }

    /// vCPUs stay where they are now.
    pub fn end(self, machine: &mut Machine) -> Result<()> {
        match self {
            Self::Hand => Ok(()),
            Self::Balancer(_) => machine.hold(),
        }
    }
}

/// Threads that want all of a CPU each, on the CPUs of one node.
pub struct Competitors {
    node: usize,
    ended: Arc<AtomicBool>,
    threads: Vec<(i32, JoinHandle<()>)>,
}

impl Competitors {
    /// On node 0.
    fn start() -> Result<Self> {
        let mut competitors = Self { node: 0, ended: Arc::default(), threads: Vec::new() };
        for _ in 0..COMPETITORS {
            let (ended, (sender, receiver)) = (Arc::clone(&competitors.ended), channel());
            let thread = thread::Builder::new().name("competitor".to_owned()).spawn(move || {
                // If this fails, the receiver is gone.
                let _ = sender.send(gettid().as_raw());
                while !ended.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            })?;
            let tid = receiver.recv_timeout(HANG_LIMIT).context("a competitor does not start")?;
            competitors.threads.push((tid, thread));
            affine(tid, &CPUS[competitors.node])?;
        }
        Ok(competitors)
    }

    /// To the other node.
    fn turn(&mut self) -> Result<()> {
        self.node = 1 - self.node;
        self.threads.iter().try_for_each(|(tid, _)| affine(*tid, &CPUS[self.node]))
    }
}

impl Drop for Competitors {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for (_, thread) in self.threads.drain(..) {
            // One that panicked has ended, too.
            let _ = thread.join();
        }
    }
}
