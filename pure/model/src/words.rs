//! States that have a word each. Backends translate the words of hypervisors into these.

use serde::{Deserialize, Serialize};
use strum::{AsRefStr, Display, EnumString};

/// An enum with a word for each variant. Other words are kept as they are, so that they can be shown.
macro_rules! words {
    ($(#[$of_enum:meta])* $name:ident { $($(#[$of_variant:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$of_enum])*
        #[derive(Clone, Debug, PartialEq, Eq, AsRefStr, Display, EnumString, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$of_variant])* #[strum(serialize = $word)] #[serde(rename = $word)] $variant,)+
            /// One that is not known here, in the hypervisor's word.
            #[strum(default, transparent)]
            #[serde(untagged)]
            Other(String),
        }
    };
}

words! {
    /// Whether a VM's guest runs, and why not.
    RunState {
        /// Not known: the hypervisor has not answered yet.
        Unknown = "",
        /// Its vCPUs run.
        Running = "running",
        /// An operator paused it.
        Paused = "paused",
        /// It waits for a VM that migrates to this host.
        Arriving = "arriving",
        /// A migration to another host is in its last part.
        Leaving = "leaving",
        /// The VM is at another host.
        Left = "left",
        /// The guest has suspended itself.
        Suspended = "suspended",
        /// The guest has shut down.
        ShutDown = "shutdown",
        /// KVM cannot run it any more.
        InternalError = "internal-error",
        /// A disk reported an I/O error.
        IoError = "io-error",
        /// Its kernel panicked.
        Panicked = "guest-panicked",
        /// Its watchdog expired.
        Watchdog = "watchdog",
    }
}

words! {
    /// The kernel's policy for new pages of a range of memory (`mbind`). Its nodes are beside it.
    NumaPolicy {
        /// The node of the thread that touches a page first.
        Default = "default",
        /// One of these nodes, or another if they are full.
        Preferred = "preferred",
        /// These nodes only.
        Bind = "bind",
        /// These nodes in turn.
        Interleave = "interleave",
    }
}

impl NumaPolicy {
    /// Does it name the nodes that new pages are to come from, in one place?
    pub fn names_nodes(&self) -> bool {
        matches!(self, Self::Bind | Self::Preferred)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_as_they_were() {
        for word in ["running", "arriving", "", "bind", "interleave", "colo", "weighted interleave"] {
            assert_eq!(RunState::from(word).as_ref(), word);
            assert_eq!(NumaPolicy::from(word).as_ref(), word);
            assert_eq!(RunState::from(word).to_string(), word);
            let json = serde_json::to_string(&RunState::from(word)).unwrap();
            assert_eq!(json, format!("{word:?}"));
            assert_eq!(serde_json::from_str::<RunState>(&json).unwrap(), RunState::from(word));
        }
        assert_eq!(RunState::from("leaving"), RunState::Leaving);
        assert_eq!(NumaPolicy::from("preferred"), NumaPolicy::Preferred);
        assert_eq!(RunState::from("Running"), RunState::Other("Running".to_owned()));
    }
}
