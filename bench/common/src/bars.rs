//! Pictures of bars: groups of them beside each other, one of a group for each series.

use anyhow::{Context, Result};
use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, RGBColor, Rectangle, SVGBackend, SeriesLabelPosition, Text, WHITE,
};
use std::path::Path;

/// Pixels: at least so wide, and so many for each group.
const WIDTH: u32 = 1200;
const GROUP_WIDTH: u32 = 120;
const HEIGHT: u32 = 460;
const FONT: (&str, u32) = ("sans-serif", 12);
const SMALL: (&str, u32) = ("sans-serif", 9);
const TITLE: (&str, u32) = ("sans-serif", 17);
/// Share of the place of a group that its bars have.
const BARS: f64 = 0.8;

/// vnuma's. It and the others are apart for any kind of colour vision (Okabe and Ito).
pub const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
/// What others are compared with.
pub const GREY: RGBColor = RGBColor(0x99, 0x99, 0x99);
/// One of the others.
pub const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
/// One of the others.
pub const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
/// One of the others.
pub const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);

/// A bar of each group.
pub struct Series {
    /// In the legend.
    pub name: &'static str,
    /// Of its bars.
    pub colour: RGBColor,
    /// Of each group; none has no bar.
    pub values: Vec<Option<f64>>,
}

/// Writes an SVG. A bar has its value above it.
pub fn draw(title: &str, groups: &[&str], series: &[Series], path: &Path) -> Result<()> {
    bars(title, groups, series, path).with_context(|| path.display().to_string())
}

fn bars(title: &str, groups: &[&str], series: &[Series], path: &Path) -> Result<()> {
    let size = (WIDTH.max(GROUP_WIDTH * groups.len() as u32), HEIGHT);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let all = series.iter().flat_map(|one| one.values.iter().flatten().copied());
    let top = all.fold(1.1, f64::max) * 1.08;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, TITLE)
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.5..groups.len().max(1) as f64 - 0.5, 0.0..top)?;
    let name = |at: &f64| match groups.get(at.round() as usize) {
        Some(name) if (at - at.round()).abs() < 0.01 && *at >= 0.0 => (*name).to_owned(),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(groups.len() * 2)
        .x_label_formatter(&name)
        .label_style(FONT)
        .draw()?;
    let width = BARS / series.len().max(1) as f64;
    for (index, Series { name, colour, values }) in series.iter().enumerate() {
        let colour = *colour;
        let left = |at: usize| at as f64 - BARS / 2.0 + index as f64 * width;
        let values: Vec<(usize, f64)> =
            values.iter().enumerate().filter_map(|(at, value)| Some((at, (*value)?))).collect();
        let bar = |&(at, value): &(usize, f64)| {
            Rectangle::new([(left(at), 0.0), (left(at) + width * 0.9, value)], colour.filled())
        };
        chart
            .draw_series(values.iter().map(bar))?
            .label(*name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let text = |&(at, value): &(usize, f64)| {
            Text::new(format!("{value:.2}"), (left(at), value + top * 0.03), SMALL)
        };
        chart.draw_series(values.iter().map(text))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()?;
    Ok(root.present()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_names_values_and_no_bar_without_one() {
        let directory = std::env::temp_dir().join(format!("vnuma-bars-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a folder");
        let path = directory.join("picture.svg");
        let series = [
            Series { name: "first", colour: GREY, values: vec![Some(1.0), Some(2.25)] },
            Series { name: "second", colour: BLUE, values: vec![None, Some(1.5)] },
        ];
        draw("a title", &["one", "other"], &series, &path).expect("a picture");
        let text = std::fs::read_to_string(&path).expect("the picture");
        std::fs::remove_dir_all(&directory).expect("the folder");
        for part in ["a title", "one", "other", "first", "second", "1.00", "2.25", "1.50"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // A bar, and what the legend has.
        assert_eq!(text.matches("#0072B2").count(), 2, "{text}");
        assert!(draw("", &[], &[], Path::new("/nowhere/picture.svg")).is_err());
    }
}
