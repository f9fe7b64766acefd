//! What a watcher is sent.

use crate::{MemoryStep, PolicyStep};
use serde::{Deserialize, Serialize};
use std::{fmt, num::ParseIntError, str::FromStr};
use strum::{EnumDiscriminants, EnumString, IntoStaticStr, VariantNames};
use utoipa::ToSchema;

/// Name of one published topology. Compared for equality only. In JSON it is a string of 16
/// hexadecimal digits, as in the guest's uevents: many JSON readers cannot hold 64 bits in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[0-9a-f]{16}$", example = "0000000700000001")]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for Generation {
    type Err = ParseIntError;
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

impl TryFrom<String> for Generation {
    type Error = ParseIntError;
    fn try_from(text: String) -> Result<Self, ParseIntError> {
        text.parse()
    }
}

impl From<Generation> for String {
    fn from(generation: Generation) -> String {
        generation.to_string()
    }
}

/// A name that no kind of event has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no kind of event is named {0:?}; there are {names}", names = EventKind::VARIANTS.join(", "))]
pub struct UnknownEvent(String);

fn unknown(name: &str) -> UnknownEvent {
    UnknownEvent(name.chars().take(40).collect())
}

/// Something that happened. Times are `CLOCK_MONOTONIC` of the host, nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema, EnumDiscriminants)]
#[serde(tag = "event", rename_all = "lowercase")]
#[strum_discriminants(
    name(EventKind),
    derive(EnumString, IntoStaticStr, VariantNames),
    strum(serialize_all = "lowercase", parse_err_ty = UnknownEvent, parse_err_fn = unknown),
    doc = "Kinds of events, by which a watcher chooses.",
    allow(missing_docs)
)]
pub enum Event {
    /// A VM was found.
    Appeared {
        /// The VM.
        vm: String,
        /// When.
        time_ns: u64,
    },
    /// A VM has ended, or its socket was taken away.
    Gone {
        /// The VM.
        vm: String,
        /// When.
        time_ns: u64,
    },
    /// A VM has a topology channel.
    Attached {
        /// The VM.
        vm: String,
        /// When.
        time_ns: u64,
    },
    /// A VM has no topology channel any more.
    Detached {
        /// The VM.
        vm: String,
        /// When.
        time_ns: u64,
    },
    /// A vCPU is on another host node.
    Changed {
        /// The VM.
        vm: String,
        /// APIC id of the vCPU.
        vcpu: u32,
        /// Host node that it left.
        from: u32,
        /// Host node that it is on.
        to: u32,
        /// When.
        time_ns: u64,
    },
    /// A topology was published to a guest.
    Published {
        /// The VM.
        vm: String,
        /// Which.
        generation: Generation,
        /// When.
        time_ns: u64,
        /// Oldest change of the host that it contains.
        changed_ns: u64,
    },
    /// A guest acknowledged that its kernel uses a topology.
    Acknowledged {
        /// The VM.
        vm: String,
        /// Which.
        generation: Generation,
        /// Oldest change of the host that it contains.
        changed_ns: u64,
        /// When it was published.
        published_ns: u64,
        /// When the acknowledgement came.
        acknowledged_ns: u64,
    },
    /// A vCPU was re-plugged on another guest node.
    Replugged {
        /// The VM.
        vm: String,
        /// APIC id that it had.
        vcpu: u32,
        /// APIC id that it has now. Its number in the guest is another one, too.
        new_vcpu: u32,
        /// Guest node that it is on now.
        guest_node: u32,
        /// When.
        time_ns: u64,
    },
    /// A policy has confined a vCPU, or given it its operator's CPUs again.
    Confined {
        /// The VM.
        vm: String,
        /// APIC id of the vCPU.
        vcpu: u32,
        /// What was done, and why.
        #[serde(flatten)]
        step: PolicyStep,
    },
    /// Memory of a VM goes to a node of its vCPUs: a policy has begun to move it, or that has ended.
    Memory {
        /// The VM.
        vm: String,
        /// What is done, and why.
        #[serde(flatten)]
        step: MemoryStep,
    },
    /// A VM has another policy.
    Policy {
        /// The VM.
        vm: String,
        /// Its name.
        policy: String,
        /// When.
        time_ns: u64,
    },
}

impl Event {
    /// Its kind.
    pub fn kind(&self) -> EventKind {
        self.into()
    }

    /// The VM that it is about.
    pub fn vm(&self) -> &str {
        match self {
            Self::Appeared { vm, .. }
            | Self::Gone { vm, .. }
            | Self::Attached { vm, .. }
            | Self::Detached { vm, .. }
            | Self::Changed { vm, .. }
            | Self::Published { vm, .. }
            | Self::Replugged { vm, .. }
            | Self::Confined { vm, .. }
            | Self::Memory { vm, .. }
            | Self::Policy { vm, .. }
            | Self::Acknowledged { vm, .. } => vm,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_named_as_in_json() {
        for name in EventKind::VARIANTS {
            let json = serde_json::json!({
                "event": name, "vm": "a", "time_ns": 1, "vcpu": 0, "from": 0, "to": 1, "new_vcpu": 2, "guest_node": 0,
                "generation": "0000000000000001", "changed_ns": 1, "published_ns": 2, "acknowledged_ns": 3,
                "policy": "vprobe", "cause": "its memory is there",
            });
            let event: Event = serde_json::from_value(json).expect("an event");
            assert_eq!(name.parse(), Ok(event.kind()));
            assert_eq!(<&str>::from(event.kind()), *name);
        }
        let error = "moved".parse::<EventKind>().expect_err("no kind").to_string();
        assert!(error.contains("\"moved\"") && error.contains("published, acknowledged"), "{error}");
    }

    #[test]
    fn events_have_the_documented_form() {
        let changed = Event::Changed { vm: "a".into(), vcpu: 1, from: 0, to: 2, time_ns: 5 };
        let text = serde_json::to_string(&changed).expect("JSON");
        assert_eq!(text, r#"{"event":"changed","vm":"a","vcpu":1,"from":0,"to":2,"time_ns":5}"#);
        let generation = Generation((7 << 32) | 1);
        let acknowledged = Event::Acknowledged {
            vm: "a".into(),
            generation,
            changed_ns: 1,
            published_ns: 2,
            acknowledged_ns: 3,
        };
        let text = serde_json::to_string(&acknowledged).expect("JSON");
        assert_eq!(
            text,
            r#"{"event":"acknowledged","vm":"a","generation":"0000000700000001","changed_ns":1,"published_ns":2,"acknowledged_ns":3}"#
        );
        assert_eq!(serde_json::from_str::<Event>(&text).expect("an event"), acknowledged);
    }

    #[test]
    fn a_generation_that_is_none_is_refused() {
        assert!(serde_json::from_str::<Generation>(r#""xyz""#).is_err());
        assert!(serde_json::from_str::<Generation>(r#""00000000000000001""#).is_ok());
        assert!(serde_json::from_str::<Generation>(r#""10000000000000000""#).is_err());
    }
}
