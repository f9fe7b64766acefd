//! The picture: what an operation costs under each policy, and how many of its accesses are remote.

use crate::{committed::POLICIES, judge::Row};
use anyhow::{Context, Result};
use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Color, DrawingArea, IntoDrawingArea, PathElement, Rectangle, SVGBackend, Text, WHITE,
    },
};
use std::path::Path;
use vnuma_bench_common::bars::{BLUE, GREY, VERMILION};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 1200;
/// Of a row of charts.
const HEIGHT: u32 = 380;
const FONT: (&str, u32) = ("sans-serif", 13);
const TITLE: (&str, u32) = ("sans-serif", 17);

/// Writes an SVG: for each workload the costs by those of `linux`, and the remote shares, under the first profile.
pub fn draw(rows: &[Row], path: &Path) -> Result<()> {
    let profile = rows.first().map(|row| row.profile.clone()).unwrap_or_default();
    let mut workloads: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.profile == profile) {
        if !workloads.contains(&row.workload.as_str()) {
            workloads.push(&row.workload);
        }
    }
    let root = SVGBackend::new(path, (WIDTH, HEIGHT * workloads.len().max(1) as u32)).into_drawing_area();
    let drawn = (|| {
        root.fill(&WHITE)?;
        for (area, workload) in root.split_evenly((workloads.len().max(1), 1)).iter().zip(&workloads) {
            let of: Vec<&Row> =
                rows.iter().filter(|row| row.profile == profile && row.workload == *workload).collect();
            let linux = of
                .iter()
                .find(|row| row.policy == "linux")
                .or(of.first())
                .map_or(1.0, |row| row.cycles_per_op);
            let (left, right) = area.split_horizontally(WIDTH / 2);
            let title = format!("{workload}: modelled time of an operation, linux = 1 ({profile})");
            bars(&left, &title, &of, |row| row.cycles_per_op / linux, "{}")?;
            let title = format!("{workload}: remote accesses to memory, %");
            bars(&right, &title, &of, |row| row.remote_share.unwrap_or(0.0) * 100.0, "{} %")?;
        }
        anyhow::Ok(root.present()?)
    })();
    drawn.with_context(|| path.display().to_string())
}

/// A bar for each policy. One that does not count is an outline.
fn bars(area: &Area<'_>, title: &str, rows: &[&Row], of: impl Fn(&Row) -> f64, unit: &str) -> Result<()> {
    let digits = if unit.contains('%') { 0 } else { 2 };
    let top = rows.iter().map(|row| of(row)).filter(|value| value.is_finite()).fold(0.1, f64::max) * 1.2;
    let mut chart = ChartBuilder::on(area)
        .caption(title, TITLE)
        .margin(12)
        .x_label_area_size(24)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.6..POLICIES.len() as f64 - 0.4, 0.0..top)?;
    let name = |at: &f64| match POLICIES.get(at.round() as usize) {
        Some(name) if (at - at.round()).abs() < 0.01 && *at >= 0.0 => {
            (*name).replace("linux-nobalance", "nobalance")
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(POLICIES.len() + 1)
        .x_label_formatter(&name)
        .label_style(("sans-serif", 11))
        .draw()?;
    for row in rows {
        let Some(at) = POLICIES.iter().position(|policy| *policy == row.policy) else { continue };
        let (at, value) = (at as f64, of(row));
        let colour = match row.policy.as_str() {
            "vprobe" => BLUE,
            "oracle" => VERMILION,
            _ => GREY,
        };
        let corners = [(at - 0.35, 0.0), (at + 0.35, value)];
        match row.does_not_count {
            None => chart.draw_series([Rectangle::new(corners, colour.filled())]).map(drop),
            Some(_) => {
                let [(left, low), (right, high)] = corners;
                let line = vec![(left, low), (left, high), (right, high), (right, low)];
                chart.draw_series([PathElement::new(line, colour)]).map(drop)
            }
        }?;
        let label = unit.replace("{}", &format!("{value:.digits$}"));
        let text = Text::new(label, (at - 0.35, value + top * 0.05), FONT);
        chart.draw_series([text])?;
    }
    Ok(())
}
