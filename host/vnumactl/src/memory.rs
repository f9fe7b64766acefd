//! Where the memory of a VM is, for people.

use crate::table::{Table, list, or_dash, plain, shown, size};
use vnuma_api::{Bytes, GuestNodeMemory, MemoryMoves, VmMemory};

/// All of a VM.
pub fn show(vm: &VmMemory) -> String {
    let mut text = format!("{}: memory policy {}", plain(&vm.vm), plain(&vm.policy));
    match vm.age_ms {
        Some(age_ms) => {
            let (age, cost) = (age_ms as f64 / 1000.0, vm.cost_us as f64 / 1000.0);
            text += &format!("; looked at {age:.1} s ago, in {cost:.1} ms of a CPU\n");
        }
        None => text += "; not looked at yet\n",
    }
    if let Some(problem) = &vm.problem {
        text += &format!("not known: {}\n", plain(problem));
    }
    if vm.unmapped {
        text += "it has memory of guest_memfd, which no process maps: where that is is not shown\n";
    }
    if vm.age_ms.is_some() {
        text += &guest_nodes(&vm.nodes);
        text += &places(&vm.nodes);
    }
    text += &pluggable(&vm.nodes);
    text += &hotness(vm);
    if let Some(moves) = &vm.moves {
        text += &moves_text(moves);
    }
    if let Some(rests_ms) = vm.rests_ms {
        text +=
            &format!("\nWhat could not be moved is not tried for another {} s\n", rests_ms.div_ceil(1000));
    }
    text
}

fn guest_nodes(nodes: &[GuestNodeMemory]) -> String {
    let mut table =
        Table::new(">NODE  >HOME  >MEMORY  >RESIDENT  >DISPLACED  (95 %)  >SWAP  UNMOVABLE  >SAMPLES");
    for node in nodes {
        let known = |bytes: &Bytes| if node.samples == 0 { "-".to_owned() } else { shown(bytes.bytes) };
        let displaced = node.displaced.filter(|_| node.samples > 0);
        let interval = match displaced {
            Some(_) if node.exact => "exact".to_owned(),
            Some(displaced) => format!("{} to {}", shown(displaced.low), shown(displaced.high)),
            None => "-".to_owned(),
        };
        let unmovable =
            node.unmovable.iter().map(|one| format!("{} {}", shown(one.size.bytes), plain(&one.reason)));
        table.row([
            node.id.to_string(),
            or_dash(node.home),
            shown(node.memory_bytes),
            known(&node.resident),
            or_dash(displaced.map(|displaced| share(displaced.bytes, node.memory_bytes))),
            interval,
            known(&node.swapped),
            list(unmovable),
            node.samples.to_string(),
        ]);
    }
    format!("\n{}", table.text(2))
}

fn places(nodes: &[GuestNodeMemory]) -> String {
    let mut table = Table::new(">NODE  >ON  PAGES  >SIZE  ");
    for node in nodes {
        for place in &node.places {
            let pages = match (place.pages.as_str(), place.page_kib) {
                ("huge" | "pool", Some(kib)) => format!("{} {}", size(kib), plain(&place.pages)),
                (pages, _) => plain(pages),
            };
            let away = node.home.is_some_and(|home| home != place.node);
            table.row([
                node.id.to_string(),
                place.node.to_string(),
                pages,
                shown(place.size.bytes),
                if away { "displaced".to_owned() } else { String::new() },
            ]);
        }
    }
    format!("\n{}", table.text(2))
}

fn pluggable(nodes: &[GuestNodeMemory]) -> String {
    let line = |node: &GuestNodeMemory| {
        let found = node.pluggable.as_ref()?;
        let (plugged, most, requested) =
            (shown(found.plugged_bytes), shown(found.most_bytes), shown(found.requested_bytes));
        let places =
            found.places.iter().map(|place| format!(", {} on node {}", shown(place.bytes), place.node));
        let places: String = places.collect();
        Some(format!(
            "guest node {}: {plugged} of {most} are plugged by virtio-mem, {requested} requested{places}\n",
            node.id
        ))
    };
    let lines: String = nodes.iter().filter_map(line).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

/// How hot what is displaced is, or why that is not known.
fn hotness(vm: &VmMemory) -> String {
    let Some(watch) = &vm.hotness else { return String::new() };
    let mut text = String::new();
    if let (Some(age_ms), Some(watched_ms)) = (watch.age_ms, watch.watched_ms) {
        let (age, watched) = (age_ms as f64 / 1000.0, watched_ms as f64 / 1000.0);
        let (regions, cost) = (watch.regions, watch.cost_us as f64 / 1000.0);
        text += &format!(
            "\nHow hot it is was watched for {watched:.1} s, {age:.1} s ago, in {regions} regions and {cost:.1} ms of a CPU\n"
        );
        for (node, hotness) in vm.nodes.iter().filter_map(|node| Some((node.id, node.hotness?))) {
            let [hot, warm, cold] = [hotness.hot, hotness.warm, hotness.cold].map(|one| shown(one.bytes));
            text += &format!("  displaced of guest node {node}: {hot} hot, {warm} warm, {cold} cold\n");
        }
    }
    if let Some(problem) = &watch.problem {
        text += &format!("\nHow hot it is is not known: {}\n", plain(problem));
    }
    text
}

fn moves_text(memory: &MemoryMoves) -> String {
    let mut text = format!("\nMoved: {} in {} moves", shown(memory.bytes), memory.moves);
    if !memory.last.ended {
        text += &format!("; under way: {}", shown(memory.last.moved_bytes));
    }
    text + &format!("\n  {}\n", plain(&memory.last.text()))
}

/// For example `12 MiB, 4.7 %`.
fn share(bytes: u64, of: u64) -> String {
    format!("{}, {:.1} %", shown(bytes), bytes as f64 / of.max(1) as f64 * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{Hotness, HotnessWatch, MemoryPlace, MemoryStep, NodeBytes, Pluggable, Unmovable};

    fn bytes(mib: u64, low: u64, high: u64) -> Bytes {
        Bytes { bytes: mib << 20, low: low << 20, high: high << 20 }
    }

    fn vm() -> VmMemory {
        let place = |node, pages: &str, page_kib, mib| MemoryPlace {
            node,
            pages: pages.into(),
            page_kib,
            size: bytes(mib, mib, mib),
        };
        let first = GuestNodeMemory {
            id: 0,
            home: Some(1),
            memory_bytes: 1 << 30,
            samples: 4096,
            exact: false,
            resident: bytes(900, 890, 910),
            displaced: Some(bytes(50, 40, 62)),
            places: vec![
                place(0, "4K", Some(4), 50),
                place(1, "huge", Some(2048), 800),
                place(1, "4K", Some(4), 50),
            ],
            unmovable: vec![Unmovable { reason: "ksm".into(), size: bytes(12, 9, 15) }],
            ..GuestNodeMemory::default()
        };
        let unseen = GuestNodeMemory { id: 1, memory_bytes: 1 << 30, ..GuestNodeMemory::default() };
        VmMemory {
            vm: "web\u{1b}".into(),
            policy: "both".into(),
            observed_ns: Some(1),
            age_ms: Some(1_260),
            cost_us: 23_400,
            nodes: vec![first, unseen],
            ..VmMemory::default()
        }
    }

    #[test]
    fn a_vm_is_shown_by_guest_node_and_by_place() {
        let expected = "\
web\u{fffd}: memory policy both; looked at 1.3 s ago, in 23.4 ms of a CPU

  NODE  HOME    MEMORY  RESIDENT      DISPLACED  (95 %)            SWAP  UNMOVABLE   SAMPLES
     0     1  1024 MiB   900 MiB  50 MiB, 4.9 %  40 MiB to 62 MiB  0 KiB  12 MiB ksm     4096
     1     -  1024 MiB         -              -  -                     -  -                 0

  NODE  ON  PAGES            SIZE
     0   0  4K             50 MiB  displaced
     0   1  2048 KiB huge  800 MiB
     0   1  4K             50 MiB
";
        let (shown, expected): (Vec<_>, Vec<_>) =
            (show(&vm()).lines().map(squeeze).collect(), expected.lines().map(squeeze).collect());
        assert_eq!(shown, expected);
    }

    /// Columns are aligned by the table, which has tests of its own.
    fn squeeze(line: &str) -> String {
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_is_plugged_is_said() {
        let mut vm = vm();
        assert!(!show(&vm).contains("virtio-mem"));
        vm.nodes[1].pluggable = Some(Pluggable {
            requested_bytes: 256 << 20,
            plugged_bytes: 64 << 20,
            most_bytes: 512 << 20,
            places: vec![NodeBytes { node: 1, bytes: 60 << 20 }],
            ..Pluggable::default()
        });
        let line = "\nguest node 1: 64 MiB of 512 MiB are plugged by virtio-mem, 256 MiB requested, 60 MiB on node 1\n";
        assert!(show(&vm).contains(line), "{}", show(&vm));
    }

    #[test]
    fn how_hot_it_is_is_said_or_why_that_is_not_known() {
        let mut vm = vm();
        assert!(!show(&vm).contains("hot"));
        vm.hotness = Some(HotnessWatch { problem: Some("n\u{1b}o".into()), ..HotnessWatch::default() });
        assert!(show(&vm).ends_with("\nHow hot it is is not known: n\u{fffd}o\n"), "{}", show(&vm));
        let (age_ms, watched_ms) = (Some(12_340), Some(3_060));
        vm.hotness = Some(HotnessWatch { age_ms, watched_ms, regions: 431, cost_us: 51_260, problem: None });
        let mib = |mib| bytes(mib, mib, mib);
        vm.nodes[0].hotness = Some(Hotness { hot: mib(5), warm: mib(7), cold: mib(38) });
        let lines = "\nHow hot it is was watched for 3.1 s, 12.3 s ago, in 431 regions and 51.3 ms of a CPU\n  \
                     displaced of guest node 0: 5120 KiB hot, 7168 KiB warm, 38 MiB cold\n";
        assert!(show(&vm).ends_with(lines), "{}", show(&vm));
    }

    #[test]
    fn what_is_not_known_and_what_was_moved_is_said() {
        let last = MemoryStep {
            policy: "both".into(),
            cause: "more is displaced than the policy's amount".into(),
            from: 0,
            to: 1,
            bytes: 64 << 20,
            guest_node: Some(0),
            displaced_bytes: Some(50 << 20),
            price_ms: 120.0,
            saving_ms_per_s: 14.0,
            assumed: true,
            ..MemoryStep::default()
        };
        let moves = Some(MemoryMoves { moves: 2, bytes: 80 << 20, last });
        let text = show(&VmMemory {
            moves,
            rests_ms: Some(59_001),
            problem: Some("n\u{1b}o".into()),
            unmapped: true,
            ..vm()
        });
        for line in [
            "not known: n\u{fffd}o",
            "it has memory of guest_memfd, which no process maps: where that is is not shown",
            "Moved: 80 MiB in 2 moves; under way: 0 KiB",
            "  guest node 0: up to 64.0 MiB come home from node 0 to 1, by both: more is displaced than the policy's amount; \
             50.0 MiB displaced; 120 ms of work, 14 ms a second saved; accesses are assumed",
            "What could not be moved is not tried for another 60 s",
        ] {
            assert!(text.lines().any(|known| known == line), "{line}\n{text}");
        }
        let unseen = show(&VmMemory { vm: "a".into(), policy: "none".into(), ..VmMemory::default() });
        assert_eq!(unseen, "a: memory policy none; not looked at yet\n");
    }
}
