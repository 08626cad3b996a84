//! `millrace-lab bench isolation`: the effect of one subscriber's bad link on another subscriber, whose link is good.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Map, Value, json};

use super::compare::Ratio;
use super::contender::Contender;
use super::figures::{RowLoad, error};
use super::owed::{OwedFigures, PERCENTILES, Percentile};
use super::profile::LinkProfile;
use super::run::flow_detector;
use super::site::{BenchSite, SUBSCRIBERS_LINK, device};
use super::table::{columns, write_json};
use super::traffic::{ExtraSubscriber, RelayTraffic, TrafficRoute};
use super::usage::warn_if_busy;
use crate::lab::{Directions, Topology};
use crate::progress::BenchProgress;
use crate::stats::Spread;
use crate::transport::LabTransport;

#[derive(Debug, clap::Args)]
pub struct IsolationArgs {
    /// Relays to measure, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user,moq-relay-ietf,moq-relay")]
    relays: Vec<Contender>,
    /// Impairments of the link of the second subscriber, in interleaved runs; only those that do not change over time
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bottleneck,lossy")]
    impair: Vec<LinkProfile>,
    /// Objects per second
    #[arg(long, default_value_t = 250)]
    rate_hz: u32,
    /// Payload of an object, bytes
    #[arg(long, default_value_t = 1200)]
    object_bytes: u32,
    /// Length of each measurement, with the good link and with the impaired one, seconds
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Number of runs of every relay with every link
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The link of the second subscriber, which is the one that is impaired.
const OTHER_LINK: &str = "relay-sub2";
const OTHER: &str = "sub2";
/// Delay of a good link. Impaired links have the same delay.
const GOOD: &str = "delay=20ms";
/// Media count as flowing once at least this share of the published packet rate arrives.
const FLOWING: f64 = 0.8;
/// Extra time that the publisher sends, seconds: for the start, and for the first second, whose objects are not
/// counted.
const SPARE_SECONDS: f64 = 3.0;

pub fn run(args: IsolationArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds >= 1.0, "--rounds and --seconds must be at least 1");
    ensure!(args.rate_hz > 0, "--rate-hz must be at least 1");
    ensure!(
        !args.relays.iter().any(|relay| relay.is_plain()),
        "plain UDP has no tracks: leave it out of --relays"
    );
    let stays = |profile: &LinkProfile| !matches!(profile, LinkProfile::Clean | LinkProfile::Mobile);
    ensure!(
        args.impair.iter().all(stays),
        "--impair: clean is always measured for comparison, and mobile is not constant"
    );
    warn_if_busy()?;
    let mut rows = args.rows();
    let good = args.site(GOOD)?;
    let bad =
        args.impair.iter().map(|profile| args.bad_site(*profile)).collect::<anyhow::Result<Vec<_>>>()?;
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", row.label()));
            let bad = bad.get(row.site).context("a lab for each link")?;
            // Every second round measures the bad link first, so that a drift of the machine affects both links alike.
            let both = match round % 2 {
                1 => args.run(&good, row.relay).and_then(|good| Ok((good, args.run(bad, row.relay)?))),
                _ => args.run(bad, row.relay).and_then(|bad| Ok((args.run(&good, row.relay)?, bad))),
            };
            let pair =
                both.map(|(good, bad)| IsolationPair { good, bad }).map_err(|error| format!("{error:#}"));
            progress.end(&told(&pair))?;
            row.rounds.push(pair);
        }
    }
    drop((progress, good, bad));
    print!("{}", render(&rows, args.limit_us()));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

/// Results of both subscribers: the objects that each should have received (owed objects), and their delivery.
#[derive(Clone, Copy)]
struct Both {
    /// The subscriber whose link is always good.
    one: OwedFigures,
    other: OwedFigures,
}

impl Both {
    fn json(&self) -> Value {
        json!({ "owed": self.one, "other": self.other })
    }
}

/// Results of both subscribers while the second subscriber's link is good, and while it is bad.
#[derive(Clone, Copy)]
struct IsolationPair {
    good: Both,
    bad: Both,
}

struct IsolationRow {
    relay: Contender,
    profile: LinkProfile,
    /// Index of the lab in which the second subscriber's link has this impairment.
    site: usize,
    rounds: Vec<Result<IsolationPair, String>>,
}

impl IsolationRow {
    fn label(&self) -> String {
        format!("{}, {}", self.relay.label(), self.profile.name())
    }

    /// Returns this percentile of the latency of the subscriber whose link is always good, us, over the rounds. The
    /// function `of` selects the results with a good or with a bad link of the second subscriber.
    fn latencies(
        &self,
        percentile: Percentile,
        limit: f64,
        of: fn(&IsolationPair) -> &Both,
    ) -> Option<Spread> {
        let late = |pair: &IsolationPair| percentile(&of(pair).one.latency_us).unwrap_or(limit);
        Spread::from_values(&self.rounds.iter().flatten().map(late).collect::<Vec<_>>())
    }

    /// Returns the ratio of two latencies of the first subscriber: while the second subscriber's link is bad, and while
    /// it is good.
    fn ratio(&self, percentile: Percentile, limit: f64) -> Option<Ratio> {
        let pair =
            |it: &IsolationPair| (percentile(&it.bad.one.latency_us), percentile(&it.good.one.latency_us));
        Ratio::from_pairs(&self.rounds.iter().flatten().map(pair).collect::<Vec<_>>(), limit)
    }

    fn json(&self, args: &IsolationArgs) -> Value {
        let limit = args.limit_us();
        let round = |round: &Result<IsolationPair, String>| match round {
            Ok(pair) => json!({ "good": pair.good.json(), "bad": pair.bad.json() }),
            Err(error) => json!({ "error": error }),
        };
        let figures = |&(name, percentile): &(&'static str, Percentile)| {
            let it = json!({
                "good": self.latencies(percentile, limit, |pair| &pair.good),
                "bad": self.latencies(percentile, limit, |pair| &pair.bad),
                "ratio": self.ratio(percentile, limit),
            });
            (name.to_owned(), it)
        };
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "impair": self.profile.name(),
            "rate_hz": args.rate_hz, "object_bytes": args.object_bytes, "seconds": args.seconds,
            "latency_us": PERCENTILES.iter().map(figures).collect::<Map<_, _>>(),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

fn told(pair: &Result<IsolationPair, String>) -> String {
    let p99 = |both: &Both| {
        both.one.latency_us.p99.map_or_else(|| "never".to_owned(), |us| format!("{:.1} ms", us / 1e3))
    };
    match pair {
        Ok(IsolationPair { good, bad }) => format!(
            "p99 {}, beside a good link {}; the other got {:.1} %",
            p99(bad),
            p99(good),
            bad.other.delivered_percent()
        ),
        Err(error) => error.clone(),
    }
}

fn render(rows: &[IsolationRow], limit: f64) -> String {
    let head = ["relay, the other's link", "", "next to it, ms", "next to a good one", "ratio", "95 %"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        for &(name, percentile) in &PERCENTILES {
            let bad = row.latencies(percentile, limit, |pair| &pair.bad);
            let good = row.latencies(percentile, limit, |pair| &pair.good);
            let (Some(bad), Some(good), Some(ratio)) = (bad, good, row.ratio(percentile, limit)) else {
                continue;
            };
            let interval = ratio.interval.map(|[low, high]| format!("{low:.2} to {high:.2}"));
            lines.push(vec![
                row.label(),
                name.to_owned(),
                format!("{:.1}", bad.median / 1e3),
                format!("{:.1}", good.median / 1e3),
                format!("{:.2}", ratio.mean),
                interval.unwrap_or_else(super::table::dash),
            ]);
        }
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = error(&row.rounds) {
            text += &format!("{}: {error}\n", row.label());
        }
    }
    text
}

impl IsolationArgs {
    /// Lists the result rows. Consecutive rows have different relays, so that a drift of the machine affects all relays
    /// alike.
    fn rows(&self) -> Vec<IsolationRow> {
        let row = |site, profile, relay: &Contender| IsolationRow {
            relay: *relay,
            profile,
            site,
            rounds: Vec::new(),
        };
        let profiles = self.impair.iter().copied().enumerate();
        profiles
            .flat_map(|(site, profile)| self.relays.iter().map(move |it| row(site, profile, it)))
            .collect()
    }

    /// Returns a latency that stands for a lost object, us. It is longer than any measured latency.
    fn limit_us(&self) -> f64 {
        10.0 * self.seconds * 1e6
    }

    fn bad_site(&self, profile: LinkProfile) -> anyhow::Result<BenchSite> {
        let offered = u64::from(self.rate_hz) * u64::from(self.object_bytes) * 8;
        self.site(&profile.settings(offered).context("a clean link has no impairment")?)
    }

    fn site(&self, other: &str) -> anyhow::Result<BenchSite> {
        let mut topology = Topology::standard(1, 2);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, GOOD)?;
        topology.impair(OTHER_LINK, Directions::Both, other)?;
        BenchSite::new(&topology)
    }

    fn run(&self, site: &BenchSite, contender: Contender) -> anyhow::Result<Both> {
        let transport = LabTransport::Raw;
        let load =
            RowLoad { transport, subscribers: 1, object_bytes: self.object_bytes, rate_hz: self.rate_hz };
        let _relay = site.start_relay(contender)?;
        let node = site.relay()?;
        let route = site.route()?;
        let flows = flow_detector(node, device(node, SUBSCRIBERS_LINK)?, &load, FLOWING);
        let seconds = self.seconds + SPARE_SECONDS;
        let mut traffic = RelayTraffic::start(contender, &route, &load, seconds, site.directory(), flows)?;
        let other = TrafficRoute { subscribers: site.node(OTHER)?, ..route };
        // The second subscriber joins when media already flow to the first one.
        let other = ExtraSubscriber::start("other subscriber", &other, site.directory())?;
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        traffic.check_runs().context("traffic ended before it was measured")?;
        let few = "too few objects arrived to compute which objects were owed";
        let one = traffic.finish()?.owed.context(few)?;
        Ok(Both { one, other: other.finish()?.context(few)? })
    }
}
