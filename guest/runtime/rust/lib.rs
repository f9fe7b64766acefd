//! The NUMA topology of this machine as it is now: libvnuma (`docs/libvnuma.md`) for programs in Rust.
//!
//! ```
//! let topology = vnuma_runtime::Topology::open()?;
//! let seen = topology.generation();
//! // ... place something by it; later, one load says whether to do so again:
//! if topology.generation() != seen {
//!     println!("this thread is on node {:?} now", topology.current_node());
//! }
//! # Ok::<(), std::io::Error>(())
//! ```

mod ffi;

use std::{
    ffi::{CStr, CString, c_char},
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    ptr::{self, NonNull},
};

/// Where answers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The page of `/dev/vnuma`: never old.
    Device,
    /// sysfs, when it was read last.
    Sysfs,
}

/// Nodes that have CPUs, and nodes that have memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// The generation that they belong to.
    pub generation: u64,
    /// In ascending order.
    pub with_cpus: Vec<u32>,
    /// In ascending order.
    pub with_memory: Vec<u32>,
}

/// The topology. Threads share it without locks.
#[derive(Debug)]
pub struct Topology(NonNull<ffi::Handle>);

// SAFETY: all functions of libvnuma but vnuma_close() may be called by several threads at the same time, and that one needs
// the only owner.
unsafe impl Send for Topology {}
// SAFETY: the same.
unsafe impl Sync for Topology {}

impl Topology {
    /// That of this machine.
    pub fn open() -> io::Result<Self> {
        Self::opened(ptr::null())
    }

    /// That of the files below a folder.
    pub fn open_at(root: &Path) -> io::Result<Self> {
        let root = CString::new(root.as_os_str().as_bytes())?;
        Self::opened(root.as_ptr())
    }

    fn opened(root: *const c_char) -> io::Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: `root` is null or ends with 0, and the handle is written when the call succeeds.
        check(unsafe { ffi::vnuma_open_at(&raw mut handle, root) })?;
        NonNull::new(handle).map(Self).ok_or_else(|| io::Error::from(io::ErrorKind::Other))
    }

    /// Where answers come from.
    pub fn source(&self) -> Source {
        // SAFETY: the handle is open.
        match unsafe { ffi::vnuma_source(self.0.as_ptr()) } {
            ffi::SOURCE_DEVICE => Source::Device,
            _ => Source::Sysfs,
        }
    }

    /// Why the device is not used; `None` if it is.
    pub fn device_problem(&self) -> Option<String> {
        // SAFETY: the handle is open, and its text ends with 0.
        let text = unsafe { CStr::from_ptr(ffi::vnuma_device_problem(self.0.as_ptr())) };
        (!text.is_empty()).then(|| text.to_string_lossy().into_owned())
    }

    /// Compared for change only, never for order.
    pub fn generation(&self) -> u64 {
        // SAFETY: the handle is open.
        unsafe { ffi::vnuma_generation(self.0.as_ptr()) }
    }

    /// Reads sysfs again if that is the source. Has anything changed?
    pub fn refresh(&self) -> io::Result<bool> {
        // SAFETY: the handle is open, and what is written is atomic.
        check(unsafe { ffi::vnuma_refresh(self.0.as_ptr()) }).map(|changed| changed > 0)
    }

    /// The node of a CPU.
    pub fn cpu_node(&self, cpu: u32) -> Option<u32> {
        // SAFETY: the handle is open.
        u32::try_from(unsafe { ffi::vnuma_cpu_node(self.0.as_ptr(), cpu) }).ok()
    }

    /// The node of the CPU that the calling thread runs on.
    pub fn current_node(&self) -> Option<u32> {
        // SAFETY: the handle is open.
        u32::try_from(unsafe { ffi::vnuma_current_node(self.0.as_ptr()) }).ok()
    }

    /// The nodes of all CPUs, by number, and their generation.
    pub fn cpu_nodes(&self) -> io::Result<(u64, Vec<Option<u32>>)> {
        let mut cpus = MaybeUninit::<ffi::Cpus>::uninit();
        // SAFETY: the handle is open, and all of the struct is written when the call succeeds.
        let cpus = unsafe {
            check(ffi::vnuma_copy_cpus(self.0.as_ptr(), cpus.as_mut_ptr()))?;
            cpus.assume_init()
        };
        let used = cpus.node.iter().take(cpus.count as usize);
        Ok((cpus.generation, used.map(|&node| u32::try_from(node).ok()).collect()))
    }

    /// The distance that the kernel uses.
    pub fn distance(&self, from: u32, to: u32) -> io::Result<u32> {
        let number =
            |node: u32| i32::try_from(node).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        // SAFETY: the handle is open.
        let distance = check(unsafe { ffi::vnuma_distance(self.0.as_ptr(), number(from)?, number(to)?) })?;
        Ok(distance.unsigned_abs())
    }

    /// Which nodes have CPUs and memory.
    pub fn nodes(&self) -> io::Result<Nodes> {
        let mut nodes = MaybeUninit::<ffi::Nodes>::uninit();
        // SAFETY: the handle is open, and all of the struct is written when the call succeeds.
        let nodes = unsafe {
            check(ffi::vnuma_read_nodes(self.0.as_ptr(), nodes.as_mut_ptr()))?;
            nodes.assume_init()
        };
        Ok(Nodes {
            generation: nodes.generation,
            with_cpus: nodes.cpus.list(),
            with_memory: nodes.memory.list(),
        })
    }

    /// Readable when the topology may have changed, until [`clear_watch`]. Watch first, then read.
    pub fn watch(&self) -> io::Result<OwnedFd> {
        // SAFETY: the handle is open.
        let fd = check(unsafe { ffi::vnuma_watch(self.0.as_ptr()) })?;
        // SAFETY: it is new, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        // SAFETY: this is the only owner, and the handle is not used after it.
        unsafe { ffi::vnuma_close(self.0.as_ptr()) }
    }
}

/// Makes a watch readable at the next change only.
pub fn clear_watch(watch: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: it takes any number.
    check(unsafe { ffi::vnuma_clear_watch(watch.as_raw_fd()) }).map(drop)
}

/// A result, or what is below 0: an error number.
fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::PathBuf};

    fn machine() -> (tempfile::TempDir, impl Fn(&str, &str)) {
        let root = tempfile::tempdir().expect("a folder");
        let directory: PathBuf = root.path().join("sys/devices/system/node");
        let put = move |path: &str, text: &str| {
            let path = directory.join(path);
            fs::create_dir_all(path.parent().expect("inside")).expect("made");
            fs::write(path, text).expect("written");
        };
        for (path, text) in [
            ("online", "0-1\n"),
            ("has_cpu", "0\n"),
            ("has_memory", "0-1\n"),
            ("node0/cpulist", "0-2\n"),
            ("node1/cpulist", "\n"),
            ("node0/distance", "10 21\n"),
            ("node1/distance", "21 10\n"),
        ] {
            put(path, text);
        }
        (root, put)
    }

    #[test]
    fn what_the_library_says_is_what_rust_says() {
        let (root, put) = machine();
        let topology = Topology::open_at(root.path()).expect("a topology");
        assert_eq!(topology.source(), Source::Sysfs);
        let problem = topology.device_problem().expect("there is no device");
        assert!(problem.ends_with("/dev/vnuma: No such file or directory"), "{problem}");
        let seen = topology.generation();
        assert_eq!(topology.cpu_node(2), Some(0));
        assert_eq!(topology.cpu_node(3), None);
        assert_eq!(topology.cpu_nodes().expect("stands still"), (seen, vec![Some(0); 3]));
        assert_eq!(topology.distance(0, 1).expect("known"), 21);
        let error = topology.distance(0, 2).expect_err("there is no node 2");
        assert_eq!(error.raw_os_error(), Some(19), "{error}");
        assert!(topology.distance(u32::MAX, 0).is_err());
        let nodes = topology.nodes().expect("known");
        assert_eq!((nodes.with_cpus, nodes.with_memory), (vec![0], vec![0, 1]));

        put("node0/cpulist", "0-1\n");
        put("node1/cpulist", "2\n");
        put("has_cpu", "0-1\n");
        assert!(topology.refresh().expect("readable"));
        assert!(!topology.refresh().expect("readable"));
        assert_ne!(topology.generation(), seen);
        assert_eq!(topology.cpu_node(2), Some(1));
        assert_eq!(topology.nodes().expect("known").with_cpus, [0, 1]);
        put("node1/cpulist", "x\n");
        assert!(topology.refresh().is_err());
    }

    #[test]
    fn a_watch_is_a_file_descriptor_of_its_own() {
        use std::os::fd::AsFd;
        let (root, _) = machine();
        let topology = Topology::open_at(root.path()).expect("a topology");
        let watches = [topology.watch().expect("a watch"), topology.watch().expect("a watch")];
        assert_ne!(watches[0].as_raw_fd(), watches[1].as_raw_fd());
        drop(topology);
        clear_watch(watches[0].as_fd()).expect("does not block");
    }

    #[test]
    fn a_folder_without_a_topology_is_an_error() {
        let root = tempfile::tempdir().expect("a folder");
        let error = Topology::open_at(root.path()).expect_err("nothing is there");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(Topology::open_at(Path::new("/a\0b")).is_err());
    }
}
