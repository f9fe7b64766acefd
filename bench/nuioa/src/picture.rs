//! The picture: what an operation costs under each configuration, by what it costs at home.

use crate::{
    committed::{CONFIGURATIONS, Configuration, workloads},
    judge::Row,
};
use anyhow::Result;
use std::path::Path;
use vnuma_bench_common::bars::{self, BLUE, GREY, ORANGE, PURPLE, Series, VERMILION};

/// Writes an SVG of the first profile's rows.
pub fn draw(rows: &[Row], path: &Path) -> Result<()> {
    let profile = rows.first().map(|row| row.profile.clone()).unwrap_or_default();
    let of = |workload: &str, configuration: Configuration| {
        let same = |row: &&Row| {
            row.profile == profile && row.workload == workload && row.configuration == configuration
        };
        rows.iter().find(same).map(|row| row.cycles_per_op)
    };
    let by_home = |workload: &str, configuration| {
        Some(of(workload, configuration)? / of(workload, Configuration::Home)?)
    };
    let names = workloads(true).map(|workload| workload.name);
    let names: Vec<&str> = names.filter(|name| of(name, Configuration::Home).is_some()).collect();
    let series = CONFIGURATIONS.iter().map(|&configuration| Series {
        name: configuration.name(),
        colour: match configuration {
            Configuration::Home => GREY,
            Configuration::Remote => VERMILION,
            Configuration::Uma => ORANGE,
            Configuration::Vnuma => PURPLE,
            Configuration::NuioaAware => BLUE,
        },
        values: names.iter().map(|name| by_home(name, configuration)).collect(),
    });
    let title = format!("modelled cycles of an operation, home = 1 ({profile})");
    bars::draw(&title, &names, &series.collect::<Vec<_>>(), path)
}
