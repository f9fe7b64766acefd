//! Progress of long steps: a bar on a terminal, else a line every few seconds. Both go to stderr, as
//! stdout belongs to the command that runs in the lab.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is printed where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Whether progress is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// A bar on a terminal, else lines.
    #[default]
    Show,
    /// Nothing is shown.
    Silent,
}

/// A long step under way.
pub(crate) struct Meter {
    bar: Option<ProgressBar>,
    show: bool,
    title: String,
    step: (u64, u64),
    message: String,
    started: Instant,
    printed: Instant,
}

impl Meter {
    /// Begins a long step of `steps` parts.
    pub(crate) fn new(progress: Progress, title: &str, steps: u64) -> Self {
        let show = progress == Progress::Show;
        let terminal = show && std::io::IsTerminal::is_terminal(&std::io::stderr());
        let bar = terminal.then(|| {
            let bar = ProgressBar::new(steps);
            let style = ProgressStyle::with_template("{prefix} [{bar:24}] {elapsed} {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(title.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        let now = Instant::now();
        if show && !terminal {
            eprintln!("{title} ...");
        }
        let (title, message) = (title.to_owned(), String::new());
        Self { bar, show, title, step: (0, steps), message, started: now, printed: now }
    }

    /// The next part has begun.
    pub(crate) fn step(&mut self, message: &str) {
        self.step.0 = (self.step.0 + 1).min(self.step.1);
        self.message = message.to_owned();
        if let Some(bar) = &self.bar {
            bar.set_position(self.step.0.saturating_sub(1));
            bar.set_message(self.message.clone());
        }
        self.tick();
    }

    /// Time passes; call it now and then.
    pub(crate) fn tick(&mut self) {
        if self.show && self.bar.is_none() && self.printed.elapsed() >= LINE_INTERVAL {
            self.printed = Instant::now();
            let seconds = self.started.elapsed().as_secs();
            eprintln!("{}: {}/{} {} ({seconds} s)", self.title, self.step.0, self.step.1, self.message);
        }
    }

    /// The step is done.
    pub(crate) fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.show {
            eprintln!("{}: done ({} s)", self.title, self.started.elapsed().as_secs());
        }
    }
}
