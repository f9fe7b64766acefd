//! Who may import whom: the tables of docs/layers.md against Cargo's metadata.

use crate::steps::workspace;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

/// Folders whose packages each have a row.
const LISTED: [&str; 3] = ["pure", "host", "span"];

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

fn document() -> String {
    fs::read_to_string(workspace().join("docs/layers.md")).expect("docs/layers.md")
}

/// Rows of a table of the document, by its first cell without the link.
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

/// Imports that the tables do not allow, and packages without a row.
pub fn upwards() -> Vec<String> {
    let readme = document();
    let rows = table(&readme, "| package | may import |");
    let folders = table(&readme, "| folder | its product code may import |");
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for Package { folder, imports } in packages() {
        let top = |path: &str| path.split('/').next().unwrap_or_default().to_owned();
        if LISTED.contains(&top(&folder).as_str()) && !rows.contains_key(&folder) {
            wrong.push(format!("{folder} has no row"));
        }
        for import in imports {
            let allowed = match rows.get(&folder) {
                // All may import the layouts.
                Some(row) => top(&import) == "abi" || row.contains(&import),
                None => folders.get(&top(&folder)).is_none_or(|tops| tops.contains(&top(&import))),
            };
            if !allowed {
                wrong.push(format!("{folder} imports {import}"));
            }
        }
        seen.insert(folder);
    }
    wrong.extend(rows.keys().filter(|name| !seen.contains(*name)).map(|name| format!("there is no {name}")));
    wrong
}

#[test]
fn the_table_has_no_circle() {
    let readme = document();
    // Each crate stands below everything that it may import.
    let from = readme.find("| package | may import |").expect("the table");
    let order: Vec<String> = readme[from..]
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with("| ["))
        .filter_map(|line| Some(line.strip_prefix("| [")?.split(']').next()?.to_owned()))
        .collect();
    let position = |name: &String| order.iter().position(|known| known == name);
    for (name, imports) in table(&readme, "| package | may import |") {
        for import in imports {
            assert!(position(&import) < position(&name), "{name} stands above {import}");
        }
    }
}
