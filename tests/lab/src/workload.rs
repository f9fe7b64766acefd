//! In a guest with two nodes, an agent that was told where the guest's devices are: what it places, what it leaves alone, and what
//! is there after each of its ends. The guest has a card on node 0 and a disk on node 1, and one CPU on each.
//!
//! | process | found by | control group | belongs on |
//! |---|---|---|---|
//! | `library` | a file with the name of a library, in which it runs code | the root | node 0, the card's |
//! | `group` | the same | its own, with a cpuset | node 0 |
//! | `file` | a UIO file that it has open, which drives the disk | the root | node 1 |
//! | `other` | nothing | the root | stays |

use crate::placement::CLASS as DISK_CLASS;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use vnuma_scenario::{HANG_LIMIT, PCI_DEVICES, Process, Vm, wait_for};

const PROGRAM: &str = "/root/vnuma-guest";
/// Where both are on the server.
const BUILT: &str = "/usr/local/bin/vnuma-guest";
const RULES: &str =
    "interval_s = 1\nrelease_after = 2\ncpu_reserve_percent = 0\nmemory_reserve_percent = 1\n";
/// CPUs of the whole guest, of node 0, and of node 1.
const ALL: &str = "0-1";
const CARD: &str = "0";
const DISK: &str = "1";
/// Pages of the memory that `library` has written while it ran on node 1.
const PAGES: u64 = 4000;

pub fn run(vm: &Vm, card_class: &str) -> Result<()> {
    vm.put(BUILT, PROGRAM)?;
    sh(vm, &format!("printf '{}' > /root/rules.toml", RULES.replace('\n', "\\n")))?;
    start_processes(vm, card_class)?;
    let before = state(vm, card_class)?;
    expect(&before, &[("library", ALL), ("group", ALL), ("file", ALL), ("other", ALL), ("left", "")])?;
    ensure!(before["interrupts"] == ALL, "the card's interrupts: {before:?}");
    ensure!(pages(&before, 1)? >= PAGES, "the memory is not on node 1: {before:?}");

    let agent = start(vm, card_class, true)?;
    let placed = state(vm, card_class)?;
    expect(&placed, &[("other", ALL), ("cpuset", CARD), ("interrupts", CARD)])?;
    wait_for("memory to come along", HANG_LIMIT, || Ok(pages(&state(vm, card_class)?, 1)? < PAGES / 10))?;
    // On a busy machine the agent may find a node busy for a while, and let go of what it has placed there.
    let listed = || vm.exec(&[PROGRAM, "list"]);
    wait_for("the list to have all three", HANG_LIMIT, || Ok(listed()?.matches(": placed:").count() == 3))?;
    print!("{}", listed()?);
    println!("threads, memory and interrupts are on the node of the device; another process is where it was");
    sh(vm, "kill -TERM $(pgrep -f 'vnuma-guest [r]un')")?;
    expect_nothing_left(vm, card_class, agent).context("after SIGTERM")?;

    let agent = start(vm, card_class, true)?;
    expect_released_when_busy(vm, card_class)?;
    sh(vm, "kill -KILL $(pgrep -f 'vnuma-guest [r]un')")?;
    expect_nothing_left(vm, card_class, agent).context("after SIGKILL")?;

    // `library` goes on spinning, so that there is no time to spare for it.
    let agent = start(vm, card_class, false)?;
    sh(vm, "kill -KILL $(pgrep -f 'vnuma-guest [g]uard') $(pgrep -f 'vnuma-guest [r]un')")?;
    expect(&state(vm, card_class)?, &[("file", DISK)]).context("nobody is left to undo it")?;
    vm.exec(&[PROGRAM, "undo"])?;
    expect_nothing_left(vm, card_class, agent).context("after undo")?;
    sh(vm, "kill -KILL $(cat /root/*.pid); sleep 1; rmdir /sys/fs/cgroup/group")?;
    println!("nothing is left after SIGTERM, after SIGKILL, and after undo when all were killed");
    Ok(())
}

fn sh(vm: &Vm, script: &str) -> Result<String> {
    vm.exec(&["sh", "-c", script])
}

/// The library is a real one under another name. Memory is local to where it is first touched.
fn start_processes(vm: &Vm, card_class: &str) -> Result<()> {
    let script = format!(
        "set -e; cd /root
        modprobe -a e1000e uio_pci_generic
        for d in {PCI_DEVICES}/*; do
            if test $(cat $d/class) = {card_class}; then
                for link in $d/net/*; do ip link set ${{link##*/}} up; done
                for irq in $d/msi_irqs/*; do echo {ALL} > /proc/irq/${{irq##*/}}/smp_affinity_list; done
            elif test $(cat $d/class) = {DISK_CLASS}; then
                echo uio_pci_generic > $d/driver_override
                test ! -e $d/driver || echo ${{d##*/}} > $d/driver/unbind
                echo ${{d##*/}} > /sys/bus/pci/drivers_probe
            fi
        done
        cp -L /usr/lib/x86_64-linux-gnu/libnuma.so.1 libibverbs.so.1
        echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control
        mkdir /sys/fs/cgroup/group
        echo {ALL} > /sys/fs/cgroup/group/cpuset.cpus
        spin='$SIG{{USR1}} = sub {{ while (1) {{}} }}; my $x = \"a\" x 20000000; sleep 1000'
        LD_PRELOAD=/root/libibverbs.so.1 taskset 2 perl -e \"$spin\" >/dev/null 2>&1 & echo $! > library.pid
        LD_PRELOAD=/root/libibverbs.so.1 memcached -u root -U 0 -l 127.0.0.1 -t 4 >/dev/null 2>&1 & echo $! > group.pid
        cat group.pid > /sys/fs/cgroup/group/cgroup.procs
        sleep 1000 < /dev/uio0 >/dev/null 2>&1 & echo $! > file.pid
        sleep 1000 >/dev/null 2>&1 & echo $! > other.pid
        until grep -q 'anon=[4-9][0-9][0-9][0-9]' /proc/$(cat library.pid)/numa_maps; do sleep 0.1; done
        taskset -p 3 $(cat library.pid)"
    );
    sh(vm, &script).map(drop).context("processes in the guest")
}

/// Affinities of the threads of each process, each once; the cpuset, the interrupts, the pages, and what is left of an agent.
fn state(vm: &Vm, card_class: &str) -> Result<BTreeMap<String, String>> {
    let script = format!(
        "cd /root
        for name in library group file other; do
            echo $name $(grep -h Cpus_allowed_list /proc/$(cat $name.pid)/task/*/status | cut -f 2 | sort -u)
        done
        echo cpuset $(cat /sys/fs/cgroup/group/cpuset.cpus)
        for d in {PCI_DEVICES}/*; do
            test $(cat $d/class) = {card_class} || continue
            echo interrupts $(for irq in $d/msi_irqs/*; do cat /proc/irq/${{irq##*/}}/smp_affinity_list; done | sort -u)
        done
        echo pages $(grep -h 'anon=[4-9][0-9][0-9][0-9]' /proc/$(cat library.pid)/numa_maps)
        echo left $(ls /run/vnuma-guest 2>/dev/null | grep -v lock)"
    );
    let text = sh(vm, &script)?;
    let pair = |line: &str| {
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        (key.to_owned(), value.to_owned())
    };
    Ok(text.lines().map(pair).collect())
}

fn expect(state: &BTreeMap<String, String>, expected: &[(&str, &str)]) -> Result<()> {
    for (key, value) in expected {
        ensure!(state.get(*key).map(String::as_str) == Some(value), "{key}: expected {value:?}: {state:?}");
    }
    Ok(())
}

/// Pages of the large mapping of `library` on a node.
fn pages(state: &BTreeMap<String, String>, node: u32) -> Result<u64> {
    let words = state.get("pages").context("no pages")?.split(' ');
    let prefix = format!("N{node}=");
    words.filter_map(|word| word.strip_prefix(&prefix)).map(|count| Ok(count.parse::<u64>()?)).sum()
}

/// Starts the agent, and waits until it has placed all, or those of the disk's node at least.
fn start(vm: &Vm, card_class: &str, all: bool) -> Result<Process> {
    let agent = vm.spawn(&[PROGRAM, "run", "--rules", "/root/rules.toml"])?;
    let mut last = BTreeMap::new();
    let mut expected = vec![("file", DISK)];
    if all {
        expected.extend([("library", CARD), ("group", CARD)]);
    }
    wait_for("the agent to place what it finds", HANG_LIMIT, || {
        last = state(vm, card_class)?;
        Ok(expect(&last, &expected).is_ok())
    })
    .with_context(|| format!("expected {expected:?}, found {last:?}"))?;
    Ok(agent)
}

/// `library` wants its CPU for itself, and another process does, too.
fn expect_released_when_busy(vm: &Vm, card_class: &str) -> Result<()> {
    sh(
        vm,
        "kill -USR1 $(cat /root/library.pid)
        taskset 1 sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $! > /root/hog.pid",
    )?;
    let mut last = BTreeMap::new();
    wait_for("a process to be released that waits on a busy node", HANG_LIMIT, || {
        last = state(vm, card_class)?;
        Ok(expect(&last, &[("library", ALL)]).is_ok())
    })
    .with_context(|| format!("found {last:?}"))?;
    println!("a process that waits for CPUs of a busy node is released");
    Ok(())
}

/// The agent has ended, or is about to.
fn expect_nothing_left(vm: &Vm, card_class: &str, mut agent: Process) -> Result<()> {
    let everything = [
        ("library", ALL),
        ("group", ALL),
        ("file", ALL),
        ("other", ALL),
        ("cpuset", ALL),
        ("interrupts", ALL),
        ("left", ""),
    ];
    let mut last = BTreeMap::new();
    wait_for("everything to be undone", HANG_LIMIT, || {
        last = state(vm, card_class)?;
        Ok(expect(&last, &everything).is_ok())
    })
    .with_context(|| format!("found {last:?}"))?;
    wait_for("the agent to end", HANG_LIMIT, || Ok(agent.0.try_wait()?.is_some()))?;
    let left = sh(vm, "pgrep -f 'vnuma-guest [rg]u' || true")?;
    ensure!(left.trim().is_empty(), "processes of the agent: {left}");
    Ok(())
}
