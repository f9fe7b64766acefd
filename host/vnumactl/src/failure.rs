//! Why the program has failed.

use std::{io, path::PathBuf};
use vnuma_client::Error;

/// Why it has failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// vnumad did not do what was asked for.
    #[error("{}{}", .0, remedy(.0))]
    Client(#[from] Error),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Replay { path: PathBuf, source: crate::replay::ReplayError },
    #[error("{0}")]
    Calibrate(crate::calibrate::CalibrateError),
    #[error("setup --apply needs root")]
    SetupRights,
    #[error("{0} of what was to be done failed")]
    SetupFailed(usize),
    #[error("{vm}: guest node {guest_node} did not get its home on node {node}")]
    Rehome { vm: String, guest_node: u32, node: u32 },
    #[error("{vm}: guest node {guest_node} did not get the size that was wanted")]
    Resize { vm: String, guest_node: u32 },
    #[error("{vm}: it did not migrate to {destination}")]
    Migration { vm: String, destination: String },
    #[error("writing the output: {0}")]
    Output(io::Error),
}

fn remedy(error: &Error) -> &'static str {
    match error {
        Error::Unreachable { .. } => {
            "\nIs it running? Start it with `vnumad` (as root), or name its socket with --socket."
        }
        _ => "",
    }
}
