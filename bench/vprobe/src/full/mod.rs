//! The full run: hours, in pieces. Its cells are stored by configuration, and a run that was cut off goes on with what is
//! missing.

pub mod committed;
pub mod measure;
pub mod plan;
mod report;
mod small;
mod store;
pub mod told;

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use committed::Setup;
use plan::Id;
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};
use store::Measured;
use vnuma_bench_common::configuration::{self, Configuration, Input};

#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the benchmark
    #[arg(long)]
    directory: PathBuf,
    /// What is measured
    #[arg(long)]
    commit: String,
    /// What was measured before
    #[arg(long)]
    store: PathBuf,
    /// A file or folder that decides the figures, and its name
    #[arg(long, value_name = "NAME=PATH")]
    input: Vec<Input>,
    /// Only these parts
    #[arg(long)]
    part: Vec<String>,
    /// Only these workloads
    #[arg(long)]
    workload: Vec<String>,
    /// Only these policies
    #[arg(long)]
    policy: Vec<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Prints the cells of the next boot, as JSON
    Next {
        /// At most so many
        #[arg(long, default_value_t = usize::MAX)]
        cells: usize,
    },
    /// Writes the report
    Judge,
}

/// The next boot.
#[derive(Debug, Serialize)]
struct Next {
    server: &'static str,
    counters: &'static str,
    /// It needs the guest driver.
    driver: bool,
    cells: Vec<Id>,
}

/// What is there of the selected parts.
struct Run {
    parts: Vec<&'static committed::Part>,
    configuration: Configuration,
    plan: Vec<Id>,
    cells: BTreeMap<Id, Measured>,
}

impl Run {
    fn open(arguments: &Arguments) -> Result<Self> {
        let parts = parts(&arguments.part)?;
        let configuration = configuration::of(&arguments.input)?;
        let plan = select(&parts, &arguments.workload, &arguments.policy)?;
        Ok(Self { parts, configuration, plan, cells: store::read(&arguments.store)? })
    }

    fn missing(&self) -> Vec<Id> {
        plan::missing(&self.plan, &self.cells.keys().cloned().collect::<BTreeSet<_>>())
    }

    /// How far it is, for people.
    fn progress(&self) {
        let missing = self.missing().len();
        let took: Vec<f64> = self.cells.values().map(|measured| measured.took_s).collect();
        let left = match took.len() {
            0 => String::new(),
            count => {
                let each = took.iter().sum::<f64>() / count as f64;
                format!(", about {} of measuring", hours(each * missing as f64))
            }
        };
        eprintln!(
            "{} of {} cells are stored, {missing} are left{left}",
            self.plan.len() - missing,
            self.plan.len()
        );
    }
}

fn hours(seconds: f64) -> String {
    let minutes = (seconds / 60.0).ceil() as u64;
    if minutes < 60 { format!("{minutes} min") } else { format!("{} h {} min", minutes / 60, minutes % 60) }
}

fn parts(names: &[String]) -> Result<Vec<&'static committed::Part>> {
    if names.is_empty() {
        return Ok(committed::PARTS.iter().collect());
    }
    let part = |name: &String| {
        committed::part(name).with_context(|| {
            let known = committed::PARTS.each_ref().map(|part| part.name).join(", ");
            format!("--part {name}: there are {known}")
        })
    };
    names.iter().map(part).collect()
}

/// The plan of these parts, or of some of their workloads and policies.
fn select(parts: &[&committed::Part], workloads: &[String], policies: &[String]) -> Result<Vec<Id>> {
    let wanted: Vec<Id> = parts.iter().flat_map(|part| part.cells()).collect();
    let base = |id: &Id| id.policy.split(':').next().unwrap_or_default().to_owned();
    for name in workloads {
        ensure!(wanted.iter().any(|id| id.workload == *name), "--workload {name}: no selected part has it");
    }
    for name in policies {
        ensure!(wanted.iter().any(|id| base(id) == *name), "--policy {name}: no selected part has it");
    }
    let chosen = |names: &[String], name: &str| names.is_empty() || names.iter().any(|chosen| chosen == name);
    let cells =
        wanted.into_iter().filter(|id| chosen(workloads, &id.workload) && chosen(policies, &base(id)));
    Ok(plan::plan(cells))
}

/// Carries out a step.
pub fn run(arguments: &Arguments) -> Result<()> {
    let run = Run::open(arguments)?;
    match &arguments.command {
        Command::Next { cells } => {
            run.progress();
            let cells = plan::batch(&run.missing(), *cells);
            let setup =
                cells.first().and_then(|id| committed::setup(&id.setup)).unwrap_or(&committed::SETUPS[0]);
            let Setup { server, counters, told, .. } = *setup;
            let next = Next { server, counters, driver: told, cells };
            println!("{}", serde_json::to_string(&next)?);
            Ok(())
        }
        Command::Judge => {
            eprintln!("cells: {}", arguments.store.display());
            let Run { parts, configuration, plan, cells, .. } = &run;
            let wanted: BTreeSet<&Id> = plan.iter().collect();
            let count = cells.keys().filter(|id| wanted.contains(id)).count();
            ensure!(count > 0, "no cell is stored yet");
            report::write(&arguments.directory, &arguments.commit, configuration, parts, plan, cells)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_is_a_part_of_the_plan_in_its_order() {
        let parts = parts(&[]).expect("all");
        let all = select(&parts, &[], &[]).expect("a plan");
        let some = select(&parts, &["chase".into()], &["oracle".into(), "vprobe".into()]).expect("a plan");
        assert!(some.len() < all.len() && some.iter().all(|id| id.workload == "chase"), "{some:?}");
        let mut rest = all.iter();
        assert!(some.iter().all(|id| rest.any(|other| other == id)), "{some:?}");
        assert!(some.iter().any(|id| id.policy == "oracle:at-home"), "{some:?}");
    }

    #[test]
    fn what_is_unknown_is_refused_with_what_there_is() {
        let text = |error: anyhow::Error| error.to_string();
        let error = text(super::parts(&["figure".into()]).expect_err("unknown"));
        assert!(error.starts_with("--part figure: there are policies"), "{error}");
        let parts = super::parts(&[]).expect("all");
        let error = text(select(&parts, &["nothing".into()], &[]).expect_err("unknown"));
        assert_eq!(error, "--workload nothing: no selected part has it");
        let error = text(select(&parts, &[], &["oracle:at-home".into()]).expect_err("unknown"));
        assert_eq!(error, "--policy oracle:at-home: no selected part has it");
    }

    #[test]
    fn time_is_shown_in_hours_and_minutes() {
        assert_eq!([hours(1.0), hours(3599.0), hours(3601.0)], ["1 min", "1 h 0 min", "1 h 1 min"]);
    }
}
