//! Installs a package of the guest driver as apt does, in a copy of the image's tree: DKMS builds the driver for each kernel.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::{Image, ImageError};
use crate::progress::Progress;

/// `$1` the tree, `$2` the package, `$3` where modules are left, then the kernels' releases. The copy is in memory, and goes with
/// the mounts.
const SCRIPT: &str = r#"
    tree=$1 package=$2 modules=$3 root=/mnt/root
    shift 3
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir /mnt/upper /mnt/work $root
    mount -t overlay -o "lowerdir=$tree,upperdir=/mnt/upper,workdir=/mnt/work" overlay $root
    mount -t proc proc $root/proc
    cp "$package" $root/root/
    inside() { chroot $root env DEBIAN_FRONTEND=noninteractive "$@"; }
    files() { (cd $root && find etc usr var/lib/dkms lib/modules | grep -v /modules\\. | sort); }
    files > /mnt/before
    inside apt-get install --yes "/root/${package##*/}"
    alias=pci:v00001AF4d00001110sv00001AF4sd00001100bc05sc00i00
    for release; do
        # What the package of a kernel calls when that is installed.
        inside /etc/kernel/postinst.d/dkms "$release"
        inside modprobe --set-version "$release" --resolve-alias $alias | grep -qx vnuma
        found=$(inside modinfo -k "$release" --field filename vnuma)
        case $found in
        *.xz) xz -dc "$root$found" > "$modules/vnuma-$release.ko" ;;
        *) cp "$root$found" "$modules/vnuma-$release.ko" ;;
        esac
        echo "$release: $found"
    done
    inside apt-get purge --yes vnuma-guest-dkms
    files > /mnt/after
    # The keys are DKMS's own, for modules of others as well.
    diff /mnt/before /mnt/after | grep '^>' | grep -v ' var/lib/dkms/mok' && exit 1
    echo purged: nothing is left
"#;

/// Why the package could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum DkmsError {
    /// No image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The script cannot be started.
    #[error("unshare: {0}")]
    Start(#[from] io::Error),
    /// A step failed.
    #[error("{package}: {status}\n{output}")]
    Failed {
        /// The package.
        package: PathBuf,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What was said.
        output: String,
    },
}

/// Installs a package, has DKMS build its module for all kernels of the image, and purges it. The modules are left in a folder, as
/// `vnuma-RELEASE.ko`; returns what was said, and the names and releases of the kernels.
pub fn install(package: &Path, modules: &Path) -> Result<(String, Vec<(String, String)>), DkmsError> {
    let image = Image::ensure(Progress::Show)?;
    let kernels: Vec<(String, String)> =
        image.kernels().iter().map(|kernel| (kernel.name.clone(), kernel.release.clone())).collect();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", SCRIPT, "sh"]).arg(image.tree());
    command.arg(package).arg(modules).args(kernels.iter().map(|(_, release)| release));
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    let output = command.output()?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.success() {
        return Ok((text, kernels));
    }
    Err(DkmsError::Failed { package: package.to_owned(), status: output.status, output: text })
}
