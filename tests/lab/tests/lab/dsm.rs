//! The user-space DSM on real KVM, and between servers.

use crate::{Job, built, run};
use std::{path::PathBuf, thread, time::Duration};
use vnuma_lab_runner::{Lab, LabRun, Output, build_binaries};

const THERE: &str = "/usr/local/bin/dsm-run";

fn dsm_run() -> (PathBuf, String) {
    let mut built = build_binaries(&[("dsm-run", "dsm-run")]).expect("the program builds");
    (built.remove(0), THERE.to_owned())
}

/// Each node of the DSM runs some vCPUs of the guest, on the same pages: many, two and one.
#[test]
fn a_guest_of_kvm_spans_the_nodes_of_a_dsm() {
    let dsm_run = dsm_run();
    let job = |words: &[&str]| Job {
        // KVM loses its nested page tables on CPU 0 of an emulated server now and then.
        command: ["taskset", "--cpu-list", "1-3", "dsm-run"]
            .iter()
            .chain(words)
            .map(|word| (*word).to_owned())
            .collect(),
        files: vec![dsm_run.clone()],
        ..Job::default()
    };
    run(
        "2n4c",
        &[
            job(&["--nodes", "2", "--vcpus", "4", "--size", "500", "--stats", "guest"]),
            job(&["--nodes", "3", "--transport", "tcp-tls", "--size", "500", "guest"]),
            job(&["--nodes", "2", "--mode", "ivy", "--vcpus", "1", "--size", "500", "guest"]),
        ],
    );
}

/// Tests of a package: `lib`, or a file in `tests`.
fn tests_of(folder: &str, package: &str, which: &str) -> PathBuf {
    let name = format!("{folder}.{which}").replace('/', ".");
    let select = if which == "lib" { &["--lib"][..] } else { &["--test", which] };
    built(&name, &[&["test", "--no-run", "--package", package], select].concat())
}

/// Runs a shell's commands on a server, with these files.
fn shell(lab: &Lab, puts: &[(PathBuf, String)], script: &str) -> String {
    let run = LabRun {
        puts: puts.to_vec(),
        command: ["sh", "-ec", script].map(str::to_owned).to_vec(),
        timeout: Duration::from_secs(600),
        capture: true,
        ..LabRun::default()
    };
    let Output { status, stdout, stderr } = run.run_in(lab).expect("the lab runs it");
    let [told, errors] = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert_eq!(status, 0, "{script}\n{told}{errors}");
    println!("{script}\n{told}{errors}");
    told
}

/// Software RoCE on the card that the servers have in common.
const RDMA: &str = "modprobe -a rdma_rxe rds_rdma; rdma link add rxe0 type rxe netdev lab0; rdma link";
/// Packets that the RDMA device has sent.
const SENT: &str = "cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts";

/// Two servers with RDMA devices: each runs a node, and the pages go over those devices.
#[test]
#[ignore = "takes minutes: make soak"]
fn nodes_on_two_servers_share_memory_by_rdma() {
    let labs = Lab::boot_cluster(&["2n4c", "2n4c"]).expect("the lab boots");
    for lab in &labs {
        shell(lab, &[dsm_run()], RDMA);
    }
    for which in ["lib", "lanes"] {
        let test = [(tests_of("span/transport", "vnuma-dsm-transport", which), "/root/test".to_owned())];
        shell(&labs[0], &test, "VNUMA_RDMA_ADDRESS=10.77.0.1 /root/test --test-threads 1");
    }
    for program in ["lock-counter", "pagerank", "false-sharing", "--vcpus 1 --size 500 guest"] {
        let packets = |lab| shell(lab, &[], SENT).trim().parse::<u64>().expect("a number");
        let before = packets(&labs[0]);
        let told: Vec<String> = thread::scope(|scope| {
            let node = |(host, lab)| {
                let options = "--hosts 10.77.0.1,10.77.0.2 --transport rdma --json";
                let script = format!("taskset --cpu-list 1-3 dsm-run {options} --host {host} {program}");
                scope.spawn(move || shell(lab, &[], &script))
            };
            let nodes: Vec<_> = labs.iter().enumerate().map(node).collect();
            nodes.into_iter().map(|node| node.join().expect("it is right")).collect()
        });
        let sent = packets(&labs[0]) - before;
        let json: serde_json::Value = serde_json::from_str(&told[0]).expect("JSON");
        let [messages, bytes] =
            ["messages", "bytes"].map(|what| json["stats"][what].as_u64().expect("a number"));
        println!("{program}: {messages} messages of {bytes} bytes, in {sent} packets of the RDMA device");
        // Several messages may share a datagram, and each datagram is a packet, or more.
        assert!(messages > 10 && sent > messages / 8, "{sent} packets for {messages} messages");
    }
}

/// The server's kernel has all that the pager knows of, and Linux 6.12 all that it needs. 6.1 does not, which is said by name.
#[test]
#[ignore = "takes minutes: make soak"]
fn page_faults_are_served_on_each_kernel_or_refused_by_name() {
    let lab = Lab::boot("2n5c").expect("the lab boots");
    let of_pager = |which: &str| (tests_of("span/pager", "vnuma-dsm-pager", which), format!("/root/{which}"));
    let files = [dsm_run(), of_pager("lib"), of_pager("changes")];
    let tests = "--test-threads 1 --nocapture 2>&1";
    let told = shell(&lab, &files, &format!("uname -r; /root/lib {tests}; /root/changes {tests}"));
    assert!(told.starts_with("7.3") && !told.contains("skipped"), "{told}");
    let in_guest = |kernel: &str, script: &str| {
        let lines = [
            &format!("lab-vm start pages --kernel {kernel} --uma --vcpus 2"),
            "lab-vm put pages /root/changes /root/changes",
            &format!("lab-vm put pages {THERE} /root/dsm-run"),
            &format!("lab-vm exec pages -- sh -ec '{script}'"),
            "lab-vm stop pages",
        ];
        shell(&lab, &[], &lines.join("\n"))
    };
    let told = in_guest("6.12", &format!("uname -r; /root/changes {tests}; /root/dsm-run lock-counter 2>&1"));
    assert!(told.contains("6.12.") && told.contains(" on 2 nodes: right"), "{told}");
    assert!(!told.contains("skipped"), "{told}");
    let told = in_guest("6.1", "uname -r; ! /root/dsm-run lock-counter 2>&1");
    let refused = "the kernel lacks UFFDIO_CONTINUE_MODE_WP, which Linux has since 6.4";
    assert!(told.contains("6.1.") && told.contains(refused), "{told}");
}
