//! The recipe of the root image, `lab/image/recipe.toml`.

use crate::file_error::{FileError, file_error};
use std::path::Path;

use serde::Deserialize;
use sha2::{Digest, Sha256};

/// What the root image is made of.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub(crate) suites: Vec<String>,
    pub(crate) components: Vec<String>,
    pub(crate) packages: Vec<String>,
    pub(crate) test_packages: Vec<String>,
    pub(crate) exclude_paths: Vec<String>,
    pub(crate) kernels: Vec<KernelRecipe>,
    /// Hash of the text.
    #[serde(skip)]
    pub(crate) hash: String,
}

/// One kernel of the image.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KernelRecipe {
    pub name: String,
    pub role: Role,
    pub packages: Vec<String>,
    /// Nothing else needs it.
    #[serde(default)]
    pub tests_only: bool,
}

/// What a kernel is for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It runs the emulated server, and VMs in it.
    Server,
    /// It runs VMs only.
    Guest,
}

/// What is wrong with a recipe.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// It is no TOML, or has unknown or missing keys.
    #[error("{path}: {source}")]
    Syntax {
        /// The file.
        path: String,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value cannot be.
    #[error("{path}: {field}: {reason}")]
    Value {
        /// The file.
        path: String,
        /// The key.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

impl Recipe {
    /// Reads and checks a recipe.
    pub(crate) fn read(path: &Path) -> Result<Self, RecipeError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(file_error(path))?;
        Self::parse(&text, &name)
    }

    /// Understands the text of `path`.
    pub fn parse(text: &str, path: &str) -> Result<Self, RecipeError> {
        let mut recipe: Self = toml::from_str(text)
            .map_err(|source| RecipeError::Syntax { path: path.into(), source: source.into() })?;
        recipe.check().map_err(|(field, reason)| RecipeError::Value { path: path.into(), field, reason })?;
        recipe.hash = hash(text);
        Ok(recipe)
    }

    /// The recipe without what only tests and benchmarks need.
    #[must_use]
    pub fn without_tests(mut self) -> Self {
        self.test_packages.clear();
        self.kernels.retain(|kernel| !kernel.tests_only);
        self.hash = hash(&format!("{} without tests", self.hash));
        self
    }

    /// These strings become parts of command lines and of a sources.list.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let plain = |field, values: &[String], more: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
            match values.iter().find(|v| v.is_empty() || v.starts_with('-') || !v.chars().all(allowed)) {
                Some(value) => Err((field, format!("\"{value}\" has characters that cannot be"))),
                None => Ok(()),
            }
        };
        plain("suites", &self.suites, "-")?;
        plain("components", &self.components, "-")?;
        plain("packages", &self.packages, "+-./")?;
        plain("test_packages", &self.test_packages, "+-./")?;
        plain("exclude_paths", &self.exclude_paths, "/*-._")?;
        for kernel in &self.kernels {
            plain("kernels.name", std::slice::from_ref(&kernel.name), ".")?;
            plain("kernels.packages", &kernel.packages, "+-./")?;
        }
        if self.suites.is_empty() || self.components.is_empty() {
            return Err(("suites", "at least one suite and one component are needed".into()));
        }
        let servers = self.kernels.iter().filter(|kernel| kernel.role == Role::Server).count();
        if servers != 1 {
            return Err(("kernels", format!("{servers} have the role \"server\", expected exactly 1")));
        }
        Ok(())
    }

    /// All packages, those of the kernels included.
    pub fn all_packages(&self) -> Vec<&str> {
        let kernels = self.kernels.iter().flat_map(|kernel| &kernel.packages);
        kernels.chain(&self.packages).chain(&self.test_packages).map(String::as_str).collect()
    }
}

fn hash(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        suites = ["trixie"]
        components = ["main"]
        packages = ["gcc", "libstdc++6"]
        test_packages = ["fio"]
        exclude_paths = ["/usr/share/doc/*"]
        [[kernels]]
        name = "7.3"
        role = "server"
        packages = ["linux-base/trixie-backports"]
    "#;

    #[test]
    fn the_recipe_of_the_project_is_valid() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../image/recipe.toml");
        let recipe = Recipe::read(&path).unwrap();
        assert!(recipe.kernels.iter().any(|kernel| kernel.role == Role::Guest));
        assert_eq!(recipe.hash.len(), 16);
    }

    #[test]
    fn a_demonstration_does_without_what_tests_need() {
        let guest = "[[kernels]]\nname = \"6.1\"\nrole = \"guest\"\ntests_only = true\npackages = [\"linux-image-6.1\"]\n";
        let whole = Recipe::parse(&format!("{GOOD}{guest}"), "r").unwrap();
        assert_eq!(whole.all_packages().len(), 5);
        let small = whole.clone().without_tests();
        assert_eq!(small.all_packages(), ["linux-base/trixie-backports", "gcc", "libstdc++6"]);
        assert!(small.hash != whole.hash && small.hash.len() == 16);
    }

    #[test]
    fn the_hash_follows_the_text() {
        let one = Recipe::parse(GOOD, "r").unwrap().hash;
        assert_eq!(one, Recipe::parse(GOOD, "r").unwrap().hash);
        assert_ne!(one, Recipe::parse(&GOOD.replace("gcc", "make"), "r").unwrap().hash);
    }

    #[test]
    fn bad_recipes_are_refused_with_file_and_field() {
        let cases = [
            ("\"gcc\"", "\"--include=x\"", "r: packages: \"--include=x\""),
            ("\"gcc\"", "\"a b\"", "r: packages: \"a b\""),
            ("\"server\"", "\"guest\"", "r: kernels: 0 have the role"),
            ("[\"trixie\"]", "[]", "r: suites: at least one"),
            ("suites", "suits", "unknown field `suits`"),
            ("\"server\"", "\"king\"", "unknown variant `king`"),
        ];
        for (from, to, expected) in cases {
            let error = Recipe::parse(&GOOD.replacen(from, to, 1), "r").unwrap_err().to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
    }
}
