//! `--full`: a boot of the lab for each batch of cells that are missing, until none is, or as far as was asked for.

use super::{
    super::{Run, inputs, judged, of_lab, on_server::each, peer::run_on},
    Arguments, HANG, put,
};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use vnuma_bench_figures::{
    cells::{Options, go_on},
    configuration::Input,
};
use vnuma_lab_runner::{self as lab, Counters, Lab, driver};

/// Where the server finds its cells.
const CELLS: &str = "/root/cells.json";
/// Where it finds the guest driver, and for which kernel: lab-vm's default.
const DRIVER: &str = "/root/vnuma.ko";
const GUEST_KERNEL: &str = "6.12";
/// A boot has hundreds of cells at most; only ends a hang.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The cells of the next boot, as bench-vprobe prints them.
#[derive(Deserialize)]
struct Next {
    server: String,
    counters: String,
    /// It needs the guest driver.
    driver: bool,
    cells: Vec<Value>,
}

/// bench-vprobe on this machine.
struct Bench<'a> {
    run: Run,
    programs: &'a [PathBuf],
    arguments: Vec<String>,
}

impl<'a> Bench<'a> {
    fn new(options: &Arguments, programs: &'a [PathBuf]) -> Result<Self> {
        let driver = [Input { name: "driver".to_owned(), path: driver::build(GUEST_KERNEL)? }];
        let inputs = [inputs(programs), driver.into(), of_lab()?].concat();
        let run = options.common.run("vprobe", &inputs)?;
        let inputs: Vec<String> =
            inputs.iter().map(|Input { name, path }| format!("{name}={}", path.display())).collect();
        let [directory, store] = [&run.results.directory, run.store()].map(|path| path.display().to_string());
        let arguments = each("--directory", &[directory])
            .chain(each("--store", &[store]))
            .chain(each("--commit", std::slice::from_ref(&run.options.commit)))
            .chain(each("--input", &inputs))
            .chain(each("--part", &options.part))
            .chain(each("--workload", &options.workload))
            .chain(each("--policy", &options.policy))
            .collect();
        Ok(Self { run, programs, arguments })
    }

    fn command(&self, step: &str) -> Result<Command> {
        let mut command = Command::new(self.programs.last().context("bench-vprobe")?);
        command.arg("full").args(&self.arguments).arg(step);
        Ok(command)
    }

    fn next(&self, cells: Option<usize>) -> Result<Next> {
        let mut next = self.command("next")?;
        next.args(cells.iter().flat_map(|count| ["--cells".to_owned(), count.to_string()]));
        let output = next.stderr(Stdio::inherit()).output().context("bench-vprobe")?;
        ensure!(output.status.success(), "bench-vprobe full next: {}", output.status);
        serde_json::from_slice(&output.stdout).context("bench-vprobe full next")
    }

    /// One boot. Each cell is stored as soon as it is finished.
    fn boot(&self, next: &Next, left: Option<Duration>) -> Result<()> {
        let counters: Counters = next.counters.parse()?;
        let lab = Lab::boot_with(&next.server, Some(&counters))?;
        put(&lab, self.programs)?;
        if next.driver {
            lab.put(&driver::build(GUEST_KERNEL)?, DRIVER, HANG)?;
        }
        let list = self.run.results.directory.join("cells.json");
        fs::write(&list, serde_json::to_string(&next.cells)?).with_context(|| list.display().to_string())?;
        lab.put(&list, CELLS, HANG)?;
        let Options { commit, configuration, .. } = &self.run.options;
        let argv = ["bench-vprobe", "measure", "--list", CELLS, "--commit", commit];
        let minutes = left.map(|left| left.as_secs().div_ceil(60).to_string());
        let argv = argv.map(str::to_owned).into_iter();
        let argv = argv.chain(each("--configuration-hash", std::slice::from_ref(configuration)));
        let argv = argv.chain(each("--minutes", minutes.as_slice())).collect();
        run_on(&lab, argv, lab::Input::Null, &mut go_on(self.run.store())?, LONGEST)
    }
}

/// Measures what is missing, and judges what there is.
pub fn run(options: &Arguments, programs: &[PathBuf]) -> Result<()> {
    let began = Instant::now();
    let bench = Bench::new(options, programs)?;
    let budget = options.common.part.minutes.map(|minutes| Duration::from_secs(minutes * 60));
    let mut cells_left = options.common.part.cells;
    let mut failed = false;
    let measured = loop {
        let left = budget.map(|budget| budget.saturating_sub(began.elapsed()));
        if cells_left == Some(0) || left == Some(Duration::ZERO) {
            break Ok(());
        }
        let next = bench.next(cells_left)?;
        if next.cells.is_empty() {
            break Ok(());
        }
        let outcome = bench.boot(&next, left);
        cells_left = cells_left.map(|count| count - next.cells.len().min(count));
        // What failed comes again with the next boot.
        match outcome {
            Err(error) if failed || cells_left.is_some() => break Err(error),
            Err(error) => {
                eprintln!("{error:#}");
                failed = true;
            }
            Ok(()) => failed = false,
        }
    };
    let judged = judged(&mut bench.command("judge")?);
    measured.and(judged)
}
