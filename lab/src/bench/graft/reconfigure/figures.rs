//! Throughput and delay of a run: over time, and for each phase between two changes of the path's round-trip time.

use serde_json::{Value, json};

use super::ReconfigureArgs;
use super::host::{FULL, PARTIAL};
use super::method::{MethodOutcome, StateSample};
use super::transfer::MessageArrival;
use crate::bench::table::columns;
use crate::stats::{Percentiles, median};

/// Length of one interval (bin) of the time series, seconds.
const BIN_S: f64 = 0.25;
const PHASES: [&str; 3] = ["short", "long", "short again"];

/// Throughput and delays in one bin of the time series.
pub struct BinFigures {
    pub at_s: f64,
    pub mbit: f64,
    /// Delays of the messages that arrived in the bin; `None` if none did.
    pub delay_ms: Option<Percentiles>,
    pub rtt_ms: Option<f64>,
    pub graft: String,
}

/// Throughput, delays and losses in one phase, between two changes of the path's round-trip time.
struct PhaseFigures {
    mbit: f64,
    delays_ms: Vec<f64>,
    lost: usize,
}

impl MethodOutcome {
    pub fn seconds(&self) -> f64 {
        self.arrivals.iter().map(MessageArrival::came_s).fold(0.0, f64::max)
    }

    /// Returns the time series by time of arrival. `bytes` is the size of a message.
    pub fn series(&self, bytes: usize) -> Vec<BinFigures> {
        let bins = (self.seconds() / BIN_S).ceil() as usize;
        let mut delays: Vec<Vec<f64>> = vec![Vec::new(); bins];
        for arrival in &self.arrivals {
            if let Some(bin) = delays.get_mut((arrival.came_s() / BIN_S) as usize) {
                bin.push(arrival.delay_ms);
            }
        }
        let of = |(bin, delays): (usize, Vec<f64>)| {
            let at_s = bin as f64 * BIN_S;
            let look = self.look_at((bin + 1) as f64 * BIN_S);
            BinFigures {
                at_s,
                mbit: (delays.len() * bytes * 8) as f64 / BIN_S / 1e6,
                delay_ms: Percentiles::from_samples(delays),
                rtt_ms: look.and_then(|look| look.session.rtt_ms),
                graft: look.map(|look| look.session.graft.clone()).unwrap_or_default(),
            }
        };
        delays.into_iter().enumerate().map(of).collect()
    }

    /// Returns the latest sample of the session's state that was taken at or before this time.
    fn look_at(&self, at_s: f64) -> Option<&StateSample> {
        self.looks.iter().take_while(|look| look.at_s <= at_s).last()
    }

    /// Returns throughput, delays and losses of each phase. Throughput is by time of arrival, delay and loss by time of
    /// sending.
    fn phases(&self, bytes: usize) -> [PhaseFigures; 3] {
        let [long_s, short_s] = self.turned_s;
        let lost = self.lost();
        [(0.0, long_s), (long_s, short_s), (short_s, self.seconds())].map(|(from_s, to_s)| {
            let within = |at_s: f64| (from_s..to_s).contains(&at_s);
            let came = self.arrivals.iter().filter(|it| within(it.came_s())).count();
            let sent = self.arrivals.iter().filter(|it| within(it.sent_s));
            let number_at = |at_s: f64| {
                self.looks.iter().take_while(|look| look.at_s < at_s).last().map_or(0, |it| it.next)
            };
            let first = number_at(from_s);
            let last = if to_s < self.seconds() { number_at(to_s) } else { self.messages };
            PhaseFigures {
                mbit: (came * bytes * 8) as f64 / 1e6 / (to_s - from_s).max(1e-3),
                delays_ms: sent.map(|it| it.delay_ms).collect(),
                lost: lost.iter().filter(|number| (first..last).contains(number)).count(),
            }
        })
    }
}

/// Formats a table: medians over the rounds, and percentiles of the delays of all rounds together.
pub fn text(args: &ReconfigureArgs, outcomes: &[Vec<MethodOutcome>]) -> String {
    let head =
        ["graft changed", "path", "Mbit/s", "delay p50 ms", "p99 ms", "lost", "changed after s", "all in s"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for outcomes in outcomes {
        let Some(first) = outcomes.first() else { continue };
        let phases: Vec<[PhaseFigures; 3]> =
            outcomes.iter().map(|outcome| outcome.phases(args.bytes)).collect();
        let changed = |turn: usize, graft: &str| {
            let after = outcomes
                .iter()
                .filter_map(|it| it.changed_after_s(it.turned_s[turn], graft))
                .collect::<Vec<_>>();
            median(&after).map_or("-".to_owned(), |s| format!("{s:.2}"))
        };
        let changes = match first.method {
            super::ReconfigureMethod::None => [(); 3].map(|()| "-".to_owned()),
            _ => ["-".to_owned(), changed(0, PARTIAL), changed(1, FULL)],
        };
        let all_s =
            median(&outcomes.iter().map(MethodOutcome::seconds).collect::<Vec<_>>()).unwrap_or(f64::NAN);
        for (at, (name, changed)) in PHASES.iter().zip(changes).enumerate() {
            let mbit = median(&phases.iter().map(|it| it[at].mbit).collect::<Vec<_>>()).unwrap_or(f64::NAN);
            let delays =
                Percentiles::from_samples(phases.iter().flat_map(|it| it[at].delays_ms.clone()).collect());
            let lost: usize = phases.iter().map(|it| it[at].lost).sum();
            let ms = |of: fn(&Percentiles) -> f64| {
                delays.as_ref().map_or("-".to_owned(), |it| format!("{:.0}", of(it)))
            };
            let is_first = at == 0;
            lines.push(vec![
                if is_first { first.method.name().to_owned() } else { String::new() },
                (*name).to_owned(),
                format!("{mbit:.2}"),
                ms(|it| it.p50),
                ms(|it| it.p99),
                lost.to_string(),
                changed,
                if is_first { format!("{all_s:.1}") } else { String::new() },
            ]);
        }
    }
    columns(&lines)
}

pub fn rows(args: &ReconfigureArgs, outcomes: &[Vec<MethodOutcome>]) -> Vec<Value> {
    let of = |outcomes: &Vec<MethodOutcome>| {
        let method = outcomes.first()?.method.name();
        Some(json!({
            "method": method, "megabytes": args.megabytes, "bytes": args.bytes, "window": args.window,
            "loss_percent": args.loss, "rtt_ms": args.rtt_ms, "far_rtt_ms": args.far_rtt_ms,
            "at_rtt_ms": args.at_rtt_ms, "rounds": outcomes.iter().map(|it| round(it, args)).collect::<Vec<_>>(),
        }))
    };
    outcomes.iter().filter_map(of).collect()
}

fn round(outcome: &MethodOutcome, args: &ReconfigureArgs) -> Value {
    let phases = PHASES.iter().zip(outcome.phases(args.bytes)).map(|(name, phase)| {
        let delay_ms = Percentiles::from_samples(phase.delays_ms);
        json!({ "path": name, "mbit_s": phase.mbit, "delay_ms": delay_ms, "lost": phase.lost })
    });
    let series = outcome.series(args.bytes).into_iter().map(|point| {
        json!({
            "at_s": point.at_s, "mbit_s": point.mbit, "delay_p50_ms": point.delay_ms.map(|it| it.p50),
            "delay_p99_ms": point.delay_ms.map(|it| it.p99), "rtt_ms": point.rtt_ms, "graft": point.graft,
        })
    });
    let mut reasons: Vec<String> = outcome.looks.iter().filter_map(|look| look.session.why.clone()).collect();
    reasons.dedup();
    json!({
        "seconds": outcome.seconds(), "messages": outcome.messages, "received": outcome.arrivals.len(),
        "lost": outcome.lost().len(), "turned_s": outcome.turned_s,
        "changed_after_s": [
            outcome.changed_after_s(outcome.turned_s[0], PARTIAL),
            outcome.changed_after_s(outcome.turned_s[1], FULL),
        ],
        "reasons": reasons, "sender": outcome.packets[0], "receiver": outcome.packets[1], "phases": phases.collect::<Vec<_>>(), "series": series.collect::<Vec<_>>(),
    })
}
