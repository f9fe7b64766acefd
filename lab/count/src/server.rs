//! What the server tells of its counters: the header of their region.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::{io, ptr};

use vnuma_abi_lab_counters::{Header, HeaderError, MAGIC, PAGE_SIZE};

/// Why the server has no counters.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No device has them.
    #[error("{0}: no PCI device 1af4:1110 has the lab's counters; run the server with --counters PROFILE")]
    None(PathBuf),
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not a header.
    #[error("{path}: {source}")]
    Header {
        /// The BAR.
        path: PathBuf,
        /// Why.
        source: HeaderError,
    },
}

/// Reads the header.
pub fn header() -> Result<Header, ServerError> {
    let devices = Path::new("/sys/bus/pci/devices");
    let is = |device: &Path, file: &str, id: &str| {
        fs::read_to_string(device.join(file)).is_ok_and(|text| text.trim() == id)
    };
    for entry in fs::read_dir(devices).into_iter().flatten().flatten() {
        let device = entry.path();
        if !is(&device, "vendor", "0x1af4") || !is(&device, "device", "0x1110") {
            continue;
        }
        let path = device.join("resource2");
        let page = first_page(&path).map_err(|source| ServerError::File { path: path.clone(), source })?;
        // The device id has other uses.
        if page[..8] == MAGIC.to_le_bytes() {
            return Header::from_bytes(&page).map_err(|source| ServerError::Header { path, source });
        }
    }
    Err(ServerError::None(devices.into()))
}

/// A BAR can be mapped, not read.
fn first_page(path: &Path) -> io::Result<[u8; PAGE_SIZE]> {
    use std::os::fd::AsRawFd;
    let file = File::open(path)?;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let map = unsafe {
        libc::mmap(ptr::null_mut(), PAGE_SIZE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping has that many bytes, an array of bytes may have any value, and volatile reads allow for
    // another writer.
    let page = unsafe { map.cast::<[u8; PAGE_SIZE]>().read_volatile() };
    // SAFETY: the mapping was made above and is not used any more.
    unsafe { libc::munmap(map, PAGE_SIZE) };
    Ok(page)
}
