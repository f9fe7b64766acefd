//! The shares over time as an SVG. Its background is its own, so that dark pages show it as light ones do.

use crate::report::Report;
use crate::series::Move;
use anyhow::{Result, anyhow};
use plotters::prelude::*;

const SIZE: (u32, u32) = (960, 440);
/// Two colours that readers with any kind of colour vision tell apart (Okabe and Ito).
const DYNAMIC: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const STATIC: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const FONT: &str = "sans-serif";
/// Where marks of moves stand, in percent below the x axis's 0.
const MARKS: [f64; 2] = [-4.0, -9.0];

/// The picture of a run.
pub fn svg(report: &Report) -> Result<String> {
    let mut text = String::new();
    draw(report, &mut text).map_err(|error| anyhow!("drawing the picture: {error}"))?;
    Ok(text)
}

fn draw(report: &Report, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let series = &report.series;
    let area = SVGBackend::with_string(text, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (above, caption) = area.split_vertically(SIZE.1 - 26);
    let mut chart = ChartBuilder::on(&above)
        .caption("Fresh pages on the NUMA node of the vCPU that touched them", (FONT, 24))
        .margin(12)
        .margin_right(32)
        .x_label_area_size(48)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..series.seconds, MARKS[1] - 3.0..104.0)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .label_style((FONT, 17))
        .x_desc("time (s)")
        .y_desc("share of local pages (%)")
        .y_labels(6)
        .y_label_formatter(&|percent: &f64| {
            if *percent < 0.0 { String::new() } else { format!("{percent:.0}") }
        })
        .draw()?;
    let vms = [("with vnuma", &series.dynamic, DYNAMIC), ("static vNUMA", &series.static_, STATIC)];
    for ((name, vm, colour), level) in vms.into_iter().zip(MARKS) {
        let style = colour.stroke_width(2);
        for (index, points) in series.lines(vm).into_iter().enumerate() {
            let drawn = chart.draw_series(LineSeries::new(points.clone(), style).point_size(2))?;
            if index == 0 {
                drawn.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
            }
        }
        let mark = |moved: &Move| TriangleMarker::new((moved.seconds, level), 5, colour.filled());
        chart.draw_series(vm.moves.iter().map(mark))?;
    }
    let placed = &report.placed;
    let line = [(placed.seconds, 0.0), (placed.seconds, 100.0)];
    let upwards = (FONT, 15).into_font().color(&BLACK).transform(FontTransform::Rotate270);
    let label = format!("{} places the static VM", placed.policy);
    chart.draw_series([PathElement::new(line, BLACK)])?;
    chart.draw_series([Text::new(label, (placed.seconds, 8.0), upwards)])?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .label_font((FONT, 17))
        .background_style(WHITE)
        .border_style(GRID)
        .draw()?;
    let style = (FONT, 16).into_font().color(&RGBColor(0x55, 0x55, 0x55));
    caption.draw_text(
        &format!("{}; a triangle: a vCPU of that VM came to another node", report.run()),
        &style,
        (16, 2),
    )?;
    above.present()?;
    caption.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::{Series, VmSeries};
    use roxmltree::{Document, Node};

    fn report() -> Report {
        let moved = |seconds| Move { seconds, vcpu: 0, from_node: None, to_node: Some(1) };
        let vm = |shares: &[Option<f64>], moves: &[f64]| VmSeries {
            local_share: shares.into(),
            moves: moves.iter().copied().map(moved).collect(),
        };
        let dynamic = vm(&[Some(1.0), Some(0.9), None, Some(1.0), Some(0.5)], &[0.1, 1.2]);
        let static_ = vm(&[Some(0.25); 5], &[0.1, 1.2, 2.0]);
        let series = Series { seconds: 2.5, window_seconds: 0.5, dynamic, static_ };
        Report { source: "measured in the <lab> & elsewhere", series, ..Report::default() }
    }

    #[test]
    fn the_picture_is_well_formed_and_has_both_series_and_their_moves() {
        let text = svg(&report()).unwrap();
        let document = Document::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let parsed = &document;
        let elements = |element: &'static str| {
            parsed.descendants().filter(move |node| node.tag_name().name() == element)
        };
        let coloured = |element, attribute, colour| {
            elements(element).filter(|node| node.attribute(attribute) == Some(colour)).count()
        };
        // A gap divides a line; the legend has one more of each colour.
        assert_eq!(coloured("polyline", "stroke", "#0072B2"), 3, "{text}");
        assert_eq!(coloured("polyline", "stroke", "#D55E00"), 2, "{text}");
        assert_eq!(coloured("polygon", "fill", "#0072B2"), 2, "{text}");
        assert_eq!(coloured("polygon", "fill", "#D55E00"), 3, "{text}");
        let words: String = elements("text").filter_map(|node| node.text()).collect();
        for word in ["with vnuma", "static vNUMA", "time (s)", "(%)", "measured in the <lab> & elsewhere"] {
            assert!(words.contains(word), "{word} is not in {words}");
        }
    }

    #[test]
    fn the_background_is_part_of_the_picture() {
        let text = svg(&report()).unwrap();
        let document = Document::parse(&text).unwrap();
        let first = document.root_element().children().find(Node::is_element).unwrap();
        assert_eq!((first.tag_name().name(), first.attribute("fill")), ("rect", Some("#FFFFFF")));
        let size = [first.attribute("width"), first.attribute("height")];
        assert_eq!(size, [Some("960"), Some("440")]);
    }
}
