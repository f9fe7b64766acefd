//! What a host has of what vnuma needs, or can use.

use crate::confinement::is_denied;
use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};
use vnuma_process::apparmor;

/// No file that is read here is longer; `/proc/cpuinfo` is read up to the first CPU's flags.
const LIMIT: u64 = 64 << 10;
/// vnumad's unit.
pub const UNIT: &str = "vnumad.service";
/// Where QEMUs put their sockets for vnumad.
pub const SOCKETS: &str = "/run/vnuma/qmp";
/// Of libvirtd, and of the daemon for QEMU alone.
const LIBVIRT_SOCKETS: [&str; 2] = ["run/libvirt/libvirt-sock", "run/libvirt/virtqemud-sock"];
/// vnumad's configuration, and its line for connections to libvirt as the package has it.
const CONFIGURATION: &str = "etc/vnuma/vnumad.toml";
pub const UNUSED_LIBVIRT: &str = "#uris = []";
/// What profiles for libvirt's QEMUs include.
const ABSTRACTION: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
const DROP_INS: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d";
const OPERATORS: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";
/// Files of that directory that are looked at.
const MOST_DROP_INS: usize = 256;
/// Nodes that are looked at.
const MOST_NODES: usize = 1024;

/// The kernel's count of a node's huge pages.
pub fn huge_pages_path(node: u32) -> String {
    format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
}

/// Huge pages of 2 MiB that a node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugePages {
    pub node: u32,
    pub total: u64,
}

/// vnumad's unit, as systemd shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    pub loaded: String,
    pub enabled: String,
    pub active: String,
}

/// What AppArmor's profiles for domains of libvirt have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// They include what is in a directory, not only the operator's file.
    pub drop_ins: bool,
    /// A rule for vnumad's sockets.
    pub rule: bool,
    /// Profiles of domains that run, which were made without it.
    pub without: Vec<String>,
}

/// All that is looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// `svm` or `vmx`, if the CPU has one of these flags.
    pub virtualization: Option<&'static str>,
    /// `/dev/kvm` is there.
    pub kvm: bool,
    /// Controllers of control groups of version 2; none if that is not mounted.
    pub controllers: Option<Vec<String>>,
    /// The kernel describes its types, as BPF programs want it.
    pub btf: bool,
    /// Where BPF maps are pinned.
    pub bpf_file_system: bool,
    /// Where KVM shows its vCPUs.
    pub debug_file_system: bool,
    /// `kernel.yama.ptrace_scope`.
    pub ptrace_scope: Option<u64>,
    /// `kernel.perf_event_paranoid`.
    pub perf_event_paranoid: Option<i64>,
    /// The kernel shows a PMU of the CPU.
    pub pmu: bool,
    /// The kernel has sched_ext.
    pub sched_ext: bool,
    /// The scheduler that is loaded.
    pub scheduler: Option<String>,
    /// `kernel.numa_balancing`.
    pub numa_balancing: Option<u64>,
    /// Huge pages, by node.
    pub huge_pages: Vec<HugePages>,
    /// The directory of QMP sockets is there.
    pub sockets: bool,
    /// A libvirt for QEMU is here: whether vnumad's configuration names a connection.
    pub libvirt: Option<bool>,
    /// That configuration has the line of the package that names none.
    pub libvirt_line: bool,
    /// AppArmor confines domains of libvirt, and may ask for connections to sockets.
    pub confinement: Option<Confinement>,
    /// systemd runs.
    pub systemd: bool,
    /// What it says of vnumad, if it says something.
    pub unit: Option<Unit>,
}

/// The beginning of a file.
fn read(root: &Path, path: &str) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(root.join(path))?.take(LIMIT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn number<T: std::str::FromStr>(root: &Path, path: &str) -> Option<T> {
    read(root, path).ok()?.trim().parse().ok()
}

fn virtualization(root: &Path) -> Option<&'static str> {
    let text = read(root, "proc/cpuinfo").ok()?;
    let flags = text.lines().find(|line| line.starts_with("flags"))?;
    ["svm", "vmx"].into_iter().find(|flag| flags.split_whitespace().any(|word| word == *flag))
}

fn huge_pages(root: &Path) -> Vec<HugePages> {
    let entries = fs::read_dir(root.join("sys/devices/system/node")).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok());
    let mut nodes: Vec<u32> = numbers.take(MOST_NODES).collect();
    nodes.sort_unstable();
    let of = |node: u32| {
        let total = number(root, huge_pages_path(node).trim_start_matches('/'))?;
        Some(HugePages { node, total })
    };
    nodes.into_iter().filter_map(of).collect()
}

/// The lines that `systemctl show` prints.
fn unit(text: &str) -> Unit {
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.unwrap_or_default().to_owned()
    };
    Unit { loaded: value("LoadState"), enabled: value("UnitFileState"), active: value("ActiveState") }
}

impl Facts {
    /// Looks at everything. `run` runs a program and returns what it prints.
    pub fn read(root: &Path, run: &dyn Fn(&[&str]) -> io::Result<String>) -> Self {
        let there = |path: &str| root.join(path).exists();
        let systemd = there("run/systemd/system");
        let properties = "--property=LoadState,UnitFileState,ActiveState";
        let shown = systemd.then(|| run(&["systemctl", "show", properties, UNIT]));
        let controllers = read(root, "sys/fs/cgroup/cgroup.controllers").ok();
        Self {
            virtualization: virtualization(root),
            kvm: there("dev/kvm"),
            controllers: controllers.map(|text| text.split_whitespace().map(str::to_owned).collect()),
            btf: there("sys/kernel/btf/vmlinux"),
            bpf_file_system: mounted(root, "/sys/fs/bpf", "bpf"),
            debug_file_system: mounted(root, "/sys/kernel/debug", "debugfs"),
            ptrace_scope: number(root, "proc/sys/kernel/yama/ptrace_scope"),
            perf_event_paranoid: number(root, "proc/sys/kernel/perf_event_paranoid"),
            pmu: ["cpu", "cpu_core"].iter().any(|pmu| there(&format!("sys/bus/event_source/devices/{pmu}"))),
            sched_ext: there("sys/kernel/sched_ext"),
            scheduler: read(root, "sys/kernel/sched_ext/root/ops").ok().map(|name| name.trim().to_owned()),
            numa_balancing: number(root, "proc/sys/kernel/numa_balancing"),
            huge_pages: huge_pages(root),
            sockets: root.join(SOCKETS.trim_start_matches('/')).is_dir(),
            libvirt: LIBVIRT_SOCKETS.into_iter().any(there).then(|| names_libvirt(root)),
            libvirt_line: read(root, CONFIGURATION)
                .is_ok_and(|text| text.lines().any(|line| line == UNUSED_LIBVIRT)),
            confinement: confinement(root),
            systemd,
            unit: shown.and_then(Result::ok).map(|text| unit(&text)),
        }
    }
}

/// Does vnumad's configuration name a connection in `libvirt.uris`? What its lines mean besides is vnumad's to say.
fn names_libvirt(root: &Path) -> bool {
    let text = read(root, CONFIGURATION).unwrap_or_default();
    let lines = text.lines().skip_while(|line| !line.trim_start().starts_with("uris"));
    // A list may have several lines, and comments. Whatever a URI has in it comes after a quotation mark.
    let list: String = lines.map(|line| line.split('#').next().unwrap_or_default()).collect();
    list.split(']').next().is_some_and(|list| list.contains(['"', '\'']))
}

/// Does AppArmor confine domains of libvirt, and how?
fn confinement(root: &Path) -> Option<Confinement> {
    let enabled = read(root, "sys/module/apparmor/parameters/enabled").is_ok_and(|value| value.trim() == "Y")
        && apparmor::kernel_asks(root);
    let abstraction = read(root, ABSTRACTION).ok().filter(|_| enabled)?;
    let includes = |line: &str| {
        let line = line.trim().trim_start_matches('#');
        line.starts_with("include") && line.contains("<abstractions/libvirt-qemu.d>")
    };
    let drop_ins = abstraction.lines().any(includes);
    let entries = fs::read_dir(root.join(DROP_INS)).into_iter().flatten().flatten().take(MOST_DROP_INS);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let dropped: Vec<String> = names.map(|name| format!("{DROP_INS}/{name}")).filter(|_| drop_ins).collect();
    let files = dropped.iter().map(String::as_str).chain([OPERATORS]);
    let rule = files.filter_map(|path| read(root, path).ok()).any(|text| has_rule(&text));
    let loaded = read(root, "sys/kernel/security/apparmor/profiles").unwrap_or_default();
    let domains = loaded.lines().filter_map(apparmor::confining).filter(|name| is_domain(name));
    let there = |name: &&str| root.join("etc/apparmor.d/libvirt").join(name).is_file();
    let without = domains.filter(there).filter(|name| is_denied(root, name)).map(str::to_owned).collect();
    Some(Confinement { drop_ins, rule, without })
}

/// libvirt's name of a domain's profile.
fn is_domain(name: &str) -> bool {
    let uuid = name.strip_prefix("libvirt-");
    uuid.is_some_and(|uuid| {
        uuid.len() == 36 && uuid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
    })
}

/// One for sockets of QEMU's own user (`owner`) is not enough: that of all domains is root's.
fn has_rule(text: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with("/run/vnuma/libvirt/"))
}

/// A file system of this kind is mounted there.
fn mounted(root: &Path, place: &str, kind: &str) -> bool {
    let mounts = read(root, "proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| {
        let mut words = line.split(' ').skip(1);
        words.next() == Some(place) && words.next() == Some(kind)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host that has all of it.
    pub fn write_host(root: &Path) {
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            fs::write(path, text).expect("written");
        };
        write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme svm nx\n");
        write("dev/kvm", "");
        write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
        write("sys/kernel/btf/vmlinux", "");
        let mounts = "bpf /sys/fs/bpf bpf rw 0 0\ndebugfs /sys/kernel/debug debugfs rw 0 0\n";
        write("proc/self/mounts", mounts);
        write("proc/sys/kernel/yama/ptrace_scope", "1\n");
        write("proc/sys/kernel/perf_event_paranoid", "-1\n");
        write("sys/bus/event_source/devices/cpu/type", "4\n");
        write("sys/kernel/sched_ext/root/ops", "vnuma\n");
        write("proc/sys/kernel/numa_balancing", "0\n");
        for node in [0, 1] {
            let folder = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
            write(&format!("{folder}/nr_hugepages"), "512\n");
        }
        write("run/vnuma/qmp/.keep", "");
        write("run/systemd/system/.keep", "");
    }

    #[test]
    fn a_host_is_read() {
        let root = tempfile::tempdir().expect("a directory");
        let run = |words: &[&str]| {
            assert_eq!(words[..2], ["systemctl", "show"]);
            Ok("LoadState=loaded\nActiveState=active\nUnitFileState=enabled\n".to_owned())
        };
        write_host(root.path());
        let facts = Facts::read(root.path(), &run);
        assert_eq!(facts.virtualization, Some("svm"));
        assert_eq!(facts.controllers.as_ref().map(Vec::len), Some(5));
        assert!(facts.kvm && facts.btf && facts.pmu && facts.sched_ext && facts.sockets && facts.systemd);
        assert!(facts.bpf_file_system && facts.debug_file_system);
        assert_eq!((facts.ptrace_scope, facts.perf_event_paranoid), (Some(1), Some(-1)));
        assert_eq!((facts.numa_balancing, facts.scheduler.as_deref()), (Some(0), Some("vnuma")));
        let pages = [0, 1].map(|node| HugePages { node, total: 512 });
        assert_eq!(facts.huge_pages, pages);
        let unit = Unit { loaded: "loaded".into(), enabled: "enabled".into(), active: "active".into() };
        assert_eq!(facts.unit, Some(unit));
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }

    #[test]
    fn libvirt_is_used_if_the_configuration_names_it() {
        let root = tempfile::tempdir().expect("a directory");
        let look = || Facts::read(root.path(), &|_| Err(io::Error::other("no systemctl"))).libvirt;
        let write = |path: &str, text: &str| write(root.path(), path, text);
        assert_eq!(look(), None);
        write("run/libvirt/virtqemud-sock", "");
        assert_eq!(look(), Some(false));
        write("etc/vnuma/vnumad.toml", "[libvirt]\n# uris = [\"qemu:///system\"]\n");
        assert_eq!(look(), Some(false), "a comment");
        for nothing in
            ["uris = []\nstate_directories = [\"/a\"]\n", "uris = [ # \"qemu:///system\"\n    # 'none'\n]\n"]
        {
            write("etc/vnuma/vnumad.toml", &format!("[libvirt]\n{nothing}"));
            assert_eq!(look(), Some(false), "{nothing}");
        }
        for named in ["uris = [\"qemu:///system\"]\n", "  uris = [  # one\n    'qemu:///system#1',\n]\n"] {
            write("etc/vnuma/vnumad.toml", &format!("[libvirt]\n{named}"));
            assert_eq!(look(), Some(true), "{named}");
        }
        let line = || Facts::read(root.path(), &|_| Err(io::Error::other("no systemctl"))).libvirt_line;
        assert!(!line());
        write("etc/vnuma/vnumad.toml", include_str!("../../../../packaging/vnumad.toml"));
        assert!(line() && look() == Some(false), "as the package has it");
    }

    #[test]
    fn apparmor_is_looked_at_where_it_confines_domains() {
        let root = tempfile::tempdir().expect("a directory");
        let look = || Facts::read(root.path(), &|_| Err(io::Error::other("no systemctl"))).confinement;
        let write = |path: &str, text: &str| write(root.path(), path, text);
        let with = |drop_ins, rule| Some(Confinement { drop_ins, rule, without: Vec::new() });
        write(ABSTRACTION, "  #include <local/abstractions/libvirt-qemu>\n");
        assert_eq!(look(), None, "the kernel has it off");
        write("sys/module/apparmor/parameters/enabled", "Y\n");
        assert_eq!(look(), None, "the kernel does not ask for sockets");
        write("sys/kernel/security/apparmor/features/network_v9/af_unix", "yes\n");
        assert_eq!(look(), with(false, false));
        write(&format!("{DROP_INS}/vnuma"), "/run/vnuma/libvirt/*.sock rw,\n");
        assert_eq!(look(), with(false, false), "nobody includes it");
        write(OPERATORS, "# /run/vnuma/libvirt/*.sock rw,\n");
        assert_eq!(look(), with(false, false), "a comment");
        write(OPERATORS, "owner /run/vnuma/libvirt/*.sock rw,\n");
        assert_eq!(look(), with(false, false), "not for the socket of all domains");
        write(OPERATORS, "  /run/vnuma/libvirt/*.sock rw,\n");
        assert_eq!(look(), with(false, true));
        fs::remove_file(root.path().join(OPERATORS)).expect("removed");
        write(ABSTRACTION, "  include if exists <abstractions/libvirt-qemu.d>\n");
        assert_eq!(look(), with(true, true));
        fs::remove_file(root.path().join(DROP_INS).join("vnuma")).expect("removed");
        assert_eq!(look(), with(true, false));
        // What is loaded is the kernel's to say, which is not there to say it.
        let domain = "libvirt-0f3c8a4e-1f2b-4c53-9d0e-1a2b3c4d5e6f";
        write("sys/kernel/security/apparmor/profiles", &format!("{domain} (enforce)\nlibvirtd (enforce)\n"));
        write(&format!("etc/apparmor.d/libvirt/{domain}"), "");
        assert_eq!(look(), with(true, false));
        assert!(
            is_domain(domain)
                && !is_domain("libvirtd")
                && !is_domain("libvirt-../../../../../../../../../tmp/aaaaaaa")
        );
    }

    #[test]
    fn an_empty_host_has_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        let run = |_: &[&str]| -> io::Result<String> { panic!("there is no systemd") };
        assert_eq!(Facts::read(root.path(), &run), Facts::default());
    }

    #[test]
    fn what_is_no_number_is_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        write_host(root.path());
        let kernel = root.path().join("proc/sys/kernel");
        fs::write(kernel.join("numa_balancing"), "many\n").expect("written");
        fs::write(kernel.join("yama/ptrace_scope"), vec![0xff; 1 << 20]).expect("written");
        let facts = Facts::read(root.path(), &|_| Err(io::Error::other("no systemctl")));
        assert_eq!((facts.numa_balancing, facts.ptrace_scope, facts.unit), (None, None, None));
    }
}
