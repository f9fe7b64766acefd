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
use roxmltree::Node;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use vnuma_process::text::sanitize_short;

/// Most vCPUs that are read.
const MAX_VCPUS: usize = 8192;

/// Most Unix sockets of a domain's command line that are read.
const MAX_SOCKETS: usize = 64;

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
    /// It belongs to neither root nor the user that this process runs as.
    #[error("{file}: it belongs to user {uid}, not to root")]
    Owner {
        /// The file.
        file: String,
        /// Its owner.
        uid: u32,
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
    pub fn find(
        directories: &[PathBuf],
        name: &str,
        uuid: &str,
    ) -> Result<Vec<(PathBuf, Self)>, StatusError> {
        let (mut files, mut problem) = (Vec::new(), None);
        // A domain's name may be any text but for slashes, which libvirt refuses.
        let usable = !name.is_empty() && !name.contains(['/', '\0']) && name != "." && name != "..";
        for directory in directories.iter().filter(|_| usable) {
            let path = directory.join(format!("{name}.xml"));
            match Self::read(&path, name) {
                Ok(found) if found.uuid == uuid => files.push((path, found)),
                Ok(_) => {}
                Err(StatusError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        if !files.is_empty() {
            return Ok(files);
        }
        let directories: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
        let missing =
            StatusError::Missing { name: sanitize_short(name), directories: directories.join(", ") };
        Err(problem.unwrap_or(missing))
    }

    fn read(path: &Path, name: &str) -> Result<Self, StatusError> {
        let file = || sanitize_short(&path.display().to_string());
        let failed = |source| StatusError::Read { file: file(), source };
        let opened = File::open(path).map_err(failed)?;
        // Whoever writes it names threads that are moved.
        let uid = opened.metadata().map_err(failed)?.uid();
        if uid != 0 && uid != nix::unistd::geteuid().as_raw() {
            return Err(StatusError::Owner { file: file(), uid });
        }
        let mut bytes = Vec::new();
        opened.take(SIZE_LIMIT as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
        let text = String::from_utf8_lossy(&bytes);
        Self::parse(name, &text).map_err(|source| StatusError::Content { file: file(), source })
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
        let find = |name: &str| {
            let found = StatusFile::find(&directories, name, UUID);
            found.map(|found| found.iter().map(|(_, file)| file.pid).collect::<Vec<_>>())
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

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(<[a-z/]{0,9} ?(pid|id)?=?'?[0-9-]{0,11}'?>|.){0,40}") {
            let _ = StatusFile::parse("web", &text);
        }
    }
}
