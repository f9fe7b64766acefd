//! The Debian packages. `cargo xtask` makes them and says where they are.

use crate::{SOAK_TIMEOUT, slice::driver_tools};
use std::path::{Path, PathBuf};
use vnuma_lab_runner::{Lab, LabRun, boot_retries, build_binaries, dkms};

/// Folder with the packages of a lower version, `before`, and of this one, `now`, and with AppArmor's own: those of the lab's release,
/// `apparmor`, and newer ones, `apparmor-next`.
const FOLDER: &str = "VNUMA_PACKAGES";
const GUEST_KERNEL: &str = "6.12";

fn packages(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "deb")).collect()
}

#[test]
#[ignore = "takes minutes: make soak"]
fn packages_are_installed_upgraded_and_purged() {
    let Ok(folder) = std::env::var(FOLDER) else {
        println!("skipped: {FOLDER} does not name a folder of packages (cargo xtask soak packages sets it)");
        return;
    };
    let folder = PathBuf::from(folder);
    let modules = tempfile::tempdir().expect("a folder");
    let driver = packages(&folder.join("now"));
    let driver = driver.iter().find(|path| path.to_string_lossy().contains("/vnuma-guest-dkms_"));
    let (said, kernels) = dkms::install(driver.expect("the driver's package"), modules.path())
        .unwrap_or_else(|error| panic!("{error}"));
    println!("{said}");
    let (_, release) = kernels.iter().find(|(name, _)| name == GUEST_KERNEL).expect("in the image");
    let mut puts = vec![
        (modules.path().join(format!("vnuma-{release}.ko")), "/root/packages/vnuma.ko".to_owned()),
        (driver_tools().join("vnuma-check"), "/root/vnuma-check".to_owned()),
    ];
    let scenario = build_binaries(&[("vnuma-lab-tests", "lab-scenario")]).expect("the program builds");
    puts.push((scenario[0].clone(), "/usr/local/bin/lab-scenario".to_owned()));
    for version in ["before", "now", "apparmor", "apparmor-next"] {
        let there = |path: PathBuf| {
            let name = path.file_name().expect("a file").to_string_lossy().into_owned();
            (path, format!("/root/packages/{version}/{name}"))
        };
        puts.extend(packages(&folder.join(version)).into_iter().map(there));
    }
    let lab = Lab::boot_systemd("2n4c").expect("the lab boots");
    let command = ["lab-scenario", "packages"].map(str::to_owned).into();
    let run = LabRun { puts, command, timeout: SOAK_TIMEOUT, ..LabRun::default() };
    let status = run.run_in(&lab).expect("it runs").status;
    println!("lab boots retried so far: {}", boot_retries());
    assert_eq!(status, 0, "its output stands above");
}
