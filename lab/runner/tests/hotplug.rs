//! CPUs and memory that come and go while the server runs, and the control groups that follow.

mod common;

use common::{good, sh};
use vnuma_lab_runner::{Lab, Profile, boot_retries};

const PROFILE: &str = "3n4c-hotplug";

#[test]
#[ignore = "the scenario that follows it is in make test; this is in make soak"]
fn cpus_memory_and_a_node_come_and_go() {
    let lab = Lab::boot(PROFILE).unwrap();
    println!("{PROFILE}: boot {:?}, boots retried: {}", lab.boot_time(), boot_retries());
    let distances = Profile::load(PROFILE).unwrap().distances;
    let row = |node: usize, nodes: usize| {
        let row: Vec<String> = distances[node][..nodes].iter().map(u8::to_string).collect();
        row.join(" ")
    };
    assert_eq!(machine(&lab), format!("0-1 0-3|0-1 {}|2-3 {}|", row(0, 2), row(1, 2)));
    control_groups(&lab, "0-3", "1-3");
    good(
        &lab,
        "udevadm monitor --kernel > /tmp/uevents & for i in $(seq 100); do \
                test -s /tmp/uevents && exit; sleep 0.1; done; exit 1",
    );

    assert_eq!(good(&lab, "lab-vm server plug-cpu 1"), "5\n", "numbers follow the slots");
    assert_eq!(machine(&lab), format!("0-1 0-3,5|0-1 {}|2-3,5 {}|", row(0, 2), row(1, 2)));
    control_groups(&lab, "0-3,5", "1-3,5");
    // The third node appears with its first CPU, and with its distances.
    assert_eq!(good(&lab, "lab-vm server plug-cpu 2"), "6\n");
    let nodes = [row(0, 3), row(1, 3), row(2, 3)];
    assert_eq!(machine(&lab), format!("0-2 0-3,5-6|0-1 {}|2-3,5 {}|6 {}|", nodes[0], nodes[1], nodes[2]));
    let module = good(&lab, "lab-vm server plug-memory 2 256M --movable");
    assert_eq!(
        good(&lab, "grep -o 'MemTotal:.*' /sys/devices/system/node/node2/meminfo | tr -d ' '"),
        "MemTotal:262144kB\n"
    );
    assert_eq!(good(&lab, "cat /sys/devices/system/node/has_memory"), "0-2\n");

    good(&lab, "echo 0 > /sys/devices/system/cpu/cpu3/online");
    good(&lab, "lab-vm server unplug-cpu 1");
    good(&lab, &format!("lab-vm server unplug-memory {module}"));
    good(&lab, "lab-vm server unplug-cpu 2");
    assert_eq!(machine(&lab), format!("0-1 0-2|0-1 {}|2 {}|", row(0, 2), row(1, 2)));
    // The slot can be used again.
    assert_eq!(good(&lab, "lab-vm server plug-cpu 2"), "6\n");

    for event in
        ["add .*/cpu5 ", "online .*/cpu5 ", "add .*/node/node2 ", "offline .*/cpu3 ", "remove .*/cpu5 "]
    {
        let script = format!(
            "for i in $(seq 100); do grep -q '{event}' /tmp/uevents && exit; sleep 0.1; done; exit 1"
        );
        assert_eq!(sh(&lab, &script).status, 0, "no uevent {event}: {}", good(&lab, "cat /tmp/uevents"));
    }
    refusals(&lab);
    qmp(&lab);
}

/// Nodes and CPUs that are online, then CPUs and distances of each node, as the kernel shows them.
fn machine(lab: &Lab) -> String {
    let script = "cd /sys/devices/system; printf '%s %s|' $(cat node/online cpu/online); \
                  for n in node/node*; do echo $(cat $n/cpulist $n/distance); done | tr '\\n' '|'";
    good(lab, script)
}

/// Groups as systemd lays them out; that of VMs has every CPU but 0, those that come later, too.
fn control_groups(lab: &Lab, all: &str, vms: &str) {
    assert_eq!(good(lab, "cat /proc/self/cgroup"), "0::/system.slice/lab-agent.service\n");
    let options = good(lab, "grep ' /sys/fs/cgroup cgroup2 ' /proc/mounts");
    assert!(options.contains("nsdelegate,memory_recursiveprot"), "{options}");
    let controllers = "cd /sys/fs/cgroup; cat cgroup.subtree_control system.slice/cgroup.subtree_control";
    assert_eq!(good(lab, controllers), "cpuset cpu io memory pids\n".repeat(2));
    assert_eq!(good(lab, "cat /sys/fs/cgroup/cpuset.cpus.effective").trim(), all);
    // What lab-vm does when it starts a VM.
    good(lab, "echo 1-8 > /sys/fs/cgroup/machine.slice/cpuset.cpus");
    assert_eq!(good(lab, "cat /sys/fs/cgroup/machine.slice/cpuset.cpus.effective").trim(), vms);
}

fn refusals(lab: &Lab) {
    let cases = [
        ("plug-cpu 7", "node 7 has no free slot"),
        ("unplug-cpu 7", "node 7 has no CPU"),
        ("unplug-memory dimm7", "Device 'dimm7' not found"),
        ("plug-memory 0 12", "expected MiB or GiB"),
        ("plug-memory 0 8G", "not enough space"),
        ("qmp nonsense", "nonsense has not been found"),
    ];
    for (arguments, expected) in cases {
        let ran = sh(lab, &format!("lab-vm server {arguments}"));
        assert_ne!(ran.status, 0, "{arguments}");
        assert!(ran.stderr.contains(expected), "{arguments}: {}", ran.stderr);
    }
}

/// The monitor can be had inside and outside at once.
fn qmp(lab: &Lab) {
    use std::io::{BufRead, BufReader};
    let stream = std::os::unix::net::UnixStream::connect(lab.qmp_socket()).unwrap();
    let mut greeting = String::new();
    BufReader::new(stream).read_line(&mut greeting).unwrap();
    assert!(greeting.contains("\"QMP\""), "{greeting}");
    assert!(good(lab, "lab-vm server qmp query-status").contains("\"running\""));
}
