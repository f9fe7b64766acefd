//! Several servers with a network between them, and a server with systemd.

mod common;

use common::{good, sh};
use vnuma_lab_runner::{Lab, boot_retries};

#[test]
#[ignore = "takes minutes: make soak"]
fn servers_and_their_vms_reach_each_other() {
    let labs = Lab::boot_cluster(&["2n4c", "2n5c"]).unwrap();
    let times: Vec<_> = labs.iter().map(Lab::boot_time).collect();
    println!("two servers: boots {times:?}, boots retried: {}", boot_retries());
    for (number, lab) in labs.iter().enumerate() {
        assert_eq!(good(lab, "hostname"), format!("server{number}\n"));
        ping(lab, "", &format!("server{}", 1 - number));
    }
    std::thread::scope(|scope| {
        for lab in &labs {
            scope.spawn(|| good(lab, "lab-vm start a --network --nodes 1 --vcpus 1 --memory 256M"));
        }
    });
    let addresses: Vec<String> = labs.iter().map(|lab| good(lab, "cat /run/lab-vm/a/address")).collect();
    assert_eq!(addresses, ["10.77.1.3/16\n", "10.77.2.3/16\n"]);
    ping(&labs[0], "lab-vm exec a --", "10.77.2.3");
    ping(&labs[1], "lab-vm exec a --", "10.77.0.1");
    good(&labs[1], "lab-vm stop a; ! test -e /sys/class/net/vm3");
    let ran = sh(&labs[0], "lab-vm exec a -- /run/lab/bin/busybox ping -c 1 -W 3 10.77.2.3");
    assert_ne!(ran.status, 0, "{}{}", ran.stdout, ran.stderr);
}

fn ping(lab: &Lab, prefix: &str, to: &str) {
    good(lab, &format!("{prefix} /run/lab/bin/busybox ping -c 3 -W 60 {to}"));
}

#[test]
fn a_network_has_at_least_one_server() {
    let error = Lab::boot_cluster(&[]).err().unwrap().to_string();
    assert_eq!(error, "0 servers: expected 1 to 16");
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_server_with_systemd_runs_vms_in_its_machine_slice() {
    let lab = Lab::boot_systemd("2n4c").unwrap();
    println!("systemd: boot {:?}, boots retried: {}", lab.boot_time(), boot_retries());
    assert_eq!(good(&lab, "systemctl is-system-running --wait"), "running\n");
    assert_eq!(
        good(&lab, "cat /proc/1/comm /proc/self/cgroup"),
        "systemd\n0::/system.slice/lab-agent.service\n"
    );
    good(&lab, "lab-vm start a --nodes 2 --vcpus 2 --memory 256M");
    assert_eq!(good(&lab, "systemctl is-active a.scope"), "active\n");
    assert_eq!(good(&lab, "cat /proc/$(cat /run/lab-vm/a/pid)/cgroup"), "0::/machine.slice/a.scope\n");
    assert_eq!(good(&lab, "cat /sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.effective"), "1-3\n");
    good(
        &lab,
        "lab-vm stop a; for i in $(seq 100); do test -e /sys/fs/cgroup/machine.slice/a.scope || exit 0; \
                sleep 0.1; done; exit 1",
    );
}
