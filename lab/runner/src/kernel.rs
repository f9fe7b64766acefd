//! The kernel that a boot file of Debian packs.
//!
//! A boot file (`bzImage`, Documentation/arch/x86/boot.rst of the kernel) is a loader around a compressed `vmlinux`, which
//! it unpacks at every boot. Under emulation, and in a guest of an emulated server, that takes longer than most of
//! the boot. QEMU can enter `vmlinux` itself, by the PVH note that Debian's kernels carry, so the lab unpacks it once.

use std::io::{self, Write};
use std::process::{Command, Stdio};

/// Where the real-mode header says how many sectors of 512 bytes follow the first; 0 means 4.
const SETUP_SECTS: usize = 0x1f1;
/// "HdrS".
const MAGIC: usize = 0x202;
const VERSION: usize = 0x206;
/// Of the compressed kernel, from the end of those sectors; since version 2.08.
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const LEAST_VERSION: u16 = 0x208;
/// What kernels are compressed with: the first bytes, and the program that unpacks it.
const PROGRAMS: [(&[u8], &str); 2] = [(b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")];

/// Why there is no `vmlinux`.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Not what the boot protocol describes.
    #[error("offset {offset:#x}: {reason}")]
    Format {
        /// Where.
        offset: usize,
        /// What is wrong there.
        reason: String,
    },
    /// The program that unpacks it.
    #[error("{program}: {reason}")]
    Unpack {
        /// Its name.
        program: &'static str,
        /// What it said.
        reason: String,
    },
}

/// The compressed kernel in a boot file, without the length at its end, and that length: of the kernel unpacked.
fn payload(file: &[u8]) -> Result<(&[u8], usize), KernelError> {
    let error = |offset, reason: &str| KernelError::Format { offset, reason: reason.into() };
    let word = |offset: usize| {
        let bytes = file.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or_else(|| error(offset, "the file ends before"))
    };
    if file.get(MAGIC..MAGIC + 4) != Some(b"HdrS") {
        return Err(error(MAGIC, "no \"HdrS\": not a boot file"));
    }
    let version = word(VERSION)? as u16;
    if version < LEAST_VERSION {
        return Err(error(VERSION, &format!("boot protocol {version:#06x}, expected at least 0x0208")));
    }
    let sectors = match file[SETUP_SECTS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (sectors + 1) * 512 + word(PAYLOAD_OFFSET)? as usize;
    let length = word(PAYLOAD_LENGTH)? as usize;
    let whole = file.get(start..start + length).ok_or_else(|| {
        error(PAYLOAD_LENGTH, &format!("{length} bytes from {start:#x} are more than the file has"))
    })?;
    let Some((packed, size)) = whole.split_last_chunk::<4>() else {
        return Err(error(PAYLOAD_LENGTH, "fewer than 4 bytes"));
    };
    Ok((packed, u32::from_le_bytes(*size) as usize))
}

/// The `vmlinux` of a boot file.
pub(crate) fn vmlinux(file: &[u8]) -> Result<Vec<u8>, KernelError> {
    let (packed, size) = payload(file)?;
    let known = PROGRAMS.iter().find(|(magic, _)| packed.starts_with(magic));
    let Some((_, program)) = known else {
        let start: Vec<String> = packed.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        let reason = format!("compressed in an unknown way, it begins with {}", start.join(" "));
        return Err(KernelError::Format { offset: PAYLOAD_OFFSET, reason });
    };
    let error = |reason: String| KernelError::Unpack { program, reason };
    let unpacked = filter(program, packed).map_err(|reason| error(reason.to_string()))?;
    if unpacked.len() != size {
        return Err(error(format!("{} bytes, the boot file promises {size}", unpacked.len())));
    }
    if !unpacked.starts_with(b"\x7fELF") {
        return Err(error("what it unpacked is no ELF file".into()));
    }
    Ok(unpacked)
}

/// Passes bytes through `program -dc`.
fn filter(program: &str, input: &[u8]) -> io::Result<Vec<u8>> {
    let mut command = Command::new(program);
    command.arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // A program that does not read its input says why by its output and status.
        scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
        child.wait_with_output()
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A boot file with one sector of setup.
    fn boot_file(packed: &[u8], size: usize) -> Vec<u8> {
        let mut file = vec![0; 1024 + 16];
        file[SETUP_SECTS] = 1;
        file[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        file[VERSION..VERSION + 2].copy_from_slice(&0x20f_u16.to_le_bytes());
        file[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16_u32.to_le_bytes());
        file[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&(packed.len() as u32 + 4).to_le_bytes());
        file.extend(packed);
        file.extend((size as u32).to_le_bytes());
        file.extend(b"what follows");
        file
    }

    fn xz(content: &[u8]) -> Vec<u8> {
        use std::io::Read;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        let mut child = Command::new("xz").arg("-c").arg(file.path()).stdout(Stdio::piped()).spawn().unwrap();
        let mut packed = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut packed).unwrap();
        assert!(child.wait().unwrap().success());
        packed
    }

    #[test]
    fn a_kernel_is_unpacked() {
        let kernel: Vec<u8> = b"\x7fELF".iter().copied().chain((0..100_000_u32).map(|n| n as u8)).collect();
        let file = boot_file(&xz(&kernel), kernel.len());
        assert!(vmlinux(&file).unwrap() == kernel);
        // Without a number of sectors there are four.
        let mut four = file.clone();
        four[SETUP_SECTS] = 0;
        four.splice(1024..1024, [0; 3 * 512]);
        assert!(vmlinux(&four).unwrap() == kernel);
    }

    #[test]
    fn what_is_no_boot_file_says_where() {
        let text = |file: &[u8]| vmlinux(file).unwrap_err().to_string();
        assert!(text(b"short").starts_with("offset 0x202: no \"HdrS\""));
        let kernel = b"\x7fELF and more";
        let mut old = boot_file(&xz(kernel), kernel.len());
        old[VERSION..VERSION + 2].copy_from_slice(&0x207_u16.to_le_bytes());
        assert!(text(&old).contains("boot protocol 0x0207"), "{}", text(&old));
        let whole = boot_file(&xz(kernel), kernel.len());
        assert!(text(&whole[..1100]).starts_with("offset 0x24c: "), "{}", text(&whole[..1100]));
        assert!(text(&boot_file(b"LZO!packed", 5)).contains("begins with 4c 5a 4f 21"));
        for promised in [7, 700] {
            let lies = text(&boot_file(&xz(kernel), promised));
            assert_eq!(lies, format!("xz: {} bytes, the boot file promises {promised}", kernel.len()));
        }
        assert!(text(&boot_file(&xz(b"no kernel"), 9)).contains("no ELF file"));
        assert!(text(&boot_file(b"\xfd7zXZ\0broken", 9)).starts_with("xz: "));
    }
}
