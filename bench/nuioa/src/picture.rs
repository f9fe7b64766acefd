//! The picture: what an operation costs under each configuration, by what it costs at home.

use crate::{
    committed::{CONFIGURATIONS, Configuration, workloads},
    judge::Row,
};
use anyhow::{Result, anyhow};
use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, RGBColor, Rectangle, SVGBackend, SeriesLabelPosition, Text, WHITE,
};
use std::path::Path;

/// Pixels: at least so wide, and so many for each workload.
const WIDTH: u32 = 1200;
const WORKLOAD_WIDTH: u32 = 120;
const HEIGHT: u32 = 460;
const FONT: (&str, u32) = ("sans-serif", 12);
const TITLE: (&str, u32) = ("sans-serif", 17);
/// Blue for vnuma's, others apart for any kind of colour vision (Okabe and Ito).
const COLOURS: [RGBColor; 5] = [
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x00, 0x72, 0xb2),
];
/// Of the place of a workload.
const BAR: f64 = 0.16;

/// Writes an SVG of the first profile's rows.
pub fn draw(rows: &[Row], path: &Path) -> Result<()> {
    let profile = rows.first().map(|row| row.profile.clone()).unwrap_or_default();
    bars(rows, &profile, path).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn bars(rows: &[Row], profile: &str, path: &Path) -> Result<(), String> {
    let of = |workload: &str, configuration: Configuration| {
        let same = |row: &&Row| {
            row.profile == profile && row.workload == workload && row.configuration == configuration
        };
        rows.iter().find(same).map(|row| row.cycles_per_op)
    };
    let by_home = |workload: &str, configuration| {
        Some(of(workload, configuration)? / of(workload, Configuration::Home)?)
    };
    let measured = |name: &str| of(name, Configuration::Home).is_some();
    let names: Vec<&str> =
        workloads(true).map(|workload| workload.name).filter(|name| measured(name)).collect();
    let size = (WIDTH.max(WORKLOAD_WIDTH * names.len() as u32), HEIGHT);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(|error| error.to_string())?;
    let all = names
        .iter()
        .flat_map(|name| CONFIGURATIONS.iter().filter_map(|configuration| by_home(name, *configuration)));
    let top = all.fold(1.1, f64::max) * 1.08;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("modelled cycles of an operation, home = 1 ({profile})"), TITLE)
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.5..names.len() as f64 - 0.5, 0.0..top)
        .map_err(|error| error.to_string())?;
    let name = |at: &f64| match names.get(at.round() as usize) {
        Some(name) if (at - at.round()).abs() < 0.01 && *at >= 0.0 => (*name).to_owned(),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(names.len() * 2)
        .x_label_formatter(&name)
        .label_style(FONT)
        .draw()
        .map_err(|error| error.to_string())?;
    for (index, (configuration, colour)) in CONFIGURATIONS.into_iter().zip(COLOURS).enumerate() {
        let left = |at: usize| at as f64 + (index as f64 - 2.5) * BAR;
        let values: Vec<(usize, f64)> =
            (0..names.len()).filter_map(|at| Some((at, by_home(names[at], configuration)?))).collect();
        let bar = |&(at, value): &(usize, f64)| {
            Rectangle::new([(left(at), 0.0), (left(at) + BAR * 0.9, value)], colour.filled())
        };
        chart
            .draw_series(values.iter().map(bar))
            .map_err(|error| error.to_string())?
            .label(configuration.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let text = |&(at, value): &(usize, f64)| {
            Text::new(format!("{value:.2}"), (left(at), value + top * 0.03), ("sans-serif", 9))
        };
        chart.draw_series(values.iter().map(text)).map_err(|error| error.to_string())?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()
        .map_err(|error| error.to_string())?;
    root.present().map_err(|error| error.to_string())
}
