//! What the lab reads.

use std::path::Path;
use vnuma_abi_lab_counters::{Header, MAX_CLASSES, MAX_CPUS, MAX_NODES, MAX_RANGES};
use vnuma_lab_agent::protocol::{Frame, MAX_DATA, ProtocolError};
use vnuma_lab_counters::{Machine, Sampling, region};
use vnuma_lab_pricing::CounterProfile;
use vnuma_lab_runner::{Profile, Recipe};

/// Frames of a connection: each that was read is written as it came.
pub fn protocol(input: &[u8]) {
    let mut rest = input;
    loop {
        match Frame::read(&mut rest) {
            Ok(Some(frame)) => {
                if let Frame::Stdin(bytes) | Frame::Stdout(bytes) | Frame::Stderr(bytes) = &frame {
                    assert!(bytes.len() <= MAX_DATA);
                }
                let mut wire = Vec::new();
                match frame.write(&mut wire) {
                    Ok(()) => {
                        let read = Frame::read(&mut &wire[..]).expect("what was written can be read");
                        assert_eq!(read, Some(frame));
                    }
                    // Escapes, and U+FFFD in place of what is no UTF-8, make it longer than it came.
                    Err(error) => assert!(matches!(error, ProtocolError::TooLong { .. }), "{error}"),
                }
            }
            Ok(None) => break assert!(rest.is_empty()),
            Err(error) => break assert!(!error.to_string().is_empty()),
        }
    }
}

/// A server's profile: what was accepted can be started.
pub fn profile(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Profile::parse(&text, Path::new("p.toml")) {
        Ok(profile) => {
            let nodes = profile.nodes;
            assert!((1..=16).contains(&nodes) && (1..=64).contains(&profile.cpus()), "{profile:?}");
            assert!(profile.memory_mib() >= 256 * nodes, "{profile:?}");
            assert!(profile.distances.len() == nodes, "{profile:?}");
            for (from, row) in profile.distances.iter().enumerate() {
                assert!(row.len() == nodes && row[from] == 10, "{profile:?}");
                assert!(row.iter().filter(|&&distance| distance == 10).count() == 1, "{profile:?}");
            }
            assert!(profile.devices.iter().all(|device| device.node < nodes), "{profile:?}");
        }
        Err(error) => assert!(error.to_string().starts_with("p.toml: "), "{error}"),
    }
}

/// The recipe: its packages become words of a command line.
pub fn recipe(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Recipe::parse(&text, "r.toml") {
        Ok(recipe) => {
            for package in recipe.all_packages() {
                let plain = |c: char| c.is_ascii_alphanumeric() || "+-./".contains(c);
                assert!(!package.is_empty() && package.chars().all(plain), "{package:?}");
                assert!(!package.starts_with('-'), "{package:?}");
            }
        }
        Err(error) => assert!(error.to_string().starts_with("r.toml: "), "{error}"),
    }
}

/// A machine of counters: prices that rise with the distance, and a region that its readers accept.
pub fn counter_profile(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let profile = match CounterProfile::parse("p", &text) {
        Ok(profile) => profile,
        Err(error) => return assert!(error.to_string().starts_with("counter profile p: "), "{error}"),
    };
    let (shape, prices) = (profile.shape(), profile.prices());
    let classes = shape.nr_classes();
    assert!((1..=MAX_CLASSES).contains(&classes), "{profile:?}");
    for costs in [&prices.dram[..classes], &prices.streamed[..classes]] {
        assert!(costs.windows(2).all(|pair| pair[0] <= pair[1]) && costs[0] > 0, "{profile:?} {costs:?}");
    }
    let far = shape.distances[classes - 1].max(11);
    let distances = [vec![10, far], vec![far, 10]];
    let machine =
        Machine { profile: "m", nodes: 2, cpus_per_node: 2, memory_mib_per_node: 512, distances: &distances };
    match region(&profile, None, &machine, Sampling::Sampled) {
        Ok(region) => {
            let header = Header::from_bytes(&region).expect("a header that its readers accept");
            assert_eq!(header.nr_classes as usize, classes);
        }
        Err(error) => assert!(classes == 1, "{error}"),
    }
}

/// The header of a region of counters: within its limits, and written as it was read.
pub fn counter_page(input: &[u8]) {
    let Ok(header) = Header::from_bytes(input) else { return };
    assert!(header.nr_cpus as usize <= MAX_CPUS && header.nr_nodes as usize <= MAX_NODES);
    assert!(header.nr_classes as usize <= MAX_CLASSES && header.nr_ranges as usize <= MAX_RANGES);
    let bytes = header.to_bytes();
    assert_eq!(bytes, input[..bytes.len()]);
    assert!(!header.profile_name().contains('\0'));
}
