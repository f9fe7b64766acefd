//! What scx_vnuma does for guests as a host's scheduler.

use super::{
    Common, inputs,
    on_server::{OnServer, each},
};
use anyhow::Result;
use std::time::Duration;
use vnuma_bench_figures::configuration::Input;
use vnuma_lab_runner::schedulers_of_scx;

/// Servers on which the cost of an event is measured: with 8 CPUs, and with as many and room for 256.
const COST: &[(&str, &str)] = &[("2n8c", "cost"), ("2n8c-256", "cost")];

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Only these loads, and no cost of an event
    #[arg(long, value_name = "LOAD")]
    load: Vec<String>,
    /// Only these schedulers, beside EEVDF
    #[arg(long, value_name = "SCHEDULER")]
    scheduler: Vec<String>,
}

/// Schedulers of scx, and where the server finds them.
const SCX: [(&str, &str); 4] = [
    ("scx_rusty", "/usr/local/bin/scx_rusty"),
    ("scx_bpfland", "/usr/local/bin/scx_bpfland"),
    ("scx_lavd", "/usr/local/bin/scx_lavd"),
    ("scx_layered", "/usr/local/bin/scx_layered"),
];

/// Runs it and judges it. A scheduler of scx that cannot be built is named as one that is refused.
pub fn run(Arguments { common, load, scheduler }: &Arguments) -> Result<()> {
    let is_wanted = |program: &str| match scheduler.is_empty() {
        true => common.form.full,
        false => scheduler.contains(&program.replace('_', "-")),
    };
    let wanted: Vec<_> = SCX.into_iter().filter(|(program, _)| is_wanted(program)).collect();
    let programs: Vec<&str> = wanted.iter().map(|(program, _)| *program).collect();
    let (mut files, mut not_built) = (Vec::new(), Vec::new());
    for ((program, there), built) in wanted.iter().zip(schedulers_of_scx(&programs)?) {
        match built {
            Ok(built) => files.push((built, *there)),
            Err(error) => not_built.push(format!("{program}: not built: {error:#}")),
        }
    }
    let here: Vec<_> = files.iter().map(|(built, _)| built.clone()).collect();
    OnServer {
        name: "scheduler",
        common: *common,
        server: "2n8c",
        peer: None,
        counters: None,
        programs: &[("scx_vnuma", "scx_vnuma"), ("vnuma-bench-scheduler", "bench-scheduler")],
        others: if load.is_empty() { COST } else { &[] },
        files,
        inputs: inputs(&here).into_iter().chain(chosen(scheduler)).collect(),
        measure: each("--load", load)
            .chain(each("--scheduler", scheduler))
            .chain(each("--not-built", &not_built))
            .collect(),
        hang: Duration::from_secs(if common.form.full { 12 } else { 3 } * 3600),
    }
    .run()
}

/// A cell has all schedulers of its run, so that one with only some of them is none of the whole form. What decides which it is has a name
/// and no content.
fn chosen(schedulers: &[String]) -> Option<Input> {
    let mut names = schedulers.to_vec();
    names.sort_unstable();
    (!names.is_empty()).then(|| Input { name: format!("only {}", names.join(" ")), path: "/dev/null".into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_bench_figures::configuration;

    #[test]
    fn cells_with_some_schedulers_are_kept_apart() {
        let hash = |schedulers: &[&str]| {
            let names: Vec<String> = schedulers.iter().map(|name| (*name).to_owned()).collect();
            let inputs: Vec<Input> = chosen(&names).into_iter().collect();
            configuration::of(&inputs).expect("inputs can be read").hash
        };
        assert_ne!(hash(&["full"]), hash(&[]));
        assert_ne!(hash(&["full"]), hash(&["partial"]));
        assert_eq!(hash(&["full", "partial"]), hash(&["partial", "full"]));
    }
}
