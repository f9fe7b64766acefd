//! The picture, as figure 9 of the paper: what is done in the same time by what `ideal` does, and below it, over the time of a load with
//! changes, how much of its accesses to memory is remote.

use crate::{
    committed::{By, JUDGED_RATE, Policy, RATES, Workload},
    judge::Row,
    raw::Cell,
};
use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Color, DrawingArea, IntoDrawingArea, LineSeries, PathElement, RGBColor, Rectangle,
        SVGBackend, SeriesLabelPosition, Text, WHITE,
    },
};
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1200, 860);
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
/// Of the bars' chart: there is room for the legend above them.
const TOP: f64 = 1.7;

/// Writes an SVG: bars of the first profile's rows that goals are about.
pub fn draw(rows: &[Row], cells: &[Cell], path: &Path) -> Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let drawn = (|| {
        root.fill(&WHITE).map_err(|error| error.to_string())?;
        let (above, below) = root.split_vertically(SIZE.1 / 2);
        bars(&above, rows)?;
        let is_there = |workload: &Workload| cells.iter().any(|cell| cell.workload == *workload);
        let shown: Vec<Workload> = Workload::ALL.into_iter().filter(is_there).collect();
        for (area, &workload) in below.split_evenly((1, shown.len().max(1))).iter().zip(&shown) {
            let wanted = |cell: &&Cell| {
                cell.workload == workload
                    && cell.changes_per_minute == JUDGED_RATE
                    && cell.autonuma
                    && cell.by == By::Hand
            };
            remote(area, workload, &cells.iter().filter(wanted).collect::<Vec<_>>())?;
        }
        root.present().map_err(|error| error.to_string())
    })();
    drawn.map_err(|error: String| anyhow!("{}: {error}", path.display()))
}

fn colour(policy: Policy) -> RGBColor {
    COLOURS[Policy::ALL.iter().position(|one| *one == policy).unwrap_or_default()]
}

fn bars(area: &Area<'_>, rows: &[Row]) -> Result<(), String> {
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
    let by_ideal = |(workload, rate): (Workload, u32), policy| {
        Some(of(workload, Policy::Ideal, 0)? / of(workload, policy, rate)?)
    };
    let places = Workload::ALL.into_iter().flat_map(|workload| RATES.map(|rate| (workload, rate)));
    let places: Vec<(Workload, u32)> =
        places.filter(|place| Policy::ALL.iter().any(|policy| by_ideal(*place, *policy).is_some())).collect();
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("what is done in the same modelled time, ideal = 1 ({profile}; higher is better)"),
            TITLE,
        )
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.5..places.len().max(1) as f64 - 0.5, 0.0..TOP)
        .map_err(|error| error.to_string())?;
    let name = |at: &f64| match places.get(at.round() as usize) {
        Some((workload, rate)) if (at - at.round()).abs() < 0.01 && *at >= 0.0 => {
            format!("{}, {rate} changes", workload.name())
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(places.len() * 2)
        .x_label_formatter(&name)
        .label_style(FONT)
        .draw()
        .map_err(|error| error.to_string())?;
    let is_there = |policy: &Policy| places.iter().any(|place| by_ideal(*place, *policy).is_some());
    let shown: Vec<Policy> = Policy::ALL.into_iter().filter(is_there).collect();
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
            .draw_series(values.iter().map(bar))
            .map_err(|error| error.to_string())?
            .label(policy.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour(policy).filled()));
        let text = |&(at, value): &(usize, f64)| {
            Text::new(format!("{value:.2}"), (left(at), value + 0.04), ("sans-serif", 10))
        };
        chart.draw_series(values.iter().map(text)).map_err(|error| error.to_string())?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()
        .map_err(|error| error.to_string())
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

fn remote(area: &Area<'_>, workload: Workload, cells: &[&Cell]) -> Result<(), String> {
    let right = cells.iter().map(|cell| cell.window_s).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: remote accesses, %", workload.name()), TITLE)
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..right, 0.0..100.0)
        .map_err(|error| error.to_string())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_desc("seconds of the guest")
        .label_style(FONT)
        .draw()
        .map_err(|error| error.to_string())?;
    for cell in cells {
        let colour = colour(cell.policy);
        chart
            .draw_series(LineSeries::new(points(cell), colour.stroke_width(2)))
            .map_err(|error| error.to_string())?
            .label(cell.policy.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    // Where a vCPU goes to another node: all policies have the same moments.
    let moments =
        cells.first().map(|cell| cell.changes.iter().map(|change| change.at_s)).into_iter().flatten();
    chart
        .draw_series(
            moments.map(|at| PathElement::new([(at, 0.0), (at, 4.0)], RGBColor(0, 0, 0).stroke_width(2))),
        )
        .map_err(|error| error.to_string())?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()
        .map_err(|error| error.to_string())
}
