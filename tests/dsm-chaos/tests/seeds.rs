//! Seeded runs on real nodes, each a process, of which one fails: it is killed, stopped, slowed, cut off, or sends garbage.
//!
//! Survivors go on and say who is lost. What they, and all others, have read is compared with what was written. A seed decides
//! who fails, how and when, and what the nodes do; the scheduler of the machine decides the rest.
//!
//! `VNUMA_SOAK_ROUNDS` sets the number of seeds (two a round), `VNUMA_DSM_SEED` the first.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    io::{BufRead, BufReader, Write},
    net::Ipv4Addr,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vnuma_dsm_chaos::{Conduct, History, Proxy, Record, check};
use vnuma_dsm_transport::Reserved;
use vnuma_random::Rng;

/// Nothing here takes longer unless it hangs.
const HANG: Duration = Duration::from_secs(60);
/// How long nodes read and write.
const MILLIS: u64 = 1300;
/// Runs at a time: most of the time they wait.
const BESIDE: usize = 3;

/// Runs that were started anew, because nodes had not met: at most so many.
static STARTED_ANEW: AtomicU64 = AtomicU64::new(0);
const MOST_ANEW: u64 = 20;

/// What happens to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Killed,
    /// And resumed when the others have gone on.
    Stopped,
    Slowed,
    CutOff,
    Garbage,
    /// No node fails, but none invalidates copies: a test of the checker.
    Forgetful,
}

const FAILURES: [Failure; 5] =
    [Failure::Killed, Failure::Stopped, Failure::Slowed, Failure::CutOff, Failure::Garbage];

struct Plan {
    seed: u64,
    nodes: usize,
    victim: usize,
    failure: Failure,
    after: Duration,
}

fn plan(seed: u64) -> Plan {
    let mut random = Rng::new(seed);
    let mut next = |below: u64| random.within(0..below);
    let nodes = 3 + next(3) as usize;
    let victim = next(nodes as u64) as usize;
    Plan {
        seed,
        nodes,
        victim,
        failure: FAILURES[seed as usize % 5],
        after: Duration::from_millis(100 + next(200)),
    }
}

/// A process that ends with the test.
struct Process {
    child: Child,
    told: Arc<Mutex<String>>,
    /// Receives its messages.
    hears: Option<JoinHandle<()>>,
}

impl Process {
    fn start(
        plan: &Plan,
        node: usize,
        ports: &[u16],
        history: &Path,
        said: &Sender<(usize, String)>,
    ) -> Self {
        let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
        let forgetful = plan.failure == Failure::Forgetful;
        let mut child = Command::new(env!("CARGO_BIN_EXE_dsm-chaos-node"))
            .args(forgetful.then_some("--skip-invalidations"))
            .args(["--node", &node.to_string(), "--ports", &ports.join(",")])
            .args(["--seed", &plan.seed.to_string(), "--millis", &MILLIS.to_string()])
            .arg("--history")
            .arg(history)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        let (output, errors) = (child.stdout.take().expect("output"), child.stderr.take().expect("errors"));
        let (said, told) = (said.clone(), Arc::new(Mutex::new(String::new())));
        thread::spawn(move || {
            BufReader::new(output)
                .lines()
                .map_while(Result::ok)
                .for_each(|line| drop(said.send((node, line))));
            let _ = said.send((node, "ended".to_owned()));
        });
        let heard = Arc::clone(&told);
        let hears = thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                heard.lock().expect("no panic").push_str(&(line + "\n"));
            }
        });
        Self { child, told, hears: Some(hears) }
    }

    fn go(&mut self) {
        // One that has ended already hears nothing.
        let _ = self.child.stdin.as_mut().map(|input| input.write_all(b"go\n"));
    }

    fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
    }

    fn told(&self) -> String {
        self.told.lock().expect("no panic").clone()
    }

    fn end(&mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("waited") {
                // Its last words are why it has ended.
                let _ = self.hears.take().map(JoinHandle::join);
                return status;
            }
            assert!(begin.elapsed() < HANG, "it hangs: {}", self.told());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until each of these nodes has said one of the words, or has ended.
fn hear(
    said: &Receiver<(usize, String)>,
    nodes: impl Iterator<Item = usize>,
    word: &str,
    ended: &mut Vec<usize>,
) {
    let mut missing: Vec<usize> = nodes.filter(|node| !ended.contains(node)).collect();
    while !missing.is_empty() {
        let (node, line) = said.recv_timeout(HANG).expect("it hangs");
        if line == "ended" {
            ended.push(node);
        }
        if line == word || line == "ended" {
            missing.retain(|other| *other != node);
        }
    }
}

/// Waits until all nodes but the victim have said that others are lost, or why they end.
fn all_know(processes: &[Process], victim: usize) {
    let begin = Instant::now();
    let others = || processes.iter().enumerate().filter(|(node, _)| *node != victim);
    let words = [" are lost; the members are ", ": stopped: ", " is lost: its only copy", ": failed: "];
    let knows = |told: String| words.iter().any(|word| told.contains(word));
    while others().any(|(_, process)| !knows(process.told())) {
        assert!(begin.elapsed() < HANG, "nobody has noticed that node {victim} fails");
        thread::sleep(Duration::from_millis(5));
    }
}

/// What all runs have seen.
#[derive(Default)]
struct Sums {
    reads: AtomicU64,
    writes: AtomicU64,
    refused: AtomicU64,
    /// Runs in which all but the victim went on.
    survived: AtomicU64,
}

/// How a run ended, by node.
struct End {
    told: Vec<String>,
    survived: Vec<bool>,
    histories: Vec<Vec<Record>>,
}

/// None where userfaultfd is not permitted.
fn run(plan: &Plan) -> Option<End> {
    let directory = tempfile::tempdir().expect("a directory");
    // Kept until all nodes have ended.
    let reserved = Reserved::new(Ipv4Addr::LOCALHOST.into(), plan.nodes).expect("ports");
    let addresses = reserved.addresses();
    // The node with the higher number dials. What the victim dials, and who dials it, passes by a proxy.
    let mut proxies = Vec::new();
    let mut ports = vec![addresses.iter().map(|address| address.port()).collect::<Vec<_>>(); plan.nodes];
    for (from, ports) in ports.iter_mut().enumerate() {
        for to in (0..from).filter(|to| [from, *to].contains(&plan.victim)) {
            let proxy = Proxy::new(addresses[to]).expect("a proxy");
            ports[to] = proxy.address().port();
            proxies.push(proxy);
        }
    }
    let history = |node: usize| directory.path().join(node.to_string());
    let (sender, said) = channel();
    let mut processes: Vec<_> = (0..plan.nodes)
        .map(|node| Process::start(plan, node, &ports[node], &history(node), &sender))
        .collect();
    let mut ended = Vec::new();
    hear(&said, 0..plan.nodes, "ready", &mut ended);
    if let Some(node) = ended.first() {
        processes.iter_mut().for_each(|process| drop(process.child.stdin.take()));
        processes.iter_mut().for_each(|process| _ = process.end());
        // A busy machine has let a node wait until the others suspected it.
        let told = processes.iter().map(Process::told).collect::<String>();
        if told.contains(": silent: ") {
            assert!(
                STARTED_ANEW.fetch_add(1, SeqCst) < MOST_ANEW,
                "again and again nodes do not start: {told}"
            );
            eprintln!("VNUMA_DSM_SEED={} is started anew: {told}", plan.seed);
            return run(plan);
        }
        let told = processes[*node].told();
        if told.contains("userfaultfd is not permitted") || told.contains("the kernel lacks") {
            eprintln!("skipped: {told}");
            return None;
        }
        panic!("node {node} did not start: {told}");
    }
    processes.iter_mut().for_each(Process::go);
    thread::sleep(plan.after);
    let conduct = |conduct| proxies.iter().for_each(|proxy| proxy.conduct(conduct));
    match plan.failure {
        Failure::Killed => processes[plan.victim].signal(Signal::SIGKILL),
        Failure::Stopped => {
            processes[plan.victim].signal(Signal::SIGSTOP);
            all_know(&processes, plan.victim);
            processes[plan.victim].signal(Signal::SIGCONT);
        }
        Failure::Slowed => conduct(Conduct::Slow { bytes: 1, pause: Duration::from_millis(50) }),
        Failure::CutOff => conduct(Conduct::Cut),
        Failure::Garbage => conduct(Conduct::Garbage { seed: plan.seed }),
        Failure::Forgetful => {}
    }
    hear(&said, 0..plan.nodes, "done", &mut ended);
    // They serve each other until all are done, and know of the failure.
    if plan.failure != Failure::Forgetful {
        all_know(&processes, plan.victim);
        // One that was resumed may not have seen yet that it is excluded, and would leave as if nothing had happened.
        processes[plan.victim].end();
    }
    processes.iter_mut().for_each(|process| drop(process.child.stdin.take()));
    let survived = processes.iter_mut().map(|process| process.end().success()).collect();
    let histories = (0..plan.nodes).map(|node| History::read(&history(node)).expect("a history")).collect();
    Some(End { told: processes.iter().map(Process::told).collect(), survived, histories })
}

fn judge(plan: &Plan, end: &End, sums: &Sums) {
    let End { told, survived, histories } = end;
    let Plan { seed, nodes, victim, failure, .. } = *plan;
    let name = format!("VNUMA_DSM_SEED={seed} VNUMA_SOAK_ROUNDS=1, node {victim} of {nodes} is {failure:?}");
    assert!(!survived[victim], "{name}: it goes on: {}", told[victim]);
    for node in (0..nodes).filter(|node| *node != victim) {
        let told = &told[node];
        // On a busy machine one may be suspected that did nothing wrong. It says so, too.
        let clear = match survived[node] {
            true => told.contains(" are lost; the members are ") && told.contains(&format!("{victim}")),
            // A page may be lost between the look at it and its use.
            false => {
                told.contains(&format!("node {node}: stopped: ")) || told.contains(" is lost: its only copy")
            }
        };
        assert!(clear, "{name}: node {node} has said: {told:?}");
    }
    if survived.iter().filter(|survived| **survived).count() == nodes - 1 {
        sums.survived.fetch_add(1, SeqCst);
    }
    let verdict = check(histories, survived);
    assert!(verdict.wrong.is_empty(), "{name}: {verdict}");
    sums.reads.fetch_add(verdict.reads as u64, SeqCst);
    sums.writes.fetch_add(verdict.writes as u64, SeqCst);
    sums.refused.fetch_add(verdict.refused as u64, SeqCst);
}

#[test]
fn nothing_wrong_is_read_whatever_a_peer_does() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = number("VNUMA_DSM_SEED").unwrap_or(1);
    let count = number("VNUMA_SOAK_ROUNDS").map_or(10, |rounds| rounds * 2);
    let (next, sums) = (AtomicU64::new(first), Sums::default());
    thread::scope(|scope| {
        for _ in 0..BESIDE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= first + count {
                        return;
                    }
                    let plan = plan(seed);
                    let Some(end) = run(&plan) else { return };
                    judge(&plan, &end, &sums);
                }
            });
        }
    });
    let Sums { reads, writes, refused, survived } = sums;
    let [reads, writes, refused, survived] = [reads, writes, refused, survived].map(AtomicU64::into_inner);
    println!(
        "{count} seeds from {first}: {reads} reads, {writes} writes, {refused} refused; in {survived} all but the failed node went on"
    );
    // Not where the test was skipped.
    if reads > 0 && count >= 10 {
        assert!(writes > 100 && refused > 0 && survived > count / 4, "the runs were no test");
    }
}

/// The checker is good for something: it objects if copies are not invalidated.
#[test]
fn what_copies_that_nobody_invalidates_lead_to_is_found() {
    let Some(end) = run(&Plan { failure: Failure::Forgetful, ..plan(1) }) else { return };
    let verdict = check(&end.histories, &end.survived);
    assert!(verdict.wrong.iter().any(|wrong| wrong.contains("had been there")), "{verdict}: {:?}", end.told);
}
