//! Loading and unloading: the kernel schedules by the BPF program from `attach` on, and until this is dropped.

use crate::{Arguments, layout::layout};
use anyhow::{Context, Result, anyhow, bail};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, MapMut, Object, ObjectBuilder, PrintLevel};
use nix::{
    fcntl::{Flock, FlockArg},
    libc,
    sys::statfs::statfs,
};
use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};
use vnuma_abi_bpf::sched::{Assignment, Exit, Header, MAGIC, STEAL_PRESSURE, VERSION};
use vnuma_model::CpuSet;
use vnuma_observe::{
    read_host_topology,
    scheduler::{ASSIGNMENTS, COUNTS, DIRECTORY, HEADER, loaded_scheduler, open_directory},
};

/// The program, aligned as libbpf reads it.
static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/scx_vnuma.bpf.o"));

const BPFFS: &str = "/sys/fs/bpf";
/// Of a file system that maps can be pinned in (`BPF_FS_MAGIC`).
const BPFFS_MAGIC: i64 = 0xcafe_4a11;
const TICKLESS: &str = "/sys/devices/system/cpu/nohz_full";
const HOTPLUGS: &str = "/sys/kernel/sched_ext/hotplug_seq";
const PINS: [&str; 3] = [HEADER, ASSIGNMENTS, COUNTS];

/// `SCX_EXIT_UNREG_KERN`, with `SCX_ECODE_ACT_RESTART` in the code: the kernel wants the scheduler loaded again.
const UNREGISTERED_BY_KERNEL: u32 = 66;
const RESTART: u64 = 1 << 48;

/// Only one process at a time loads and pins.
pub struct Lock {
    _directory: Flock<File>,
}

impl Lock {
    pub fn take() -> Result<Self> {
        let kind = statfs(BPFFS).with_context(|| BPFFS.to_owned())?.filesystem_type();
        if kind.0 != BPFFS_MAGIC as libc::__fsword_t {
            bail!("{BPFFS}: maps cannot be pinned there; mount it with: mount -t bpf bpf {BPFFS}");
        }
        match DirBuilder::new().mode(0o700).create(DIRECTORY) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).context(DIRECTORY);
            }
            _ => {}
        }
        let directory = open_directory(Path::new(DIRECTORY))?;
        let locked = Flock::lock(directory, FlockArg::LockExclusiveNonblock);
        let locked =
            locked.map_err(|(_, errno)| anyhow!("{DIRECTORY}: {errno}: another scx_vnuma uses it"))?;
        Ok(Self { _directory: locked })
    }
}

/// Why it has ended.
pub struct Ended {
    /// The kernel wants it loaded again, because CPUs have come or gone.
    pub restart: bool,
    /// In words.
    pub reason: String,
}

/// A scheduler that is loaded.
pub struct Loaded {
    _link: Link,
    _object: Object,
    ended: MapHandle,
}

impl Loaded {
    /// Loads and attaches it, and pins its maps. The kernel ends it at once if CPUs have come or gone since this count of such events.
    pub fn new(arguments: &Arguments, hotplugs: u64) -> Result<Self> {
        refuse_second()?;
        libbpf_rs::set_print(Some((PrintLevel::Debug, if arguments.verbose { print } else { ignore })));
        unpin();
        let mut open = ObjectBuilder::default().open_memory(OBJECT)?;
        let (wanted, other) = match arguments.full {
            true => ("vnuma_full", "vnuma_partial"),
            false => ("vnuma_partial", "vnuma_full"),
        };
        for mut map in open.maps_mut() {
            if map.name() == other {
                map.set_autocreate(false)?;
            } else if map.name() == wanted {
                // The first member of its `struct sched_ext_ops`.
                let seq = map.initial_value_mut().and_then(|ops| ops.get_mut(..size_of::<u64>()));
                seq.context("the BPF object has no scheduler")?.copy_from_slice(&hotplugs.to_ne_bytes());
            }
        }
        let mut object = open.load().context(
            "loading the BPF program: it needs Linux 7.0 or newer with sched_ext (--verbose shows what the kernel says)",
        )?;
        find(&mut object, HEADER)?.update(&[0; 4], &header(arguments).to_bytes(), MapFlags::ANY)?;
        let host = read_host_topology(Path::new("/"))?;
        find(&mut object, "topology")?.update(&[0; 4], &layout(&host, &tickless())?, MapFlags::ANY)?;
        let ended = MapHandle::try_from(&find(&mut object, "ended")?)?;
        let link = find(&mut object, wanted)?.attach_struct_ops().map_err(|error| {
            // Another one may have been loaded since this was looked at.
            refuse_second().err().unwrap_or_else(|| anyhow!(error).context("attaching the scheduler"))
        })?;
        Self { _link: link, _object: object, ended }.pin()
    }

    fn pin(mut self) -> Result<Self> {
        for name in PINS {
            let mut map = find(&mut self._object, name)?;
            map.pin(Path::new(DIRECTORY).join(name)).with_context(|| format!("{DIRECTORY}/{name}"))?;
        }
        Ok(self)
    }

    /// Has it ended, and why?
    pub fn ended(&self) -> Option<Ended> {
        let exit = match self.ended.lookup(&[0; 4], MapFlags::ANY) {
            Ok(bytes) => Exit::from_bytes(&bytes?),
            Err(error) => return Some(Ended { restart: false, reason: error.to_string() }),
        };
        let text = |bytes: &[u8]| {
            let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        };
        let words = [text(&exit.reason), text(&exit.message)];
        let words: Vec<&str> = words.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
        (exit.kind != 0).then(|| Ended {
            restart: exit.kind == UNREGISTERED_BY_KERNEL && exit.code & RESTART != 0,
            reason: format!("{} (kind {}, code {:#x})", words.join(": "), exit.kind, exit.code),
        })
    }
}

/// How often CPUs have come or gone since the server started; 0 if the kernel does not say it.
pub fn hotplugs() -> u64 {
    let text = fs::read_to_string(HOTPLUGS).unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

/// The CPUs that have no tick while they run one thread. The kernel says `(null)` if that is off, and other kernels have no such file.
fn tickless() -> CpuSet {
    fs::read_to_string(TICKLESS).ok().and_then(|text| text.trim().parse().ok()).unwrap_or_default()
}

/// The maps of a scheduler that has ended are of no use to anybody.
pub fn unpin() {
    for name in PINS {
        // It is there only if one was killed.
        let _ = fs::remove_file(Path::new(DIRECTORY).join(name));
    }
}

/// The kernel takes one scheduler at a time.
pub fn refuse_second() -> Result<()> {
    match loaded_scheduler(Path::new("/"))? {
        Some(ops) => {
            bail!("another sched_ext scheduler is loaded, `{ops}`: the kernel takes one at a time (EBUSY)")
        }
        None => Ok(()),
    }
}

fn header(arguments: &Arguments) -> Header {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Header {
        magic: MAGIC,
        version: VERSION,
        header_size: size_of::<Header>() as u32,
        assignment_size: size_of::<Assignment>() as u32,
        full: arguments.full.into(),
        steal: STEAL_PRESSURE,
        // Two do not start in the same nanosecond.
        instance: now.as_nanos() as u64,
        heartbeat_ns: 0,
        keep_ns: arguments.keep_s * 1_000_000_000,
        starve_ns: arguments.starve_ms * 1_000_000,
        slice_ns: arguments.slice_us * 1000,
    }
}

fn find<'a>(object: &'a mut Object, name: &str) -> Result<MapMut<'a>> {
    let map = object.maps_mut().find(|map| map.name() == name);
    map.with_context(|| format!("the BPF object has no map `{name}`"))
}

fn print(_level: PrintLevel, message: String) {
    eprint!("libbpf: {message}");
}

fn ignore(_level: PrintLevel, _message: String) {}
