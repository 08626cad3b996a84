//! Metrics of grafts, collected whenever they are scraped.

use std::{collections::BTreeMap, fmt, time::Duration};

use millrace_daemon::{
    openmetrics::{self, Out},
    part::PartStatus,
};
use millrace_graft::{
    agreements::NegotiationState,
    status::{PeerPath, Reload, Status},
};
use millrace_graft_proto::{
    measure::PathReport,
    select::{kind::ExpectationSource, profile::TrafficProfile},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
    registry::Unit,
};

use super::{
    probe::{ProbeRecord, ProbeStatus},
    select_metrics,
};

const PREFIX: &str = "millrace_graft";

/// Encodes the metrics of the daemon's worker process for TCP, for one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, GraftSnapshot(status))
}

/// Encodes the reports of probed paths, for one scrape.
pub fn of_probes(probed: Vec<ProbeStatus>) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, ProbeSnapshot(probed))
}

/// Encodes the metrics of the daemon itself: its parts and its settings.
pub fn of_daemon(uptime: Duration, reload: &Reload, parts: &[PartStatus]) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, GraftMetrics(uptime, reload.clone(), parts.to_vec()))
}

/// Joins several texts in the OpenMetrics format into one. Each metric family may be in one of the texts only.
pub fn joined(pages: impl Iterator<Item = String>) -> String {
    const END: &str = "# EOF\n";
    // Each text ends with the line `# EOF`, which the joined text may contain only once.
    let mut all: String = pages.map(|page| page.trim_end_matches(END).to_owned()).collect();
    all += END;
    all
}

#[derive(Debug)]
struct GraftMetrics(Duration, Reload, Vec<PartStatus>);

impl Collector for GraftMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(uptime, Reload { time_s, error }, parts) = self;
        let mut out = Out(encoder);
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, uptime.as_secs_f64())?;
        let help = "1 if the settings in force are those that were read last";
        out.gauge("reload_ok", help, None, u64::from(error.is_none()))?;
        out.gauge_f64(
            "reload_timestamp",
            "Time of the latest reload of the settings",
            Unit::Seconds,
            *time_s,
        )?;
        let up = parts.iter().map(|it| ([("part", it.name.as_str())], u64::from(it.state == "serving")));
        out.gauges("part_up", "1 if this part of the daemon runs and answers", up)?;
        let restarts = parts.iter().map(|it| ([("part", it.name.as_str())], it.restarts));
        out.counters(
            "part_restarts",
            "Number of times that this part of the daemon was started again",
            restarts,
        )
    }
}

#[derive(Debug)]
struct GraftSnapshot(Status);

impl Collector for GraftSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Status { loaded, outcomes, paths, .. } = &self.0;
        let mut out = Out(encoder);
        out.counts("outcomes", "Connections that match a rule, by outcome", "outcome", outcomes)?;
        let connections = loaded.iter().map(|it| ([("graft", it.name.as_str())], it.connections));
        out.gauges("connections", "Live connections that use a graft", connections)?;
        self.agreements(&mut out)?;
        self.0.selection.as_ref().map_or(Ok(()), |it| select_metrics::encode(it, &mut out))?;
        self.purposes(&mut out)?;
        // Labels are path classes instead of peers, since there are many peers and they change often.
        let by_class = |value: fn(&PeerPath) -> u64| {
            let mut sums = BTreeMap::<&str, u64>::new();
            paths.iter().for_each(|path| *sums.entry(&path.class).or_default() += value(path));
            sums.into_iter().map(|(class, sum)| ([("class", class)], sum))
        };
        let help = "Peers that are remembered, at most 4096, by class of their path";
        out.gauges("paths", help, by_class(|_| 1))?;
        out.counters("delivered_packets", "Packets that reached peers", by_class(|path| path.delivered))?;
        out.counters("lost_packets", "Packets to peers that TCP took for lost", by_class(|path| path.lost))
    }
}

impl GraftSnapshot {
    fn purposes(&self, out: &mut Out<'_>) -> fmt::Result {
        let purposes = &self.0.purposes;
        let all = TrafficProfile::NAMES
            .iter()
            .flat_map(|profile| ExpectationSource::ALL.map(|source| (*profile, source.name())));
        let kinds = all.map(|(profile, source)| {
            let count = purposes.iter().filter(|it| it.profile == profile && it.source == source).count();
            ([("profile", profile), ("source", source)], count as u64)
        });
        out.gauges("kinds", "Known traffic classes by profile, and by the source of the profile", kinds)
    }

    fn agreements(&self, out: &mut Out<'_>) -> fmt::Result {
        let Status { peers, negotiations, downgrades, .. } = &self.0;
        let states = NegotiationState::NAMES.iter().map(|state| {
            let count = peers.iter().filter(|peer| peer.state == *state).count() as u64;
            ([("state", *state)], count)
        });
        out.gauges("agreements", "Peers by the state of the agreement", states)?;
        let help = "Negotiations with peers, by state or reason of refusal; stranger if the peer showed no known key";
        out.counts("negotiations", help, "outcome", negotiations)?;
        let help = "Connections whose TCP options were changed on the way";
        out.counts("downgrades", help, "kind", downgrades)
    }
}

/// Reports of probed paths. Their number is small, since each probe was requested.
#[derive(Debug)]
struct ProbeSnapshot(Vec<ProbeStatus>);

impl Collector for ProbeSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        type Figure = (&'static str, &'static str, fn(&PathReport) -> f64);
        let figures: [Figure; 8] = [
            ("probe_rtt_min_seconds", "Least round trip of the latest probe", |it| {
                f64::from(it.rtt_min_us) / 1e6
            }),
            ("probe_rtt_seconds", "Median round trip of the latest probe", |it| f64::from(it.rtt_us) / 1e6),
            ("probe_rtt_p95_seconds", "95th percentile of the round trips of the latest probe", |it| {
                f64::from(it.rtt_p95_us) / 1e6
            }),
            (
                "probe_rtt_variation_seconds",
                "Mean difference between successive round trips of the latest probe",
                |it| f64::from(it.rtt_variation_us) / 1e6,
            ),
            ("probe_loss_ratio", "Part of the latest probe's packets without an answer", |it| {
                it.loss_percent / 100.0
            }),
            (
                "probe_burstiness",
                "Burstiness of the latest probe's losses; 1 if they are independent",
                |it| it.burstiness,
            ),
            (
                "probe_queue_growth",
                "Growth of the queue during the latest probe, in seconds per second",
                |it| it.queue_growth_us_s / 1e6,
            ),
            ("probe_reordered", "Reordered answers to the latest probe", |it| f64::from(it.reordered)),
        ];
        for (name, help, value) in figures {
            self.encode_latest(&mut out, name, help, |latest| value(&latest.report))?;
        }
        let help = "Time at which the latest probe ended, in seconds since 1970";
        self.encode_latest(&mut out, "probe_timestamp_seconds", help, |latest| latest.time_s)
    }
}

impl ProbeSnapshot {
    fn encode_latest(
        &self,
        out: &mut Out<'_>,
        name: &str,
        help: &str,
        value: impl Fn(&ProbeRecord) -> f64,
    ) -> fmt::Result {
        out.labelled(name, help, MetricType::Gauge, |family| {
            self.0.iter().try_for_each(|path| {
                let Some(latest) = path.history.last() else { return Ok(()) };
                let peer = path.target.peer.to_string();
                let by = path.target.protocol_name();
                let labels = [("peer", peer.as_str()), ("by", by.as_str())];
                ConstGauge::new(value(latest)).encode(family.encode_family(&labels)?)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::{GraftPeerStatus, LoadedStatus, PurposeStatus};

    use super::super::probe::ProbeTarget;
    use super::*;

    #[test]
    fn every_source_of_a_traffic_expectation_is_documented() {
        let documented = include_str!("../../../docs/guide/selection.md");
        for source in ExpectationSource::ALL {
            assert!(documented.contains(&format!("| `{}` |", source.name())), "{}", source.name());
        }
    }

    #[test]
    fn metric_names_follow_the_documentation() {
        let path = PeerPath {
            peer: "192.0.2.1".parse().unwrap(),
            class: "lan".into(),
            connections: 1,
            rtt_min_us: 1,
            rtt_us: 1,
            rtt_variation_us: 1,
            delivery_rate: None,
            delivered: 10,
            lost: 2,
            reordering: 3,
            idle_s: 0,
            probed: None,
        };
        let status = Status {
            outcomes: [("agreed".to_owned(), 4)].into(),
            loaded: vec![LoadedStatus { name: "hybla".into(), connections: 7, ..LoadedStatus::default() }],
            paths: vec![path.clone(), path],
            peers: vec![GraftPeerStatus { state: "agreed".into(), ..GraftPeerStatus::default() }],
            negotiations: [("no-rule".to_owned(), 5)].into(),
            downgrades: [("stripped".to_owned(), 6)].into(),
            purposes: vec![PurposeStatus {
                profile: "loss".into(),
                source: "learned".into(),
                ..PurposeStatus::default()
            }],
            ..Status::default()
        };
        let report = PathReport { rtt_us: 1500, loss_percent: 2.0, ..PathReport::default() };
        let target = ProbeTarget { peer: "192.0.2.1".parse().unwrap(), udp_port: None };
        let history = vec![ProbeRecord { time_s: 1.0, period_ms: 100, report }];
        let probed = ProbeStatus { target, runs: false, class: "lan".into(), history, error: None };
        let part = PartStatus { name: "sessions".into(), restarts: 3, ..PartStatus::default() };
        let reload = Reload { time_s: 1.5, error: None };
        let own = of_daemon(Duration::from_millis(2500), &reload, &[part]).unwrap();
        let text = joined([own, encode(status).unwrap(), of_probes(vec![probed]).unwrap()].into_iter());
        assert!(text.matches("# EOF").count() == 1 && text.ends_with("# EOF\n"), "{text}");
        let documented = include_str!("../../../docs/reference/metrics.md");
        for line in [
            "millrace_graft_uptime_seconds 2.5",
            "millrace_graft_reload_ok 1",
            "millrace_graft_reload_timestamp_seconds 1.5",
            r#"millrace_graft_part_up{part="sessions"} 0"#,
            r#"millrace_graft_part_restarts_total{part="sessions"} 3"#,
            r#"millrace_graft_outcomes_total{outcome="agreed"} 4"#,
            r#"millrace_graft_connections{graft="hybla"} 7"#,
            r#"millrace_graft_paths{class="lan"} 2"#,
            r#"millrace_graft_probe_rtt_seconds{peer="192.0.2.1",by="icmp"} 0.0015"#,
            r#"millrace_graft_probe_loss_ratio{peer="192.0.2.1",by="icmp"} 0.02"#,
            r#"millrace_graft_probe_timestamp_seconds{peer="192.0.2.1",by="icmp"} 1.0"#,
            r#"millrace_graft_agreements{state="agreed"} 1"#,
            r#"millrace_graft_agreements{state="absent"} 0"#,
            r#"millrace_graft_negotiations_total{outcome="no-rule"} 5"#,
            r#"millrace_graft_downgrades_total{kind="stripped"} 6"#,
            r#"millrace_graft_kinds{profile="loss",source="learned"} 1"#,
            r#"millrace_graft_kinds{profile="time",source="default"} 0"#,
            r#"millrace_graft_delivered_packets_total{class="lan"} 20"#,
            r#"millrace_graft_lost_packets_total{class="lan"} 4"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(documented.contains(name), "{name} is not in docs/reference/metrics.md");
        }
    }

    #[test]
    fn every_connection_outcome_is_documented() {
        let documented = include_str!("../../../docs/reference/reasons.md");
        for outcome in millrace_graft_kernel::TcpOutcome::ALL {
            assert!(documented.contains(&format!("| `{}` |", outcome.name())), "{}", outcome.name());
        }
    }
}
