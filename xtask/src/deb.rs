//! `make deb`: Debian packages of what is built here. packaging/README.md says what is in them.

use crate::setup;
use crate::steps::{run, run_quiet, workspace};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use vnuma_lab_runner::{build_binaries, build_release_binaries};

pub const PACKAGES: &str = "packaging/host-packages.txt";
/// Programs by the package of the workspace that makes them.
const PROGRAMS: [(&str, &str); 4] = [
    ("vnumad", "vnumad"),
    ("vnumactl", "vnumactl"),
    ("scx_vnuma", "scx_vnuma"),
    ("vnuma-guest", "vnuma-guest"),
];
/// Packages with programs, and those of the workspace that these are made of.
const LINKED: [(&str, &[&str]); 2] =
    [("vnuma-host", &["vnumad", "vnumactl", "scx_vnuma"]), ("vnuma-guest", &["vnuma-guest"])];
/// Manuals that become man pages.
const MANUALS: [&str; 5] = ["vnumad", "vnumactl", "scx_vnuma", "vnuma-guest", "vnuma-run"];
/// Other documents of packages. The host's has all that messages lead to, and more.
const DOCUMENTS: [(&str, &str); 9] = [
    ("vnuma-host", "docs/first-host.md"),
    ("vnuma-host", "docs/first-guest.md"),
    ("vnuma-host", "docs/libvirt.md"),
    ("vnuma-host", "docs/memory.md"),
    ("vnuma-host", "docs/metrics.md"),
    ("vnuma-host", "docs/migration.md"),
    ("vnuma-host", "docs/policies.md"),
    ("vnuma-host", "SECURITY.md"),
    ("vnuma-run", "docs/runtimes.md"),
];
/// Shells, and where their completion of a command is looked for.
const SHELLS: [(&str, &str); 3] = [("bash", "vnumactl"), ("zsh", "_vnumactl"), ("fish", "vnumactl.fish")];

/// Where Debian has the libraries of this architecture.
const ARCHITECTURE: &str = "x86_64-linux-gnu";

#[derive(clap::Args)]
pub struct Arguments {
    /// Version of the packages, instead of that of packaging/debian/changelog
    #[arg(long, value_parser = version)]
    version: Option<String>,
    /// Pack programs as tests build them, which takes less time
    #[arg(long)]
    dev: bool,
    /// Folder to leave the packages in
    #[arg(long, value_name = "DIR", default_value = "target/deb")]
    output: PathBuf,
}

/// A version of a native package.
fn version(text: &str) -> Result<String, String> {
    let digit = text.starts_with(|first: char| first.is_ascii_digit());
    match digit && text.chars().all(|c| c.is_ascii_alphanumeric() || ".+~".contains(c)) {
        true => Ok(text.to_owned()),
        false => Err("a digit, then letters, digits, `.`, `+` and `~`".to_owned()),
    }
}

/// Makes all packages. Returns their paths.
pub fn run_all(arguments: &Arguments) -> Result<Vec<PathBuf>> {
    setup::build_packages()?;
    setup::install(&[PACKAGES])?;
    let output = workspace().join(&arguments.output);
    let work = output.join("work");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| work.display().to_string())?;
    }
    let tree = work.join("vnuma");
    make(&tree)?;
    programs(&tree, arguments.dev)?;
    println!("deb: man pages and completions");
    manuals(&tree)?;
    completions(&tree)?;
    driver(&tree)?;
    runtime(&tree)?;
    documents(&tree)?;
    let version = control_files(&tree, arguments.version.as_deref())?;
    println!("deb: packing version {version}");
    let mut pack = Command::new("dpkg-buildpackage");
    pack.args(["--build=binary", "--no-sign", "--no-check-builddeps"]).current_dir(&tree);
    // Debug symbols are as large as everything else together, and the checkout has them.
    run_quiet(pack.env("DEB_BUILD_OPTIONS", "noautodbgsym nocheck"))?;
    println!("deb: lintian");
    let changes = work.join(format!("vnuma_{version}_amd64.changes"));
    run_quiet(Command::new("lintian").args(LINTIAN).arg(&changes).current_dir(&work))?;
    clear(&output)?;
    let packages = results(&work, &output)?;
    fs::remove_dir_all(&work).with_context(|| work.display().to_string())?;
    Ok(packages)
}

/// Whatever it finds fails. Root packs in containers, as CI does.
const LINTIAN: [&str; 2] = ["--allow-root", "--fail-on=error,warning"];

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    make(to.parent().unwrap_or(to))?;
    fs::copy(from, to).map(drop).with_context(|| format!("{} to {}", from.display(), to.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    make(path.parent().unwrap_or(path))?;
    fs::write(path, text).with_context(|| path.display().to_string())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// Builds the programs. The first build shows cargo's progress, the second one says where they are.
fn programs(tree: &Path, dev: bool) -> Result<()> {
    println!("deb: building the programs");
    if !dev {
        let mut build = Command::new("cargo");
        build.args(["build", "--release", "--locked", "--workspace"]);
        run(build.args(PROGRAMS.iter().flat_map(|(_, program)| ["--bin", program])))?;
    }
    let built = if dev { build_binaries(&PROGRAMS)? } else { build_release_binaries(&PROGRAMS)? };
    for (path, (_, program)) in built.iter().zip(PROGRAMS) {
        copy(path, &tree.join("files/bin").join(program))?;
    }
    Ok(())
}

/// A manual's first line, `# NAME(SECTION): what it is`, and the rest.
fn parts(manual: &str) -> Option<(&str, &str, &str, &str)> {
    let (title, text) = manual.strip_prefix("# ")?.split_once('\n')?;
    let (page, what) = title.split_once(": ")?;
    let (name, section) = page.strip_suffix(')')?.split_once('(')?;
    Some((name, section, what, text))
}

/// What pandoc makes a man page of: the title becomes the section that man pages begin with.
fn page(manual: &str) -> Option<String> {
    let (name, section, what, text) = parts(manual)?;
    let head = format!("---\ntitle: {}\nsection: {section}\nheader: vnuma\n---\n", name.to_uppercase());
    Some(format!("{head}\n## Name\n\n{name} - {what}\n{text}"))
}

fn manuals(tree: &Path) -> Result<()> {
    for name in MANUALS {
        let path = workspace().join("docs").join(name).with_extension("md");
        let manual = read(&path)?;
        let section = parts(&manual).with_context(|| format!("{}: no NAME(SECTION): ...", path.display()))?.1;
        let source = tree.join(format!("{name}.md"));
        write(&source, &page(&manual).context("a manual")?)?;
        let target = tree.join(format!("files/man/{name}.{section}"));
        make(target.parent().context("a folder")?)?;
        let mut pandoc = Command::new("pandoc");
        pandoc.args(["--standalone", "--from=markdown-smart+lists_without_preceding_blankline", "--to=man"]);
        // Sections of a manual are below its title.
        pandoc.arg("--shift-heading-level-by=-1");
        pandoc.arg("--lua-filter").arg(workspace().join("packaging/man.lua"));
        run_quiet(pandoc.arg("--output").arg(&target).arg(&source))?;
        fs::remove_file(&source).with_context(|| source.display().to_string())?;
    }
    Ok(())
}

fn completions(tree: &Path) -> Result<()> {
    for (shell, file) in SHELLS {
        let program = tree.join("files/bin/vnumactl");
        let output = Command::new(&program).args(["completion", shell]).output();
        let output = output.with_context(|| program.display().to_string())?;
        ensure!(output.status.success(), "vnumactl completion {shell}: {}", output.status);
        let path = tree.join("files/completions").join(shell).join(file);
        write(&path, &String::from_utf8(output.stdout)?)?;
    }
    Ok(())
}

/// The driver's sources as DKMS wants them.
fn driver(tree: &Path) -> Result<()> {
    let folder = tree.join("files/driver");
    let mut make = Command::new("make");
    make.args(["--silent", "-C", "guest/driver", "dkms-tree"]).arg(format!("DESTDIR={}", folder.display()));
    run_quiet(make.current_dir(workspace()))?;
    for file in ["dkms.conf", "README.md"] {
        copy(&workspace().join("guest/driver").join(file), &folder.join(file))?;
    }
    Ok(())
}

/// libvnuma, the overlays of libnuma and vnuma-run, built and installed in a folder.
fn runtime(tree: &Path) -> Result<()> {
    let folder = tree.join("files/runtime");
    let mut make = Command::new("make");
    make.args(["--silent", "-C", "guest/runtime", "install", "PREFIX=/usr"]);
    // Of its own: what `make check` built there has other paths in it.
    make.arg(format!("BUILD={}", tree.join("runtime").display()));
    make.args([format!("LIBDIR=/usr/lib/{ARCHITECTURE}"), format!("DESTDIR={}", folder.display())]);
    make.env("LDFLAGS", "-Wl,-z,relro,-z,now")
        .env("CFLAGS", "-O2 -g -Wall -Wextra -fstack-protector-strong -D_FORTIFY_SOURCE=2");
    run_quiet(make.current_dir(workspace()))
}

fn documents(tree: &Path) -> Result<()> {
    let files = tree.join("files");
    for (package, path) in DOCUMENTS {
        let name = Path::new(path).file_name().context("a file")?;
        copy(&workspace().join(path), &files.join("doc").join(package).join(name))?;
    }
    for path in ["packaging/vnumad.toml", "packaging/grafana/vnuma-dashboard.json"] {
        let name = Path::new(path).file_name().context("a file")?;
        copy(&workspace().join(path), &files.join(name))?;
    }
    copy(&workspace().join("packaging/apparmor/vnuma"), &files.join("apparmor/vnuma"))?;
    for (package, roots) in LINKED {
        write(&files.join(package).join("third-party.txt"), &third_party(roots)?)?;
    }
    Ok(())
}

/// Libraries of others that programs contain, with their licences.
fn third_party(roots: &[&str]) -> Result<String> {
    let mut tree = Command::new("cargo");
    tree.args([
        "tree",
        "--locked",
        "--offline",
        "--edges=normal,no-proc-macro",
        "--prefix=none",
        "--no-dedupe",
    ]);
    tree.args(["--target=x86_64-unknown-linux-gnu", "--format={p}\t{l}\t{r}"]);
    tree.args(roots.iter().flat_map(|root| ["--package", root])).current_dir(workspace());
    let output = tree.output().context("cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let mut crates = BTreeMap::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [package, licence, repository] = fields[..] else { continue };
        // Those of the workspace have a path.
        if !package.contains('/') {
            crates.insert(package.to_owned(), format!("{licence}\t{repository}"));
        }
    }
    ensure!(!crates.is_empty(), "cargo tree names no crate of {roots:?}");
    let mut list = "Libraries of others in these programs: name and version, licence, source.\n\n".to_owned();
    list.extend(crates.iter().map(|(package, rest)| format!("{package}\t{rest}\n")));
    Ok(list)
}

/// Debian's files, with another version if one is wanted. Returns the version.
fn control_files(tree: &Path, wanted: Option<&str>) -> Result<String> {
    let debian = tree.join("debian");
    let mut folders = vec![(workspace().join("packaging/debian"), debian.clone())];
    while let Some((from, to)) = folders.pop() {
        for entry in fs::read_dir(&from).with_context(|| from.display().to_string())? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => folders.push((entry.path(), to.join(entry.file_name()))),
                false => copy(&entry.path(), &to.join(entry.file_name()))?,
            }
        }
    }
    let unit = workspace().join("guest/agent/systemd/vnuma-guest.service");
    copy(&unit, &debian.join("vnuma-guest.service"))?;
    fs::set_permissions(debian.join("rules"), fs::Permissions::from_mode(0o755))?;
    let changelog = debian.join("changelog");
    let text = read(&changelog)?;
    let own = text.split(['(', ')']).nth(1).context("packaging/debian/changelog has no version")?;
    let version = wanted.unwrap_or(own).to_owned();
    write(&changelog, &text.replacen(&format!("({own})"), &format!("({version})"), 1))?;
    Ok(version)
}

/// Removes packages of earlier runs.
fn clear(output: &Path) -> Result<()> {
    for entry in fs::read_dir(output).with_context(|| output.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

/// Moves the packages out of the folder of work.
fn results(work: &Path, output: &Path) -> Result<Vec<PathBuf>> {
    let mut packages = Vec::new();
    for entry in fs::read_dir(work).with_context(|| work.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            let to = output.join(path.file_name().context("a file")?);
            fs::rename(&path, &to).with_context(|| to.display().to_string())?;
            packages.push(to);
        }
    }
    packages.sort();
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_manual_begins_as_man_pages_do() {
        let manual = "# vnumad(8): publishes\n\n## Synopsis\n\n    vnumad\n";
        assert_eq!(
            page(manual).expect("a manual"),
            "---\ntitle: VNUMAD\nsection: 8\nheader: vnuma\n---\n\n## Name\n\nvnumad - publishes\n\n\
             ## Synopsis\n\n    vnumad\n"
        );
        assert_eq!(page("# Scheduling policies\n\nText.\n"), None);
    }

    /// systemd's filter of the first refuses SCHED_EXT, which scx_vnuma's vCPUs have, that of the second openat2(2).
    #[test]
    fn the_sandbox_of_vnumad_refuses_no_call_that_it_makes() {
        let unit = read(&workspace().join("packaging/debian/vnuma-host.vnumad.service")).expect("a unit");
        for option in ["RestrictRealtime=", "RestrictSUIDSGID="] {
            assert!(unit.lines().all(|line| !line.starts_with(option)), "{option}");
        }
    }

    #[test]
    fn every_manual_can_be_one() {
        for name in MANUALS {
            let manual = read(&workspace().join("docs").join(name).with_extension("md")).expect("a file");
            assert_eq!(parts(&manual).expect("a title").0, name);
        }
    }

    /// Paths of documents in code, without comments, and without what tests include.
    fn documents_in(code: &str) -> BTreeSet<String> {
        let lines = code.lines().map(str::trim_start);
        let lines = lines.filter(|line| !line.starts_with("//") && !line.contains("include_str!"));
        let after = lines.flat_map(|line| line.split("docs/").skip(1));
        let names = after.filter_map(|rest| rest.split_once(".md").map(|(name, _)| name));
        let plain = |name: &&str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        names.filter(plain).map(|name| format!("docs/{name}.md")).collect()
    }

    /// What the programs of the packages say, as their sources and those of their libraries have it.
    fn named_in_messages() -> BTreeMap<String, BTreeSet<String>> {
        let mut folders: Vec<_> = ["pure", "host", "guest/agent/src"].map(PathBuf::from).into();
        let mut named = BTreeMap::<String, BTreeSet<String>>::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(workspace().join(&folder)).expect("a folder") {
                let entry = entry.expect("an entry");
                let path = folder.join(entry.file_name());
                if entry.file_type().expect("a type").is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    for document in documents_in(&read(&workspace().join(&path)).expect("text")) {
                        named.entry(document).or_default().insert(path.display().to_string());
                    }
                }
            }
        }
        named
    }

    #[test]
    fn every_document_that_a_message_names_is_in_a_package() {
        let line = "//! docs/a.md\n  \"see docs/b-c.md#d) and docs/e.md\"\n include_str!(\"docs/f.md\")\n";
        let found: Vec<_> = documents_in(line).into_iter().collect();
        assert_eq!(found, ["docs/b-c.md", "docs/e.md"]);
        let named = named_in_messages();
        assert!(named.len() >= 3, "messages were not found: {named:?}");
        let packed = |document: &&String| {
            let manual = MANUALS.iter().any(|name| **document == format!("docs/{name}.md"));
            manual || DOCUMENTS.iter().any(|(package, path)| *package == "vnuma-host" && path == document)
        };
        let missing: Vec<_> = named.iter().filter(|(document, _)| !packed(document)).collect();
        assert!(missing.is_empty(), "no package has what messages lead to: {missing:?}");
    }

    /// Man pages say where the packages have them. debhelper compresses those that are large.
    #[test]
    fn man_pages_name_the_documents_of_the_packages() {
        let filter = read(&workspace().join("packaging/man.lua")).expect("a file");
        let list = filter.split("local documents = {").nth(1).expect("a list").split('}').next();
        let entries = list.expect("its end").split(',').filter_map(|entry| entry.split_once('='));
        let bare = |text: &str| text.trim().trim_matches(['[', ']', '"']).to_owned();
        let listed: BTreeSet<_> = entries.map(|(name, end)| bare(name) + &bare(end)).collect();
        let shipped = |(package, path): (&str, &str)| {
            let size = fs::metadata(workspace().join(path)).expect("a file").len();
            let file = path.strip_prefix("docs/")?;
            let name = file.strip_suffix(".md")?;
            Some(format!("{name}{package}/{file}{}", if size > 4096 { ".gz" } else { "" }))
        };
        assert_eq!(listed, DOCUMENTS.into_iter().filter_map(shipped).collect());
    }

    #[test]
    fn versions_are_those_of_native_packages() {
        for good in ["0.1.0", "0.1.0~1", "1+b2"] {
            assert_eq!(version(good), Ok(good.to_owned()));
        }
        for bad in ["", "v1", "1-2", "1/2", "1 2", "../1"] {
            assert!(version(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn packages_have_the_version_of_the_workspace() {
        let changelog = read(&workspace().join("packaging/debian/changelog")).expect("a file");
        assert!(changelog.starts_with(&format!("vnuma ({}) ", env!("CARGO_PKG_VERSION"))), "{changelog}");
    }
}
