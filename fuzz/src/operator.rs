//! What operators write, and what they are shown.

use crate::{expect_line, expect_plain};
use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path, time::Duration};
use vnuma_daemon::Config;
use vnuma_policy::scheduling::Policy;
use vnumactl::{Answer, replay};

/// What was accepted is in its range; a refusal names the file and a line that it has.
pub fn config(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Config::parse(Path::new("/etc/x.toml"), &text) {
        Ok(config) => {
            let paths = [&config.socket, &config.root, &config.records];
            let more = config.directory.iter().chain(&config.sockets);
            assert!(paths.into_iter().chain(more).all(|path| path.is_absolute()), "{config:?}");
            let millis = Duration::from_millis;
            assert!((millis(10)..=millis(10_000)).contains(&config.poll_interval), "{config:?}");
            assert!((millis(1000)..=millis(60_000)).contains(&config.resync_interval), "{config:?}");
            assert!((1..=1000).contains(&config.settle.max_per_second), "{config:?}");
            assert!((millis(100)..=millis(60_000)).contains(&config.policy_period), "{config:?}");
            assert!(config.settle.dwell_ns <= 60_000_000_000, "{config:?}");
        }
        Err(error) => expect_line(&error.to_string(), &text),
    }
}

/// Words are separated by line breaks. Whatever they are: understood, or refused with usage.
pub fn arguments(input: &[u8]) {
    let words = input.split(|&byte| byte == b'\n').map(|word| OsStr::from_bytes(word).to_owned());
    if let Err(error) = vnumactl::read_arguments(std::iter::once("vnumactl".into()).chain(words)) {
        assert!([0, 2].contains(&error.exit_code()), "{error:?}");
        assert!(!error.to_string().trim().is_empty(), "{error:?}");
    }
}

/// The first line says what was asked. What is printed leaves the terminal alone.
pub fn answer(input: &[u8]) {
    let end = input.iter().position(|&byte| byte == b'\n').unwrap_or(input.len());
    let (kind, body) = (&input[..end], input.get(end + 1..).unwrap_or_default());
    let kind = match kind {
        b"hardware" => Answer::Hardware,
        b"devices" => Answer::Devices,
        b"capacity" => Answer::Capacity,
        b"list" => Answer::List,
        b"show" => Answer::Show,
        b"daemon" => Answer::Daemon,
        b"doctor" => Answer::Doctor,
        b"event" => Answer::Event,
        b"placed" => Answer::Placed,
        b"reservations" => Answer::Reservations,
        b"policies" => Answer::Policies,
        b"policy" => Answer::Policy,
        b"memory" => Answer::Memory,
        b"rehome" => Answer::Rehome,
        b"sizes" => Answer::Sizes,
        b"recording" => {
            // Of any content, for any policy; it is refused, or replayed.
            let policy = Policy::ALL[input.len() % Policy::ALL.len()];
            return match replay::read(body, policy) {
                Ok(replayed) => replay::text(&replayed).split('\n').for_each(expect_plain),
                Err(reason) => expect_plain(&reason.to_string()),
            };
        }
        _ => Answer::Error,
    };
    match kind.print(body) {
        Ok(text) => text.split('\n').for_each(expect_plain),
        Err(reason) => reason.split('\n').for_each(expect_plain),
    }
}
