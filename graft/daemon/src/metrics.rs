//! Metrics of grafts, made anew for each scrape.

use std::{collections::BTreeMap, fmt};

use millrace_daemon::openmetrics::{self, Out};
use millrace_graft::{
    agreements::State,
    status::{Path, Reload, Status},
};
use millrace_graft_proto::{
    measure::Report,
    select::{kind::Source, profile::Profile},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

use super::{
    carry,
    probe::{Probed, Record},
    select_metrics,
};

const PREFIX: &str = "millrace_graft";

/// The text of one scrape.
pub fn encode(status: Status, probed: Vec<Probed>) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, Snapshot(status, probed))
}

#[derive(Debug)]
struct Snapshot(Status, Vec<Probed>);

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Status { loaded, outcomes, paths, .. } = &self.0;
        let mut out = Out(encoder);
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        if let Some(Reload { time_s, error }) = &self.0.reload {
            let help = "1 if the settings are what was read last";
            out.gauge("reload_ok", help, None, u64::from(error.is_none()))?;
            out.gauge_f64("reload_timestamp", "When the settings were read last", Unit::Seconds, *time_s)?;
        }
        out.counts("outcomes", "What became of connections that a rule fits", "outcome", outcomes)?;
        out.labelled("connections", "Live connections that use a graft", MetricType::Gauge, |family| {
            loaded.iter().try_for_each(|it| {
                ConstGauge::new(it.connections).encode(family.encode_family(&[("graft", it.name.as_str())])?)
            })
        })?;
        self.agreements(&mut out)?;
        self.0.carry.as_ref().map_or(Ok(()), |it| carry::metrics::encode(it, &mut out))?;
        self.0.selection.as_ref().map_or(Ok(()), |it| select_metrics::encode(it, &mut out))?;
        self.purposes(&mut out)?;
        self.probes(&mut out)?;
        // By class, not by peer: peers are many, and come and go.
        by_class(&mut out, "paths", "Peers that are remembered", MetricType::Gauge, paths, |_| 1)?;
        by_class(
            &mut out,
            "delivered_packets",
            "Packets that reached peers",
            MetricType::Counter,
            paths,
            |path| path.delivered,
        )?;
        by_class(
            &mut out,
            "lost_packets",
            "Packets that TCP took for lost",
            MetricType::Counter,
            paths,
            |path| path.lost,
        )
    }
}

impl Snapshot {
    fn purposes(&self, out: &mut Out<'_>) -> fmt::Result {
        let purposes = &self.0.purposes;
        let all =
            Profile::NAMES.iter().flat_map(|profile| Source::ALL.map(|source| (*profile, source.name())));
        let kinds = all.map(|(profile, source)| {
            let count = purposes.iter().filter(|it| it.profile == profile && it.source == source).count();
            ([("profile", profile), ("source", source)], count as u64)
        });
        out.gauges("kinds", "Kinds of connections, by what they are for and where that is known from", kinds)
    }

    /// Of paths that somebody has asked for: few.
    fn probes(&self, out: &mut Out<'_>) -> fmt::Result {
        type Figure = (&'static str, &'static str, fn(&Report) -> f64);
        let figures: [Figure; 8] = [
            ("probe_rtt_min_seconds", "Least round trip of the latest probe", |it| {
                f64::from(it.rtt_min_us) / 1e6
            }),
            ("probe_rtt_seconds", "Its median", |it| f64::from(it.rtt_us) / 1e6),
            ("probe_rtt_p95_seconds", "Its 95th percentile", |it| f64::from(it.rtt_p95_us) / 1e6),
            ("probe_rtt_variation_seconds", "From one to the next", |it| {
                f64::from(it.rtt_variation_us) / 1e6
            }),
            ("probe_loss_ratio", "Of what was sent", |it| it.loss_percent / 100.0),
            ("probe_burstiness", "1: losses are independent", |it| it.burstiness),
            ("probe_queue_growth", "Seconds of queue per second", |it| it.queue_growth_us_s / 1e6),
            ("probe_reordered", "Answers behind those of later packets", |it| f64::from(it.reordered)),
        ];
        for (name, help, value) in figures {
            self.of_latest(out, name, help, |latest| value(&latest.report))?;
        }
        let help = "When the latest probe was over, in seconds since 1970";
        self.of_latest(out, "probe_timestamp_seconds", help, |latest| latest.time_s)
    }

    fn of_latest(
        &self,
        out: &mut Out<'_>,
        name: &str,
        help: &str,
        value: impl Fn(&Record) -> f64,
    ) -> fmt::Result {
        out.labelled(name, help, MetricType::Gauge, |family| {
            self.1.iter().try_for_each(|path| {
                let Some(latest) = path.history.last() else { return Ok(()) };
                let (peer, by) = (path.target.peer.to_string(), path.target.by());
                let labels = [("peer", peer.as_str()), ("by", by.as_str())];
                ConstGauge::new(value(latest)).encode(family.encode_family(&labels)?)
            })
        })
    }

    fn agreements(&self, out: &mut Out<'_>) -> fmt::Result {
        let Status { peers, negotiations, downgrades, .. } = &self.0;
        out.labelled("agreements", "Peers by how it stands with them", MetricType::Gauge, |family| {
            State::NAMES.iter().try_for_each(|state| {
                let count = peers.iter().filter(|peer| peer.state == *state).count() as u64;
                ConstGauge::new(count).encode(family.encode_family(&[("state", *state)])?)
            })
        })?;
        let counters: [(&str, &str, &str, &BTreeMap<String, u64>); 2] = [
            ("negotiations", "What became of negotiations with peers", "outcome", negotiations),
            ("downgrades", "Connections whose TCP options were changed on the way", "kind", downgrades),
        ];
        counters.into_iter().try_for_each(|(name, help, label, counts)| out.counts(name, help, label, counts))
    }
}

fn by_class(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    kind: MetricType,
    paths: &[Path],
    value: fn(&Path) -> u64,
) -> fmt::Result {
    let mut sums = std::collections::BTreeMap::<&str, u64>::new();
    paths.iter().for_each(|path| *sums.entry(&path.class).or_default() += value(path));
    let is_counter = matches!(kind, MetricType::Counter);
    out.labelled(name, help, kind, |family| {
        sums.iter().try_for_each(|(class, sum)| {
            let labels = [("class", *class)];
            let place = family.encode_family(&labels)?;
            if is_counter {
                ConstCounter::new(*sum).encode(place)
            } else {
                ConstGauge::new(*sum).encode(place)
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::{Loaded, Peer, Purpose};

    use super::super::probe::Target;
    use super::*;

    #[test]
    fn sources_of_purposes_are_documented() {
        let documented = include_str!("../../../docs/selection.md");
        for source in Source::ALL {
            assert!(documented.contains(&format!("| `{}` |", source.name())), "{}", source.name());
        }
    }

    #[test]
    fn names_follow_the_documentation() {
        let path = Path {
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
            uptime_s: 2.5,
            outcomes: [("agreed".to_owned(), 4)].into(),
            loaded: vec![Loaded { name: "hybla".into(), connections: 7, ..Loaded::default() }],
            reload: Some(Reload { time_s: 1.5, error: None }),
            paths: vec![path.clone(), path],
            peers: vec![Peer { state: "agreed".into(), ..Peer::default() }],
            negotiations: [("no-rule".to_owned(), 5)].into(),
            downgrades: [("stripped".to_owned(), 6)].into(),
            purposes: vec![Purpose {
                profile: "loss".into(),
                source: "learned".into(),
                ..Purpose::default()
            }],
            ..Status::default()
        };
        let report = Report { rtt_us: 1500, loss_percent: 2.0, ..Report::default() };
        let target = Target { peer: "192.0.2.1".parse().unwrap(), udp_port: None };
        let history = vec![Record { time_s: 1.0, period_ms: 100, report }];
        let probed = Probed { target, runs: false, class: "lan".into(), history, error: None };
        let text = encode(status, vec![probed]).unwrap();
        let documented = include_str!("../../../docs/graft.md");
        for line in [
            "millrace_graft_uptime_seconds 2.5",
            "millrace_graft_reload_ok 1",
            "millrace_graft_reload_timestamp_seconds 1.5",
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
            assert!(documented.contains(name), "{name} is not in docs/graft.md");
        }
    }

    #[test]
    fn outcomes_are_documented() {
        let documented = include_str!("../../../docs/graft.md");
        for outcome in millrace_graft_kernel::Outcome::ALL {
            assert!(documented.contains(&format!("| `{}` |", outcome.name())), "{}", outcome.name());
        }
    }
}
