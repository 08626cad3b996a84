//! Draws flame graphs as SVG files, for documents and for a browser without a server.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use time::OffsetDateTime;

use crate::arguments::printable;
use crate::fold::UNKNOWN;
use crate::report::{Report, Stacks};

/// Width of the picture in pixels.
const WIDTH: f64 = 1200.0;
/// Height of a frame in pixels.
const ROW: f64 = 17.0;
/// Height in pixels of the lines above the graph: heading, description and selected frame.
const HEAD: f64 = 66.0;
/// Width in pixels of the narrowest frame that is drawn, a ten-thousandth of the graph. Zooming in makes it visible.
const NARROWEST: f64 = 0.12;
/// Width in pixels of a character in the font of `STYLE`.
const CHARACTER: f64 = 6.65;
const STYLE: &str = include_str!("flame.css");
/// Script for zoom and search, which runs when the file is opened in a browser. In a document the picture is static.
const SCRIPT: &str = include_str!("flame.js");
/// Colors of the frames for softirqs and kinds of system calls, as in the dashboard.
const COLORS: [(&str, &str); 5] = [
    ("net_rx", "#56a0d0"),
    ("net_tx", "#8fd0f7"),
    ("send", "#e8b23c"),
    ("receive", "#4fb89a"),
    ("io_uring", "#d79ac0"),
];
/// Largest number of processes that are named in the heading.
const NAMED: usize = 2;

/// Returns an SVG of a report's [stacks](Report::stacks), all CPUs together, with callers above their callees. A
/// frame's width is its time. Below the root are the kernel's networking events, such as softirqs and sends, and the
/// profiled processes with all their stacks. The SVG refers to no other files.
pub fn svg(report: &Report) -> String {
    let nothing = Stacks::default();
    let stacks = report.stacks.as_ref().unwrap_or(&nothing);
    let tree = FlameNode::new(stacks);
    let period_ns = report.period_ns.max(1);
    // Networking stacks of a profiled process are in the graph twice: below the kernel event, such as `send`, and below
    // the process.
    let once = stacks.stacks.iter().filter(|stack| stack.pid.is_none() || stack.event.is_none());
    let taken_ns = once.map(|stack| stack.ns).sum();
    let whole_ns = tree.ns.max(1);
    let mut drawing = Drawing { frames: String::new(), whole_ns, taken_ns, period_ns, rows: 0 };
    let what = format!("{}, {}", describe_counts(report, stacks), cpus(report));
    drawing.frame(&what, &tree, 0, 0);
    let heading = escaped(&format!("millrace cost: {what}"));
    let about = escaped(&describe_report(report));
    let height = HEAD + drawing.rows as f64 * ROW;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\">\n\
         <title>{heading}; {about}</title>\n<style><![CDATA[\n{STYLE}]]></style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text id=\"heading\" x=\"4\" y=\"16\">{heading}</text>\n\
         <text id=\"about\" x=\"4\" y=\"36\">{about}</text>\n\
         <text id=\"detail\" x=\"4\" y=\"54\"/>\n\
         <g id=\"frames\">\n{}</g>\n<script><![CDATA[\n{SCRIPT}]]></script>\n</svg>\n",
        drawing.frames
    )
}

/// Names the subject of the graph: networking, profiled processes, or both.
fn describe_counts(report: &Report, stacks: &Stacks) -> String {
    let pids: BTreeSet<u32> = stacks.stacks.iter().filter_map(|stack| stack.pid).collect();
    let mut what = Vec::new();
    if stacks.stacks.iter().any(|stack| stack.pid.is_none()) {
        what.push("networking".to_owned());
    }
    if pids.len() > NAMED {
        what.push(format!("{} processes", pids.len()));
    } else {
        what.extend(pids.iter().map(|pid| {
            let process = report.processes.iter().find(|process| process.pid == *pid);
            let name = process.map_or(String::new(), |process| format!(" ({})", process.name));
            format!("process {pid}{name}")
        }));
    }
    if what.is_empty() { "nothing was sampled".to_owned() } else { what.join(" and ") }
}

fn cpus(report: &Report) -> Cow<'static, str> {
    match report.cpus.len() {
        1 => "1 CPU".into(),
        cpus => format!("{cpus} CPUs").into(),
    }
}

/// Describes the host, the end of the period and its length. The sum of several reports may have gaps between their
/// periods, so the start of the first one is not known.
fn describe_report(report: &Report) -> String {
    let until = match OffsetDateTime::from_unix_timestamp((report.time_unix_ms / 1000) as i64) {
        Ok(t) => format!(
            "{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC",
            t.year(),
            u8::from(t.month()),
            t.day(),
            t.hour(),
            t.minute(),
            t.second()
        ),
        Err(_) => "an unknown time".to_owned(),
    };
    format!(
        "{}, Linux {}: {:.2} s until {until}, {} stacks a second and CPU",
        report.host.name,
        report.host.kernel,
        report.period_ns as f64 / 1e9,
        report.frequency_hz
    )
}

#[derive(Default)]
struct FlameNode {
    ns: u64,
    children: BTreeMap<String, FlameNode>,
}

impl FlameNode {
    fn new(stacks: &Stacks) -> Self {
        let mut tree = Self::default();
        for stack in &stacks.stacks {
            let name = |at: &u32| stacks.functions.get(usize::try_from(*at).ok()?).cloned();
            let mut names: Vec<String> = std::iter::once(stack.root().into_owned())
                .chain(stack.frames.iter().filter_map(name))
                .collect();
            // Programs without frame pointers yield many unknown frames in a row: one is enough.
            names.dedup_by(|name, before| name == before && name == UNKNOWN);
            tree.ns += stack.ns;
            let mut node = &mut tree;
            for name in names {
                node = node.children.entry(name).or_default();
                node.ns += stack.ns;
            }
        }
        tree
    }
}

struct Drawing {
    /// SVG text of the frames drawn so far.
    frames: String,
    /// Time in nanoseconds that corresponds to the whole width of the picture.
    whole_ns: u64,
    /// Sum of the times of all stacks in nanoseconds, even if the graph contains a stack twice.
    taken_ns: u64,
    period_ns: u64,
    /// Number of rows drawn so far.
    rows: usize,
}

impl Drawing {
    /// Draws a function's frame that begins `start_ns` from the left, and its callees below it, most time first.
    fn frame(&mut self, name: &str, node: &FlameNode, start_ns: u64, depth: usize) {
        self.draw(name, node.ns, start_ns, depth);
        self.rows = self.rows.max(depth + 1);
        let mut children: Vec<_> = node.children.iter().collect();
        children.sort_by_key(|(_, child)| std::cmp::Reverse(child.ns));
        let mut start_ns = start_ns;
        for (name, child) in children {
            // Children are sorted by time, so the remaining ones are no wider.
            if self.pixels(child.ns) < NARROWEST {
                break;
            }
            self.frame(name, child, start_ns, depth + 1);
            start_ns += child.ns;
        }
    }

    fn pixels(&self, ns: u64) -> f64 {
        ns as f64 * WIDTH / self.whole_ns as f64
    }

    fn draw(&mut self, name: &str, ns: u64, start_ns: u64, depth: usize) {
        let taken_ns = if depth == 0 { self.taken_ns } else { ns };
        let share = taken_ns as f64 * 100.0 / self.period_ns as f64;
        let color = color(name, depth);
        let title = escaped(name);
        let x = self.pixels(start_ns);
        let y = HEAD + depth as f64 * ROW;
        let width = self.pixels(ns);
        let _ = write!(
            self.frames,
            "<g data-at=\"{start_ns} {ns} {depth}\"><title>{title}: {share:.2} % of one CPU</title>\
             <rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{ROW}\" fill=\"{color}\"/>"
        );
        let fits = ((width - 4.0) / CHARACTER) as usize;
        if fits >= 3 {
            let text = match name.chars().count() > fits {
                true => name.chars().take(fits - 1).chain(['…']).collect(),
                false => name.to_owned(),
            };
            let x = x + 2.0;
            let y = y + ROW / 2.0;
            let _ = write!(self.frames, "<text x=\"{x:.1}\" y=\"{y}\">{}</text>", escaped(&text));
        }
        self.frames.push_str("</g>\n");
    }
}

/// Returns a frame's color. A function always has the same color, and BPF programs have a hue of their own.
fn color(name: &str, depth: usize) -> String {
    if depth == 0 {
        return "#d8dde3".to_owned();
    }
    if let Some((_, color)) = COLORS.iter().find(|(event, _)| *event == name) {
        return (*color).to_owned();
    }
    let hash = name.bytes().fold(7_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    match name.starts_with("bpf:") {
        true => format!("hsl({},55%,72%)", 285 + hash % 25),
        false => format!("hsl({},80%,{}%)", 22 + hash % 32, 70 + hash / 32 % 8),
    }
}

/// Escapes text for XML, which does not allow unprintable characters even in escapes.
fn escaped(text: &str) -> String {
    printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn picture(of: &[(&str, u32, u64)]) -> String {
        svg(&Report { stacks: Some(samples::stacks(of)), ..samples::report(0) })
    }

    /// Returns the name, x, y and width of each frame.
    fn frames(svg: &str) -> Vec<(&str, &str, &str, &str)> {
        let between = |line: &'_ str, before: &str, after: &str| -> Option<(usize, usize)> {
            let from = line.find(before)? + before.len();
            Some((from, from + line[from..].find(after)?))
        };
        let lines = svg.lines().filter(|line| line.starts_with("<g data-at="));
        lines
            .map(|line| {
                let value = |before: &str, after| {
                    between(line, before, after).map_or("", |(from, to)| &line[from..to])
                };
                (value("<title>", ": "), value(" x=\"", "\""), value(" y=\"", "\""), value(" width=\"", "\""))
            })
            .collect()
    }

    fn names(svg: &str) -> Vec<&str> {
        frames(svg).into_iter().map(|frame| frame.0).collect()
    }

    #[test]
    fn flame_graph_widths_are_time() {
        let svg = picture(&[("rx;ip;udp", 0, 300), ("rx;ip", 1, 100), ("rx;tcp<T>", 0, 200)]);
        assert_eq!(
            frames(&svg),
            [
                ("networking, 2 CPUs", "0.0", "66", "1200.0"),
                ("net_rx", "0.0", "83", "1200.0"),
                ("rx", "0.0", "100", "1200.0"),
                ("ip", "0.0", "117", "800.0"),
                ("udp", "0.0", "134", "600.0"),
                ("tcp&lt;T&gt;", "800.0", "117", "400.0"),
            ]
        );
        // The function `udp` has 300 samples of 1 ms each in a period of one second.
        assert!(svg.contains("<title>udp: 30.00 % of one CPU</title>"), "{svg}");
        assert!(svg.contains("viewBox=\"0 0 1200 151\""), "{svg}");
    }

    #[test]
    fn flame_graph_heading_names_its_subject_host_and_time() {
        let svg = picture(&[("rx", 0, 1)]);
        for want in [
            "<text id=\"heading\" x=\"4\" y=\"16\">millrace cost: networking, 2 CPUs</text>",
            ">host, Linux 6.1.0: 1.00 s until 2023-11-14 22:13:20 UTC, 1000 stacks a second and CPU</text>",
            "<title>millrace cost: networking, 2 CPUs; host, Linux 6.1.0: 1.00 s",
        ] {
            assert!(svg.contains(want), "{want} in {svg}");
        }
    }

    #[test]
    fn too_narrow_frame_is_left_out_of_the_flame_graph() {
        let svg = picture(&[("rx;wide", 0, 99_999), ("rx;narrow;below", 0, 9)]);
        assert_eq!(names(&svg), ["networking, 2 CPUs", "net_rx", "rx", "wide"]);
    }

    /// Networking stacks of a profiled process are drawn below the process as well as below the kernel event, such as
    /// `send`.
    #[test]
    fn flame_graph_separates_profiled_processes() {
        let mut stacks = samples::stacks(&[("a", 0, 1), ("a", 0, 1)]);
        stacks.stacks[1].pid = Some(7);
        let mut report = Report { stacks: Some(stacks), ..samples::report(0) };
        assert!(svg(&report).contains("2 CPUs: 0.10 % of one CPU</title>"), "once");
        let both = "networking and process 7 (server), 2 CPUs";
        assert_eq!(names(&svg(&report)), [both, "net_rx", "a", "process 7", "a"]);
        report.stacks.iter_mut().for_each(|stacks| stacks.stacks.truncate(1));
        assert_eq!(names(&svg(&report))[0], "networking, 2 CPUs");
        report.stacks.iter_mut().for_each(|stacks| stacks.stacks[0].pid = Some(8));
        assert_eq!(names(&svg(&report))[0], "process 8, 2 CPUs");
    }

    #[test]
    fn adjacent_unknown_functions_are_one_frame() {
        let svg = picture(&[("a;[unknown];[unknown];a;a", 0, 1)]);
        assert_eq!(names(&svg)[1..], ["net_rx", "a", "[unknown]", "a", "a"]);
    }

    #[test]
    fn names_in_a_flame_graph_are_escaped() {
        let mut report = Report {
            stacks: Some(samples::stacks(&[("]]></script><script>\u{1b}\u{1}\u{ffff}\"'&amp", 0, 1)])),
            ..samples::report(0)
        };
        report.stacks.iter_mut().for_each(|stacks| stacks.stacks[0].pid = Some(7));
        report.processes[0].name = "</title><b>\u{8}".to_owned();
        report.host.name = "<host>".to_owned();
        let svg = svg(&report);
        assert_eq!(names(&svg)[2], "]]&gt;&lt;/script&gt;&lt;script&gt;???&quot;'&amp;amp");
        assert!(svg.contains("process 7 (&lt;/title&gt;&lt;b&gt;?), 2 CPUs"), "{svg}");
        assert!(svg.matches("<script").count() == 1 && !svg.contains("<host>"), "{svg}");
        assert!(!svg.contains(|c: char| c.is_control() && c != '\n'), "{svg}");
    }

    #[test]
    fn flame_graph_without_stacks_is_drawn() {
        assert_eq!(names(&picture(&[])), ["nothing was sampled, 2 CPUs"]);
    }
}
