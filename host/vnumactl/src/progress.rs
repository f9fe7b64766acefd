//! How far something is, on standard error: a bar on a terminal.

use crate::table::plain;
use std::io::{self, IsTerminal, Write};

/// Characters of a bar.
const WIDTH: usize = 30;

/// The line that is shown.
pub struct Progress {
    terminal: bool,
    /// Elsewhere each state gets a line.
    lines: bool,
    /// The state that was shown last.
    last: String,
}

impl Progress {
    /// `lines`: where there is no terminal, each new state is a line.
    pub fn new(lines: bool) -> Self {
        Self { terminal: io::stderr().is_terminal(), lines, last: String::new() }
    }

    /// Shows a line of [`bar`]. Errors of standard error are of no account, here and below.
    pub fn show(&mut self, state: &str, line: &str) {
        let mut out = io::stderr().lock();
        if self.terminal {
            let _ = write!(out, "\r\x1b[K{line}").and_then(|()| out.flush());
        } else if self.lines && self.last != state {
            let _ = writeln!(out, "{line}");
        }
        state.clone_into(&mut self.last);
    }

    /// Takes the bar away.
    pub fn end(&self) {
        if self.terminal {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

/// A state in a column of this width, a bar for a share from 0 to 1, and figures.
pub fn bar(state: &str, width: usize, share: f64, figures: &str) -> String {
    let full = ((share * WIDTH as f64) as usize).min(WIDTH);
    let line = format!("{}{}", "#".repeat(full), ".".repeat(WIDTH - full));
    format!("{:<width$} [{line}] {figures}", plain(state))
}
