//! `make test`: format, lints, unit and property tests, recorded servers, lab tests. `make soak`: the long runs.

use crate::deb;
use crate::demo;
use crate::fuzz;
use crate::setup;
use crate::steps::{Counts, Steps, cargo_test, run, run_quiet, workspace};
use anyhow::{Context, Result, bail};
use std::process::Command;

/// More than a small machine has cores: the slow ones among them wait for something that takes its time.
const UNIT_TEST_THREADS: &str = "8";
/// The lab itself. One server at a time, as another one runs beside.
const LAB_TESTS: &[&str] = &[
    "--package",
    "vnuma-lab-runner",
    "--features",
    "lab-tests",
    "--no-fail-fast",
    "--",
    "--test-threads",
    "1",
];
/// What vnuma does, on the lab.
const SLICE_TESTS: &[&str] = &[
    "--package",
    "vnuma-lab-tests",
    "--features",
    "lab",
    "--no-fail-fast",
    "--",
    "--nocapture",
    "--test-threads",
    "1",
];
/// One of [`SLICE_TESTS`] that the other half of the steps has time for.
const PLACED_TEST: &str = "slice::vms_are_where_they_were_placed_and_know_where_their_devices_are";
/// The reader of the host's topology on hwloc's recorded servers, beside lstopo.
const SERVER_TESTS: &[&str] = &[
    "--package",
    "vnuma-observe",
    "--features",
    "recorded",
    "--test",
    "recorded",
    "--locked",
    "--",
    "--nocapture",
];
/// Three minutes, which `make test` does not have; that the plugin counts at all is tested with the lab itself.
const COUNTER_TESTS: &[&str] =
    &["--package", "lab-count", "--features", "lab", "--test", "exact", "--", "--test-threads", "1"];
/// Of [`SLICE_TESTS`] the one that is a part of the soak by itself.
const SCHEDULER_TEST: &str = "slice::nothing_is_lost_while_everything_around_vms_changes";
/// Likewise.
const MEMORY_TEST: &str = "slice::no_page_is_lost_when_vnumad_is_killed_while_memory_moves";
/// Likewise.
const PACKAGES_TEST: &str = "packages::packages_are_installed_upgraded_and_purged";
/// Debian packages that a soak needs besides: what programs of other runtimes are built with.
const PROGRAM_PACKAGES: &str = "tests/lab/host-packages.txt";
/// Of a soak: cases of each property, rounds of moves, seconds of the demonstration.
const SOAK_CASES: &str = "20000";
const SOAK_ROUNDS: &str = "500";
const SOAK_DEMO_SECONDS: u64 = 900;

/// The user-space DSM: seeds of its simulation and of real nodes among peers that fail, and forbidden shapes.
const DSM_TESTS: &[&str] = &[
    "--package",
    "vnuma-coherence",
    "--package",
    "vnuma-dsm-node",
    "--package",
    "vnuma-dsm-chaos",
    "--locked",
    "--no-fail-fast",
    "--",
    "--nocapture",
];

/// The test that needs promtool.
const METRICS_TEST: &[&str] =
    &["--quiet", "--package", "vnuma-daemon", "--test", "metrics", "--locked", "--", "--ignored", "promtool"];

/// The test that needs a generator of clients.
const CLIENT_TEST: &[&str] =
    &["--quiet", "--package", "vnuma-daemon", "--test", "generated", "--locked", "--", "--ignored"];

/// Hundreds of QEMUs, on this machine.
const DOMAINS_TEST: &[&str] =
    &["--package", "vnuma-daemon", "--test", "libvirt", "--locked", "--", "--nocapture", "--ignored"];

/// Seeds of the core among simulated VMs: the same on every machine, which take a minute or two, and others for an hour.
const SIMULATION: &[&str] = &["--seeds", "4", "--events", "200000"];
const SOAK_SIMULATION: &[&str] =
    &["--seed", "1000", "--seeds", "100000", "--events", "1000000", "--seconds", "3600"];

/// Everything that must hold before a change lands.
pub fn test() -> Result<()> {
    setup::packages()?;
    let mut steps = Steps::default();
    steps.step("format", |_| run(Command::new("cargo").args(["fmt", "--all", "--check"])));
    steps.step("clippy", |_| {
        let arguments = ["clippy", "--quiet", "--workspace", "--all-targets", "--all-features", "--locked"];
        run(Command::new("cargo").args(arguments).args(["--", "-D", "warnings"]))
    });
    steps.step("licences, bans and sources of the dependencies", |_| {
        let arguments = ["check", "licenses", "bans", "sources"];
        run(Command::new(setup::cargo_deny()?).arg("--log-level").arg("error").args(arguments))
    });
    steps.step("checkpatch", |_| checkpatch());
    let others = [SLICE_TESTS, &["--skip", PLACED_TEST]].concat();
    steps.beside("lab: a guest follows its topology", &others, |steps| {
        steps.step("unit and property tests", |counts| {
            let arguments = ["--quiet", "--workspace", "--locked", "--no-fail-fast"];
            cargo_test(&arguments, &[("RUST_TEST_THREADS", UNIT_TEST_THREADS)], counts)
        });
        steps.step("simulation", |counts| simulation(SIMULATION, counts));
        steps.step("Debian packages, and what lintian says of them", |counts| {
            deb::run_all(&deb::Arguments::of_test(&workspace().join("target/test/packages/now"), None))?;
            counts.add_passed();
            Ok(())
        });
        steps.step("recorded servers", recorded_servers);
        steps.step("metrics as promtool reads them", metrics);
        steps.step("a client generated from the API's description", generated_client);
        steps.step("the driver's reader of the channel, damaged and raced", |counts| {
            run(Command::new("make").args(["--silent", "-C", "guest/driver", "check"]))?;
            counts.add_passed();
            Ok(())
        });
        steps.step("libvnuma, the overlay of libnuma, vnuma-run", |counts| {
            run(Command::new("make").args(["--silent", "-C", "guest/runtime", "check"]))?;
            counts.add_passed();
            Ok(())
        });
        steps.step("lab: the lab itself", |counts| cargo_test(LAB_TESTS, &[], counts));
        steps.step("lab: VMs are where they were placed", |counts| {
            cargo_test(&[SLICE_TESTS, &[PLACED_TEST]].concat(), &[], counts)
        });
    });
    steps.step("lab: the demonstration", |counts| {
        demo::check()?;
        counts.add_passed();
        Ok(())
    });
    steps.finish()
}

/// Recorded servers alone.
pub fn servers() -> Result<()> {
    setup::packages()?;
    let mut steps = Steps::default();
    steps.step("recorded servers", recorded_servers);
    steps.finish()
}

/// Prints each seed; one that fails is printed with the command that runs it again.
fn simulation(arguments: &[&str], counts: &mut Counts) -> Result<()> {
    let program = ["run", "--quiet", "--locked", "--package", "vnuma-sim", "--"];
    run(Command::new("cargo").args(program).args(arguments))?;
    counts.add_passed();
    Ok(())
}

fn recorded_servers(counts: &mut Counts) -> Result<()> {
    let archives = setup::recorded_servers()?;
    let archives = archives.to_str().context("the cache's path is not UTF-8")?;
    cargo_test(SERVER_TESTS, &[("VNUMA_RECORDED_SERVERS", archives)], counts)
}

fn metrics(counts: &mut Counts) -> Result<()> {
    let promtool = setup::promtool()?;
    let promtool = promtool.to_str().context("the cache's path is not UTF-8")?;
    cargo_test(METRICS_TEST, &[("PROMTOOL", promtool)], counts)
}

fn generated_client(counts: &mut Counts) -> Result<()> {
    let programs = setup::openapi_client()?;
    let programs = programs.to_str().context("the cache's path is not UTF-8")?;
    cargo_test(CLIENT_TEST, &[("OPENAPI_CLIENT", programs)], counts)
}

/// What of the long runs, and how.
#[derive(clap::Args)]
pub struct SoakArguments {
    /// Only this part
    part: Option<SoakPart>,
    /// How long that part lasts, minutes
    #[arg(long, requires = "part", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=160))]
    minutes: u64,
    /// How often vnumad is killed in that part
    #[arg(long, requires = "part", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1000))]
    kills: u64,
    /// Seed of that part
    #[arg(long, requires = "part", default_value_t = 1)]
    seed: u64,
}

/// A part of the long runs that can run by itself.
#[derive(Clone, Copy, clap::ValueEnum)]
enum SoakPart {
    /// Policies, masks, schedulers, vnumad and VMs come, go and change at random, on one lab server
    Scheduler,
    /// vnumad is killed again and again while memory moves, on one lab server
    Memory,
    /// Debian packages on a lab server with systemd: installed, upgraded while a VM runs, purged
    Packages,
}

/// The long runs.
pub fn soak(arguments: &SoakArguments) -> Result<()> {
    setup::packages()?;
    let mut steps = Steps::default();
    match arguments.part {
        Some(SoakPart::Scheduler) => {
            steps.step("lab: everything around VMs changes", |counts| scheduler(arguments, counts));
            return steps.finish();
        }
        Some(SoakPart::Memory) => {
            steps.step("lab: vnumad is killed while memory moves", |counts| memory(arguments, counts));
            return steps.finish();
        }
        Some(SoakPart::Packages) => {
            steps.step("lab: packages under systemd", packages_in_lab);
            return steps.finish();
        }
        None => {}
    }
    steps.step("property tests", |counts| {
        let arguments = ["--quiet", "--workspace", "--locked", "--no-fail-fast"];
        cargo_test(&arguments, &[("PROPTEST_CASES", SOAK_CASES)], counts)
    });
    steps.step("simulation", |counts| simulation(SOAK_SIMULATION, counts));
    steps.step("DSM: seeds, shapes and peers that fail", |counts| {
        cargo_test(DSM_TESTS, &[("VNUMA_SOAK_ROUNDS", SOAK_ROUNDS)], counts)
    });
    steps.step("fuzz targets", fuzz::soak);
    steps.step("G1 whose threads are on another CPU whenever it asks", moving_java);
    steps.step("200 domains of libvirt", |counts| cargo_test(DOMAINS_TEST, &[], counts));
    steps.step("lab: a guest follows its topology", |counts| {
        let tests = [SLICE_TESTS, &["--include-ignored"]].concat();
        setup::install(&[PROGRAM_PACKAGES])?;
        let wheels = setup::wheels()?;
        let wheels = wheels.to_str().context("the cache's path is not UTF-8")?;
        let tcmalloc = setup::tcmalloc()?;
        let tcmalloc = tcmalloc.to_str().context("the cache's path is not UTF-8")?;
        let numactl = setup::numactl()?;
        let numactl = numactl.to_str().context("the cache's path is not UTF-8")?;
        let java: Vec<String> = setup::java_vms()?
            .into_iter()
            .map(|(version, directory)| format!("{version}={}", directory.display()))
            .collect();
        let java = java.join(":");
        let programs = [
            ("VNUMA_WHEELS", wheels),
            ("VNUMA_TCMALLOC", tcmalloc),
            ("VNUMA_NUMACTL", numactl),
            ("VNUMA_JAVA", &java),
        ];
        cargo_test(&tests, &[&[("VNUMA_SOAK_ROUNDS", SOAK_ROUNDS)], &programs[..]].concat(), counts)
    });
    steps.step("lab: servers in a network, systemd", |counts| {
        cargo_test(&[LAB_TESTS, &["--ignored"]].concat(), &[], counts)
    });
    steps.step("lab: packages under systemd", packages_in_lab);
    steps.step("lab: exactness of the counters", |counts| cargo_test(COUNTER_TESTS, &[], counts));
    steps.step("lab: the demonstration", |counts| {
        demo::run(&demo::Arguments::lasting(SOAK_DEMO_SECONDS))?;
        counts.add_passed();
        Ok(())
    });
    steps.finish()
}

/// The JDK of the machine, and later versions.
fn moving_java(counts: &mut Counts) -> Result<()> {
    let check = || {
        let mut make = Command::new("make");
        make.args(["--silent", "-C", "guest/runtime", "check-java"]).current_dir(workspace());
        make
    };
    run(&mut check())?;
    counts.add_passed();
    for (version, directory) in setup::java_vms()? {
        println!("Java {version}");
        run(check().arg(format!("JAVA={}", directory.join("bin/java").display())))?;
        counts.add_passed();
    }
    Ok(())
}

fn scheduler(arguments: &SoakArguments, counts: &mut Counts) -> Result<()> {
    let (seconds, seed) = ((arguments.minutes * 60).to_string(), arguments.seed.to_string());
    let env = [("VNUMA_SOAK_SECONDS", seconds.as_str()), ("VNUMA_SOAK_SEED", &seed)];
    let test = [SLICE_TESTS, &["--include-ignored", "--exact", SCHEDULER_TEST]].concat();
    cargo_test(&test, &env, counts)
}

fn memory(arguments: &SoakArguments, counts: &mut Counts) -> Result<()> {
    let (kills, seed) = (arguments.kills.to_string(), arguments.seed.to_string());
    let env = [("VNUMA_SOAK_KILLS", kills.as_str()), ("VNUMA_SOAK_SEED", &seed)];
    let test = [SLICE_TESTS, &["--include-ignored", "--exact", MEMORY_TEST]].concat();
    cargo_test(&test, &env, counts)
}

/// Packages of a lower version and of this one, and the test that has both.
fn packages_in_lab(counts: &mut Counts) -> Result<()> {
    let folder = workspace().join("target/test/packages");
    let lower = format!("{}~before", env!("CARGO_PKG_VERSION"));
    deb::run_all(&deb::Arguments::of_test(&folder.join("before"), Some(lower)))?;
    deb::run_all(&deb::Arguments::of_test(&folder.join("now"), None))?;
    // AppArmor of the lab's release, and the one that asks profiles for connections to sockets as well.
    setup::packages_of("trixie", "apparmor", &folder.join("apparmor"))?;
    setup::packages_of("sid", "apparmor libapparmor1", &folder.join("apparmor-next"))?;
    let folder = folder.to_str().context("the checkout's path is not UTF-8")?;
    let test = [SLICE_TESTS, &["--include-ignored", "--exact", PACKAGES_TEST]].concat();
    cargo_test(&test, &[("VNUMA_PACKAGES", folder)], counts)
}

/// C that runs in a kernel, and the headers that it includes. Programs in C keep the style without the kernel's types.
const KERNEL_SOURCES: [&str; 4] =
    [":(glob)guest/driver/*.[ch]", ":(glob)lab/pmu/*.[ch]", ":(glob)**/*.bpf.c", ":(glob)abi/**/*.h"];

/// Kernel style for everything that runs in a kernel.
fn checkpatch() -> Result<()> {
    let program = setup::checkpatch()?;
    let listed = Command::new("git")
        .args(["ls-files", "--"])
        .args(KERNEL_SOURCES)
        .current_dir(workspace())
        .output()
        .context("git ls-files")?;
    let files: Vec<_> = String::from_utf8(listed.stdout)?.lines().map(str::to_owned).collect();
    if files.is_empty() {
        bail!("git lists no C file");
    }
    // The first three concern patches to the kernel tree itself; the last takes an environment for constant names.
    let ignored =
        ["FILE_PATH_CHANGES", "SPDX_LICENSE_TAG", "LINUX_VERSION_CODE", "STATIC_CONST_CHAR_ARRAY"].join(",");
    run_quiet(
        Command::new("perl")
            .arg(program)
            .args(["--no-tree", "--strict", "--terse", "--quiet", "--max-line-length=100"])
            .args(["--ignore", &ignored, "--file"])
            .args(&files)
            .current_dir(workspace()),
    )
}
