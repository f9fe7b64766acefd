//! Errors that programs make, beside the list of errors in their manual.

/// What stands for something else in a manual's error.
const PLACEHOLDERS: [&str; 8] = ["COMMAND", "NAME", "N", "M", "PATH", "FILE", "SOCKET", "..."];

/// The errors that a manual describes: each term below its heading `Errors`.
fn described(manual: &str) -> Vec<&str> {
    let (_, rest) = manual.split_once("\n## Errors\n").expect("a section of errors");
    let terms = rest.lines().take_while(|line| !line.starts_with("## ")).filter(|line| line.starts_with('`'));
    // One or more, separated by commas; a remark in brackets may follow.
    let errors = terms.flat_map(|line| line.split("` (").next().unwrap_or_default().split("`, "));
    errors.map(|error| error.trim_matches('`')).collect()
}

/// Whether `text` begins with what a manual's error says, with something for each placeholder.
fn fits(error: &str, mut text: &str) -> bool {
    let mut any = false;
    for word in error.replace("...", "\0...\0").split_inclusive(|c: char| !c.is_alphanumeric() && c != '.') {
        for part in word.split('\0').filter(|part| !part.is_empty()) {
            let name = part.trim_end_matches(|c: char| !c.is_alphanumeric() && c != '.');
            let (literal, placeholder) = match PLACEHOLDERS.contains(&name) {
                true => (&part[name.len()..], true),
                false => (part, false),
            };
            any |= placeholder;
            match text.find(literal) {
                Some(at) if at == 0 || any => text = &text[at + literal.len()..],
                _ => return false,
            }
            any &= literal.is_empty();
        }
    }
    true
}

/// Each error of the manual is one of `made`, and the manual describes each of those.
pub fn compare(manual: &str, made: &[String]) {
    let described = described(manual);
    for error in &described {
        assert!(made.iter().any(|text| fits(error, text)), "no error is like {error:?}: {made:#?}");
    }
    for text in made {
        assert!(described.iter().any(|error| fits(error, text)), "not in the manual: {text}");
    }
}
