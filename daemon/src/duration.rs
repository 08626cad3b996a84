//! Durations as users write them: `250us`, `1.5s`, `10m`.

use std::time::Duration;

/// The longest duration, in seconds: ten years. A 64-bit float is precise enough for nanoseconds up to there.
const MAX_S: f64 = 3650.0 * 86_400.0;

/// Parses a number and its unit, from `ns` to `d`. Only `0` needs no unit.
///
/// ```
/// use std::time::Duration;
/// use millrace_daemon::duration::parse;
///
/// assert_eq!(parse("1.5s"), Ok(Duration::from_millis(1500)));
/// assert!(parse("10").is_err(), "a unit is missing");
/// ```
pub fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time such as 250us, 10ms, 1.5s, 10m, 2h or 7d");
    let (number, unit) = number_and_unit(text).ok_or_else(wrong)?;
    let nanos = match unit {
        "ns" => 1.0,
        "us" | "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" => 60e9,
        "h" => 3600e9,
        "d" => 86_400e9,
        "" if number == 0.0 => 0.0,
        _ => return Err(wrong()),
    };
    // The product of number and unit is rounded to nanoseconds, because floating-point products are inexact, but a
    // setting such as 10ms has to be exact.
    let nanos = (number * nanos).round();
    if nanos > MAX_S * 1e9 {
        return Err(format!("`{text}` is more than 3650d"));
    }
    Ok(Duration::from_nanos(nanos as u64))
}

/// Splits a duration such as `10ms` into 10.0 and `ms`.
pub fn number_and_unit(text: &str) -> Option<(f64, &str)> {
    let unit = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    let number: f64 = number.parse().ok()?;
    number.is_finite().then_some((number, unit.trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_with_their_unit() {
        for (text, nanos) in [
            ("0", 0),
            ("7ns", 7),
            ("250us", 250_000),
            ("10 ms", 10_000_000),
            ("1.5s", 1_500_000_000),
            ("1m", 60_000_000_000),
            ("2h", 7_200_000_000_000),
            ("7d", 604_800_000_000_000),
            ("3650d", 315_360_000_000_000_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        for wrong in ["", "s", "2", "-1s", "1.2.3s", "1y", "3651d", "inf s", "NaN", "1s2"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
