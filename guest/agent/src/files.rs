//! Files of `/proc` and `/sys` below a root, read up to a limit. What is in them may have been chosen by anybody.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// Longest of the short files.
const SHORT: u64 = 64 * 1024;
/// Most entries of a directory that are taken.
const ENTRIES: usize = 65_536;

/// A short file without white space at its end; `None` if it cannot be read. What is not UTF-8 is replaced.
pub fn text(path: &Path) -> Option<String> {
    read(path, SHORT).ok().map(|text| text.trim_end().to_owned())
}

/// A file up to `limit` bytes. Nothing but a regular file is read: a FIFO in a copied tree would block.
pub fn read(path: &Path, limit: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Calls `each` for the lines of a file that may be long, up to `limit` bytes of it. Of a line that is longer than `longest`
/// the rest is left out.
pub fn lines(path: &Path, limit: u64, longest: usize, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let all = |line: &[u8]| {
        each(line);
        true
    };
    lines_while(path, limit, longest, all)
}

/// As [`lines`], until `each` says that no more are wanted.
pub fn lines_while(
    path: &Path,
    limit: u64,
    longest: usize,
    mut each: impl FnMut(&[u8]) -> bool,
) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(64 * 1024, open(path)?.take(limit));
    let mut line = Vec::new();
    loop {
        let piece = reader.fill_buf()?;
        if piece.is_empty() {
            if !line.is_empty() {
                each(&line);
            }
            return Ok(());
        }
        let end = piece.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(piece.len(), |end| end + 1);
        let content = &piece[..end.unwrap_or(piece.len())];
        line.extend(&content[..content.len().min(longest.saturating_sub(line.len()))]);
        reader.consume(taken);
        if end.is_some() {
            if !each(&line) {
                return Ok(());
            }
            line.clear();
        }
    }
}

/// Names in a directory, sorted; none if it cannot be read. A name that is not UTF-8 is nothing that the kernel made.
pub fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().take(ENTRIES).flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// The last part of where a link leads.
pub fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_cut_and_long_files_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        fs::write(&path, format!("ab\n{}\n\nlast", "x".repeat(200_000))).expect("written");
        let mut seen = Vec::new();
        lines(&path, 1 << 20, 4, |line| seen.push(String::from_utf8_lossy(line).into_owned())).expect("read");
        assert_eq!(seen, ["ab", "xxxx", "", "last"]);
        seen.clear();
        lines(&path, 2, 4, |line| seen.push(String::from_utf8_lossy(line).into_owned())).expect("read");
        assert_eq!(seen, ["ab"]);
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).expect("a FIFO");
        assert!(read(&fifo, 10).is_err() && text(&fifo).is_none());
        assert_eq!(read(&path, 3).expect("read"), "ab\n");
    }
}
