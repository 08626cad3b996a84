//! Encodes the relay's status for `/metrics`, in the OpenMetrics text format.
//!
//! Sessions and tracks are only summed up, since their number over time has no bound. `/status` lists them.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_gate::status as gate_status;
use millrace_gate_daemon::metrics;
use millrace_moq::Draft;
use millrace_relay::status::{self as relay, LookupStatus};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

use super::status::{
    EngineStatus, GateStatusReport, Keystreams, RelaySessionStatus, RelayTotals, SentStatus, Status,
};

/// Returns the text of one response to `/metrics`.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    // A gate that does not run has no scopes, and zeros would look like a gate that drops nothing.
    let gate = (!status.gate.scopes.is_empty()).then(|| metrics::group(gate_of(&status)));
    let relay = ("millrace_relay", Box::new(RelaySnapshot(status)) as Box<dyn Collector>);
    openmetrics::encode_all([relay].into_iter().chain(gate).collect())
}

/// Returns the status of the relay's packet gate in the same form as that of a gate that runs as a separate process.
fn gate_of(status: &Status) -> gate_status::Status {
    let GateStatusReport { interfaces, scopes, events, tables, .. } = status.gate.clone();
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
struct RelaySnapshot(Status);

impl Collector for RelaySnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        self.gauges(&mut out)?;
        self.counters(&mut out)
    }
}

impl RelaySnapshot {
    fn gauges(&self, out: &mut Out<'_>) -> fmt::Result {
        let relay::Status { sessions, tracks, cache, receive, .. } = &self.0.relay;
        let sum = |field: fn(&RelaySessionStatus) -> u64| sessions.iter().map(field).sum::<u64>();
        let labels = [("version", self.0.version.as_str()), ("engine", self.0.engine.name.as_str())];
        out.labelled(
            "build_info",
            "Always 1: labels have the version and the engine",
            MetricType::Gauge,
            |family| ConstGauge::new(1i64).encode(family.encode_family(&labels)?),
        )?;
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        out.gauge(
            "draining",
            "1 after GOAWAY, while sessions are asked to leave",
            None,
            u64::from(self.0.draining),
        )?;
        out.gauge("trace_viewers", "Clients that read /trace", None, self.0.trace_viewers)?;
        out.gauge("event_listeners", "Listeners to /events: open pages", None, self.0.events.listeners)?;
        if let Some(upstream) = &self.0.upstream {
            let is_up = u64::from(upstream.session.is_some());
            out.gauge(
                "upstream_up",
                "1 while there is a session with an upstream relay; upstream in the \
             status has the reason if there is none",
                None,
                is_up,
            )?;
        }
        if let Some(cluster) = &self.0.cluster {
            let up = cluster.peers.iter().filter(|peer| peer.session.is_some()).count() as u64;
            out.gauge(
                "cluster_peers",
                "Relays of the cluster that this relay connects to",
                None,
                cluster.peers.len() as u64,
            )?;
            out.gauge("cluster_peers_up", "Relays of the cluster with an open session", None, up)?;
            let suspect = cluster.links.iter().filter(|link| link.suspect).count() as u64;
            out.gauge(
                "cluster_links",
                "Sessions with relays that announce routes",
                None,
                cluster.links.len() as u64,
            )?;
            out.gauge(
                "cluster_links_suspect",
                "Sessions with relays that do not answer or are leaving",
                None,
                suspect,
            )?;
            out.gauge("cluster_namespaces", "Namespaces with a route", None, cluster.namespaces)?;
            out.gauge("cluster_routes", "Routes to namespaces", None, cluster.routes)?;
            let carried = cluster.carried;
            out.gauge("cluster_carried_namespaces", "Namespaces received from other relays", None, carried)?;
            if let Some(discovery) = &cluster.discovery {
                let is_up = u64::from(discovery.error.is_empty());
                out.gauge("cluster_discovery_up", "1 while the discovery store answers", None, is_up)?;
                let found = discovery.found;
                out.gauge("cluster_discovery_relays", "Other relays found in the store", None, found)?;
                let registered = u64::from(discovery.registered);
                out.gauge(
                    "cluster_discovery_registered",
                    "1 while the store has this relay's record",
                    None,
                    registered,
                )?;
                out.counter(
                    "cluster_discovery_failures",
                    "Failed attempts to reach the discovery store",
                    None,
                    discovery.failures,
                )?;
                if let Some(lookup) = &discovery.lookup {
                    lookup_metrics(out, lookup)?;
                }
            }
        }
        out.gauge(
            "handshakes",
            "Handshakes in progress, which count against max-sessions",
            None,
            self.0.handshakes,
        )?;
        out.gauge("tasks", "Tasks of the relay's runtime", None, self.0.tasks)?;
        out.gauge(
            "kernel_streams",
            "Streams to subscribers that the kernel sends on",
            None,
            self.0.engine.streams,
        )?;
        out.gauge(
            "kernel_prepared",
            "Streams to subscribers that the kernel may open",
            None,
            self.0.engine.prepared,
        )?;
        let waiting = self.0.engine.commands_waiting;
        out.gauge(
            "kernel_commands_waiting",
            "Sessions whose changes (address, keys, streams) wait for the kernel engine's thread",
            None,
            waiting,
        )?;
        let waiting = self.0.engine.records_waiting;
        out.gauge(
            "kernel_records_waiting",
            "Sessions with a proven right that wait for a record in the table downstreams",
            None,
            waiting,
        )?;
        let records = &self.0.engine.records;
        let used = records.iter().map(|(table, fill)| (table.as_str(), fill.used));
        let max = records.iter().map(|(table, fill)| (table.as_str(), fill.max));
        out.by_table(
            "kernel_records",
            "Entries in use of the kernel's tables: downstreams (sessions), \
             upstreams (publishers), egresses and ingresses (streams), tracks",
            used,
        )?;
        out.by_table(
            "kernel_records_max",
            "Size of the kernel's tables; userspace serves sessions and streams beyond it",
            max,
        )?;
        out.labelled(
            "kernel_interface_attached",
            "1 if engine kernel is attached to the interface, 0 if it no longer is",
            MetricType::Gauge,
            |family| {
                self.0.engine.interfaces.iter().try_for_each(|one| {
                    let labels = [("interface", one.name.as_str())];
                    ConstGauge::new(i64::from(one.mechanism.is_some())).encode(family.encode_family(&labels)?)
                })
            },
        )?;
        let shares = &self.0.shares;
        let about = "Part of the media bytes to this interface's subscribers that the \
             kernel has sent in the last 10 seconds, 0 to 1; absent without media";
        out.labelled("kernel_share_ratio", about, MetricType::Gauge, |family| {
            shares.interfaces.iter().try_for_each(|(name, share)| {
                ConstGauge::new(share.ratio()).encode(family.encode_family(&[("interface", name.as_str())])?)
            })
        })?;
        let about = "Media bytes that userspace has sent to this interface's subscribers in \
             the last 10 seconds, with the main reason";
        out.labelled("kernel_rest_bytes", about, MetricType::Gauge, |family| {
            let mut partial = shares.interfaces.iter().filter(|(_, share)| !share.reason.is_empty());
            partial.try_for_each(|(name, share)| {
                let labels = [("interface", name.as_str()), ("reason", share.reason.as_str())];
                ConstGauge::new(share.bytes - share.by_kernel).encode(family.encode_family(&labels)?)
            })
        })?;
        let off = shares.sessions.values().filter(|share| share.ratio() < 0.5).count() as u64;
        out.gauge(
            "kernel_sessions_off",
            "Sessions that got more than half of their media from userspace in the last 10 seconds",
            None,
            off,
        )?;
        let unregistered = self.0.totals.kernel_unregistered;
        out.gauge(
            "kernel_unregistered",
            "Packets that the kernel sent without a record: always 0",
            None,
            unregistered,
        )?;
        let access = &self.0.access;
        out.gauge(
            "access_open",
            "1 if anyone may publish and subscribe to everything",
            None,
            u64::from(access.open),
        )?;
        out.gauge("access_rules", "Access rules ([[allow]])", None, access.rules)?;
        out.gauge("token_keys", "Keys that verify tokens", None, access.keys)?;
        out.gauge("tokens_revoked", "IDs of revoked tokens", None, access.revoked)?;
        let unread = access.unread.len() as u64;
        out.gauge(
            "access_unread",
            "Files of the settings that could not be read when they changed; \
             access.unread in the status lists them",
            None,
            unread,
        )?;
        out.gauge(
            "unproven_sessions",
            "Sessions without a proven right yet; at most unproven-sessions",
            None,
            access.unproven,
        )?;
        out.gauge("clients", "Clients that have sessions", None, access.clients.len() as u64)?;
        out.gauge("held_tracks", "Tracks of open requests", None, sum(|s| s.tracks))?;
        out.gauge("sessions", "Open sessions", None, sessions.len() as u64)?;
        out.labelled(
            "sessions_by_draft",
            "Open sessions by draft of MoQ Transport",
            MetricType::Gauge,
            |family| {
                Draft::ALL.into_iter().map(Draft::number).try_for_each(|draft| {
                    let count = sessions.iter().filter(|session| session.draft == draft).count();
                    let labels = [("draft", draft.to_string())];
                    ConstGauge::new(count as u64).encode(family.encode_family(&labels)?)
                })
            },
        )?;
        out.gauge("tracks", "Known tracks", None, tracks.len() as u64)?;
        out.gauge("subscriptions", "Open subscriptions and fetches", None, sum(|s| s.subscriptions))?;
        out.gauge("publications", "Tracks that sessions publish", None, sum(|s| s.publications))?;
        out.gauge(
            "pending",
            "Media owed to subscribers and not yet sent",
            Some(Unit::Bytes),
            sum(|s| s.pending),
        )?;
        let worst =
            |of: fn(&RelaySessionStatus) -> u64| sessions.iter().map(of).max().unwrap_or(0) as f64 / 1e6;
        let longest = "Longest time that live media has waited at the relay for a subscriber; \
             queue_us in the status for each session";
        out.gauge_f64("queue_delay", longest, Unit::Seconds, worst(|session| session.queue_us))?;
        let longest = "Queueing delay of the worst path: current round trip less the \
             shortest; path_queue_us in the status for each session";
        out.gauge_f64("path_queue_delay", longest, Unit::Seconds, worst(|session| session.path_queue_us))?;
        let subscribers = || sessions.iter().filter(|session| session.subscriber);
        let bandwidths = subscribers().filter_map(|session| session.bandwidth).map(|bytes| bytes as f64);
        let paths = "Estimated capacity of subscribers' paths: lowest, 10th and 50th \
             percentile; absent if the congestion control does not estimate it";
        out.quantiles("path_bandwidth_bytes_per_second", paths, bandwidths, [0.0, 0.1, 0.5])?;
        let losses = subscribers().filter_map(|session| session.loss);
        let paths = "Share of media packets lost in the last 5 to 10 seconds: 50th and 90th \
             percentile of subscribers, and highest";
        out.quantiles("path_loss_ratio", paths, losses, [0.5, 0.9, 1.0])?;
        out.gauge("in_flight", "Data sent, not acknowledged", Some(Unit::Bytes), sum(|s| s.in_flight))?;
        out.gauge("cache", "Media in the cache", Some(Unit::Bytes), cache.bytes)?;
        out.gauge("cache_limit", "Limit of the cache", Some(Unit::Bytes), cache.limit)?;
        out.gauge("cache_groups", "Groups in the cache", None, cache.groups)?;
        out.gauge(
            "receive_held",
            "Bytes that peers may send before the relay has read them, over all connections",
            Some(Unit::Bytes),
            receive.held,
        )?;
        out.gauge("receive_limit", "Limit of receive_held", Some(Unit::Bytes), receive.limit)
    }

    fn counters(&self, out: &mut Out<'_>) -> fmt::Result {
        let totals = &self.0.totals;
        out.counter("cache_evicted_groups", "Groups dropped from the cache", None, self.0.cache.evicted)?;
        let over = self.0.cache.over_share;
        out.counter(
            "cache_share_evicted_groups",
            "Groups dropped because their client had used up its share of the cache",
            None,
            over,
        )?;
        let limited = self.0.receive.limited;
        out.counter(
            "receive_limited",
            "Receive windows that did not grow because a client had used up its share",
            None,
            limited,
        )?;
        let reclaimed = self.0.receive.reclaimed;
        out.counter(
            "receive_reclaimed",
            "Sessions, idle for 30 seconds, that were closed to make room for the \
             receive windows of others",
            None,
            reclaimed,
        )?;
        out.counter(
            "fetch_waits",
            "FETCH responses that waited because a client had used up its share",
            None,
            totals.fetch_waits,
        )?;
        let waits = totals.message_waits;
        let searches = totals.publisher_searches;
        out.counter(
            "message_waits",
            "Messages of open requests that waited because a session or client \
             had used up its requests of that second",
            None,
            waits,
        )?;
        out.counter("publisher_searches", "Searches for publishers of tracks that had none", None, searches)?;
        let refused = self.0.receive.refused;
        out.counter(
            "receive_refused",
            "Connections that were refused because there was no room for a receive window",
            None,
            refused,
        )?;
        out.counter("sessions_accepted", "Sessions since start", None, totals.sessions)?;
        out.counter(
            "retries",
            "Peers that had to prove their address (Retry) because 64 handshakes \
             without a proof were in progress",
            None,
            totals.retries,
        )?;
        out.counter("requests", "Requests received", None, totals.requests)?;
        out.counter("request_errors", "Requests answered with an error", None, totals.request_errors)?;
        out.counter("objects_received", "Objects from publishers", None, totals.objects_received)?;
        let received = totals.object_bytes_received;
        out.counter("objects_received", "Payload of objects from publishers", Some(Unit::Bytes), received)?;
        let senders = [("quinn", totals.quinn), ("data_plane", totals.data_plane), ("kernel", totals.kernel)];
        per_sender(
            out,
            "packets_sent",
            "QUIC packets sent: kernel for media from the kernel, data_plane for \
             media from userspace, quinn for the rest",
            None,
            senders,
            |sent| sent.packets,
        )?;
        per_sender(out, "sent", "UDP payload sent", Some(&Unit::Bytes), senders, |sent| sent.bytes)?;
        out.counter("packets_lost", "QUIC packets deemed lost", None, totals.packets_lost)?;
        out.counter(
            "packets_marked",
            "QUIC packets that paths have marked CE; packets_marked in the status for each session",
            None,
            totals.packets_marked,
        )?;
        let again = totals.bytes_retransmitted;
        out.counter("retransmitted", "Stream data sent again", Some(Unit::Bytes), again)?;
        out.counter("streams_opened", "Streams to subscribers", None, totals.streams_opened)?;
        out.counter("streams_reset", "Streams to subscribers that were reset", None, totals.streams_reset)?;
        out.counter("datagrams_sent", "Datagram objects sent", None, totals.datagrams_sent)?;
        out.counter("send_calls", "Send system calls of the data plane", None, totals.send_calls)?;
        let suppressed = totals.log_lines_suppressed;
        out.counter(
            "log_lines_suppressed",
            "Log lines suppressed beyond a burst of 100 and 20 a second from one place in the program",
            None,
            suppressed,
        )?;
        out.counter("log_lines_dropped", "Log lines that were lost", None, totals.log_lines_dropped)?;
        let events = self.0.events;
        out.counter(
            "event_listeners_refused",
            "Listeners refused because 64 were connected",
            None,
            events.refused,
        )?;
        out.counter(
            "event_listeners_dropped",
            "Listeners that were dropped because they missed 10 events in a row",
            None,
            events.dropped,
        )?;
        out.counter("events_missed", "Events that listeners were too slow for", None, events.missed)?;
        self.engine_counters(out)?;
        out.labelled(
            "kernel_keystreams",
            "Packets sealed and opened, by whether their keystream was ready (ahead) \
             or not (stale, dry)",
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
        let changes = totals.upstream_changes;
        out.counter(
            "upstream_changes",
            "Changes to another upstream relay, because one did not answer or a \
             preferred one answered again",
            None,
            changes,
        )?;
        let RelayTotals { reroutes, routes_looped, routes_refused, .. } = *totals;
        let RelayTotals { sessions_on_demand: begun, sessions_unneeded: ended, .. } = *totals;
        out.counter(
            "cluster_sessions_on_demand",
            "Sessions begun because a namespace was asked for",
            None,
            begun,
        )?;
        out.counter("cluster_sessions_unneeded", "Sessions on demand that ended unneeded", None, ended)?;
        out.counter("cluster_reroutes", "Tracks that moved to another relay", None, reroutes)?;
        out.counter(
            "cluster_loops",
            "Announcements and requests of relays that had already passed through this relay",
            None,
            routes_looped,
        )?;
        out.counter(
            "cluster_refused",
            "Announcements refused because the relay may not make them, or exceeds cluster-routes",
            None,
            routes_refused,
        )?;
        out.labelled(
            "rendition_switches",
            "Subscriptions that continued with a lower (down) or a higher (up) rendition",
            MetricType::Counter,
            |family| {
                let counts = [("down", totals.renditions_down), ("up", totals.renditions_up)];
                counts.into_iter().try_for_each(|(direction, count)| {
                    ConstCounter::new(count).encode(family.encode_family(&[("direction", direction)])?)
                })
            },
        )?;
        out.counts(
            "refused",
            "Sessions and requests refused or ended because of missing rights or an exceeded budget",
            "reason",
            &self.0.access.refused,
        )?;
        out.counts(
            "drops",
            "Streams and datagrams that were not forwarded, by reason",
            "reason",
            &self.0.drops,
        )
    }

    fn engine_counters(&self, out: &mut Out<'_>) -> fmt::Result {
        let EngineStatus { received, frames, openings, copies, further_runs, .. } = &self.0.engine;
        let EngineStatus { deferred, deferred_dropped, ticks, .. } = &self.0.engine;
        out.by_outcome("kernel_received", "Packets on the kernel engine's interfaces, by outcome", received)?;
        out.counter("kernel_quiet_packets", "Packets whose arrival did not wake the relay", None, *deferred)?;
        out.counter("kernel_quiet_dropped", "Quiet packets lost for lack of room", None, *deferred_dropped)?;
        out.counter(
            "kernel_ticks",
            "Periodic checks of the kernel's work that no packet caused",
            None,
            *ticks,
        )?;
        let EngineStatus { commands, commands_coalesced, .. } = &self.0.engine;
        out.counter("kernel_commands", "Changes of sessions given to the kernel", None, *commands)?;
        let taken = self.0.engine.records_taken;
        out.counter(
            "kernel_records_taken",
            "Records that subscribers have lost to publishers, or to the upstream relay",
            None,
            taken,
        )?;
        let about = "Changes of sessions that were replaced by newer ones before they were carried out";
        out.counter("kernel_commands_coalesced", about, None, *commands_coalesced)?;
        out.by_outcome(
            "kernel_frames",
            "Frames of streams and objects in datagrams that the kernel may \
             forward: good, or the reason why userspace did",
            frames,
        )?;
        out.by_outcome(
            "kernel_openings",
            "Streams that publishers began: bound if the kernel opens streams for \
             them, or the reason why userspace does",
            openings,
        )?;
        out.by_outcome(
            "kernel_copies",
            "Copies that the kernel could have sent: sent, or the reason why userspace had to",
            copies,
        )?;
        out.by_outcome(
            "kernel_further_runs",
            "Runs that continued a packet with more copies than \
             kernel-copies-per-run; left: userspace sent the rest",
            further_runs,
        )
    }
}

/// Encodes a relay's registrations in the discovery store, and its lookups there.
fn lookup_metrics(out: &mut Out<'_>, lookup: &LookupStatus) -> fmt::Result {
    let LookupStatus { registered, unwritten, refused, failed_writes, known, known_absent, evicted, .. } =
        *lookup;
    let LookupStatus { hits, negatives, found, absent, failed, limited, .. } = *lookup;
    out.gauge("cluster_registered", "Namespaces of this relay that the store has", None, registered)?;
    out.gauge(
        "cluster_unregistered",
        "Namespaces of this relay that the store has not yet",
        None,
        unwritten,
    )?;
    out.counter("cluster_registration_failures", "Failed writes of registrations", None, failed_writes)?;
    out.counter(
        "cluster_registrations_refused",
        "Namespaces not registered: there are too many",
        None,
        refused,
    )?;
    out.gauge("cluster_lookups_known", "Looked-up namespaces in memory that a relay has", None, known)?;
    out.gauge(
        "cluster_lookups_absent",
        "Looked-up namespaces in memory that no relay has",
        None,
        known_absent,
    )?;
    out.counter(
        "cluster_lookups_evicted",
        "Looked-up namespaces removed from memory for room",
        None,
        evicted,
    )?;
    out.labelled("cluster_lookups", "Lookups of namespaces, by outcome", MetricType::Counter, |family| {
        let counts = [
            ("hit", hits),
            ("negative", negatives),
            ("found", found),
            ("absent", absent),
            ("store_error", failed),
            ("rate", limited),
        ];
        counts.into_iter().try_for_each(|(outcome, count)| {
            ConstCounter::new(count).encode(family.encode_family(&[("outcome", outcome)])?)
        })
    })
}

/// Encodes a counter that has one value for packets sent by the kernel and one for those sent by userspace.
fn per_sender(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    senders: [(&str, SentStatus); 3],
    value: fn(SentStatus) -> u64,
) -> fmt::Result {
    let mut family = out.0.encode_descriptor(name, help, unit, MetricType::Counter)?;
    senders.into_iter().try_for_each(|(sender, sent)| {
        ConstCounter::new(value(sent)).encode(family.encode_family(&[("sender", sender)])?)
    })
}

#[cfg(test)]
mod tests {
    use millrace_daemon::http::push::PushCounts;

    use super::*;
    use crate::status::{
        AccessStatus, CacheStatus, InterfaceStatus, KeystreamStatus, MediaShare, MediaShares, ReceiveStatus,
    };
    use crate::text::tests::session;

    #[test]
    fn metric_names_and_units_follow_the_conventions() {
        let relay = relay::Status {
            version: "1.2.3".into(),
            engine: EngineStatus {
                name: "user".into(),
                copies: Some([("window".to_owned(), 6)].into()),
                interfaces: vec![InterfaceStatus {
                    name: "eth0".into(),
                    mechanism: Some("TCX".into()),
                    detached: None,
                }],
                ..EngineStatus::default()
            },
            uptime_s: 2.5,
            cache: CacheStatus { bytes: 7, limit: 8, groups: 2, evicted: 3, over_share: 1 },
            receive: ReceiveStatus { held: 10, limit: 11, refused: 12, limited: 13, reclaimed: 14 },
            access: AccessStatus {
                keys: 2,
                refused: [("token_expired".to_owned(), 6)].into(),
                ..AccessStatus::default()
            },
            drops: [("evicted".to_owned(), 4), ("a \"b\"".to_owned(), 5)].into(),
            totals: RelayTotals {
                data_plane: SentStatus { packets: 9, bytes: 900 },
                keystreams: Keystreams {
                    sealed: KeystreamStatus { stale: 3, ..KeystreamStatus::default() },
                    ..Keystreams::default()
                },
                ..RelayTotals::default()
            },
            ..relay::Status::default()
        };
        let session = |bandwidth, loss| RelaySessionStatus { subscriber: true, bandwidth, loss, ..session() };
        let relay = relay::Status {
            sessions: vec![
                session(Some(5000), Some(0.25)),
                session(Some(1000), Some(0.5)),
                RelaySessionStatus { draft: 22, ..session(None, None) },
                RelaySessionStatus { subscriber: false, ..session(Some(1), Some(1.0)) },
            ],
            ..relay
        };
        let gate = GateStatusReport {
            scopes: vec![gate_status::ScopeStatus {
                name: "relay".into(),
                rules: vec![gate_status::RuleCount {
                    rule: "initial_size".into(),
                    packets: 17,
                    ..Default::default()
                }],
                ..Default::default()
            }],
            ..GateStatusReport::default()
        };
        let events = PushCounts { listeners: 18, refused: 19, missed: 20, dropped: 21 };
        let share =
            MediaShare { bytes: 400, by_kernel: 100, reason: "super_packet".into(), ..MediaShare::default() };
        let shares = MediaShares {
            interfaces: [("eth0".to_owned(), share.clone())].into(),
            sessions: [(1, share)].into(),
        };
        let text = encode(Status { relay, gate, shares, pid: 7, events, reload: None }).unwrap();
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
            r#"millrace_relay_kernel_share_ratio{interface="eth0"} 0.25"#,
            r#"millrace_relay_kernel_rest_bytes{interface="eth0",reason="super_packet"} 300"#,
            "millrace_relay_kernel_sessions_off 1",
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
