//! Builds the PMU module of the server, `lab/pmu`, for the server's kernel: in the image's tree, once per content.

use std::fs;
use std::path::{Path, PathBuf};

use nix::fcntl::FlockArg;
use sha2::{Digest, Sha256};

use crate::cache::{cache_dir, lock};
use crate::file_error::file_error;
use crate::image::Image;
use crate::kbuild::{self, KbuildError};

const MODULE: &str = "vnuma_lab_pmu.ko";
/// Paths within the checkout, and content.
const SOURCES: [(&str, &str); 4] = [
    ("lab/pmu/Kbuild", include_str!("../../pmu/Kbuild")),
    ("lab/pmu/Makefile", include_str!("../../pmu/Makefile")),
    ("lab/pmu/vnuma_lab_pmu.c", include_str!("../../pmu/vnuma_lab_pmu.c")),
    (
        "abi/lab-counters/include/vnuma/lab_counters.h",
        include_str!("../../../abi/lab-counters/include/vnuma/lab_counters.h"),
    ),
];

/// Builds the module unless it is there; its path.
pub(crate) fn build(image: &Image) -> Result<PathBuf, KbuildError> {
    let release = &image.server_kernel().release;
    let mut digest = Sha256::new();
    for part in SOURCES.iter().flat_map(|(path, content)| [path, content]).chain([&release.as_str()]) {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let hash: String = digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let directory = cache_dir().join("pmu");
    fs::create_dir_all(&directory).map_err(file_error(&directory))?;
    let result = directory.join(&hash);
    let module = result.join(MODULE);
    let _lock = lock(&result, FlockArg::LockExclusive).map_err(file_error(&result))?;
    if !module.exists() {
        make(image, release, &result)?;
    }
    Ok(module)
}

fn make(image: &Image, release: &str, result: &Path) -> Result<(), KbuildError> {
    let sources = SOURCES.map(|(name, content)| (name.into(), content.into()));
    let scratch = kbuild::make(image, release, &sources, "lab/pmu", &[])?;
    fs::create_dir_all(result).map_err(file_error(result))?;
    let (built, temporary) = (scratch.path().join("lab/pmu").join(MODULE), result.join("new"));
    fs::copy(&built, &temporary).map_err(file_error(&built))?;
    Ok(fs::rename(&temporary, result.join(MODULE)).map_err(file_error(result))?)
}
