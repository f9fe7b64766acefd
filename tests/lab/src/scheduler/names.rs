//! Kernels to come do not have functions that this one keeps for old schedulers only. A copy of scx_vnuma in which their names are no
//! functions of the kernel is loaded all the same.

use crate::{
    threads::{Loop, loaded, stop},
    vcpus::PROGRAM,
};
use anyhow::{Context, Result, ensure};
use std::{fs, os::unix::fs::PermissionsExt, process::Command, process::Stdio};
use vnuma_observe::scheduler::OPS;
use vnuma_scenario::{HANG_LIMIT, Process, wait_for};

const COPY: &str = "/root/scx_renamed";
/// What this kernel says of them: to be removed, or to become a function of another type.
const OLD: [&str; 4] = [
    "scx_bpf_dsq_insert",
    "scx_bpf_dsq_insert_vtime",
    "scx_bpf_dsq_move_to_local",
    "scx_bpf_reenqueue_local",
];

/// Where the name of such a function begins, as libbpf looks it up: it ignores what follows the last three underscores.
fn old_names(program: &[u8]) -> Vec<usize> {
    let begins = |at: &usize| program[*at..].starts_with(b"scx_bpf_") && program.get(at - 1) != Some(&b'_');
    let is_old = |at: &usize| {
        let name = program[*at..].split(|byte| *byte == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(&name[..name.len().min(80)]).into_owned();
        let sought = name.rfind("___").map_or(name.as_str(), |end| &name[..end]);
        OLD.contains(&sought)
    };
    (1..program.len()).filter(begins).filter(is_old).collect()
}

pub(super) fn need_not_be_there() -> Result<()> {
    let mut program = fs::read(PROGRAM).context(PROGRAM)?;
    let names = old_names(&program);
    for at in &names {
        program[*at] = b'x';
    }
    fs::write(COPY, program).context(COPY)?;
    fs::set_permissions(COPY, fs::Permissions::from_mode(0o700))?;
    let process = Command::new(COPY).stdin(Stdio::null()).spawn().context(COPY)?;
    let mut process = Process(process);
    wait_for("scx_vnuma to be loaded without old functions of the kernel", HANG_LIMIT, || {
        let ended = process.0.try_wait()?;
        ensure!(
            ended.is_none(),
            "it is not loaded without {} names of old functions: {ended:?}",
            names.len()
        );
        Ok(loaded()?.as_deref() == Some(OPS))
    })?;
    Loop::start("1-3")?.expect_to_run()?;
    println!("loaded without functions that the kernel is to lose ({} names)", names.len());
    stop(process)
}
