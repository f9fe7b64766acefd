//! Boots the emulated NUMA server of the lab and runs commands in it.
//!
//! ```no_run
//! use vnuma_lab_runner::LabRun;
//! let command = vec!["numactl".into(), "-H".into()];
//! let run = LabRun { command, capture: true, ..LabRun::default() };
//! let output = run.run()?;
//! assert_eq!(output.status, 0);
//! # Ok::<(), vnuma_lab_runner::LabError>(())
//! ```
//!
//! [`Lab`] is a server that several commands run in, [`Lab::boot_cluster`] boots several with a network between them; `lab/README.md` describes the lab.

mod accel;
mod acpi;
mod binaries;
mod cache;
mod children;
mod counters;
mod cpio;
pub mod dkms;
pub mod driver;
mod file_error;
mod guest;
mod guests;
mod hang;
mod image;
mod initramfs;
mod kbuild;
mod kernel;
pub mod kernels;
mod lab;
mod mirror;
mod network;
mod pmu;
mod profile;
mod progress;
mod qemu;
mod recipe;
mod retries;
mod run;
mod run_directory;
mod schedulers;
mod tsc;

pub use binaries::{
    Binaries, BuildError, build as build_binaries, build_quickly as build_binaries_quickly,
    build_release as build_release_binaries,
};
pub use cache::cache_dir;
pub use children::end_on_signals;
pub use counters::{Counters, CountersError};
pub use file_error::FileError;
pub use guests::guest_files;
pub use image::{Image, ImageError, Kernel};
pub use initramfs::InitramfsError;
pub use kbuild::KbuildError;
pub use lab::{BOOT_LIMIT, Lab, LabError};
pub use mirror::debian_mirror;
pub use profile::{DEFAULT_PROFILE, Device, DeviceModel, Profile, ProfileError};
pub use progress::Progress;
pub use qemu::{Accel, Guest, Init};
pub use recipe::{Recipe, RecipeError, Role};
pub use retries::boot_retries;
pub use run::{DEFAULT_TIMEOUT, LabRun, Output, Stdin};
pub use run_directory::{RunDirectory, run_directory};
pub use schedulers::{SchedulerError, schedulers_of_scx};

/// The agent's types that the API of this crate uses.
pub use vnuma_lab_agent::{client::Input, protocol::Exec};

/// The folder `lab/` of the checkout that this was built from.
fn lab_dir() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
