//! Guest nodes that get another home: asks for it, shows how far it is, and waits for its end.

use crate::{
    failure::Failure,
    progress::{self, Progress},
    table::{Table, list, or_dash, plain, shown},
};
use clap::Args;
use std::time::Duration;
use vnuma_api::{GuestNodeHome, Rehome, RehomeRequest, RehomeState, operation as op};
use vnuma_client::Client;

/// Between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(300);

#[derive(Args)]
pub struct Arguments {
    /// Name of the VM
    #[arg(value_parser = crate::name())]
    vm: String,
    /// Guest node, as `show` prints it
    #[arg(long, value_name = "G", value_parser = crate::number(), allow_negative_numbers = true, requires = "node")]
    guest_node: Option<u32>,
    /// Host node, as `hardware` prints it
    #[arg(long, value_name = "H", value_parser = crate::number(), allow_negative_numbers = true, requires = "guest_node")]
    node: Option<u32>,
    /// Say what would be done, and do nothing
    #[arg(long, requires = "node")]
    dry_run: bool,
    /// Move vCPUs as well that somebody else has confined to another node
    #[arg(long, requires = "node")]
    move_pinned: bool,
    /// Do not wait for the end
    #[arg(long, requires = "node")]
    no_wait: bool,
    /// End the one that is under way; what was moved stays
    #[arg(long, conflicts_with = "node")]
    stop: bool,
}

pub async fn run(client: &Client, arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let vm = arguments.vm.as_str();
    if arguments.stop {
        let stopped = client.ask::<op::StopRehome>(vm, &()).await?;
        return crate::print(json, &stopped, text);
    }
    let (Some(guest_node), Some(node)) = (arguments.guest_node, arguments.node) else {
        let shown = client.ask::<op::ShowRehome>(vm, &()).await?;
        return crate::print(json, &shown, text);
    };
    let Arguments { dry_run, move_pinned, .. } = *arguments;
    let input = RehomeRequest { guest_node, node, dry_run, move_pinned };
    let mut shown = client.ask::<op::Rehome>(vm, &input).await?;
    let its = |shown: &Rehome| {
        shown.rehome.as_ref().is_some_and(|known| (known.guest_node, known.node) == (guest_node, node))
    };
    let mut progress = Progress::new(false);
    while !arguments.no_wait && its(&shown) && shown.rehome.as_ref().is_some_and(RehomeState::is_active) {
        shown.rehome.iter().for_each(|state| progress.show(&state.state, &bar(state)));
        tokio::time::sleep(LOOK).await;
        shown = client.ask::<op::ShowRehome>(vm, &()).await?;
    }
    progress.end();
    crate::print(json, &shown, text)?;
    let state = shown.rehome.as_ref().filter(|_| its(&shown));
    match state.map(|state| state.state.as_str()) {
        Some("done" | "planned") => Ok(()),
        Some(_) if arguments.no_wait => Ok(()),
        _ => Err(Failure::Rehome { vm: plain(&arguments.vm), guest_node, node }),
    }
}

/// For example `memory   [######........] 43 %, 440 MiB of 1024 MiB`.
pub fn bar(state: &RehomeState) -> String {
    let share = state.there_bytes as f64 / state.total_bytes.max(1) as f64;
    progress::bar(&state.state, 8, share, &figures(state))
}

fn figures(state: &RehomeState) -> String {
    let percent = state.there_bytes as f64 / state.total_bytes.max(1) as f64 * 100.0;
    format!("{percent:.0} %, {} of {}", shown(state.there_bytes), shown(state.total_bytes))
}

/// All of it.
pub fn text(rehome: &Rehome) -> String {
    let mut table = Table::new(">NODE  >HOME  MEMORY  BOUND TO");
    for node in &rehome.guest_nodes {
        let place = |place: &vnuma_api::NodeBytes| format!("{} on {}", shown(place.bytes), place.node);
        let (places, bound) = (node.places.iter().map(place), node.bound.iter().map(u32::to_string));
        table.row([node.id.to_string(), or_dash(node.home), list(places), list(bound)]);
    }
    let mut text = format!("{}\n\n{}", plain(&rehome.vm), table.text(2));
    text += &stays(rehome);
    let Some(state) = &rehome.rehome else { return text };
    let RehomeState { guest_node, node, .. } = state;
    text += &match state.state.as_str() {
        "planned" => {
            let left = state.total_bytes.saturating_sub(state.there_bytes);
            let vcpus = vcpus(&state.vcpus);
            format!(
                "\nGuest node {guest_node} would go to node {node}: {} to be moved, then {vcpus}\n",
                shown(left)
            )
        }
        "done" => {
            format!(
                "\nGuest node {guest_node} has its home on node {node}: {}; moved: {}\n",
                figures(state),
                vcpus(&state.vcpus)
            )
        }
        phase => {
            let partly = if state.is_active() { "on its way" } else { "partly moved" };
            let line = format!(
                "\nGuest node {guest_node} to node {node}: {} ({partly}): {}\n",
                plain(phase),
                figures(state)
            );
            line + &undo(state)
        }
    };
    let why = state.why.as_ref().map(|why| format!("by itself: {why}"));
    for line in why.iter().chain(&state.problem).chain(&state.notes) {
        text += &format!("  {}\n", plain(line));
    }
    text
}

/// Memory that does not follow its vCPUs, and why.
fn stays(rehome: &Rehome) -> String {
    let line = |node: &GuestNodeHome| {
        let stays = node.stays.as_ref()?;
        let nodes = list(stays.vcpus_on.iter().map(u32::to_string));
        let (reason, text) = (plain(&stays.reason), plain(&stays.text));
        Some(format!(
            "  The vCPUs of guest node {} run on {nodes}, and its memory stays ({reason}): {text}\n",
            node.id
        ))
    };
    let lines: String = rehome.guest_nodes.iter().filter_map(line).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

/// What an operator does with one that has ended in the middle.
fn undo(state: &RehomeState) -> String {
    if state.is_active() {
        return String::new();
    }
    "  Repeat it to complete it, or give the guest node its home of before to undo it.\n".to_owned()
}

fn vcpus(vcpus: &[u32]) -> String {
    match vcpus {
        [] => "no vCPUs".to_owned(),
        some => format!("vCPUs {}", some.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{MemoryStays, NodeBytes};

    fn state(state: &str) -> RehomeState {
        RehomeState {
            guest_node: 0,
            node: 1,
            state: state.into(),
            total_bytes: 400 << 20,
            there_bytes: 100 << 20,
            vcpus: vec![0, 2],
            why: Some("its vCPUs\u{1b} stay there".into()),
            notes: vec!["a no\u{1b}te".into()],
            ..RehomeState::default()
        }
    }

    fn rehome(name: &str) -> Rehome {
        let places = vec![NodeBytes { node: 0, bytes: 300 << 20 }, NodeBytes { node: 1, bytes: 100 << 20 }];
        let node = GuestNodeHome { id: 0, home: Some(0), bound: vec![0], places, stays: None };
        Rehome { vm: "w\u{1b}eb".into(), guest_nodes: vec![node], rehome: Some(state(name)) }
    }

    #[test]
    fn how_far_it_is_is_a_bar() {
        assert_eq!(
            bar(&state("memory")),
            "memory   [#######.......................] 25 %, 100 MiB of 400 MiB"
        );
        let empty = RehomeState::default();
        assert!(
            bar(&empty).ends_with("[..............................] 0 %, 0 KiB of 0 KiB"),
            "{}",
            bar(&empty)
        );
    }

    #[test]
    fn what_is_there_and_what_was_done_is_said() {
        for (name, line) in [
            ("planned", "Guest node 0 would go to node 1: 300 MiB to be moved, then vCPUs 0, 2"),
            ("done", "Guest node 0 has its home on node 1: 25 %, 100 MiB of 400 MiB; moved: vCPUs 0, 2"),
            ("memory", "Guest node 0 to node 1: memory (on its way): 25 %, 100 MiB of 400 MiB"),
            ("stopped", "Guest node 0 to node 1: stopped (partly moved): 25 %, 100 MiB of 400 MiB"),
        ] {
            let text = text(&rehome(name));
            assert!(text.lines().any(|known| known == line), "{text}");
            assert!(text.contains("300 MiB on 0, 100 MiB on 1"), "{text}");
            assert!(text.contains("  a no\u{fffd}te\n") && text.starts_with("w\u{fffd}eb\n"), "{text}");
            assert!(text.contains("  by itself: its vCPUs\u{fffd} stay there\n"), "{text}");
            assert_eq!(text.contains("to undo it"), name == "stopped", "{text}");
        }
        assert!(!text(&Rehome { rehome: None, ..rehome("done") }).contains("Guest node"));
    }

    #[test]
    fn memory_that_does_not_follow_its_vcpus_is_said_with_its_reason() {
        let mut shown = rehome("done");
        assert!(!text(&shown).contains("its memory stays"));
        let stays = MemoryStays {
            vcpus_on: vec![1, 3],
            reason: "no-\u{1b}room".into(),
            text: "node 1 has no\u{1b} room".into(),
        };
        shown.guest_nodes[0].stays = Some(stays);
        let line = "\n  The vCPUs of guest node 0 run on 1, 3, and its memory stays (no-\u{fffd}room): node 1 has no\u{fffd} room\n";
        assert!(text(&shown).contains(line), "{}", text(&shown));
    }
}
