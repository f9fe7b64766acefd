//! Running commands.

use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::Command;

/// The root of the checkout.
pub fn workspace() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask lies in the workspace").to_owned()
}

/// Runs a command from the root of the checkout; an error unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    if command.get_current_dir().is_none() {
        command.current_dir(workspace());
    }
    let status = command.status().with_context(|| format!("cannot start {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Like [`run`]; output is shown only when it fails.
pub fn run_quiet(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let output = command.output().with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        bail!("{shown}: {}\n{}", output.status, String::from_utf8_lossy(&text));
    }
    Ok(())
}

/// A command's words.
pub fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
