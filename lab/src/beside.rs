//! Draws a figure that compares results, with a panel for each measured quantity. Each line of a panel is for one name,
//! such as a relay's. On that line, a mark shows the value of each series.

use std::path::Path;

use anyhow::ensure;
use plotters::{coord::Shift, prelude::*};

use crate::stats::Spread;

const WIDTH: u32 = 560;
const LINE_HEIGHT: u32 = 26;
/// Height of a panel's title and axis, pixels. The panel's lines are not included.
const FRAME_HEIGHT: u32 = 84;
const LABELS_WIDTH: u32 = 210;
/// Height of the legend above all panels, pixels. It is drawn only if there are several series.
const LEGEND_HEIGHT: u32 = 26;
const LEGEND_WIDTH: i32 = 100;
const FONT: &str = "sans-serif";

pub struct Panel {
    /// Title of the panel, with the unit.
    pub title: String,
    /// Whether the axis is logarithmic.
    pub is_log: bool,
    pub lines: Vec<PanelLine>,
}

/// A line of a panel: a name, and a mark for each series. Lines are drawn from top to bottom.
pub struct PanelLine {
    pub name: String,
    pub marks: Vec<PanelMark>,
}

/// A measured value to draw (`at`), and the range from `from` to `to` of its repetitions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PanelMark {
    /// Index into the names of the series.
    pub series: usize,
    pub at: f64,
    pub from: f64,
    pub to: f64,
}

impl PanelMark {
    /// Creates a mark at the median, with a line from the lowest to the highest value.
    pub fn from_spread(series: usize, spread: Spread) -> Self {
        Self { series, at: spread.median, from: spread.min, to: spread.max }
    }
}

impl Panel {
    /// Creates a panel with one series: for each name a value and its range.
    pub fn from_figures(title: &str, figures: impl IntoIterator<Item = (String, Option<[f64; 3]>)>) -> Self {
        let marks = |[at, from, to]: [f64; 3]| vec![PanelMark { series: 0, at, from, to }];
        let line = |(name, figure): (String, Option<_>)| PanelLine {
            name,
            marks: figure.map_or_else(Vec::new, marks),
        };
        Self { title: title.to_owned(), is_log: false, lines: figures.into_iter().map(line).collect() }
    }

    fn marks(&self) -> impl Iterator<Item = &PanelMark> {
        self.lines.iter().flat_map(|line| &line.marks)
    }

    /// Returns a value's coordinate on the panel's axis: the value's decimal logarithm if the axis is logarithmic.
    fn place(&self, value: f64) -> f64 {
        if self.is_log { value.max(f64::MIN_POSITIVE).log10() } else { value }
    }

    fn label(&self, place: f64) -> String {
        match self.is_log {
            false => format!("{place}"),
            true if (place - place.round()).abs() < 1e-6 => {
                format!("{:.*}", (-place.round()).max(0.0) as usize, 10_f64.powf(place))
            }
            true => String::new(),
        }
    }

    /// Returns the range of the axis. It is between powers of ten if the axis is logarithmic, else it starts at 0.
    fn range(&self) -> (f64, f64) {
        let places = |of: fn(&PanelMark) -> f64| self.marks().map(move |mark| self.place(of(mark)));
        let least = places(|mark| mark.from).fold(f64::INFINITY, f64::min);
        let most = places(|mark| mark.to).fold(f64::NEG_INFINITY, f64::max);
        match self.is_log {
            true => (least.floor(), most.ceil().max(least.floor() + 1.0)),
            false => (0.0, most.max(f64::MIN_POSITIVE) * 1.05),
        }
    }
}

/// Draws the panels with values as SVG.
///
/// # Errors
///
/// Fails if no panel has a value, or if the file cannot be written.
pub fn draw(panels: &[Panel], series: &[&str], columns: usize, path: &Path) -> anyhow::Result<()> {
    let panels: Vec<_> = panels.iter().filter(|panel| panel.marks().next().is_some()).collect();
    ensure!(!panels.is_empty(), "nothing could be measured");
    let lines = panels.iter().map(|panel| panel.lines.len()).max().unwrap_or_default();
    let columns = columns.clamp(1, panels.len());
    let rows = panels.len().div_ceil(columns);
    let height = FRAME_HEIGHT + LINE_HEIGHT * u32::try_from(lines)?;
    let legend_height = if series.len() > 1 { LEGEND_HEIGHT } else { 0 };
    let size = (WIDTH * u32::try_from(columns)?, legend_height + height * u32::try_from(rows)?);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let (legend, root) = root.split_vertically(legend_height);
    for (x, (at, name)) in (0..).map(|at| 16 + at * LEGEND_WIDTH).zip(series.iter().enumerate()) {
        if legend_height > 0 {
            let middle = legend_height as i32 / 2;
            legend.draw(&Circle::new((x, middle), 4, Palette99::pick(at).filled()))?;
            legend.draw(&Text::new((*name).to_owned(), (x + 10, middle - 6), (FONT, 14)))?;
        }
    }
    for (area, panel) in root.split_evenly((rows, columns)).iter().zip(panels) {
        draw_panel(area, panel, series)?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    panel: &Panel,
    series: &[&str],
) -> anyhow::Result<()> {
    let (from, to) = panel.range();
    let count = panel.lines.len();
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 14))
        .margin(6)
        .x_label_area_size(24)
        .y_label_area_size(LABELS_WIDTH)
        .build_cartesian_2d(from..to, (count as f64 - 0.5)..-0.5)?;
    let name = |y: &f64| {
        let is_line = (y - y.round()).abs() < 1e-6 && *y >= 0.0;
        panel.lines.get(y.round() as usize).filter(|_| is_line).map_or("", |line| &line.name).to_owned()
    };
    chart
        .configure_mesh()
        .disable_y_mesh()
        .max_light_lines(0)
        .y_labels(2 * count + 1)
        .x_label_formatter(&|x| panel.label(*x))
        .y_label_formatter(&name)
        .draw()?;
    for at in 0..series.len() {
        let colour = Palette99::pick(at).to_rgba();
        // Shift each series' marks a little, so that they do not cover each other.
        let aside = 0.6 * ((at as f64 + 0.5) / series.len() as f64 - 0.5);
        let marks = panel.lines.iter().enumerate().flat_map(|(line, it)| {
            it.marks.iter().filter(|mark| mark.series == at).map(move |mark| (line as f64 + aside, *mark))
        });
        let ranges = marks.clone().map(|(y, mark)| {
            PathElement::new([(panel.place(mark.from), y), (panel.place(mark.to), y)], colour.stroke_width(2))
        });
        chart.draw_series(ranges)?;
        chart
            .draw_series(marks.map(|(y, mark)| Circle::new((panel.place(mark.at), y), 4, colour.filled())))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_panel_line_and_series_is_in_the_picture() {
        let mark = |series, at| PanelMark { series, at, from: at / 2.0, to: at * 2.0 };
        let line = |name: &str, marks: Vec<PanelMark>| PanelLine { name: name.to_owned(), marks };
        let panel = |title: &str, is_log, lines| Panel { title: title.to_owned(), is_log, lines };
        let panels = [
            panel(
                "1 ms: s",
                true,
                vec![line("curl", vec![mark(0, 0.1), mark(1, 50.0)]), line("redis", vec![])],
            ),
            panel("share: %", false, vec![line("tree", vec![mark(0, 80.0)])]),
            panel("nothing", false, vec![line("no figures", vec![])]),
        ];
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("plot.svg");
        draw(&panels, &["cubic", "carried"], 2, &path).expect("a picture");
        let svg = std::fs::read_to_string(&path).expect("a file");
        for text in ["1 ms: s", "share: %", "curl", "redis", "tree", "cubic", "carried", "0.01", "100"] {
            assert!(svg.contains(text), "{text} is not in the picture");
        }
        assert!(!svg.contains("no figures"));
        assert!(draw(&panels[2..], &["cubic"], 2, &path).is_err());
    }

    #[test]
    fn powers_of_ten_have_labels() {
        let panel = |is_log, values: &[f64]| Panel {
            title: String::new(),
            is_log,
            lines: vec![PanelLine {
                name: String::new(),
                marks: values.iter().map(|at| PanelMark { series: 0, at: *at, from: *at, to: *at }).collect(),
            }],
        };
        let log = panel(true, &[0.02, 60.0]);
        assert_eq!(log.range(), (-2.0, 2.0));
        assert_eq!([log.label(-2.0), log.label(0.5), log.label(2.0)], ["0.01", "", "100"]);
        assert_eq!(panel(true, &[1.0]).range(), (0.0, 1.0));
        assert_eq!(panel(false, &[100.0]).range(), (0.0, 105.0));
    }
}
