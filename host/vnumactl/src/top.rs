//! vCPUs and their policies, again and again.

use crate::{
    failure::Failure,
    policy::{percent, quality},
    table::{Table, or_dash, plain, size as size_of_memory},
};
use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Rect},
    style::{Modifier, Style},
    text::Line,
    widgets::{Row, Table as Rows, Widget},
};
use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};
use vnuma_api::{Daemon, Scheduling, VcpuScheduling, operation as op};
use vnuma_client::Client;

const HEADINGS: [&str; 12] = [
    "VM",
    "VCPU",
    "NODE",
    "CPUS",
    "PRESSURE",
    "TYPE",
    "REMOTE",
    "WAITED",
    "DISPLACED",
    "FIGURES",
    "MOVES",
    "LAST STEP",
];
/// A terminal whose size is not known.
const USUAL_SIZE: (u16, u16) = (120, 40);
/// Terminals are not larger.
const LARGEST: u16 = 1000;
/// Least time between two pictures.
const LEAST_PAUSE: Duration = Duration::from_millis(250);

/// Shows all vCPUs until it is interrupted; once, if that is wanted or the output is no terminal.
pub async fn run(client: &Client, json: bool, once: bool) -> Result<(), Failure> {
    let mut out = io::stdout();
    if once || json || !out.is_terminal() {
        let vms = client.ask::<op::Policies>((), &()).await?;
        let text = match json {
            true => serde_json::to_string_pretty(&vms).map_err(|error| Failure::Output(error.into()))? + "\n",
            false => text(&vms),
        };
        return out.write_all(text.as_bytes()).map_err(Failure::Output);
    }
    let screen = Screen::enter().map_err(Failure::Output)?;
    let shown = tokio::select! {
        shown = show(client) => shown,
        // Whatever ends it, the terminal is as before.
        interrupted = tokio::signal::ctrl_c() => interrupted.map_err(Failure::Output),
    };
    drop(screen);
    shown
}

async fn show(client: &Client) -> Result<(), Failure> {
    loop {
        let daemon = client.ask::<op::Daemon>((), &()).await?;
        let vms = client.ask::<op::Policies>((), &()).await?;
        let (columns, lines) = size();
        let picture = picture(&daemon, &vms, Rect::new(0, 0, columns, lines));
        let mut out = io::stdout().lock();
        out.write_all(picture.as_bytes()).and_then(|()| out.flush()).map_err(Failure::Output)?;
        drop(out);
        tokio::time::sleep(Duration::from_millis(daemon.policy_period_ms).max(LEAST_PAUSE)).await;
    }
}

/// The terminal's other screen, without a cursor, until it is dropped.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        let mut out = io::stdout();
        out.write_all(b"\x1b[?1049h\x1b[?25l\x1b[2J")?;
        out.flush()?;
        Ok(Self)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that is gone.
        let mut out = io::stdout();
        let _ = out.write_all(b"\x1b[?25h\x1b[?1049l").and_then(|()| out.flush());
    }
}

fn size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (size.ws_col.min(LARGEST), size.ws_row.min(LARGEST))
        }
        _ => USUAL_SIZE,
    }
}

/// The vCPUs in the order in which they are shown: those with most remote accesses of CPU time first.
fn sorted(vms: &[Scheduling]) -> Vec<(&Scheduling, &VcpuScheduling)> {
    let mut vcpus: Vec<_> = vms.iter().flat_map(|vm| vm.vcpus.iter().map(move |vcpu| (vm, vcpu))).collect();
    let rank = |vcpu: &VcpuScheduling| vcpu.remote_share.unwrap_or(-1.0) * vcpu.ran_share.unwrap_or(0.0);
    vcpus.sort_by(|(_, a), (_, b)| rank(b).total_cmp(&rank(a)));
    vcpus
}

fn cells(vm: &Scheduling, vcpu: &VcpuScheduling) -> [String; 12] {
    // The later one of what was done to it and to the memory of its VM.
    let memory = vm.memory.as_ref().map(|memory| &memory.last);
    let memory = memory.filter(|memory| vcpu.last.as_ref().is_none_or(|step| step.time_ns < memory.time_ns));
    let memory = memory.map(|step| plain(&format!("memory {} to {}, {}", step.from, step.to, step.cause)));
    let last = vcpu.last.as_ref().map(|step| {
        let nodes = match (step.from, step.to) {
            (Some(from), Some(to)) if from != to => format!("{from} to {to}, "),
            _ => String::new(),
        };
        plain(&format!("{nodes}{}", step.cause))
    });
    [
        plain(&vm.vm),
        vcpu.vcpu.to_string(),
        or_dash(vcpu.node),
        or_dash(vcpu.policy_cpus.as_ref().or(vcpu.operator_cpus.as_ref())),
        vcpu.pressure.map_or_else(|| "-".to_owned(), |pressure| format!("{pressure:.1}")),
        vcpu.kind.as_deref().map_or_else(|| "-".to_owned(), plain),
        percent(vcpu.remote_share),
        percent(vcpu.wait_share),
        vm.displaced_bytes.map_or_else(|| "-".to_owned(), |bytes| size_of_memory(bytes >> 10)),
        quality(vcpu),
        vcpu.moves.to_string(),
        memory.or(last).unwrap_or_else(|| "-".to_owned()),
    ]
}

/// All vCPUs, for a pipe.
pub fn text(vms: &[Scheduling]) -> String {
    if vms.is_empty() {
        return "no VMs\n".to_owned();
    }
    let mut table = Table::new(&HEADINGS.join("  "));
    for (vm, vcpu) in sorted(vms) {
        table.row(cells(vm, vcpu));
    }
    table.text(0)
}

/// What the terminal is sent for a picture of this size.
fn picture(daemon: &Daemon, vms: &[Scheduling], area: Rect) -> String {
    let buffer = draw(daemon, vms, area);
    let mut text = String::from("\x1b[H");
    for y in 0..area.height {
        let (mut line, mut bold) = (String::new(), false);
        for x in 0..area.width {
            let Some(cell) = buffer.cell((x, y)) else { continue };
            let now = cell.modifier.contains(Modifier::BOLD);
            if now != bold {
                line += if now { "\x1b[1m" } else { "\x1b[0m" };
                bold = now;
            }
            line += cell.symbol();
        }
        text += line.trim_end();
        // The rest of the line may still have the last picture.
        text += "\x1b[0m\x1b[K";
        if y + 1 < area.height {
            text += "\r\n";
        }
    }
    text
}

fn draw(daemon: &Daemon, vms: &[Scheduling], area: Rect) -> Buffer {
    let mut buffer = Buffer::empty(area);
    let vcpus = sorted(vms);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let confined = vcpus.iter().filter(|(_, vcpu)| vcpu.policy_cpus.is_some()).count();
    let head = format!(
        "{} VMs, {} vCPUs, {confined} confined by policies; a period of {} ms; counters: {}; Ctrl-C ends",
        vms.len(),
        vcpus.len(),
        daemon.policy_period_ms,
        plain(&daemon.counters.source),
    );
    Line::from(head).render(Rect { height: area.height.min(1), ..area }, &mut buffer);
    let rows: Vec<[String; 12]> = vcpus.iter().map(|(vm, vcpu)| cells(vm, vcpu)).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        let widest = cells.chain([HEADINGS[column].len()]).max().unwrap_or(0);
        Constraint::Length(u16::try_from(widest).unwrap_or(u16::MAX))
    };
    let widths: Vec<_> = (0..HEADINGS.len()).map(width).collect();
    let below = Rect { y: area.y + area.height.min(2), height: area.height.saturating_sub(2), ..area };
    let rows = rows.into_iter().take(below.height.into()).map(Row::new);
    let table = Rows::new(rows, widths).header(Row::new(HEADINGS).style(bold)).column_spacing(2);
    Widget::render(table, below, &mut buffer);
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{MemoryMoves, MemoryStep, PolicyStep};

    fn vms() -> Vec<Scheduling> {
        let vcpu = |vcpu: u32, remote_share: f64| VcpuScheduling {
            vcpu,
            node: Some(1),
            quality: Some("counted".into()),
            counted_permille: Some(1000),
            pressure: Some(20.04),
            kind: Some("LLC-T".into()),
            remote_share: Some(remote_share),
            ran_share: Some(1.0),
            wait_share: Some(0.0),
            policy_cpus: Some("4-7".parse().expect("a list")),
            ..VcpuScheduling::default()
        };
        let step = PolicyStep {
            from: Some(0),
            to: Some(1),
            cause: "its memory is there".into(),
            ..PolicyStep::default()
        };
        let moved = VcpuScheduling { moves: 3, last: Some(step), ..vcpu(1, 0.5) };
        let vm = |name: &str, vcpus| Scheduling {
            vm: name.into(),
            policy: "vprobe".into(),
            vcpus,
            displaced_bytes: (name != "b").then_some(300 << 20),
            ..Scheduling::default()
        };
        vec![vm("a\u{1b}", vec![vcpu(0, 0.1), moved]), vm("b", vec![VcpuScheduling::default()])]
    }

    const TABLE: &str = "\
VM  VCPU  NODE  CPUS  PRESSURE  TYPE   REMOTE  WAITED  DISPLACED  FIGURES   MOVES  LAST STEP
a\u{fffd}  1     1     4-7   20.0      LLC-T  50 %    0 %     300 MiB    counted   3      0 to 1, its memory is there
a\u{fffd}  0     1     4-7   20.0      LLC-T  10 %    0 %     300 MiB    counted   0      -
b   0     -     -     -         -      -       -       -          none yet  0      -
";

    #[test]
    fn the_most_remote_ones_come_first() {
        assert_eq!(text(&vms()), TABLE);
        assert_eq!(text(&[]), "no VMs\n");
    }

    #[test]
    fn a_later_move_of_memory_is_the_last_step() {
        let mut vms = vms();
        let last = MemoryStep { time_ns: 5, from: 1, cause: "why".into(), ..MemoryStep::default() };
        vms[0].memory = Some(MemoryMoves { last, ..MemoryMoves::default() });
        vms[0].vcpus[1].last.as_mut().expect("a step").time_ns = 9;
        let shown: Vec<String> = vms[0].vcpus.iter().map(|vcpu| cells(&vms[0], vcpu)[11].clone()).collect();
        assert_eq!(shown, ["memory 1 to 0, why", "0 to 1, its memory is there"]);
    }

    #[test]
    fn a_picture_is_as_large_as_the_terminal_and_holds_no_text_that_would_disturb_it() {
        let daemon: Daemon = serde_json::from_value(serde_json::json!({
            "version": "1", "pid": 1, "location_source": "bpf", "why_not_bpf": null, "affinity_events": true,
            "location_events_lost": 0, "replug_after_s": null, "policy": "off", "policy_period_ms": 1000,
            "counters": {"source": "generic", "passed_over": [], "threads": 3, "failed": 0, "why_failed": null,
                "why_no_idle_times": null}, "watchers": 0, "watchers_dropped": 0
        }))
        .expect("a daemon");
        let shown = picture(&daemon, &vms(), Rect::new(0, 0, 110, 6));
        let plain =
            shown.replace("\x1b[H", "").replace("\x1b[K", "").replace("\x1b[0m", "").replace("\x1b[1m", "");
        assert!(!plain.contains('\x1b'), "{plain:?}");
        let lines: Vec<_> = plain.split("\r\n").collect();
        assert_eq!(lines.len(), 6);
        assert!(
            lines[0].starts_with(
                "2 VMs, 3 vCPUs, 2 confined by policies; a period of 1000 ms; counters: generic"
            )
        );
        let expected: Vec<_> = TABLE.lines().collect();
        assert_eq!(lines[2..], expected[..]);
        for size in [(0, 0), (1, 1), (5, 2), (300, 1)] {
            picture(&daemon, &vms(), Rect::new(0, 0, size.0, size.1));
        }
    }
}
