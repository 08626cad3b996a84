//! Plots what viewers saw: one panel per measured quantity, one bar per result row.

use std::path::Path;

use anyhow::ensure;
use plotters::prelude::*;

use super::super::plot;
use super::shown::AdaptFigures;
use super::{AdaptPolicy, AdaptRow};
use crate::stats::Spread;

const SIZE: (u32, u32) = (1500, 700);
const FONT: &str = "sans-serif";

/// Draws the medians of all rows with results as SVG. Lines show the range from the lowest to the highest round.
pub fn draw(rows: &[AdaptRow], title: &str, path: &Path) -> anyhow::Result<()> {
    let rows: Vec<_> =
        rows.iter().filter_map(|row| Some((row, AdaptFigures::spread(&row.figures())?))).collect();
    ensure!(!rows.is_empty(), "no relay could be measured");
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let panels = root.titled(title, (FONT, 18))?.split_evenly((2, 3));
    for (at, (panel, name)) in panels.iter().zip(AdaptFigures::NAMES).enumerate() {
        let bars: Vec<_> = rows
            .iter()
            .filter_map(|(row, figures)| Some((*row, figures.get(at).copied().flatten()?)))
            .collect();
        bars_of(panel, name, rows.len(), &bars, at == 0)?;
    }
    root.present()?;
    Ok(())
}

type Panel<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn bars_of(
    panel: &Panel<'_>,
    name: &str,
    places: usize,
    bars: &[(&AdaptRow, Spread)],
    has_legend: bool,
) -> anyhow::Result<()> {
    let high = bars.iter().map(|(_, spread)| spread.max).fold(1.0, f64::max);
    // Leave room above the bars for the legend.
    let room = if has_legend { 2.0 } else { 1.1 };
    let mut chart = ChartBuilder::on(panel)
        .caption(name, (FONT, 15))
        .margin(8)
        .y_label_area_size(50)
        .build_cartesian_2d(-0.5..places as f64 - 0.5, 0.0..high * room)?;
    chart.configure_mesh().disable_x_mesh().disable_x_axis().draw()?;
    for (place, (row, spread)) in bars.iter().enumerate() {
        let x = place as f64;
        let colour = row.colour();
        let bar = Rectangle::new([(x - 0.4, 0.0), (x + 0.4, spread.median)], colour.filled());
        let drawn = chart.draw_series([bar])?;
        if has_legend {
            drawn
                .label(row.label())
                .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], colour.filled()));
        }
        chart.draw_series([PathElement::new([(x, spread.min), (x, spread.max)], BLACK)])?;
    }
    if has_legend {
        chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).draw()?;
    }
    Ok(())
}

impl AdaptRow {
    fn colour(&self) -> RGBAColor {
        let strength = match self.policy {
            None | Some(AdaptPolicy::Adaptive) => 1.0,
            Some(AdaptPolicy::Live) => 0.6,
            Some(AdaptPolicy::Tail) => 0.3,
        };
        plot::colour(self.relay).mix(strength)
    }
}
