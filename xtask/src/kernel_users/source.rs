//! What calls a helper in a file of C. No parser is needed for that: braces and parentheses are enough.

use crate::counts::source::{Token, tokens};
use std::collections::BTreeMap;

/// What tells the node of a CPU, or the CPUs of a node.
pub const HELPERS: [&str; 5] =
    ["cpu_to_node", "cpu_to_mem", "numa_node_id", "numa_mem_id", "cpumask_of_node"];

/// How often a function or macro calls each helper.
pub type Calls = BTreeMap<&'static str, usize>;

/// The helper that is called at this word.
fn called(words: &[&str], at: usize) -> Option<&'static str> {
    let helper = HELPERS.into_iter().find(|helper| *helper == words[at])?;
    (words.get(at + 1) == Some(&"(")).then_some(helper)
}

/// The name of what this head defines: a function, a call of the system (`SYSCALL_DEFINE3(getcpu, ...)`) or a variable.
fn name<'a>(head: &[&'a str]) -> Option<&'a str> {
    let (mut depth, mut found) = (0, None);
    for (at, word) in head.iter().enumerate() {
        match *word {
            "=" if depth == 0 => break,
            ")" => depth -= 1,
            "(" => depth += 1,
            word if depth == 0 && head.get(at + 1) == Some(&"(") => {
                let upper = word.chars().all(|c| c == '_' || c.is_ascii_uppercase() || c.is_ascii_digit());
                // What follows parameters is an attribute.
                let attribute = at.checked_sub(1).is_some_and(|before| head[before] == ")");
                found = if upper {
                    head.get(at + 2).copied()
                } else if attribute {
                    found
                } else {
                    Some(word)
                };
            }
            _ => {}
        }
    }
    let variable = head.iter().position(|word| ["=", "["].contains(word));
    found.or_else(|| head[..variable.unwrap_or(head.len())].last().copied())
}

/// Where the directive ends that begins at this token, if one does.
fn directive(tokens: &[Token], at: usize) -> Option<usize> {
    let begins =
        tokens[at].text == "#" && at.checked_sub(1).is_none_or(|before| tokens[before].end < tokens[at].at);
    let more = |next: usize| tokens[next].at == tokens[next - 1].end || tokens[next - 1].text == "\\";
    begins.then(|| (at + 1..tokens.len()).find(|next| !more(*next)).unwrap_or(tokens.len()))
}

/// What calls which helper in a file, but for the helpers themselves.
pub fn callers(text: &str) -> BTreeMap<String, Calls> {
    let mut found = BTreeMap::<String, Calls>::new();
    let mut add = |name: Option<&str>, helper: Option<&'static str>| {
        if let (Some(name), Some(helper)) = (name.filter(|name| !HELPERS.contains(name)), helper) {
            *found.entry(name.to_owned()).or_default().entry(helper).or_default() += 1;
        }
    };
    let tokens = tokens(text);
    let words: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
    // What is open, and what was at each `#if`: its branches begin alike.
    let (mut depth, mut parentheses, mut branches) = (0, 0, Vec::new());
    let (mut head, mut function, mut at) = (Vec::new(), None, 0);
    while at < words.len() {
        if let Some(end) = directive(&tokens, at) {
            match words[at + 1..end] {
                ["define", macro_name, ..] => {
                    (at + 3..end).for_each(|at| add(Some(macro_name), called(&words, at)));
                }
                ["if" | "ifdef" | "ifndef", ..] => branches.push((depth, parentheses)),
                ["else" | "elif", ..] => {
                    (depth, parentheses) = branches.last().copied().unwrap_or_default();
                }
                ["endif", ..] => drop(branches.pop()),
                _ => {}
            }
            at = end;
            continue;
        }
        match (words[at], depth) {
            ("{", 0) => (function, depth, parentheses) = (name(&head), 1, 0),
            ("{", _) => depth += 1,
            ("}", _) => {
                depth = (depth - 1).max(0);
                head.clear();
            }
            (";", 0) if parentheses <= 0 => {
                parentheses = 0;
                head.clear();
            }
            (word, 0) => {
                parentheses += i32::from(word == "(") - i32::from(word == ")");
                head.push(word);
                // Outside of parentheses it is declared.
                if parentheses > 0 && called(&words, at).is_some() {
                    add(name(&head), called(&words, at));
                }
            }
            _ => add(function, called(&words, at)),
        }
        at += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let show = |(name, calls): (String, Calls)| {
            let calls: Vec<_> =
                calls.into_iter().map(|(helper, count)| format!("{helper} {count}")).collect();
            format!("{name}: {}", calls.join(", "))
        };
        callers(text).into_iter().map(show).collect()
    }

    #[test]
    fn heads_of_functions_have_many_forms() {
        let text = "
int first(void) { return numa_node_id(); }
static __printf(3, 0) struct worker *
second(int cpu,
       const char *format, va_list arguments)
\t__acquires(lock)
{
\tif (cpu_to_node(cpu) == cpu_to_node (0)) {
\t\tdo {
\t\t\tthird(numa_mem_id());
\t\t} while (0);
\t}
}
SYSCALL_DEFINE3(getcpu, unsigned __user *, cpup)
{
\treturn cpu_to_node(0);
}
DEFINE_FREE(unregister, struct pmu *, if (_T) end(_T))
static int __fourth(int (*callback)(int)) { return callback(cpu_to_mem(1)); }
";
        let expected = [
            "__fourth: cpu_to_mem 1",
            "first: numa_node_id 1",
            "getcpu: cpu_to_node 1",
            "second: cpu_to_node 2, numa_mem_id 1",
        ];
        assert_eq!(found(text), expected);
    }

    #[test]
    fn macros_are_callers_and_stay_apart_from_the_function_around_them() {
        let text = "
#define buffer(cpu) (struct buffer *)\t\\
\tallocate(GFP, \\
\t\t cpu_to_node(cpu))
#define numa_node_id() cpu_to_node(0)
#ifndef cpu_to_node
static void function(void)
{
# define inner(node) cpumask_of_node(node)
\tnuma_mem_id();
}
#endif
DEFINE_THING(thing, cpu_to_mem(0));
";
        let expected = [
            "buffer: cpu_to_node 1",
            "function: numa_mem_id 1",
            "inner: cpumask_of_node 1",
            "thing: cpu_to_mem 1",
        ];
        assert_eq!(found(text), expected);
    }

    #[test]
    fn definitions_comments_strings_and_other_names_are_no_calls() {
        let text = r#"
int cpu_to_node(int cpu);
static inline int numa_mem_id(void)
{
	return numa_node_id();
}
/* cpu_to_node(0) } */
static int none(void) // cpu_to_node(0) {
{
	print("cpu_to_node(%d) } \" {", early_cpu_to_node(0), '{', '\'', cpu_to_node);
#error don't call cpu_to_node(0)
	return 0;
}
static int one[] = { cpu_to_node(0) };
"#;
        assert_eq!(found(text), ["one: cpu_to_node 1"]);
    }

    #[test]
    fn branches_of_the_preprocessor_begin_alike() {
        let text = "
static int branches(void)
{
#ifdef A
\tif (a) {
#else
\tif (b) {
#endif
\t\tcpu_to_node(0);
\t}
}

static int next(void)
{
\treturn numa_node_id();
}
";
        assert_eq!(found(text), ["branches: cpu_to_node 1", "next: numa_node_id 1"]);
    }
}
