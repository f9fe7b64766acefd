//! Which packages have changed since `main`, and which depend on them.

use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Packages by their folders.
pub struct Changed {
    itself: BTreeSet<String>,
    /// With those above.
    dependants: BTreeSet<String>,
}

impl Changed {
    /// Since the last commit that `main` has as well, or in the last one if that is where `main` is and nothing has changed.
    pub fn of_checkout() -> Result<Self> {
        let base = git(&["merge-base", "HEAD", "main"]).unwrap_or_else(|_| "HEAD".to_owned());
        let mut files = files_since(base.trim())?;
        if files.is_empty() {
            files = files_since("HEAD~1")?;
        }
        let metadata = output("cargo", &["metadata", "--no-deps", "--offline", "--format-version", "1"])?;
        Ok(Self::of(&files, &imports(&serde_json::from_str(&metadata)?, &workspace())))
    }

    /// A file outside all packages is part of each if cargo reads it, and of xtask, which checks documents, if not.
    fn of(files: &[String], imports: &BTreeMap<String, Vec<String>>) -> Self {
        let all =
            files.iter().any(|file| ["Cargo.toml", "Cargo.lock", "clippy.toml"].contains(&file.as_str()));
        let owner = |file: &String| {
            let folders = imports.keys().filter(|&folder| Path::new(file).starts_with(folder));
            folders.max_by_key(|folder| folder.len()).cloned().unwrap_or_else(|| "xtask".to_owned())
        };
        let itself: BTreeSet<_> =
            if all { imports.keys().cloned().collect() } else { files.iter().map(owner).collect() };
        let mut dependants = itself.clone();
        loop {
            let depends = |list: &Vec<String>| list.iter().any(|folder| dependants.contains(folder));
            let more = imports.iter().filter(|(folder, list)| !dependants.contains(*folder) && depends(list));
            let more: Vec<_> = more.map(|(folder, _)| folder.clone()).collect();
            if more.is_empty() {
                return Self { itself, dependants };
            }
            dependants.extend(more);
        }
    }

    pub fn itself(&self, folder: &str) -> bool {
        self.itself.contains(folder)
    }

    /// Also true of those that have changed themselves.
    pub fn depends(&self, folder: &str) -> bool {
        self.dependants.contains(folder)
    }

    pub fn text(&self) -> String {
        let names: Vec<_> = self.itself.iter().map(String::as_str).collect();
        format!("{}; packages that depend on them: {}", names.join(", "), self.dependants.len() - names.len())
    }
}

/// What each package of the workspace imports, tests and builds included, by folders.
fn imports(metadata: &Value, workspace: &Path) -> BTreeMap<String, Vec<String>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let inside = |path: &str| Some(Path::new(path).strip_prefix(workspace).ok()?.to_str()?.to_owned());
    let of = |package: &Value| {
        let folder = inside(package["manifest_path"].as_str()?.strip_suffix("/Cargo.toml")?)?;
        let imported = list(&package["dependencies"]);
        Some((folder, imported.iter().filter_map(|one| inside(one["path"].as_str()?)).collect()))
    };
    list(&metadata["packages"]).iter().filter_map(of).collect()
}

fn files_since(commit: &str) -> Result<Vec<String>> {
    let changed = git(&["diff", "--name-only", commit])?;
    let added = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(changed.lines().chain(added.lines()).map(str::to_owned).collect())
}

/// What git prints.
pub fn git(arguments: &[&str]) -> Result<String> {
    output("git", arguments)
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).current_dir(workspace()).output().context("it starts")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {errors}", arguments.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_depends_on_a_changed_package_is_found() {
        let package = |folder: &str, imports: &[&str]| {
            let imports: Vec<_> = imports.iter().map(|one| json!({ "path": format!("/w/{one}") })).collect();
            json!({ "manifest_path": format!("/w/{folder}/Cargo.toml"), "dependencies": imports })
        };
        let metadata = json!({ "packages": [
            package("a", &[]),
            package("a/inner", &[]),
            package("b", &["a"]),
            package("c", &["b"]),
            package("d", &["a/inner"]),
        ]});
        let imports = imports(&metadata, Path::new("/w"));
        let of = |files: &[&str]| {
            let files: Vec<_> = files.iter().map(|&file| file.to_owned()).collect();
            let changed = Changed::of(&files, &imports);
            [changed.itself, changed.dependants].map(|list| list.into_iter().collect::<Vec<_>>().join(" "))
        };
        assert_eq!(of(&["a/src/lib.rs", "README.md"]), ["a xtask", "a b c xtask"]);
        assert_eq!(of(&["a/inner/x.c"]), ["a/inner", "a/inner d"]);
        assert_eq!(of(&["c/Cargo.toml"]), ["c", "c"]);
        assert_eq!(of(&["Cargo.lock"])[0], "a a/inner b c d");
    }
}
