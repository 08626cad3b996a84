//! Output that all commands share: tables, units, durations, and errors of parsers.

use std::{
    fmt::Write as _,
    io::{IsTerminal as _, Write as _},
};

use crate::columns::{ColumnSide, aligned, broken, indented};
use rustix::termios::tcgetwinsize;

use crate::log::printable;

/// Prints to standard output, and flushes.
///
/// # Errors
/// Fails if the pipe is closed.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Returns the width of output lines: the terminal's width, or unlimited for files and pipes.
pub fn width() -> usize {
    if !std::io::stdout().is_terminal() {
        return usize::MAX;
    }
    size().0
}

/// Returns the numbers of columns and rows of the terminal.
pub fn size() -> (usize, usize) {
    // Serial terminals report a size of 0, which means unknown.
    let or = |size: u16, usual: usize| if size == 0 { usual } else { usize::from(size) };
    tcgetwinsize(std::io::stdout()).map_or((80, 24), |size| (or(size.ws_col, 80), or(size.ws_row, 24)))
}

/// The way in which a column is narrowed if its table is too wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Numbers and addresses: the column is not narrowed.
    Whole,
    /// Names: the middle of a long name is cut out.
    Name,
    /// Texts: a long text is broken into lines.
    Text,
}

/// Appends a text to `out`, broken into lines of at most `width`. All lines but the first are indented. Control
/// characters that a peer put into the text are escaped.
pub fn line(out: &mut String, width: usize, text: &str) {
    let _ = writeln!(out, "{}", indented(&printable(text), width, "  "));
}

/// Adds an empty line and a table. Each column is as wide as its longest cell, or narrower if the table would exceed
/// the line width. Numbers are aligned to the right.
///
/// ```
/// use millrace_daemon::render::{Fit, table};
///
/// let mut out = String::new();
/// let head = [("TRACK", Fit::Name), ("BYTES", Fit::Whole)];
/// let rows = [("live/bbb video", "1.5K"), ("live/bbb audio", "96")];
/// table(&mut out, 80, &head, rows.map(|(track, bytes)| vec![track.into(), bytes.into()]).into_iter());
/// assert!(out.contains("live/bbb video"));
/// ```
pub fn table(out: &mut String, width: usize, head: &[(&str, Fit)], rows: impl Iterator<Item = Vec<String>>) {
    let names = head.iter().map(|(name, _)| (*name).to_owned()).collect();
    // A peer may choose names and reasons, so control characters in them are escaped.
    let rows = rows.map(|row| row.iter().map(|cell| printable(cell).replace('\n', "\\n")).collect());
    let lines: Vec<Vec<String>> = std::iter::once(names).chain(rows).collect();
    let side = |column: usize| match is_of_numbers(lines.iter().skip(1).filter_map(|row| row.get(column))) {
        true => ColumnSide::Right,
        false => ColumnSide::Left,
    };
    let widths = widths(&lines, head, width);
    let lines: Vec<_> = lines.iter().flat_map(|row| fitted(row, head, &widths)).collect();
    out.push('\n');
    for line in aligned(&lines, side) {
        let _ = writeln!(out, "{line}");
    }
}

/// Reports whether a column contains only numbers, with or without units: `1.5K`, `7/29`, `1h01m`. A dash counts as a
/// missing number. Addresses are no numbers.
fn is_of_numbers<'a>(cells: impl Iterator<Item = &'a String>) -> bool {
    let is_number = |cell: &String| {
        cell.starts_with(|c: char| c.is_ascii_digit())
            && !cell.contains([':', ','])
            && cell.matches('.').count() < 2
    };
    let mut said = cells.filter(|cell| *cell != "-").peekable();
    said.peek().is_some() && said.all(is_number)
}

/// Narrowest width to which columns of names and texts are narrowed, in characters.
const NARROWEST: usize = 8;

/// Returns the widths of all columns. The widest column that may be narrowed is narrowed first, until the table fits or
/// no column can be narrowed further.
fn widths(lines: &[Vec<String>], head: &[(&str, Fit)], width: usize) -> Vec<usize> {
    let natural = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..head.len()).map(natural).collect();
    // The first call of `shrink` keeps words whole. Only if the table is still too wide, the second call lets texts be
    // broken within words.
    for least in [least_of_texts(lines, head), vec![NARROWEST; head.len()]] {
        shrink(&mut widths, head, &least, width);
    }
    widths
}

/// Returns for each column of texts the length of its longest word.
fn least_of_texts(lines: &[Vec<String>], head: &[(&str, Fit)]) -> Vec<usize> {
    let words =
        |cell: &String| cell.split_inclusive([' ', ',']).map(|word| word.trim_end().chars().count()).max();
    let longest = |column: usize| lines.iter().filter_map(|line| words(line.get(column)?)).max().unwrap_or(0);
    let least = |(column, (_, fit)): (usize, &(&str, Fit))| match fit {
        Fit::Text => longest(column).max(NARROWEST),
        _ => NARROWEST,
    };
    head.iter().enumerate().map(least).collect()
}

fn shrink(widths: &mut [usize], head: &[(&str, Fit)], least: &[usize], width: usize) {
    let gaps = 2 * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > width {
        let may_shrink = widths.iter_mut().zip(head).zip(least);
        let may_shrink =
            may_shrink.filter(|((width, (_, fit)), least)| *fit != Fit::Whole && **width > **least);
        match may_shrink.map(|((width, _), _)| width).max_by_key(|width| **width) {
            Some(width) => *width -= 1,
            None => return,
        }
    }
}

/// Returns a table row as text in columns of these widths. Cells that are broken need several lines.
fn fitted(row: &[String], head: &[(&str, Fit)], widths: &[usize]) -> Vec<Vec<String>> {
    let cells = row.iter().zip(head).zip(widths).map(|((cell, (_, fit)), width)| match fit {
        Fit::Whole => vec![cell.clone()],
        Fit::Name => vec![cut(cell, *width)],
        Fit::Text => broken(cell, *width),
    });
    let cells: Vec<Vec<String>> = cells.collect();
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    let at =
        |line: usize| cells.iter().map(move |cell| cell.get(line).cloned().unwrap_or_default()).collect();
    (0..height).map(at).collect()
}

/// Returns a name with its middle cut out if it is longer than the column.
fn cut(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if count <= width || width == 0 {
        return name.to_owned();
    }
    let end = (width - 1) / 2;
    let begin = name.chars().take(width - 1 - end);
    begin.chain(['…']).chain(name.chars().skip(count - end)).collect()
}

/// Formats a number of bytes with powers of 1024: `1536` as `1.5K`.
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    let mut units = ["", "K", "M", "G", "T"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    while value >= 1024.0 {
        let Some(next) = units.next() else { break };
        (value, unit) = (value / 1024.0, next);
    }
    if unit.is_empty() { format!("{count}") } else { format!("{value:.1}{unit}") }
}

/// Formats seconds in two units: `3700` as `1h01m`.
pub fn span(seconds: f64) -> String {
    let whole = seconds as u64;
    match (whole / 86_400, whole / 3600 % 24, whole / 60 % 60, whole % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m{s:02}s"),
        (0, h, m, _) => format!("{h}h{m:02}m"),
        (d, h, _, _) => format!("{d}d{h:02}h"),
    }
}

/// Formats seconds in one unit, for a narrow column.
pub fn short_span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// Formats microseconds since 1970 as a time of day in UTC.
pub fn time_of_day(us: u64) -> String {
    let seconds = us / 1_000_000;
    let hours = seconds / 3600 % 24;
    let minutes = seconds / 60 % 60;
    format!("{hours:02}:{minutes:02}:{:02}.{:06}", seconds % 60, us % 1_000_000)
}

/// Returns `one` as a percentage of the sum of `one` and `other`.
pub fn percent(one: u64, other: u64) -> String {
    match one + other {
        0 => "-".to_owned(),
        both => format!("{:.1}", one as f64 * 100.0 / both as f64),
    }
}

/// Rewrites error messages of Rust's parsers in plain words.
pub fn in_words(text: &str) -> String {
    const WORDS: [(&str, &str); 12] = [
        ("relative URL without a base", "not a URL, such as moqt://relay.example:4443"),
        ("invalid float literal", "not a number"),
        ("cannot parse float from empty string", "not a number"),
        ("invalid digit found in string", "not a whole number"),
        ("cannot parse integer from empty string", "not a whole number"),
        ("number too large to fit in target type", "too large a number"),
        ("number would be zero for non-zero type", "must be 1 or more"),
        (
            "invalid socket address syntax",
            "not ADDR:PORT, such as 127.0.0.1:4443 (this machine only), 0.0.0.0:4443 (all of IPv4) or [::]:4443 (all of IPv6)",
        ),
        ("expected usize", "expected a whole number"),
        ("expected u64", "expected a whole number"),
        ("expected u32", "expected a whole number"),
        ("invalid type: ", "it is of another kind: "),
    ];
    WORDS.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_count_has_two_digits_and_a_unit() {
        let table =
            [(0, "0"), (1023, "1023"), (1536, "1.5K"), (256 << 20, "256.0M"), (u64::MAX, "16777216.0T")];
        for (count, want) in table {
            assert_eq!(bytes(count), want);
        }
        for (seconds, want) in [(59.9, "59s"), (61.0, "1m01s"), (3700.0, "1h01m"), (90_000.0, "1d01h")] {
            assert_eq!(span(seconds), want);
        }
    }

    #[test]
    fn control_characters_of_a_peer_stay_inside_their_table_cell() {
        let mut out = String::new();
        let row = vec!["x\r\nforged\x1b[2J".to_owned()];
        table(&mut out, 80, &[("REASON", Fit::Text)], [row].into_iter());
        line(&mut out, 80, "closed: \x1b[2J");
        assert_eq!(out, "\nREASON\nx\\r\\nforged\\u{1b}[2J\nclosed: \\u{1b}[2J\n");
    }

    #[test]
    fn text_table_columns_are_aligned() {
        let mut out = String::new();
        let rows = [["a", "1"], ["long name", "1000"]].map(|row| row.map(str::to_owned).to_vec());
        table(&mut out, 80, &[("NAME", Fit::Name), ("N", Fit::Whole)], rows.into_iter());
        assert_eq!(out, "\nNAME          N\na             1\nlong name  1000\n");
        let columns = |cells: &[&str]| {
            is_of_numbers(cells.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>().iter())
        };
        for numbers in [&["1", "-", "1.5K"][..], &["7/29"], &["1h01m"]] {
            assert!(columns(numbers), "{numbers:?}");
        }
        for others in [
            &["192.0.2.1"][..],
            &["192.0.2.0/24", "10.0.0.0/8"],
            &["2001:db8::1"],
            &["443,80"],
            &["-"],
            &["1", "a"],
        ] {
            assert!(!columns(others), "{others:?}");
        }
    }

    #[test]
    fn cell_too_wide_for_its_column_is_cut_or_broken_except_numbers() {
        const HEAD: [(&str, Fit); 3] = [("NAME", Fit::Name), ("N", Fit::Whole), ("WHY", Fit::Text)];
        let rows = || {
            [["live/aaaaaaaaaaaa/1.m4s", "123456789012", "late 3, evicted 1"], ["b", "-", "-"]]
                .map(|row| row.map(str::to_owned).to_vec())
                .into_iter()
        };
        let shown = |width| {
            let mut out = String::new();
            table(&mut out, width, &HEAD, rows());
            out
        };
        assert_eq!(
            shown(40),
            "\n\
             NAME                     N  WHY\n\
             live/a…1.m4s  123456789012  late 3,\n\
             \u{20}                           evicted 1\n\
             b                        -  -\n"
        );
        assert!(shown(usize::MAX).contains("live/aaaaaaaaaaaa/1.m4s  123456789012  late 3, evicted 1"));
        assert!(shown(10).contains("123456789012"), "numbers are whole: {}", shown(10));
        assert_eq!(
            [cut("abcdef", 6), cut("abcdef", 5), cut("abcdef", 4), cut("ab", 1)],
            ["abcdef", "ab…ef", "ab…f", "…"]
        );
    }
}
