//! The picture: page faults beside their floor, and transports as GiantVM's figure 8 shows them.

use crate::report::{Report, Row};
use anyhow::{Context, Result};
use plotters::{
    chart::ChartContext,
    coord::{CoordTranslate, Shift},
    prelude::{
        ChartBuilder, Color, DrawingArea, IntoDrawingArea, IntoLogRange, LineSeries, PathElement, RGBColor,
        Rectangle, SVGBackend, SeriesLabelPosition, WHITE,
    },
};
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1500, 1500);
const UPPER: i32 = 1000;
const ACCESSES: [&str; 5] =
    ["read-owner", "read-nonowner", "write-owner", "write-nonowner-hint", "write-nonowner-miss"];
const COLOURS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(214, 39, 40), RGBColor(44, 160, 44), RGBColor(120, 120, 120)];
const FONT: (&str, u32) = ("sans-serif", 14);

/// Writes an SVG.
pub fn draw(report: &Report, path: &Path) -> Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let drawn = (|| {
        root.fill(&WHITE)?;
        let (upper, lower) = root.split_vertically(UPPER);
        let faults = upper.split_evenly((3, 1));
        for (area, transport) in faults.iter().zip(["tcp", "tcp-tls", "shm"]) {
            bars(area, report, transport)?;
        }
        let lines = lower.split_evenly((1, 2));
        curves(&lines[0], report, "round trip, us (p50)", |transfer| transfer.round_trip_us.p50)?;
        curves(&lines[1], report, "bandwidth, MiB/s", |transfer| transfer.bandwidth_mib_per_s)?;
        anyhow::Ok(root.present()?)
    })();
    drawn.with_context(|| path.display().to_string())
}

fn of<'a>(report: &'a Report, transport: &str, mode: &str, access: Option<&str>) -> Option<&'a Row> {
    let same = |row: &&Row| row.transport == transport && row.mode == mode && row.access == access;
    report.rows.iter().find(|row| same(row) && row.threads == 1 && row.spin_us == 0)
}

/// Bars from 0 to p50, a line up to p90, and the floor across.
fn bars(area: &Area<'_>, report: &Report, transport: &str) -> Result<()> {
    let modes = ["ivy", "default"];
    let rows: Vec<_> =
        report.rows.iter().filter(|row| row.transport == transport && row.threads == 1).collect();
    let top =
        rows.iter().filter(|row| modes.contains(&row.mode)).map(|row| row.p90_us).fold(1.0, f64::max) * 1.15;
    let mut chart = ChartBuilder::on(area)
        .caption(format!("remote page fault, {transport}: p50 and p90, us"), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.5..ACCESSES.len() as f64 - 0.5, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(ACCESSES.len())
        .x_label_formatter(&access_name)
        .label_style(FONT)
        .draw()?;
    for (index, mode) in modes.into_iter().enumerate() {
        let colour = COLOURS[index];
        let shapes = ACCESSES.iter().enumerate().filter_map(|(place, access)| {
            let row = of(report, transport, mode, Some(access))?;
            let left = place as f64 - 0.34 + 0.35 * index as f64;
            Some((left, row.p50_us, row.p90_us))
        });
        let shapes: Vec<_> = shapes.collect();
        let bar = |&(left, p50, _): &(f64, f64, f64)| {
            Rectangle::new([(left, 0.0), (left + 0.33, p50)], colour.filled())
        };
        let series = chart.draw_series(shapes.iter().map(bar))?;
        series
            .label(mode)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let line = |&(left, p50, p90): &(f64, f64, f64)| {
            PathElement::new([(left + 0.165, p50), (left + 0.165, p90)], RGBColor(0, 0, 0))
        };
        chart.draw_series(shapes.iter().map(line))?;
    }
    if let Some(floor) = of(report, transport, "floor", None) {
        let across = [(-0.5, floor.p50_us), (ACCESSES.len() as f64 - 0.5, floor.p50_us)];
        let series = chart.draw_series(LineSeries::new(across, COLOURS[3]))?;
        series.label("floor").legend(|(x, y)| PathElement::new([(x, y), (x + 12, y)], COLOURS[3]));
    }
    legend(&mut chart)
}

/// A curve for each transport, over the size.
fn curves(
    area: &Area<'_>,
    report: &Report,
    title: &str,
    value: impl Fn(&crate::report::Transfer) -> f64,
) -> Result<()> {
    let all: Vec<_> = report.transports.iter().filter(|transfer| transfer.spin_us == 0).collect();
    let values = || all.iter().map(|transfer| value(transfer));
    let (low, high) = (values().fold(f64::MAX, f64::min) * 0.8, values().fold(1.0, f64::max) * 1.25);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d((64.0..1_048_576.0).log_scale(), (low.min(high / 2.0)..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .x_label_formatter(&|size| size_name(*size))
        .label_style(FONT)
        .draw()?;
    for (transport, colour) in ["tcp", "tcp-tls", "shm"].into_iter().zip(COLOURS) {
        let points = all.iter().filter(|transfer| transfer.transport == transport);
        let points: Vec<_> = points.map(|transfer| (transfer.size_bytes as f64, value(transfer))).collect();
        let series = chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        series
            .label(transport)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], colour.stroke_width(2)));
    }
    legend(&mut chart)
}

/// The access whose bars are at this place.
fn access_name(place: &f64) -> String {
    let near = |index: &usize| (*place - *index as f64).abs() < 0.01;
    (0..ACCESSES.len()).find(near).map_or_else(String::new, |index| ACCESSES[index].to_owned())
}

fn size_name(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= f64::from(1 << 20) => format!("{:.0} MiB", bytes / f64::from(1 << 20)),
        bytes if bytes >= 1024.0 => format!("{:.0} KiB", bytes / 1024.0),
        bytes => format!("{bytes:.0}"),
    }
}

fn legend<'b, C: CoordTranslate>(chart: &mut ChartContext<'b, SVGBackend<'b>, C>) -> Result<()> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(COLOURS[3])
        .label_font(FONT)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Quantiles, Transfer};

    #[test]
    fn the_picture_shows_every_transport_and_access() {
        let mut report = Report::new();
        for transport in ["tcp", "tcp-tls", "shm"] {
            for mode in ["ivy", "default", "floor"] {
                let accesses: Vec<_> = if mode == "floor" { vec![None] } else { ACCESSES.map(Some).to_vec() };
                for access in accesses {
                    let (p50_us, p90_us, p99_us) = (20.0, 30.0, 40.0);
                    let (messages, bytes, faults_per_s) = (2.0, 4000.0, 10.0);
                    let (threads, spin_us, exchange_us) = (1, 0, None);
                    report.rows.push(Row {
                        transport,
                        mode,
                        access,
                        threads,
                        p50_us,
                        p90_us,
                        p99_us,
                        floor_us: None,
                        faults_per_s,
                        messages,
                        bytes,
                        cpu_us: 30.0,
                        cpu_measured_us: None,
                        sleeps: 4.0,
                        spin_us,
                        exchange_us,
                    });
                }
            }
            for size_bytes in [64, 1 << 20] {
                let round_trip_us = Quantiles { p50: 9.0, p90: 10.0, p99: 11.0, samples: 5 };
                report.transports.push(Transfer {
                    transport,
                    spin_us: 0,
                    size_bytes,
                    round_trip_us,
                    bandwidth_mib_per_s: 700.0,
                });
            }
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("picture.svg");
        draw(&report, &path).expect("drawn");
        let text = std::fs::read_to_string(&path).expect("read");
        for word in ACCESSES.into_iter().chain(["ivy", "default", "floor", "tcp-tls", "shm", "KiB", "MiB/s"])
        {
            assert!(text.contains(word), "{word}");
        }
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
    }
}
