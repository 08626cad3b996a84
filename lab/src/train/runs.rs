//! Measured transfers, one per line: the network as the lab created it, the path as it was measured, and when bytes
//! arrived.

use std::collections::HashSet;
use std::fmt::Write as _;

use millrace_graft_proto::select::features::{Feature, Features};
use millrace_graft_proto::select::profile::{ByteArrivals, LADDER_KIB};

/// Largest file that is read, bytes.
pub const BYTES_MAX: usize = 64 << 20;
const CANDIDATE_MAX: usize = 32;
const BEFORE_LADDER: [&str; 20] = [
    "network",
    "candidate",
    "seed",
    "rtt_ms",
    "rate_mbit",
    "loss_percent",
    "burst_packets",
    "queue_bdp",
    "jitter_ms",
    "reorder_percent",
    "cross_percent",
    "seen_rtt_ms",
    "seen_rate_mbit",
    "seen_loss_percent",
    "seen_burstiness",
    "seen_reordering_percent",
    "seen_queue_ms_s",
    "paths",
    "bytes",
    "over_ms",
];

/// One measured transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingRun {
    pub network: u32,
    /// Candidate of the transfer: a congestion control of plain TCP, or a tunnel.
    pub candidate: String,
    pub seed: u32,
    pub truth: TrainingNetwork,
    pub seen: MeasuredPath,
    pub came: ByteArrivals,
}

/// The network as the lab created it. The training does not use these values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrainingNetwork {
    pub rtt_ms: f64,
    pub rate_mbit: f64,
    pub loss_percent: f64,
    /// Mean number of consecutive packets in a burst of losses; 1: each packet is lost independently.
    pub burst_packets: f64,
    /// Size of the queue, in bandwidth-delay products.
    pub queue_bdp: f64,
    pub jitter_ms: f64,
    pub reorder_percent: f64,
    /// Share of the rate that cross traffic takes, percent.
    pub cross_percent: f64,
}

/// The path as probes and an earlier connection measured it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeasuredPath {
    pub rtt_ms: Option<f64>,
    pub rate_mbit: Option<f64>,
    pub loss_percent: Option<f64>,
    pub burstiness: Option<f64>,
    pub reordering_percent: Option<f64>,
    pub queue_ms_s: Option<f64>,
    pub paths: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the file has {0} bytes, and at most {BYTES_MAX} are read")]
    Long(usize),
    #[error("the first line is not the one that `millrace-lab bench graft select` writes: {0:?}")]
    Head(String),
    #[error("line {line}: {what}")]
    Line { line: usize, what: String },
}

/// Returns the first line of a file, with the names of the fields.
pub fn head() -> String {
    let ladder = LADDER_KIB.iter().map(|kib| format!("ms_{kib}k"));
    BEFORE_LADDER.iter().map(|name| (*name).to_owned()).chain(ladder).collect::<Vec<_>>().join(",")
}

/// Parses a file.
///
/// # Errors
///
/// Fails if a line is malformed or incomplete. The error has the line's number and the reason.
pub fn parse(text: &str) -> Result<Vec<TrainingRun>, Error> {
    if text.len() > BYTES_MAX {
        return Err(Error::Long(text.len()));
    }
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    if first != head() {
        return Err(Error::Head(first.chars().take(60).collect()));
    }
    // Without a final line break, the file may have been cut off.
    if !text.ends_with('\n') {
        return Err(Error::Line {
            line: text.lines().count(),
            what: "it does not end with a line break".to_owned(),
        });
    }
    let mut seen = HashSet::new();
    let mut runs = Vec::new();
    for (at, text) in lines.enumerate() {
        let wrong = |what| Error::Line { line: at + 2, what };
        let run = TrainingRun::parse(text).map_err(wrong)?;
        if !seen.insert((run.network, run.candidate.clone(), run.seed)) {
            let what = format!("network {}, {}, seed {} occurs twice", run.network, run.candidate, run.seed);
            return Err(wrong(what));
        }
        runs.push(run);
    }
    Ok(runs)
}

impl TrainingRun {
    /// Returns the transfer as a line without the line break.
    pub fn line(&self) -> String {
        let Self { network, candidate, seed, truth, seen, came } = self;
        let mut line = format!("{network},{candidate},{seed}");
        let truth = [
            truth.rtt_ms,
            truth.rate_mbit,
            truth.loss_percent,
            truth.burst_packets,
            truth.queue_bdp,
            truth.jitter_ms,
            truth.reorder_percent,
            truth.cross_percent,
        ];
        let figures = [
            seen.rtt_ms,
            seen.rate_mbit,
            seen.loss_percent,
            seen.burstiness,
            seen.reordering_percent,
            seen.queue_ms_s,
        ];
        for figure in truth.into_iter().map(Some).chain(figures) {
            line += &field(figure);
        }
        let _ = write!(line, ",{},{}", seen.paths, came.bytes);
        for figure in std::iter::once(Some(came.over_ms)).chain(came.rungs_ms) {
            line += &field(figure);
        }
        line
    }

    fn parse(line: &str) -> Result<Self, String> {
        let mut fields = CsvFields { names: BEFORE_LADDER.iter(), rest: line.split(',') };
        let run = Self {
            network: fields.number()?,
            candidate: candidate(fields.text()?)?,
            seed: fields.number()?,
            truth: TrainingNetwork {
                rtt_ms: fields.figure()?,
                rate_mbit: fields.figure()?,
                loss_percent: fields.figure()?,
                burst_packets: fields.figure()?,
                queue_bdp: fields.figure()?,
                jitter_ms: fields.figure()?,
                reorder_percent: fields.figure()?,
                cross_percent: fields.figure()?,
            },
            seen: MeasuredPath {
                rtt_ms: fields.perhaps()?,
                rate_mbit: fields.perhaps()?,
                loss_percent: fields.perhaps()?,
                burstiness: fields.perhaps()?,
                reordering_percent: fields.perhaps()?,
                queue_ms_s: fields.perhaps()?,
                paths: fields.number()?,
            },
            came: ByteArrivals {
                bytes: fields.number()?,
                over_ms: fields.figure()?,
                rungs_ms: fields.ladder()?,
            },
        };
        match fields.rest.next() {
            Some(more) => Err(format!("{more:?} is one field too many")),
            None => Ok(run),
        }
    }

    /// Returns the features of the path, without those of the application and the peer.
    pub fn path(&self) -> Features {
        let seen = &self.seen;
        let figures = [
            (Feature::Rtt, seen.rtt_ms),
            (Feature::Rate, seen.rate_mbit),
            (Feature::Loss, seen.loss_percent),
            (Feature::Burstiness, seen.burstiness),
            (Feature::Reordering, seen.reordering_percent),
            (Feature::Queue, seen.queue_ms_s),
            (Feature::Paths, Some(f64::from(seen.paths))),
        ];
        figures.into_iter().fold(Features::default(), |path, (feature, value)| path.with(feature, value))
    }
}

fn field(figure: Option<f64>) -> String {
    figure.map_or_else(|| ",".to_owned(), |figure| format!(",{}", (figure * 1e3).round() / 1e3))
}

fn candidate(text: &str) -> Result<String, String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "_-".contains(letter);
    match !text.is_empty() && text.len() <= CANDIDATE_MAX && text.chars().all(fits) {
        true => Ok(text.to_owned()),
        false => Err(format!("candidate {text:?} is not 1 to {CANDIDATE_MAX} letters, digits, - or _")),
    }
}

struct CsvFields<'a> {
    names: std::slice::Iter<'static, &'static str>,
    rest: std::str::Split<'a, char>,
}

impl<'a> CsvFields<'a> {
    fn next(&mut self) -> Result<(&'static str, &'a str), String> {
        let name = self.names.next().copied().unwrap_or("a rung of the ladder");
        Ok((name, self.rest.next().ok_or_else(|| format!("{name} is missing: the line is too short"))?))
    }

    fn text(&mut self) -> Result<&'a str, String> {
        Ok(self.next()?.1)
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, String> {
        let (name, text) = self.next()?;
        text.parse().map_err(|_| format!("{name} must be a whole number, not {text:?}"))
    }

    fn figure(&mut self) -> Result<f64, String> {
        let (name, text) = self.next()?;
        figure(name, text)
    }

    fn perhaps(&mut self) -> Result<Option<f64>, String> {
        let (name, text) = self.next()?;
        if text.is_empty() { Ok(None) } else { figure(name, text).map(Some) }
    }

    /// Parses the times at which the transfer had reached each of the sizes `LADDER_KIB`. The times must not decrease,
    /// up to the first size that was not reached.
    fn ladder(&mut self) -> Result<[Option<f64>; LADDER_KIB.len()], String> {
        let mut rungs = [None; LADDER_KIB.len()];
        let mut before = Some(0.0);
        for rung in &mut rungs {
            *rung = self.perhaps()?;
            if rung.is_some() && (before.is_none() || *rung < before) {
                return Err("a rung of the ladder comes before the one below it".to_owned());
            }
            before = *rung;
        }
        Ok(rungs)
    }
}

fn figure(name: &str, text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.0..=1e12).contains(value));
    value.ok_or_else(|| format!("{name} must be a number from 0, not {text:?}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Builds a transfer that reaches each of the sizes `LADDER_KIB` `ms` after the previous size.
    pub(crate) fn run(network: u32, candidate: &str, ms: f64) -> TrainingRun {
        let rung = |at: usize| Some(ms * (at + 1) as f64);
        TrainingRun {
            network,
            candidate: candidate.into(),
            seed: 1,
            truth: TrainingNetwork {
                rtt_ms: 100.0,
                rate_mbit: 10.0,
                burst_packets: 1.0,
                ..TrainingNetwork::default()
            },
            seen: MeasuredPath { rtt_ms: Some(101.5), rate_mbit: None, paths: 1, ..MeasuredPath::default() },
            came: ByteArrivals { rungs_ms: std::array::from_fn(rung), bytes: 32 << 20, over_ms: ms * 9.0 },
        }
    }

    #[test]
    fn training_runs_are_unchanged_after_writing_and_parsing() {
        let mut cut = run(2, "carried-warm", 2.5);
        cut.came.rungs_ms[7..].fill(None);
        let runs = [run(1, "mr_pcc", 1.0), cut];
        let text = format!("{}\n{}\n{}\n", head(), runs[0].line(), runs[1].line());
        assert_eq!(parse(&text).as_deref(), Ok(&runs[..]));
        assert_eq!(runs[0].path().to_string(), "rtt 102 ms, paths 1");
    }

    #[test]
    fn malformed_line_is_named_in_the_error() {
        let head = head();
        let line = run(1, "bbr", 1.0).line();
        let good = format!("{head}\n{line}\n");
        assert!(parse(&good).is_ok());
        let table = [
            (String::new(), "first line"),
            (good.replace("rtt_ms", "rtt"), "first line"),
            (format!("{good}{line}\n"), "line 3: network 1, bbr, seed 1 occurs twice"),
            (good.trim_end().to_owned(), "line 2: it does not end with a line break"),
            (good.replace("1,bbr,1,100", "1,bbr,1"), "line 2: a rung of the ladder is missing"),
            (good.replace("1,bbr,1,100", "1,bbr,1,100,100"), "line 2: paths must be a whole number"),
            (format!("{head}\n{line},5\n"), "line 2: \"5\" is one field too many"),
            (good.replace(",bbr,", ",b r,"), "line 2: candidate \"b r\""),
            (good.replace("1,bbr,1,100", "-1,bbr,1,100"), "network must be a whole number, not \"-1\""),
            (good.replace(",101.5,", ",inf,"), "seen_rtt_ms must be a number from 0, not \"inf\""),
            (good.replace(",7,8,9\n", ",9,8,9\n"), "comes before the one below"),
            (good.replace(",7,8,9\n", ",,8,9\n"), "comes before the one below"),
        ];
        for (text, wanted) in table {
            let error = parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{wanted}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_training_run_lines_never_panic_the_parser(text in ".{0,200}", cut in 0_usize..300) {
            let good = format!("{}\n{}\n", head(), run(1, "bbr", 1.0).line());
            let _ = parse(&text);
            let _ = parse(&format!("{}\n{text}\n", head()));
            let _ = parse(good.get(..cut).unwrap_or_default());
        }
    }
}
