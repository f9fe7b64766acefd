//! `make bench NAME=fleet`: placements on a simulated fleet.

use super::{Common, run_here};
use anyhow::Result;

/// Runs it.
pub fn run(common: &Common) -> Result<()> {
    common.has_one_form()?;
    run_here(common, "fleet", &[("vnuma-bench-fleet", "bench-fleet")], |_, _| Ok(Vec::new()))
}
