//! Messages of QEMU: answers, errors, events.

use crate::VmEvent;
use serde::Deserialize;
use serde_json::Value;
use vnuma_process::text::sanitize_short;

/// Id of the topology channel's device and of its character device.
pub(crate) const CHANNEL_ID: &str = "vnuma-channel";

/// A message of QEMU after its greeting.
#[derive(Debug, Deserialize)]
pub struct Message {
    /// Id of the command that it answers.
    pub(crate) id: Option<Value>,
    #[serde(rename = "return", default, deserialize_with = "present")]
    pub(crate) answer: Option<Value>,
    pub(crate) error: Option<Refusal>,
    pub(crate) event: Option<String>,
    #[serde(default)]
    pub(crate) data: Value,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Refusal {
    #[serde(default)]
    pub(crate) desc: String,
}

/// `"return": null` is an answer, too.
fn present<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

/// A line from QEMU.
pub fn parse_message(line: &[u8]) -> Result<Message, String> {
    serde_json::from_slice(line)
        .map_err(|error| format!("{error} in `{}`", sanitize_short(&String::from_utf8_lossy(line))))
}

/// What an event means here, if anything.
pub fn event_of(name: &str, data: &Value) -> Option<VmEvent> {
    match name {
        "SHUTDOWN" => Some(VmEvent::Shutdown),
        "STOP" => Some(VmEvent::Stopped),
        "RESET" => Some(VmEvent::Rebooted),
        "RESUME" => Some(VmEvent::Resumed),
        "DEVICE_DELETED" if data["device"] == CHANNEL_ID => Some(VmEvent::ChannelDetached),
        // A vCPU may have been unplugged; only its path says that it was one, and only until now.
        "DEVICE_DELETED" => Some(VmEvent::VcpusChanged),
        // The guest has taken over, or let go of, a vCPU.
        "ACPI_DEVICE_OST" if data["info"]["slot-type"] == "CPU" => Some(VmEvent::VcpusChanged),
        // QEMU sends one a second at most for each device.
        "MEMORY_DEVICE_SIZE_CHANGE" => Some(VmEvent::MemoryChanged),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn events_that_matter() {
        for (name, data, event) in [
            ("SHUTDOWN", json!({"guest": true}), Some(VmEvent::Shutdown)),
            ("RESET", json!({"guest": true, "reason": "guest-reset"}), Some(VmEvent::Rebooted)),
            ("DEVICE_DELETED", json!({"device": CHANNEL_ID, "path": "x"}), Some(VmEvent::ChannelDetached)),
            ("DEVICE_DELETED", json!({"path": "/machine/peripheral/c1"}), Some(VmEvent::VcpusChanged)),
            ("ACPI_DEVICE_OST", json!({"info": {"slot-type": "CPU"}}), Some(VmEvent::VcpusChanged)),
            ("ACPI_DEVICE_OST", json!({"info": {"slot-type": "DIMM"}}), None),
            ("ACPI_DEVICE_OST", json!([1]), None),
            ("MEMORY_DEVICE_SIZE_CHANGE", json!({"id": "vm0", "size": 1}), Some(VmEvent::MemoryChanged)),
            ("SOMETHING_NEW", Value::Null, None),
        ] {
            assert_eq!(event_of(name, &data), event, "{name} {data}");
        }
    }

    #[test]
    fn answers_errors_and_nonsense() {
        let message = parse_message(br#"{"return": null, "id": 7}"#).unwrap();
        assert_eq!((message.answer, message.id), (Some(Value::Null), Some(json!(7))));
        let message = parse_message(br#"{"error": {"class": "NewClass", "desc": "no"}}"#).unwrap();
        assert_eq!(message.error.unwrap().desc, "no");
        assert!(parse_message(b"garbage").unwrap_err().ends_with("in `garbage`"));
        assert!(parse_message("[".repeat(100_000).as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_line_is_survived(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_message(&line);
        }
    }
}
