//! Records what the policies are given, a line of JSON for each period.

use crate::client::{Client, ClientError};
use http_body_util::BodyExt;
use hyper::Method;
use std::{
    fs::{File, OpenOptions},
    io::{BufWriter, Write},
    path::Path,
    time::Duration,
};
use vnuma_api::{OBSERVATIONS, Observation};

/// First line of a recording.
pub const HEADER: &str = "{\"vnuma_recording\":1}";
/// Longest line: a period of a host with 65536 vCPUs and 64 nodes is shorter.
pub const LINE_LIMIT: usize = 256 << 20;

/// Without a period for so long the operator is told why there may be none.
const PATIENCE: Duration = Duration::from_secs(5);

/// Records until it is interrupted, or for so many periods.
pub async fn run(client: &Client, path: &Path, periods: Option<u64>) -> Result<(), ClientError> {
    let mut body = client.open(Method::GET, OBSERVATIONS, String::new()).await?.into_body();
    let mut out = create(path)?;
    let mut pending = Vec::new();
    let mut count = 0;
    let wanted = periods.unwrap_or(u64::MAX);
    let (hint, mut hinted) = (tokio::time::sleep(PATIENCE), false);
    tokio::pin!(hint);
    while count < wanted {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = &mut hint, if count == 0 && !hinted => {
                eprintln!("vnumactl: no period yet: does any VM have a policy other than off? `observe` is enough");
                hinted = true;
                continue;
            }
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.map_err(ClientError::Output)?;
                break;
            }
        };
        let Some(frame) = frame else { return Err(ClientError::WatchEnded) };
        let frame = frame.map_err(|source| ClientError::Broken { path: OBSERVATIONS.to_owned(), source })?;
        pending.extend_from_slice(frame.data_ref().map_or(&[][..], |data| &data[..]));
        while let Some(end) = pending.iter().position(|&byte| byte == b'\n').filter(|_| count < wanted) {
            let line: Vec<u8> = pending.drain(..=end).collect();
            write(&mut out, &line, path)?;
            count += 1;
        }
        if pending.len() > LINE_LIMIT {
            return Err(unexpected("an endless line".to_owned()));
        }
    }
    println!("{}: {count} periods", path.display());
    Ok(())
}

fn unexpected(reason: String) -> ClientError {
    ClientError::Unexpected { path: OBSERVATIONS.to_owned(), status: 200, reason }
}

fn file_error(path: &Path) -> impl Fn(std::io::Error) -> ClientError {
    move |source| ClientError::File { path: path.to_owned(), source }
}

/// A file that is there already may be a recording that somebody wants to keep.
fn create(path: &Path) -> Result<BufWriter<File>, ClientError> {
    let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(file_error(path))?;
    let mut out = BufWriter::new(file);
    writeln!(out, "{HEADER}").and_then(|()| out.flush()).map_err(file_error(path))?;
    Ok(out)
}

/// Only what can be replayed is written, and each period as soon as it is there.
fn write(out: &mut BufWriter<File>, line: &[u8], path: &Path) -> Result<(), ClientError> {
    serde_json::from_slice::<Observation>(line).map_err(|error| unexpected(error.to_string()))?;
    out.write_all(line).and_then(|()| out.flush()).map_err(file_error(path))
}
