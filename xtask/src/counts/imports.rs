//! Which file of a crate takes something from which, and the circles of that.
//!
//! All paths that begin with `crate`, `self` or `super` count, in a `use` or in the code. They are followed through what
//! a module hands on (`pub use`) to the file that defines it. That a module names its own children is no import.

use super::source::{File, Token};
use std::collections::{BTreeMap, BTreeSet};

/// A path as it is written.
type Path = Vec<String>;

/// What is known of a module, which may be a part of a file.
#[derive(Default)]
struct Module {
    file: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// What a `use` makes known here, by its name here.
    names: BTreeMap<String, Path>,
    /// What the code takes from elsewhere in the crate, `use` included.
    paths: Vec<Path>,
}

/// The modules of a crate; the first is its root.
struct Crate<'a> {
    files: &'a BTreeMap<&'a str, &'a File>,
    modules: Vec<Module>,
}

/// The path that begins here.
fn written(tokens: &[Token]) -> Path {
    let name = |word: &str| word.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let more = |at: &usize| *at == 0 || tokens[*at - 1].text == "::";
    let words = (0..tokens.len()).step_by(2).take_while(more).map(|at| tokens[at].text.clone());
    words.take_while(|word| name(word)).collect()
}

/// Paths of a tree `a::{b, c as d}` that starts at `at`, with the name that each gets, and where the tree ends.
fn use_tree(tokens: &[Token], mut at: usize, before: &[String], found: &mut Vec<(Path, String)>) -> usize {
    let mut path = before.to_vec();
    let mut name = None;
    while let Some(token) = tokens.get(at) {
        match token.text.as_str() {
            "::" => {}
            "as" => {
                at += 1;
                name = tokens.get(at).map(|token| token.text.clone());
            }
            "{" => loop {
                at = use_tree(tokens, at + 1, &path, found);
                if tokens.get(at).is_none_or(|token| token.text != ",") {
                    return at + 1;
                }
            },
            "self" if !before.is_empty() => {}
            "," | "}" | ";" => break,
            word => path.push(word.to_owned()),
        }
        at += 1;
    }
    let last = path.last().cloned().unwrap_or_default();
    found.push((path, name.unwrap_or(last)));
    at
}

impl Crate<'_> {
    /// Reads a file and those of its modules, below `parent`.
    fn read(&mut self, file: &File, parent: Option<usize>) -> usize {
        let module = self.add(&file.path, parent);
        // The modules that are open here, and at which depth of braces they began.
        let mut open = vec![(module, 0)];
        let (mut depth, mut at) = (0, 0);
        while let Some(token) = file.tokens.get(at) {
            let here = open.last().expect("the file's own module").0;
            let next = |ahead: usize| file.tokens.get(at + ahead).map_or("", |token| token.text.as_str());
            match token.text.as_str() {
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    open.retain(|(_, began)| *began <= depth);
                }
                "mod" if next(2) == ";" => {
                    let declared = at.checked_sub(3).map(|at| &file.tokens[at..]);
                    let path = declared.filter(|tokens| tokens[0].text == "=" && tokens[2].text == "]");
                    let places =
                        file.module_paths(next(1), path.map(|tokens| tokens[1].text.trim_matches('"')));
                    if let Some(found) = places.iter().find_map(|place| self.files.get(place.as_str())) {
                        let child = self.read(found, Some(here));
                        self.modules[here].children.insert(next(1).to_owned(), child);
                    }
                }
                "mod" if next(2) == "{" => {
                    let child = self.add(&file.path, Some(here));
                    self.modules[here].children.insert(next(1).to_owned(), child);
                    depth += 1;
                    open.push((child, depth));
                    at += 2;
                }
                "use" if next(1) != "<" => {
                    let mut found = Vec::new();
                    at = use_tree(&file.tokens, at + 1, &[], &mut found);
                    self.modules[here].take(found);
                }
                "crate" | "self" | "super" if next(1) == "::" => {
                    let path = written(&file.tokens[at..]);
                    at += 2 * path.len() - 2;
                    self.modules[here].paths.push(path);
                }
                _ => {}
            }
            at += 1;
        }
        module
    }

    fn add(&mut self, file: &str, parent: Option<usize>) -> usize {
        self.modules.push(Module { file: file.to_owned(), parent, ..Module::default() });
        self.modules.len() - 1
    }

    /// The module that has what `path` names as seen from `from`, if it is one of the crate. `depth` bounds what is
    /// followed, as names may lead back to themselves.
    fn owner(&self, from: usize, path: &[String], depth: usize) -> Option<usize> {
        let (first, rest) = path.split_first()?;
        let depth = depth.checked_sub(1)?;
        let module = &self.modules[from];
        match first.as_str() {
            "crate" => self.inside(0, rest, depth),
            "self" => self.inside(from, rest, depth),
            "super" => self.inside(module.parent?, rest, depth),
            name if module.children.contains_key(name) || module.names.contains_key(name) => {
                self.inside(from, path, depth)
            }
            _ => None,
        }
    }

    fn inside(&self, module: usize, path: &[String], depth: usize) -> Option<usize> {
        let Some((first, rest)) = path.split_first() else { return Some(module) };
        let depth = depth.checked_sub(1)?;
        let known = &self.modules[module];
        if first == "super" {
            return self.inside(known.parent?, rest, depth);
        }
        if let Some(child) = known.children.get(first) {
            return self.inside(*child, rest, depth);
        }
        if let Some(named) = known.names.get(first) {
            let path: Path = named.iter().chain(rest).cloned().collect();
            return self.owner(module, &path, depth);
        }
        Some(module)
    }

    /// Each file with those that it takes something from.
    fn imports(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (index, module) in self.modules.iter().enumerate() {
            let of = imports.entry(&module.file).or_default();
            let owners = module.paths.iter().filter_map(|path| self.owner(index, path, 20));
            of.extend(
                owners.map(|owner| self.modules[owner].file.as_str()).filter(|file| *file != module.file),
            );
        }
        imports
    }
}

impl Module {
    fn take(&mut self, found: Vec<(Path, String)>) {
        for (mut path, name) in found {
            path.retain(|word| word != "*");
            if ["crate", "self", "super"].contains(&path[0].as_str()) {
                self.paths.push(path.clone());
            }
            // A crate of that name would be followed to itself.
            if path.as_slice() != [name.clone()] {
                self.names.insert(name, path);
            }
        }
    }
}

/// Everything that can be reached from `from`.
fn reached<'a>(imports: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(file) = next.pop() {
        next.extend(imports.get(file).into_iter().flatten().filter(|to| found.insert(**to)));
    }
    found
}

/// A circle, and who takes something from whom in it.
fn shown(circle: &BTreeSet<&str>, imports: &BTreeMap<&str, BTreeSet<&str>>) -> String {
    let inside = |file: &&str| imports[file].intersection(circle).copied().collect::<Vec<_>>().join(" ");
    let lines = circle.iter().map(|file| format!("\n    {file} -> {}", inside(file)));
    format!("{} files{}", circle.len(), lines.collect::<String>())
}

/// Circles of imports between files of one crate: files of which each reaches all others.
pub fn circles(files: &[File]) -> Vec<String> {
    let by_path: BTreeMap<&str, &File> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let root = |file: &&File| file.path.ends_with("/lib.rs") || file.path.ends_with("/main.rs");
    let mut circles = Vec::new();
    for root in files.iter().filter(root) {
        let mut tree = Crate { files: &by_path, modules: Vec::new() };
        tree.read(root, None);
        let imports = tree.imports();
        let reach: BTreeMap<&str, BTreeSet<&str>> =
            imports.keys().map(|file| (*file, reached(&imports, file))).collect();
        let with = |(file, ahead): (&&str, &BTreeSet<&'_ str>)| -> BTreeSet<String> {
            let back = ahead.iter().filter(|other| reach[*other].contains(*file));
            back.map(|other| (*other).to_owned()).collect()
        };
        let found: BTreeSet<BTreeSet<String>> =
            reach.iter().map(with).filter(|circle| !circle.is_empty()).collect();
        let found = found.iter().map(|circle| circle.iter().map(String::as_str).collect());
        circles.extend(found.map(|circle| shown(&circle, &imports)));
    }
    circles
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<File> =
            files.iter().map(|(path, text)| File::new(format!("a/src/{path}"), text)).collect();
        circles(&files)
    }

    #[test]
    fn files_that_import_each_other_are_a_circle() {
        let root = ("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::Handed;");
        let b = ("b/mod.rs", "pub struct Handed(super::a::A);");
        // However it is written.
        for import in
            ["use crate::b::Handed;", "use super::{c::C, b::{self, Handed}};", "use crate::Handed as H;"]
        {
            let files = [root, ("a.rs", import), b, ("c.rs", "pub struct C;")];
            assert_eq!(
                found(&files),
                ["2 files\n    a/src/a.rs -> a/src/b/mod.rs\n    a/src/b/mod.rs -> a/src/a.rs"]
            );
        }
        let inner = ("a.rs", "mod inner { fn f() { super::super::b::g() } }");
        assert_eq!(found(&[root, inner, b]).len(), 1);
    }

    #[test]
    fn children_tests_and_comments_tie_nothing() {
        let root = ("lib.rs", "mod a;\nmod b;\nuse b::B;\npub struct Root;");
        let a = (
            "a.rs",
            "// crate::b::B\nconst A: &str = \"crate::b\";\n#[cfg(test)]\nmod tests { use crate::b::B; }",
        );
        let b = ("b.rs", "use crate::Root;\nuse crate::a;\nuse std::a as crates;");
        assert_eq!(found(&[root, a, b]), Vec::<String>::new());
    }
}
