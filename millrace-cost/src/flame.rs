//! Flame graphs as files: for documents, and to look at without a server.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::fold::UNKNOWN;
use crate::report::{Report, Stacks};

/// Pixels.
const WIDTH: f64 = 1200.0;
const ROW: f64 = 17.0;
const NARROWEST: f64 = 1.0;
/// Of a character, at the size of [`HEAD`].
const CHARACTER: f64 = 6.65;
const HEAD: &str = "<style>text{font:11px monospace;dominant-baseline:central;pointer-events:none}\
                    rect{stroke:#fff;stroke-width:.5}</style>\n";
/// As the dashboard has them.
const COLORS: [(&str, &str); 5] = [
    ("net_rx", "#56a0d0"),
    ("net_tx", "#8fd0f7"),
    ("send", "#e8b23c"),
    ("receive", "#4fb89a"),
    ("io_uring", "#d79ac0"),
];

/// An SVG of a report's [stacks](Report::stacks), all CPUs together, callers above what they call. Widths are time;
/// the outermost boxes are events, and chosen processes with all that they did, inside and outside of events.
pub fn svg(report: &Report) -> String {
    let nothing = Stacks::default();
    let tree = Node::new(report.stacks.as_ref().unwrap_or(&nothing));
    let mut boxes = String::new();
    let scale = WIDTH / tree.ns.max(1) as f64;
    let mut drawing = Drawing { boxes: &mut boxes, scale, period_ns: report.period_ns.max(1), rows: 0 };
    drawing.children(&tree, 0.0, 0);
    let height = drawing.rows.max(1) as f64 * ROW;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\">\n{HEAD}\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{boxes}</svg>\n"
    )
}

#[derive(Default)]
struct Node {
    ns: u64,
    children: BTreeMap<String, Node>,
}

impl Node {
    fn new(stacks: &Stacks) -> Self {
        let mut tree = Self::default();
        for stack in &stacks.stacks {
            let name = |at: &u32| stacks.functions.get(usize::try_from(*at).ok()?).cloned();
            let mut names: Vec<String> = std::iter::once(stack.root().into_owned())
                .chain(stack.frames.iter().filter_map(name))
                .collect();
            // Programs without frame pointers give any number of them.
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

struct Drawing<'a> {
    boxes: &'a mut String,
    /// Pixels per nanosecond.
    scale: f64,
    period_ns: u64,
    rows: usize,
}

impl Drawing<'_> {
    fn children(&mut self, node: &Node, left: f64, depth: usize) {
        let mut children: Vec<_> = node.children.iter().collect();
        children.sort_by_key(|(_, child)| std::cmp::Reverse(child.ns));
        let mut left = left;
        for (name, child) in children {
            let width = child.ns as f64 * self.scale;
            // The rest are no wider.
            if width < NARROWEST {
                break;
            }
            self.draw(name, child.ns, [left, depth as f64 * ROW, width]);
            self.rows = self.rows.max(depth + 1);
            self.children(child, left, depth + 1);
            left += width;
        }
    }

    fn draw(&mut self, name: &str, ns: u64, [x, y, width]: [f64; 3]) {
        let share = ns as f64 * 100.0 / self.period_ns as f64;
        let (color, title) = (color(name), escaped(name));
        let _ = write!(
            self.boxes,
            "<g><title>{title}: {share:.2} % of a CPU</title><rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" \
             height=\"{ROW}\" fill=\"{color}\"/>"
        );
        let fits = ((width - 4.0) / CHARACTER) as usize;
        if fits >= 3 {
            let text = match name.chars().count() > fits {
                true => name.chars().take(fits - 1).chain(['…']).collect(),
                false => name.to_owned(),
            };
            let _ = write!(
                self.boxes,
                "<text x=\"{:.1}\" y=\"{}\">{}</text>",
                x + 2.0,
                y + ROW / 2.0,
                escaped(&text)
            );
        }
        self.boxes.push_str("</g>\n");
    }
}

/// BPF programs stand out; a function always looks the same.
fn color(name: &str) -> String {
    if let Some((_, color)) = COLORS.iter().find(|(event, _)| *event == name) {
        return (*color).to_owned();
    }
    let hash = name.bytes().fold(7_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    match name.starts_with("bpf:") {
        true => format!("hsl({},55%,72%)", 285 + hash % 25),
        false => format!("hsl({},80%,{}%)", 22 + hash % 32, 70 + hash / 32 % 8),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn picture(of: &[(&str, u32, u64)]) -> String {
        svg(&Report { stacks: Some(samples::stacks(of)), ..samples::report(0) })
    }

    /// Name, x, y and width of each box.
    fn boxes(svg: &str) -> Vec<(&str, &str, &str, &str)> {
        let attribute = |line: &'_ str, name: &str| -> Option<(usize, usize)> {
            let from = line.find(&format!(" {name}=\""))? + name.len() + 3;
            Some((from, from + line[from..].find('"')?))
        };
        let lines = svg.lines().filter_map(|line| line.strip_prefix("<g><title>"));
        lines
            .map(|line| {
                let value = |name| attribute(line, name).map_or("", |(from, to)| &line[from..to]);
                (line.split(": ").next().unwrap_or_default(), value("x"), value("y"), value("width"))
            })
            .collect()
    }

    #[test]
    fn widths_are_time() {
        let svg = picture(&[("rx;ip;udp", 0, 300), ("rx;ip", 1, 100), ("rx;tcp<T>", 0, 200)]);
        assert_eq!(
            boxes(&svg),
            [
                ("net_rx", "0.0", "0", "1200.0"),
                ("rx", "0.0", "17", "1200.0"),
                ("ip", "0.0", "34", "800.0"),
                ("udp", "0.0", "51", "600.0"),
                ("tcp&lt;T&gt;", "800.0", "34", "400.0"),
            ]
        );
        // 300 samples of 1 ms in a second.
        assert!(svg.contains("<title>udp: 30.00 % of a CPU</title>"), "{svg}");
        assert!(svg.contains("viewBox=\"0 0 1200 68\""), "{svg}");
    }

    #[test]
    fn what_is_too_narrow_is_left_out() {
        let svg = picture(&[("rx;wide", 0, 9999), ("rx;narrow;below", 0, 1)]);
        assert_eq!(boxes(&svg).len(), 3, "{svg}");
    }

    /// Their calls are in the events as well.
    #[test]
    fn chosen_processes_are_apart() {
        let mut stacks = samples::stacks(&[("a", 0, 1), ("a", 0, 1)]);
        stacks.stacks[1].pid = Some(77);
        let svg = svg(&Report { stacks: Some(stacks), ..samples::report(0) });
        let names: Vec<_> = boxes(&svg).into_iter().map(|of| of.0).collect();
        assert_eq!(names, ["net_rx", "a", "process 77", "a"]);
    }

    #[test]
    fn what_is_unknown_is_one_box() {
        let svg = picture(&[("a;[unknown];[unknown];a;a", 0, 1)]);
        let names: Vec<_> = boxes(&svg).into_iter().map(|of| of.0).collect();
        assert_eq!(names, ["net_rx", "a", "[unknown]", "a", "a"]);
    }

    #[test]
    fn nothing_is_a_picture_too() {
        assert!(boxes(&picture(&[])).is_empty());
    }
}
