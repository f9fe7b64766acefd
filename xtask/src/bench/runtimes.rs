//! What language runtimes and allocators in a VM lose when its vCPUs move.

use super::{
    Common, inputs,
    on_server::{OnServer, each},
};
use crate::setup;
use crate::steps::{run as run_command, workspace};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use vnuma_lab_runner::driver;

/// Where the server finds the guest driver, and for which kernel: lab-vm's default.
const DRIVER: &str = "/root/vnuma.ko";
const GUEST_KERNEL: &str = "6.12";
/// What the guest gets of guest/runtime, and where the server finds it.
const RUNTIME: [(&str, &str); 5] = [
    ("vnuma-run", "/root/runtime/vnuma-run"),
    ("numa/libnuma.so.1", "/root/runtime/numa/libnuma.so.1"),
    ("hotspot/libnuma.so.1", "/root/runtime/hotspot/libnuma.so.1"),
    ("jemalloc/libvnuma-jemalloc.so", "/root/runtime/jemalloc/libvnuma-jemalloc.so"),
    ("mimalloc/libvnuma-mimalloc.so", "/root/runtime/mimalloc/libvnuma-mimalloc.so"),
];
/// mimalloc of this machine, and where the server finds it.
const MIMALLOC: [&str; 2] = ["/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", "/root/runtime/libmimalloc.so.2"];
/// What guest/runtime/alloc/tcmalloc builds, and where the server finds it.
const TCMALLOC: [&str; 2] = ["libvnuma-tcmalloc.so", "/root/runtime/tcmalloc/libvnuma-tcmalloc.so"];
const SOLVER: &str = "/root/runtime/solver";
const JAVA: &str = "/root/runtime/java.tar";
const JDK: &str = "/usr/lib/jvm/java-17-openjdk-amd64";
/// Names a Java VM of another version to measure with, a directory with `bin/java`.
const OTHER_JRE: &str = "VNUMA_BENCH_JRE";
/// A small Java with HotSpot, and the program for it. `$1`: the JDK, `$2`: where to, `$3`: the sources, `$4`: another Java VM.
const BUILD_JAVA: &str = r#"
    rm -rf "$2" && mkdir -p "$2"
    if [ -n "$4" ]; then cp -rL "$4" "$2/jre"; else
        "$1/bin/jlink" --add-modules java.base --strip-debug --no-header-files --no-man-pages --output "$2/jre"
    fi
    "$1/bin/javac" -d "$2" "$3/Orders.java"
    cd "$2" && tar -cf java.tar jre *.class
"#;

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Only these workloads
    #[arg(long, value_name = "WORKLOAD")]
    workload: Vec<String>,
    /// Only these policies
    #[arg(long, value_name = "POLICY")]
    policy: Vec<String>,
    /// Only so many changes a minute, for a VM of 16 vCPUs
    #[arg(long, value_name = "N")]
    changes: Vec<u32>,
    /// Only changes by hand, or by a balancer
    #[arg(long, value_name = "MOVER")]
    by: Vec<String>,
    /// Only with the guest's AutoNUMA on, or off
    #[arg(long, value_name = "SWITCH")]
    autonuma: Vec<String>,
}

impl Arguments {
    /// Those of `server`.
    fn measure(&self) -> Vec<String> {
        let strings = |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>();
        each("--workload", &self.workload)
            .chain(each("--policy", &self.policy))
            .chain(each("--changes", &strings(&self.changes)))
            .chain(each("--by", &self.by))
            .chain(each("--autonuma", &self.autonuma))
            .collect()
    }
}

/// Runs it and judges it.
pub fn run(options: &Arguments) -> Result<()> {
    let form = options.common.form;
    let directory = workspace().join("target/bench/runtimes-built");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let driver = driver::build(GUEST_KERNEL)?;
    let sources = ["guest/runtime", "bench/runtimes"].map(|folder| workspace().join(folder));
    let jre = std::env::var_os(OTHER_JRE).map_or_else(|| PathBuf::from(JDK), PathBuf::from).join("release");
    // Whatever is brought of them: cells of one workload are of the same configuration as those of all.
    let mut decides = vec![driver.clone()];
    decides.extend([jre, MIMALLOC[0].into()].into_iter().filter(|path| path.exists()).chain(sources));
    let mut files = vec![(driver, DRIVER)];
    files.extend(runtime(&directory)?);
    let cost = if form.smoke { Ok(()) } else { cost_of_reading(&directory) };
    // What takes long to build or to bring is there only if it is measured.
    let is_chosen = |name: &str| options.workload.iter().any(|workload| workload.contains(name));
    if options.workload.is_empty() && !form.smoke || is_chosen("orders") {
        files.push((java(&directory)?, JAVA));
    }
    let all = form.full && options.workload.is_empty();
    if all || is_chosen("solver") {
        files.push((solver(&directory)?, SOLVER));
    }
    if all || is_chosen("mimalloc") {
        let [here, there] = MIMALLOC;
        ensure!(Path::new(here).exists(), "{here}: missing (package libmimalloc2.0)");
        files.push((here.into(), there));
    }
    if all || is_chosen("tcmalloc") {
        files.push((tcmalloc(&directory)?, TCMALLOC[1]));
    }
    OnServer {
        name: "runtimes",
        common: options.common,
        server: "2n8c",
        peer: None,
        // Priced by profiles of both caches.
        counters: Some("broadwell-2s+vprobe-e5620"),
        programs: &[
            ("vnumad", "vnumad"),
            ("vnumactl", "vnumactl"),
            ("vnuma-bench-runtimes", "bench-runtimes"),
        ],
        others: &[],
        files,
        inputs: inputs(&decides),
        measure: options.measure(),
        hang: Duration::from_secs(if form.full { 24 } else { 4 } * 3600),
    }
    .run()
    .and(cost)
}

fn runtime(directory: &Path) -> Result<Vec<(PathBuf, &'static str)>> {
    let build = directory.join("runtime");
    let mut make = Command::new("make");
    make.args(["--silent", "-C", "guest/runtime"]).arg(format!("BUILD={}", build.display()));
    run_command(make.current_dir(workspace()))?;
    Ok(RUNTIME.map(|(name, there)| (build.join(name), there)).into())
}

/// Of libvnuma, on this machine: an error if reading the generation takes more than twice as long as `sched_getcpu()`.
fn cost_of_reading(directory: &Path) -> Result<()> {
    eprintln!("what a look at the topology costs a program (measured, on this machine)");
    let mut make = Command::new("make");
    make.args(["--silent", "-C", "guest/runtime", "bench"])
        .arg(format!("BUILD={}", directory.join("runtime").display()))
        // The report may go to the standard output.
        .stdout(std::io::stderr());
    run_command(make.current_dir(workspace()))
}

/// The guest has libgomp.
fn solver(directory: &Path) -> Result<PathBuf> {
    let program = directory.join("solver");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-O3", "-g", "-Wall", "-Wextra", "-fopenmp", "-o"])
        .arg(&program)
        .arg("bench/runtimes/openmp/solver.c");
    run_command(gcc.current_dir(workspace()))?;
    Ok(program)
}

/// google/tcmalloc with its patch: some minutes, once.
fn tcmalloc(directory: &Path) -> Result<PathBuf> {
    let build = directory.join("runtime/tcmalloc");
    let mut make = Command::new("make");
    make.args(["--silent", "-j2", "-C", "guest/runtime/alloc/tcmalloc"])
        .arg(format!("SOURCE={}", setup::tcmalloc()?.display()))
        .arg(format!("BUILD={}", build.display()));
    run_command(make.current_dir(workspace()))?;
    Ok(build.join(TCMALLOC[0]))
}

fn java(directory: &Path) -> Result<PathBuf> {
    let jmods = Path::new(JDK).join("jmods");
    ensure!(jmods.is_dir(), "{}: missing (package openjdk-17-jdk-headless)", jmods.display());
    let build = directory.join("java");
    let mut sh = Command::new("sh");
    sh.args(["-euc", BUILD_JAVA, "sh", JDK]).args([&build, &workspace().join("bench/runtimes/java")]);
    sh.arg(std::env::var_os(OTHER_JRE).unwrap_or_default());
    run_command(&mut sh)?;
    Ok(build.join("java.tar"))
}
