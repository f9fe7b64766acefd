//! Goals: printed, and checked.

use crate::ending::Missed;
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A goal and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goal {
    /// What is wanted.
    pub goal: String,
    /// What was found.
    pub found: String,
    /// Is it met?
    pub met: bool,
}

impl Goal {
    /// One about all of so many rows: the name of each that counts, its figure, and whether that is good enough.
    pub fn of_rows(goal: String, rows: usize, found: &[(String, f64, bool)]) -> Self {
        let shown: Vec<String> =
            found.iter().map(|(name, figure, _)| format!("{name} {:.2} %", figure * 100.0)).collect();
        let (left, shown) = (rows - found.len(), shown.join(", "));
        let met = !found.is_empty() && left == 0 && found.iter().all(|(_, _, met)| *met);
        let without = format!("; {left} rows do not count or have nothing to be compared with");
        Self { goal, met, found: if left == 0 { shown } else { shown + &without } }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { goal, found, met } = self;
        write!(f, "{} {goal}: {found}", if *met { "met   " } else { "MISSED" })
    }
}

/// A figure that is to keep a limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// Which figure.
    pub name: String,
    /// None: it was not measured.
    pub value: Option<f64>,
    /// Either this ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// ... or this is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// Is it kept? Not by a figure that is missing.
    pub met: bool,
}

impl Limit {
    /// Of a figure that is to be at most so much.
    pub fn at_most(name: impl Into<String>, value: Option<f64>, limit: f64) -> Self {
        let met = value.is_some_and(|value| value <= limit);
        Self { name: name.into(), value, at_most: Some(limit), at_least: None, met }
    }

    /// Of a figure that is to be at least so much.
    pub fn at_least(name: impl Into<String>, value: Option<f64>, limit: f64) -> Self {
        let met = value.is_some_and(|value| value >= limit);
        Self { name: name.into(), value, at_most: None, at_least: Some(limit), met }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, value, at_most, at_least, met } = self;
        let round = |value: f64| (value * 1e4).round() / 1e4;
        let word = match value {
            None => "UNKNOWN",
            Some(_) if *met => "met",
            Some(_) => "MISSED",
        };
        let value = value.map_or("not measured".to_owned(), |value| round(value).to_string());
        write!(f, "{word:<7} {name}: {value}")?;
        at_most.map_or(Ok(()), |limit| write!(f, ", at most {}", round(limit)))?;
        at_least.map_or(Ok(()), |limit| write!(f, ", at least {}", round(limit)))
    }
}

/// What a report wants of its figures.
pub trait Wanted: Serialize + fmt::Display {
    /// Which figure.
    fn name(&self) -> &str;
    /// None: its figure is not there.
    fn met(&self) -> Option<bool>;
}

impl Wanted for Goal {
    fn name(&self) -> &str {
        &self.goal
    }

    fn met(&self) -> Option<bool> {
        Some(self.met)
    }
}

impl Wanted for Limit {
    fn name(&self) -> &str {
        &self.name
    }

    fn met(&self) -> Option<bool> {
        self.value.map(|_| self.met)
    }
}

/// A figure that is not there is an error before all; one that is not good enough is [`Missed`].
pub fn check(goals: &[impl Wanted]) -> Result<()> {
    check_measured(goals)?;
    let missed: Vec<&str> = goals.iter().filter(|goal| goal.met() == Some(false)).map(Wanted::name).collect();
    match missed.len() {
        0 => Ok(()),
        count => {
            Err(Missed(format!("{count} of {} goals are missed:\n  {}", goals.len(), missed.join("\n  ")))
                .into())
        }
    }
}

/// An error if a figure is not there, however good the others are.
pub fn check_measured(goals: &[impl Wanted]) -> Result<()> {
    let unknown: Vec<&str> = goals.iter().filter(|goal| goal.met().is_none()).map(Wanted::name).collect();
    ensure!(unknown.is_empty(), "not measured: {}", unknown.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_goal_is_named_and_one_without_a_figure_comes_first() {
        let goal = |name: &str, met| Goal { goal: name.to_owned(), found: String::new(), met };
        assert!(check(&[goal("a", true)]).is_ok());
        let goals = [goal("a", true), goal("b", false), goal("c", false)];
        let missed = check(&goals).expect_err("two are missed");
        assert!(missed.is::<Missed>() && check_measured(&goals).is_ok());
        assert_eq!(missed.to_string(), "2 of 3 goals are missed:\n  b\n  c");
        let limits = [Limit::at_most("a", None, 1.0), Limit::at_most("b", Some(2.0), 1.0)];
        let unknown = check(&limits).expect_err("one is not measured");
        assert!(!unknown.is::<Missed>());
        assert_eq!(unknown.to_string(), "not measured: a");
    }

    #[test]
    fn a_limit_says_what_was_found() {
        let shown = |limit: Limit| limit.to_string();
        assert_eq!(shown(Limit::at_most("a", Some(1.23456), 2.0)), "met     a: 1.2346, at most 2");
        assert_eq!(shown(Limit::at_least("a", Some(1.0), 2.0)), "MISSED  a: 1, at least 2");
        assert_eq!(shown(Limit::at_most("a", None, 2.0)), "UNKNOWN a: not measured, at most 2");
        let text = r#"{"name":"a","value":null,"at_most":2.0,"met":false}"#;
        let read: Limit = serde_json::from_str(text).expect("as reports have it");
        assert_eq!(read, Limit::at_most("a", None, 2.0));
        assert_eq!(serde_json::to_string(&read).expect("JSON"), text);
        assert!(!check(&[read]).expect_err("not measured").is::<Missed>());
    }
}
