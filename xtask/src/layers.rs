//! Who may import whom: the tables of crates/README.md against Cargo's metadata.

use crate::steps::workspace;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

/// A package: its folder, and the folders of what its product code imports.
struct Package {
    folder: String,
    imports: BTreeSet<String>,
}

fn packages() -> Vec<Package> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(workspace()).output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let root = workspace().canonicalize().expect("a checkout");
    let inside = |path: &str| {
        let path = std::path::Path::new(path).canonicalize().ok()?;
        Some(path.strip_prefix(&root).ok()?.to_str()?.to_owned())
    };
    let folder = |package: &Value| inside(package["manifest_path"].as_str()?.strip_suffix("/Cargo.toml")?);
    // Kind is null for what the product imports, and names tests' and builds' otherwise.
    let imported = |dependency: &Value| match dependency["kind"].is_null() {
        true => inside(dependency["path"].as_str()?),
        false => None,
    };
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    list(&metadata["packages"])
        .iter()
        .filter_map(|package| {
            let imports = list(&package["dependencies"]).iter().filter_map(imported).collect();
            Some(Package { folder: folder(package)?, imports })
        })
        .collect()
}

/// Rows of a table of the README, by its first cell without the link.
fn table(text: &str, heading: &str) -> BTreeMap<String, Vec<String>> {
    let from = text.find(heading).unwrap_or_else(|| panic!("no table `{heading}`"));
    let rows = text[from..].lines().skip(2).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells[0].trim_start_matches('[').split(']').next().unwrap_or_default();
        let list = cells[1].split(',').map(|name| name.trim().to_owned());
        (name.to_owned(), list.filter(|name| !name.is_empty()).collect())
    };
    rows.map(row).collect()
}

#[test]
fn nobody_imports_what_the_readme_does_not_allow() {
    let readme = fs::read_to_string(workspace().join("crates/README.md")).expect("crates/README.md");
    let crates = table(&readme, "| crate | may import |");
    let folders = table(&readme, "| folder | its product code may import |");
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for Package { folder, imports } in packages() {
        let (top, rest) = folder.split_once('/').unwrap_or((&folder, ""));
        seen.insert((top.to_owned(), rest.to_owned()));
        for import in imports {
            let (import_top, import_rest) = import.split_once('/').unwrap_or((&import, ""));
            let allowed = match (top, import_top) {
                ("crates", "crates") => crates[rest].iter().any(|name| name == import_rest),
                _ => folders.get(top).is_none_or(|tops| tops.iter().any(|name| name == import_top)),
            };
            if !allowed {
                wrong.push(format!("{folder} imports {import}"));
            }
        }
    }
    assert!(wrong.is_empty(), "crates/README.md does not allow: {wrong:?}");
    for name in crates.keys() {
        assert!(seen.contains(&("crates".to_owned(), name.clone())), "there is no crates/{name}");
    }
    let listed = seen.iter().filter(|(top, _)| top == "crates").all(|(_, name)| crates.contains_key(name));
    assert!(listed, "crates/README.md does not list every crate");
}

#[test]
fn the_table_has_no_circle() {
    let readme = fs::read_to_string(workspace().join("crates/README.md")).expect("crates/README.md");
    // Each crate stands below everything that it may import.
    let from = readme.find("| crate | may import |").expect("the table");
    let order: Vec<String> = readme[from..]
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with("| ["))
        .filter_map(|line| Some(line.strip_prefix("| [")?.split(']').next()?.to_owned()))
        .collect();
    let position = |name: &String| order.iter().position(|known| known == name);
    for (name, imports) in table(&readme, "| crate | may import |") {
        for import in imports {
            assert!(position(&import) < position(&name), "{name} stands above {import}");
        }
    }
}
