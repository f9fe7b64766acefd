//! Benchmarks that measure on a lab server with counters, and judge here: one program does both.

use super::{
    Form, build, commit, judged,
    peer::{self, run_on},
};
use crate::steps::workspace;
use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use vnuma_lab_runner::{Counters, Input, Lab, end_on_signals};
use vnuma_scenario::waiting;

/// Where the server finds what was measured before.
const DONE: &str = "/root/done.jsonl";

/// What is measured, and where.
pub struct OnServer {
    /// The folder of its report in target/bench.
    pub name: &'static str,
    /// How much is measured.
    pub form: Form,
    /// A profile of lab/profiles.
    pub server: &'static str,
    /// Another one, of a second server in the network of the first one. It has no counters, and the last program is the other end
    /// there, as its argument `peer` says.
    pub peer: Option<&'static str>,
    /// What it counts.
    pub counters: &'static str,
    /// Packages and their programs. The last one measures and judges.
    pub programs: &'static [(&'static str, &'static str)],
    /// Files that the server gets besides: here, and there.
    pub files: Vec<(PathBuf, &'static str)>,
    /// Arguments of `server`, beside that of the form.
    pub measure: Vec<String>,
    /// Arguments of `judge`, likewise.
    pub judge: Vec<String>,
    /// What was measured before is kept, and told to the program, which goes on with the rest.
    pub goes_on: bool,
    /// Only ends a hang.
    pub hang: Duration,
}

impl OnServer {
    /// Runs it and judges it. What the server measured before it failed is kept and can be judged by itself.
    pub fn run(&self) -> Result<()> {
        end_on_signals().context("signal handlers")?;
        let programs = build(self.form.smoke, self.programs)?;
        let directory = workspace().join("target/bench").join(self.form.folder(self.name));
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        // Those of one form are never mixed with those of the other.
        let raw = directory.join(if self.goes_on { "full.jsonl" } else { "raw.jsonl" });
        let measured = self.measure(&programs, &raw);
        let mut judge = Command::new(programs.last().context("the benchmark's program")?);
        judge.arg("judge").arg("--raw").arg(&raw).arg("--directory").arg(&directory);
        let judged = judged(judge.args(["--commit", &commit()]).args(self.form.words()).args(&self.judge));
        measured.and(judged)
    }

    fn measure(&self, programs: &[PathBuf], raw: &Path) -> Result<()> {
        let mut file = if self.goes_on { append(raw) } else { File::create(raw).map_err(Into::into) }
            .with_context(|| raw.display().to_string())?;
        let counters: Counters = self.counters.parse()?;
        let preparing = waiting("the lab server to boot and get its programs");
        let labs = match self.peer {
            Some(peer) => Lab::boot_cluster_with(&[self.server, peer], Some(&counters))?,
            None => vec![Lab::boot_with(self.server, Some(&counters))?],
        };
        let (lab, others) = labs.split_first().context("no server")?;
        for (here, (_, name)) in programs.iter().zip(self.programs) {
            lab.put(here, &format!("/usr/local/bin/{name}"), self.hang)?;
        }
        for (here, there) in &self.files {
            lab.put(here, there, self.hang)?;
        }
        let (_, bench) = self.programs.last().context("the benchmark's program")?;
        let mut argv = vec![(*bench).to_owned(), "server".to_owned()];
        argv.extend(self.form.words().into_iter().chain(self.measure.iter().cloned()));
        if self.goes_on {
            lab.put(raw, DONE, self.hang)?;
            argv.extend(["--done".to_owned(), DONE.to_owned()]);
        }
        if let (Some(other), Some(here)) = (others.first(), programs.last()) {
            other.put(here, &format!("/usr/local/bin/{bench}"), self.hang)?;
        }
        drop(preparing);
        let Some(other) = others.first() else {
            return run_on(lab, argv, Input::Null, &mut file, self.hang);
        };
        peer::run([lab, other], [argv, vec![(*bench).to_owned(), "peer".to_owned()]], file, self.hang)
    }
}

/// A file to go on with, without the part of a line that a run leaves that is cut off.
fn append(path: &Path) -> Result<File> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let file = File::options().create(true).append(true).open(path)?;
    file.set_len(whole as u64)?;
    Ok(file)
}

/// An option for each of these values.
pub fn each(option: &str, values: &[String]) -> impl Iterator<Item = String> {
    values.iter().flat_map(move |value| [option.to_owned(), value.clone()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_run_that_was_cut_off_leaves_whole_lines() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("full.jsonl");
        let go_on = |text: &str| {
            append(&path).expect("opened").write_all(text.as_bytes()).expect("written");
            fs::read_to_string(&path).expect("read")
        };
        assert_eq!(go_on("one\ntw"), "one\ntw");
        assert_eq!(go_on("two\n"), "one\ntwo\n");
        assert_eq!(go_on(""), "one\ntwo\n");
    }
}
