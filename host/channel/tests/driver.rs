//! The writer of this crate against the reader of the guest driver, `guest/driver/channel.c`, built for user space: what
//! one publishes the other reads, whenever the writer dies, and what one answers the other reads.

use std::{
    io::{BufRead, BufReader, Write},
    os::fd::{AsFd, AsRawFd},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};
use vnuma_abi_topology_channel::{Device, MAX_DEVICES, MAX_NODES, MAX_VCPUS, SECTION_REQUIRED, Vcpu};
use vnuma_channel::{
    Channel, Content, Generations, GuestStatus, Plug, Region,
    layout::{publication, publication_of, section, sections},
};
use vnuma_channel_model::{GuestEnd, SUPPORTED};
use vnuma_model::DistanceMatrix;

/// `channel-read` on a region.
struct Driver {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _directory: tempfile::TempDir,
}

impl Driver {
    fn start(memory: impl AsFd) -> Self {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/driver");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let program = directory.path().join("channel-read");
        let include = |folder: &str| format!("-I{}", sources.join(folder).display());
        let compiled = Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"])
            .args(
                ["test/shim", ".", "../../abi/topology-channel/include", "../../abi/guest-device/include"]
                    .map(include),
            )
            .arg("-o")
            .args([&program, &sources.join("test/channel-read.c")])
            .status()
            .expect("a C compiler `cc` (package gcc) is needed for this test");
        assert!(compiled.success(), "channel-read.c does not compile");
        let memory = format!("/proc/{}/fd/{}", std::process::id(), memory.as_fd().as_raw_fd());
        let mut command = Command::new(&program);
        let mut child =
            command.arg(memory).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output, _directory: directory }
    }

    fn execute(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").expect("it runs");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("an answer");
        answer.trim_end().to_owned()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn content(seed: u32, nodes: usize, vcpus: usize) -> Content {
    let distance = |from, to| if from == to { 10 } else { 11 + (seed % 200) as u8 };
    let rows = (0..nodes).map(|from| (0..nodes).map(|to| distance(from, to)).collect()).collect();
    let vcpu = |id: u32| Vcpu { apic_id: id * 1000 + seed, node: (id + seed) % nodes as u32 };
    let device = |index: usize| Device {
        segment: seed as u16,
        bus: (index >> 5) as u8,
        devfn: index as u8,
        node: (index % nodes) as u32,
    };
    let devices = (vcpus * seed as usize).min(MAX_DEVICES);
    Content::new(DistanceMatrix::new(rows).expect("square"), (0..vcpus as u32).map(vcpu).collect())
        .and_then(|content| content.with_devices((0..devices).map(device).collect()))
        .expect("within limits")
}

/// As `channel-read` prints it.
fn printed(generation: u64, content: &Content) -> String {
    let distances: Vec<_> = content.distances().rows().iter().flatten().map(ToString::to_string).collect();
    let vcpus: Vec<_> =
        content.vcpus().iter().map(|vcpu| format!("{}:{}", vcpu.apic_id, vcpu.node)).collect();
    let device = |device: &Device| {
        let Device { segment, bus, devfn, node } = device;
        format!("{segment:04x}{bus:02x}{devfn:02x}:{node}")
    };
    let devices: Vec<_> = content.devices().iter().map(device).collect();
    format!("topology {generation} {} {} {}", distances.join(","), vcpus.join(","), devices.join(","))
}

/// `-ENODATA`.
const NOTHING: &str = "error -61 ";

#[test]
fn the_driver_reads_what_is_published() {
    let mut region = Region::new().expect("a region");
    let mut driver = Driver::start(region.memory());
    assert_eq!(driver.execute("read"), NOTHING.trim_end());
    let mut generations = Generations::new(99);
    for (seed, nodes, vcpus) in [(1, 1, 1), (2, MAX_NODES, MAX_VCPUS), (3, 3, 8), (4, 2, 3)] {
        let (generation, content) = (generations.take(), content(seed, nodes, vcpus));
        region.apply_all(&publication(generation, &content));
        assert_eq!(driver.execute("read"), printed(generation, &content));
    }
}

#[test]
fn a_writer_killed_after_any_store_leaves_the_driver_the_old_or_the_new() {
    let mut region = Region::new().expect("a region");
    let mut driver = Driver::start(region.memory());
    let mut generations = Generations::new(99);
    let mut last = NOTHING.trim_end().to_owned();
    // The third publication writes over a slot that holds the first.
    for seed in 1..=4 {
        let (generation, content) = (generations.take(), content(seed, 3, 5));
        let steps = publication(generation, &content);
        let new = printed(generation, &content);
        for (done, step) in steps.iter().enumerate() {
            region.apply(step);
            let allowed = if done + 1 == steps.len() { &new } else { &last };
            assert_eq!(&driver.execute("read"), allowed, "publication {seed}, after step {done}");
        }
        last = new;
    }
}

#[test]
fn the_driver_skips_a_section_of_a_later_version() {
    let mut region = Region::new().expect("a region");
    let mut driver = Driver::start(region.memory());
    let content = content(1, 2, 3);
    let mut all = sections(&content);
    all.insert(1, section(0x7001, 1, 1, 0, &[1, 2, 3]));
    region.apply_all(&publication_of(1, &all));
    assert_eq!(driver.execute("read"), printed(1, &content));
    all[1] = section(0x7001, 1, 1, SECTION_REQUIRED, &[1, 2, 3]);
    region.apply_all(&publication_of(2, &all));
    let refusal = driver.execute("read");
    assert!(refusal.starts_with("error -93 section of kind 28673, version 1"), "{refusal}");
}

#[test]
fn the_driver_reads_a_host_that_does_not_know_devices() {
    let mut region = Region::new().expect("a region");
    let mut driver = Driver::start(region.memory());
    let content = content(1, 2, 3);
    let without = &sections(&content)[..2];
    region.apply_all(&publication_of(1, without));
    let none = content.clone().with_devices(Vec::new()).expect("none");
    assert_eq!(driver.execute("read"), printed(1, &none).trim_end());
}

#[test]
fn the_host_reads_the_drivers_answers() {
    let (mut channel, Plug::Ivshmem(socket)) = Channel::create(5).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    let mut driver = Driver::start(&guest.memory);
    driver.execute("announce 1");
    assert_eq!(
        channel.guest_status(),
        GuestStatus::default(),
        "nothing is written before the header is read"
    );
    let generation = channel.publish(&content(1, 2, 3)).expect("published");
    assert!(driver.execute("read").starts_with("topology "));
    driver.execute("announce 2");
    let status = channel.guest_status();
    assert_eq!((status.driver.safe_mode, status.acknowledged), (Some(true), 0));
    assert_eq!(status.supported, SUPPORTED);
    driver.execute("devices 7");
    assert_eq!(channel.guest_status().driver.device_changes, 7);
    let version = status.driver.version.expect("announced").map(|part| part.to_string());
    assert_eq!(version.join("."), env!("CARGO_PKG_VERSION"));
    driver.execute("acknowledge");
    assert_eq!(channel.take_acknowledgement().expect("taken"), Some(generation));
    let generation = channel.publish(&content(2, 2, 3)).expect("published");
    driver.execute("read");
    driver.execute("refuse -95");
    assert_eq!(channel.take_acknowledgement().expect("taken"), None);
    assert_eq!(channel.guest_status().driver.refused, Some((generation, 95)));
    driver.execute("leave");
    assert_eq!(channel.guest_status(), GuestStatus::default());
}
