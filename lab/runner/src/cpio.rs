//! Writes archives of the "newc" format that the kernel unpacks as initial RAM disk
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;

/// Type bits of a mode.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive under construction, owned by root throughout.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: BTreeSet<String>,
}

impl Archive {
    /// Adds a file, and the directories above it.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.parents(path);
        self.entry(path, REGULAR | permissions, (0, 0), content);
    }

    /// Adds a symbolic link, and the directories above it.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds the node of a character device, and the directories above it.
    pub(crate) fn character_device(&mut self, path: &str, permissions: u32, major: u32, minor: u32) {
        self.parents(path);
        self.entry(path, CHARACTER_DEVICE | permissions, (major, minor), &[]);
    }

    /// The finished archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        let ends: Vec<usize> = path.match_indices('/').map(|(position, _)| position).collect();
        for end in ends {
            if self.directories.insert(path[..end].to_owned()) {
                self.entry(&path[..end], DIRECTORY | 0o755, (0, 0), &[]);
            }
        }
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        // ino, mode, uid, gid, nlink, mtime, filesize, dev major, dev minor, rdev major, rdev minor, namesize, check
        let length = content.len() as u32;
        let name_length = name.len() as u32 + 1;
        let fields = [self.entries, mode, 0, 0, links, 0, length, 0, 0, major, minor, name_length, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// busybox and the kernel are strict in the same places as this reader.
    fn names(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        let mut at = 0;
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let text = &bytes[at + 6 + 8 * n..at + 14 + 8 * n];
                u32::from_str_radix(std::str::from_utf8(text).unwrap(), 16).unwrap() as usize
            };
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = String::from_utf8(bytes[at + 110..at + 110 + name_size - 1].to_vec()).unwrap();
            let data = (at + 110 + name_size).next_multiple_of(4);
            at = (data + size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(at, bytes.len());
                return found;
            }
            found.push((name, mode as u32, bytes[data..data + size].to_vec()));
        }
    }

    #[test]
    fn entries_come_back_with_their_parents_before_them() {
        let mut archive = Archive::default();
        archive.file("a/b/c", 0o755, b"hello");
        archive.symlink("a/l", "b/c");
        archive.character_device("dev/console", 0o600, 5, 1);
        let found = names(&archive.finish());
        let expected = [
            ("a", DIRECTORY | 0o755, &b""[..]),
            ("a/b", DIRECTORY | 0o755, b""),
            ("a/b/c", REGULAR | 0o755, b"hello"),
            ("a/l", SYMLINK | 0o777, b"b/c"),
            ("dev", DIRECTORY | 0o755, b""),
            ("dev/console", CHARACTER_DEVICE | 0o600, b""),
        ];
        let expected: Vec<_> = expected.map(|(n, mode, data)| (n.to_owned(), mode, data.to_vec())).into();
        assert_eq!(found, expected);
    }

    #[test]
    fn cpio_agrees_where_it_is_installed() {
        let mut archive = Archive::default();
        archive.file("x/y", 0o644, b"123");
        let child = Command::new("cpio")
            .arg("-t")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        // A second opinion; the test above does not depend on it.
        let Ok(mut child) = child else { return };
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), &archive.finish()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "x\nx/y\n");
    }
}
