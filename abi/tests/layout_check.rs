// What a C compiler makes of a header, for the layout tests of the mirrors beside it.

use std::{path::Path, process::Command};

/// The values of C integer expressions, in order, after `#include <vnuma/HEADER>`.
pub fn c_values(include: &Path, header: &str, expressions: &[String]) -> Vec<u64> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (source, program) = (directory.path().join("layout.c"), directory.path().join("layout"));
    let lines: String = expressions
        .iter()
        .map(|expression| format!("\tprintf(\"%llu\\n\", (unsigned long long)({expression}));\n"))
        .collect();
    let text = format!(
        "#include <linux/types.h>\n#include <stddef.h>\n#include <stdio.h>\n#include <vnuma/{header}>\n\nint main(void)\n{{\n{lines}\treturn 0;\n}}\n"
    );
    std::fs::write(&source, text).expect("layout.c is written");
    let compiled = Command::new("cc")
        .args(["-Wall", "-Werror", "-I"])
        .args([include, Path::new("-o"), &program, &source])
        .status()
        .expect("a C compiler `cc` (package gcc) is needed to check the layout");
    assert!(compiled.success(), "{header} does not compile");
    let output = Command::new(&program).output().expect("the program runs");
    let text = String::from_utf8(output.stdout).expect("numbers");
    text.lines().map(|line| line.parse().expect("a number")).collect()
}

/// Compares C with Rust and names every difference.
pub fn compare(include: &Path, header: &str, expected: &[(String, u64)]) {
    let expressions: Vec<_> = expected.iter().map(|(expression, _)| expression.clone()).collect();
    let found = c_values(include, header, &expressions);
    assert_eq!(found.len(), expected.len());
    let wrong: Vec<_> = expected
        .iter()
        .zip(&found)
        .filter(|((_, rust), c)| rust != *c)
        .map(|((expression, rust), c)| format!("{expression}: C {c:#x}, Rust {rust:#x}"))
        .collect();
    assert!(wrong.is_empty(), "{header} and its mirror differ:\n{}", wrong.join("\n"));
}

/// Fails when the header defines a constant that `expected` does not mention.
pub fn all_constants(include: &Path, header: &str, expected: &[(String, u64)]) {
    let text = std::fs::read_to_string(include.join("vnuma").join(header)).expect("the header");
    let missing: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("#define "))
        .filter_map(|rest| rest.split_once(char::is_whitespace))
        .map(|(name, _)| name)
        .filter(|name| !expected.iter().any(|(expression, _)| expression == name))
        .collect();
    assert!(missing.is_empty(), "{header} defines what its mirror does not have: {missing:?}");
}

/// `sizeof` of a struct and `offsetof` of its fields; the fields must fill it without a gap.
#[macro_export]
macro_rules! layout {
    ($rust:ty, $c:literal, { $($field:ident),+ $(,)? }) => {{
        fn size<T, F>(_: impl Fn(&T) -> &F) -> usize { size_of::<F>() }
        let fields = [$((offset_of!($rust, $field), size(|value: &$rust| &value.$field))),+];
        let end = fields.iter().fold(0, |end, &(offset, size)| {
            assert_eq!(offset, end, "a gap or a missing field in {}", $c);
            offset + size
        });
        assert_eq!(end, size_of::<$rust>(), "padding at the end of {}", $c);
        vec![
            (format!("sizeof(struct {})", $c), size_of::<$rust>() as u64),
            $((format!("offsetof(struct {}, {})", $c, stringify!($field)), offset_of!($rust, $field) as u64),
              (format!("sizeof(((struct {} *)0)->{})", $c, stringify!($field)),
               size(|value: &$rust| &value.$field) as u64)),+
        ]
    }};
}
