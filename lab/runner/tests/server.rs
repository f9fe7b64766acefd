//! Boots servers: commands, files, the machine that a profile promises, and ends of all kinds.

mod common;

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use common::{HANG, good, sh};
use vnuma_lab_runner::{Accel, DEFAULT_PROFILE, Exec, Input, Lab, LabError, Profile, boot_retries};

fn boot(profile: &str) -> Lab {
    let lab = Lab::boot(profile).unwrap();
    println!("{profile}: {:?} boot {:?}, boots retried: {}", lab.accel(), lab.boot_time(), boot_retries());
    lab
}

#[test]
fn a_server_runs_commands_and_is_what_its_profile_says() {
    let lab = boot(DEFAULT_PROFILE);
    let clock = clock(&lab);
    streams_and_status(&lab);
    files(&lab);
    machine(&lab, &Profile::load(DEFAULT_PROFILE).unwrap());
    sessions_side_by_side(&lab);
    the_environment(&lab);
    the_clock_goes_right(&lab, clock);
    a_command_that_takes_too_long(&lab);
}

/// Seconds since the server's boot, and when it was asked for them and had said them.
fn clock(lab: &Lab) -> (f64, Instant, Instant) {
    let asked = Instant::now();
    let said = good(lab, "cut -d' ' -f1 /proc/uptime").trim().parse().unwrap();
    (said, asked, Instant::now())
}

/// The server's clock has gone as fast as the machine's since `before`: its kernel has taken the frequency that it was told.
fn the_clock_goes_right(lab: &Lab, before: (f64, Instant, Instant)) {
    let log = good(lab, "cat /proc/cmdline; dmesg | grep 'tsc: '");
    let told = log.split("tsc_early_khz=").nth(1).unwrap().split(' ').next().unwrap();
    let mhz = told.parse::<f64>().unwrap() / 1e3;
    assert!(log.contains(&format!("Detected {mhz:.3} MHz")), "{log}");
    let after = clock(lab);
    let (least, most) = (after.1 - before.2, after.2 - before.1);
    let gone = after.0 - before.0;
    assert!(gone > least.as_secs_f64() * 0.98 - 0.1, "{gone} s of at least {least:?}: {log}");
    assert!(gone < most.as_secs_f64() * 1.02 + 0.1, "{gone} s of at most {most:?}: {log}");
}

fn streams_and_status(lab: &Lab) {
    let ran = sh(lab, "echo out; echo err >&2; exit 7");
    assert_eq!((ran.status, &ran.stdout[..], &ran.stderr[..]), (7, "out\n", "err\n"));
    assert_eq!(sh(lab, "kill -KILL $$").status, 137);
    // Binary input far beyond every buffer on the way.
    let content: Vec<u8> =
        (0..3_000_001_usize).map(|n| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let source = tempfile::NamedTempFile::new().unwrap();
    fs::write(source.path(), &content).unwrap();
    let file = File::open(source.path()).unwrap();
    let exec = Exec { argv: vec!["cat".into()], ..Exec::default() };
    let mut back = Vec::new();
    let status = lab.exec(&exec, Input::From(file.as_fd()), &mut back, &mut std::io::sink(), HANG).unwrap();
    assert_eq!(status, 0);
    assert!(back == content, "{} of {} bytes came back, or others", back.len(), content.len());
}

fn files(lab: &Lab) {
    let directory = tempfile::tempdir().unwrap();
    let (source, back) = (directory.path().join("source"), directory.path().join("folder/back"));
    let content: Vec<u8> = (0..1_000_003_usize).map(|n| (n.wrapping_mul(40_503) >> 7) as u8).collect();
    fs::write(&source, &content).unwrap();
    fs::set_permissions(&source, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    lab.put(&source, "/opt/new/file", HANG).unwrap();
    assert_eq!(good(lab, "stat -c %a:%s /opt/new/file"), "755:1000003\n");
    lab.get("/opt/new/file", &back, HANG).unwrap();
    assert!(fs::read(&back).unwrap() == content);
    let error = lab.get("/no/such/file", &back, HANG).unwrap_err().to_string();
    assert!(error.contains("/no/such/file"), "{error}");
    assert!(fs::read(&back).unwrap() == content, "a failed get touched its target");
    let error = lab.put(directory.path(), "/x", HANG).unwrap_err().to_string();
    assert!(error.contains("not a file"), "{error}");
}

/// What the server's kernel shows is what the profile promises.
fn machine(lab: &Lab, profile: &Profile) {
    let mut first = 0;
    for node in 0..profile.nodes {
        let directory = format!("/sys/devices/system/node/node{node}");
        let cpus = format!("{first}-{}\n", first + profile.cpus_per_node[node] - 1);
        first += profile.cpus_per_node[node];
        assert_eq!(good(lab, &format!("cat {directory}/cpulist")), cpus, "node {node}");
        let distances: Vec<String> = profile.distances[node].iter().map(u8::to_string).collect();
        assert_eq!(
            good(lab, &format!("cat {directory}/distance")).trim(),
            distances.join(" "),
            "node {node}"
        );
        let script = format!("sed -n 's/.*MemTotal: *\\([0-9]*\\) kB/\\1/p' {directory}/meminfo");
        let mib: usize = good(lab, &script).trim().parse::<usize>().unwrap() / 1024;
        let promised = profile.memory_mib_per_node[node];
        assert!(mib <= promised && mib > promised - 200, "node {node}: {mib} MiB of {promised}");
    }
    // Network cards are of class 0x0200.., NVMe disks of class 0x0108..; the lab's own devices have no node.
    let script = "cd /sys/bus/pci/devices; for d in *; do echo $(cat $d/class) $(cat $d/numa_node); done | \
                  grep -E '^0x(0200|0108)' | grep -v -e ' -1$' | cut -d' ' -f2 | sort -n | tr '\\n' ' '";
    let mut promised: Vec<usize> = profile.devices.iter().map(|device| device.node).collect();
    promised.sort();
    let promised: Vec<String> = promised.iter().map(usize::to_string).collect();
    assert_eq!(good(lab, script).trim(), promised.join(" "), "nodes of the PCI devices");
}

/// A long command does not keep short ones waiting, and more commands than ports get their turn.
fn sessions_side_by_side(lab: &Lab) {
    std::thread::scope(|scope| {
        let long = scope.spawn(|| good(lab, "while ! test -e /tmp/end; do sleep 0.1; done; echo ended"));
        let short: Vec<_> = (0..6)
            .map(|n| scope.spawn(move || assert_eq!(good(lab, &format!("echo {n}")), format!("{n}\n"))))
            .collect();
        for thread in short {
            thread.join().unwrap();
        }
        assert!(!long.is_finished());
        good(lab, "touch /tmp/end");
        assert_eq!(long.join().unwrap(), "ended\n");
    });
}

fn the_environment(lab: &Lab) {
    good(lab, "test -c /dev/kvm && test -c /dev/vhost-vsock && test -w /dev/shm");
    for path in ["/sys/kernel/debug/sched", "/sys/kernel/tracing/events", "/sys/kernel/btf/vmlinux"] {
        good(lab, &format!("test -e {path}"));
    }
    assert_eq!(good(lab, "stat -f -c %T /sys/fs/bpf").trim(), "bpf_fs");
    assert_eq!(good(lab, "cat /proc/sys/kernel/numa_balancing"), "1\n");
    assert_eq!(good(lab, "id -u; ip -o link show up | cut -d: -f2 | tr -d ' \\n'"), "0\nlo");
    // Process 1 takes care of orphans.
    good(lab, "sh -c 'sleep 0.2 & exit'; sleep 1; ! ps -eo stat= | grep -q Z");
}

fn a_command_that_takes_too_long(lab: &Lab) {
    let limit = Duration::from_secs(2);
    let exec = Exec { argv: vec!["sleep".into(), "1000".into()], ..Exec::default() };
    let started = Instant::now();
    let sink = &mut std::io::sink();
    let error = lab.exec(&exec, Input::Null, sink, &mut std::io::sink(), limit).unwrap_err();
    assert!(matches!(error, LabError::Timeout { limit: found, .. } if found == limit), "{error}");
    // What it did, where the CPUs are, and what the kernel says of them.
    for part in [
        "within 2 s",
        " sleep 1000",
        "CPU#3\n  RIP=",
        "CPU#3: Timer\t",
        "ISR\t (none), IRR\t",
        "LOC:",
        "sysrq: Show Blocked State",
    ] {
        assert!(error.to_string().contains(part), "{part} is not in {error}");
    }
    assert!(started.elapsed() < HANG);
    // The server is gone, and says so.
    let error = lab.exec(&exec, Input::Null, sink, &mut std::io::sink(), HANG).unwrap_err();
    assert!(matches!(error, LabError::Died { .. }), "{error}");
}

/// Sets the timer of CPU 1 to fire at once, and keeps it from interrupting: what comes on it later never comes.
const LOSE_A_TIMER: &str = "lapic() { taskset -c 1 /run/lab/bin/busybox devmem $1 32 $2; }; \
    lapic 0xfee00320 0x100ec && lapic 0xfee00380 1 && sleep 1000";

#[test]
#[ignore = "takes a minute: make soak"]
fn a_cpu_that_has_lost_its_timer_is_noticed() {
    let lab = boot("2n4c");
    if lab.accel() != Accel::Tcg {
        println!("skipped: only CPUs that are emulated are watched");
        return;
    }
    let exec = Exec { argv: ["sh", "-c", LOSE_A_TIMER].map(str::to_owned).into(), ..Exec::default() };
    let sink = &mut std::io::sink();
    let error = lab.exec(&exec, Input::Null, sink, &mut std::io::sink(), HANG).unwrap_err();
    assert!(matches!(&error, LabError::Stuck { cpus, .. } if *cpus == [1]), "{error}");
    assert!(error.to_string().contains("current_count = 0"), "{error}");
}

#[test]
#[ignore = "boots the largest server: make soak"]
fn two_servers_run_side_by_side_and_one_dies() {
    let (small, large) = std::thread::scope(|scope| {
        let large = scope.spawn(|| boot("8n16c"));
        (boot("2n4c"), large.join().unwrap())
    });
    machine(&small, &Profile::load("2n4c").unwrap());
    machine(&large, &Profile::load("8n16c").unwrap());
    good(&small, "touch /root/small");
    assert_eq!(sh(&large, "test -e /root/small").status, 1, "the servers share changes");
    let exec = Exec {
        argv: ["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 1000"].map(str::to_owned).into(),
        ..Exec::default()
    };
    let error = small.exec(&exec, Input::Null, &mut std::io::sink(), &mut std::io::sink(), HANG).unwrap_err();
    let LabError::Died { tail, .. } = &error else { panic!("{error}") };
    assert!(tail.contains("sysrq triggered crash"), "{tail}");
    assert!(error.to_string().contains(tail));
    assert_eq!(good(&large, "echo well"), "well\n");
}

#[test]
fn what_cannot_be_booted_says_why() {
    let error = Lab::boot("no-such-profile").err().unwrap().to_string();
    assert!(error.contains("no-such-profile") && error.contains(DEFAULT_PROFILE), "{error}");
}
