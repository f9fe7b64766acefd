//! What language runtimes and allocators in a VM lose when its vCPUs move.

use super::{
    Options, commit,
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

/// Runs it and judges it.
pub fn run(options: &Options) -> Result<()> {
    let directory = workspace().join("target/bench/runtimes");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let mut files = vec![(driver::build(GUEST_KERNEL)?, DRIVER)];
    files.extend(runtime(&directory)?);
    let cost = cost_of_reading(&directory);
    // What takes long to build or to bring is there only if it is measured.
    let is_chosen = |name: &str| options.workload.iter().any(|workload| workload.contains(name));
    if options.workload.is_empty() || is_chosen("orders") {
        files.push((java(&directory)?, JAVA));
    }
    let all = options.full && options.workload.is_empty();
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
    let full = options.full.then(|| "--full".to_owned());
    let chosen = each("--workload", &options.workload).chain(each("--policy", &options.policy));
    let changes: Vec<String> = options.changes.iter().map(u32::to_string).collect();
    OnServer {
        name: "runtimes",
        server: "2n8c",
        peer: None,
        // Priced by profiles of both caches.
        counters: "broadwell-2s+vprobe-e5620",
        programs: &[
            ("vnumad", "vnumad"),
            ("vnumactl", "vnumactl"),
            ("vnuma-bench-runtimes", "bench-runtimes"),
        ],
        files,
        measure: full
            .iter()
            .cloned()
            .chain(chosen)
            .chain(each("--changes", &changes))
            .chain(each("--by", &options.by))
            .chain(each("--autonuma", &options.autonuma))
            .chain(each(
                "--cells",
                &options.cells.map(|cells| cells.to_string()).into_iter().collect::<Vec<_>>(),
            ))
            .chain(each(
                "--minutes",
                &options.minutes.map(|all| all.to_string()).into_iter().collect::<Vec<_>>(),
            ))
            .chain(["--commit".to_owned(), commit()])
            .collect(),
        judge: full.into_iter().chain(options.json.then(|| "--json".to_owned())).collect(),
        goes_on: options.full,
        hang: Duration::from_secs(if options.full { 24 } else { 4 } * 3600),
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
