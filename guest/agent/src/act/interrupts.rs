//! CPUs that handle an interrupt.

use super::Undone;
use crate::{files, observe::interrupts::affinity_file};
use std::{fs, io, path::Path};
use vnuma_model::CpuSet;

/// Sets them. The kernel refuses it for interrupts that it spreads itself (EIO).
pub fn set(root: &Path, irq: u32, cpus: &CpuSet) -> Result<(), String> {
    let path = affinity_file(root, irq);
    let file = fs::OpenOptions::new().write(true).open(&path);
    let wrote = file.and_then(|mut file| io::Write::write_all(&mut file, cpus.to_string().as_bytes()));
    wrote.map_err(|error| match error.raw_os_error() {
        Some(libc::EIO) => "the kernel spreads it itself".to_owned(),
        _ => format!("{}: {error}", path.display()),
    })
}

/// Gives an interrupt back what it had.
pub fn release(
    root: &Path,
    irq: u32,
    former: &CpuSet,
    set_before: &CpuSet,
    online: &CpuSet,
) -> Result<Undone, String> {
    let found = files::text(&affinity_file(root, irq)).and_then(|list| list.parse::<CpuSet>().ok());
    let Some(found) = found else { return Ok(Undone::Left(format!("interrupt {irq} is gone"))) };
    // An interrupt all of whose CPUs go offline is moved by the kernel.
    if found != *set_before && online.intersects(set_before) {
        return Ok(match found == *former {
            true => Undone::Restored(format!("interrupt {irq} has CPUs {former}")),
            false => Undone::Left(format!("interrupt {irq}: somebody else has set its CPUs")),
        });
    }
    set(root, irq, former)?;
    Ok(Undone::Restored(format!("interrupt {irq} has CPUs {former} again")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_is_given_back_unless_somebody_else_has_set_it() {
        let root = tempfile::tempdir().expect("a directory");
        let path = affinity_file(root.path(), 24);
        fs::create_dir_all(path.parent().expect("inside")).expect("made");
        let list = |list: &str| list.parse::<CpuSet>().expect("a list");
        let undo = || release(root.path(), 24, &list("0-3"), &list("2-3"), &list("0-3"));
        assert!(matches!(undo(), Ok(Undone::Left(_))), "it is gone");
        fs::write(&path, "").expect("made");
        set(root.path(), 24, &list("2-3")).expect("set");
        assert!(matches!(undo(), Ok(Undone::Restored(_))));
        assert_eq!(fs::read_to_string(&path).expect("there"), "0-3");
        assert!(matches!(undo(), Ok(Undone::Restored(_))), "twice is once");
        fs::write(&path, "1\n").expect("written");
        assert!(matches!(undo(), Ok(Undone::Left(_))));
        assert_eq!(fs::read_to_string(&path).expect("there"), "1\n");
    }
}
