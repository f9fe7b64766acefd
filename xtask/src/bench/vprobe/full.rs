//! `--full`: a boot of the lab for each batch of cells that are missing, until none is, or as far as was asked for.

use super::{
    super::{commit, judged},
    Arguments, HANG, PROGRAMS, put,
};
use crate::steps::workspace;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use vnuma_lab_runner::{Counters, Exec, Image, Input, Lab, Progress, driver};

/// Where the server finds its cells.
const CELLS: &str = "/root/cells.json";
/// Where it finds the guest driver, and for which kernel: lab-vm's default.
const DRIVER: &str = "/root/vnuma.ko";
const GUEST_KERNEL: &str = "6.12";
/// A boot has hundreds of cells at most; only ends a hang.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// What decides the figures beside the programs, in the checkout.
const FOLDERS: [&str; 2] = ["lab", "abi/lab-counters"];

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
struct Bench {
    program: PathBuf,
    arguments: Vec<String>,
}

impl Bench {
    fn new(options: &Arguments, programs: &[PathBuf], directory: &Path) -> Result<Self> {
        let image = Image::ensure(Progress::Show)?;
        // Names and versions of everything in the image; the kernels themselves, as they are entered.
        let mut inputs = vec![("packages".to_owned(), image.tree().join("var/lib/dpkg/status"))];
        let kernels = image.kernels().iter().map(|kernel| image.vmlinux(kernel));
        inputs.extend(kernels.enumerate().map(|(number, path)| (format!("kernel-{number}"), path)));
        let built = PROGRAMS.iter().zip(programs);
        inputs.extend(built.map(|((_, name), path)| ((*name).to_owned(), path.clone())));
        inputs.push(("driver".to_owned(), driver::build(GUEST_KERNEL)?));
        inputs.extend(FOLDERS.map(|folder| (folder.to_owned(), workspace().join(folder))));
        let mut arguments =
            vec!["full".to_owned(), "--directory".to_owned(), directory.display().to_string()];
        arguments.extend(["--commit".to_owned(), commit()]);
        let inputs = inputs.iter().map(|(name, path)| format!("{name}={}", path.display()));
        arguments.extend(inputs.flat_map(|input| ["--input".to_owned(), input]));
        let lists =
            [("--part", &options.part), ("--workload", &options.workload), ("--policy", &options.policy)];
        for (option, names) in lists {
            arguments.extend(names.iter().flat_map(|name| [option.to_owned(), name.clone()]));
        }
        Ok(Self { program: programs.last().context("bench-vprobe")?.clone(), arguments })
    }

    fn command(&self, step: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(step);
        command
    }

    fn next(&self, cells: Option<usize>) -> Result<Next> {
        let mut step = vec!["next".to_owned()];
        step.extend(cells.iter().flat_map(|count| ["--cells".to_owned(), count.to_string()]));
        let step: Vec<&str> = step.iter().map(String::as_str).collect();
        let output = self.command(&step).stderr(Stdio::inherit()).output().context("bench-vprobe")?;
        ensure!(output.status.success(), "bench-vprobe full next: {}", output.status);
        serde_json::from_slice(&output.stdout).context("bench-vprobe full next")
    }
}

/// Measures what is missing, and judges what there is.
pub fn run(options: &Arguments, programs: &[PathBuf], directory: &Path) -> Result<()> {
    let began = Instant::now();
    let bench = Bench::new(options, programs, directory)?;
    let budget = options.minutes.map(|minutes| Duration::from_secs(minutes * 60));
    let mut cells_left = options.cells;
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
        let outcome = boot(&bench, programs, directory, &next, left);
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
    let judged = judged(&mut bench.command(&["judge"]));
    measured.and(judged)
}

/// One boot. Each cell is stored as soon as it is finished.
fn boot(
    bench: &Bench,
    programs: &[PathBuf],
    directory: &Path,
    next: &Next,
    left: Option<Duration>,
) -> Result<()> {
    let counters: Counters = next.counters.parse()?;
    let lab = Lab::boot_with(&next.server, Some(&counters))?;
    put(&lab, programs)?;
    if next.driver {
        lab.put(&driver::build(GUEST_KERNEL)?, DRIVER, HANG)?;
    }
    let list = directory.join("cells.json");
    fs::write(&list, serde_json::to_string(&next.cells)?).with_context(|| list.display().to_string())?;
    lab.put(&list, CELLS, HANG)?;
    let mut argv: Vec<String> = ["bench-vprobe", "measure", "--cells", CELLS].map(str::to_owned).into();
    argv.extend(left.iter().flat_map(|left| ["--seconds".to_owned(), left.as_secs().to_string()]));
    let exec = Exec { argv, ..Exec::default() };
    let mut store = bench.command(&["store"]).stdin(Stdio::piped()).spawn().context("bench-vprobe")?;
    let mut input = store.stdin.take().context("bench-vprobe")?;
    let status = lab.exec(&exec, Input::Null, &mut input, &mut std::io::stderr(), LONGEST);
    drop(input);
    let stored = store.wait().context("bench-vprobe")?;
    ensure!(stored.success(), "bench-vprobe full store: {stored}");
    match status? {
        0 => Ok(()),
        status => bail!("bench-vprobe on the server: status {status}"),
    }
}
