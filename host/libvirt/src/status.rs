//! What libvirt's QEMU driver keeps of a running domain in a file: its process and the threads of its vCPUs.
//!
//! libvirt's interface tells neither. The driver writes `NAME.xml` into its state directory (`/run/libvirt/qemu` for
//! `qemu:///system`), which only root can read, whenever something of it changes, and reads it itself when it starts
//! (`qemuDomainObjPrivateXMLFormat` in src/qemu/qemu_domain.c):
//!
//! ```text
//! <domstatus state='running' reason='booted' pid='4711'>
//!   <vcpus>
//!     <vcpu id='0' pid='4716'/>
//!   </vcpus>
//!   <domain ...><uuid>...</uuid> ...
//! ```

use crate::xml::{self, Reader, SIZE_LIMIT, XmlError};
use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
};
use roxmltree::Node;
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Read},
    os::{
        fd::BorrowedFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};
use vnuma_process::text::sanitize_short;

/// Most vCPUs that are read.
const MAX_VCPUS: usize = 8192;

/// Most Unix sockets of a domain's command line that are read.
const MAX_SOCKETS: usize = 64;

/// How often it is tried to open a file below a root in which something is renamed meanwhile.
const OPENS: u32 = 8;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// The file cannot be read.
    #[error("{file}: {source}")]
    Read {
        /// The file.
        file: String,
        /// The system's error.
        source: io::Error,
    },
    /// Its owner is not one that may write it.
    #[error("{file}: it belongs to user {uid}, not to {}", writers(*.daemon))]
    Owner {
        /// The file.
        file: String,
        /// Its owner.
        uid: u32,
        /// As whom the libvirt runs, if that is known.
        daemon: Option<u32>,
    },
    /// It is a directory, a pipe or the like.
    #[error("{file}: it is no regular file")]
    Kind {
        /// The file.
        file: String,
    },
    /// It makes no sense.
    #[error("{file}: {source}")]
    Content {
        /// The file.
        file: String,
        /// What is wrong with it.
        source: XmlError,
    },
    /// No directory has a file of this domain.
    #[error(
        "domain {name}: {directories} have no file of it ({name}.xml): is it of another libvirt, or has it ended?"
    )]
    Missing {
        /// The domain.
        name: String,
        /// Where it was looked for.
        directories: String,
    },
}

/// Who may write a file.
fn writers(daemon: Option<u32>) -> String {
    match daemon {
        None | Some(0) => "root".to_owned(),
        Some(daemon) => format!("root or user {daemon}, as which its libvirt runs"),
    }
}

/// Where files are looked for, and whose are taken besides those of root and of the user of this process.
#[derive(Clone, Copy, Debug)]
pub struct StatusPlaces<'a> {
    /// Directories.
    pub directories: &'a [PathBuf],
    /// They are below this root, and its name for messages. No link leads out of it.
    pub root: Option<(BorrowedFd<'a>, &'a Path)>,
    /// As whom the libvirt runs that writes the files.
    pub daemon: Option<u32>,
}

/// A file that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundStatus {
    /// Its path, for messages.
    pub path: PathBuf,
    /// The user to whom it belongs.
    pub owner: u32,
    /// What it says.
    pub file: StatusFile,
}

/// The file of a running domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusFile {
    /// UUID of the domain, as text.
    pub uuid: String,
    /// Number of the domain with its libvirt, if it has one.
    pub id: Option<u32>,
    /// Its process.
    pub pid: i32,
    /// Threads of vCPUs by index. Those without one are left out.
    pub vcpus: BTreeMap<u32, i32>,
    /// Unix sockets on QEMU's command line that the operator added (`<qemu:commandline>`).
    pub sockets: Vec<String>,
}

impl StatusFile {
    /// The files of domains with this name and UUID, at least one: libvirts with state directories of their own may each have one.
    pub fn find(places: StatusPlaces<'_>, name: &str, uuid: &str) -> Result<Vec<FoundStatus>, StatusError> {
        let (mut files, mut problem) = (Vec::new(), None);
        // A domain's name may be any text but for slashes, which libvirt refuses.
        let usable = !name.is_empty() && !name.contains(['/', '\0']) && name != "." && name != "..";
        for directory in places.directories.iter().filter(|_| usable) {
            match Self::read(places, &directory.join(format!("{name}.xml")), name) {
                Ok(found) if found.file.uuid == uuid => files.push(found),
                Ok(_) => {}
                Err(StatusError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        if !files.is_empty() {
            return Ok(files);
        }
        let shown = |path: &PathBuf| places.shown(path).display().to_string();
        let directories: Vec<_> = places.directories.iter().map(shown).collect();
        let missing =
            StatusError::Missing { name: sanitize_short(name), directories: directories.join(", ") };
        Err(problem.unwrap_or(missing))
    }

    fn read(places: StatusPlaces<'_>, path: &Path, name: &str) -> Result<FoundStatus, StatusError> {
        let shown = places.shown(path);
        let file = || sanitize_short(&shown.display().to_string());
        let failed = |source| StatusError::Read { file: file(), source };
        let opened = places.open(path).map_err(failed)?;
        let metadata = opened.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(StatusError::Kind { file: file() });
        }
        // Its writer names threads that are moved.
        let uid = metadata.uid();
        if uid != 0 && uid != nix::unistd::geteuid().as_raw() && Some(uid) != places.daemon {
            return Err(StatusError::Owner { file: file(), uid, daemon: places.daemon });
        }
        let mut bytes = Vec::new();
        opened.take(SIZE_LIMIT as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
        let text = String::from_utf8_lossy(&bytes);
        let parsed = Self::parse(name, &text);
        let parsed = parsed.map_err(|source| StatusError::Content { file: file(), source })?;
        Ok(FoundStatus { path: shown, owner: uid, file: parsed })
    }

    /// Understands the text of a file. `name` is for messages.
    pub fn parse(name: &str, text: &str) -> Result<Self, XmlError> {
        let reader = Reader::new(name);
        let document = reader.document(text)?;
        let root = document.root_element();
        if root.tag_name().name() != "domstatus" {
            return Err(reader.missing("domstatus"));
        }
        let number = |node: Node<'_, '_>, attribute: &str| -> Result<i32, XmlError> {
            let number: i32 = reader.some_number(node, attribute)?;
            let text = number.to_string();
            if number > 0 {
                Ok(number)
            } else {
                Err(reader.value(attribute, &text, "not a number of a process"))
            }
        };
        let pid = number(root, "pid")?;
        let mut vcpus = BTreeMap::new();
        for vcpu in xml::child(root, "vcpus").into_iter().flat_map(|vcpus| xml::children(vcpus, "vcpu")) {
            let id: u32 = reader.some_number(vcpu, "id")?;
            if vcpus.len() == MAX_VCPUS {
                return Err(reader.value("vcpus", &id.to_string(), format!("more than {MAX_VCPUS} vCPUs")));
            }
            // TCG may have one thread for all; libvirt then writes no number, or 0.
            if !matches!(vcpu.attribute("pid"), None | Some("0"))
                && vcpus.insert(id, number(vcpu, "pid")?).is_some()
            {
                return Err(reader.value("vcpu id", &id.to_string(), "it is there twice"));
            }
        }
        let domain = xml::child(root, "domain").ok_or_else(|| reader.missing("domain"))?;
        let uuid = xml::child(domain, "uuid").and_then(|uuid| uuid.text()).unwrap_or_default().trim();
        if uuid.is_empty() {
            return Err(reader.missing("uuid"));
        }
        let id = reader.number(domain, "id")?;
        let arguments = xml::child(domain, "commandline").into_iter();
        let arguments = arguments.flat_map(|line| xml::children(line, "arg"));
        let sockets = arguments.filter_map(|argument| socket(argument.attribute("value")?));
        Ok(Self { uuid: uuid.to_owned(), id, pid, vcpus, sockets: sockets.take(MAX_SOCKETS).collect() })
    }
}

impl StatusPlaces<'_> {
    /// How a path is named in messages.
    fn shown(&self, path: &Path) -> PathBuf {
        let below = |(_, root): (_, &Path)| root.join(path.strip_prefix("/").unwrap_or(path));
        self.root.map_or_else(|| path.to_owned(), below)
    }

    /// Opens a file without waiting for anybody: the directory may be that of a user, who can put a pipe there.
    fn open(&self, path: &Path) -> io::Result<File> {
        let flags = OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let Some((root, _)) = self.root else {
            return OpenOptions::new().read(true).custom_flags(flags.bits()).open(path);
        };
        let how = OpenHow::new().flags(OFlag::O_RDONLY | flags);
        let how = how.resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        // Something may be renamed meanwhile.
        for _ in 1..OPENS {
            match openat2(root, path, how) {
                Err(Errno::EAGAIN) => {}
                opened => return Ok(File::from(opened?)),
            }
        }
        Ok(File::from(openat2(root, path, how)?))
    }
}

/// The path of a Unix socket in an argument of QEMU's: `unix:PATH,server=on`, or `socket,path=PATH,...`.
fn socket(argument: &str) -> Option<String> {
    let path =
        argument.strip_prefix("unix:").or_else(|| argument.split_once("path=").map(|(_, rest)| rest))?;
    let path = path.split(',').next()?;
    path.starts_with('/').then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UUID: &str = "8d2a52f4-5f6e-4a54-8b1f-6b6a0f0f6d0a";

    fn file(pid: &str, vcpus: &str, domain: &str) -> String {
        format!(
            "<!-- generated -->\n<domstatus state='running' reason='booted' pid='{pid}'>\n<vcpus>{vcpus}</vcpus>\
             <domain type='kvm' id='1' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>web</name><uuid>{UUID}</uuid>{domain}</domain></domstatus>"
        )
    }

    const TWO: &str = "<vcpu id='0' pid='4716'/><vcpu id='1' pid='4717'/>";

    #[test]
    fn process_and_threads_are_read() {
        let commandline = "<qemu:commandline><qemu:arg value='-qmp'/>\
            <qemu:arg value='unix:/run/vnuma/qmp/web.sock,server=on,wait=off'/>\
            <qemu:arg value='socket,id=m,path=/run/x.sock,server=on'/></qemu:commandline>";
        let found = StatusFile::parse("web", &file("4711", TWO, commandline)).unwrap();
        let sockets = vec!["/run/vnuma/qmp/web.sock".to_owned(), "/run/x.sock".to_owned()];
        let vcpus = BTreeMap::from([(0, 4716), (1, 4717)]);
        assert_eq!(found, StatusFile { uuid: UUID.to_owned(), id: Some(1), pid: 4711, vcpus, sockets });
        let without =
            StatusFile::parse("web", &file("4711", "<vcpu id='0' pid='0'/><vcpu id='1'/>", "")).unwrap();
        assert!(without.vcpus.is_empty());
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let refused = |text: &str| StatusFile::parse("web", text).unwrap_err().to_string();
        assert_eq!(
            refused(&file("x", TWO, "")),
            "domain web: <domstatus pid> is `x`: not a number of this kind"
        );
        assert_eq!(refused(&file("0", TWO, "")), "domain web: <pid> is `0`: not a number of a process");
        assert_eq!(refused(&file("-7", TWO, "")), "domain web: <pid> is `-7`: not a number of a process");
        let twice = "<vcpu id='1' pid='5'/><vcpu id='1' pid='6'/>";
        assert_eq!(refused(&file("1", twice, "")), "domain web: <vcpu id> is `1`: it is there twice");
        assert_eq!(refused("<domain/>"), "domain web: <domstatus> is missing");
        assert_eq!(refused("<domstatus pid='1'/>"), "domain web: <domain> is missing");
        assert_eq!(refused("<domstatus pid='1'><domain/></domstatus>"), "domain web: <uuid> is missing");
    }

    #[test]
    fn the_file_of_another_domain_of_that_name_is_not_taken() {
        let (other, right) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let directories = [other.path().to_owned(), right.path().to_owned()];
        let places = StatusPlaces { directories: &directories, root: None, daemon: None };
        let find = |name: &str| {
            let found = StatusFile::find(places, name, UUID);
            found.map(|found| found.iter().map(|found| found.file.pid).collect::<Vec<_>>())
        };
        assert!(matches!(find("web"), Err(StatusError::Missing { .. })));
        std::fs::write(other.path().join("web.xml"), file("1", "", "").replace(UUID, "another")).unwrap();
        assert!(matches!(find("web"), Err(StatusError::Missing { .. })));
        std::fs::write(right.path().join("web.xml"), file("2", "", "")).unwrap();
        assert_eq!(find("web").unwrap(), [2]);
        // That of another libvirt with the same UUID is one more.
        std::fs::write(other.path().join("web.xml"), file("3", "", "")).unwrap();
        assert_eq!(find("web").unwrap(), [3, 2]);
        assert!(matches!(find("../web"), Err(StatusError::Missing { .. })));
        std::fs::write(right.path().join("bad.xml"), "<domstatus").unwrap();
        let error = find("bad").unwrap_err().to_string();
        assert!(error.contains("bad.xml: domain bad: its XML"), "{error}");
    }

    #[test]
    fn a_file_that_its_writer_could_not_have_made_is_refused_without_waiting() {
        let place = tempfile::tempdir().unwrap();
        let directories = [place.path().to_owned()];
        let places = StatusPlaces { directories: &directories, root: None, daemon: None };
        let path = place.path().join("web.xml");
        let refused = || StatusFile::find(places, "web", UUID).unwrap_err().to_string();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(refused(), format!("{}: it is no regular file", path.display()));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(place.path().join("other"), file("1", "", "")).unwrap();
        std::os::unix::fs::symlink("other", &path).unwrap();
        assert!(refused().starts_with(&format!("{}: Too many levels of symbolic", path.display())));
    }

    #[test]
    fn a_file_belongs_to_root_or_to_the_user_of_its_libvirt() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: to give a file to another user needs root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let directories = [place.path().to_owned()];
        let path = place.path().join("web.xml");
        std::fs::write(&path, file("7", "", "")).unwrap();
        std::os::unix::fs::chown(&path, Some(107), None).unwrap();
        let find = |daemon| {
            let places = StatusPlaces { directories: &directories, root: None, daemon };
            StatusFile::find(places, "web", UUID).map(|found| (found[0].owner, found[0].file.pid))
        };
        assert_eq!(find(Some(107)).unwrap(), (107, 7));
        let refused = |daemon| find(daemon).unwrap_err().to_string();
        let whose = format!("{}: it belongs to user 107, not to root", path.display());
        assert_eq!((refused(None), refused(Some(0))), (whose.clone(), whose.clone()));
        assert_eq!(refused(Some(108)), format!("{whose} or user 108, as which its libvirt runs"));
    }

    #[test]
    fn no_link_leads_out_of_a_root() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("run/libvirt")).unwrap();
        std::fs::create_dir(root.path().join("var")).unwrap();
        std::os::unix::fs::symlink("/run", root.path().join("var/run")).unwrap();
        std::fs::write(root.path().join("run/libvirt/web.xml"), file("7", "", "")).unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("web.xml"), file("8", "", "")).unwrap();
        std::os::unix::fs::symlink(outside.path(), root.path().join("out")).unwrap();
        let opened = File::open(root.path()).unwrap();
        let find = |directory: &str| {
            let directories = [PathBuf::from(directory)];
            let root = Some((std::os::fd::AsFd::as_fd(&opened), root.path()));
            StatusFile::find(StatusPlaces { directories: &directories, root, daemon: None }, "web", UUID)
        };
        let found = find("/var/run/libvirt").unwrap();
        assert_eq!((found[0].file.pid, &found[0].path), (7, &root.path().join("var/run/libvirt/web.xml")));
        for out in ["/out", "/../../..", &outside.path().display().to_string()] {
            assert!(matches!(find(out), Err(StatusError::Missing { .. })), "{out}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(<[a-z/]{0,9} ?(pid|id)?=?'?[0-9-]{0,11}'?>|.){0,40}") {
            let _ = StatusFile::parse("web", &text);
        }
    }
}
