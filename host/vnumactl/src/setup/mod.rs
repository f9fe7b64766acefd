//! `vnumactl setup`: what this host lacks, and what to do about it. Nothing is changed without `--apply`.
//!
//! ```text
//!   facts.rs   what there is, read below a root
//!   plan.rs    facts to checks, as doctor has them, and to actions; pure
//!   action.rs  an action: as a line for a shell, and carried out
//! ```

mod action;
mod facts;
mod plan;

use crate::{
    doctor::{self, Check},
    failure::Failure,
    table::plain,
};
use action::Action;
use facts::Facts;
use serde::Serialize;
use std::{io, path::Path, process::Command};
use vnuma_api::operation as op;
use vnuma_client::Client;

/// Size of the huge pages that are reserved.
const HUGE_PAGE_KIB: u64 = 2048;

#[derive(clap::Args)]
pub struct Arguments {
    /// Do it. Needs root
    #[arg(long)]
    apply: bool,
    /// Reserve so much memory of each node for huge pages of 2 MiB
    #[arg(long, value_name = "SIZE", value_parser = huge_pages)]
    huge_pages: Option<u64>,
    /// Keep the kernel from moving the memory of VMs (kernel.numa_balancing)
    #[arg(long)]
    no_numa_balancing: bool,
}

/// Huge pages that are as large as a size.
fn huge_pages(text: &str) -> Result<u64, String> {
    let expected = || "a number with K, M, G or T, a multiple of 2M, of 1T at most".to_owned();
    let (digits, unit_kib) = match text.char_indices().next_back() {
        Some((at, 'K')) => (&text[..at], 1),
        Some((at, 'M')) => (&text[..at], 1 << 10),
        Some((at, 'G')) => (&text[..at], 1 << 20),
        Some((at, 'T')) => (&text[..at], 1 << 30),
        _ => return Err(expected()),
    };
    let kib = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_kib));
    let kib = kib.filter(|kib| kib.is_multiple_of(HUGE_PAGE_KIB) && (1..=1 << 30).contains(kib));
    kib.map(|kib| kib / HUGE_PAGE_KIB).ok_or_else(expected)
}

/// What the operator wants beyond what every host needs.
#[derive(Clone, Copy, Debug, Default)]
struct Wishes {
    /// Huge pages of each node.
    huge_pages: Option<u64>,
    no_numa_balancing: bool,
}

/// An action with its outcome.
#[derive(Debug, Serialize)]
struct Step {
    /// The check that asks for it.
    check: &'static str,
    /// As a line for a shell.
    command: String,
    /// None: it was not asked for.
    done: Option<bool>,
    /// Why it failed.
    error: Option<String>,
}

/// What is shown.
#[derive(Debug, Serialize)]
struct Report {
    checks: Vec<Check>,
    actions: Vec<Step>,
}

/// The command.
pub async fn run(client: &Client, arguments: &Arguments, json: bool) -> Result<(), Failure> {
    if arguments.apply && !nix::unistd::geteuid().is_root() {
        return Err(Failure::SetupRights);
    }
    let wishes = Wishes { huge_pages: arguments.huge_pages, no_numa_balancing: arguments.no_numa_balancing };
    let root = Path::new("/");
    let wanted = plan::plan(&Facts::read(root, &output), &wishes);
    let (checks, actions) = match arguments.apply {
        false => {
            let step = |(check, action): (&'static str, Action)| Step {
                check,
                command: action.to_string(),
                done: None,
                error: None,
            };
            (wanted.checks, wanted.actions.into_iter().map(step).collect())
        }
        true => {
            let actions = wanted.actions.iter().map(|(check, action)| applied(check, action, root)).collect();
            (plan::plan(&Facts::read(root, &output), &wishes).checks, actions)
        }
    };
    let report = Report { checks: [checks, of_vnumad(client).await].concat(), actions };
    let failed = report.actions.iter().filter(|step| step.done == Some(false)).count();
    crate::print(json, &report, text)?;
    match failed {
        0 => Ok(()),
        failed => Err(Failure::SetupFailed(failed)),
    }
}

fn applied(check: &'static str, action: &Action, root: &Path) -> Step {
    let error = action.carry_out(root, &output).err().map(|error| error.to_string());
    Step { check, command: action.to_string(), done: Some(error.is_none()), error }
}

/// What doctor finds of the host; nothing while vnumad does not run.
async fn of_vnumad(client: &Client) -> Vec<Check> {
    let Ok(daemon) = client.ask::<op::Daemon>((), &()).await else { return Vec::new() };
    let Ok(host) = client.ask::<op::Hardware>((), &()).await else { return Vec::new() };
    doctor::examine(&daemon, &host, &[])
}

/// Runs a program and returns what it prints.
fn output(words: &[&str]) -> io::Result<String> {
    let done = Command::new(words[0]).args(&words[1..]).env("LC_ALL", "C").output()?;
    match done.status.success() {
        true => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
        false => {
            let error = String::from_utf8_lossy(&done.stderr);
            Err(io::Error::other(format!("{}: {}", done.status, error.trim().replace('\n', "; "))))
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = doctor::text(&report.checks);
    let planned = report.actions.iter().any(|step| step.done.is_none());
    if planned {
        text += "\nTo do, which `vnumactl setup --apply` does with the same options:\n";
    } else if !report.actions.is_empty() {
        text += "\nDone:\n";
    }
    for Step { command, done, error, .. } in &report.actions {
        text += &match (done, error) {
            (Some(false), error) => {
                format!(
                    "  {command}\n    failed: {}\n",
                    plain(error.as_deref().unwrap_or("no reason is given"))
                )
            }
            _ => format!("  {command}\n"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_huge_pages() {
        assert_eq!(huge_pages("2048K"), Ok(1));
        assert_eq!(huge_pages("512M"), Ok(256));
        assert_eq!(huge_pages("4G"), Ok(2048));
        assert_eq!(huge_pages("1T"), Ok(524_288));
        for bad in ["", "G", "0M", "3M", "1024", "-2M", "2T", "99999999999999T", "2MiB", "é"] {
            assert!(huge_pages(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_failed_says_why() {
        let step = |done, error: Option<&str>| Step {
            check: "service",
            command: "systemctl enable --now vnumad.service".into(),
            done,
            error: error.map(str::to_owned),
        };
        let shown = |step| text(&Report { checks: Vec::new(), actions: vec![step] });
        assert!(shown(step(None, None)).contains("To do"));
        let done = shown(step(Some(true), None));
        assert!(
            done.contains("Done:\n  systemctl enable --now vnumad.service\n") && !done.contains("failed")
        );
        assert!(shown(step(Some(false), Some("masked\u{1b}"))).contains("    failed: masked\u{fffd}\n"));
    }
}
