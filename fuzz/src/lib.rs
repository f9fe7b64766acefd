//! Fuzz targets: a function for each parser of what others wrote, that panics when the parser breaks its promise.
//!
//! A target does more than not crash. What was accepted is within its bounds and, where it can be printed, reads
//! back as the same; what was refused is refused with a message that a terminal can show. `cargo xtask fuzz` feeds the
//! targets with coverage guidance, `tests/corpora.rs` feeds them what is in `corpus/`, as part of `make test`.
//!
//! | input from | targets |
//! |---|---|
//! | a QEMU | `qmp`, `hmp`, and names of VMs in `sysfs-value` |
//! | libvirt | `libvirt` |
//! | the host's kernel, or a copy of its files | `sysfs`, `sysfs-value`, `cpu-list`, `proc`, `bpf-record`, `uevent` |
//! | a guest | `channel-status`; `channel-*` for the reader as a model; the driver's own is `guest/driver/test/channel-fuzz.c` |
//! | local users | `api`, `arguments` |
//! | vnumad, as vnumactl and a guest see it | `answer`, `channel-*`, `ivshmem` |
//! | programs of a guest, its kernel and its operator, as its agent sees them | `guest-lines`, `guest-rules`, `guest-journal` |
//! | another host of a distributed shared memory | `dsm-wire`, `dsm-node` |
//! | the operator's files, and those of an earlier vnumad | `config`, `record`, `reservations` |
//! | files and machines of the lab | `lab-*`, `counter-*` |

mod api;
mod bytes;
mod channel;
mod dsm;
mod guest;
mod lab;
mod libvirt;
mod operator;
mod qmp;
mod sysfs;
mod takeover;
mod text;

use std::{path::PathBuf, sync::OnceLock};

/// A parser and what it promises.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// What is fed.
    pub about: &'static str,
    /// Feeds an input; panics when a promise is broken.
    pub run: fn(&[u8]),
}

/// All of them, in the order in which they are run.
pub const TARGETS: [Target; 31] = [
    target("answer", "vnumad's answers as vnumactl reads and prints them", operator::answer),
    target("api", "requests to vnumad", api::run),
    target("arguments", "vnumactl's command line", operator::arguments),
    target("bpf-record", "records of the BPF program", bytes::bpf_record),
    target("channel-content", "topologies that are to be published", channel::content),
    target("channel-race", "a writer that goes on while a guest reads", channel::race),
    target("channel-reader", "a region that somebody scribbled over", channel::reader),
    target("channel-status", "what a guest says of itself in its channel", channel::status),
    target("config", "vnumad's configuration", operator::config),
    target("counter-page", "the header of the lab's counters", lab::counter_page),
    target("counter-profile", "machines of lab/pricing/profiles", lab::counter_profile),
    target("cpu-list", "the kernel's lists of CPUs", text::cpu_list),
    target("dsm-node", "what members of a distributed shared memory say to one of them", dsm::node),
    target("dsm-wire", "frames of another host of a distributed shared memory", dsm::wire),
    target("guest-journal", "what an earlier agent of a guest left", guest::changes),
    target("guest-lines", "lines of /proc that the agent of a guest reads", guest::lines),
    target("guest-rules", "the rules of the agent of a guest", guest::rules),
    target("hmp", "info numa and info ramblock of QEMU's human monitor", text::hmp),
    target("ivshmem", "messages of an ivshmem server", bytes::ivshmem),
    target("lab-profile", "servers of lab/profiles", lab::profile),
    target("lab-protocol", "frames between the lab's agent and its clients", lab::protocol),
    target("lab-recipe", "the recipe of the lab's image", lab::recipe),
    target("libvirt", "domains of libvirt, and the mappings of their QEMUs", libvirt::run),
    target("pci-ids", "names of PCI devices", text::pci_ids),
    target("proc", "files of /proc/PID", text::proc),
    target("qmp", "a whole conversation with a QEMU", qmp::run),
    target("record", "what an earlier vnumad left, and taking its channel over", takeover::record),
    target("reservations", "the file of reservations", takeover::reservations),
    target("sysfs", "trees of sysfs and procfs", sysfs::run),
    target("sysfs-value", "single values of sysfs, names of VMs", text::sysfs_value),
    target("uevent", "the kernel's messages about devices", bytes::uevent),
];

const fn target(name: &'static str, about: &'static str, run: fn(&[u8])) -> Target {
    Target { name, about, run }
}

/// The target of a name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// The committed inputs, a folder for each target.
pub fn corpora() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// Longest message of a refusal: it may quote a shortened piece of the input, not all of it.
const MESSAGE_LIMIT: usize = 2000;

/// Can an operator read this refusal, and does it leave the terminal alone?
#[track_caller]
fn expect_clear(message: &str) {
    assert!(!message.trim().is_empty(), "a refusal without a reason");
    assert!(message.len() <= MESSAGE_LIMIT, "{} bytes: {message}", message.len());
    expect_plain(message);
}

/// Does this refusal name the file, `/etc/x.toml`, and one of the lines of its text?
#[track_caller]
fn expect_line(message: &str, text: &str) {
    expect_clear(message);
    let rest = message.strip_prefix("/etc/x.toml: line ").unwrap_or_else(|| panic!("{message}"));
    let line: usize = rest.split(':').next().and_then(|n| n.parse().ok()).expect("a line");
    assert!((1..=text.split('\n').count()).contains(&line), "{message}");
}

/// A thread that stands for a vCPU's.
fn start_vcpu() -> i32 {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tell.send(nix::unistd::gettid().as_raw()).expect("somebody listens");
        loop {
            std::thread::park();
        }
    });
    told.recv().expect("it started")
}

/// No line breaks, no escape sequences.
#[track_caller]
fn expect_plain(text: &str) {
    assert!(!text.contains(char::is_control), "{text:?}");
}

/// A directory that lasts as long as the process, for files that targets write again and again; in memory if there is such
/// a file system.
fn scratch() -> &'static std::path::Path {
    static SCRATCH: OnceLock<tempfile::TempDir> = OnceLock::new();
    let make = || {
        let memory = std::path::Path::new("/dev/shm");
        if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }
    };
    SCRATCH.get_or_init(|| make().expect("a directory for the targets' files")).path()
}
