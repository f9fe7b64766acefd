//! `make test`: format, lints, unit and property tests, recorded servers, lab tests. `make soak`: the long runs.
//! `make check`: what a change needs most, in minutes.

use crate::bench::{SMOKE_HERE, SMOKE_IN_LAB};
use crate::build::{Built, PROGRAMS, TestProgram, WORKSPACE};
use crate::changed::Changed;
use crate::deb;
use crate::kernel_users;
use crate::setup;
use crate::steps::workspace;
use crate::suite::{self, Job, Lane};
use crate::turns::Turn;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use vnuma_lab_runner::{Image, Progress};

/// Of one test program. More than its share of a small machine's cores: the slow tests among them wait for something that takes its time.
const TEST_THREADS: &str = "4";
/// Folders of packages whose tests boot the lab: the lab itself, what vnuma does there, the exactness of the counters.
const LAB: &str = "lab/runner";
const SCENARIOS: (&str, &str) = ("tests/lab", "lab");
const COUNTERS: (&str, &str) = ("lab/count", "exact");
/// The reader of the host's topology on hwloc's recorded servers, beside lstopo.
const SERVERS: (&str, &str) = ("host/observe", "recorded");
/// Tests that `make test` has no time for say so by being ignored. Those of these names are parts of the soak by themselves.
const SCHEDULER_TEST: &str = "slice::nothing_is_lost_while_everything_around_vms_changes";
const MEMORY_TEST: &str = "slice::no_page_is_lost_when_vnumad_is_killed_while_memory_moves";
const KERNEL_TESTS: &str = "driver::kernel::";
const PACKAGES_TEST: &str = "packages::packages_are_installed_upgraded_and_purged";
/// Debian packages that a soak needs besides: what programs of other runtimes are built with.
const PROGRAM_PACKAGES: &str = "tests/lab/host-packages.txt";
/// What kernels are built with that the lab's image does not have.
const KERNEL_PACKAGES: &str = "lab/kernels/packages.txt";
/// Of a soak: cases of each property, rounds of moves, seconds of the demonstration.
const SOAK_CASES: &str = "20000";
const SOAK_ROUNDS: &str = "500";
const SOAK_DEMO_SECONDS: u64 = 900;
/// Tells scenarios which third of what they play by turns it is: 0, 1 or 2.
const THIRD: &str = "VNUMA_THIRD";
/// What a job of a soak may take.
const SOAK_LIMIT: Duration = Duration::from_secs(4 * 3600);
/// Programs of tests in which a party is hostile: package and target.
const HOSTILE: [(&str, &str); 9] = [
    ("host/channel", "hostile_peer"),
    ("host/hypervisor", "hostile_qmp"),
    ("host/hypervisor", "lib"),
    ("host/client", "hostile"),
    ("host/daemon", "silence"),
    ("host/daemon", "rights"),
    ("host/daemon", "supervision"),
    ("host/daemon", "full_disk"),
    ("span/transport", "hostile"),
];
/// Scenarios of the lab likewise.
const HOSTILE_SCENARIOS: [&str; 3] = [
    "slice::a_hostile_guest_hurts_itself_alone",
    "slice::busy_threads_of_a_user_neither_stall_vcpus_nor_unload_the_scheduler",
    "slice::a_hypervisor_that_stands_still_is_named_and_its_vm_observed",
];
/// The user-space DSM: seeds of its simulation and of real nodes among peers that fail, and forbidden shapes.
const DSM: [&str; 3] = ["pure/coherence", "span/node", "tests/dsm-chaos"];
/// Seeds of the core among simulated VMs: the same on every machine, which take a minute or two, and others for an hour.
const SIMULATION: &[&str] = &["--seeds", "4", "--events", "200000"];
const SOAK_SIMULATION: &[&str] =
    &["--seed", "1000", "--seeds", "100000", "--events", "1000000", "--seconds", "3600"];
/// Of tests of dependants, what took longer last time is left to `make test`.
const CHECK_SECONDS: f64 = 15.0;

/// What of `make test`.
#[derive(clap::Args)]
pub struct TestArguments {
    /// Only the jobs whose names contain TEXT, whatever their turns; may be repeated
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// List the jobs
    #[arg(long)]
    list: bool,
    /// Play what is played by turns as at this turn; without it: as at that of the commit
    #[arg(long, value_name = "N")]
    turn: Option<u32>,
}

/// Everything that must hold before a change lands.
pub fn test(arguments: &TestArguments) -> Result<()> {
    let start = Instant::now();
    setup::packages()?;
    setup::install(&[deb::PACKAGES])?;
    // What is fetched and made once waits for others most of the time, cargo does not.
    let (built, fetched) = thread::scope(|scope| {
        let fetched = scope.spawn(Fetched::new);
        println!("building programs and tests");
        let built = Built::new();
        println!("built after {} s", start.elapsed().as_secs());
        (built, fetched.join().expect("the thread does not panic"))
    });
    let turn = arguments.turn.map_or_else(Turn::of_checkout, Turn);
    let mut jobs = test_jobs(&built?, fetched, turn)?;
    let all = jobs.len();
    if arguments.only.is_empty() {
        jobs.retain(|job| turn.plays(job.name()));
    } else {
        jobs.retain(|job| arguments.only.iter().any(|text| job.name().contains(text.as_str())));
    }
    if arguments.list {
        jobs.iter().for_each(|job| println!("{}", job.name()));
        return Ok(());
    }
    ensure!(!jobs.is_empty(), "no job has such a name");
    println!("{} of {all} jobs; the others are left to other commits, and to make soak", jobs.len());
    suite::run(jobs, start)
}

/// What a test needs from elsewhere, or why it is not there.
struct Fetched {
    cargo_deny: Result<Option<Command>>,
    checkpatch: Result<Command>,
    promtool: Result<PathBuf>,
    client: Result<PathBuf>,
    servers: Result<PathBuf>,
    image: Result<()>,
}

impl Fetched {
    fn new() -> Self {
        Self {
            checkpatch: checkpatch(),
            promtool: setup::promtool(),
            client: setup::openapi_client(),
            servers: setup::recorded_servers(),
            image: Image::ensure(Progress::Show).map(drop).map_err(Into::into),
            cargo_deny: cargo_deny(),
        }
    }
}

/// A job that says why it cannot run, if it cannot.
fn job(name: &str, command: Result<Command>) -> Job {
    Job::new(
        name,
        command.unwrap_or_else(|error| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo \"$1\"; exit 1", "sh", &format!("{error:#}")]);
            command
        }),
    )
}

/// A job of a test program, all of whose output can be counted.
fn tests(name: &str, program: &TestProgram, arguments: &[&str]) -> Job {
    let mut command = program.command();
    command.env("RUST_TEST_THREADS", TEST_THREADS).env(PROGRAMS, Built::folder()).args(arguments);
    if !arguments.contains(&"--nocapture") {
        command.arg("--show-output");
    }
    let job = Job::tests(name, command);
    if program.target == "libvirt" { job.lane(Lane::Libvirt).seconds(100.0) } else { job }
}

/// The same with a variable that names what was fetched.
fn tests_with(
    name: &str,
    program: &TestProgram,
    arguments: &[&str],
    variable: &str,
    fetched: Result<PathBuf>,
) -> Job {
    match fetched {
        Ok(path) => tests(name, program, arguments).env(variable, &path),
        Err(error) => job(name, Err(error)),
    }
}

/// A program of this workspace.
fn program(path: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(path);
    command.args(arguments).env(PROGRAMS, Built::folder());
    command
}

fn cargo(arguments: &[&str], rest: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).args(rest);
    command
}

fn make(arguments: &[&str]) -> Command {
    let mut command = Command::new("make");
    command.arg("--silent").args(arguments);
    command
}

fn format() -> Job {
    Job::new("format", cargo(&["fmt", "--all", "--check"], &[]))
}

fn clippy() -> Job {
    let arguments = [&["clippy", "--quiet", "--all-targets"], &WORKSPACE[..]].concat();
    Job::new("clippy", cargo(&arguments, &["--", "-D", "warnings"])).lane(Lane::Cargo).seconds(200.0)
}

/// Tests that boot no server.
fn is_unit(program: &TestProgram) -> bool {
    let of_lab = program.folder == LAB && program.target != "lib";
    let name = (program.folder.as_str(), program.target.as_str());
    !of_lab && ![SCENARIOS, COUNTERS, SERVERS].contains(&name)
}

fn unit_tests(built: &Built, environment: &[(&str, &str)]) -> Vec<Job> {
    let units = built.tests.iter().filter(|program| is_unit(program));
    let with = |job: Job| environment.iter().fold(job, |job, (name, value)| job.env(name, Path::new(value)));
    units.map(|program| with(tests(&program.name(), program, &[]))).collect()
}

fn test_jobs(built: &Built, fetched: Fetched, turn: Turn) -> Result<Vec<Job>> {
    let mut jobs = vec![
        format(),
        clippy(),
        Job::new("doc tests", cargo(&["test", "--quiet", "--doc"], &WORKSPACE)).lane(Lane::Cargo).counted(),
        job("checkpatch", fetched.checkpatch),
        Job::new("simulation", program(built.program("vnuma-sim")?, SIMULATION)).seconds(100.0),
        Job::new(
            "driver: the reader of the channel, damaged and raced",
            make(&["-C", "guest/driver", "check"]),
        ),
        Job::new("libvnuma, the overlay of libnuma, vnuma-run", make(&["-C", "guest/runtime", "check"]))
            .seconds(60.0),
        packages("Debian packages, and what lintian says of them", built, "now", &[])?.seconds(60.0),
        job("lab: the image", fetched.image.map(|()| Command::new("true"))),
        Job::new("lab: the demonstration", program(built.program("xtask")?, &["demo", "--lab", "--check"]))
            .lane(Lane::Lab)
            .seconds(100.0),
    ];
    if let Some(command) = fetched.cargo_deny.transpose() {
        jobs.push(job("licences, bans and sources of the dependencies", command));
    }
    jobs.extend(unit_tests(built, &[]));
    let daemon = |target: &str| built.test("host/daemon", target);
    jobs.push(tests_with(
        "metrics as promtool reads them",
        daemon("metrics")?,
        &["--ignored", "promtool"],
        "PROMTOOL",
        fetched.promtool,
    ));
    jobs.push(tests_with(
        "a client generated from the API's description",
        daemon("generated")?,
        &["--ignored"],
        "OPENAPI_CLIENT",
        fetched.client,
    ));
    jobs.push(recorded_servers(built, fetched.servers)?);
    for program in lab_tests(built) {
        jobs.push(in_lab(tests(&program.name(), program, &["--nocapture", "--test-threads", "1"])));
    }
    let benchmarks = [&SMOKE_HERE[..], &SMOKE_IN_LAB].concat();
    jobs.extend(short_forms(built, &benchmarks)?);
    jobs.extend(scenarios(built, Some(turn.of(3)))?);
    Ok(jobs)
}

/// Short forms of benchmarks.
fn short_forms(built: &Built, names: &[&str]) -> Result<Vec<Job>> {
    let xtask = built.program("xtask")?;
    let one = |name: &&str| {
        let job =
            Job::new(&format!("bench: short form of {name}"), program(xtask, &["bench", name, "--smoke"]));
        if SMOKE_IN_LAB.contains(name) { in_lab(job) } else { job.lane(Lane::Cargo).seconds(90.0) }
    };
    Ok(names.iter().map(one).collect())
}

fn lab_tests(built: &Built) -> impl Iterator<Item = &TestProgram> {
    built.tests.iter().filter(|program| program.folder == LAB && program.target != "lib")
}

fn in_lab(job: Job) -> Job {
    job.lane(Lane::Lab).seconds(150.0)
}

/// A job for each scenario, as each has a server of its own. With a third those that are ignored are not played.
fn scenarios(built: &Built, third: Option<usize>) -> Result<Vec<Job>> {
    let program = built.test(SCENARIOS.0, SCENARIOS.1)?;
    let ignored = if third.is_some() { listed(program, &["--ignored"])? } else { Vec::new() };
    let one = |name: &String| {
        let arguments = [name.as_str(), "--exact", "--nocapture", "--include-ignored"];
        let job = in_lab(tests(&format!("lab: {name}"), program, &arguments));
        third.iter().fold(job, |job, third| job.env(THIRD, Path::new(&third.to_string())))
    };
    Ok(listed(program, &[])?.iter().filter(|name| !ignored.contains(name)).map(one).collect())
}

/// Names of tests.
fn listed(program: &TestProgram, arguments: &[&str]) -> Result<Vec<String>> {
    let output = program.command().args(["--list", "--format", "terse"]).args(arguments).output()?;
    ensure!(output.status.success(), "{} --list: {}", program.path.display(), output.status);
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test").map(str::to_owned)).collect())
}

/// Makes packages in a folder of `target/test/packages`.
fn packages(name: &str, built: &Built, folder: &str, options: &[&str]) -> Result<Job> {
    let output = format!("target/test/packages/{folder}");
    let arguments = [&["deb", "--dev", "--output", &output], options].concat();
    Ok(Job::new(name, program(built.program("xtask")?, &arguments)))
}

fn recorded_servers(built: &Built, archives: Result<PathBuf>) -> Result<Job> {
    let (program, variable) = (built.test(SERVERS.0, SERVERS.1)?, "VNUMA_RECORDED_SERVERS");
    Ok(tests_with("recorded servers", program, &["--nocapture"], variable, archives).seconds(30.0))
}

/// Recorded servers alone.
pub fn servers() -> Result<()> {
    let start = Instant::now();
    setup::packages()?;
    let servers = setup::recorded_servers();
    suite::run(vec![recorded_servers(&Built::new()?, servers)?], start)
}

/// Format, clippy, and tests of the packages that have changed since `main`, and of those that depend on them.
pub fn check() -> Result<()> {
    let start = Instant::now();
    setup::packages()?;
    let changed = Changed::of_checkout()?;
    println!("changed: {}", changed.text());
    let built = Built::new()?;
    println!("built after {} s", start.elapsed().as_secs());
    let (mut jobs, mut left) = (vec![format(), clippy()], Vec::new());
    for program in built.tests.iter().filter(|program| is_unit(program)) {
        let name = program.name();
        let short = suite::last_time(&name).is_none_or(|seconds| seconds <= CHECK_SECONDS);
        if changed.itself(&program.folder) || (changed.depends(&program.folder) && short) {
            jobs.push(tests(&name, program, &[]));
        } else if changed.depends(&program.folder) {
            left.push(name);
        }
    }
    if !left.is_empty() {
        println!("left to make test, as they take long: {}", left.join(", "));
    }
    suite::run(jobs, start)
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
    /// The driver on each kernel and in each mode, while a module of the guest reads the maps as drivers do: ten minutes a row
    Kernel,
    /// The sources of each guest kernel against the list of what asks them for nodes (guest/driver/kernel-users.txt), and their
    /// semantic patches on the driver
    KernelUsers,
    /// Guests, QEMUs, users and peers that are hostile, against vnumad, the driver, scx_vnuma and the DSM
    Hostile,
}

/// The long runs.
pub fn soak(arguments: &SoakArguments) -> Result<()> {
    let start = Instant::now();
    setup::packages()?;
    // One part needs nothing that is built.
    let built = Built::new;
    let seed = arguments.seed.to_string();
    let jobs = match arguments.part {
        Some(SoakPart::Scheduler) => {
            let seconds = (arguments.minutes * 60).to_string();
            let environment = [("VNUMA_SOAK_SECONDS", seconds.as_str()), ("VNUMA_SOAK_SEED", &seed)];
            vec![scenario(&built()?, SCHEDULER_TEST, &environment)?]
        }
        Some(SoakPart::Memory) => {
            let kills = arguments.kills.to_string();
            let environment = [("VNUMA_SOAK_KILLS", kills.as_str()), ("VNUMA_SOAK_SEED", &seed)];
            vec![scenario(&built()?, MEMORY_TEST, &environment)?]
        }
        Some(SoakPart::Packages) => vec![packages_in_lab(&built()?)?],
        Some(SoakPart::Kernel) => kernel_jobs(&built()?)?,
        Some(SoakPart::KernelUsers) => kernel_users_jobs()?,
        Some(SoakPart::Hostile) => hostile_jobs(&built()?)?,
        None => soak_jobs(&built()?)?,
    };
    suite::run(jobs.into_iter().map(|job| job.limit(SOAK_LIMIT)).collect(), start)
}

/// One scenario, ignored or not.
fn scenario(built: &Built, name: &str, environment: &[(&str, &str)]) -> Result<Job> {
    let program = built.test(SCENARIOS.0, SCENARIOS.1)?;
    let job = tests(&format!("lab: {name}"), program, &["--include-ignored", "--nocapture", "--exact", name]);
    Ok(in_lab(environment.iter().fold(job, |job, (name, value)| job.env(name, Path::new(value)))))
}

fn soak_jobs(built: &Built) -> Result<Vec<Job>> {
    setup::install(&[KERNEL_PACKAGES])?;
    let rounds = Path::new(SOAK_ROUNDS);
    let mut jobs = unit_tests(built, &[("PROPTEST_CASES", SOAK_CASES)]);
    jobs.push(Job::new("simulation", program(built.program("vnuma-sim")?, SOAK_SIMULATION)).seconds(3600.0));
    for program in built.tests.iter().filter(|program| DSM.contains(&program.folder.as_str())) {
        let name = format!("DSM: {}", program.name());
        jobs.push(tests(&name, program, &["--nocapture"]).env("VNUMA_SOAK_ROUNDS", rounds).seconds(600.0));
    }
    let xtask = built.program("xtask")?;
    jobs.push(Job::new("fuzz targets", program(xtask, &["fuzz"])).lane(Lane::Cargo).seconds(2400.0));
    let domains = built.test("host/daemon", "libvirt")?;
    jobs.push(tests("200 domains of libvirt", domains, &["--nocapture", "--ignored"]));
    jobs.extend(kernel_users_jobs()?);
    jobs.extend(moving_java()?);
    let programs = soak_programs()?;
    for job in scenarios(built, None)? {
        // Its packages are made for it.
        if !job.name().ends_with(PACKAGES_TEST) {
            let with = |job: Job, (name, value): &(&str, PathBuf)| job.env(name, value);
            jobs.push(programs.iter().fold(job.env("VNUMA_SOAK_ROUNDS", rounds), with));
        }
    }
    jobs.push(packages_in_lab(built)?);
    for program in lab_tests(built) {
        let arguments = ["--nocapture", "--ignored", "--test-threads", "1"];
        jobs.push(in_lab(tests(&program.name(), program, &arguments)));
    }
    jobs.extend(short_forms(built, &[&SMOKE_HERE[..], &SMOKE_IN_LAB[..]].concat())?);
    let exact = built.test(COUNTERS.0, COUNTERS.1)?;
    jobs.push(in_lab(tests(
        "lab: exactness of the counters",
        exact,
        &["--nocapture", "--test-threads", "1"],
    )));
    let seconds = format!("--seconds={SOAK_DEMO_SECONDS}");
    jobs.push(in_lab(Job::new("lab: the demonstration", program(xtask, &["demo", "--lab", &seconds]))));
    Ok(jobs)
}

fn kernel_jobs(built: &Built) -> Result<Vec<Job>> {
    setup::install(&[KERNEL_PACKAGES])?;
    let rows = listed(built.test(SCENARIOS.0, SCENARIOS.1)?, &["--ignored"])?;
    rows.iter().filter(|name| name.starts_with(KERNEL_TESTS)).map(|name| scenario(built, name, &[])).collect()
}

fn kernel_users_jobs() -> Result<Vec<Job>> {
    let xtask = std::env::current_exe().context("this program")?;
    let one = |(kernel, release): (&str, &str)| {
        let tree = setup::kernel_source(release, kernel, kernel_users::FOLDERS);
        let command = tree.map(|tree| {
            let mut command = program(&xtask, &["kernel-users", "--check"]);
            command.arg(tree);
            command
        });
        job(&format!("what asks kernel {kernel} for nodes"), command)
    };
    let mut jobs: Vec<Job> = kernel_users::KERNELS.into_iter().map(one).collect();
    jobs.push(job("the kernel's semantic patches, on the driver", semantic_patches()));
    Ok(jobs)
}

/// Those of the newest kernel.
fn semantic_patches() -> Result<Command> {
    setup::install(&["guest/driver/test/host-packages.txt"])?;
    let (kernel, release) = kernel_users::KERNELS[kernel_users::KERNELS.len() - 1];
    let tree = setup::kernel_source(release, kernel, kernel_users::FOLDERS)?;
    let mut command = program(Path::new("make"), &["--silent", "-C", "guest/driver", "coccicheck"]);
    command.arg(format!("SCRIPTS={}", tree.join("scripts/coccinelle").display()));
    Ok(command)
}

/// Tests of what [SECURITY.md](../../SECURITY.md) promises, those that take long as well.
fn hostile_jobs(built: &Built) -> Result<Vec<Job>> {
    let all = ["--include-ignored", "--nocapture", "--test-threads", "1"];
    let mut jobs = Vec::new();
    for (folder, target) in HOSTILE {
        let program = built.test(folder, target)?;
        jobs.push(tests(&format!("hostile: {}", program.name()), program, &all));
    }
    for name in HOSTILE_SCENARIOS {
        jobs.push(scenario(built, name, &[])?);
    }
    Ok(jobs)
}

/// Where programs of other runtimes are, for the scenarios that play with them.
fn soak_programs() -> Result<Vec<(&'static str, PathBuf)>> {
    setup::install(&[PROGRAM_PACKAGES])?;
    let java: Vec<String> = setup::java_vms()?
        .into_iter()
        .map(|(version, directory)| format!("{version}={}", directory.display()))
        .collect();
    Ok(vec![
        ("VNUMA_WHEELS", setup::wheels()?),
        ("VNUMA_TCMALLOC", setup::tcmalloc()?),
        ("VNUMA_NUMACTL", setup::numactl()?),
        ("VNUMA_JAVA", java.join(":").into()),
    ])
}

/// G1 whose threads are on another CPU whenever it asks: the JDK of the machine, and later versions.
fn moving_java() -> Result<Vec<Job>> {
    let arguments = ["-C", "guest/runtime", "check-java"];
    let mut jobs = vec![Job::new("G1 whose threads move: the machine's", make(&arguments))];
    for (version, directory) in setup::java_vms()? {
        let java = format!("JAVA={}", directory.join("bin/java").display());
        let name = format!("G1 whose threads move: {version}");
        jobs.push(Job::new(&name, make(&[&arguments[..], &[&java]].concat())));
    }
    Ok(jobs)
}

/// The test that has packages of a lower version and of this one, which are made first.
fn packages_in_lab(built: &Built) -> Result<Job> {
    let folder = workspace().join("target/test/packages");
    let lower = format!("{}~before", env!("CARGO_PKG_VERSION"));
    let made = [
        packages("packages of a lower version", built, "before", &["--version", &lower])?,
        packages("packages of this version", built, "now", &[])?,
    ];
    // One after the other: both build the runtime in its folder.
    for job in made {
        suite::run(vec![job], Instant::now())?;
    }
    // AppArmor of the lab's release, and the one that asks profiles for connections to sockets as well.
    setup::packages_of("trixie", "apparmor", &folder.join("apparmor"))?;
    setup::packages_of("sid", "apparmor libapparmor1", &folder.join("apparmor-next"))?;
    let folder = folder.to_str().context("the checkout's path is not UTF-8")?;
    scenario(built, PACKAGES_TEST, &[("VNUMA_PACKAGES", folder)])
}

/// cargo-deny, unless what it reads is what it has passed on this machine.
fn cargo_deny() -> Result<Option<Command>> {
    let (stamp, next) = (workspace().join("target/test/deny"), workspace().join("target/test/deny.next"));
    let mut seen = setup::CARGO_DENY_VERSION.to_owned();
    for file in ["Cargo.lock", "deny.toml"] {
        seen += &fs::read_to_string(workspace().join(file)).context(file)?;
    }
    if fs::read_to_string(&stamp).is_ok_and(|passed| passed == seen) {
        return Ok(None);
    }
    fs::create_dir_all(workspace().join("target/test"))?;
    fs::write(&next, seen).with_context(|| next.display().to_string())?;
    let mut command = Command::new("sh");
    let script = "\"$1\" --log-level error check licenses bans sources && mv \"$2\" \"$3\"";
    command.args(["-c", script, "sh"]).arg(setup::cargo_deny()?).args([next, stamp]);
    Ok(Some(command))
}

/// C that runs in a kernel, and the headers that it includes. Programs in C keep the style without the kernel's types.
const KERNEL_SOURCES: [&str; 5] = [
    ":(glob)guest/driver/*.[ch]",
    ":(glob)guest/driver/test/readers/*.c",
    ":(glob)lab/pmu/*.[ch]",
    ":(glob)**/*.bpf.c",
    ":(glob)abi/**/*.h",
];

/// Kernel style for everything that runs in a kernel.
fn checkpatch() -> Result<Command> {
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
    let mut command = Command::new("perl");
    command.arg(program).args(["--no-tree", "--strict", "--terse", "--quiet", "--max-line-length=100"]);
    command.args(["--ignore", &ignored, "--file"]).args(&files);
    Ok(command)
}
