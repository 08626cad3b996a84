//! Plots durations of transfers by loss, with one panel for each size and round-trip time.

use std::path::Path;

use anyhow::ensure;
use plotters::prelude::*;

use crate::stats::Spread;

const PANEL: (u32, u32) = (380, 260);
const FONT: &str = "sans-serif";

/// Durations of transfers with one congestion control, for one combination of size, loss and round-trip time.
pub struct FctPoint {
    pub control: String,
    pub kib: u64,
    pub loss: f64,
    pub rtt_ms: u32,
    pub ms: Spread,
}

/// Draws the medians, with lines from the lowest to the highest value.
pub fn draw(points: &[FctPoint], path: &Path) -> anyhow::Result<()> {
    ensure!(!points.is_empty(), "no transfer could be measured");
    let sizes = distinct(points.iter().map(|point| point.kib));
    let rtts = distinct(points.iter().map(|point| point.rtt_ms));
    let mut controls: Vec<&str> = points.iter().map(|point| point.control.as_str()).collect();
    controls.sort_unstable();
    controls.dedup();
    let size = (PANEL.0 * sizes.len() as u32, PANEL.1 * rtts.len() as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let panels = root.split_evenly((rtts.len(), sizes.len()));
    let places = rtts.iter().flat_map(|rtt| sizes.iter().map(move |kib| (*rtt, *kib)));
    for (panel, (rtt_ms, kib)) in panels.iter().zip(places) {
        let shown: Vec<&FctPoint> = points.iter().filter(|it| (it.rtt_ms, it.kib) == (rtt_ms, kib)).collect();
        draw_panel(panel, &format!("{kib} KiB, {rtt_ms} ms"), &shown, &controls)?;
    }
    root.present()?;
    Ok(())
}

fn distinct<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut values: Vec<T> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    points: &[&FctPoint],
    controls: &[&str],
) -> anyhow::Result<()> {
    let most = points.iter().map(|it| it.ms.max).fold(1.0, f64::max);
    let least = points.iter().map(|it| it.ms.min).fold(most, f64::min).max(0.1);
    let loss = points.iter().map(|it| it.loss).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{title}: ms by loss in %"), (FONT, 14))
        .margin(6)
        .x_label_area_size(24)
        .y_label_area_size(52)
        .build_cartesian_2d(-0.2..loss + 0.4, (least / 1.5..most * 1.5).log_scale())?;
    chart.configure_mesh().disable_x_mesh().y_label_formatter(&|ms| format!("{ms:.0}")).draw()?;
    for (at, control) in controls.iter().enumerate() {
        let colour = Palette99::pick(at).to_rgba();
        // Shift each congestion control's points a little, so that they do not cover each other.
        let aside = |loss: f64| loss + 0.05 * at as f64;
        let mut of: Vec<&&FctPoint> = points.iter().filter(|it| it.control == *control).collect();
        of.sort_by(|one, other| one.loss.total_cmp(&other.loss));
        let medians = of.iter().map(|it| (aside(it.loss), it.ms.median));
        chart
            .draw_series(LineSeries::new(medians.clone(), colour))?
            .label(*control)
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 9, y + 4)], colour.filled()));
        chart.draw_series(medians.map(|point| Circle::new(point, 3, colour.filled())))?;
        chart.draw_series(of.iter().map(|it| {
            let x = aside(it.loss);
            PathElement::new([(x, it.ms.min), (x, it.ms.max)], colour)
        }))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_congestion_control_size_and_delay_is_in_the_picture() {
        let point = |control: &str, kib, loss, rtt_ms| FctPoint {
            control: control.into(),
            kib,
            loss,
            rtt_ms,
            ms: Spread { median: 100.0, min: 90.0, max: 1000.0 },
        };
        let points =
            [point("cubic", 64, 0.0, 20), point("cubic", 64, 1.0, 20), point("mr_hybla", 8192, 1.0, 600)];
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("plot.svg");
        draw(&points, &path).expect("a picture");
        let svg = std::fs::read_to_string(&path).expect("a file");
        for text in ["cubic", "mr_hybla", "64 KiB, 20 ms", "8192 KiB, 600 ms"] {
            assert!(svg.contains(text), "{text} is not in the picture");
        }
        assert!(draw(&[], &path).is_err());
    }
}
