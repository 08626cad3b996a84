//! Exports sampled stacks in the formats of other tools: folded stacks and pprof.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write};

use flate2::{Compression, write::GzEncoder};

use crate::report::{ProfiledStack, Report, Stacks};

pub use crate::flame::svg;

/// Returns folded stacks, as `flamegraph.pl`, `inferno-flamegraph` and speedscope read them: one line for each stack,
/// `event;outer;inner SAMPLES`, with the samples of all CPUs.
pub fn folded(stacks: &Stacks) -> String {
    let all = crate::merge::stacks([stacks], |_| true);
    let mut text = String::new();
    for stack in &all.stacks {
        text.push_str(&stack.root());
        for name in stack.frames.iter().filter_map(|at| all.functions.get(*at as usize)) {
            // Folded stacks have no escapes, so a separator (`;` or a line break) in a function's name is replaced.
            let _ = write!(text, ";{}", name.replace([';', '\n'], ":"));
        }
        let _ = writeln!(text, " {}", stack.samples);
    }
    text
}

/// Writes pprof's `profile.proto`, gzipped, for `go tool pprof` and similar tools. Samples have a count and nanoseconds
/// on CPU, and the labels `cpu` and `event` (the softirq or kind of system call). Samples of a profiled process have
/// the label `pid` instead of `event`, since the samples with the label `event` contain them as well.
///
/// <https://github.com/google/pprof/blob/main/proto/profile.proto>
pub fn pprof(report: &Report, out: impl Write) -> io::Result<()> {
    let nothing = Stacks::default();
    let mut gzip = GzEncoder::new(out, Compression::default());
    gzip.write_all(&Pprof::default().profile(report, report.stacks.as_ref().unwrap_or(&nothing)))?;
    gzip.finish()?;
    Ok(())
}

/// The string table of a profile while it is encoded. Each string is stored once and referred to by its number.
#[derive(Default)]
struct Pprof {
    strings: Vec<String>,
    numbers: HashMap<String, u64>,
}

/// Field numbers of `profile.proto`.
mod field {
    pub const PROFILE_SAMPLE_TYPE: u64 = 1;
    pub const PROFILE_SAMPLE: u64 = 2;
    pub const PROFILE_LOCATION: u64 = 4;
    pub const PROFILE_FUNCTION: u64 = 5;
    pub const PROFILE_STRING_TABLE: u64 = 6;
    pub const PROFILE_TIME_NANOS: u64 = 9;
    pub const PROFILE_DURATION_NANOS: u64 = 10;
    pub const PROFILE_PERIOD_TYPE: u64 = 11;
    pub const PROFILE_PERIOD: u64 = 12;
    pub const VALUE_TYPE_TYPE: u64 = 1;
    pub const VALUE_TYPE_UNIT: u64 = 2;
    pub const SAMPLE_LOCATION_ID: u64 = 1;
    pub const SAMPLE_VALUE: u64 = 2;
    pub const SAMPLE_LABEL: u64 = 3;
    pub const LABEL_KEY: u64 = 1;
    pub const LABEL_STR: u64 = 2;
    pub const LABEL_NUM: u64 = 3;
    pub const LOCATION_ID: u64 = 1;
    pub const LOCATION_LINE: u64 = 4;
    pub const LINE_FUNCTION_ID: u64 = 1;
    pub const FUNCTION_ID: u64 = 1;
    pub const FUNCTION_NAME: u64 = 2;
}

impl Pprof {
    fn profile(mut self, report: &Report, stacks: &Stacks) -> Vec<u8> {
        // The string table begins with the empty string.
        self.string("");
        let mut profile = ProtobufMessage::default();
        profile.message(field::PROFILE_SAMPLE_TYPE, &self.value_type("samples", "count"));
        profile.message(field::PROFILE_SAMPLE_TYPE, &self.value_type("cpu", "nanoseconds"));
        for stack in &stacks.stacks {
            profile.message(field::PROFILE_SAMPLE, &self.sample(stack));
        }
        for (id, name) in (1..).zip(&stacks.functions) {
            // Reports have functions but no addresses, so each function is one location in pprof's sense.
            let mut line = ProtobufMessage::default();
            line.number(field::LINE_FUNCTION_ID, id);
            let mut location = ProtobufMessage::default();
            location.number(field::LOCATION_ID, id);
            location.message(field::LOCATION_LINE, &line);
            profile.message(field::PROFILE_LOCATION, &location);
            let mut function = ProtobufMessage::default();
            function.number(field::FUNCTION_ID, id);
            function.number(field::FUNCTION_NAME, self.string(name));
            profile.message(field::PROFILE_FUNCTION, &function);
        }
        let end_ns = report.time_unix_ms.saturating_mul(1_000_000);
        profile.number(field::PROFILE_TIME_NANOS, end_ns.saturating_sub(report.period_ns));
        profile.number(field::PROFILE_DURATION_NANOS, report.period_ns);
        profile.message(field::PROFILE_PERIOD_TYPE, &self.value_type("cpu", "nanoseconds"));
        profile.number(field::PROFILE_PERIOD, 1_000_000_000 / u64::from(report.frequency_hz.max(1)));
        for string in &self.strings {
            profile.bytes(field::PROFILE_STRING_TABLE, string.as_bytes());
        }
        profile.0
    }

    fn sample(&mut self, stack: &ProfiledStack) -> ProtobufMessage {
        let mut sample = ProtobufMessage::default();
        // pprof lists the innermost location first. Location IDs begin at 1, since 0 means no location.
        for frame in stack.frames.iter().rev() {
            sample.number(field::SAMPLE_LOCATION_ID, u64::from(*frame) + 1);
        }
        for value in [stack.samples, stack.ns] {
            sample.number(field::SAMPLE_VALUE, value);
        }
        let mut event = ProtobufMessage::default();
        event.number(field::LABEL_KEY, self.string("event"));
        event.number(field::LABEL_STR, self.string(&stack.root()));
        sample.message(field::SAMPLE_LABEL, &event);
        for (key, value) in [("cpu", Some(stack.cpu)), ("pid", stack.pid)] {
            let Some(value) = value else { continue };
            let mut label = ProtobufMessage::default();
            label.number(field::LABEL_KEY, self.string(key));
            label.number(field::LABEL_NUM, value.into());
            sample.message(field::SAMPLE_LABEL, &label);
        }
        sample
    }

    fn value_type(&mut self, what: &str, unit: &str) -> ProtobufMessage {
        let mut value_type = ProtobufMessage::default();
        value_type.number(field::VALUE_TYPE_TYPE, self.string(what));
        value_type.number(field::VALUE_TYPE_UNIT, self.string(unit));
        value_type
    }

    fn string(&mut self, text: &str) -> u64 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let number = self.strings.len() as u64;
        self.strings.push(text.to_owned());
        self.numbers.insert(text.to_owned(), number);
        number
    }
}

/// A message of protocol buffers: fields one after the other.
#[derive(Default)]
struct ProtobufMessage(Vec<u8>);

const VARINT: u64 = 0;
const LENGTH_DELIMITED: u64 = 2;

impl ProtobufMessage {
    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3 | VARINT);
        self.varint(value);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | LENGTH_DELIMITED);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::samples;

    fn stacks() -> Stacks {
        samples::stacks(&[("net_rx_action;ip_rcv;udp_rcv", 0, 300), ("net_rx_action;ip_rcv", 1, 20)])
    }

    #[test]
    fn folded_stacks_are_one_line_each() {
        let mut stacks = stacks();
        stacks.stacks.push(ProfiledStack { cpu: 1, ..stacks.stacks[0].clone() });
        stacks.functions[2] = "a;b".to_owned();
        assert_eq!(folded(&stacks), "net_rx;net_rx_action;ip_rcv;a:b 600\nnet_rx;net_rx_action;ip_rcv 20\n");
        stacks.stacks.truncate(1);
        stacks.stacks[0].pid = Some(7);
        assert_eq!(folded(&stacks), "process 7;net_rx_action;ip_rcv;a:b 300\n");
    }

    /// Checks with `go tool pprof`, the format's own tool, that profiles are valid.
    #[test]
    fn go_tool_pprof_reads_exported_profile() {
        if Command::new("go").arg("version").output().is_err() {
            println!("SKIP go_tool_pprof_reads_exported_profile: no go");
            return;
        }
        let file = tempfile::NamedTempFile::new().expect("a file");
        let report = Report { stacks: Some(stacks()), ..samples::report(0) };
        pprof(&report, &file).expect("written");
        let read = |arguments: &[&str]| {
            let mut command = Command::new("go");
            let output =
                command.args(["tool", "pprof"]).args(arguments).arg(file.path()).output().expect("it runs");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
            text
        };
        let raw = read(&["-raw"]);
        for want in ["samples/count cpu/nanoseconds", "Duration: 1s", "Period: 1000000"] {
            assert!(raw.contains(want), "{want} in\n{raw}");
        }
        let top = read(&["-top", "-sample_index=cpu"]);
        assert!(top.contains("300ms 93.75% 93.75%      300ms 93.75%  udp_rcv"), "{top}");
        assert!(top.contains("20ms  6.25%   100%      320ms   100%  ip_rcv"), "{top}");
        let tags = read(&["-tags"]);
        assert!(
            tags.contains("event: Total 320") && tags.contains("net_rx") && tags.contains("cpu"),
            "{tags}"
        );
    }
}
