//! Plots throughput and delay over time for the first run of each method.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::ReconfigureArgs;
use super::figures::BinFigures;
use super::method::MethodOutcome;

const SIZE: (u32, u32) = (1000, 640);
const FONT: &str = "sans-serif";

type Line = (&'static str, Vec<(f64, f64)>);

pub fn draw(args: &ReconfigureArgs, outcomes: &[Vec<MethodOutcome>], path: &Path) -> anyhow::Result<()> {
    let series: Vec<(&'static str, Vec<BinFigures>)> = outcomes
        .iter()
        .filter_map(|outcomes| outcomes.first())
        .map(|outcome| (outcome.method.name(), outcome.series(args.bytes)))
        .collect();
    let lines = |of: fn(&BinFigures) -> Option<f64>| -> Vec<Line> {
        let line = |points: &[BinFigures]| points.iter().filter_map(|it| Some((it.at_s, of(it)?))).collect();
        series.iter().map(|(name, points)| (*name, line(points))).collect()
    };
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!(
        "round trip {} ms, {} ms from {} s on for {} s; {} % loss",
        args.rtt_ms, args.far_rtt_ms, args.after_s, args.far_s, args.loss
    );
    let panels = root.titled(&title, (FONT, 18))?.split_evenly((2, 1));
    let kinds = [
        ("Mbit/s", lines(|it| Some(it.mbit))),
        ("one-way delay, median, ms", lines(|it| Some(it.delay_ms?.p50))),
    ];
    for (panel, (title, lines)) in panels.iter().zip(kinds) {
        draw_panel(panel, title, &lines)?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, lines: &[Line]) -> anyhow::Result<()> {
    let most = |of: fn(&(f64, f64)) -> f64| {
        lines.iter().flat_map(|(_, points)| points.iter().map(of)).fold(1.0, f64::max)
    };
    let most_s = most(|it| it.0);
    let most_value = most(|it| it.1);
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 15))
        .margin(8)
        .x_label_area_size(24)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..most_s, 0.0..most_value * 1.1)?;
    chart.configure_mesh().x_desc("s").draw()?;
    for (at, (name, points)) in lines.iter().enumerate() {
        let colour = Palette99::pick(at).to_rgba();
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 9, y + 4)], colour.filled()));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).draw()?;
    Ok(())
}
