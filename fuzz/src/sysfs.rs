//! A tree of sysfs and procfs, as a broken firmware, a hostile container or a copy of another server has it.

use crate::{expect_clear, scratch};
use nix::{sys::stat::Mode, unistd::mkfifo};
use std::{collections::BTreeSet, fs, io, os::unix::fs::symlink, path::Path, sync::Mutex};
use vnuma_model::{CpuSet, HostTopology};
use vnuma_observe::{
    SysfsError, read_host_topology, read_pci_functions,
    sysfs::{nics_behind, read_interfaces},
};

/// Most files of an input.
const FILES: usize = 128;

/// One tree at a time.
static TREE: Mutex<()> = Mutex::new(());

/// An input is a list of files: `=PATH` and, in the lines that follow, the content. `=PATH|` is a FIFO, `=PATH@` an
/// endless file, `=PATH/` a directory.
pub fn run(input: &[u8]) {
    let _alone = TREE.lock();
    let root = scratch().join("tree");
    match fs::remove_dir_all(&root) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{}: {error}", root.display()),
        _ => {}
    }
    fs::create_dir(&root).expect("an empty tree");
    for file in split_files(input).take(FILES) {
        // A path that is taken by something else stays what it is.
        let _ = make(&root, file);
    }
    match read_host_topology(&root) {
        Ok(host) => {
            check(&host);
            let json = serde_json::to_string(&host).expect("JSON");
            assert_eq!(serde_json::from_str::<HostTopology>(&json).expect("read back"), host);
            match read_pci_functions(&root, &host.nodes) {
                Ok(functions) => assert!(functions.iter().map(|one| &one.device).eq(&host.pci_devices)),
                Err(error) => check_error(&root, &error),
            }
        }
        Err(error) => check_error(&root, &error),
    }
    match read_interfaces(&root) {
        Ok(interfaces) => interfaces.keys().for_each(|name| drop(nics_behind(&interfaces, name))),
        Err(error) => check_error(&root, &error),
    }
}

fn check_error(root: &Path, error: &SysfsError) {
    let message = error.to_string();
    expect_clear(&message);
    assert!(message.starts_with(&root.display().to_string()), "names no file: {message}");
}

/// Path and content of each file.
fn split_files(input: &[u8]) -> impl Iterator<Item = (&str, &[u8])> {
    let starts = (0..input.len()).filter(|&at| input[at] == b'=' && (at == 0 || input[at - 1] == b'\n'));
    starts.filter_map(|start| {
        let rest = &input[start + 1..];
        let end = rest.windows(2).position(|pair| pair == b"\n=").map_or(rest.len(), |end| end + 1);
        let line = rest[..end].iter().position(|&byte| byte == b'\n').unwrap_or(end);
        let path = std::str::from_utf8(&rest[..line]).ok()?;
        Some((path, rest[..end].get(line + 1..).unwrap_or_default()))
    })
}

fn make(root: &Path, (path, content): (&str, &[u8])) -> io::Result<()> {
    let plain = |part: &str| {
        !part.is_empty()
            && part != "."
            && part != ".."
            && part.len() < 64
            && part.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let name = path.trim_end_matches(['|', '@', '/']);
    if !name.split('/').all(plain) || name.split('/').count() > 12 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file = root.join(name);
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    match path.as_bytes().last() {
        Some(b'|') => Ok(mkfifo(&file, Mode::S_IRUSR | Mode::S_IWUSR)?),
        Some(b'@') => symlink("/dev/zero", &file),
        Some(b'/') => fs::create_dir(&file),
        // Not through a link that an earlier line made.
        _ if file.is_symlink() => Err(io::ErrorKind::AlreadyExists.into()),
        _ if fs::metadata(&file).is_ok_and(|found| !found.is_file()) => {
            Err(io::ErrorKind::AlreadyExists.into())
        }
        _ => fs::write(&file, content),
    }
}

/// What everything else relies on.
fn check(host: &HostTopology) {
    let ids: Vec<u32> = host.nodes.iter().map(|node| node.id).collect();
    assert!(!ids.is_empty() && ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
    assert!(ids.iter().all(|&id| id <= 1023), "{ids:?}");
    assert_eq!(host.distances.len(), ids.len());
    assert!(host.distances.rows().iter().flatten().all(|&distance| distance >= 10));
    let mut online = BTreeSet::new();
    for cpu in host.nodes.iter().flat_map(|node| node.cpus.iter()) {
        assert!(cpu <= CpuSet::MAX_CPU && online.insert(cpu), "CPU {cpu} is on two nodes");
    }
    for cache in &host.caches {
        assert!((1..=4).contains(&cache.level) && !cache.cpus.is_empty(), "{cache:?}");
        assert!(cache.cpus.iter().all(|cpu| online.contains(&cpu)), "{cache:?}");
    }
    assert!(host.pci_devices.windows(2).all(|pair| pair[0].address < pair[1].address));
    for device in &host.pci_devices {
        assert!(device.node.is_none_or(|node| ids.contains(&node)), "{device:?}");
        assert!(device.class <= 0xff_ffff, "{device:?}");
    }
}
