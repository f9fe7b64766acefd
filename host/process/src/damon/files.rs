//! The files of DAMON in this machine's sysfs.

use super::Tree;
use std::{
    fmt, fs,
    io::{self, Read, Write},
    path::PathBuf,
    time::Duration,
};

/// No file of DAMON's has more.
const LONGEST: u64 = 4096;
/// A directory has no more names that are read.
const NAMES: usize = 16_384;

/// Files below a root.
pub struct Sysfs {
    root: PathBuf,
    wait: Box<dyn Fn(Duration) -> bool + Send>,
}

impl Sysfs {
    /// Below `root`; `wait` waits for so long, and says whether more is wanted.
    pub fn new(root: PathBuf, wait: impl Fn(Duration) -> bool + Send + 'static) -> Self {
        Self { root, wait: Box::new(wait) }
    }
}

impl fmt::Debug for Sysfs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sysfs").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Tree for Sysfs {
    fn read(&self, path: &str) -> io::Result<String> {
        let mut text = Vec::new();
        fs::File::open(self.root.join(path))?.take(LONGEST).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        // In one call, which is what sysfs takes for the value.
        fs::OpenOptions::new().write(true).open(self.root.join(path))?.write_all(text.as_bytes())
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(self.root.join(path))?.take(NAMES);
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn wait(&self, time: Duration) -> bool {
        (self.wait)(time)
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
