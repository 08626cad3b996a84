//! Draws the live view on a terminal and handles its keys.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use millrace_cost::arguments;
use millrace_cost::report::Report;
use millrace_daemon::render;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use super::losses::ReportLosses;
use super::signals::CostSignals;
use super::table::{TableCell, TextTable};
use super::text::{self, cut};
use super::trend::{Picture, Trend};

/// The result of a key press: whether the live view continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyAnswer {
    /// The live view continues after this key.
    Continue,
    /// The user quits, or a signal ends the program.
    Quit,
}

/// The live view, on the terminal's alternate screen and without echo. Dropping it restores the terminal.
pub struct LiveTerminal {
    /// The terminal's settings before the view was opened.
    before: Termios,
    /// Signals that end the view, so that the terminal is restored after SIGTERM too.
    signals: CostSignals,
    losses: Arc<ReportLosses>,
    trend: Trend,
    shown: Option<LiveReports>,
    view: LiveView,
}

/// The latest report and, for each CPU, a chart of the share of its time that networking used recently.
struct LiveReports {
    report: Arc<Report>,
    pictures: Vec<Picture>,
}

impl LiveReports {
    /// Adds the processes' command lines to this view's copy of the report. Logs and the dashboard have them only if
    /// requested.
    fn read_arguments(&mut self) {
        if self.report.has_arguments() {
            return;
        }
        let mut report = self.report.without_stacks();
        arguments::read(&mut report.processes);
        self.report = Arc::new(report);
    }
}

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Moves the cursor to the top left. The screen is overwritten line by line instead of cleared, which would flicker.
const HOME: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K\r\n";
const END_OF_SCREEN: &str = "\x1b[J";
const BOLD: &str = "\x1b[1m";
const REVERSE: &str = "\x1b[7m";
const PLAIN: &str = "\x1b[0m";

impl LiveTerminal {
    /// Opens the view. With `arguments`, processes are shown with their command lines until the user switches that off.
    pub fn open(signals: CostSignals, losses: Arc<ReportLosses>, arguments: bool) -> anyhow::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        let view = LiveView { arguments, ..LiveView::default() };
        // The value is made before the first write, so that dropping it after an error restores the terminal.
        let mut terminal = Self { before, signals, losses, trend: Trend::default(), shown: None, view };
        terminal.write(ENTER)?;
        terminal.draw()?;
        Ok(terminal)
    }

    /// Handles keys and signals for at most `time`.
    pub fn wait(&mut self, time: Duration) -> anyhow::Result<KeyAnswer> {
        let stdin = io::stdin();
        let mut ready = [
            PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut ready, PollTimeout::try_from(time).unwrap_or(PollTimeout::ZERO))?;
        let [key, signal] = ready.map(|fd| fd.any().unwrap_or(false));
        if signal {
            return Ok(KeyAnswer::Quit);
        }
        if !key {
            return Ok(KeyAnswer::Continue);
        }
        let mut bytes = [0; 16];
        // A ready descriptor without data means that the terminal was closed.
        let read = nix::unistd::read(&stdin, &mut bytes)?;
        let typed = bytes.get(..read).unwrap_or_default();
        if typed.is_empty() || keys(typed).any(|key| self.view.key(key) == KeyAnswer::Quit) {
            return Ok(KeyAnswer::Quit);
        }
        self.draw()?;
        Ok(KeyAnswer::Continue)
    }

    /// Shows a report, unless the view is paused.
    ///
    /// # Errors
    /// Fails if the terminal cannot be written to.
    pub fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        self.trend.add(report);
        if self.view.paused {
            return Ok(());
        }
        self.shown = Some(LiveReports { report: Arc::clone(report), pictures: self.trend.pictures() });
        self.draw()
    }

    fn draw(&mut self) -> anyhow::Result<()> {
        let (width, height) = render::size();
        if self.view.arguments {
            self.shown.iter_mut().for_each(LiveReports::read_arguments);
        }
        let lines = self.view.lines(self.shown.as_ref(), &self.losses, width, height);
        let mut screen = String::from(HOME);
        screen.push_str(&lines.join(END_OF_LINE));
        // No line break follows the last line, so the rest of that line is cleared here.
        screen.push_str("\x1b[K");
        screen.push_str(END_OF_SCREEN);
        self.write(&screen)
    }

    fn write(&mut self, text: &str) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        Ok(out.flush()?)
    }
}

impl Drop for LiveTerminal {
    fn drop(&mut self) {
        // Errors are ignored: they mean that the terminal was closed, so its settings need not be restored.
        let _ = self.write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The selected table and how it is shown.
#[derive(Debug, Default, PartialEq, Eq)]
struct LiveView {
    /// Index of the selected table.
    table: usize,
    /// Index of the column to sort by; `None` for the table's own order.
    sort: Option<usize>,
    reverse: bool,
    /// Number of rows above the first one that is shown.
    scroll: usize,
    paused: bool,
    /// True if processes are shown with their command lines.
    arguments: bool,
    /// Number of tables when the view was last drawn.
    tables: usize,
    /// Number of columns when the view was last drawn.
    columns: usize,
}

/// Index of the table of CPUs among a report's tables. The next constant, `PARTS`, is the index of the table of parts
/// of the network stack.
const OVERVIEW: usize = 0;
const PARTS: usize = 1;
const HELP: &str = "Tab table  s sort  r reverse  a arguments  arrows scroll  space pause  q quit";

impl LiveView {
    fn key(&mut self, bytes: &[u8]) -> KeyAnswer {
        match bytes {
            // A terminal in raw mode sends no SIGINT, so Ctrl-C arrives as byte 3. Byte 27 alone is the Escape key.
            b"q" | b"Q" | [3] | [27] => return KeyAnswer::Quit,
            b"\t" => self.turn(1),
            b"\x1b[Z" => self.turn(self.tables.saturating_sub(1)),
            b"s" => {
                self.sort = match self.sort {
                    None => Some(0),
                    Some(column) if column + 1 < self.columns => Some(column + 1),
                    Some(_) => None,
                }
            }
            b"r" => self.reverse = !self.reverse,
            b"a" => (self.arguments, self.sort) = (!self.arguments, None),
            b" " | b"p" => self.paused = !self.paused,
            b"\x1b[A" | b"k" => self.scroll = self.scroll.saturating_sub(1),
            b"\x1b[B" | b"j" => self.scroll += 1,
            b"\x1b[5~" => self.scroll = self.scroll.saturating_sub(10),
            b"\x1b[6~" => self.scroll += 10,
            b"\x1b[H" | b"g" => self.scroll = 0,
            _ => {}
        }
        KeyAnswer::Continue
    }

    fn turn(&mut self, by: usize) {
        self.table = (self.table + by) % self.tables.max(1);
        (self.sort, self.reverse, self.scroll) = (None, false, 0);
    }

    fn lines(
        &mut self,
        shown: Option<&LiveReports>,
        losses: &ReportLosses,
        width: usize,
        height: usize,
    ) -> Vec<String> {
        let Some(LiveReports { report, pictures }) = shown else { return vec!["observing...".to_owned()] };
        let mut tables = text::tables(report, self.arguments);
        self.tables = tables.len();
        let titles: Vec<&str> = tables.iter().map(|table| table.title).collect();
        let mut lines: Vec<String> = text::head(report).iter().map(|line| cut(line, width)).collect();
        lines.push(self.titles(&titles));
        let foot = self.foot(report, losses, width);
        let room = height.saturating_sub(lines.len() + foot.len() + 1);
        if self.table == OVERVIEW {
            let parts = tables.swap_remove(PARTS);
            let mut cpus = tables.swap_remove(OVERVIEW);
            add_trend(&mut cpus, pictures);
            lines.extend(self.overview(cpus, parts, width, room));
        } else {
            let table = tables.swap_remove(self.table.min(titles.len().saturating_sub(1)));
            lines.extend(self.rows(table, width, room));
        }
        lines.extend(foot);
        lines.truncate(height);
        lines
    }

    /// Returns the lines of the overview that the program shows first: the table of CPUs, and below it as many rows of
    /// the table of network stack parts as fit.
    fn overview(&mut self, cpus: TextTable, parts: TextTable, width: usize, room: usize) -> Vec<String> {
        let room_of_cpus = cpus.rows.len().min(room / 2);
        let mut lines = self.rows(cpus, width, room_of_cpus);
        let mut below = LiveView::default();
        if let Some(room) = room.checked_sub(room_of_cpus + 2) {
            lines.push(String::new());
            lines.extend(below.rows(parts, width, room));
        }
        lines
    }

    fn foot(&self, report: &Report, losses: &ReportLosses, width: usize) -> Vec<String> {
        let mut foot: Vec<String> = text::lost(report).into_iter().collect();
        for (output, loss) in losses.all() {
            if let Some(reason) = loss.reason {
                foot.push(format!("{output}: {reason}; {} reports are not in it", loss.reports));
            }
        }
        if !report.missing.is_empty() {
            foot.push(format!(
                "{} figures cannot be measured here; --plain and --json list them",
                report.missing.len()
            ));
        }
        if text::is_poor(report) {
            foot.push(text::NOTE_ON_POOR.to_owned());
        }
        foot.push(if self.paused { "paused; space continues" } else { HELP }.to_owned());
        foot.iter().map(|line| cut(line, width)).collect()
    }

    fn titles(&self, titles: &[&str]) -> String {
        let mut line = String::new();
        for (at, title) in titles.iter().enumerate() {
            let (on, off) = if at == self.table { (REVERSE, PLAIN) } else { ("", "") };
            line.push_str(&format!("{on} {title} {off}"));
        }
        line
    }

    /// Returns the table's heading and at most `room` of its rows, from the scroll position on.
    fn rows(&mut self, mut table: TextTable, width: usize, room: usize) -> Vec<String> {
        self.columns = table.columns.len();
        if let Some(column) = self.sort {
            table.sort(column, self.reverse);
        } else if self.reverse {
            table.rows.reverse();
        }
        self.scroll = self.scroll.min(table.rows.len().saturating_sub(room));
        let mut lines = table.lines_within(width);
        let heading = lines.remove(0);
        let sorted = self.sort.and_then(|column| table.columns.get(column)).copied();
        let heading = match sorted {
            Some(name) => heading.replacen(name, &format!("{name}\u{2193}"), 1),
            None => heading,
        };
        let mut shown = vec![format!("{BOLD}{}{PLAIN}", cut(&heading, width))];
        shown.extend(lines.iter().skip(self.scroll).take(room).map(|line| cut(line, width)));
        shown.resize(room + 1, String::new());
        shown
    }
}

/// Inserts two columns into the table of CPUs. One is a chart of networking's share of the CPU's time over the last
/// minute. The other is how long this share has stayed about the same. `pictures` has one chart for each row.
fn add_trend(cpus: &mut TextTable, pictures: &[Picture]) {
    const AT: usize = 2;
    cpus.columns.splice(AT..AT, ["last minute", "level for"]);
    for (row, picture) in cpus.rows.iter_mut().zip(pictures) {
        let level = TableCell::Seconds(picture.level.as_secs(), picture.from_the_start);
        row.splice(AT..AT, [TableCell::Text(picture.steps.clone()), level]);
    }
}

/// Splits input into keys. A key is one byte, or an escape sequence from ESC and `[` to a letter or `~`.
fn keys(mut typed: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let sequence = typed.strip_prefix(b"\x1b[");
        let len = match sequence.map(|rest| rest.iter().position(|byte| matches!(byte, 0x40..=0x7e))) {
            Some(Some(end)) => end + 3,
            Some(None) => typed.len(),
            None => typed.len().min(1),
        };
        let (key, rest) = typed.split_at_checked(len).filter(|(key, _)| !key.is_empty())?;
        typed = rest;
        Some(key)
    })
}

#[cfg(test)]
mod tests {
    use super::super::table::TableCell;
    use super::*;

    fn table(rows: u64) -> TextTable {
        TextTable {
            title: "numbers",
            columns: vec!["a", "b"],
            rows: (0..rows).map(|n| vec![TableCell::Number(n + 1), TableCell::Number(100 - n)]).collect(),
        }
    }

    fn first(view: &mut LiveView, rows: u64, room: usize) -> String {
        view.rows(table(rows), 80, room)[1].split_whitespace().next().expect("a row").to_owned()
    }

    #[test]
    fn keys_s_and_r_sort_the_live_table_and_reverse_its_order() {
        let mut view = LiveView { tables: 3, ..LiveView::default() };
        assert_eq!(first(&mut view, 5, 5), "1");
        view.key(b"s");
        assert_eq!(first(&mut view, 5, 5), "5");
        view.key(b"r");
        assert_eq!(first(&mut view, 5, 5), "1");
        view.key(b"s");
        assert_eq!(first(&mut view, 5, 5), "5");
        view.key(b"s");
        assert_eq!(view.sort, None);
    }

    #[test]
    fn live_view_shows_trends_and_number_of_reports_missing_in_the_log() {
        let mut trend = Trend::default();
        let report = Arc::new(text::tests::example());
        for _ in 0..6 {
            trend.add(&report);
        }
        let shown = LiveReports { report, pictures: trend.pictures() };
        let losses = ReportLosses::new(true);
        losses.add("log", 3, "full");
        let mut view = LiveView::default();
        let lines = view.lines(Some(&shown), &losses, 140, 30);
        let has = |words: &[&str]| lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(has(&["networking", "last minute", "level for", "net_rx"]), "{lines:#?}");
        assert!(has(&["25.00 %", "▂▂", ">6 s"]), "{lines:#?}");
        assert!(has(&["log: full; 3 reports are not in it"]), "{lines:#?}");
        losses.mark_over("log");
        assert!(!view.lines(Some(&shown), &losses, 140, 30).iter().any(|line| line.contains("log")));
    }

    /// Command lines are read only while they are shown.
    #[test]
    fn key_a_toggles_process_command_lines_in_the_live_view() {
        let mut report = text::tests::example();
        report.processes[0].pid = std::process::id();
        let mut shown = LiveReports { report: Arc::new(report), pictures: Vec::new() };
        let mut view = LiveView { table: 2, sort: Some(0), ..LiveView::default() };
        let losses = ReportLosses::new(true);
        let lines =
            |view: &mut LiveView, shown: &LiveReports| view.lines(Some(shown), &losses, 400, 30).join("\n");
        assert!(lines(&mut view, &shown).contains("receives/s"));
        view.key(b"a");
        assert_eq!((view.arguments, view.sort), (true, None));
        assert!(!shown.report.has_arguments());
        shown.read_arguments();
        let text = lines(&mut view, &shown);
        let own = std::env::args().next().expect("a name");
        assert!(text.contains("command line") && text.contains(&own), "{text}");
        view.key(b"a");
        assert!(!lines(&mut view, &shown).contains(&own));
        assert!(HELP.chars().count() <= 80);
    }

    #[test]
    fn live_view_scrolling_stops_at_the_last_table_row() {
        let mut view = LiveView::default();
        for _ in 0..20 {
            view.key(b"\x1b[B");
        }
        assert_eq!(first(&mut view, 10, 4), "7");
        view.key(b"\x1b[A");
        assert_eq!(first(&mut view, 10, 4), "6");
        assert_eq!(view.rows(table(10), 80, 4).len(), 5);
    }

    #[test]
    fn tab_key_cycles_through_the_tables_of_the_live_view() {
        let mut view = LiveView { tables: 3, sort: Some(1), scroll: 2, ..LiveView::default() };
        view.key(b"\t");
        assert_eq!((view.table, view.sort, view.scroll), (1, None, 0));
        view.key(b"\x1b[Z");
        view.key(b"\x1b[Z");
        assert_eq!(view.table, 2);
    }

    #[test]
    fn quit_keys_end_the_live_view() {
        let mut view = LiveView::default();
        for key in [&b"q"[..], &[3], &[27]] {
            assert_eq!(view.key(key), KeyAnswer::Quit);
        }
        assert_eq!(view.key(b"x"), KeyAnswer::Continue);
    }

    #[test]
    fn key_presses_from_one_terminal_read_are_split() {
        let typed: Vec<_> = keys(b"s\x1b[B\t\x1b[5~q\x1b").collect();
        assert_eq!(typed, [&b"s"[..], b"\x1b[B", b"\t", b"\x1b[5~", b"q", b"\x1b"]);
        assert_eq!(keys(b"").count(), 0);
    }

    #[test]
    fn no_line_of_the_live_view_is_wider_than_the_screen() {
        let mut view = LiveView::default();
        for line in view.rows(table(3), 4, 3).iter().skip(1) {
            assert!(line.chars().count() <= 4, "{line}");
        }
    }
}
