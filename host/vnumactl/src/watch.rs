//! Events as they come.

use crate::{failure::Failure, table::plain};
use std::io::{self, Write};
use vnuma_api::{Event, EventKind, WATCH};
use vnuma_client::{Client, Error};

/// Prints events of these kinds, or all if none is named, until vnumad ends or this process is interrupted.
pub async fn run(client: &Client, kinds: &[EventKind], json: bool) -> Result<(), Failure> {
    let mut lines = client.watch(kinds).await?;
    loop {
        print(&lines.line().await?, json)?;
    }
}

fn print(line: &[u8], json: bool) -> Result<(), Failure> {
    let text = self::line(line, json)?;
    let mut out = io::stdout().lock();
    // A line at a time, so that a reader of a pipe has it at once.
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Failure::Output)
}

/// What is printed for a line of vnumad.
pub fn line(line: &[u8], json: bool) -> Result<String, Failure> {
    let value: serde_json::Value = serde_json::from_slice(line).map_err(|error| Error::Unexpected {
        path: WATCH.to_owned(),
        status: 200,
        reason: error.to_string(),
    })?;
    Ok(match serde_json::from_value(value.clone()) {
        _ if json => value.to_string(),
        Ok(event) => text(&event),
        // A kind of event that a newer vnumad knows.
        Err(_) => plain(&value.to_string()),
    })
}

fn text(event: &Event) -> String {
    let seconds = |ns: u64| format!("{:>12.6}", ns as f64 / 1e9);
    let millis = |from: u64, to: u64| format!("{:.3} ms", to.saturating_sub(from) as f64 / 1e6);
    let vm = plain(event.vm());
    match event {
        Event::Appeared { time_ns, .. } => format!("{}  {vm}: found", seconds(*time_ns)),
        Event::Gone { time_ns, .. } => format!("{}  {vm}: gone", seconds(*time_ns)),
        Event::Attached { time_ns, .. } => format!("{}  {vm}: channel attached", seconds(*time_ns)),
        Event::Detached { time_ns, .. } => format!("{}  {vm}: channel detached", seconds(*time_ns)),
        Event::Changed { vcpu, from, to, time_ns, .. } => {
            format!("{}  {vm}: vCPU {vcpu} changed from host node {from} to {to}", seconds(*time_ns))
        }
        Event::Replugged { vcpu, new_vcpu, guest_node, time_ns, .. } => format!(
            "{}  {vm}: vCPU {vcpu} replugged to guest node {guest_node}; it is vCPU {new_vcpu} now, with another CPU number in the guest",
            seconds(*time_ns)
        ),
        Event::Confined { vcpu, step, .. } => {
            format!("{}  {vm}: {}", seconds(step.time_ns), plain(&step.text(*vcpu)))
        }
        Event::Memory { step, .. } => {
            format!("{}  {vm}: {}", seconds(step.time_ns), plain(&step.text()))
        }
        Event::Policy { policy, time_ns, .. } => {
            format!("{}  {vm}: its policy is {}", seconds(*time_ns), plain(policy))
        }
        Event::Published { generation, time_ns, changed_ns, .. } => {
            let after = millis(*changed_ns, *time_ns);
            format!(
                "{}  {vm}: generation {generation} published, {after} after the change",
                seconds(*time_ns)
            )
        }
        Event::Acknowledged { generation, changed_ns, published_ns, acknowledged_ns, .. } => format!(
            "{}  {vm}: generation {generation} acknowledged, {} after the change, {} after its publication",
            seconds(*acknowledged_ns),
            millis(*changed_ns, *acknowledged_ns),
            millis(*published_ns, *acknowledged_ns),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::Generation;

    #[test]
    fn events_read_well() {
        let event = Event::Acknowledged {
            vm: "a".into(),
            generation: Generation(2),
            changed_ns: 1_000_000_000,
            published_ns: 1_000_500_000,
            acknowledged_ns: 1_004_000_000,
        };
        assert_eq!(
            text(&event),
            "    1.004000  a: generation 0000000000000002 acknowledged, 4.000 ms after the change, 3.500 ms after its publication"
        );
        let event = Event::Changed { vm: "a".into(), vcpu: 1, from: 0, to: 2, time_ns: 2_000_000_000 };
        assert_eq!(text(&event), "    2.000000  a: vCPU 1 changed from host node 0 to 2");
        let (vm, time_ns) = ("a".into(), 2_000_000_000);
        let event = Event::Replugged { vm, vcpu: 1, new_vcpu: 5, guest_node: 2, time_ns };
        assert_eq!(
            text(&event),
            "    2.000000  a: vCPU 1 replugged to guest node 2; it is vCPU 5 now, with another CPU number in the guest"
        );
    }
}
