//! The shares over time as text of at most 80 columns. It has no control characters, so that a pipe or a file can have it,
//! too; the two lines differ in what they are drawn with, not in colour.

use crate::report::Report;
use crate::series::{Series, VmSeries};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};

const INDENT: usize = 2;
const WIDTH: u16 = 78;
const HEIGHT: u16 = 14;
/// What the y axis is drawn with.
const AXIS: &str = "│";
/// Columns of a bar that stands for all pages.
const BAR: usize = 12;

/// The picture of a run.
pub fn text(report: &Report) -> String {
    let (series, placed) = (&report.series, &report.placed);
    let rows = chart(series);
    let axis = rows.iter().find_map(|row| row.split(AXIS).next().filter(|start| start.len() < row.len()));
    let axis = axis.map_or(0, |start| start.chars().count());
    let mut lines = vec!["  share of fresh pages on the vCPU's node, over time:".to_owned()];
    lines.extend(rows.iter().map(|row| format!("{:INDENT$}{}", "", row.trim_end())));
    let moves = |vm: &VmSeries| vm.moves.iter().map(|moved| moved.seconds).collect();
    let rows = [
        ("vnuma", moves(&series.dynamic)),
        ("static", moves(&series.static_)),
        (placed.policy, vec![placed.seconds]),
    ];
    for (name, times) in rows {
        let marks = marks(series.seconds, &times, usize::from(WIDTH) - axis - 1);
        lines.push(format!("{name:>width$} {marks}", width = INDENT + axis).trim_end().to_owned());
    }
    lines.push("  ⣀⠤ with vnuma   • static vNUMA   ^ a vCPU came to another node".to_owned());
    lines.push(format!("  {}: set for the static VM, whose guest is told nothing", placed.policy));
    lines.join("\n")
}

/// Rows of the chart with its axes.
fn chart(series: &Series) -> Vec<String> {
    let [dynamic, static_] = [&series.dynamic, &series.static_].map(|vm| series.lines(vm));
    let sets = static_.iter().map(|points| set(points, Marker::Dot));
    let sets = sets.chain(dynamic.iter().map(|points| set(points, Marker::Braille))).collect();
    let seconds = |share: f64| Line::from(format!("{:.0} s", series.seconds * share));
    let percent = ["0 %", "50 %", "100 %"].map(Line::from);
    let chart = Chart::new(sets)
        .x_axis(Axis::default().bounds([0.0, series.seconds]).labels([0.0, 0.5, 1.0].map(seconds)))
        .y_axis(Axis::default().bounds([0.0, 100.0]).labels(percent))
        .legend_position(None);
    let area = Rect::new(0, 0, WIDTH, HEIGHT);
    let mut buffer = Buffer::empty(area);
    chart.render(area, &mut buffer);
    let row = |y| (0..WIDTH).map(|x| buffer[(x, y)].symbol()).collect();
    (0..HEIGHT).map(row).collect()
}

/// Points that are joined.
fn set(points: &[(f64, f64)], marker: Marker) -> Dataset<'_> {
    Dataset::default().marker(marker).graph_type(GraphType::Line).data(points)
}

/// A mark in the column of each time.
fn marks(seconds: f64, times: &[f64], width: usize) -> String {
    let mut marks = vec![' '; width];
    for time in times {
        let column = (time / seconds * width as f64) as usize;
        marks[column.min(width - 1)] = '^';
    }
    marks.into_iter().collect()
}

/// A share of the last seconds, in percent and as a bar.
pub fn bar(share: Option<f64>) -> String {
    let Some(share) = share else { return format!("    -   {:BAR$}", "") };
    let filled = (share * BAR as f64).round() as usize;
    format!("{:5.1} % {:BAR$}", share * 100.0, "█".repeat(filled.min(BAR)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placed::BeforeAfter;
    use crate::series::Move;

    const EXPECTED: &str = "  share of fresh pages on the vCPU's node, over time:
  100 %│ ⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉
       │
       │
       │
       │
       │
  50 % │
       │
       │ ••••••••••••••••••••••••••         •••••••••••••••••••••••••••••••••••
       │
       │
  0 %  │
       └────────────────────────────────────────────────────────────────────────
     0 s                                  10 s                              20 s
  vnuma ^                                   ^                                  ^
 static                   ^
 vprobe                                                       ^
  ⣀⠤ with vnuma   • static vNUMA   ^ a vCPU came to another node
  vprobe: set for the static VM, whose guest is told nothing";

    fn report() -> Report {
        let moved = |seconds| Move { seconds, vcpu: 1, from_node: Some(0), to_node: Some(1) };
        let vm = |share: f64, gap: usize, moves: &[f64]| VmSeries {
            local_share: (0..40).map(|window| (window / 5 != gap).then_some(share)).collect(),
            moves: moves.iter().copied().map(moved).collect(),
        };
        let (dynamic, static_) = (vm(1.0, 9, &[0.0, 10.0, 19.9]), vm(0.25, 3, &[5.0]));
        let placed = BeforeAfter { policy: "vprobe", seconds: 15.0, ..BeforeAfter::default() };
        let series = Series { seconds: 20.0, window_seconds: 0.5, dynamic, static_ };
        Report { series, placed, ..Report::default() }
    }

    #[test]
    fn a_known_series_looks_as_expected() {
        assert_eq!(text(&report()), EXPECTED);
    }

    #[test]
    fn the_picture_fits_a_terminal_and_has_no_control_characters() {
        let text = text(&report());
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
        let series = Series { seconds: 5.0, window_seconds: 0.5, ..Series::default() };
        assert!(super::text(&Report { series, ..Report::default() }).contains("5 s"));
    }

    #[test]
    fn bars_have_one_width() {
        assert_eq!(bar(Some(1.0)), "100.0 % ████████████");
        assert_eq!(bar(Some(0.251)), " 25.1 % ███         ");
        assert_eq!(bar(None), "    -               ");
        assert!([0.0, 0.5, 1.0].map(Some).into_iter().chain([None]).all(|s| bar(s).chars().count() == 20));
    }
}
