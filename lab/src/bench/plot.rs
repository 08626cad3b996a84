//! Plots latency distributions and CPU time, by number of subscribers.

use std::path::Path;

use anyhow::{bail, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::contender::Contender;
use super::figures::{RelayFigures, RelayRow};
use crate::stats::Percentiles;

const SIZE: (u32, u32) = (1500, 560);
const FONT: &str = "sans-serif";
const TITLE_HEIGHT: u32 = 30;
/// Share of a group's width on the horizontal axis that is filled by the marks of relays. Each number of subscribers is
/// a group.
const GROUP_WIDTH: f64 = 0.8;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the medians of all rows with results as SVG.
pub fn draw(rows: &[RelayRow], path: &Path) -> anyhow::Result<()> {
    let measured: Vec<(&RelayRow, RelayFigures)> =
        rows.iter().filter_map(|row| Some((row, row.median()?))).collect();
    let Some((first, _)) = measured.first() else { bail!("no relay could be measured") };
    ensure!(
        measured.iter().all(|(row, _)| row.profile == first.profile),
        "the rows must have the same link profile to be drawn"
    );
    let mut transports: Vec<_> =
        measured.iter().filter_map(|(row, _)| row.contender.over(row.load.transport)).collect();
    transports.dedup();
    ensure!(transports.len() < 2, "the rows must have the same transport to be drawn");
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("{} objects of {} bytes per second", first.load.rate_hz, first.load.object_bytes);
    let panels = root.titled(&title, (FONT, 18))?.split_evenly((1, 3));
    let [application, wire, cpu] = &panels[..] else { bail!("three panels") };
    let axis = Axis::new(&measured);
    let points = |of: fn(&RelayFigures) -> Option<Percentiles>| -> Vec<_> {
        measured.iter().filter_map(|(row, figures)| Some((*row, of(figures)?))).collect()
    };
    latencies(application, "application latency", &axis, &points(|figures| figures.latency_us))?;
    latencies(wire, "wire latency", &axis, &points(|figures| figures.wire_latency_us))?;
    cpu_bars(cpu, &axis, &measured)?;
    root.present()?;
    Ok(())
}

/// Positions of rows on the horizontal axis. Each number of subscribers is a group, and the relays of a group are side
/// by side.
struct Axis {
    subscribers: Vec<usize>,
    contenders: Vec<Contender>,
}

impl Axis {
    fn new(measured: &[(&RelayRow, RelayFigures)]) -> Self {
        let mut subscribers: Vec<_> = measured.iter().map(|(row, _)| row.load.subscribers).collect();
        let mut contenders: Vec<_> = measured.iter().map(|(row, _)| row.contender).collect();
        subscribers.sort_unstable();
        subscribers.dedup();
        contenders.sort_unstable();
        contenders.dedup();
        Self { subscribers, contenders }
    }

    fn width(&self) -> f64 {
        GROUP_WIDTH / self.contenders.len().max(1) as f64
    }

    fn middle(&self, row: &RelayRow) -> f64 {
        let group = self.subscribers.iter().position(|n| *n == row.load.subscribers).unwrap_or(0);
        let place = self.contenders.iter().position(|c| *c == row.contender).unwrap_or(0);
        group as f64 - GROUP_WIDTH / 2.0 + self.width() * (place as f64 + 0.5)
    }

    fn range(&self) -> std::ops::Range<f64> {
        -0.5..self.subscribers.len() as f64 - 0.5
    }

    fn label(&self, x: f64) -> String {
        let group = self.subscribers.get(x.round().max(0.0) as usize);
        let near = (x - x.round()).abs() < 0.01;
        match group {
            Some(1) if near => "1 subscriber".to_owned(),
            Some(n) if near => format!("{n} subscribers"),
            _ => String::new(),
        }
    }
}

pub fn colour(contender: Contender) -> RGBColor {
    match contender {
        Contender::Kernel => RGBColor(0xd6, 0x27, 0x28),
        Contender::KernelGate => RGBColor(0x8c, 0x1a, 0x1b),
        Contender::KernelCubic => RGBColor(0xe3, 0x77, 0xc2),
        Contender::UserCubic => RGBColor(0xbc, 0xbd, 0x22),
        Contender::KernelWhole => RGBColor(0x94, 0x67, 0xbd),
        Contender::UserWhole => RGBColor(0xc5, 0xb0, 0xd5),
        Contender::KernelOne => RGBColor(0xff, 0x98, 0x96),
        Contender::UserOne => RGBColor(0xff, 0xbb, 0x78),
        Contender::User => RGBColor(0xff, 0x7f, 0x0e),
        Contender::UserGate => RGBColor(0xb3, 0x59, 0x0a),
        Contender::MoqRelayIetf => RGBColor(0x1f, 0x77, 0xb4),
        Contender::MoqRelay => RGBColor(0x2c, 0xa0, 0x2c),
        Contender::Forwarder | Contender::Batched | Contender::Fanout | Contender::Quinn => {
            RGBColor(0x7f, 0x7f, 0x7f)
        }
    }
}

/// Draws a disc at the median, a line from the disc to p99 with ticks at p90 and p99, and a ring at the maximum.
fn latencies(
    area: &Area<'_>,
    title: &str,
    axis: &Axis,
    points: &[(&RelayRow, Percentiles)],
) -> anyhow::Result<()> {
    let low = points.iter().map(|(_, p)| p.p50).fold(f64::INFINITY, f64::min);
    let high = points.iter().map(|(_, p)| p.max).fold(1.0, f64::max);
    let low = if low.is_finite() { low.max(0.1) } else { 0.1 };
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{title}, us: p50, p90, p99, max"), (FONT, 15))
        .margin(8)
        .x_label_area_size(TITLE_HEIGHT)
        .y_label_area_size(60)
        .build_cartesian_2d(axis.range(), (low / 2.0..high * 2.0).log_scale())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * axis.subscribers.len() + 1)
        .x_label_formatter(&|x| axis.label(*x))
        .y_label_formatter(&|y| format!("{y}"))
        .draw()?;
    for contender in &axis.contenders {
        let style = colour(*contender).stroke_width(2);
        let of_contender = points.iter().filter(|(row, _)| row.contender == *contender);
        let tick = axis.width() / 4.0;
        for (row, p) in of_contender {
            let x = axis.middle(row);
            let level = |y: f64| PathElement::new([(x - tick, y), (x + tick, y)], style);
            let stem = PathElement::new([(x, p.p50), (x, p.p99)], style);
            chart.draw_series([stem, level(p.p90), level(p.p99)])?;
            chart.draw_series([Circle::new((x, p.p50), 4, colour(*contender).filled())])?;
            chart.draw_series([Circle::new((x, p.max), 3, colour(*contender).stroke_width(1))])?;
        }
    }
    Ok(())
}

/// Draws bars of CPU time: the whole machine in pale colours, the relay's process in full colours. Adds the legend of
/// the picture.
fn cpu_bars(area: &Area<'_>, axis: &Axis, measured: &[(&RelayRow, RelayFigures)]) -> anyhow::Result<()> {
    let us = |ns: f64| ns / 1e3;
    let high = measured.iter().map(|(_, f)| us(f.cpu_ns_per_object.machine)).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption("CPU per delivered object, us: machine, relay", (FONT, 15))
        .margin(8)
        .x_label_area_size(TITLE_HEIGHT)
        .y_label_area_size(60)
        .build_cartesian_2d(axis.range(), 0.0..high * 1.1)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * axis.subscribers.len() + 1)
        .x_label_formatter(&|x| axis.label(*x))
        .draw()?;
    for contender in &axis.contenders {
        let fill = colour(*contender);
        let bars =
            measured.iter().filter(|(row, _)| row.contender == *contender).flat_map(|(row, figures)| {
                let cpu = figures.cpu_ns_per_object;
                let x = axis.middle(row);
                let half = axis.width() * 0.45;
                let bar = |ns, style| Rectangle::new([(x - half, 0.0), (x + half, us(ns))], style);
                [bar(cpu.machine, fill.mix(0.35).filled()), bar(cpu.relay, fill.filled())]
            });
        chart
            .draw_series(bars)?
            .label(contender.label())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], fill.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::figures::{CpuPerObject, PacketsPerObject, RowLoad};
    use super::super::wire::Matched;
    use super::*;
    use crate::bench::profile::LinkProfile;
    use crate::transport::LabTransport;

    #[test]
    fn every_relay_and_load_is_in_the_picture() {
        let figures = RelayFigures {
            delivered: 1,
            lost: 0,
            latency_us: Some(Percentiles { p50: 80.0, p90: 90.0, p99: 200.0, max: 900.0 }),
            owed: None,
            wire_latency_us: None,
            cpu_ns_per_object: CpuPerObject { machine: 30_000.0, relay: 9_000.0 },
            syscalls_per_object: None,
            packets_per_object: PacketsPerObject { from_publisher: 1.0, to_subscriber: 1.0 },
            kernel: None,
            gate_ns_per_packet: None,
            rss_bytes: 1,
            wire: Matched::default(),
            probe_adds_us: None,
        };
        let row = |contender, subscribers| RelayRow {
            profile: LinkProfile::Clean,
            contender,
            load: RowLoad { transport: LabTransport::Raw, subscribers, object_bytes: 1200, rate_hz: 500 },
            rounds: vec![Ok(figures.clone())],
        };
        let rows = [row(Contender::User, 1), row(Contender::MoqRelay, 1), row(Contender::User, 8)];
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("plot.svg");
        draw(&rows, &path).expect("a picture");
        let svg = std::fs::read_to_string(&path).expect("a file");
        for text in
            ["millrace (user)", "moq-relay", "1 subscriber", "8 subscribers", "500 objects of 1200 bytes"]
        {
            assert!(svg.contains(text), "{text} is not in the picture");
        }
        assert!(draw(&[], &path).is_err());
    }
}
