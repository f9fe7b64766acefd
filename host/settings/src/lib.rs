//! A program's settings: a TOML file of the operator, read up to a limit. An error names the file, the line, the key and the value.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

use serde::de::{DeserializeOwned, Error as _};
use std::{
    fs::File,
    io::{self, Read},
    ops::RangeInclusive,
    path::{Path, PathBuf},
};
use toml::{
    Spanned,
    de::{DeTable, DeValue, Error, ValueDeserializer},
};
use vnuma_process::text::{sanitize, sanitize_short};

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
        key: String,
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

/// Reads `path` and parses it. Without a `path` it reads `default_path`, and returns the defaults if there is no such file.
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

/// Number of the line that has this byte, counted from 1.
fn line(text: &[u8], offset: usize) -> usize {
    1 + text.iter().take(offset).filter(|&&byte| byte == b'\n').count()
}

impl<'a> Source<'a> {
    /// `text` is the content of the file at `path`.
    pub fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, text }
    }

    /// Parses the file and passes its top table to `take`. A key that `take` does not ask for is an error.
    pub fn read(
        &self,
        take: impl FnOnce(&mut Table<'_>) -> Result<(), SettingsError>,
    ) -> Result<(), SettingsError> {
        let root = DeTable::parse(self.text).map_err(|error| self.unreadable(&error, 0))?;
        self.table(String::new(), root.into_inner(), take)
    }

    /// Passes a table to `take`. A key that `take` does not ask for is an error.
    fn table<'t>(
        &'t self,
        prefix: String,
        left: DeTable<'t>,
        take: impl FnOnce(&mut Table<'t>) -> Result<(), SettingsError>,
    ) -> Result<(), SettingsError> {
        let mut table = Table { source: self, prefix, left, known: Vec::new() };
        take(&mut table)?;
        let Some(key) = table.left.keys().min_by_key(|key| key.span().start) else { return Ok(()) };
        let known: Vec<String> = table.known.iter().map(|known| format!("`{known}`")).collect();
        let message = format!("unknown field `{}`, expected one of {}", key.get_ref(), known.join(", "));
        Err(self.parse_error(&message, key.span().start))
    }

    fn parse_error(&self, message: &str, at: usize) -> SettingsError {
        let line = line(self.text.as_bytes(), at);
        let message = sanitize(&message.replace('\n', " "), MESSAGE_LIMIT);
        SettingsError::Parse { path: self.path.into(), line, message }
    }

    /// A parser's error, at its own position or, if it has none, at `at`.
    fn unreadable(&self, error: &toml::de::Error, at: usize) -> SettingsError {
        self.parse_error(error.message(), error.span().map_or(at, |span| span.start))
    }
}

/// A table of a file. Each key that is read is removed from it, so that those that are left are unknown keys.
pub struct Table<'a> {
    source: &'a Source<'a>,
    /// What stands before its keys in messages.
    prefix: String,
    left: DeTable<'a>,
    /// Keys that were asked for.
    known: Vec<&'static str>,
}

impl<'a> Table<'a> {
    /// The error that names `key`, the value that was found (or a part of it), and what is accepted.
    pub fn wrong<T>(
        &self,
        key: &str,
        at: &Spanned<T>,
        value: impl Into<String>,
        expected: impl Into<String>,
    ) -> SettingsError {
        let Source { path, text } = self.source;
        SettingsError::Value {
            path: path.into(),
            line: line(text.as_bytes(), at.span().start),
            key: format!("{}{key}", self.prefix),
            value: value.into(),
            expected: expected.into(),
        }
    }

    /// What stands before its keys in messages.
    pub fn section_name(&self) -> &str {
        &self.prefix
    }

    fn remove(&mut self, key: &'static str) -> Option<Spanned<DeValue<'a>>> {
        self.known.push(key);
        self.left.remove(key)
    }

    /// The value of a key, of any type. `None`: the file does not have the key.
    pub fn given<T: DeserializeOwned>(
        &mut self,
        key: &'static str,
    ) -> Result<Option<Spanned<T>>, SettingsError> {
        let Some(value) = self.remove(key) else { return Ok(None) };
        let span = value.span();
        match T::deserialize(ValueDeserializer::from(value)) {
            Ok(value) => Ok(Some(Spanned::new(span, value))),
            Err(error) => Err(self.source.unreadable(&error, span.start)),
        }
    }

    /// Writes the value of a key to `place`, if the file has the key.
    pub fn set<T: DeserializeOwned>(
        &mut self,
        key: &'static str,
        place: &mut T,
    ) -> Result<(), SettingsError> {
        self.given(key).map(|given| given.into_iter().for_each(|given| *place = given.into_inner()))
    }

    /// Passes the table `key` of this table to `take`, if the file has it.
    pub fn section(
        &mut self,
        key: &'static str,
        take: impl FnOnce(&mut Table<'a>) -> Result<(), SettingsError>,
    ) -> Result<(), SettingsError> {
        let Some(value) = self.remove(key) else { return Ok(()) };
        let at = value.span().start;
        match value.into_inner() {
            DeValue::Table(table) => self.source.table(format!("{}{key}.", self.prefix), table, take),
            other => {
                let message = format!("invalid type: {}, expected a table", other.type_str());
                Err(self.source.parse_error(&message, at))
            }
        }
    }

    /// A number that must be in `range`, with its position in the file.
    pub fn number_at(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<Spanned<u64>>, SettingsError> {
        let Some(value) = self.given::<i64>(key)? else { return Ok(None) };
        match u64::try_from(*value.get_ref()).ok().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(Spanned::new(value.span(), number))),
            None => {
                let expected = format!("{} to {}", range.start(), range.end());
                Err(self.wrong(key, &value, value.get_ref().to_string(), expected))
            }
        }
    }

    /// Passes a number that must be in `range` to `set`, if the file has the key.
    pub fn number(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        set: impl FnOnce(u64),
    ) -> Result<(), SettingsError> {
        if let Some(given) = self.number_at(key, range)? {
            set(given.into_inner());
        }
        Ok(())
    }

    /// One of two words: true if it is the second.
    pub fn is_second(
        &mut self,
        key: &'static str,
        words: &'static [&'static str; 2],
        place: &mut bool,
    ) -> Result<(), SettingsError> {
        self.word(key, words).map(|given| given.into_iter().for_each(|at| *place = at == 1))
    }

    /// Which of these words the key has, by position.
    pub fn word(
        &mut self,
        key: &'static str,
        words: &'static [&'static str],
    ) -> Result<Option<usize>, SettingsError> {
        let Some(word) = self.given::<String>(key)? else { return Ok(None) };
        match words.iter().position(|known| known == word.get_ref()) {
            None => {
                Err(self.source.unreadable(&Error::unknown_variant(word.get_ref(), words), word.span().start))
            }
            at => Ok(at),
        }
    }

    /// An absolute path.
    pub fn path(&mut self, key: &'static str) -> Result<Option<PathBuf>, SettingsError> {
        self.given(key)?.map(|path| self.absolute(key, path)).transpose()
    }

    /// Absolute paths, at most so many.
    pub fn paths(&mut self, key: &'static str, most: usize) -> Result<Option<Vec<PathBuf>>, SettingsError> {
        let Some(paths) = self.given::<Vec<Spanned<PathBuf>>>(key)?.map(Spanned::into_inner) else {
            return Ok(None);
        };
        if let Some(extra) = paths.get(most) {
            let shown = sanitize_short(&format!("{:?}", extra.get_ref()));
            return Err(self.wrong(key, extra, shown, format!("at most {most}")));
        }
        paths.into_iter().map(|path| self.absolute(key, path)).collect::<Result<_, _>>().map(Some)
    }

    fn absolute(&self, key: &str, path: Spanned<PathBuf>) -> Result<PathBuf, SettingsError> {
        match path.get_ref().is_absolute() {
            true => Ok(path.into_inner()),
            false => Err(self.wrong(key, &path, format!("{:?}", path.get_ref()), "an absolute path")),
        }
    }
}
