//! A program's settings: a TOML file of the operator, read up to a limit. An error names the file, the line, the key and the value.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

use serde::de::DeserializeOwned;
use std::{
    fs::File,
    io::{self, Read},
    ops::RangeInclusive,
    path::{Path, PathBuf},
};
use toml::Spanned;
use vnuma_process::text::sanitize;

/// Longest file, in bytes.
pub const SIZE_LIMIT: u64 = 1 << 20;
/// Longest message of the parser, in bytes. It may list all keys.
const MESSAGE_LIMIT: usize = 1000;

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// It cannot be read, or is longer than [`SIZE_LIMIT`].
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is not TOML, or has an unknown key or a value of the wrong type.
    #[error("{}: line {line}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// A value is not one of those that the key can have.
    #[error("{}: line {line}: {key} = {value}: must be {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Section and key.
        key: &'static str,
        /// What was found.
        value: String,
        /// What is accepted.
        expected: String,
    },
}

/// The text of a file, and its path for errors.
pub struct Source<'a> {
    path: &'a Path,
    text: &'a str,
}

/// Reads `path` and understands it with `parse`; without one, `default_path` if there is such a file, and the defaults if not.
pub fn load<T: Default>(
    path: Option<&Path>,
    default_path: &str,
    parse: impl FnOnce(&Path, &str) -> Result<T, SettingsError>,
) -> Result<T, SettingsError> {
    let (path, must_exist) = (path.unwrap_or(Path::new(default_path)), path.is_some());
    match read(path) {
        Ok(bytes) => match str::from_utf8(&bytes) {
            Ok(text) => parse(path, text),
            Err(error) => {
                let line = line(&bytes, error.valid_up_to());
                Err(SettingsError::Parse { path: path.into(), line, message: "not UTF-8".into() })
            }
        },
        Err(error) if !must_exist && error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(source) => Err(SettingsError::Read { path: path.into(), source }),
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path)?.take(SIZE_LIMIT + 1).read_to_end(&mut bytes)?;
    if read as u64 > SIZE_LIMIT {
        let reason = format!("longer than {SIZE_LIMIT} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(bytes)
}

/// The line of a byte, from 1.
fn line(text: &[u8], offset: usize) -> usize {
    1 + text.iter().take(offset).filter(|&&byte| byte == b'\n').count()
}

impl<'a> Source<'a> {
    /// `text` is what the file at `path` has.
    pub fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, text }
    }

    /// The content, by the types of its sections.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, SettingsError> {
        toml::from_str(self.text).map_err(|error| {
            let line = line(self.text.as_bytes(), error.span().map_or(0, |span| span.start));
            let message = sanitize(&error.message().replace('\n', " "), MESSAGE_LIMIT);
            SettingsError::Parse { path: self.path.into(), line, message }
        })
    }

    /// The error for `value`, which stands at `at`.
    pub fn value_error<T>(
        &self,
        key: &'static str,
        at: &Spanned<T>,
        value: String,
        expected: impl Into<String>,
    ) -> SettingsError {
        let line = line(self.text.as_bytes(), at.span().start);
        SettingsError::Value { path: self.path.into(), line, key, value, expected: expected.into() }
    }

    /// A number that must be in `range`; none if the key is not given.
    pub fn number(
        &self,
        key: &'static str,
        value: &Option<Spanned<i64>>,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, SettingsError> {
        let Some(value) = value else { return Ok(None) };
        let number = u64::try_from(*value.get_ref()).ok().filter(|number| range.contains(number));
        number.map(Some).ok_or_else(|| {
            let expected = format!("{} to {}", range.start(), range.end());
            self.value_error(key, value, value.get_ref().to_string(), expected)
        })
    }
}
