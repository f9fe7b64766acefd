//! A guest moves from topology to topology; each that it comes to is compared with a guest that booted with it.

use crate::compare::{Case, Known, differences};
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use vnuma_random::Rng;
use vnuma_scenario::{Process, Vm};

/// Where moves end. The first is the one with which the guest boots that moves.
/// A guest numbers its nodes as it finds them, those of CPUs in their order first. So the nodes of these are in that order.
struct Ends {
    nodes: usize,
    /// Cores of a socket.
    cores: usize,
    /// The node of each vCPU.
    places: &'static [&'static [usize]],
}

/// As the guest booted, with other CPUs, with two nodes without vCPUs, with three. Distances are 10, 11 and 21.
const SOCKETS: Ends = Ends {
    nodes: 4,
    cores: 1,
    places: &[&[0, 1, 2, 3, 3], &[0, 0, 1, 2, 3], &[0, 1, 0, 1, 0], &[0, 0, 0, 0, 0]],
};
/// No guest boots with a socket on two nodes. On the way there are such.
const CORES: Ends = Ends { nodes: 2, cores: 2, places: &[&[0, 0, 1, 1], &[0, 0, 0, 0]] };
/// Where this program and the driver are in a guest.
const PROGRAM: &str = "/root/lab-kernel-state";
const DRIVER: &str = "/root/vnuma.ko";
/// So many sequences show all that is in the list.
const ENOUGH: usize = 20;

/// What to play.
#[derive(Args)]
pub struct Arguments {
    /// Kernel of the guests
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Seed of the sequences of moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of the first sequence, to play one again
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// How many sequences
    #[arg(long, default_value_t = ENOUGH)]
    sequences: usize,
    /// Give sockets two cores, which share caches, and the guest two nodes
    #[arg(long)]
    cores: bool,
    /// Folder on the server with vnuma.ko of that kernel and vnuma-fake-host
    #[arg(long, default_value = "/root/driver")]
    driver: String,
    /// Folder where states of booted guests are kept, for further runs with that kernel
    #[arg(long)]
    booted: Option<PathBuf>,
}

impl Arguments {
    fn ends(&self) -> &'static Ends {
        if self.cores { &CORES } else { &SOCKETS }
    }
}

fn placed(place: &[usize]) -> String {
    let pairs = place.iter().enumerate().map(|(vcpu, node)| format!("{vcpu}:{node}"));
    pairs.collect::<Vec<_>>().join(",")
}

fn boot(name: &str, arguments: &Arguments, place: &[usize]) -> Result<Vm> {
    let ends = arguments.ends();
    let (nodes, cores, place) = (ends.nodes.to_string(), ends.cores.to_string(), placed(place));
    let words = ["--kernel", &arguments.kernel, "--nodes", &nodes, "--cores", &cores, "--memory", "768M"];
    let words = [&words[..], &["--place", &place]].concat();
    let vm = Vm::start(name, &words.into_iter().map(str::to_owned).collect::<Vec<_>>())?;
    let here = std::env::current_exe().context("this program")?;
    vm.put(&here.display().to_string(), PROGRAM)?;
    Ok(vm)
}

/// This program in a guest. It reads symbols and types once, which takes longer than all the rest.
struct Reader(Process);

impl Reader {
    fn start(vm: &Vm) -> Result<Self> {
        vm.spawn(&[PROGRAM, "show", "--follow"]).map(Self)
    }

    fn state(&mut self) -> Result<Json> {
        let (input, output) = (self.0.0.stdin.as_mut(), self.0.0.stdout.as_mut());
        let (input, output) = input.zip(output).context("pipes to a guest")?;
        writeln!(input).context("to a guest")?;
        let mut line = Vec::new();
        // Nothing is behind the line: there is one for each question.
        let mut bytes = BufReader::with_capacity(1 << 16, output);
        bytes.read_until(b'\n', &mut line).context("from a guest")?;
        serde_json::from_slice(&line).context("what a guest knows is no JSON")
    }
}

/// `vnuma-fake-host`, which publishes.
struct Host {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Host {
    fn start(program: &str, vm: &Vm) -> Result<Self> {
        let mut child = Command::new(program)
            .args([
                "--qmp",
                &vm.monitor().display().to_string(),
                "--bus",
                "vnuma0",
                "--listen",
                "/run/kernel-state.sock",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context(program.to_owned())?;
        let input = child.stdin.take().context("its input")?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let mut host = Self { child, input, output };
        let answer = host.answer()?;
        ensure!(answer == "attached", "vnuma-fake-host: {answer:?}, expected \"attached\"");
        Ok(host)
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("vnuma-fake-host")?;
        Ok(line.trim_end().to_owned())
    }

    fn say(&mut self, line: &str, expected: &str) -> Result<()> {
        writeln!(self.input, "{line}").context("vnuma-fake-host")?;
        let answer = self.answer()?;
        ensure!(answer.starts_with(expected), "vnuma-fake-host: {line}: {answer:?}, expected \"{expected}\"");
        Ok(())
    }

    fn publish(&mut self, place: &[usize]) -> Result<()> {
        self.say(&format!("publish {}", placed(place)), "acknowledged ")
    }

    fn set_distances(&mut self, distance: &Distances) -> Result<()> {
        for (from, row) in distance.iter().enumerate() {
            for (to, value) in row.iter().enumerate() {
                self.say(&format!("distance {from} {to} {value}"), "ok")?;
            }
        }
        Ok(())
    }
}

type Distances = Vec<Vec<u64>>;

fn distances_of(state: &Json, nodes: usize) -> Result<Distances> {
    let mut all = vec![vec![0; nodes]; nodes];
    for (name, node) in state["node"].as_object().context("no nodes")? {
        let row = name.split(' ').next().and_then(|number| number.parse::<usize>().ok());
        let row = row.and_then(|row| all.get_mut(row)).with_context(|| format!("node \"{name}\""))?;
        for (to, value) in row.iter_mut().enumerate() {
            *value = node["distances"][to].as_u64().with_context(|| format!("distances of node {name}"))?;
        }
    }
    Ok(all)
}

/// From all nodes as near as each other to no two alike.
fn random_distances(rng: &mut Rng, nodes: usize) -> Distances {
    let kinds = 1 + rng.within(0..nodes as u64);
    let mut all = vec![vec![10; nodes]; nodes];
    for (from, to) in (0..nodes).flat_map(|from| (0..from).map(move |to| (from, to))) {
        let value = 20 + rng.within(0..kinds);
        (all[from][to], all[to][from]) = (value, value);
    }
    all
}

fn random_place(rng: &mut Rng, last: &[usize], nodes: usize) -> Vec<usize> {
    let mut place = last.to_vec();
    match rng.index(4) {
        0 => place.fill(rng.index(nodes)),
        1 => place.fill_with(|| rng.index(nodes)),
        _ => {
            let vcpu = rng.index(place.len());
            place[vcpu] = rng.index(nodes);
        }
    }
    place
}

/// Moves at random, then to the end: the booted distances, and each vCPU where it was booted there.
fn sequence(host: &mut Host, rng: &mut Rng, booted: &Distances, end: &[usize]) -> Result<usize> {
    let (moves, nodes) = (1 + rng.index(6), booted.len());
    let mut place = end.to_vec();
    for _ in 0..moves {
        if rng.chance(300) {
            host.set_distances(&random_distances(rng, nodes))?;
        }
        place = random_place(rng, &place, nodes);
        host.publish(&place)?;
    }
    if rng.chance(500) {
        // The distances first, or else together with the last move.
        host.set_distances(booted)?;
        host.publish(&place)?;
    }
    host.set_distances(booted)?;
    host.publish(end)?;
    Ok(moves + 1)
}

/// Shows what differs and is not in the list; how much that is.
pub fn judge(known: &mut Known, what: &str, case: &Case<'_>) -> Result<usize> {
    let (all, unknown) = known.unknown(case)?;
    println!("{what}: {all} differences, {} of them not in the list", unknown.len());
    for one in &unknown {
        println!("  {}: booted {}, moved {}", one.path, one.booted, one.moved);
    }
    Ok(unknown.len())
}

/// Two boots with one topology differ in nothing: what does is not fit to be compared.
fn compare_boots(first: &Json, second: &Json) -> usize {
    let found = differences(first, second);
    println!("two boots with one topology: {} differences", found.len());
    for one in &found {
        println!("  {}: {}, then {}", one.path, one.booted, one.moved);
    }
    found.len()
}

fn check_log(vm: &Vm) -> Result<()> {
    let log = vm.exec(&["dmesg"])?;
    let bad: Vec<_> = log
        .lines()
        .filter(|line| ["WARNING:", "BUG:", "Oops"].iter().any(|bad| line.contains(bad)))
        .collect();
    ensure!(bad.is_empty(), "the guest's kernel complains:\n{}", bad.join("\n"));
    Ok(())
}

/// What a guest knows that booted with a topology.
fn booted(arguments: &Arguments, place: &[usize]) -> Result<Json> {
    let kept = arguments.booted.as_ref().map(|folder| folder.join(placed(place)));
    if let Some(text) = kept.as_ref().and_then(|path| fs::read_to_string(path).ok()) {
        return serde_json::from_str(&text).with_context(|| format!("{kept:?}"));
    }
    let vm = boot("booted", arguments, place)?;
    let state = Reader::start(&vm)?.state()?;
    for (vcpu, node) in place.iter().enumerate() {
        let found = &state["cpu"][vcpu.to_string()]["x86_cpu_to_node_map"];
        ensure!(found == node, "CPU {vcpu} booted on node {found}, expected {node}");
    }
    println!("booted with {}", placed(place));
    if let (Some(path), Some(folder)) = (kept, &arguments.booted) {
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, state.to_string()))
            .context(path.display().to_string())?;
    }
    Ok(state)
}

/// Plays it.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { kernel, seed, sequences, driver, .. } = arguments;
    let Ends { nodes, places, .. } = arguments.ends();
    let numbers = arguments.first..arguments.first.saturating_add(*sequences);
    let ends: BTreeSet<_> = numbers.clone().take(places.len()).map(|number| number % places.len()).collect();
    let of_end = |end: usize| Ok((end, booted(arguments, places[end])?));
    let booted = ends.into_iter().map(of_end).collect::<Result<BTreeMap<_, _>>>()?;
    let vm = boot("moved", arguments, places[0])?;
    let mut reader = Reader::start(&vm)?;
    let before = reader.state()?;
    let mut unknown = booted.get(&0).map_or(0, |booted| compare_boots(booted, &before));
    vm.put(&format!("{driver}/vnuma.ko"), DRIVER)?;
    vm.exec(&["insmod", DRIVER, "mode=fast"])?;
    let mut host = Host::start(&format!("{driver}/vnuma-fake-host"), &vm)?;
    host.say(&format!("nodes {nodes}"), "ok")?;
    let distances = distances_of(&before, *nodes)?;
    host.set_distances(&distances)?;
    host.publish(places[0])?;
    let mut known = Known::read()?;
    for number in numbers {
        let mut rng = Rng::new(seed.wrapping_mul(1000).wrapping_add(number as u64));
        let end = number % places.len();
        let publications = sequence(&mut host, &mut rng, &distances, places[end])?;
        let what = format!("sequence {number} to {}, {publications} publications", placed(places[end]));
        let moved = reader.state()?;
        let case = Case { booted: &booted[&end], moved: &moved, before: &before };
        unknown += judge(&mut known, &what, &case)?;
    }
    check_log(&vm)?;
    known.used().iter().for_each(|one| println!("differs: {one}"));
    ensure!(unknown == 0, "{unknown} differences are not in the list");
    // Of sockets with several cores there are few topologies.
    let unused = if *sequences < ENOUGH || arguments.cores { Vec::new() } else { known.unused(kernel) };
    ensure!(unused.is_empty(), "in the list, but differs nowhere: {}", unused.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_topologies_are_valid() {
        let mut rng = Rng::new(1);
        for ends in [&SOCKETS, &CORES] {
            let mut place = ends.places[0].to_vec();
            for _ in 0..1000 {
                place = random_place(&mut rng, &place, ends.nodes);
                assert!(place.len() == ends.places[0].len() && place.iter().all(|node| *node < ends.nodes));
                let distances = random_distances(&mut rng, ends.nodes);
                for (from, row) in distances.iter().enumerate() {
                    for (to, value) in row.iter().enumerate() {
                        assert_eq!(*value, distances[to][from]);
                        assert!((*value == 10) == (from == to) && *value < 256);
                    }
                }
            }
        }
    }

    #[test]
    fn guests_boot_with_the_ends() {
        for Ends { nodes, cores, places } in [&SOCKETS, &CORES] {
            for place in *places {
                let mut found = 0;
                for node in *place {
                    assert!(*node <= found && *node < *nodes, "{place:?}: its nodes are numbered otherwise");
                    found = found.max(node + 1);
                }
                assert!(place.chunks(*cores).all(|socket| socket.iter().all(|node| *node == socket[0])));
            }
        }
    }
}
