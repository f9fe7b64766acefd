//! One call of cargo builds all programs, examples and tests with the same features, so that nothing is built twice. What runs them
//! takes the paths from here and calls no cargo.

use crate::steps::{show, workspace};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Selects everything; clippy's is the same with `--all-targets`. Features are those that all of it wants together.
pub const WORKSPACE: [&str; 3] = ["--workspace", "--all-features", "--locked"];
/// The variable that names the folder with the programs, for tests and programs that would call cargo otherwise.
pub const PROGRAMS: &str = "VNUMA_PROGRAMS";

/// A line of cargo's `--message-format=json`; other lines have other fields.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// A program of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// Of its package, in the checkout.
    pub folder: String,
    /// `lib`, the name of a program, or that of a file in `tests`.
    pub target: String,
    pub path: PathBuf,
}

/// What was built.
#[derive(Debug, Default)]
pub struct Built {
    pub tests: Vec<TestProgram>,
    programs: BTreeMap<String, PathBuf>,
}

impl Built {
    /// Builds it. cargo's own lines are shown.
    pub fn new() -> Result<Self> {
        let mut command = Command::new("cargo");
        command.arg("build").args(WORKSPACE).args(["--tests", "--bins", "--examples"]);
        command.args(["--quiet", "--message-format=json-render-diagnostics"]);
        command.current_dir(workspace()).stdin(Stdio::null()).stderr(Stdio::inherit());
        let shown = show(&command);
        let output = command.output().with_context(|| format!("cannot start {shown}"))?;
        if !output.status.success() {
            bail!("{shown}: {}", output.status);
        }
        let built = Self::of(&String::from_utf8(output.stdout)?, &workspace());
        built.link(&Self::folder())?;
        Ok(built)
    }

    /// Of cargo's messages.
    fn of(messages: &str, workspace: &Path) -> Self {
        let mut built = Self::default();
        for message in messages.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok()) {
            let Some(path) = message.executable else { continue };
            let folder = message.manifest_path.parent().unwrap_or(workspace);
            let folder = folder.strip_prefix(workspace).unwrap_or(folder).display().to_string();
            let kind = message.target.kind.first().map(String::as_str).unwrap_or_default();
            match (message.profile.test, kind) {
                (true, "test" | "bin") => {
                    built.tests.push(TestProgram { folder, target: message.target.name, path });
                }
                (true, _) => built.tests.push(TestProgram { folder, target: "lib".to_owned(), path }),
                (false, "bin" | "example") => {
                    built.programs.insert(message.target.name, path);
                }
                (false, _) => {}
            }
        }
        built
    }

    /// Where programs have their names, examples as well, and tests those of [`TestProgram::name`] with `.` for `/` and `:`.
    pub fn folder() -> PathBuf {
        workspace().join("target/test/programs")
    }

    fn link(&self, folder: &Path) -> Result<()> {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let tests = self.tests.iter().map(|test| (test.name().replace(['/', ':'], "."), &test.path));
        let programs = self.programs.iter().map(|(name, path)| (name.clone(), path));
        for (name, path) in programs.chain(tests) {
            symlink(path, folder.join(&name)).with_context(|| format!("{}: {name}", folder.display()))?;
        }
        Ok(())
    }

    /// The path of a program or an example.
    pub fn program(&self, name: &str) -> Result<&Path> {
        self.programs.get(name).map(PathBuf::as_path).with_context(|| format!("cargo has built no {name}"))
    }

    /// The tests of a package, by its folder.
    pub fn test(&self, folder: &str, target: &str) -> Result<&TestProgram> {
        let found = self.tests.iter().find(|test| test.folder == folder && test.target == target);
        found.with_context(|| format!("cargo has built no tests {folder}:{target}"))
    }
}

impl TestProgram {
    /// `host/daemon:metrics`
    pub fn name(&self) -> String {
        format!("{}:{}", self.folder, self.target)
    }

    /// What runs it as `cargo test` does: in the folder of its package.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        let folder = workspace().join(&self.folder);
        command.env("CARGO_MANIFEST_DIR", &folder).current_dir(folder);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_tests_are_told_apart() {
        let line = |kind: &str, name: &str, test: bool, executable: &str| {
            let target =
                format!("\"target\":{{\"kind\":[\"{kind}\"],\"name\":\"{name}\",\"edition\":\"2024\"}}");
            let rest = format!("\"profile\":{{\"test\":{test}}},\"executable\":{executable}");
            format!(
                "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"/w/host/a/Cargo.toml\",{target},{rest}}}\n"
            )
        };
        let messages = [
            line("lib", "vnuma_a", false, "null"),
            line("lib", "vnuma_a", true, "\"/t/a-1\""),
            line("bin", "a", false, "\"/t/a\""),
            line("bin", "a", true, "\"/t/a-2\""),
            line("test", "all", true, "\"/t/all-3\""),
            line("example", "watch", false, "\"/t/watch\""),
            "{\"reason\":\"build-finished\",\"success\":true}\n".to_owned(),
        ];
        let built = Built::of(&messages.concat(), Path::new("/w"));
        let names: Vec<_> = built.tests.iter().map(TestProgram::name).collect();
        assert_eq!(names, ["host/a:lib", "host/a:a", "host/a:all"]);
        assert_eq!(built.program("a").unwrap(), Path::new("/t/a"));
        assert_eq!(built.program("watch").unwrap(), Path::new("/t/watch"));
        assert!(built.program("all").is_err());
        assert_eq!(built.test("host/a", "all").unwrap().path, Path::new("/t/all-3"));
        let folder = tempfile::tempdir().unwrap();
        built.link(folder.path()).unwrap();
        built.link(folder.path()).unwrap();
        assert_eq!(fs::read_link(folder.path().join("host.a.all")).unwrap(), Path::new("/t/all-3"));
    }
}
