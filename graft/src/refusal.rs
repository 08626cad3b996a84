//! Explains for authors of grafts why the BPF verifier has refused one: the line, the reason, and a remedy.

use std::fmt;

/// The reason why the kernel did not load a graft.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadRefusal {
    /// The reason, in the verifier's words.
    pub reason: String,
    /// File and line in the graft's source, if the object file has debug information (`-g`).
    pub place: Option<String>,
    /// Source text of the line.
    pub source: Option<String>,
    /// Advice how the author of the graft can correct it.
    pub hint: Option<&'static str>,
}

/// Phrases of the verifier's log, with the remedy for each.
const HINTS: [(&str, &str); 12] = [
    (
        "infinite loop detected",
        "bound the loop by a constant, and keep its counter out of memory whose address is taken",
    ),
    ("back-edge", "bound the loop by a constant"),
    ("BPF program is too large", "do less, or move parts into global functions, which are verified once"),
    (
        "only read is supported",
        "a congestion control may write its own state (graft_state), snd_cwnd, snd_cwnd_cnt, \
                                snd_ssthresh, sk_pacing_rate and sk_pacing_status, and nothing else of a socket",
    ),
    (
        "no write support to",
        "a congestion control may write its own state (graft_state), snd_cwnd, snd_cwnd_cnt, \
                             snd_ssthresh, sk_pacing_rate and sk_pacing_status, and nothing else of a socket",
    ),
    ("invalid mem access", "check the pointer before it is used, and take kernel structures from graft.h"),
    ("invalid access to map value", "bound the index by a comparison right before it is used"),
    ("access beyond", "the state of a connection has room for 104 bytes"),
    ("stack", "the stack has room for 512 bytes: keep large values in the socket's state"),
    ("unknown func", "this kernel does not have the helper or function, or not for congestion controls"),
    ("calling kernel function", "this kernel does not allow the function to congestion controls"),
    ("failed to find BTF", "the kernel has no type information (CONFIG_DEBUG_INFO_BTF)"),
];

impl LoadRefusal {
    /// Finds the reason for the refusal in the log of libbpf and the verifier. The search starts at the end of the log.
    pub fn parse(log: &str) -> Self {
        let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        // The log ends with statistics of the verifier, which are skipped.
        let end = lines.iter().rposition(|line| line.starts_with("processed ")).unwrap_or(lines.len());
        let verdict = lines[..end].iter().rposition(|line| is_verdict(line));
        let Some(at) = verdict else { return Self::without_verdict(&lines) };
        let reason = lines[at].trim_start_matches("libbpf: ").to_owned();
        let marker = lines[..at].iter().rev().find_map(|line| line.strip_prefix("; "));
        let (source, place) = match marker.and_then(|line| line.rsplit_once(" @ ")) {
            Some((source, place)) => (Some(source.to_owned()), Some(place.to_owned())),
            None => (marker.map(str::to_owned), None),
        };
        Self { hint: hint(&reason), reason, place, source }
    }

    /// Returns the reason from a log in which libbpf failed before the verifier ran.
    fn without_verdict(lines: &[&str]) -> Self {
        let words = lines.iter().map(|line| line.trim_start_matches("libbpf: "));
        let reason = words.clone().find(|line| line.contains("failed") || line.contains("not found"));
        let reason = reason.or_else(|| words.clone().next_back()).unwrap_or("no reason was given").to_owned();
        Self { hint: hint(&reason), reason, place: None, source: None }
    }
}

/// Reports whether a line of the log is a message: neither an instruction (`12: (85) call ...`), nor a source line, nor
/// a delimiter around them.
fn is_verdict(line: &str) -> bool {
    let is_instruction = line.split_once(':').is_some_and(|(number, _)| number.parse::<u32>().is_ok());
    let is_frame =
        ["; ", "-- ", "from ", "cur state", "old state", "caller", "callee", "frame", "R0", "R1", "func"]
            .iter()
            .any(|start| line.starts_with(start));
    !is_instruction && !is_frame
}

fn hint(reason: &str) -> Option<&'static str> {
    HINTS.iter().find(|(words, _)| reason.contains(words)).map(|(_, hint)| *hint)
}

impl fmt::Display for LoadRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the kernel refused it: {}", self.reason)?;
        if let Some(place) = &self.place {
            write!(f, "\n  at {place}")?;
        }
        if let Some(source) = &self.source {
            write!(f, "\n  {source}")?;
        }
        match self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_line_is_found_in_a_verifier_log() {
        let log = "libbpf: prog 'f': -- BEGIN PROG LOAD LOG --\n\
                   ; tp->mss_cache = 1; @ mine.bpf.c:12\n\
                   7: (63) *(u32 *)(r1 +1700) = r2\n\
                   only read is supported\n\
                   processed 8 insns (limit 1000000) max_states_per_insn 0\n\
                   -- END PROG LOAD LOG --\nlibbpf: prog 'f': failed to load: -EACCES\n";
        let refusal = LoadRefusal::parse(log);
        assert_eq!(refusal.reason, "only read is supported");
        assert_eq!(refusal.place.as_deref(), Some("mine.bpf.c:12"));
        assert_eq!(refusal.source.as_deref(), Some("tp->mss_cache = 1;"));
        assert!(refusal.hint.is_some_and(|hint| hint.contains("snd_cwnd")));
        let text = refusal.to_string();
        assert!(text.contains("\n  at mine.bpf.c:12\n  tp->mss_cache = 1;\n  hint: "), "{text}");
    }

    #[test]
    fn verifier_log_of_any_kind_yields_a_reason() {
        let table = [
            ("", "no reason was given"),
            ("libbpf: failed to find BTF for extern 'x': -2\n", "failed to find BTF for extern 'x': -2"),
            ("1: (95) exit\nprocessed 1 insns\n", "processed 1 insns"),
        ];
        for (log, wanted) in table {
            assert_eq!(LoadRefusal::parse(log).reason, wanted, "{log}");
        }
    }
}
