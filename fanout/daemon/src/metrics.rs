//! Metrics of a fan-out, collected for each scrape. Receivers have no labels, because there may be thousands.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Unit};

use super::status::{Status, StreamStatus};

const PREFIX: &str = "millrace_fanout";

/// Returns the text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, FanoutSnapshot(status))
}

#[derive(Debug)]
struct FanoutSnapshot(Status);

impl Collector for FanoutSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Status { uptime_s, interfaces, streams, packets, copies, runs, trouble, reload: _ } = &self.0;
        let mut out = Out(encoder);
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, *uptime_s)?;
        out.gauge("troubles", "Faults that the status lists", None, trouble.len() as u64)?;
        let attached =
            interfaces.iter().map(|it| ([("interface", it.name.as_str())], u64::from(it.attached)));
        out.gauges("interfaces", "1 if the program is attached to the interface", attached)?;
        let again = interfaces.iter().map(|it| ([("interface", it.name.as_str())], it.reattached));
        out.counters("reattached", "Times that the program was attached to the interface again", again)?;
        out.counts("packets", "Received packets, by outcome", "outcome", packets)?;
        out.counts("copies", "Copies of packets, by outcome", "outcome", copies)?;
        out.counts("further_runs", "Runs after a packet's first, by outcome", "outcome", runs)?;
        out.counters(
            "stream_packets",
            "Packets that were fanned out",
            stream_values(streams, |it| it.packets),
        )?;
        out.counters(
            "stream_bytes",
            "UDP payload bytes that were fanned out",
            stream_values(streams, |it| it.bytes),
        )?;
        out.gauges(
            "receivers",
            "Receivers that have a lease",
            stream_values(streams, |it| it.receivers.len() as u64),
        )?;
        out.gauges(
            "paused",
            "Receivers that were cut off",
            stream_values(streams, |it| it.paused.len() as u64),
        )?;
        let events = streams.iter().flat_map(|it| {
            let labels = move |event| [("stream", it.name.as_str()), ("event", event)];
            it.events.iter().map(move |(event, count)| (labels(event.as_str()), *count))
        });
        out.counters("events", "Events of a stream in userspace, by kind", events)
    }
}

fn stream_values(
    streams: &[StreamStatus],
    value: fn(&StreamStatus) -> u64,
) -> impl Iterator<Item = ([(&str, &str); 1], u64)> {
    streams.iter().map(move |stream| ([("stream", stream.name.as_str())], value(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::FanoutInterfaceStatus;

    #[test]
    fn metric_names_follow_the_documentation() {
        let counts = |name: &str, count| [(name.to_owned(), count)].into();
        let stream = StreamStatus {
            name: "live".into(),
            packets: 7,
            bytes: 700,
            events: counts("leases", 2),
            ..StreamStatus::default()
        };
        let text = encode(Status {
            uptime_s: 2.5,
            interfaces: vec![FanoutInterfaceStatus {
                name: "eth0".into(),
                attached: true,
                reattached: 1,
                ..FanoutInterfaceStatus::default()
            }],
            streams: vec![stream],
            packets: counts("forwarded", 7),
            copies: counts("sent", 21),
            runs: counts("last", 0),
            trouble: vec![],
            reload: None,
        })
        .unwrap();
        for line in [
            "millrace_fanout_uptime_seconds 2.5",
            "millrace_fanout_troubles 0",
            r#"millrace_fanout_interfaces{interface="eth0"} 1"#,
            r#"millrace_fanout_reattached_total{interface="eth0"} 1"#,
            r#"millrace_fanout_packets_total{outcome="forwarded"} 7"#,
            r#"millrace_fanout_copies_total{outcome="sent"} 21"#,
            r#"millrace_fanout_further_runs_total{outcome="last"} 0"#,
            r#"millrace_fanout_stream_packets_total{stream="live"} 7"#,
            r#"millrace_fanout_stream_bytes_total{stream="live"} 700"#,
            r#"millrace_fanout_receivers{stream="live"} 0"#,
            r#"millrace_fanout_paused{stream="live"} 0"#,
            r#"millrace_fanout_events_total{stream="live",event="leases"} 2"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        millrace_testkit::documented::assert_families_named("millrace_fanout", &text);
    }
}
