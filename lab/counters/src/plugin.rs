//! Builds the plugin with the system's C compiler, once per content of its sources.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

const SOURCES: [(&str, &str); 7] = [
    ("lab/counters/plugin/Makefile", include_str!("../plugin/Makefile")),
    ("lab/counters/plugin/plugin.h", include_str!("../plugin/plugin.h")),
    ("lab/counters/plugin/qemu_api.h", include_str!("../plugin/qemu_api.h")),
    ("lab/counters/plugin/main.c", include_str!("../plugin/main.c")),
    ("lab/counters/plugin/config.c", include_str!("../plugin/config.c")),
    ("lab/counters/plugin/address.c", include_str!("../plugin/address.c")),
    ("lab/counters/plugin/cache.c", include_str!("../plugin/cache.c")),
];
const ABI: (&str, &str) = (
    "abi/lab-counters/include/vnuma/lab_counters.h",
    include_str!("../../../abi/lab-counters/include/vnuma/lab_counters.h"),
);

/// Why there is no plugin.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// make cannot be started.
    #[error("make cannot be started: {0} (packages make and gcc)")]
    Start(io::Error),
    /// make failed.
    #[error("make of lab/counters/plugin failed with {status}:\n{output}")]
    Make {
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        output: String,
    },
}

/// Builds the plugin in a directory below `cache`, unless it is there; its path.
pub fn build(cache: &Path) -> Result<PathBuf, PluginError> {
    let mut hasher = DefaultHasher::new();
    (SOURCES, ABI).hash(&mut hasher);
    let directory = cache.join("counters");
    let plugin = directory.join(format!("vnuma-counters-{:016x}.so", hasher.finish()));
    if plugin.exists() {
        return Ok(plugin);
    }
    // Builders side by side each have a directory of their own; the last rename wins, with the same content.
    let scratch = directory.join(format!("build-{}", std::process::id()));
    let built = make(&scratch).and_then(|built| {
        std::fs::rename(&built, &plugin).map_err(|source| PluginError::File { path: built, source })
    });
    let removed = std::fs::remove_dir_all(&scratch);
    built?;
    removed.map_err(|source| PluginError::File { path: scratch, source })?;
    Ok(plugin)
}

fn make(scratch: &Path) -> Result<PathBuf, PluginError> {
    for (name, text) in SOURCES.iter().chain([&ABI]) {
        let path = scratch.join(name);
        let write = || -> io::Result<()> {
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(&path, text)
        };
        write().map_err(|source| PluginError::File { path: path.clone(), source })?;
    }
    let mut command = Command::new("make");
    command.arg("--no-print-directory").arg("-C").arg(scratch.join("lab/counters/plugin"));
    // The settings of a make that calls this are not meant for that one.
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env_remove("CFLAGS").env_remove("OUT");
    let output = command.output().map_err(PluginError::Start)?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        let output_text = String::from_utf8_lossy(&text).into_owned();
        return Err(PluginError::Make { status: output.status, output: output_text });
    }
    Ok(scratch.join("lab/counters/plugin/vnuma-counters.so"))
}
