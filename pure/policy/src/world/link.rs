//! A VM's link to its hypervisor.
//!
//! ```text
//!                 Connect                Up
//!  Disconnected ──────────▶ Connecting ───────▶ Answers ◀──┐ Prompt, Up
//!       ▲                       │  │              │  │     │
//!       │                       │  │ Silent  Slow │  └──▶ Slow
//!       │ Lost, Ended           │  ▼              │        │
//!       └───────────────────────┴ Silent ◀────────┴────────┘ Silent
//! ```
//!
//! `Up` leads from `Silent` to `Answers`, too. `Lost` and `Ended` lead from every connected state back to `Disconnected`. A silent VM keeps its connection: it resumes
//! with the next reply.

use super::ConnectionId;
use vnuma_model::Backoff;

/// Between two attempts to connect: at first, and at most.
pub const FIRST_RETRY_NS: u64 = 1_000_000_000;
const LAST_RETRY_NS: u64 = 10_000_000_000;
const RETRIES: Backoff = Backoff::new(FIRST_RETRY_NS, LAST_RETRY_NS);
/// At most, where a VM is known to be there.
const LAST_RETRY_OF_VM_NS: u64 = 2_000_000_000;

/// A VM's link to its hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// There is no connection; one is tried at `retry_ns`.
    Disconnected {
        /// When it is tried again, `CLOCK_MONOTONIC`.
        retry_ns: u64,
        /// The pause after it should it fail.
        pauses: Backoff,
        /// Why there is none, as far as an operator should know.
        problem: Option<String>,
    },
    /// A connection was asked for, and the hypervisor has not said anything yet.
    Connecting {
        /// The connection.
        connection: ConnectionId,
        /// The pause after it should it fail.
        pauses: Backoff,
        /// What was wrong before.
        problem: Option<String>,
    },
    /// The hypervisor answers.
    Answers {
        /// The connection.
        connection: ConnectionId,
    },
    /// It has not answered a probe yet. Requests are still sent.
    Slow {
        /// The connection.
        connection: ConnectionId,
        /// What it has not answered.
        problem: String,
    },
    /// It does not answer, and requests are refused.
    Silent {
        /// The connection.
        connection: ConnectionId,
        /// What it has not answered.
        problem: String,
    },
}

/// What happens to a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A connection is asked for.
    Connect(ConnectionId),
    /// The hypervisor has greeted and described the VM.
    Up,
    /// A probe is not answered yet.
    Slow(String),
    /// It was answered after all.
    Prompt,
    /// Nothing is answered.
    Silent(String),
    /// There is no connection, or no more.
    Lost {
        /// Why; `None` if that is no problem, for example before the VM listens.
        problem: Option<String>,
        /// A VM is known to be there, so that it is tried again sooner.
        known: bool,
        /// Another client uses the monitor: try again after the first pause.
        at_once: bool,
        /// Now.
        now_ns: u64,
    },
    /// The VM's process has ended.
    Ended {
        /// Now.
        now_ns: u64,
    },
    /// Another VM may be behind the handle now: connect at once.
    Replaced {
        /// Now.
        now_ns: u64,
    },
}

impl Link {
    /// Not connected; the first attempt is due at `now_ns`.
    pub fn new(now_ns: u64) -> Self {
        Self::Disconnected { retry_ns: now_ns, pauses: RETRIES, problem: None }
    }

    /// The state after an event. `None`: the event means nothing in this state, which stays.
    pub fn next(&self, event: LinkEvent) -> Option<Self> {
        use LinkEvent as E;
        match (self, event) {
            (Self::Disconnected { pauses, problem, .. }, E::Connect(connection)) => {
                Some(Self::Connecting { connection, pauses: *pauses, problem: problem.clone() })
            }
            (Self::Disconnected { problem, .. }, E::Replaced { now_ns }) => {
                Some(Self::Disconnected { retry_ns: now_ns, pauses: RETRIES, problem: problem.clone() })
            }
            (Self::Disconnected { .. }, _) | (_, E::Connect(_) | E::Replaced { .. }) => None,
            (_, E::Ended { now_ns }) => Some(Self::Disconnected {
                retry_ns: now_ns.saturating_add(FIRST_RETRY_NS),
                pauses: RETRIES,
                problem: None,
            }),
            (_, E::Lost { problem, known, at_once, now_ns }) => {
                let pauses = if at_once { RETRIES } else { self.pauses() };
                let mut pauses = pauses.up_to(if known { LAST_RETRY_OF_VM_NS } else { LAST_RETRY_NS });
                let retry_ns = now_ns.saturating_add(pauses.pause());
                Some(Self::Disconnected { retry_ns, pauses, problem })
            }
            (_, E::Up) => Some(Self::Answers { connection: self.connection()? }),
            (_, E::Silent(problem)) => Some(Self::Silent { connection: self.connection()?, problem }),
            (Self::Answers { connection } | Self::Slow { connection, .. }, E::Slow(problem)) => {
                Some(Self::Slow { connection: *connection, problem })
            }
            (Self::Slow { connection, .. }, E::Prompt) => Some(Self::Answers { connection: *connection }),
            (_, E::Slow(_) | E::Prompt) => None,
        }
    }

    /// The connection, if there is one.
    pub fn connection(&self) -> Option<ConnectionId> {
        match self {
            Self::Disconnected { .. } => None,
            Self::Connecting { connection, .. }
            | Self::Answers { connection }
            | Self::Slow { connection, .. }
            | Self::Silent { connection, .. } => Some(*connection),
        }
    }

    /// The connection over which commands are carried out.
    pub fn responsive(&self) -> Option<ConnectionId> {
        match self {
            Self::Answers { connection } | Self::Slow { connection, .. } => Some(*connection),
            _ => None,
        }
    }

    /// What is wrong with it.
    pub fn problem(&self) -> Option<&str> {
        match self {
            Self::Disconnected { problem, .. } | Self::Connecting { problem, .. } => problem.as_deref(),
            Self::Answers { .. } => None,
            Self::Slow { problem, .. } | Self::Silent { problem, .. } => Some(problem),
        }
    }

    fn pauses(&self) -> Backoff {
        match self {
            Self::Connecting { pauses, .. } => *pauses,
            _ => RETRIES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn down(retry_ns: u64, pause_ns: u64, problem: Option<&str>) -> Link {
        let pauses = Backoff::new(pause_ns, LAST_RETRY_NS);
        Link::Disconnected { retry_ns, pauses, problem: problem.map(str::to_owned) }
    }

    fn connecting(pause_ns: u64, problem: Option<&str>) -> Link {
        let pauses = Backoff::new(pause_ns, LAST_RETRY_NS);
        Link::Connecting { connection: 7, pauses, problem: problem.map(str::to_owned) }
    }

    /// Every state with every event.
    #[test]
    fn the_whole_table() {
        let states = [
            down(5, 4 * S, Some("before")),
            connecting(4 * S, Some("before")),
            Link::Answers { connection: 7 },
            Link::Slow { connection: 7, problem: "slow".into() },
            Link::Silent { connection: 7, problem: "silent".into() },
        ];
        let lost = |problem: Option<&str>| LinkEvent::Lost {
            problem: problem.map(str::to_owned),
            known: false,
            at_once: false,
            now_ns: 100,
        };
        let answers = || Some(Link::Answers { connection: 7 });
        let silent = || Some(Link::Silent { connection: 7, problem: "q".into() });
        let slow = || Some(Link::Slow { connection: 7, problem: "p".into() });
        let ended = || Some(down(100 + S, S, None));
        let gone = |pause_ns: u64| Some(down(100 + pause_ns, 2 * pause_ns, Some("x")));
        let table: Vec<(LinkEvent, [Option<Link>; 5])> = vec![
            (LinkEvent::Connect(7), [Some(connecting(4 * S, Some("before"))), None, None, None, None]),
            (LinkEvent::Up, [None, answers(), answers(), answers(), answers()]),
            (LinkEvent::Slow("p".into()), [None, None, slow(), slow(), None]),
            (LinkEvent::Prompt, [None, None, None, answers(), None]),
            (LinkEvent::Silent("q".into()), [None, silent(), silent(), silent(), silent()]),
            (lost(Some("x")), [None, Some(down(100 + 4 * S, 8 * S, Some("x"))), gone(S), gone(S), gone(S)]),
            (LinkEvent::Ended { now_ns: 100 }, [None, ended(), ended(), ended(), ended()]),
            (
                LinkEvent::Replaced { now_ns: 100 },
                [Some(down(100, S, Some("before"))), None, None, None, None],
            ),
        ];
        for (event, expected) in table {
            for (state, expected) in states.iter().zip(expected) {
                assert_eq!(state.next(event.clone()), expected, "{state:?} on {event:?}");
            }
        }
    }

    #[test]
    fn pauses_double_up_to_their_limit() {
        let lost = |known, at_once| LinkEvent::Lost { problem: None, known, at_once, now_ns: 0 };
        let mut link = Link::new(0);
        let mut pauses = Vec::new();
        for known in [false, false, false, false, false, true, true] {
            link = link
                .next(LinkEvent::Connect(1))
                .and_then(|link| link.next(lost(known, false)))
                .expect("down");
            let Link::Disconnected { retry_ns, .. } = link else { panic!("{link:?}") };
            pauses.push(retry_ns / S);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10, 2]);
        link = link.next(LinkEvent::Connect(1)).and_then(|link| link.next(lost(false, true))).expect("down");
        assert!(matches!(link, Link::Disconnected { retry_ns: S, .. }), "{link:?}");
    }
}
