//! Plots the results over time into `delay.svg`, `cpu.svg` and `calls.svg`.

use std::{ops::Range, path::Path};

use plotters::{coord::Shift, prelude::*};

use super::{Contender, ENGINES, SyscallCounts, ThesisCpu, ThesisRow, mean_and_deviation};

const SIZE: (u32, u32) = (1200, 480);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A function that returns the CPU time of one process: the publisher, the relay or the subscriber.
type ProcessChoice = fn(&ThesisCpu) -> f64;
/// A line of a plot: label, colour and points.
type PlotLine = (String, RGBColor, Vec<(f64, f64)>);

pub fn draw(rows: &[ThesisRow], directory: &Path) -> anyhow::Result<()> {
    delays(rows, &directory.join("delay.svg"))?;
    cpus(rows, &directory.join("cpu.svg"))?;
    calls(rows, &directory.join("calls.svg"))
}

fn colour(engine: Contender) -> RGBColor {
    if engine == Contender::Kernel { RGBColor(0xd6, 0x27, 0x28) } else { RGBColor(0xff, 0x7f, 0x0e) }
}

/// Draws the delay of each object, as the mean of all rounds.
fn delays(rows: &[ThesisRow], path: &Path) -> anyhow::Result<()> {
    let line = |engine: Contender| {
        let runs: Vec<_> = rows.iter().filter(|row| row.engine == engine).map(|row| &row.run).collect();
        let last = runs.iter().flat_map(|run| &run.delays).map(|arrival| arrival.sequence).max().unwrap_or(0);
        let mut sums = vec![(0.0, 0u32); last as usize + 1];
        for arrival in runs.iter().flat_map(|run| &run.delays) {
            if let Some((sum, count)) = sums.get_mut(arrival.sequence as usize) {
                *sum += arrival.delay_us / 1000.0;
                *count += 1;
            }
        }
        let points = sums.iter().enumerate().filter(|(_, (_, count))| *count > 0);
        let points = points.map(|(sequence, (sum, count))| (sequence as f64, sum / f64::from(*count)));
        let all = runs.iter().flat_map(|run| &run.delays).map(|arrival| arrival.delay_us);
        let (mean, deviation) = mean_and_deviation(all);
        let label = format!("{}: mean {mean:.0} us, deviation {deviation:.0} us", engine.label());
        (label, colour(engine), points.collect())
    };
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    lines(&root, "delay of each object, ms", "object", &ENGINES.map(line))
}

/// Draws the CPU time of publisher, relay and subscriber over time in the first round.
fn cpus(rows: &[ThesisRow], path: &Path) -> anyhow::Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let parts: [(&str, ProcessChoice); 3] = [
        ("publisher", |cpu| cpu.publisher),
        ("relay", |cpu| cpu.relay),
        ("subscriber", |cpu| cpu.subscriber),
    ];
    for (area, (name, of)) in root.split_evenly((1, 3)).iter().zip(parts) {
        let line = |engine: Contender| {
            let run = rows.iter().find(|row| row.engine == engine).map(|row| &row.run);
            let points = run.iter().flat_map(|run| &run.cpu).map(|cpu| (cpu.at_s, of(cpu))).collect();
            (engine.label(), colour(engine), points)
        };
        lines(area, &format!("CPU of the {name}, %"), "seconds", &ENGINES.map(line))?;
    }
    Ok(())
}

/// Draws the numbers of the relay's system calls by name, as the mean of all rounds.
fn calls(rows: &[ThesisRow], path: &Path) -> anyhow::Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let names: Vec<_> = ["total"].into_iter().chain(SyscallCounts::NAMED.map(|(name, _)| name)).collect();
    let count = |engine: Contender, name: usize| {
        let runs = rows.iter().filter(|row| row.engine == engine).map(|row| &row.run.calls);
        let of = |calls: &SyscallCounts| {
            name.checked_sub(1).map_or(calls.total as f64, |index| calls.named(index))
        };
        mean_and_deviation(runs.map(of)).0
    };
    let high = ENGINES.iter().map(|engine| count(*engine, 0)).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .caption("system calls of the relay", (FONT, 16))
        .margin(8)
        .x_label_area_size(30)
        .y_label_area_size(70)
        .build_cartesian_2d(-0.5..names.len() as f64 - 0.5, 0.0..high * 1.1)?;
    let label = |x: &f64| match (x.round(), (x - x.round()).abs() < 0.01) {
        (index, true) if index >= 0.0 => names.get(index as usize).copied().unwrap_or_default().to_owned(),
        _ => String::new(),
    };
    chart.configure_mesh().disable_x_mesh().x_labels(2 * names.len() + 1).x_label_formatter(&label).draw()?;
    for (place, engine) in ENGINES.into_iter().enumerate() {
        let fill = colour(engine);
        let bars = (0..names.len()).map(|name| {
            let left = name as f64 - 0.4 + 0.4 * place as f64;
            Rectangle::new([(left, 0.0), (left + 0.38, count(engine, name))], fill.filled())
        });
        chart
            .draw_series(bars)?
            .label(engine.label())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], fill.filled()));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}

fn lines(area: &Area<'_>, title: &str, across: &str, lines: &[PlotLine]) -> anyhow::Result<()> {
    area.fill(&WHITE)?;
    let points = || lines.iter().flat_map(|(_, _, points)| points);
    let range = |of: fn(&(f64, f64)) -> f64| -> Range<f64> {
        let high = points().map(of).fold(0.0, f64::max);
        0.0..if high > 0.0 { high * 1.1 } else { 1.0 }
    };
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 16))
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(range(|point| point.0), range(|point| point.1))?;
    chart.configure_mesh().x_desc(across).draw()?;
    for (label, colour, points) in lines {
        let style = colour.stroke_width(1);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(label.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], style));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    area.present()?;
    Ok(())
}
