//! `/metrics`: the relay's status in the OpenMetrics text format, made anew for each scrape.
//!
//! Sessions and tracks come and go without bound, so they are summed up here and listed only in `/status`.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_gate::status as gate_status;
use millrace_gate_daemon::metrics;
use millrace_moq::Draft;
use millrace_relay::status as relay;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

use super::status::{Engine, Gate, Keystreams, Sent, Session, Status};

/// The text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    let gate = (!status.gate.scopes.is_empty()).then(|| metrics::group(gate_of(&status)));
    let relay = ("millrace_relay", Box::new(Snapshot(status)) as Box<dyn Collector>);
    openmetrics::encode_all([relay].into_iter().chain(gate).collect())
}

/// As a gate of its own would have it.
fn gate_of(status: &Status) -> gate_status::Status {
    let Gate { interfaces, scopes, events, tables, .. } = status.gate.clone();
    gate_status::Status {
        uptime_s: status.uptime_s,
        interfaces,
        scopes,
        events,
        tables,
        ..Default::default()
    }
}

#[derive(Debug)]
struct Snapshot(Status);

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        self.gauges(&mut out)?;
        self.counters(&mut out)
    }
}

impl Snapshot {
    fn gauges(&self, out: &mut Out<'_>) -> fmt::Result {
        let relay::Status { sessions, tracks, cache, receive, .. } = &self.0.relay;
        let sum = |field: fn(&Session) -> u64| sessions.iter().map(field).sum::<u64>();
        let labels = [("version", self.0.version.as_str()), ("engine", self.0.engine.name.as_str())];
        out.labelled("build_info", "Version and engine", MetricType::Gauge, |family| {
            ConstGauge::new(1i64).encode(family.encode_family(&labels)?)
        })?;
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        out.gauge("draining", "1 while sessions are asked to leave", None, u64::from(self.0.draining))?;
        out.gauge("trace_viewers", "Who watches single packets", None, self.0.trace_viewers)?;
        out.gauge("event_listeners", "Who listens to the status", None, self.0.events.listeners)?;
        if let Some(upstream) = &self.0.upstream {
            let is_up = u64::from(upstream.session.is_some());
            out.gauge("upstream_up", "1 while there is a session with the upstream relay", None, is_up)?;
        }
        out.gauge("handshakes", "Handshakes under way", None, self.0.handshakes)?;
        out.gauge("tasks", "Tasks of the relay's runtime", None, self.0.tasks)?;
        out.gauge("kernel_streams", "Streams that the kernel sends on", None, self.0.engine.streams)?;
        out.gauge("kernel_prepared", "Streams that the kernel may open", None, self.0.engine.prepared)?;
        let waiting = self.0.engine.commands_waiting;
        out.gauge("kernel_commands_waiting", "Sessions whose changes wait for the kernel", None, waiting)?;
        let waiting = self.0.engine.records_waiting;
        out.gauge(
            "kernel_records_waiting",
            "Sessions that wait for a record of the kernel's",
            None,
            waiting,
        )?;
        let records = &self.0.engine.records;
        let used = records.iter().map(|(table, fill)| (table.as_str(), fill.used));
        let max = records.iter().map(|(table, fill)| (table.as_str(), fill.max));
        out.by_table("kernel_records", "Entries of the kernel's tables that are in use", used)?;
        out.by_table("kernel_records_max", "Entries of the kernel's tables", max)?;
        out.labelled(
            "kernel_interface_attached",
            "Whether the kernel engine is attached",
            MetricType::Gauge,
            |family| {
                self.0.engine.interfaces.iter().try_for_each(|one| {
                    let labels = [("interface", one.name.as_str())];
                    ConstGauge::new(i64::from(one.mechanism.is_some())).encode(family.encode_family(&labels)?)
                })
            },
        )?;
        let unregistered = self.0.totals.kernel_unregistered;
        out.gauge(
            "kernel_unregistered",
            "Packets that the kernel sent without saying so",
            None,
            unregistered,
        )?;
        let access = &self.0.access;
        out.gauge("access_open", "1 if anyone may do anything", None, u64::from(access.open))?;
        out.gauge("access_rules", "Rules that allow something", None, access.rules)?;
        out.gauge("token_keys", "Keys that tokens are checked with", None, access.keys)?;
        out.gauge("tokens_revoked", "IDs of revoked tokens", None, access.revoked)?;
        let unread = access.unread.len() as u64;
        out.gauge("access_unread", "Files of the settings that could not be read", None, unread)?;
        out.gauge("unproven_sessions", "Sessions that have shown no right", None, access.unproven)?;
        out.gauge("clients", "Clients that have sessions", None, access.clients.len() as u64)?;
        out.gauge("held_tracks", "Tracks that requests hold", None, sum(|s| s.tracks))?;
        out.gauge("sessions", "Open sessions", None, sessions.len() as u64)?;
        out.labelled("sessions_by_draft", "Open sessions by draft", MetricType::Gauge, |family| {
            Draft::ALL.into_iter().map(Draft::number).try_for_each(|draft| {
                let count = sessions.iter().filter(|session| session.draft == draft).count();
                let labels = [("draft", draft.to_string())];
                ConstGauge::new(count as u64).encode(family.encode_family(&labels)?)
            })
        })?;
        out.gauge("tracks", "Known tracks", None, tracks.len() as u64)?;
        out.gauge("subscriptions", "Open subscriptions and fetches", None, sum(|s| s.subscriptions))?;
        out.gauge("publications", "Tracks that sessions publish", None, sum(|s| s.publications))?;
        out.gauge(
            "pending",
            "Media owed to subscribers and not yet sent",
            Some(Unit::Bytes),
            sum(|s| s.pending),
        )?;
        let worst = |of: fn(&Session) -> u64| sessions.iter().map(of).max().unwrap_or(0) as f64 / 1e6;
        let longest = "Longest that live media has waited for a subscriber";
        out.gauge_f64("queue_delay", longest, Unit::Seconds, worst(|session| session.queue_us))?;
        let longest = "Longest that packets wait on a session's path";
        out.gauge_f64("path_queue_delay", longest, Unit::Seconds, worst(|session| session.path_queue_us))?;
        let subscribers = || sessions.iter().filter(|session| session.subscriber);
        let bandwidths = subscribers().filter_map(|session| session.bandwidth).map(|bytes| bytes as f64);
        let paths = "Bytes per second that subscribers' paths carry, lowest, 10 and 50 of 100";
        out.quantiles("path_bandwidth_bytes_per_second", paths, bandwidths, [0.0, 0.1, 0.5])?;
        let losses = subscribers().filter_map(|session| session.loss);
        let paths = "Share of packets to subscribers that was lost lately, 50 and 90 of 100, highest";
        out.quantiles("path_loss_ratio", paths, losses, [0.5, 0.9, 1.0])?;
        out.gauge("in_flight", "Sent and not yet acknowledged", Some(Unit::Bytes), sum(|s| s.in_flight))?;
        out.gauge("cache", "Media in the cache", Some(Unit::Bytes), cache.bytes)?;
        out.gauge("cache_limit", "Limit of the cache", Some(Unit::Bytes), cache.limit)?;
        out.gauge("cache_groups", "Groups in the cache", None, cache.groups)?;
        out.gauge("receive_held", "What peers may send unread", Some(Unit::Bytes), receive.held)?;
        out.gauge("receive_limit", "Limit of that", Some(Unit::Bytes), receive.limit)
    }

    fn counters(&self, out: &mut Out<'_>) -> fmt::Result {
        let totals = &self.0.totals;
        out.counter("cache_evicted_groups", "Groups dropped from the cache", None, self.0.cache.evicted)?;
        let over = self.0.cache.over_share;
        out.counter("cache_share_evicted_groups", "Those of clients beyond their share", None, over)?;
        let limited = self.0.receive.limited;
        out.counter("receive_limited", "Windows that a client's share kept small", None, limited)?;
        let reclaimed = self.0.receive.reclaimed;
        out.counter(
            "receive_reclaimed",
            "Idle sessions that were closed for their windows",
            None,
            reclaimed,
        )?;
        out.counter("fetch_waits", "FETCH responses held up by a client's rate", None, totals.fetch_waits)?;
        let (waits, searches) = (totals.message_waits, totals.publisher_searches);
        out.counter("message_waits", "Messages held up by a client's rate of requests", None, waits)?;
        out.counter("publisher_searches", "Searches for publishers of tracks that had none", None, searches)?;
        let refused = self.0.receive.refused;
        out.counter("receive_refused", "Connections without room for a receive window", None, refused)?;
        out.counter("sessions_accepted", "Sessions since start", None, totals.sessions)?;
        out.counter("retries", "Peers that had to prove their address", None, totals.retries)?;
        out.counter("requests", "Requests received", None, totals.requests)?;
        out.counter("request_errors", "Requests answered with an error", None, totals.request_errors)?;
        out.counter("objects_received", "Objects from publishers", None, totals.objects_received)?;
        let received = totals.object_bytes_received;
        out.counter("objects_received", "Payload of objects from publishers", Some(Unit::Bytes), received)?;
        let senders = [("quinn", totals.quinn), ("data_plane", totals.data_plane), ("kernel", totals.kernel)];
        per_sender(out, "packets_sent", "QUIC packets sent", None, senders, |sent| sent.packets)?;
        per_sender(out, "sent", "UDP payload sent", Some(&Unit::Bytes), senders, |sent| sent.bytes)?;
        out.counter("packets_lost", "QUIC packets deemed lost", None, totals.packets_lost)?;
        out.counter("packets_marked", "QUIC packets marked CE", None, totals.packets_marked)?;
        let again = totals.bytes_retransmitted;
        out.counter("retransmitted", "Stream data sent again", Some(Unit::Bytes), again)?;
        out.counter("streams_opened", "Streams to subscribers", None, totals.streams_opened)?;
        out.counter("streams_reset", "Streams to subscribers cut short", None, totals.streams_reset)?;
        out.counter("datagrams_sent", "Datagram objects sent", None, totals.datagrams_sent)?;
        out.counter("send_calls", "Send system calls of the data plane", None, totals.send_calls)?;
        let suppressed = totals.log_lines_suppressed;
        out.counter("log_lines_suppressed", "Log lines of peers beyond the limit", None, suppressed)?;
        out.counter("log_lines_dropped", "Log lines lost", None, totals.log_lines_dropped)?;
        let events = self.0.events;
        out.counter("event_listeners_refused", "Listeners without room", None, events.refused)?;
        out.counter("event_listeners_dropped", "Listeners that were too slow", None, events.dropped)?;
        out.counter("events_missed", "Events that listeners were too slow for", None, events.missed)?;
        self.engine_counters(out)?;
        out.labelled(
            "kernel_keystreams",
            "Packets by where their keystream was",
            MetricType::Counter,
            |family| {
                let Keystreams { sealed, opened } = totals.keystreams;
                let all = [("sealed", sealed), ("opened", opened)];
                all.into_iter()
                    .flat_map(|(packets, supply)| supply.counts().map(|count| (packets, count)))
                    .try_for_each(|(packets, (supply, count))| {
                        let labels = [("packets", packets), ("supply", supply)];
                        ConstCounter::new(count).encode(family.encode_family(&labels)?)
                    })
            },
        )?;
        out.labelled("rendition_switches", "Changes of rendition", MetricType::Counter, |family| {
            let counts = [("down", totals.renditions_down), ("up", totals.renditions_up)];
            counts.into_iter().try_for_each(|(direction, count)| {
                ConstCounter::new(count).encode(family.encode_family(&[("direction", direction)])?)
            })
        })?;
        out.counts("refused", "Sessions and requests not allowed", "reason", &self.0.access.refused)?;
        out.counts("drops", "What was not forwarded", "reason", &self.0.drops)
    }

    fn engine_counters(&self, out: &mut Out<'_>) -> fmt::Result {
        let Engine { received, frames, openings, copies, further_runs, .. } = &self.0.engine;
        let Engine { deferred, deferred_dropped, ticks, .. } = &self.0.engine;
        out.by_outcome("kernel_received", "Packets on the kernel engine's interfaces", received)?;
        out.counter("kernel_quiet_packets", "Packets that did not wake the relay", None, *deferred)?;
        out.counter("kernel_quiet_dropped", "Those that there was no room for", None, *deferred_dropped)?;
        out.counter("kernel_ticks", "Looks at what the kernel did, without a packet", None, *ticks)?;
        let Engine { commands, commands_coalesced, .. } = &self.0.engine;
        out.counter("kernel_commands", "Changes of sessions that the kernel was told", None, *commands)?;
        let taken = self.0.engine.records_taken;
        out.counter(
            "kernel_records_taken",
            "Records of subscribers that publishers have taken",
            None,
            taken,
        )?;
        let about = "Those that newer ones have replaced";
        out.counter("kernel_commands_coalesced", about, None, *commands_coalesced)?;
        out.by_outcome("kernel_frames", "Frames of streams that the kernel may forward", frames)?;
        out.by_outcome("kernel_openings", "Streams that the kernel could open streams for", openings)?;
        out.by_outcome("kernel_copies", "Copies that the kernel could have sent", copies)?;
        out.by_outcome("kernel_further_runs", "Runs that went on with a packet", further_runs)
    }
}

/// A counter of what each sender has sent.
fn per_sender(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    senders: [(&str, Sent); 3],
    value: fn(Sent) -> u64,
) -> fmt::Result {
    let mut family = out.0.encode_descriptor(name, help, unit, MetricType::Counter)?;
    senders.into_iter().try_for_each(|(sender, sent)| {
        ConstCounter::new(value(sent)).encode(family.encode_family(&[("sender", sender)])?)
    })
}

#[cfg(test)]
mod tests {
    use millrace_daemon::http::push::Counts;

    use super::*;
    use crate::status::{Access, Cache, Interface, KeystreamUse, Receive, Totals};
    use crate::text::tests::session;

    #[test]
    fn names_and_units_follow_the_conventions() {
        let relay = relay::Status {
            version: "1.2.3".into(),
            engine: Engine {
                name: "user".into(),
                copies: Some([("window".to_owned(), 6)].into()),
                interfaces: vec![Interface {
                    name: "eth0".into(),
                    mechanism: Some("TCX".into()),
                    detached: None,
                }],
                ..Engine::default()
            },
            uptime_s: 2.5,
            cache: Cache { bytes: 7, limit: 8, groups: 2, evicted: 3, over_share: 1 },
            receive: Receive { held: 10, limit: 11, refused: 12, limited: 13, reclaimed: 14 },
            access: Access {
                keys: 2,
                refused: [("token_expired".to_owned(), 6)].into(),
                ..Access::default()
            },
            drops: [("evicted".to_owned(), 4), ("a \"b\"".to_owned(), 5)].into(),
            totals: Totals {
                data_plane: Sent { packets: 9, bytes: 900 },
                keystreams: Keystreams {
                    sealed: KeystreamUse { stale: 3, ..KeystreamUse::default() },
                    ..Keystreams::default()
                },
                ..Totals::default()
            },
            ..relay::Status::default()
        };
        let session = |bandwidth, loss| Session { subscriber: true, bandwidth, loss, ..session() };
        let relay = relay::Status {
            sessions: vec![
                session(Some(5000), Some(0.25)),
                session(Some(1000), Some(0.5)),
                Session { draft: 22, ..session(None, None) },
                Session { subscriber: false, ..session(Some(1), Some(1.0)) },
            ],
            ..relay
        };
        let gate = Gate {
            scopes: vec![gate_status::Scope {
                name: "relay".into(),
                rules: vec![gate_status::RuleCount {
                    rule: "initial_size".into(),
                    packets: 17,
                    ..Default::default()
                }],
                ..Default::default()
            }],
            ..Gate::default()
        };
        let events = Counts { listeners: 18, refused: 19, missed: 20, dropped: 21 };
        let text = encode(Status { relay, gate, pid: 7, events, reload: None }).unwrap();
        for line in [
            r#"millrace_relay_build_info{version="1.2.3",engine="user"} 1"#,
            "# UNIT millrace_relay_cache_bytes bytes",
            "millrace_relay_cache_bytes 7",
            r#"millrace_relay_sessions_by_draft{draft="22"} 1"#,
            r#"millrace_relay_sessions_by_draft{draft="18"} 3"#,
            r#"millrace_relay_sessions_by_draft{draft="20"} 0"#,
            r#"millrace_relay_path_bandwidth_bytes_per_second{quantile="0"} 1000.0"#,
            r#"millrace_relay_path_bandwidth_bytes_per_second{quantile="0.5"} 5000.0"#,
            r#"millrace_relay_path_loss_ratio{quantile="1"} 0.5"#,
            "millrace_relay_cache_evicted_groups_total 3",
            "millrace_relay_receive_held_bytes 10",
            "millrace_relay_receive_refused_total 12",
            "millrace_relay_receive_limited_total 13",
            "millrace_relay_receive_reclaimed_total 14",
            "millrace_relay_cache_share_evicted_groups_total 1",
            "millrace_relay_uptime_seconds 2.5",
            r#"millrace_relay_packets_sent_total{sender="data_plane"} 9"#,
            r#"millrace_relay_sent_bytes_total{sender="data_plane"} 900"#,
            r#"millrace_relay_packets_sent_total{sender="kernel"} 0"#,
            r#"millrace_relay_kernel_interface_attached{interface="eth0"} 1"#,
            "millrace_relay_kernel_unregistered 0",
            r#"millrace_gate_refused_packets_total{scope="relay",rule="initial_size"} 17"#,
            r#"millrace_relay_kernel_copies_total{outcome="window"} 6"#,
            r#"millrace_relay_kernel_keystreams_total{packets="sealed",supply="stale"} 3"#,
            "millrace_relay_token_keys 2",
            "millrace_relay_event_listeners 18",
            "millrace_relay_event_listeners_refused_total 19",
            "millrace_relay_events_missed_total 20",
            "millrace_relay_event_listeners_dropped_total 21",
            r#"millrace_relay_refused_total{reason="token_expired"} 6"#,
            r#"millrace_relay_drops_total{reason="evicted"} 4"#,
            r#"millrace_relay_drops_total{reason="a \"b\""} 5"#,
            "# EOF",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is not in\n{text}");
        }
        millrace_testkit::documented::assert_families_named("millrace_relay", &text);
        let mut families: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let count = families.len();
        families.sort_unstable();
        families.dedup();
        assert_eq!(families.len(), count, "each family once");
    }
}
