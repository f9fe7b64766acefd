//! What the agent of a guest reads: files of processes and of the kernel, its operator's rules, an earlier agent's journal.

use crate::{expect_clear, expect_line};
use std::path::Path;
use vnuma_guest::{
    journal,
    observe::{interrupts, maps},
    rules::{Choice, Rules},
};

/// Lines of `maps`, `numa_maps` and `/proc/interrupts`, each taken for each of them.
pub fn lines(input: &[u8]) {
    let rules = Rules::default();
    for line in input.split(|byte| *byte == b'\n') {
        if let Some(name) = maps::code_of(line) {
            assert!(!name.contains('/') && line.contains(&b'x'), "{name:?}");
            assert!(!rules.libraries.has(name) || name.contains(".so"), "{name:?}");
        }
        if let Some((start, end)) = maps::range(line) {
            assert!(start < end, "{start:#x} {end:#x}");
        }
        if let Some(mapping) = maps::movable(line) {
            assert!(
                !mapping.pages.is_empty() && mapping.pages.keys().all(|node| *node <= 1023),
                "{mapping:?}"
            );
        }
        if let Some((irq, name)) = interrupts::handler(line) {
            expect_clear(&format!("{irq} {name}"));
            assert!(!name.is_empty());
        }
    }
}

/// What was accepted is in its range; a refusal names the file and a line that it has.
pub fn rules(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Rules::parse(Path::new("/etc/x.toml"), &text) {
        Ok(rules) => {
            assert!((1..=3600).contains(&rules.interval.as_secs()), "{rules:?}");
            let limits = rules.limits;
            assert!(limits.place_after >= 2 && limits.release_after >= 1, "{limits:?}");
            assert!(limits.cpu_reserve_percent <= 90 && limits.memory_reserve_percent <= 90, "{limits:?}");
            for workload in &rules.workloads {
                assert!(workload.program.is_some() || workload.cgroup.is_some(), "{workload:?}");
                let plain = |name: &String| !name.is_empty() && !name.contains(char::is_control);
                assert!(workload.program.iter().chain(&workload.cgroup).all(plain), "{workload:?}");
                assert!(!matches!(&workload.choice, Choice::Node(node) if *node > 1023), "{workload:?}");
            }
            for file in ["libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0x"] {
                assert!(!rules.libraries.has(file) || text.contains("libraries"), "{file}");
            }
        }
        Err(error) => expect_line(&error.to_string(), &text),
    }
}

/// A journal is understood, or refused with a clear reason. What is understood is written as it was read.
pub fn changes(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match journal::parse(&text, "b") {
        Ok(changes) => {
            let json = serde_json::to_string(&changes).expect("JSON");
            let again = format!("{{\"version\":1,\"boot\":\"b\",\"changes\":{json}}}");
            assert_eq!(journal::parse(&again, "b"), Ok(changes));
        }
        Err(reason) => expect_clear(&reason),
    }
}
