//! Commands of a document, as it shows them: `# COMMAND` is for the host, `other# COMMAND` for another one, and `guest# COMMAND` for a
//! guest, in blocks of ```` ```console ````. Other lines of such a block are what the command prints, or `...`.

use anyhow::{Context, Result, ensure};

/// Where a command belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Host,
    Other,
    Guest,
}

/// A document.
pub struct Manual<'a> {
    path: &'a str,
    text: &'a str,
}

impl<'a> Manual<'a> {
    pub fn new(path: &'a str, text: &'a str) -> Self {
        Self { path, text }
    }

    /// Its commands, without comments. A `\` at the end of a line continues it.
    pub fn commands(&self) -> Vec<(Place, String)> {
        let mut commands = Vec::new();
        for block in self.text.split("```console\n").skip(1) {
            let block = block.split("```").next().unwrap_or_default().replace("\\\n", " ");
            for line in block.lines() {
                let prompts = [("# ", Place::Host), ("other# ", Place::Other), ("guest# ", Place::Guest)];
                let found =
                    prompts.iter().find_map(|(prompt, place)| Some((*place, line.strip_prefix(prompt)?)));
                let Some((place, command)) = found else { continue };
                let command = command.split("  #").next().unwrap_or_default().trim();
                commands.push((place, command.split_whitespace().collect::<Vec<_>>().join(" ")));
            }
        }
        commands
    }

    /// Runs a command, and shows what it prints.
    pub fn play(&self, command: &str, run: impl FnOnce(&str) -> Result<String>) -> Result<()> {
        ensure!(!command.is_empty(), "{}: an empty command", self.path);
        let text = run(command).with_context(|| format!("{}: {command}", self.path))?;
        println!("{}: {command}\n{text}", self.path);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_consoles() {
        let text = "# A heading\n\n```console\n# a b  # why\nprinted\n# c \\\n    d\nguest# e\nother# f\n```\n\n```\n# no\n```\n";
        let expected = [(Place::Host, "a b"), (Place::Host, "c d"), (Place::Guest, "e"), (Place::Other, "f")];
        let expected = expected.map(|(place, command)| (place, command.to_owned()));
        assert_eq!(Manual::new("x", text).commands(), expected);
    }

    #[test]
    fn a_command_that_fails_is_named() {
        let manual = Manual::new("docs/x.md", "");
        let error = manual.play("false", |_| anyhow::bail!("it failed")).expect_err("it fails");
        assert_eq!(format!("{error:#}"), "docs/x.md: false: it failed");
    }
}
