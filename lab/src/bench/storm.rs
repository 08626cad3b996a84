//! `millrace-lab bench storm`: many established sessions subscribe at the same time. It measures how long each waits for
//! its first object, and what that does to the viewers that were there before.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{
    contender::Contender,
    crowd::{Crowd, CrowdTrack},
    rounds::{MedianColumn, RelayRounds},
    site::BenchSite,
    usage::warn_if_busy,
};
use crate::{lab::Topology, stats::Percentiles};

#[derive(Debug, clap::Args)]
pub struct StormArgs {
    /// Relays to measure, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Number of sessions that subscribe at the same time
    #[arg(long, default_value_t = 1000, value_name = "N")]
    sessions: usize,
    /// Time between the first and the last of their SUBSCRIBEs
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    within: f64,
    /// Number of viewers that receive the track before
    #[arg(long, default_value_t = 100, value_name = "N")]
    viewers: usize,
    /// Objects per second to each viewer
    #[arg(long, default_value_t = 30, value_name = "HZ")]
    rate_hz: u32,
    /// Payload of an object, bytes
    #[arg(long, default_value_t = 1200, value_name = "BYTES")]
    object_bytes: u32,
    /// Time for which the viewers are measured before the storm, seconds
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Number of measurements of every relay
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: StormArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let summary =
        |it: &StormFigures| format!("first object p50 {:.0} ms, p99 {:.0}", it.first.p50, it.first.p99);
    let rows = RelayRounds::measure(&args.relays, args.rounds, |relay| args.round(&site, relay), summary)?;
    let text = RelayRounds::medians(&rows, &COLUMNS);
    RelayRounds::report(&rows, &text, |row| row.json(&args), args.json.as_deref())
}

/// Measured values of one round. Times are in ms.
struct StormFigures {
    /// Time from a session's SUBSCRIBE to its first object.
    first: Percentiles,
    /// Latency of the earlier viewers' objects before the storm, and during it.
    before: Percentiles,
    during: Percentiles,
    /// Objects that never arrived, of all sessions.
    missing: u64,
}

const COLUMNS: [MedianColumn<StormFigures>; 7] = [
    ("first object p50 ms", |it| it.first.p50, 0),
    ("p99", |it| it.first.p99, 0),
    ("others before p50 ms", |it| it.before.p50, 1),
    ("p99", |it| it.before.p99, 1),
    ("during p50", |it| it.during.p50, 1),
    ("p99", |it| it.during.p99, 1),
    ("missing", |it| it.missing as f64, 0),
];

impl RelayRounds<StormFigures> {
    fn json(&self, args: &StormArgs) -> Value {
        let round = |round: &Result<StormFigures, String>| match round {
            Ok(it) => json!({
                "first_object_ms": it.first, "others_before_ms": it.before, "others_during_ms": it.during,
                "missing": it.missing,
            }),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "sessions": args.sessions,
            "within_s": args.within, "viewers": args.viewers, "rate_hz": args.rate_hz,
            "object_bytes": args.object_bytes,
            "first_object_p50_ms": self.spread(|it| it.first.p50),
            "first_object_p99_ms": self.spread(|it| it.first.p99),
            "others_before_p99_ms": self.spread(|it| it.before.p99),
            "others_during_p99_ms": self.spread(|it| it.during.p99),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

impl StormArgs {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.sessions > 0 && self.rounds > 0, "--sessions and --rounds must be at least 1");
        ensure!(self.rate_hz > 0 && self.viewers > 0, "--rate-hz and --viewers must be at least 1");
        ensure!((0.0..=60.0).contains(&self.within), "--within must be 0 to 60 seconds");
        ensure!(self.seconds > 0.0, "--seconds must be more than 0");
        if let Some(plain) = self.relays.iter().find(|relay| relay.is_plain()) {
            bail!("{}: only relays with QUIC connections can be measured", plain.label());
        }
        Ok(())
    }

    fn round(&self, site: &BenchSite, contender: Contender) -> anyhow::Result<StormFigures> {
        let mut relay = site.start_relay(contender)?;
        let publisher =
            CrowdTrack { rate_hz: self.rate_hz, object_bytes: self.object_bytes }.publish(site)?;
        // A crowd reports its latencies when it ends, so there is one for each of both times.
        let before = Crowd::start(site, self.viewers, true, &mut relay)?;
        let during = Crowd::start(site, self.viewers, true, &mut relay)?;
        let storm = Crowd::start(site, self.sessions, false, &mut relay)?;
        before.control.measure_anew();
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        let before = before.finish()?;
        let within = Duration::from_secs_f64(self.within);
        during.control.measure_anew();
        storm.control.subscribe(within);
        storm.wait_until_served(&mut relay)?;
        let during = during.finish()?;
        let storm = storm.finish()?;
        drop(publisher);
        Ok(StormFigures {
            first: storm.first_object_ms.context("no session of the storm was served")?,
            before: before.latency_ms.context("no object arrived before the storm")?,
            during: during.latency_ms.context("no object arrived during the storm")?,
            missing: before.missing + during.missing + storm.missing,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storm_table_has_medians_of_rounds_and_errors() {
        let at = |p99| Percentiles { p50: 1.0, p90: 2.0, p99, max: 1000.0 };
        let round =
            |p99| Ok(StormFigures { first: at(p99), before: at(4.0), during: at(p99 / 10.0), missing: 0 });
        let rounds = vec![round(300.0), Err("it fell over".to_owned()), round(100.0), round(200.0)];
        let rows = [RelayRounds { relay: Contender::User, rounds }];
        let text = RelayRounds::medians(&rows, &COLUMNS);
        assert!(text.contains("200") && text.contains("20.0") && text.contains("it fell over"), "{text}");
    }
}
