//! Each program on two and three nodes, and what becomes of a run that loses a node.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// Nothing here takes longer unless it hangs.
const HANG: Duration = Duration::from_secs(90);

fn dsm_run(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsm-run"));
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The outcome within the limit; none where userfaultfd is not permitted.
fn outcome(arguments: &[&str]) -> Option<Output> {
    let (sender, receiver) = mpsc::channel();
    let mut command = dsm_run(arguments);
    thread::spawn(move || sender.send(command.output()));
    let output = receiver.recv_timeout(HANG).expect("it hangs").expect("started");
    let errors = text(&output.stderr);
    if errors.contains("userfaultfd is not permitted") || errors.contains("the kernel lacks") {
        eprintln!("skipped: {errors}");
        return None;
    }
    Some(output)
}

/// Every program, small.
const PROGRAMS: [&[&str]; 12] = [
    &["--size", "30", "lock-counter"],
    &["--size", "300", "false-sharing"],
    &["--size", "1000", "pagerank"],
    &["--size", "24", "matrix"],
    &["--size", "100", "producer-consumer"],
    &["--size", "64", "word-count"],
    &["--size", "20000", "pi"],
    &["--size", "50", "metadata"],
    &["--size", "30", "--access", "read", "memory"],
    &["--size", "30", "--scope", "global", "--access", "write", "memory"],
    &["--size", "2", "--block", "4MiB", "memory"],
    &["--size", "1", "--block", "4MiB", "--scope", "global", "--access", "read", "memory"],
];

#[test]
fn every_program_is_right_on_any_number_of_nodes() {
    // Each program with two of the transports, each transport with all numbers of nodes.
    let transports = ["shm", "tcp", "tcp-tls"];
    for (index, program) in PROGRAMS.into_iter().enumerate() {
        for (transport, nodes) in [(index % 3, 2 + index % 2), ((index + 1) % 3, [1, 3, 4][index / 3 % 3])] {
            let nodes = nodes.to_string();
            let mut arguments = vec!["--nodes", &nodes, "--transport", transports[transport], "--stats"];
            arguments.extend(program);
            let Some(output) = outcome(&arguments) else { return };
            let (told, errors) = (text(&output.stdout), text(&output.stderr));
            assert!(output.status.success(), "{arguments:?}: {errors}");
            assert!(told.contains(&format!(" on {nodes} nodes: right")), "{arguments:?}: {told}");
            assert!(
                told.contains("guest ") && told.contains("DSM ") && told.contains("write faults: "),
                "{told}"
            );
        }
    }
}

/// As on a machine that forbids namespaces, and on one that has them.
#[test]
fn nodes_have_networks_of_their_own_where_that_is_permitted() {
    let run = |namespaces| {
        let arguments =
            ["--namespaces", namespaces, "--transport", "tcp", "--json", "--size", "10", "lock-counter"];
        outcome(&arguments)
    };
    let apart = |output: &Output| {
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        json["network_namespaces"].as_bool().expect("a flag")
    };
    let Some(never) = run("never") else { return };
    assert!(never.status.success() && !apart(&never), "{}", text(&never.stderr));
    let (Some(always), Some(auto)) = (run("always"), run("auto")) else { return };
    assert!(auto.status.success(), "{}", text(&auto.stderr));
    if always.status.success() {
        assert!(apart(&always) && apart(&auto));
    } else {
        let (refusal, note) = (text(&always.stderr), text(&auto.stderr));
        assert!(refusal.contains("--namespaces always: a network namespace cannot be made"), "{refusal}");
        assert!(!apart(&auto) && note.contains("the nodes share this machine's network"), "{note}");
    }
}

#[test]
fn the_report_says_where_time_and_faults_went() {
    let Some(output) = outcome(&["--json", "--nodes", "3", "--size", "200", "metadata"]) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or_else(|| panic!("{value} in {json}"));
    let time = &json["time"];
    let parts = ["guest_s", "dsm_s", "idle_s"].map(|part| number(&time[part]));
    assert!(parts.iter().all(|part| *part >= 0.0) && number(&time["dsm_s"]) > 0.0, "{time}");
    // Page 1 has all the locks. How often it changes nodes depends on who runs when.
    let hottest = json["hottest"].as_array().expect("a list");
    assert!(hottest.iter().any(|page| page["page"] == 1), "{hottest:?}");
    let falls = |two: &[serde_json::Value]| number(&two[0]["faults"]) >= number(&two[1]["faults"]);
    assert!(hottest.len() > 2 && hottest.windows(2).all(falls), "{hottest:?}");
    assert!(number(&hottest[2]["cumulative"]) > number(&hottest[0]["cumulative"]), "{hottest:?}");
    let found = &json["stats"]["found_by_writes"];
    assert!(
        number(&found["manager"]) + number(&found["hint"]) + number(&found["elsewhere"]) > 0.0,
        "{found}"
    );
    assert_eq!(
        (&json["program"], &json["transport"], &json["mode"]),
        (&"metadata".into(), &"shm".into(), &"default".into())
    );
}

#[test]
fn the_baseline_moves_more_bytes() {
    let bytes = |mode| {
        let output = outcome(&["--json", "--mode", mode, "--size", "300", "false-sharing"])?;
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let stats = &json["stats"];
        Some((stats["bytes"].as_u64().expect("bytes"), stats["messages"].as_u64().expect("messages")))
    };
    let (Some(ivy), Some(default)) = (bytes("ivy"), bytes("default")) else { return };
    // How often the page moves depends on the scheduler; what a message carries does not.
    assert!(default.0 / default.1 < ivy.0 / ivy.1, "bytes and messages: {default:?}, ivy: {ivy:?}");
}

#[test]
fn survivors_of_a_killed_node_say_so_and_end() {
    for nodes in ["2", "3"] {
        // It would run for hours.
        let arguments = ["--nodes", nodes, "--size", "1000000000", "lock-counter"];
        let mut run = dsm_run(&arguments).spawn().expect("started");
        let (sender, receiver) = mpsc::channel();
        let errors = run.stderr.take().expect("standard error");
        thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
        let mut seen = String::new();
        let mut last = String::new();
        while !last.contains("node 1 is process ") {
            last = receiver.recv_timeout(HANG).unwrap_or_else(|error| panic!("{error}: {seen}"));
            seen = seen + &last + "\n";
        }
        let process: i32 = last.rsplit(' ').next().and_then(|word| word.parse().ok()).expect("a process");
        // Long enough to be in the middle of it; it need not be.
        thread::sleep(Duration::from_millis(1500));
        let _ =
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(process), nix::sys::signal::Signal::SIGKILL);
        loop {
            match receiver.recv_timeout(HANG) {
                Ok(line) => seen = seen + &line + "\n",
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let _ = run.kill();
                    panic!("it hangs: {seen}");
                }
            }
        }
        assert!(!run.wait().expect("ended").success());
        let mut told = String::new();
        run.stdout.take().expect("standard output").read_to_string(&mut told).expect("text");
        if seen.contains("userfaultfd is not permitted") || seen.contains("the kernel lacks") {
            return eprintln!("skipped: {seen}");
        }
        let says = |who: &str, what: &str| {
            let from = format!("dsm-run: {who}: ");
            seen.lines().any(|line| line.starts_with(&from) && line.contains(what))
        };
        let no_majority = |who| says(who, "reaches no majority");
        let lost =
            |who| says(who, "nodes [1] are lost") || says(who, "its only copy was on a node that was lost");
        let said = match nodes {
            "2" => no_majority("node 0"),
            // The survivor that is done first may end before the other hears of the loss, which then finds no majority.
            _ => {
                lost("node 0") && (lost("node 2") || no_majority("node 2"))
                    || no_majority("node 0") && lost("node 2")
            }
        };
        assert!(said, "{seen}");
        assert!(seen.contains("node 1: signal: 9"), "{seen}");
        assert!(!told.contains("right"), "{told}");
    }
}

/// Only KVM on hardware that has it can run the guest; the lab's servers are such machines.
#[test]
fn a_guest_spans_the_nodes_where_there_is_kvm() {
    for (transport, nodes) in [("shm", "2"), ("tcp-tls", "3")] {
        let arguments = ["--nodes", nodes, "--transport", transport, "--json", "--size", "200", "guest"];
        let arguments = [&["--vcpus", "2"], &arguments[..]].concat();
        let Some(output) = outcome(&arguments) else { return };
        let errors = text(&output.stderr);
        let no_kvm = |line: &&str| line.contains("no flag vmx or svm") || line.contains("/dev/kvm: ");
        if let Some(why) = errors.lines().find(no_kvm).filter(|_| !output.status.success()) {
            return eprintln!("skipped: {why}");
        }
        assert!(output.status.success(), "{errors}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let faults = json["stats"]["writes"]["count"].as_u64().expect("a number");
        // The lock, the page of own words, and the registers go from node to node.
        assert!(faults > 10, "{json}");
        // All vCPUs move each 32 rounds, and each node looks at its log then.
        let nodes: u64 = nodes.parse().expect("a number");
        let seen = |what: &str| json["guest"][what].as_u64().expect("a number");
        assert_eq!(
            ["vcpus", "moves", "dirty_logs"].map(seen),
            [2 * nodes, 2 * nodes * 7, nodes * 7],
            "{json}"
        );
        assert!(seen("pins") >= 16 * nodes, "{json}");
    }
}

/// The result is compared with a sequential one by every node that is left.
#[test]
fn pagerank_goes_on_from_its_second_copies_when_a_node_is_killed() {
    for (transport, victim) in [("shm", 1), ("tcp", 0), ("tcp-tls", 2)] {
        let arguments = [
            "--nodes",
            "3",
            "--transport",
            transport,
            "--cut-ms",
            "1",
            "--size",
            "60000",
            "--json",
            "pagerank",
        ];
        let mut run = dsm_run(&arguments).spawn().expect("started");
        let (sender, receiver) = mpsc::channel();
        let errors = run.stderr.take().expect("standard error");
        thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
        let (mut seen, mut process) = (String::new(), None);
        loop {
            let line = match receiver.recv_timeout(HANG) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let _ = (run.kill(), run.wait());
                    panic!("it hangs: {seen}");
                }
            };
            if let Some(number) = line.strip_prefix(&format!("dsm-run: node {victim} is process ")) {
                process = number.parse::<i32>().ok();
            }
            if line.ends_with(&format!("node {victim}: cut 2 is complete")) {
                let process = nix::unistd::Pid::from_raw(process.expect("a process"));
                nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGKILL).expect("killed");
            }
            seen = seen + &line + "\n";
        }
        let success = run.wait().expect("ended").success();
        if seen.contains("userfaultfd is not permitted") || seen.contains("the kernel lacks") {
            return eprintln!("skipped: {seen}");
        }
        assert!(success, "{transport}: {seen}");
        let mut told = String::new();
        run.stdout.take().expect("standard output").read_to_string(&mut told).expect("text");
        let json: serde_json::Value = serde_json::from_str(&told).expect("JSON");
        assert_eq!(json["lost_nodes"], serde_json::json!([victim]), "{seen}");
        assert!(json["resumed_from"].as_u64().is_some_and(|cut| cut >= 1), "{told} {seen}");
    }
}

/// A node of two, each of which knows the other as on another host, with an address of its own for each test.
fn node_of_two(test: u8, host: u8, further: &[&str]) -> Child {
    node_that_runs(test, host, &[further, &["--size", "20", "lock-counter"]].concat())
}

fn node_that_runs(test: u8, host: u8, what: &[&str]) -> Child {
    let hosts = format!("127.83.{test}.1,127.83.{test}.2");
    let host = host.to_string();
    dsm_run(&[&["--hosts", &hosts, "--host", &host], what].concat()).spawn().expect("started")
}

/// What nodes say until one of them says one of these words; none if they never do. They are ended.
fn say_one_of(mut nodes: [Child; 2], words: &[&str]) -> (bool, String) {
    let (sender, lines) = mpsc::channel();
    for node in &mut nodes {
        let (errors, sender) = (node.stderr.take().expect("standard error"), sender.clone());
        thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
    }
    drop(sender);
    let mut said = String::new();
    let found = loop {
        let Ok(line) = lines.recv_timeout(HANG) else { break false };
        said = said + &line + "\n";
        if words.iter().any(|word| line.contains(word)) {
            break true;
        }
    };
    nodes.iter_mut().for_each(|node| drop((node.kill(), node.wait())));
    (found, said)
}

/// What a node has said, if it has ended by itself.
fn ended(mut node: Child) -> (bool, String) {
    let begin = Instant::now();
    while node.try_wait().expect("a child").is_none() {
        if begin.elapsed() > HANG {
            let _ = (node.kill(), node.wait());
            panic!("it hangs");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let output = node.wait_with_output().expect("output");
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

fn keys_in(directory: &std::path::Path) -> String {
    let directory = directory.join("keys").display().to_string();
    let output = outcome(&["--nodes", "2", "--make-keys", &directory]).expect("no memory is needed");
    assert!(output.status.success(), "{}", text(&output.stderr));
    directory
}

fn is_skipped(said: &str) -> bool {
    said.contains("userfaultfd is not permitted") || said.contains("the kernel lacks")
}

#[test]
fn nodes_on_several_hosts_use_tls() {
    let directory = tempfile::tempdir().expect("a directory");
    let keys = keys_in(directory.path());
    let node = |host| node_of_two(1, host, &["--keys", &keys, "--json"]);
    for (success, said) in [node(0), node(1)].map(ended) {
        if is_skipped(&said) {
            return eprintln!("skipped: {said}");
        }
        assert!(success && said.contains("\"transport\": \"tcp-tls\""), "{said}");
    }
    // Somebody else's key.
    let key = directory.path().join("keys/node-1.key.der");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o640)).expect("changed");
    let (success, said) = ended(node(1));
    assert!(!success && said.contains("node-1.key.der: mode 640: others may use it"), "{said}");
}

/// Keys of another authority, and none at all.
#[test]
fn a_stranger_on_another_host_is_refused() {
    let ours = tempfile::tempdir().expect("a directory");
    let theirs = tempfile::tempdir().expect("a directory");
    let (keys, others) = (keys_in(ours.path()), keys_in(theirs.path()));
    for (test, stranger) in [(2, &["--keys", &others][..]), (3, &["--transport", "tcp"])] {
        let nodes = [node_of_two(test, 0, &["--keys", &keys]), node_of_two(test, 1, stranger)];
        // What TLS says of another authority, or of bytes that are not TLS.
        let words = ["invalid peer certificate", "DecryptError", "InvalidContentType"];
        let (refused, said) = say_one_of(nodes, &words);
        if is_skipped(&said) {
            return eprintln!("skipped: {said}");
        }
        assert!(refused, "{stranger:?}: {said}");
    }
}

/// They would wait for each other, or send what the other does not expect.
#[test]
fn hosts_whose_options_differ_refuse_each_other() {
    let tcp = ["--transport", "tcp"];
    let ours = ["--size", "20", "lock-counter"];
    let cases: [(u8, &[&str], &str); 4] = [
        (4, &["--mode", "ivy", "--size", "20", "lock-counter"], "hello.switches: the peer has 0x"),
        (5, &["--without", "direct-acks", "--size", "20", "lock-counter"], "hello.switches: the peer has 0x"),
        (6, &["--size", "21", "lock-counter"], "hello.cluster: the peer has 0x"),
        (7, &["--size", "20", "metadata"], "hello.cluster: the peer has 0x"),
    ];
    for (test, theirs, text) in cases {
        let node = |host, what: &[&str]| node_that_runs(test, host, &[&tcp, what].concat());
        let (refused, said) = say_one_of([node(0, &ours), node(1, theirs)], &[text]);
        if is_skipped(&said) {
            return eprintln!("skipped: {said}");
        }
        assert!(refused, "{theirs:?}: {said}");
    }
}

#[test]
fn errors_name_the_option() {
    let error = |arguments: &[&str]| {
        let output = outcome(arguments).expect("no memory is needed");
        assert!(!output.status.success());
        text(&output.stderr)
    };
    assert!(error(&["--nodes", "99", "matrix"]).contains("'--nodes <N>'"));
    assert!(error(&["--mode", "ivy", "--without", "deltas", "matrix"]).contains("--without: --mode ivy"));
    assert!(error(&["--size", "5000", "matrix"]).contains("--size 5000: 1 to 391 rows"));
    assert!(error(&["--size", "18446744073709551615", "pi"]).contains("not in 0..=1000000000000"));
    assert!(error(&["--size", "0", "word-count"]).contains("--size 0: 1 to 4088 KiB"));
    assert!(
        error(&["--block", "4MiB", "pi"])
            .contains("--block, --scope, --access: only with the program memory")
    );
    assert!(error(&["--vcpus", "2", "pi"]).contains("--vcpus: only with the program guest"));
    assert!(error(&["--transport", "rdma", "pi"]).contains("--transport rdma: only with --hosts"));
    let hosts = ["--hosts", "192.0.2.1,192.0.2.2", "--host"];
    let among = |rest: &[&str]| error(&[&hosts, rest].concat());
    assert!(among(&["2", "--transport", "tcp", "pi"]).contains("--host 2: --hosts has 2 addresses"));
    assert!(among(&["0", "--transport", "shm", "pi"]).contains("--transport shm: not with --hosts"));
    assert!(among(&["0", "pi"]).contains("--hosts: --keys DIR is needed"));
    assert!(among(&["0", "--transport", "tcp", "--keys", ".", "pi"]).contains("--keys: only with"));
    assert!(error(&["--keys", ".", "pi"]).contains("--hosts"));
    let none = among(&["0", "--keys", "/nowhere", "pi"]);
    assert!(none.contains("/nowhere/node-0.key.der: No such file"), "{none}");
    assert!(error(&["--make-keys", "/"]).contains("/: File exists"));
    assert!(error(&[]).contains("<PROGRAM>"));
    assert!(among(&["0", "--nodes", "2", "pi"]).contains("--nodes"));
    assert!(error(&["nothing"]).contains("lock-counter"));
}
