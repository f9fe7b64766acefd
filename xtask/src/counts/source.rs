//! Rust files as words, without comments and tests.

/// A word or a sign, with its first and last line.
#[derive(Clone, Debug)]
pub struct Token {
    pub text: String,
    pub at: usize,
    pub end: usize,
}

/// A file without its tests.
pub struct File {
    /// From the root of the checkout.
    pub path: String,
    /// Without those of tests.
    pub lines: usize,
    pub tokens: Vec<Token>,
    /// Modules that are built for tests only and have files of their own.
    tests: Vec<String>,
}

/// A function and its lines, from its name to its last brace.
pub struct Function {
    pub name: String,
    pub at: usize,
    pub lines: usize,
}

/// The length of what starts here and is no code of one piece: a comment, a string, a character, or nothing.
fn comment_or_literal(rest: &str) -> Option<usize> {
    let until =
        |from: usize, end: &str| from + rest[from..].find(end).map_or(rest.len() - from, |at| at + end.len());
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return Some(until(2, "*/"));
    }
    let quote = rest.find(|c| !"brc".contains(c))?;
    let raw = rest[quote..].trim_start_matches('#');
    if rest[..quote].contains('r') && raw.starts_with('"') {
        let hashes = rest.len() - quote - raw.len();
        return Some(until(quote + hashes + 1, &format!("\"{}", "#".repeat(hashes))));
    }
    let ends = |sign: char| {
        let mut escaped = false;
        let end = rest[quote + 1..].char_indices().find(|(_, c)| {
            let found = *c == sign && !escaped;
            escaped = *c == '\\' && !escaped;
            found
        });
        end.map_or(rest.len(), |(at, _)| quote + at + 2)
    };
    match rest[quote..].chars().next()? {
        '"' => Some(ends('"')),
        // A lifetime has no second quote.
        '\'' if rest[quote + 1..].starts_with('\\') || rest[quote + 1..].chars().nth(1) == Some('\'') => {
            Some(ends('\''))
        }
        _ => None,
    }
}

/// Comments and literals of C are like those of Rust, so that its files can be read, too.
pub fn tokens(text: &str) -> Vec<Token> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(first) = rest.chars().next() {
        let special = comment_or_literal(rest);
        let length = special.unwrap_or_else(|| match first {
            _ if word(first) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        });
        let piece = &rest[..length];
        let end = line + piece.matches('\n').count();
        if !(first.is_whitespace() || piece.starts_with("//") || piece.starts_with("/*")) {
            found.push(Token { text: piece.to_owned(), at: line, end });
        }
        (rest, line) = (&rest[length..], end);
    }
    found
}

/// Where the bracket that opens at `at` is closed, or the end.
fn closed(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0;
    let end = tokens[at..].iter().position(|token| {
        match token.text.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    end.map_or(tokens.len() - 1, |end| at + end)
}

/// Where the body of the item that starts at `at` opens, or `;` stands in its place.
fn body(tokens: &[Token], mut at: usize) -> Option<usize> {
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            "{" | ";" => return Some(at),
            "(" | "[" => at = closed(tokens, at),
            _ => {}
        }
        at += 1;
    }
    None
}

/// The last token of the item, field or expression that starts at `at`, its attributes included.
fn item_end(tokens: &[Token], mut at: usize) -> usize {
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            "{" => {
                at = closed(tokens, at);
                // What a `use` or a value has in braces does not end it.
                if tokens.get(at + 1).is_none_or(|next| next.text != ";") {
                    return at;
                }
            }
            "(" | "[" => at = closed(tokens, at),
            ";" | "," => return at,
            "}" | ")" | "]" => return at - 1,
            // They may have commas before their bodies.
            "fn" | "impl" | "struct" | "enum" | "trait" => at = body(tokens, at).unwrap_or(at + 1) - 1,
            _ => {}
        }
        at += 1;
    }
    tokens.len() - 1
}

/// `text` is written at `at`, word by word.
fn stands(tokens: &[Token], at: usize, text: &[&str]) -> bool {
    text.iter()
        .enumerate()
        .all(|(index, word)| tokens.get(at + index).is_some_and(|token| token.text == *word))
}

impl File {
    /// `text` is what the file has at `path`.
    pub fn new(path: String, text: &str) -> Self {
        let all = tokens(text);
        let mut file = Self { path, lines: text.lines().count(), tokens: Vec::new(), tests: Vec::new() };
        let mut at = 0;
        while at < all.len() {
            let test = [
                &["#", "[", "cfg", "(", "test"][..],
                &["#", "[", "cfg", "(", "all", "(", "test"],
                &["#", "[", "test"],
            ];
            if !test.iter().any(|attribute| stands(&all, at, attribute)) {
                file.tokens.push(all[at].clone());
                at += 1;
                continue;
            }
            let end = item_end(&all, at);
            file.lines -= all[end].end + 1 - all[at].at;
            file.tests.extend(file.module_files(&all[at..=end]));
            at = end + 1;
        }
        file
    }

    /// Where the modules `mod name;` of these tokens may lie.
    fn module_files(&self, tokens: &[Token]) -> Vec<String> {
        let path =
            tokens.windows(2).find(|pair| pair[0].text == "=").map(|pair| pair[1].text.trim_matches('"'));
        let named = tokens.windows(3).filter(|words| words[0].text == "mod" && words[2].text == ";");
        named.flat_map(|words| self.module_paths(&words[1].text, path)).collect()
    }

    /// Where the module `name` may lie, whose `path` an attribute may say.
    pub fn module_paths(&self, name: &str, path: Option<&str>) -> Vec<String> {
        let (folder, file) = self.path.rsplit_once('/').unwrap_or_default();
        let inner = match file {
            _ if path.is_some() => return path.map(|path| format!("{folder}/{path}")).into_iter().collect(),
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
            file => format!("{folder}/{}", file.trim_end_matches(".rs")),
        };
        vec![format!("{inner}/{name}.rs"), format!("{inner}/{name}/mod.rs")]
    }

    /// Files of modules that are built for tests only.
    pub fn test_modules(&self) -> Vec<String> {
        self.tests.clone()
    }

    /// Those with a body.
    pub fn functions(&self) -> Vec<Function> {
        let mut found = Vec::new();
        for at in 0..self.tokens.len().saturating_sub(1) {
            let name = &self.tokens[at + 1];
            if self.tokens[at].text != "fn" || name.text == "(" {
                continue;
            }
            let Some(open) = body(&self.tokens, at) else { continue };
            if self.tokens[open].text == "{" {
                let end = self.tokens[closed(&self.tokens, open)].end;
                found.push(Function { name: name.text.clone(), at: name.at, lines: end + 1 - name.at });
            }
        }
        found
    }

    /// Names of the fields of a struct.
    pub fn fields(&self, name: &str) -> Vec<String> {
        let begin = (0..self.tokens.len()).find(|at| stands(&self.tokens, *at, &["struct", name, "{"]));
        let Some(begin) = begin.map(|at| at + 2) else { return Vec::new() };
        let inner = &self.tokens[begin + 1..closed(&self.tokens, begin)];
        inner.windows(2).filter(|pair| pair[1].text == ":").map(|pair| pair[0].text.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r##"
//! Not `fn this() {`.
pub struct Core {
    pub(crate) one: Vec<&'static str>,
    #[cfg(test)]
    seen: bool,
    two: fn(char) -> [u8; 2],
}

/* } */
fn with(open: char) -> &'static str {
    if open == '{' || open == '\'' || open == '"' {
        return r#"} " {"#;
    }
    "}\"{"
}

#[cfg(test)]
use std::{fs, io};
#[cfg(test)]
#[path = "core_tests.rs"]
mod more;
#[cfg(test)]
mod tests {
    fn long() {}
}
fn last(_: [u8; 2]) {}
"##;

    #[test]
    fn functions_fields_and_lines_are_those_without_tests() {
        let file = File::new("a/src/core.rs".to_owned(), TEXT);
        assert_eq!(file.fields("Core"), ["one", "two"]);
        let functions: Vec<_> = file.functions().into_iter().map(|f| (f.name, f.at, f.lines)).collect();
        assert_eq!(functions, [("with".to_owned(), 11, 6), ("last".to_owned(), 27, 1)]);
        assert_eq!(file.lines, 16);
        assert_eq!(file.test_modules(), ["a/src/core_tests.rs"]);
    }

    #[test]
    fn modules_lie_in_the_folder_of_their_parent() {
        let places = |path: &str| File::new(path.to_owned(), "").module_paths("b", None);
        assert_eq!(places("a/src/lib.rs"), ["a/src/b.rs", "a/src/b/mod.rs"]);
        assert_eq!(places("a/src/c.rs"), ["a/src/c/b.rs", "a/src/c/b/mod.rs"]);
    }
}
