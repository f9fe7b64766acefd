//! The picture, as figure 7 of the paper: what of the VM's memory is displaced over the periods of the I/O load, a chart for each
//! cause.

use crate::{
    committed::{Cause, Policy, goals},
    raw::Cell,
};
use anyhow::{Context, Result};
use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Color, DrawingArea, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend,
        SeriesLabelPosition, WHITE,
    },
};
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1200, 800);
const FONT: (&str, u32) = ("sans-serif", 12);
const TITLE: (&str, u32) = ("sans-serif", 17);
/// In the order of [`Policy::ALL`]; blue for `adaptive`, all apart for any kind of colour vision (Okabe and Ito).
const COLOURS: [RGBColor; 9] = [
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0xf0, 0xe4, 0x42),
];

/// Writes an SVG.
pub fn draw(cells: &[Cell], path: &Path) -> Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let drawn = (|| {
        root.fill(&WHITE)?;
        for (area, cause) in root.split_evenly((2, 2)).iter().zip(Cause::ALL) {
            let of: Vec<&Cell> = cells.iter().filter(|cell| cell.cause == cause).collect();
            chart(area, cause, &of)?;
        }
        anyhow::Ok(root.present()?)
    })();
    drawn.with_context(|| path.display().to_string())
}

/// Each period's most, just after the load's work, and its end: periods are numbered from 1, per cent.
fn points(cell: &Cell) -> Vec<(f64, f64)> {
    let percent = |bytes: u64, all: u64| bytes as f64 / all.max(1) as f64 * 100.0;
    let of = |(number, period): (usize, &crate::raw::Period)| {
        let worked = (period.worked_s / period.elapsed_s.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        [
            (number as f64 + worked, percent(period.displaced_after_work, period.resident)),
            (number as f64 + 1.0, percent(period.displaced, period.resident)),
        ]
    };
    std::iter::once((0.0, 0.0)).chain(cell.periods.iter().enumerate().flat_map(of)).collect()
}

fn chart(area: &Area<'_>, cause: Cause, cells: &[&Cell]) -> Result<()> {
    let lines: Vec<(Policy, Vec<(f64, f64)>)> =
        cells.iter().map(|cell| (cell.policy, points(cell))).collect();
    let all = || lines.iter().flat_map(|(_, points)| points);
    let right = all().map(|point| point.0).fold(1.0, f64::max);
    let top = all().map(|point| point.1).fold(goals::DISPLACES * 100.0, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: displaced memory of the VM, %", cause.name()), TITLE)
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    chart.configure_mesh().disable_x_mesh().x_desc("periods of the I/O load").label_style(FONT).draw()?;
    for (policy, points) in &lines {
        let at = Policy::ALL.iter().position(|one| one == policy).unwrap_or_default();
        let colour = COLOURS[at];
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(policy.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()?;
    Ok(())
}
