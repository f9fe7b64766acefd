//! Each program on two and three nodes, and what becomes of a run that loses a node.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
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

#[test]
fn every_program_is_right_on_two_and_three_nodes() {
    let programs = [("lock-counter", "30"), ("false-sharing", "300"), ("pagerank", "1000"), ("matrix", "24")];
    for (program, size) in programs {
        for transport in ["shm", "tcp"] {
            for nodes in ["2", "3"] {
                let arguments =
                    ["--nodes", nodes, "--transport", transport, "--size", size, "--stats", program];
                let Some(output) = outcome(&arguments) else { return };
                let (told, errors) = (text(&output.stdout), text(&output.stderr));
                assert!(output.status.success(), "{arguments:?}: {errors}");
                assert!(
                    told.contains(&format!(" on {nodes} nodes: right")) && told.contains("write faults: "),
                    "{told}"
                );
            }
        }
    }
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
            seen += &last;
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
        let (what, who) = match nodes {
            "2" => ("reaches no majority", "node 0"),
            _ => ("nodes [1] are lost", "node 2"),
        };
        assert!(seen.contains(what) && seen.contains(&format!("dsm-run: {who}: ")), "{seen}");
        assert!(seen.contains("node 1: signal: 9"), "{seen}");
        assert!(!told.contains("right"), "{told}");
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
    assert!(error(&["--size", "5000", "matrix"]).contains("--size 5000"));
    assert!(error(&["nothing"]).contains("lock-counter"));
}
