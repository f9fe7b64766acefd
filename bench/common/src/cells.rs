//! Cells that a server measures one after the other, and prints as lines of JSON.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{io::Write, time::Instant};
use vnuma_scenario::waiting;

/// A line about a cell that did not come about at first.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Again {
    /// Which.
    pub again: String,
}

/// Prints a line of JSON.
pub fn print(line: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

/// What came about of cells so far. One that fails is tried once more; the others are worth having all the same.
#[derive(Debug, Default)]
pub struct Cells {
    failed: Vec<String>,
}

impl Cells {
    /// Measures one and prints it. `once` also says what people are shown of it.
    pub fn measure<L: Serialize>(
        &mut self,
        name: &str,
        mut once: impl FnMut() -> Result<(L, String)>,
    ) -> Result<()> {
        for is_last in [false, true] {
            let (began, _waiting) = (Instant::now(), waiting(name));
            match once().with_context(|| name.to_owned()) {
                Ok((line, shown)) => {
                    eprintln!("{name}: {} s, {shown}", began.elapsed().as_secs());
                    return print(&line);
                }
                Err(error) if is_last => {
                    eprintln!("{error:#}");
                    self.failed.push(name.to_owned());
                }
                Err(error) => {
                    eprintln!("{error:#}; once more");
                    print(&Again { again: name.to_owned() })?;
                }
            }
        }
        Ok(())
    }

    /// An error if a cell did not come about.
    pub fn end(self) -> Result<()> {
        ensure!(self.failed.is_empty(), "cells that did not come about: {}", self.failed.join("; "));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_that_fails_is_tried_once_more_and_named() {
        let fails = |times: usize| {
            let (mut cells, mut tries) = (Cells::default(), 0);
            let once = || {
                tries += 1;
                ensure!(tries > times, "no VM");
                Ok((tries, String::new()))
            };
            cells.measure("a cell", once).expect("printed");
            (tries, cells.end().err().map(|error| error.to_string()))
        };
        let failed = "cells that did not come about: a cell".to_owned();
        assert_eq!(
            [0, 1, 2, 3].map(fails),
            [(1, None), (2, None), (2, Some(failed.clone())), (2, Some(failed))]
        );
    }
}
