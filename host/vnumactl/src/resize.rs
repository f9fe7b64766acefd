//! Guest nodes that grow and shrink: asks for a size, shows how far it is, and waits for the end.

use crate::{
    failure::Failure,
    place::size as parse_size,
    table::{Table, list, or_dash, plain, shown},
};
use clap::Args;
use std::time::Duration;
use vnuma_api::{AutoSize, GuestNodeSize, Pluggable, ResizeRequest, ResizeState, Sizes, operation as op};
use vnuma_client::Client;

/// Between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(300);

#[derive(Args)]
pub struct Arguments {
    /// Name of the VM
    #[arg(value_parser = crate::name())]
    vm: String,
    /// Guest node, as `show` prints it
    #[arg(long, value_name = "G", value_parser = crate::number(), allow_negative_numbers = true)]
    guest_node: Option<u32>,
    /// What the guest node is to have, with what it booted with, such as 512M or 8G
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "guest_node", conflicts_with = "auto")]
    size: Option<u64>,
    /// Size it by what is free on its home, within these bounds: MIN..MAX or MIN.. (all that can be plugged)
    #[arg(long, value_name = "BOUNDS", value_parser = bounds, requires = "guest_node")]
    auto: Option<AutoSize>,
    /// Say what would be done, and do nothing
    #[arg(long, requires = "guest_node")]
    dry_run: bool,
    /// Do not wait for the end
    #[arg(long, requires = "size")]
    no_wait: bool,
    /// End the changes that are under way; guest nodes keep what they have by then
    #[arg(long, conflicts_with = "guest_node")]
    stop: bool,
}

/// Two sizes, of which the second may be missing.
fn bounds(text: &str) -> Result<AutoSize, String> {
    let (least, most) = text.split_once("..").ok_or("expected MIN..MAX or MIN.., such as 512M..8G")?;
    let most_bytes = if most.is_empty() { None } else { Some(parse_size(most)?) };
    Ok(AutoSize { least_bytes: parse_size(least)?, most_bytes })
}

pub async fn run(client: &Client, arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let vm = arguments.vm.as_str();
    if arguments.stop {
        let stopped = client.ask::<op::StopResize>(vm, &()).await?;
        return crate::print(json, &stopped, text);
    }
    let Arguments { guest_node, size: size_bytes, auto, dry_run, .. } = *arguments;
    let Some(guest_node) = guest_node.filter(|_| size_bytes.is_some() || auto.is_some()) else {
        let shown = client.ask::<op::ShowSizes>(vm, &()).await?;
        return crate::print(json, &shown, text);
    };
    let input = ResizeRequest { guest_node, size_bytes, auto, dry_run };
    let mut shown = client.ask::<op::Resize>(vm, &input).await?;
    if size_bytes.is_none() {
        return crate::print(json, &shown, text);
    }
    let state = |shown: &Sizes| {
        let node = shown.guest_nodes.iter().find(|node| node.id == guest_node);
        node.and_then(|node| node.resize.clone())
    };
    while !arguments.no_wait && state(&shown).is_some_and(|state| state.is_active()) {
        tokio::time::sleep(LOOK).await;
        shown = client.ask::<op::ShowSizes>(vm, &()).await?;
    }
    crate::print(json, &shown, text)?;
    match state(&shown).as_ref().map(|state| state.state.as_str()) {
        Some("done" | "planned") => Ok(()),
        Some(_) if arguments.no_wait => Ok(()),
        _ => Err(Failure::Resize { vm: plain(&arguments.vm), guest_node }),
    }
}

/// All of it.
pub fn text(sizes: &Sizes) -> String {
    let mut table = Table::new(">NODE  >FROM  >BOOTED  >PLUGGED  >REQUESTED  >MOST  AUTO  THERE");
    for node in &sizes.guest_nodes {
        table.row(row(node));
    }
    let mut text = format!("{}\n\n{}", plain(&sizes.vm), table.text(2));
    for node in &sizes.guest_nodes {
        if let Some(state) = &node.resize {
            text += &format!("\n{}\n", change(node, state));
        }
    }
    text
}

fn row(node: &GuestNodeSize) -> [String; 8] {
    let Pluggable { plugged_bytes, requested_bytes, most_bytes, auto, places, .. } =
        node.pluggable.clone().unwrap_or_default();
    let known = |bytes: u64| if node.pluggable.is_some() { shown(bytes) } else { "-".to_owned() };
    let whole = |bytes: u64| shown(node.boot_bytes.saturating_add(bytes));
    let bounds = auto.map(|auto| format!("{} to {}", whole(auto.least_bytes), whole(auto.most_bytes)));
    let places = places.iter().map(|place| format!("{} on {}", shown(place.bytes), place.node));
    [
        node.id.to_string(),
        or_dash(node.plugs_from),
        shown(node.boot_bytes),
        known(plugged_bytes),
        known(requested_bytes),
        known(most_bytes),
        or_dash(bounds),
        list(places),
    ]
}

/// For example `Guest node 1: 64 MiB of 256 MiB are plugged, were 0 KiB (waiting), by an operator`.
fn change(node: &GuestNodeSize, state: &ResizeState) -> String {
    let plugged = node.pluggable.as_ref().map_or(0, |pluggable| pluggable.plugged_bytes);
    let (id, bytes, before) = (node.id, shown(state.bytes), shown(state.before_bytes));
    let line = match state.state.as_str() {
        "planned" => format!("Guest node {id}: {bytes} would be plugged, {} are", shown(plugged)),
        phase => format!(
            "Guest node {id}: {} are plugged, {bytes} were wanted, {before} were there ({}), by {}",
            shown(plugged),
            plain(phase),
            plain(&state.by)
        ),
    };
    line + &state.problem.iter().map(|problem| format!("\n  {}", plain(problem))).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{NodeBytes, SizeBounds};

    fn sizes(state: &str) -> Sizes {
        let pluggable = Pluggable {
            requested_bytes: 256 << 20,
            plugged_bytes: 64 << 20,
            most_bytes: 512 << 20,
            block_bytes: 2 << 20,
            devices: 1,
            places: vec![NodeBytes { node: 1, bytes: 60 << 20 }],
            auto: Some(SizeBounds { least_bytes: 0, most_bytes: 128 << 20 }),
        };
        let resize = ResizeState {
            state: state.into(),
            before_bytes: 0,
            bytes: 256 << 20,
            by: "an opera\u{1b}tor".into(),
            problem: Some("n\u{1b}o".into()),
        };
        let bare = GuestNodeSize { id: 0, boot_bytes: 128 << 20, ..GuestNodeSize::default() };
        let node = GuestNodeSize {
            id: 1,
            plugs_from: Some(1),
            boot_bytes: 128 << 20,
            pluggable: Some(pluggable),
            resize: Some(resize),
        };
        Sizes { vm: "w\u{1b}eb".into(), guest_nodes: vec![bare, node] }
    }

    #[test]
    fn what_is_plugged_and_what_may_be_is_a_table() {
        let expected = "\
w\u{fffd}eb

  NODE  FROM  BOOTED  PLUGGED  REQUESTED  MOST  AUTO  THERE
  0 - 128 MiB - - - - -
  1 1 128 MiB 64 MiB 256 MiB 512 MiB 128 MiB to 256 MiB 60 MiB on 1

Guest node 1: 64 MiB are plugged, 256 MiB were wanted, 0 KiB were there (partly), by an opera\u{fffd}tor
  n\u{fffd}o
";
        let squeeze = |text: &str| -> Vec<String> {
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
        };
        assert_eq!(squeeze(&text(&sizes("partly"))), squeeze(expected));
        let planned = text(&sizes("planned"));
        assert!(planned.contains("Guest node 1: 256 MiB would be plugged, 64 MiB are\n"), "{planned}");
    }

    #[test]
    fn bounds_are_one_or_two_sizes() {
        let of = |least_bytes, most_bytes| Ok(AutoSize { least_bytes, most_bytes });
        assert_eq!(bounds("512M.."), of(512 << 20, None));
        assert_eq!(bounds("1G..2G"), of(1 << 30, Some(2 << 30)));
        for wrong in ["512M", "..1G", "1..2", "1G...2G", ""] {
            assert!(bounds(wrong).is_err_and(|error| error.starts_with("expected ")), "{wrong}");
        }
    }
}
