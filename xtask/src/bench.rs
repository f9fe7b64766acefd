//! `cargo xtask bench [NAME]`: benchmarks, each with a report in `target/bench/NAME/report.json`.

mod dsm;
mod lab;
mod topology;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::steps::workspace;

/// A benchmark: its name, what it measures, and the function that does.
type Bench = (&'static str, &'static str, fn() -> Result<()>);

const BENCHES: [Bench; 3] = [
    ("dsm", "how fast pages move between nodes: each protocol, its parts, and the floor", dsm::run),
    ("lab", "what the lab's counters cost: boot and loops, with and without, interleaved", lab::run),
    ("topology", "how fast guests of each kernel follow their topology, and what that costs", topology::run),
];

#[derive(clap::Args)]
pub struct Arguments {
    /// Which one; without it the list is printed
    name: Option<String>,
}

/// Runs a benchmark, or lists them.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Some(name) = &arguments.name else {
        for (name, about, _) in BENCHES {
            println!("{name:<12} {about}");
        }
        return Ok(());
    };
    match BENCHES.iter().find(|(known, _, _)| known == name) {
        Some((_, _, bench)) => bench(),
        None => {
            let known = BENCHES.map(|(name, _, _)| name).join(", ");
            bail!("benchmark {name:?} is unknown; there are: {known}")
        }
    }
}

/// Writes a report and says where.
fn write_report(name: &str, report: &impl Serialize) -> Result<()> {
    let directory = workspace().join("target/bench").join(name);
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let path = directory.join("report.json");
    let text = serde_json::to_string_pretty(report)? + "\n";
    std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    println!("report: {}", path.display());
    Ok(())
}
