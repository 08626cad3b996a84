//! Plots requests over time during an attack, and the CPU cost of refusing a packet.

use std::path::Path;

use anyhow::bail;
use plotters::{coord::Shift, prelude::*};
use serde_json::Value;

use super::{
    Experiment,
    defence::Defence,
    quota::BIN,
    report::{DefenceRow, SERIES},
};

const SIZE: (u32, u32) = (1300, 520);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the requests over time and the cost of a refused packet, for all measured defences, as SVG.
pub fn draw(rows: &[DefenceRow], path: &Path) -> anyhow::Result<()> {
    if !rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)) {
        bail!("no defence could be measured");
    }
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally((60).percent_width());
    over_time(&left, rows)?;
    cost(&right, rows)?;
    root.present()?;
    Ok(())
}

fn colour(defence: Defence) -> RGBColor {
    match defence {
        Defence::None => RGBColor(0x7f, 0x7f, 0x7f),
        Defence::User => RGBColor(0xff, 0x7f, 0x0e),
        Defence::UserEarly => RGBColor(0xbc, 0xbd, 0x22),
        Defence::Gate => RGBColor(0xd6, 0x27, 0x28),
        Defence::GateAnswer => RGBColor(0xe3, 0x77, 0xc2),
        Defence::Nftables => RGBColor(0x1f, 0x77, 0xb4),
        Defence::NftablesRaw => RGBColor(0x6b, 0xae, 0xd6),
        Defence::NftablesIngress => RGBColor(0x9e, 0xca, 0xe1),
        Defence::XdpFilter => RGBColor(0x2c, 0xa0, 0x2c),
    }
}

/// Draws the honest clients' requests per second over time, as the mean of all rounds.
fn over_time(area: &Area<'_>, rows: &[DefenceRow]) -> anyhow::Result<()> {
    let lines: Vec<(Defence, Vec<f64>)> = rows
        .iter()
        .filter(|row| row.experiment == Experiment::Quota)
        .map(|row| (row.defence, mean_series(row)))
        .filter(|(_, series)| !series.is_empty())
        .collect();
    let bins = lines.iter().map(|(_, series)| series.len()).max().unwrap_or(1);
    let high = lines.iter().flat_map(|(_, series)| series).copied().fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption("honest clients' requests per second, attack in the middle", (FONT, 15))
        .margin(8)
        .x_label_area_size(30)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..bins as f64 * BIN.as_secs_f64(), 0.0..high * 1.1)?;
    chart.configure_mesh().disable_x_mesh().x_desc("seconds").draw()?;
    for (defence, series) in &lines {
        let style = colour(*defence);
        let points = series.iter().enumerate().map(|(bin, value)| (bin as f64 * BIN.as_secs_f64(), *value));
        chart
            .draw_series(LineSeries::new(points, style.stroke_width(2)))?
            .label(defence.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], style.stroke_width(2)));
    }
    if !lines.is_empty() {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
    }
    Ok(())
}

fn mean_series(row: &DefenceRow) -> Vec<f64> {
    let rounds: Vec<Vec<f64>> = row.rounds.iter().flatten().filter_map(series).collect();
    let bins = rounds.iter().map(Vec::len).min().unwrap_or(0);
    let per_second = 1.0 / BIN.as_secs_f64() / rounds.len().max(1) as f64;
    (0..bins).map(|bin| rounds.iter().filter_map(|round| round.get(bin)).sum::<f64>() * per_second).collect()
}

fn series(figures: &Value) -> Option<Vec<f64>> {
    figures.get(SERIES)?.as_array()?.iter().map(Value::as_f64).collect()
}

/// Draws one bar per defence: the CPU time for each refused packet of the flood.
fn cost(area: &Area<'_>, rows: &[DefenceRow]) -> anyhow::Result<()> {
    let bars: Vec<(Defence, f64)> = rows
        .iter()
        .filter(|row| row.experiment == Experiment::Flood)
        .filter_map(|row| Some((row.defence, row.figure("cpu_ns_per_refused_packet")?)))
        .collect();
    let high = bars.iter().map(|(_, ns)| *ns).fold(1.0, f64::max);
    let name = |x: &f64| {
        let near = (x - x.round()).abs() < 0.01;
        let bar = bars.get(x.round().max(0.0) as usize).filter(|_| near && *x > -0.1);
        bar.map_or_else(String::new, |(defence, _)| defence.name().to_owned())
    };
    let mut chart = ChartBuilder::on(area)
        .caption("flood: CPU ns per packet, without the generator's", (FONT, 15))
        .margin(8)
        .x_label_area_size(30)
        .y_label_area_size(60)
        .build_cartesian_2d(-0.5..bars.len().max(1) as f64 - 0.5, 0.0..high * 1.1)?;
    chart.configure_mesh().disable_x_mesh().x_labels(2 * bars.len() + 1).x_label_formatter(&name).draw()?;
    chart.draw_series(bars.iter().enumerate().map(|(place, (defence, ns))| {
        let x = place as f64;
        Rectangle::new([(x - 0.35, 0.0), (x + 0.35, *ns)], colour(*defence).filled())
    }))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plot_shows_every_measured_defence() {
        let quota = |defence| DefenceRow {
            experiment: Experiment::Quota,
            defence,
            rounds: vec![Ok(json!({"series": [1, 2, 3]})), Ok(json!({"series": [3, 2]}))],
        };
        let flood = DefenceRow {
            experiment: Experiment::Flood,
            defence: Defence::Nftables,
            rounds: vec![Ok(json!({"cpu_ns_per_refused_packet": 900.0}))],
        };
        assert_eq!(mean_series(&quota(Defence::Gate)), vec![20.0, 20.0]);
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("plot.svg");
        draw(&[quota(Defence::Gate), quota(Defence::User), flood], &path).expect("a picture");
        let svg = std::fs::read_to_string(&path).expect("a file");
        assert!(["gate", "user", "nftables"].iter().all(|name| svg.contains(name)));
        assert!(draw(&[], &path).is_err());
    }
}
