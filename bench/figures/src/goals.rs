//! Goals: printed, and checked.

use crate::ending::Missed;
use anyhow::{Result, bail};
use serde::Serialize;

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

/// Prints all of them. [`Missed`] if one is.
pub fn print(goals: &[Goal]) -> Result<()> {
    for goal in goals {
        println!("{} {}: {}", if goal.met { "met   " } else { "MISSED" }, goal.goal, goal.found);
    }
    check(goals.iter().map(|goal| (goal.goal.as_str(), Some(goal.met))))
}

/// Goals by name, each met, missed or, without its figure, neither. A figure that is not there is an error before all; one that is not good
/// enough is [`Missed`].
pub fn check<'a>(goals: impl IntoIterator<Item = (&'a str, Option<bool>)>) -> Result<()> {
    let goals: Vec<_> = goals.into_iter().collect();
    let of = |outcome: Option<bool>| -> Vec<&str> {
        goals.iter().filter(|(_, met)| *met == outcome).map(|(name, _)| *name).collect()
    };
    let (unknown, missed) = (of(None), of(Some(false)));
    if !unknown.is_empty() {
        bail!("not measured: {}", unknown.join("; "));
    }
    match missed.len() {
        0 => Ok(()),
        count => {
            Err(Missed(format!("{count} of {} goals are missed:\n  {}", goals.len(), missed.join("\n  ")))
                .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_goal_is_named_and_one_without_a_figure_comes_first() {
        assert!(check([("a", Some(true))]).is_ok() && print(&[]).is_ok());
        let missed =
            check([("a", Some(true)), ("b", Some(false)), ("c", Some(false))]).expect_err("two are missed");
        assert!(missed.is::<Missed>());
        assert_eq!(missed.to_string(), "2 of 3 goals are missed:\n  b\n  c");
        let unknown = check([("a", None), ("b", Some(false))]).expect_err("one is not measured");
        assert!(!unknown.is::<Missed>());
        assert_eq!(unknown.to_string(), "not measured: a");
    }
}
