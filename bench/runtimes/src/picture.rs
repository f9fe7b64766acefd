//! The picture, as figures 6 to 9 of the paper: what is done in the same time by what `ideal` does, without changes (figures 6 and 7) and
//! with them (figure 9); over the time of a load with changes, how much of its accesses to memory is remote; and the nodes that vCPUs
//! are on meanwhile (figure 8).

use crate::{
    committed::{AWAY_AT_FIRST, By, HOMES, JUDGED_RATE, NODES, Policy, RATES, Workload},
    judge::Row,
    raw::Cell,
};
use anyhow::{Context, Result};
use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Color, DrawingArea, IntoDrawingArea, LineSeries, PathElement, RGBColor, Rectangle,
        SVGBackend, SeriesLabelPosition, Text, WHITE,
    },
};
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 1200;
/// Of a chart of bars, of a row of charts of accesses, and of the charts of nodes.
const HEIGHTS: [u32; 3] = [380, 430, 260];
/// Charts of accesses beside each other.
const COLUMNS: usize = 4;
const FONT: (&str, u32) = ("sans-serif", 12);
const TITLE: (&str, u32) = ("sans-serif", 17);
/// In the order of [`Policy::ALL`]; blue for `full`, others apart for any kind of colour vision (Okabe and Ito).
const COLOURS: [RGBColor; 9] = [
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0x66, 0x66, 0x66),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x72, 0xb2),
];
/// What all bars of a workload take of its place.
const BARS: f64 = 0.8;
/// The end of the bars' scale.
const TOP: f64 = 1.2;
/// What the legend takes beside the bars, of their width. Lines have the same colours.
const LEGEND: f64 = 0.16;

/// Writes an SVG: bars of the first profile's rows that goals are about.
pub fn draw(rows: &[Row], cells: &[Cell], path: &Path) -> Result<()> {
    let judged = |cell: &&Cell| cell.changes_per_minute == JUDGED_RATE && cell.autonuma;
    let changed: Vec<&Cell> = cells.iter().filter(judged).collect();
    let by_hand = |workload: Workload| {
        let wanted = move |cell: &&&Cell| cell.workload == workload && cell.by == By::Hand;
        changed.iter().filter(wanted).copied().collect::<Vec<&Cell>>()
    };
    let shown: Vec<Workload> =
        Workload::ALL.iter().copied().filter(|workload| !by_hand(*workload).is_empty()).collect();
    let lines = shown.len().div_ceil(COLUMNS);
    let is_there = |rate: &u32| rows.iter().any(|row| row.changes_per_minute == *rate && row.is_judged());
    let rates: Vec<u32> = RATES.into_iter().filter(is_there).collect();
    let of_bars = HEIGHTS[0] * rates.len() as u32;
    let height = of_bars + HEIGHTS[1] * lines as u32 + HEIGHTS[2];
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    let drawn = (|| {
        root.fill(&WHITE)?;
        let (above, below) = root.split_vertically(of_bars);
        for (area, rate) in above.split_evenly((rates.len().max(1), 1)).iter().zip(&rates) {
            bars(area, rows, *rate)?;
        }
        let (accesses, nodes) = below.split_vertically(HEIGHTS[1] * lines as u32);
        let columns = shown.len().clamp(1, COLUMNS);
        for (area, &workload) in accesses.split_evenly((lines.max(1), columns)).iter().zip(&shown) {
            remote(area, workload, &by_hand(workload))?;
        }
        let one_of_each = [By::Hand, By::Balancer].map(|by| changed.iter().find(|cell| cell.by == by));
        let moved: Vec<&Cell> = one_of_each.into_iter().flatten().copied().collect();
        for (area, cell) in nodes.split_evenly((1, moved.len().max(1))).iter().zip(&moved) {
            nodes_of_vcpus(area, cell)?;
        }
        anyhow::Ok(root.present()?)
    })();
    drawn.with_context(|| path.display().to_string())
}

fn colour(policy: Policy) -> RGBColor {
    COLOURS[Policy::ALL.iter().position(|one| *one == policy).unwrap_or_default()]
}

fn title(profile: &str, rate: u32) -> String {
    let changes =
        if rate > 0 { format!("with {rate} changes a minute") } else { "without changes".to_owned() };
    format!("done in the same modelled time {changes}, by ideal = 1 ({profile}; higher is better)")
}

/// With so many changes a minute.
fn bars(area: &Area<'_>, rows: &[Row], rate: u32) -> Result<()> {
    let profile = rows.first().map(|row| row.profile.clone()).unwrap_or_default();
    let of = |workload: Workload, policy: Policy, rate: u32| {
        let same = |row: &&Row| {
            row.profile == profile
                && row.workload == workload
                && row.policy == policy
                && row.changes_per_minute == rate
                && row.is_judged()
        };
        rows.iter().find(same).map(|row| row.cycles_per_op)
    };
    let by_ideal = |workload: Workload, policy: Policy| {
        Some(of(workload, Policy::Ideal, 0)? / of(workload, policy, rate)?)
    };
    let is_shown =
        |workload: &Workload| Policy::ALL.iter().any(|policy| by_ideal(*workload, *policy).is_some());
    let places: Vec<Workload> = Workload::ALL.iter().copied().filter(is_shown).collect();
    let title = title(&profile, rate);
    let mut chart = ChartBuilder::on(area)
        .caption(title, TITLE)
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.5..places.len().max(1) as f64 * (1.0 + LEGEND) - 0.5, 0.0..TOP)?;
    let name = |at: &f64| match places.get(at.round() as usize) {
        Some(workload) if (at - at.round()).abs() < 0.01 && *at >= 0.0 => workload.name().to_owned(),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(places.len() * 2)
        .x_label_formatter(&name)
        .label_style(FONT)
        .draw()?;
    let is_there = |policy: &Policy| places.iter().any(|place| by_ideal(*place, *policy).is_some());
    let shown: Vec<Policy> = Policy::ALL.iter().copied().filter(is_there).collect();
    let width = BARS / shown.len().max(1) as f64;
    for (index, &policy) in shown.iter().enumerate() {
        let left = |at: usize| at as f64 + (index as f64 - shown.len() as f64 / 2.0) * width;
        let values: Vec<(usize, f64)> = places
            .iter()
            .enumerate()
            .filter_map(|(at, place)| Some((at, by_ideal(*place, policy)?)))
            .collect();
        let bar = |&(at, value): &(usize, f64)| {
            Rectangle::new([(left(at), 0.0), (left(at) + width * 0.9, value)], colour(policy).filled())
        };
        chart
            .draw_series(values.iter().map(bar))?
            .label(policy.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour(policy).filled()));
        let text = |&(at, value): &(usize, f64)| {
            Text::new(format!("{value:.2}"), (left(at), value + 0.04), ("sans-serif", 10))
        };
        chart.draw_series(values.iter().map(text))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()?;
    Ok(())
}

/// Each sample's end, and what is remote of the accesses of all vCPUs, per cent.
fn points(cell: &Cell) -> Vec<(f64, f64)> {
    let of = |sample: &crate::raw::Sample| {
        let sum = |at: usize| sample.accesses.iter().map(|one| one[at]).sum::<u64>();
        let (local, remote) = (sum(0), sum(1));
        (sample.at_s, remote as f64 / (local + remote).max(1) as f64 * 100.0)
    };
    cell.samples.iter().map(of).collect()
}

fn remote(area: &Area<'_>, workload: Workload, cells: &[&Cell]) -> Result<()> {
    let right = cells.iter().map(|cell| cell.window_s).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: remote accesses, % (colours as above)", workload.name()), TITLE)
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..right, 0.0..100.0)?;
    chart.configure_mesh().disable_x_mesh().x_desc("seconds of the guest").label_style(FONT).draw()?;
    for cell in cells {
        let colour = colour(cell.policy);
        chart.draw_series(LineSeries::new(points(cell), colour.stroke_width(2)))?;
    }
    // Where a vCPU goes to another node: all policies have the same moments.
    let moments =
        cells.first().map(|cell| cell.changes.iter().map(|change| change.at_s)).into_iter().flatten();
    chart
        .draw_series(
            moments.map(|at| PathElement::new([(at, 0.0), (at, 4.0)], RGBColor(0, 0, 0).stroke_width(2))),
        )
        .map(drop)?;
    Ok(())
}

/// What a step of a line is high, of the place of a vCPU.
const STEP: f64 = 0.6;

/// Where each vCPU is: time, and node.
fn stays(cell: &Cell, vcpu: usize) -> Vec<(f64, usize)> {
    let away = cell.by == By::Hand && AWAY_AT_FIRST.contains(&vcpu);
    let at_first = if away { NODES - 1 - HOMES[vcpu] } else { HOMES[vcpu] };
    let its: Vec<_> = cell.changes.iter().filter(|change| change.vcpu == vcpu).collect();
    // There are two nodes, and it came from the other one.
    let mut node = its.first().map_or(at_first, |change| NODES - 1 - change.node);
    let mut points = vec![(0.0, node)];
    for change in its {
        points.push((change.at_s, node));
        node = change.node;
        points.push((change.at_s, node));
    }
    points.push((cell.window_s, node));
    points
}

fn nodes_of_vcpus(area: &Area<'_>, cell: &Cell) -> Result<()> {
    let how = match cell.by {
        By::Hand => "put there one at a time",
        By::Balancer => "moved by the server's scheduler",
    };
    let mut chart = ChartBuilder::on(area)
        .caption(format!("nodes of vCPUs, {how}"), TITLE)
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..cell.window_s.max(1.0), -0.2..HOMES.len() as f64)?;
    let name = |at: &f64| match at.round() {
        lane if (at - lane).abs() < 0.01 && *at >= 0.0 && lane < HOMES.len() as f64 => format!("vCPU {lane}"),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("seconds of the guest (low: node 0, high: node 1)")
        .y_labels(HOMES.len() * 2)
        .y_label_formatter(&name)
        .label_style(FONT)
        .draw()?;
    for vcpu in 0..HOMES.len() {
        let points = stays(cell, vcpu).into_iter().map(|(at, node)| (at, vcpu as f64 + STEP * node as f64));
        chart.draw_series(LineSeries::new(points, RGBColor(0x00, 0x72, 0xb2).stroke_width(2)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::Change;

    #[test]
    fn a_vcpu_is_where_it_came_from_until_it_goes() {
        let mut cell = Cell {
            workload: Workload::Stream,
            policy: Policy::Full,
            changes_per_minute: JUDGED_RATE,
            by: By::Hand,
            autonuma: true,
            take: 0,
            window_s: 48.0,
            operations: 1,
            vcpus: Vec::new(),
            changes: vec![Change { at_s: 12.0, vcpu: 1, node: 1 }, Change { at_s: 36.0, vcpu: 1, node: 0 }],
            samples: Vec::new(),
            pages_migrated: 0,
            told: None,
            commit: String::new(),
        };
        assert_eq!(stays(&cell, 1), [(0.0, 0), (12.0, 0), (12.0, 1), (36.0, 1), (36.0, 0), (48.0, 0)]);
        assert_eq!(stays(&cell, 0), [(0.0, 1), (48.0, 1)], "one that is away when it is measured");
        assert_eq!(stays(&cell, 3), [(0.0, 1), (48.0, 1)], "one that stays at home");
        cell.by = By::Balancer;
        cell.changes.clear();
        assert_eq!(stays(&cell, 0), [(0.0, 0), (48.0, 0)]);
    }
}
