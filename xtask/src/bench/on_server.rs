//! Benchmarks that measure on lab servers, most of them with counters, and judge here: one program does both.

use super::{
    Common, Run, build, inputs, judged, of_lab,
    peer::{self, run_on},
};
use anyhow::{Context, Result};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use vnuma_bench_figures::{cells::go_on, configuration::Input};
use vnuma_lab_runner::{self as lab, Counters, Lab, end_on_signals};
use vnuma_scenario::waiting;

/// Where the server finds what was measured before.
const STORE: &str = "/root/cells.jsonl";

/// What is measured, and where.
pub struct OnServer {
    /// The folder of its report in target/bench.
    pub name: &'static str,
    /// How much is measured.
    pub common: Common,
    /// A profile of lab/profiles.
    pub server: &'static str,
    /// Another one, of a second server in the network of the first one. It has no counters, and the last program is the other end
    /// there, as its argument `peer` says.
    pub peer: Option<&'static str>,
    /// What it counts; none: it has no counters, and is the faster for it.
    pub counters: Option<&'static str>,
    /// Packages and their programs. The last one measures and judges.
    pub programs: &'static [(&'static str, &'static str)],
    /// Servers that are booted after it, one after the other, and what the last program does there: its first arguments.
    pub others: &'static [(&'static str, &'static str)],
    /// Files that the server gets besides: here, and there.
    pub files: Vec<(PathBuf, &'static str)>,
    /// What these files are made of, as far as it decides figures.
    pub inputs: Vec<Input>,
    /// Arguments of `server`, beside those that all have.
    pub measure: Vec<String>,
    /// Only ends a hang.
    pub hang: Duration,
}

impl OnServer {
    /// Runs it and judges it. What the server measured before it failed is kept, and can be judged by itself.
    pub fn run(&self) -> Result<()> {
        end_on_signals().context("signal handlers")?;
        let programs = build(self.common.form.smoke, self.programs)?;
        let run =
            self.common.run(self.name, &[inputs(&programs), self.inputs.clone(), of_lab()?].concat())?;
        let first = (self.server, self.peer, "server", &self.measure[..]);
        let others = self.others.iter().map(|(server, command)| (*server, None, *command, &[][..]));
        let measure = |part| self.measure_on(part, &programs, &run);
        let measured = [first].into_iter().chain(others).map(measure).fold(Ok(()), Result::and);
        let mut judge = Command::new(programs.last().context("the benchmark's program")?);
        judge.args(["judge", "--commit", &run.options.commit]).arg("--raw").arg(run.store());
        measured.and(judged(judge.args(run.to_report())))
    }

    /// A server, perhaps with a peer, the command that measures there, and more of its arguments.
    fn measure_on(
        &self,
        (server, peer, command, more): (&str, Option<&str>, &str, &[String]),
        programs: &[PathBuf],
        run: &Run,
    ) -> Result<()> {
        let mut file = go_on(run.store())?;
        let counters: Option<Counters> = self.counters.map(str::parse).transpose()?;
        let preparing = waiting("the lab server to boot and get its programs");
        let labs = match peer {
            Some(peer) => Lab::boot_cluster_with(&[server, peer], counters.as_ref())?,
            None => vec![Lab::boot_with(server, counters.as_ref())?],
        };
        let (lab, others) = labs.split_first().context("no server")?;
        for (here, (_, name)) in programs.iter().zip(self.programs) {
            lab.put(here, &format!("/usr/local/bin/{name}"), self.hang)?;
        }
        for (here, there) in &self.files {
            lab.put(here, there, self.hang)?;
        }
        lab.put(run.store(), STORE, self.hang)?;
        let (_, bench) = self.programs.last().context("the benchmark's program")?;
        let mut argv = vec![(*bench).to_owned(), command.to_owned()];
        argv.extend(self.common.form.words().chain(run.to_measure(Path::new(STORE))));
        argv.extend(more.iter().cloned());
        if let (Some(other), Some(here)) = (others.first(), programs.last()) {
            other.put(here, &format!("/usr/local/bin/{bench}"), self.hang)?;
        }
        drop(preparing);
        let Some(other) = others.first() else {
            return run_on(lab, argv, lab::Input::Null, &mut file, self.hang);
        };
        peer::run([lab, other], [argv, vec![(*bench).to_owned(), "peer".to_owned()]], file, self.hang)
    }
}

/// An option for each of these values.
pub fn each(option: &str, values: &[String]) -> impl Iterator<Item = String> {
    values.iter().flat_map(move |value| [option.to_owned(), value.clone()])
}
