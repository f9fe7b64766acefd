//! Boots VMs in a server with lab-vm.

mod common;

use common::{good, sh};
use vnuma_lab_agent::emulator::ended_guest;
use vnuma_lab_runner::{DEFAULT_PROFILE, Lab, boot_retries};

/// A guest that the emulated processor has ended is no fault of lab-vm: once more, then.
#[test]
fn vms() {
    let Err(panic) = std::panic::catch_unwind(vms_on_a_server) else { return };
    let said = panic.downcast_ref::<String>().map_or("", String::as_str);
    if !ended_guest(said) {
        std::panic::resume_unwind(panic);
    }
    println!("the emulated processor has ended a guest; all is run once more");
    vms_on_a_server();
}

/// One server for all, as booting it takes longest.
fn vms_on_a_server() {
    let lab = Lab::boot(DEFAULT_PROFILE).unwrap();
    println!("server: boot {:?}, boots retried: {}", lab.boot_time(), boot_retries());
    type Step = (&'static str, fn(&Lab));
    let steps: [Step; 10] = [
        ("refusals", refusals),
        ("start", start),
        ("what the guests see", what_the_guests_see),
        ("what the server sees", what_the_server_sees),
        ("programs and files", programs_and_files),
        ("a guest that is reset", a_guest_that_is_reset),
        ("a guest that dies", a_guest_that_dies),
        ("a guest that is paused", a_guest_that_is_paused),
        ("a guest that KVM gives up", a_guest_that_kvm_gives_up),
        ("stop", stop),
    ];
    for (name, step) in steps {
        let started = std::time::Instant::now();
        step(&lab);
        println!("{name}: {:?}", started.elapsed());
    }
}

/// A start that cannot be says why and leaves nothing behind.
fn refusals(lab: &Lab) {
    let cases = [
        ("start ../a", "name \"../a\": expected"),
        ("start a --kernel 9.9", "--kernel 9.9: expected one of: 6.1, 6.12, 7.3"),
        ("start a --nodes 4 --vcpus 2", "--vcpus 2: expected at least 4"),
        ("start a --memory 12", "expected MiB or GiB"),
        ("start a --uma --nodes 2", "cannot be used with"),
        ("start a --memory 1024G --unbound", "VM \"a\" did not start: qemu-system-x86_64"),
        ("exec a -- true", "VM \"a\": there is none of that name"),
        ("stop a", "VM \"a\": there is none of that name"),
    ];
    for (arguments, expected) in cases {
        let ran = sh(lab, &format!("lab-vm {arguments}"));
        assert_ne!(ran.status, 0, "{arguments}");
        assert!(ran.stderr.contains(expected), "{arguments}: {}", ran.stderr);
    }
    assert_eq!(good(lab, "lab-vm list; ls -A /run/lab-vm | grep -v lock; true"), "");
}

/// Three of a kind each, at the same time.
fn start(lab: &Lab) {
    std::thread::scope(|scope| {
        let kinds =
            ["bound --nodes 2 --vcpus 4 --verbose", "free --nodes 3 --unbound", "flat --uma --vcpus 2"];
        let starts = kinds.map(|arguments| {
            scope.spawn(move || {
                let output = good(lab, &format!("lab-vm start {arguments} --memory 512M"));
                assert_eq!(output.contains("-accel kvm"), arguments.contains("--verbose"), "{output}");
            })
        });
        for start in starts {
            start.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    let list = good(lab, "lab-vm list");
    let names: Vec<_> = list.lines().map(|line| line.split('\t').next().unwrap()).collect();
    assert_eq!(names, ["bound", "flat", "free"], "{list}");
    assert!(list.lines().all(|line| line.ends_with("\trunning")), "{list}");
    let ran = sh(lab, "lab-vm start bound");
    assert!(ran.status != 0 && ran.stderr.contains("there is one of that name already"), "{ran:?}");
}

fn what_the_guests_see(lab: &Lab) {
    let node = |name: &str, file: &str| {
        good(lab, &format!("lab-vm exec {name} -- sh -c 'cd /sys/devices/system/node; cat {file}'"))
    };
    assert_eq!(node("bound", "online node0/cpulist node1/cpulist"), "0-1\n0-1\n2-3\n");
    // Distances of the homes, nodes 0 and 1 of the server.
    assert_eq!(node("bound", "node0/distance node1/distance"), "10 21\n21 10\n");
    assert_eq!(node("free", "online node0/distance node2/cpulist"), "0-2\n10 21 31\n2\n");
    assert_eq!(node("flat", "online node0/cpulist"), "0\n0-1\n");
    let packages = good(
        lab,
        "lab-vm exec bound -- sh -c 'cat /sys/devices/system/cpu/cpu*/topology/physical_package_id'",
    );
    assert_eq!(packages, "0\n1\n2\n3\n", "each vCPU is a socket");
    assert!(good(lab, "lab-vm exec bound -- uname -r").starts_with("6.12."));
}

fn what_the_server_sees(lab: &Lab) {
    let affinity = |name: &str| {
        let script = format!(
            "for t in /proc/$(cat /run/lab-vm/{name}/pid)/task/*; do \
             grep -q ^CPU $t/comm && sed -n 's/Cpus_allowed_list:\t//p' $t/status; done; true"
        );
        good(lab, &script).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    // CPU 0 is none for VMs, also when a thread is put there.
    assert_eq!(affinity("bound"), ["1", "1", "2-3", "2-3"]);
    assert_eq!(affinity("free"), ["1-7", "1-7", "1-7"]);
    assert_eq!(affinity("flat"), ["1-7", "1-7"]);
    good(lab, "taskset -a -p -c 0-1 $(cat /run/lab-vm/flat/pid)");
    assert_eq!(affinity("flat"), ["1", "1"]);
    good(lab, "taskset -a -p -c 0-7 $(cat /run/lab-vm/flat/pid)");
    let policies = |name: &str| {
        good(lab, &format!("grep -o bind:[0-9]* /proc/$(cat /run/lab-vm/{name}/pid)/numa_maps | sort -u"))
    };
    assert_eq!(policies("bound"), "bind:0\nbind:1\n");
    assert_eq!(sh(lab, "grep -c bind: /proc/$(cat /run/lab-vm/free/pid)/numa_maps").stdout, "0\n");
    // The monitor is for the daemon: no client is connected, and a device can be plugged into a free port.
    for name in ["bound", "flat", "free"] {
        assert_eq!(
            good(lab, &format!("readlink /run/vnuma/qmp/{name}.sock")),
            format!("/run/lab-vm/{name}/qmp.sock\n")
        );
    }
    let plugged = "lab-vm exec flat -- lspci -n | grep -e 1af4:1044 -e 1af4:1005";
    assert_ne!(sh(lab, plugged).status, 0, "there is such a device before it is plugged");
    good(lab, &qmp("flat", PLUG));
    if !eventually(lab, plugged) {
        let guest = sh(lab, "timeout 60 lab-vm exec flat -- sh -c 'lspci -n; dmesg | tail -n 20'");
        panic!("no device was plugged: {guest:?}");
    }
}

/// Plugs a device into port vnuma0.
const PLUG: &str =
    r#"{"execute":"device_add","arguments":{"driver":"virtio-rng-pci","id":"r","bus":"vnuma0"}}"#;

/// A command over the daemon's monitor of a VM, with what the image has.
fn qmp(name: &str, command: &str) -> String {
    format!(
        r#"perl -MIO::Socket::UNIX -we '
    my $s = IO::Socket::UNIX->new("/run/vnuma/qmp/{name}.sock") or die $!;
    for my $c (q({{"execute":"qmp_capabilities"}}), q({command})) {{
        print $s "$c\n";
        my $answer;
        do {{ $answer = <$s> }} until $answer =~ /"return"|"error"/;
        die $answer if $answer =~ /"error"/;
    }}'"#
    )
}

fn programs_and_files(lab: &Lab) {
    let ran = sh(lab, "lab-vm exec bound -- sh -c 'echo out; echo err >&2; exit 9'");
    assert_eq!((ran.status, &ran.stdout[..], &ran.stderr[..]), (9, "out\n", "err\n"));
    // A long program and short ones beside it, on one guest.
    std::thread::scope(|scope| {
        let long = scope.spawn(|| {
            good(lab, "lab-vm exec free -- sh -c 'while ! test -e /tmp/end; do sleep 0.2; done; echo ended'")
        });
        for n in 0..3 {
            assert_eq!(good(lab, &format!("lab-vm exec free -- echo {n}")), format!("{n}\n"));
        }
        assert!(!long.is_finished());
        good(lab, "lab-vm exec free -- touch /tmp/end");
        assert_eq!(long.join().unwrap(), "ended\n");
    });
    // Some MB of all byte values in, out, and as files.
    good(lab, "head -c 3000001 /dev/urandom > /root/data && chmod 750 /root/data");
    good(lab, "lab-vm exec bound -- cat < /root/data | cmp - /root/data");
    good(
        lab,
        "lab-vm put bound /root/data /root/in/data && lab-vm exec bound -- cat /root/in/data | cmp - /root/data",
    );
    assert_eq!(good(lab, "lab-vm exec bound -- stat -c %a /root/in/data"), "750\n");
    good(lab, "lab-vm get bound /root/in/data /root/back && cmp /root/back /root/data");
    // The caller goes away, and the program with it.
    good(lab, "timeout 3 lab-vm exec bound -- sleep 4321; true");
    assert!(eventually(lab, "! lab-vm exec bound -- pgrep -f 'sleep 4321'"), "the program goes on");
}

/// Whether a command succeeds within forty tries, one a second; a bound against hanging only.
fn eventually(lab: &Lab, command: &str) -> bool {
    sh(lab, &format!("for i in $(seq 40); do ({command}) > /dev/null && exit; sleep 1; done; exit 1")).status
        == 0
}

/// The guest boots again, in the same process.
fn a_guest_that_is_reset(lab: &Lab) {
    let pid = good(lab, "lab-vm exec flat -- touch /root/here; cat /run/lab-vm/flat/pid");
    good(lab, "lab-vm reset flat; ! lab-vm exec flat -- test -e /root/here");
    assert_eq!(good(lab, "cat /run/lab-vm/flat/pid"), pid);
    // It ends again when it reboots of itself.
    let ran = sh(lab, "lab-vm exec flat -- sh -c 'echo b > /proc/sysrq-trigger; sleep 1000'");
    assert!(ran.stderr.contains("VM \"flat\" has died"), "{ran:?}");
}

fn a_guest_that_dies(lab: &Lab) {
    let ran = sh(lab, "lab-vm exec free -- sh -c 'echo c > /proc/sysrq-trigger; sleep 1000'");
    assert_eq!(ran.status, 125, "{ran:?}");
    assert!(
        ran.stderr.contains("VM \"free\" has died") && ran.stderr.contains("sysrq triggered crash"),
        "{ran:?}"
    );
    assert!(good(lab, "lab-vm list").contains("free\t"));
    assert!(good(lab, "lab-vm log free").contains("sysrq triggered crash"));
    good(lab, "lab-vm stop free");
}

/// One that stands still is out of reach at once.
fn a_guest_that_is_paused(lab: &Lab) {
    good(lab, &qmp("bound", r#"{"execute":"stop"}"#));
    let ran = sh(lab, "lab-vm exec bound -- true");
    assert_eq!(ran.status, 125, "{ran:?}");
    assert!(ran.stderr.contains(r#"agent of VM "bound"; QEMU calls the VM "paused""#), "{ran:?}");
    // Why it stands still comes before that it is out of reach, whichever is noticed first.
    good(
        lab,
        "cp /run/lab-vm/bound/qemu.log /root && echo 'KVM internal error. Suberror: 1' >> /run/lab-vm/bound/qemu.log",
    );
    for _ in 0..10 {
        let ran = sh(lab, "lab-vm exec bound -- true");
        assert!(ran.stderr.contains("KVM cannot run it any more"), "{ran:?}");
    }
    good(lab, "cp /root/qemu.log /run/lab-vm/bound/qemu.log");
    good(lab, &qmp("bound", r#"{"execute":"cont"}"#));
    good(lab, "lab-vm exec bound -- true");
}

/// To lab-vm it looks as if KVM had stopped the guest: no program there ends any more.
fn a_guest_that_kvm_gives_up(lab: &Lab) {
    let late = "(sleep 3; echo 'KVM internal error. Suberror: 1' >> /run/lab-vm/bound/qemu.log) &";
    let ran = sh(lab, &format!("{late} lab-vm exec bound -- sleep 100000"));
    assert_eq!(ran.status, 125, "{ran:?}");
    assert!(
        ran.stderr.contains("VM \"bound\": KVM cannot run it any more") && ran.stderr.contains("Suberror: 1"),
        "{ran:?}"
    );
    assert!(good(lab, "lab-vm list").contains("given up"));
}

fn stop(lab: &Lab) {
    let pid = good(lab, "cat /run/lab-vm/bound/pid");
    good(lab, "lab-vm stop bound && lab-vm stop flat");
    good(lab, &format!("! test -e /proc/{}", pid.trim()));
    assert_eq!(good(lab, "lab-vm list; ls -A /run/vnuma/qmp; ls -A /run/lab-vm"), ".lock\n");
}
