//! Non-owner writes as programs make them: what dsm-run's programs touched, in the same order by each protocol.
//!
//! A program is recorded by the default protocol without its guesses (migratory pages, prefetch), so that the list has each
//! page that a node came to need, once for reading and once for writing. Then nodes go through the list, one step at a time.

use crate::{
    cluster::{Cluster, Shape},
    peer::Kind,
    programs::{self, NODES},
    protocol::word,
    report::Replay,
};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::{
    collections::HashMap,
    fs,
    path::Path,
    sync::atomic::Ordering::{Relaxed, SeqCst},
    time::{Duration, Instant},
};
use vnuma_bench_figures::stats::median;
use vnuma_dsm_node::{Found, Node};

/// Pages of a program.
const PAGES: usize = 1024;
const WORDS: usize = 512;
/// Pages that are touched before the programs', so that connections and code are warm; and how often.
const WARM: usize = 64;
const WARM_ROUNDS: usize = 4;
/// How often each protocol goes through all programs in each placement. Medians count.
const PASSES: usize = 5;
/// The name of all programs together.
pub const ALL: &str = "all";

/// A node touches a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Step {
    pub node: u8,
    pub page: usize,
    pub write: bool,
    /// Words that a write changes.
    pub changed: u16,
}

/// What a program touched.
pub struct Recording {
    pub program: String,
    pub steps: Vec<Step>,
}

/// All programs but the memory test, on a transport.
pub fn record(dsm_run: &Path, kind: Kind) -> Result<Vec<Recording>> {
    let arguments = ["--json", "--touches", "--without", "migratory", "--without", "prefetch", "--transport"];
    let run = |(name, further, size): (&str, &[&str], u32)| {
        let mut command = programs::command(dsm_run, name, further, size);
        command.args(arguments).arg(kind.name());
        let output = programs::limited(&mut command)?;
        let mut value: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("the report of dsm-run")?;
        let touches =
            value.pointer_mut("/stats/touches").context("/stats/touches: not in the report of dsm-run")?;
        let steps: Vec<Step> = serde_json::from_value(touches.take()).context("/stats/touches")?;
        let fits = |step: &Step| step.node < NODES && step.page < PAGES && usize::from(step.changed) <= WORDS;
        ensure!(
            steps.iter().all(fits),
            "{name}: /stats/touches: a node, page or number of words is too large"
        );
        Ok(Recording { program: name.to_owned(), steps })
    };
    programs::realistic().map(run).collect()
}

/// Carries out steps of one node, and says how long each has taken. What a write changes besides its first word is not timed.
pub fn take(node: &Node, steps: &[Step]) -> Vec<Duration> {
    let one = |step: &Step| {
        let first = word(node, step.page, 0);
        let begin = Instant::now();
        if step.write {
            first.fetch_add(1, SeqCst);
        } else {
            first.load(SeqCst);
        }
        let taken = begin.elapsed();
        let count = usize::from(step.changed);
        // Spread, so that a difference is as long as it can be.
        for index in (1..count).filter(|_| step.write) {
            word(node, step.page, index * WORDS / count).fetch_add(1, Relaxed);
        }
        taken
    };
    steps.iter().map(one).collect()
}

pub fn read(path: &Path) -> Result<Vec<Step>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let step = |line: &str| -> Result<Step> {
        let words: Vec<usize> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [node, page, write, changed] = words[..] else { anyhow::bail!("{line:?}: four numbers") };
        Ok(Step { node: node.try_into()?, page, write: write > 0, changed: changed.try_into()? })
    };
    text.lines().map(step).collect()
}

fn write(path: &Path, steps: &[Step]) -> Result<()> {
    let line =
        |step: &Step| format!("{} {} {} {}\n", step.node, step.page, u8::from(step.write), step.changed);
    fs::write(path, steps.iter().map(line).collect::<String>()).with_context(|| path.display().to_string())
}

/// The programs behind each other, each in pages of its own, with the managers that dsm-run has; the warm-up first. Also the
/// number of steps of the warm-up.
fn together(recordings: &[Recording]) -> (Vec<Step>, usize, Vec<(u8, usize)>) {
    let end = recordings.len() * PAGES;
    let warm = |index: usize| {
        let (round, page) = (index / WARM, index % WARM);
        // Each page with each node in turn.
        Step { node: ((page + round) % usize::from(NODES)) as u8, page: end + page, write: true, changed: 1 }
    };
    let mut steps: Vec<_> = (0..WARM_ROUNDS * WARM).map(warm).collect();
    for (index, recording) in recordings.iter().enumerate() {
        steps.extend(recording.steps.iter().map(|step| Step { page: index * PAGES + step.page, ..*step }));
    }
    let each = |pages: usize| (0..NODES).map(move |node| (node, pages / usize::from(NODES)));
    let managed = recordings.iter().flat_map(|_| each(PAGES)).chain(each(WARM)).collect();
    (steps, WARM_ROUNDS * WARM, managed)
}

/// What one pass has shown.
struct Pass {
    taken: Vec<Duration>,
    messages: u64,
    found: Found,
}

/// All steps by a new cluster.
fn pass(kind: Kind, mode: &str, shape: &Shape, steps: &[Step], warm: usize) -> Result<Pass> {
    let mut cluster = Cluster::new(kind, mode, shape)?;
    let go = |cluster: &mut Cluster, from: usize, to: usize| -> Result<Vec<Duration>> {
        let mut taken = Vec::new();
        let mut begin = from;
        for run in steps[from..to].chunk_by(|one, next| one.node == next.node) {
            taken.extend(cluster.take(run[0].node, begin..begin + run.len())?);
            begin += run.len();
        }
        Ok(taken)
    };
    go(&mut cluster, 0, warm)?;
    let messages =
        |cluster: &mut Cluster| Ok::<_, anyhow::Error>(cluster.spent()?.map(|spent| spent.messages));
    let before: u64 = messages(&mut cluster)?.iter().sum();
    let taken = go(&mut cluster, warm, steps.len())?;
    let after: u64 = messages(&mut cluster)?.iter().sum();
    Ok(Pass { taken, messages: after - before, found: cluster.found()? })
}

/// By `ivy` and by the default protocol, pass by pass in turn. Each node is on the CPU of each other one in one of three
/// placements, so that none is nearer to another.
pub fn measure(kind: Kind, recordings: &[Recording]) -> Result<Vec<Replay>> {
    let directory = tempfile::tempdir()?;
    let (steps, warm, managed) = together(recordings);
    let path = directory.path().join("steps");
    write(&path, &steps)?;
    let modes = ["ivy", "default"];
    let mut passes = modes.map(|_| (1..NODES).map(|_| Vec::new()).collect::<Vec<Vec<Pass>>>());
    for _ in 0..PASSES {
        for beside in 1..NODES {
            let (managed, path) = (managed.clone(), Some(path.clone()));
            let shape = Shape { managed, beside: Some(beside), steps: path, impatient: false };
            for (mode, passes) in modes.iter().zip(&mut passes) {
                passes[usize::from(beside) - 1].push(pass(kind, mode, &shape, &steps, warm)?);
            }
        }
    }
    let all: Vec<Step> = recordings.iter().flat_map(|recording| recording.steps.clone()).collect();
    let mut replays = Vec::new();
    for (mode, passes) in modes.into_iter().zip(&passes) {
        let us = typical(passes, all.len());
        let mut begin = 0;
        let mut sum = Replay { transport: kind.name(), mode, program: ALL.to_owned(), ..Replay::default() };
        for Recording { program, steps } in recordings {
            let part = &us[begin..begin + steps.len()];
            let one = Replay { transport: kind.name(), mode, program: program.clone(), ..judge(steps, part) };
            sum.add(&one);
            replays.push(one);
            begin += steps.len();
        }
        let of_all = || passes.iter().flatten();
        let count = of_all().count() as f64;
        let asked = |find: fn(&Found) -> u64| of_all().map(|pass| find(&pass.found)).sum::<u64>() as f64;
        let (hints, elsewhere) = (asked(|found| found.hint), asked(|found| found.elsewhere));
        sum.hint_rate = Some(hints / (hints + elsewhere));
        sum.messages = Some(of_all().map(|pass| pass.messages).sum::<u64>() as f64 / count);
        replays.push(sum);
    }
    Ok(replays)
}

/// What each step takes in microseconds: the median of the passes, and the mean of the placements.
fn typical(passes: &[Vec<Pass>], steps: usize) -> Vec<f64> {
    let micros = |pass: &Pass, step: usize| pass.taken[step].as_nanos() as f64 / 1000.0;
    let middle =
        |passes: &Vec<Pass>, step| median(passes.iter().map(|pass| micros(pass, step))).unwrap_or_default();
    let mean = |step| passes.iter().map(|passes| middle(passes, step)).sum::<f64>() / passes.len() as f64;
    (0..steps).map(mean).collect()
}

/// A page as a protocol has it that guesses nothing.
struct State {
    owner: u8,
    /// Who has read it since it was written, besides the owner, and how long each of them has waited.
    read: HashMap<u8, f64>,
}

/// What a program's writes have cost whose page a second node owned and a third manages. If the writer had read the page before,
/// what that took counts, too: a protocol may hand the page over at once.
fn judge(steps: &[Step], us: &[f64]) -> Replay {
    let manager = |page: usize| (page * usize::from(NODES) / PAGES) as u8;
    let mut pages: HashMap<usize, State> = HashMap::new();
    let mut replay = Replay { steps: steps.len(), steps_us: us.iter().sum(), ..Replay::default() };
    for (step, us) in steps.iter().zip(us) {
        let fresh = || State { owner: manager(step.page), read: HashMap::new() };
        let state = pages.entry(step.page).or_insert_with(fresh);
        if !step.write {
            if state.owner != step.node {
                state.read.insert(step.node, *us);
            }
            continue;
        }
        let owner = std::mem::replace(&mut state.owner, step.node);
        let mut read = std::mem::take(&mut state.read);
        let before = read.remove(&step.node);
        let manager = manager(step.page);
        let us = us + before.unwrap_or(0.0);
        if owner == step.node || owner == manager {
            continue;
        }
        if step.node == manager {
            replay.by_manager += 1;
            replay.by_manager_us += us;
            continue;
        }
        replay.writes += 1;
        replay.writes_us += us;
        replay.read_before += usize::from(before.is_some());
        replay.with_copies += usize::from(!read.is_empty());
    }
    replay
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(node: u8, page: usize, write: bool) -> Step {
        Step { node, page, write, changed: 3 }
    }

    #[test]
    fn a_write_is_charged_with_the_read_before_it() {
        // Node 0 manages page 5, and writes it once.
        let steps = [
            step(3, 5, true),
            step(1, 5, false),
            step(2, 5, false),
            step(1, 5, true),
            step(1, 5, true),
            step(2, 5, false),
            step(0, 5, true),
            step(3, 5, false),
        ];
        let us = [1000.0, 20.0, 300.0, 4.0, 5000.0, 300.0, 50.0, 1.0];
        let replay = judge(&steps, &us);
        assert_eq!((replay.steps, replay.steps_us), (8, 6675.0));
        assert_eq!((replay.writes, replay.writes_us), (1, 24.0));
        assert_eq!((replay.read_before, replay.with_copies), (1, 1));
        assert_eq!((replay.by_manager, replay.by_manager_us), (1, 50.0));
    }

    #[test]
    fn programs_have_pages_and_managers_of_their_own() {
        let recordings =
            [0, 1].map(|page| Recording { program: page.to_string(), steps: vec![step(2, page, true)] });
        let (steps, warm, managed) = together(&recordings);
        assert_eq!((steps.len(), warm), (WARM_ROUNDS * WARM + 2, WARM_ROUNDS * WARM));
        assert_eq!(steps[warm..].iter().map(|step| step.page).collect::<Vec<_>>(), [0, PAGES + 1]);
        assert_eq!(managed.iter().map(|(_, pages)| pages).sum::<usize>(), 2 * PAGES + WARM);
        assert!(steps[..warm].iter().all(|step| step.page >= 2 * PAGES));
        // As dsm-run divides them.
        assert!(managed[..4] == [(0, 256), (1, 256), (2, 256), (3, 256)]);
    }

    #[test]
    fn steps_go_there_and_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("steps");
        let steps = [step(0, 9, true), step(3, 2000, false)];
        write(&path, &steps).expect("written");
        assert_eq!(read(&path).expect("read"), steps);
        fs::write(&path, "1 2 3").expect("written");
        assert!(read(&path).is_err());
    }
}
