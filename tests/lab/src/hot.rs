//! `adaptive` brings the hottest displaced memory home first: DAMON watches a VM that has two displaced pieces of memory and reads one
//! of them without end. A vnumad that is killed while DAMON watches is cleaned up after, and who else uses DAMON is left alone.

use crate::guest::{check_kernel_log, wait_until_listed};
use crate::pages::Mapping;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::{
    fs::{self, File},
    hint::black_box,
    os::unix::fs::FileExt,
    thread::sleep,
    time::{Duration, Instant},
};
use vnuma_scenario::{HANG_LIMIT, Lines, Process, Vm, vnumactl, vnumad, wait_for};

const NAME: &str = "hot";
const CONFIGURATION: &str = "/root/hot.toml";
/// An emulated server is slow, so that a look may cost more of it. Little moves at a time.
const SETTINGS: &str = "[memory]\nobserve_s = 1\nobserve_permille = 1000\nmib_per_s = 3\n\
    [observe]\ndescribe_interval_ms = 2000\n";
const PROGRAM: &str = "/root/lab-scenario";
const DAMON: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// Has DAMON for itself on some kernels.
const DAMON_STAT: &str = "/sys/module/damon_stat/parameters/enabled";
/// An interval that no other context has.
const FOREIGN: &str = "7777777";
const PAGE: u64 = 4096;
/// Of each of the two.
const MIB: usize = 32;
/// Of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const HOME: u64 = 0;
const OTHER: u64 = 1;
/// When so much of the hot memory is home, no more of the cold one is.
const HOT_SHARE: f64 = 0.9;
const COLD_SHARE: f64 = 0.4;

/// In a guest: fills two pieces of memory, says where they are, and reads the first without end.
pub fn warm() -> Result<()> {
    let fill = |byte: u8| vec![byte; (MIB << 20) + (4 << 20)];
    let (hot, cold) = (fill(1), fill(2));
    let pagemap = File::open("/proc/self/pagemap").context("/proc/self/pagemap")?;
    for memory in [&hot, &cold] {
        let first = (memory.as_ptr() as u64).next_multiple_of(2 << 20) / PAGE;
        let mut entries = vec![0_u8; (MIB << 20) / PAGE as usize * 8];
        pagemap.read_exact_at(&mut entries, first * 8).context("/proc/self/pagemap")?;
        let entry = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        let frames: Vec<String> = entries
            .chunks(8)
            .map(entry)
            .filter(|entry| entry & PRESENT != 0)
            .map(|entry| (entry & FRAME).to_string())
            .collect();
        println!("{}", frames.join(" "));
    }
    loop {
        let sum: u64 = hot.iter().step_by(64).map(|byte| u64::from(*byte)).sum();
        black_box((sum, &cold));
    }
}

struct Run {
    vm: Vm,
    memory: Mapping,
    /// Where QEMU has the pages.
    hot: Vec<u64>,
    cold: Vec<u64>,
}

pub fn run() -> Result<()> {
    if !fs::exists(DAMON)? {
        println!("skipped: this kernel has no DAMON in sysfs");
        return Ok(());
    }
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let vm = Vm::start(NAME, &["--nodes", "2", "--vcpus", "2", "--memory", "512M"].map(str::to_owned))?;
    vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
    let mut program = vm.spawn(&["numactl", "--physcpubind=0", "--membind=0", PROGRAM, "warm"])?;
    let mut said = Lines::of_process(&mut program, "the program in the guest")?;
    // Guest node 0 is the first of the guest's memory.
    let memory = Mapping::bound_to(&vm, HOME)?;
    let mut pages = || -> Result<Vec<u64>> {
        let line = said.next("warm")?;
        let frame = |word: &str| Ok(memory.start() + word.parse::<u64>()? * PAGE);
        let found: Result<Vec<u64>> = line.split_whitespace().map(frame).collect();
        let found = found.with_context(|| format!("the guest says {:?}", line.get(..80)))?;
        ensure!(found.len() == MIB << 8, "{} pages of {MIB} MiB are there", found.len());
        Ok(found)
    };
    let (hot, cold) = (pages()?, pages()?);
    let run = Run { vm, memory, hot, cold };
    if fs::read_to_string(DAMON_STAT).is_ok_and(|text| text.trim() == "Y") {
        run.is_left_alone("damon_stat", "in use by damon_stat")?;
        fs::write(DAMON_STAT, "N").context(DAMON_STAT)?;
    }
    run.hottest_first()?;
    run.killed_while_it_watches()?;
    run.somebody_else_watches()?;
    drop(program);
    check_kernel_log(&run.vm)
}

fn start(policy: &str) -> Result<Process> {
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    vnumactl(&["memory", NAME, "--set", policy])?;
    Ok(daemon)
}

fn damon(file: &str) -> Result<String> {
    let path = format!("{DAMON}/{file}");
    Ok(fs::read_to_string(&path).context(path)?.trim().to_owned())
}

fn set_damon(file: &str, text: &str) -> Result<()> {
    let path = format!("{DAMON}/{file}");
    fs::write(&path, text).context(path)
}

impl Run {
    /// Shares of both that are at home.
    fn at_home(&self) -> Result<(f64, f64)> {
        let share = |pages: &[u64]| -> Result<f64> {
            Ok(self.memory.count(pages, HOME)? as f64 / pages.len() as f64)
        };
        Ok((share(&self.hot)?, share(&self.cold)?))
    }

    fn displace(&self) -> Result<()> {
        for pages in [&self.cold, &self.hot] {
            self.memory.take(pages, OTHER)?;
        }
        let (hot, cold) = self.at_home()?;
        ensure!(hot < 0.02 && cold < 0.02, "displaced by hand: {hot} and {cold} are still at home");
        Ok(())
    }

    fn hottest_first(&self) -> Result<()> {
        self.displace()?;
        let daemon = start("adaptive")?;
        let (end, mut told, mut last) = (Instant::now() + HANG_LIMIT, Value::Null, (0.0, 0.0));
        while last.0 < HOT_SHARE {
            let shown = vnumactl(&["memory", NAME])?;
            if told.is_null() && shown["hotness"]["age_ms"].is_u64() {
                println!("watched: {}; guest node 0: {}", shown["hotness"], shown["nodes"][0]["hotness"]);
                told = shown;
            }
            last = self.at_home()?;
            ensure!(
                Instant::now() < end,
                "at home: {last:?}; vnumactl shows {}",
                vnumactl(&["memory", NAME])?
            );
            sleep(Duration::from_millis(50));
        }
        println!("when {:.2} of the hot memory is at home, {:.2} of the cold one is", last.0, last.1);
        ensure!(last.1 < COLD_SHARE, "of the cold memory {:.2} are at home as well", last.1);
        ensure!(damon("nr_kdamonds")? == "0" || damon("0/state")? == "on", "DAMON was left");
        let size = |class: &str| told["nodes"][0]["hotness"][class]["bytes"].as_u64().unwrap_or(0);
        let (hot, cold) = (size("hot") + size("warm"), size("cold"));
        let half = (MIB << 19) as u64;
        ensure!(hot > half && cold > half, "{MIB} MiB are hot, and as many cold: {told}");
        let moves = &vnumactl(&["memory", NAME])?["moves"];
        ensure!(moves["last"]["hottest_first"] == true, "the reason: {moves}");
        wait_for("all of it to be at home", HANG_LIMIT, || {
            let (hot, cold) = self.at_home()?;
            Ok(hot > 0.98 && cold > 0.98)
        })
        .with_context(|| format!("at home: {:?}", self.at_home()))?;
        wait_for("DAMON to be off", HANG_LIMIT, || Ok(damon("nr_kdamonds")? == "0"))?;
        drop(daemon);
        Ok(())
    }

    fn killed_while_it_watches(&self) -> Result<()> {
        self.displace()?;
        let daemon = start("adaptive")?;
        let on = || {
            damon("nr_kdamonds").is_ok_and(|count| count == "1")
                && damon("0/state").is_ok_and(|state| state == "on")
        };
        let end = Instant::now() + HANG_LIMIT;
        while !on() {
            if Instant::now() > end {
                bail!("DAMON is never on; vnumactl shows {}", vnumactl(&["memory", NAME])?);
            }
            sleep(Duration::from_millis(20));
        }
        // SIGKILL; dropping waits for the end.
        drop(daemon);
        ensure!(on(), "nothing was left: vnumad was not killed in the middle");
        let daemon = start("none")?;
        wait_for("the next vnumad to remove what was left", HANG_LIMIT, || Ok(damon("nr_kdamonds")? == "0"))?;
        println!("killed while DAMON watched: the next vnumad has removed what was left");
        drop(daemon);
        Ok(())
    }

    fn somebody_else_watches(&self) -> Result<()> {
        set_damon("nr_kdamonds", "1")?;
        set_damon("0/contexts/nr_contexts", "1")?;
        set_damon("0/contexts/0/monitoring_attrs/intervals/update_us", FOREIGN)?;
        self.is_left_alone("somebody else's kdamond", "DAMON is in use: nr_kdamonds is 1")?;
        let interval = damon("0/contexts/0/monitoring_attrs/intervals/update_us")?;
        ensure!(damon("nr_kdamonds")? == "1" && interval == FOREIGN, "it was changed: {interval}");
        set_damon("nr_kdamonds", "0")
    }

    /// Displaced memory comes home all the same, and vnumactl says why it is not known how hot it is.
    fn is_left_alone(&self, who: &str, expected: &str) -> Result<()> {
        self.displace()?;
        let daemon = start("adaptive")?;
        let mut problem = Value::Null;
        wait_for("vnumactl to say why hotness is not known", HANG_LIMIT, || {
            problem = vnumactl(&["memory", NAME])?["hotness"]["problem"].take();
            Ok(problem.is_string())
        })?;
        ensure!(problem.as_str().is_some_and(|said| said.contains(expected)), "{who}: {problem}");
        wait_for("displaced memory to come home", HANG_LIMIT, || {
            let (hot, cold) = self.at_home()?;
            Ok(hot > 0.5 || cold > 0.5)
        })?;
        println!("{who} is left alone, and memory comes home: {problem}");
        drop(daemon);
        Ok(())
    }
}
