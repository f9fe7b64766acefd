//! Records what the policies are given, a line of JSON for each period.

use crate::{failure::Failure, replay::HEADER};
use std::{
    fs::{File, OpenOptions},
    io::{BufWriter, Write},
    path::Path,
    time::Duration,
};
use vnuma_api::{OBSERVATIONS, Observation};
use vnuma_client::{Client, Error};

/// After so long without a period vnumactl says why there may be none.
const PATIENCE: Duration = Duration::from_secs(5);

/// Records until it is interrupted, or for so many periods.
pub async fn run(client: &Client, path: &Path, periods: Option<u64>) -> Result<(), Failure> {
    let mut lines = client.record().await?;
    let mut out = create(path)?;
    let mut count = 0;
    let wanted = periods.unwrap_or(u64::MAX);
    let (hint, mut hinted) = (tokio::time::sleep(PATIENCE), false);
    tokio::pin!(hint);
    while count < wanted {
        let line = tokio::select! {
            line = lines.line() => line?,
            () = &mut hint, if count == 0 && !hinted => {
                eprintln!("vnumactl: no period yet: does any VM have a policy other than off? `observe` is enough");
                hinted = true;
                continue;
            }
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.map_err(Failure::Output)?;
                break;
            }
        };
        write(&mut out, &line, path)?;
        count += 1;
    }
    println!("{}: {count} periods", path.display());
    Ok(())
}

fn file_error(path: &Path) -> impl Fn(std::io::Error) -> Failure {
    move |source| Failure::File { path: path.to_owned(), source }
}

/// A file that is there already may be a recording that somebody wants to keep.
fn create(path: &Path) -> Result<BufWriter<File>, Failure> {
    let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(file_error(path))?;
    let mut out = BufWriter::new(file);
    writeln!(out, "{HEADER}").and_then(|()| out.flush()).map_err(file_error(path))?;
    Ok(out)
}

/// Only what can be replayed is written, and each period as soon as it is there.
fn write(out: &mut BufWriter<File>, line: &[u8], path: &Path) -> Result<(), Failure> {
    serde_json::from_slice::<Observation>(line).map_err(|error| Error::Unexpected {
        path: OBSERVATIONS.to_owned(),
        status: 200,
        reason: error.to_string(),
    })?;
    out.write_all(line).and_then(|()| out.flush()).map_err(file_error(path))
}
