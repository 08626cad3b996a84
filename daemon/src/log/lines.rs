//! Formats events as lines. A peer chooses names, close reasons and parts of error texts. No such text may end a log
//! line, imitate a field, or reach a terminal as a control character.

use std::fmt::{self, Debug, Write};

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    field::RecordFields,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Json, JsonFields, Writer},
    },
    registry::LookupSpan,
};

/// A formatter for the fields of a plain text line. It quotes strings, and other values that are not a single word. It
/// escapes characters that cannot be printed.
pub(super) struct TextFields;

impl<'w> FormatFields<'w> for TextFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut visitor = TextVisitor { writer, separator: "", result: Ok(()) };
        fields.record(&mut visitor);
        visitor.result
    }
}

struct TextVisitor<'w> {
    writer: Writer<'w>,
    separator: &'static str,
    result: fmt::Result,
}

impl TextVisitor<'_> {
    fn put(&mut self, field: &Field, value: &str, quoted: bool) -> fmt::Result {
        self.writer.write_str(std::mem::replace(&mut self.separator, " "))?;
        if field.name() == "message" {
            return value.chars().try_for_each(|one| put_escaped(&mut self.writer, one));
        }
        let (begin, end) = if self.writer.has_ansi_escapes() { ("\x1b[3m", "\x1b[0m") } else { ("", "") };
        write!(self.writer, "{begin}{}{end}=", field.name())?;
        match quoted || !is_word(value) {
            true => write!(self.writer, "{value:?}"),
            false => self.writer.write_str(value),
        }
    }
}

impl Visit for TextVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.result = self.result.and_then(|()| self.put(field, value, true));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Events of the crate `log` have fields such as `log.target`. The line already shows their values elsewhere.
        if !field.name().starts_with("log.") {
            self.result = self.result.and_then(|()| self.put(field, &format!("{value:?}"), false));
        }
    }
}

/// A formatter for lines of JSON. In addition to what JSON requires, it escapes all characters that cannot be printed.
pub(super) struct JsonLogLines(pub(super) Format<Json>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> FormatEvent<S, JsonFields> for JsonLogLines {
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        for one in line.trim_end_matches('\n').chars() {
            match is_printable(one) {
                true => writer.write_char(one)?,
                false => one
                    .encode_utf16(&mut [0; 2])
                    .iter()
                    .try_for_each(|unit| write!(writer, "\\u{unit:04x}"))?,
            }
        }
        writer.write_char('\n')
    }
}

/// Returns `text` for a terminal, with all control characters escaped except line ends.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for one in text.chars() {
        match one {
            '\n' => out.push('\n'),
            one => put_escaped(&mut out, one).unwrap_or_default(), // writing to a String cannot fail
        }
    }
    out
}

fn put_escaped(out: &mut impl Write, one: char) -> fmt::Result {
    match is_printable(one) {
        true => out.write_char(one),
        false => write!(out, "{}", one.escape_debug()),
    }
}

/// Reports whether a value can be logged without quotes, because it contains no space or other delimiter.
fn is_word(value: &str) -> bool {
    !value.is_empty()
        && value
            .chars()
            .all(|one| is_printable(one) && !one.is_whitespace() && !matches!(one, '"' | '=' | '\\'))
}

/// Reports whether a character can be printed on a terminal: it is no control character, and does not change the
/// direction of text.
fn is_printable(one: char) -> bool {
    matches!(one, '"' | '\'' | '\\') || one.escape_debug().len() == 1
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use parking_lot::Mutex;
    use tracing_subscriber::fmt::MakeWriter;

    use super::{super::LogFormat as Wanted, *};

    #[derive(Clone, Default)]
    struct TestLog(Arc<Mutex<Vec<u8>>>);

    impl io::Write for TestLog {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for TestLog {
        type Writer = Self;

        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    /// Returns the log output of the events that `say` emits.
    fn logged(format: Wanted, ansi: bool, say: impl FnOnce()) -> String {
        let log = TestLog::default();
        let filter = tracing_subscriber::EnvFilter::new("info");
        tracing::dispatcher::with_default(&super::super::dispatch(format, filter, log.clone(), ansi), say);
        let bytes = std::mem::take(&mut *log.0.lock());
        String::from_utf8(bytes).unwrap()
    }

    /// Text that a hostile peer may put into a reason, a name or a header. It has a line break, terminal escape
    /// sequences that begin with ESC [ or with U+009B, and a right-to-left override.
    const FORGED: &str = "x\r\n2026-11-27T00:00:00Z  INFO millrace: session established\x1b[2J\u{9b}2J\x07\u{202e}\u{2028} a=\"b\"";

    #[test]
    fn peer_text_is_logged_on_one_line_without_control_characters() {
        let kinds: [(&str, fn()); 5] = [
            ("displayed", || tracing::info!(error = %FORGED, "a connection failed")),
            ("a string", || tracing::info!(error = FORGED, "a connection failed")),
            ("debugged", || tracing::info!(error = ?FORGED, "a connection failed")),
            ("an error", || {
                let error = io::Error::other(FORGED);
                tracing::info!(error = &error as &(dyn std::error::Error + 'static), "a connection failed");
            }),
            ("in the message", || tracing::info!("a connection failed: {FORGED}")),
        ];
        for (kind, say) in kinds {
            for format in [Wanted::Text, Wanted::Json] {
                let line = logged(format, false, say);
                let text = line.strip_suffix('\n').unwrap();
                assert!(text.chars().all(is_printable), "{kind}: {line:?}");
                if format == Wanted::Json {
                    serde_json::from_str::<serde_json::Value>(text).unwrap();
                }
            }
            // Only the formatter's own escape sequences reach a terminal. None of them moves the cursor.
            let coloured = logged(Wanted::Text, true, say);
            assert_eq!(coloured.matches('\n').count(), 1, "{kind}: {coloured:?}");
            let is_colour = |sequence: &str| {
                let codes = sequence.split_once('m').and_then(|(front, _)| front.strip_prefix('['));
                codes.is_some_and(|codes| codes.bytes().all(|byte| byte.is_ascii_digit() || byte == b';'))
            };
            assert!(coloured.split('\x1b').skip(1).all(is_colour), "{kind}: {coloured:?}");
        }
    }

    /// Escapes keep a logged value unambiguous, so no peer can forge another field.
    #[test]
    fn logged_value_that_is_not_one_word_is_quoted() {
        let line = logged(Wanted::Text, false, || {
            let remote = "192.0.2.1:443";
            tracing::info!(%remote, reason = %"gone session=1", name = "plain", sessions = 3_u64, "a connection was closed");
        });
        let (_, fields) = line.split_once("a connection was closed").unwrap();
        assert_eq!(fields, " remote=192.0.2.1:443 reason=\"gone session=1\" name=\"plain\" sessions=3\n");
        let line = logged(Wanted::Json, false, || tracing::info!(error = %FORGED, "a connection failed"));
        let json: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(json["fields"]["error"], FORGED);
    }

    #[test]
    fn error_on_a_terminal_keeps_line_breaks_but_no_control_characters() {
        assert_eq!(printable("two\nlines\x1b[2J, \"quoted\""), "two\nlines\\u{1b}[2J, \"quoted\"");
    }
}
