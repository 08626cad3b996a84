//! What all commands print alike: tables, units, spans of time, errors of parsers.

use std::{fmt::Write as _, io::Write as _};

use millrace_lab::columns::{Side, aligned};

/// To standard output, at once.
///
/// # Errors
/// Nobody reads it.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// An empty line and a table: columns as wide as their longest cell, numbers to the right.
pub fn table(out: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let head = head.iter().map(|name| (*name).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let side = |column: usize| {
        let mut cells = lines.iter().skip(1).filter_map(|row| row.get(column));
        match cells.all(|cell| cell.starts_with(|c: char| c.is_ascii_digit())) {
            true => Side::Right,
            false => Side::Left,
        }
    };
    out.push('\n');
    for line in aligned(&lines, side) {
        let _ = writeln!(out, "{line}");
    }
}

/// `1536` as `1.5K`: powers of 1024.
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

/// `3700` seconds as `1h01m`: two units.
pub fn span(seconds: f64) -> String {
    let whole = seconds as u64;
    match (whole / 86_400, whole / 3600 % 24, whole / 60 % 60, whole % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m{s:02}s"),
        (0, h, m, _) => format!("{h}h{m:02}m"),
        (d, h, _, _) => format!("{d}d{h:02}h"),
    }
}

/// The same in one unit, for a narrow column.
pub fn short_span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// Microseconds since 1970 as a time of day, in UTC.
pub fn time_of_day(us: u64) -> String {
    let seconds = us / 1_000_000;
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{:06}", seconds % 60, us % 1_000_000)
}

/// How much of both together is `one`.
pub fn percent(one: u64, other: u64) -> String {
    match one + other {
        0 => "-".to_owned(),
        both => format!("{:.1}", one as f64 * 100.0 / both as f64),
    }
}

/// What parsers of Rust say, as a person would.
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
    fn amounts_are_short() {
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
    fn columns_line_up() {
        let mut out = String::new();
        let rows = [["a", "1"], ["long name", "1000"]].map(|row| row.map(str::to_owned).to_vec());
        table(&mut out, &["NAME", "N"], rows.into_iter());
        assert_eq!(out, "\nNAME          N\na             1\nlong name  1000\n");
    }
}
