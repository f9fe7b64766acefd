//! What a guest's own work costs with vnuma attached and nothing changing, and without (XPV, section 5.2): by the lab's
//! counters of the VM's vCPU threads, never by time. Both sides take turns in one VM.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vnuma_scenario::{Vm, output, vnumactl, vnumad};

const LOAD: &str = "/run/lab/bin/lab-load";

#[derive(clap::Args)]
pub struct Arguments {
    /// The driver for lab-vm's usual kernel
    #[arg(long)]
    driver: String,
    /// Runs of each side
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Prints `{"overhead_no_change": _, ...}`: median with by median without, less one.
pub fn run(arguments: &Arguments) -> Result<()> {
    let vm = Vm::start("bench", &["--nodes", "2", "--vcpus", "2", "--memory", "512M"].map(str::to_owned))?;
    vm.put(&arguments.driver, "/root/vnuma.ko")?;
    vm.put(LOAD, "/root/lab-load")?;
    let mut sides = [Vec::new(), Vec::new()];
    for round in 0..arguments.rounds {
        sides[0].push(work(&vm)?);
        let daemon = vnumad(&[])?;
        vm.exec(&["insmod", "/root/vnuma.ko"])?;
        vm.attach()?;
        vm.await_driver()?;
        sides[1].push(work(&vm)?);
        vnumactl(&["detach", &vm.name])?;
        vm.exec(&["rmmod", "vnuma"])?;
        drop(daemon);
        eprintln!("round {} of {}", round + 1, arguments.rounds);
    }
    let [without, with] = sides.map(|mut cycles: Vec<f64>| {
        cycles.sort_by(f64::total_cmp);
        cycles
    });
    let median = |cycles: &[f64]| cycles[cycles.len() / 2];
    let answer = json!({
        "overhead_no_change": median(&with) / median(&without) - 1.0,
        "without_cycles": without,
        "with_cycles": with,
    });
    println!("{answer}");
    Ok(())
}

/// Modelled cycles of the VM's vCPUs while the guest does a fixed amount of work: a pointer chase on either node, as no other
/// work is as sensitive to a line or a page that somebody else took.
fn work(vm: &Vm) -> Result<f64> {
    let chase = "for node in 0 1; do taskset -c 0 /root/lab-load chase --uncounted --mib 64 --node $node --times 400000; done";
    let text = output(
        "lab-count",
        &[
            "--vm",
            &vm.name,
            "--json",
            "/root/count.json",
            "--",
            "lab-vm",
            "exec",
            &vm.name,
            "--",
            "sh",
            "-c",
            chase,
        ],
    )?;
    let report = std::fs::read_to_string("/root/count.json").with_context(|| text.clone())?;
    let report: Value = serde_json::from_str(&report)?;
    report["modelled"][0]["cycles"]["total"].as_f64().with_context(|| format!("lab-count: {report}"))
}
