//! Encodes the relay's status for `/metrics`, in the OpenMetrics text format.
//!
//! Sessions and tracks are only summed up, since their number over time has no bound. `/status` lists them.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_gate::status as gate_status;
use millrace_gate_daemon::metrics;
use millrace_moq::Draft;
use millrace_relay::status::{self as relay, ClusterStatus, LookupStatus};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter},
    registry::Unit,
};

use super::status::{
    EngineStatus, GateStatusReport, Keystreams, RelaySessionStatus, SentStatus, ShardStatus, Status,
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
        let relay::Status { engine, sessions, tracks, cache, receive, access, .. } = &self.0.relay;
        let sum = |field: fn(&RelaySessionStatus) -> u64| sessions.iter().map(field).sum::<u64>();
        let labels = [("version", self.0.version.as_str()), ("engine", engine.name.as_str())];
        let about = "Always 1: labels have the version and the engine";
        out.gauges("build_info", about, [(labels, 1u64)].into_iter())?;
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        out.plain_gauges([
            ("draining", "1 after GOAWAY, while sessions are asked to leave", self.0.draining.into()),
            ("trace_viewers", "Clients that read /trace", self.0.trace_viewers),
            ("event_listeners", "Listeners to /events: open pages", self.0.events.listeners),
            ("handshakes", "Handshakes in progress, which count against max-sessions", self.0.handshakes),
            ("tasks", "Tasks of the relay's runtime", self.0.tasks),
        ])?;
        if let Some(upstream) = &self.0.upstream {
            let about = "1 while there is a session with an upstream relay; upstream in the status has the reason if there \
                         is none";
            out.gauge("upstream_up", about, None, upstream.session.is_some().into())?;
        }
        if let Some(cluster) = &self.0.cluster {
            cluster_metrics(out, cluster)?;
        }
        self.engine_gauges(out)?;
        out.plain_gauges([
            ("access_open", "1 if anyone may publish and subscribe to everything", access.open.into()),
            ("access_rules", "Access rules ([[allow]])", access.rules),
            ("token_keys", "Keys that verify tokens", access.keys),
            ("tokens_revoked", "IDs of revoked tokens", access.revoked),
            (
                "access_unread",
                "Files of the settings that could not be read when they changed; access.unread in the status lists them",
                access.unread.len() as u64,
            ),
            ("unproven_sessions", "Sessions without a right yet; at most unproven-sessions", access.unproven),
            ("clients", "Clients that have sessions", access.clients.len() as u64),
            ("held_tracks", "Tracks of open requests", sum(|s| s.tracks)),
            ("sessions", "Open sessions", sessions.len() as u64),
            ("tracks", "Known tracks", tracks.len() as u64),
            ("subscriptions", "Open subscriptions and fetches", sum(|s| s.subscriptions)),
            ("publications", "Tracks that sessions publish", sum(|s| s.publications)),
            ("cache_groups", "Groups in the cache", cache.groups),
        ])?;
        let drafts = Draft::ALL.map(|draft| draft.number().to_string());
        let by_draft = Draft::ALL.iter().zip(&drafts).map(|(draft, name)| {
            let count = sessions.iter().filter(|session| session.draft == draft.number()).count();
            ([("draft", name.as_str())], count as u64)
        });
        out.gauges("sessions_by_draft", "Open sessions by draft of MoQ Transport", by_draft)?;
        for (name, about, bytes) in [
            ("pending", "Media owed to subscribers and not yet sent", sum(|s| s.pending)),
            ("in_flight", "Data sent, not acknowledged", sum(|s| s.in_flight)),
            ("cache", "Media in the cache", cache.bytes),
            ("cache_limit", "Limit of the cache", cache.limit),
            ("receive_held", "Bytes that all peers may send before the relay reads them", receive.held),
            ("receive_limit", "Limit of receive_held", receive.limit),
        ] {
            out.gauge(name, about, Some(Unit::Bytes), bytes)?;
        }
        self.paths(out)
    }

    fn engine_gauges(&self, out: &mut Out<'_>) -> fmt::Result {
        let EngineStatus { records, interfaces, .. } = &self.0.engine;
        let shares = &self.0.shares;
        let off = shares.sessions.values().filter(|share| share.ratio() < 0.5).count() as u64;
        out.plain_gauges([
            ("kernel_streams", "Streams to subscribers that the kernel sends on", self.0.engine.streams),
            ("kernel_prepared", "Streams to subscribers that the kernel may open", self.0.engine.prepared),
            (
                "kernel_commands_waiting",
                "Sessions whose changes (address, keys, streams) wait for the kernel engine's thread",
                self.0.engine.commands_waiting,
            ),
            (
                "kernel_records_waiting",
                "Sessions with a proven right that wait for a record in the table downstreams",
                self.0.engine.records_waiting,
            ),
            ("kernel_sessions_off", "Sessions with most media of the last 10 seconds from userspace", off),
            (
                "kernel_unregistered",
                "Packets that the kernel sent without a record: always 0",
                self.0.totals.kernel_unregistered,
            ),
        ])?;
        let about = "Entries in use of the kernel's tables: downstreams (sessions), upstreams (publishers), egresses and \
                     ingresses (streams), tracks";
        let used = records.iter().map(|(table, fill)| ([("table", table.as_str())], fill.used));
        out.gauges("kernel_records", about, used)?;
        let about = "Size of the kernel's tables; userspace serves sessions and streams beyond it";
        let max = records.iter().map(|(table, fill)| ([("table", table.as_str())], fill.max));
        out.gauges("kernel_records_max", about, max)?;
        let about = "1 if engine kernel is attached to the interface, 0 if it no longer is";
        let attached = interfaces
            .iter()
            .map(|it| ([("interface", it.name.as_str())], u64::from(it.mechanism.is_some())));
        out.gauges("kernel_interface_attached", about, attached)?;
        let about = "Part of the media bytes to this interface's subscribers that the kernel has sent in the last 10 \
                     seconds, 0 to 1; absent without media";
        let ratios =
            shares.interfaces.iter().map(|(name, share)| ([("interface", name.as_str())], share.ratio()));
        out.gauges("kernel_share_ratio", about, ratios)?;
        let about = "Media bytes that userspace has sent to this interface's subscribers in the last 10 seconds, with the \
                     main reason";
        let partial = shares.interfaces.iter().filter(|(_, share)| !share.reason.is_empty());
        let rest = partial.map(|(name, share)| {
            let labels = [("interface", name.as_str()), ("reason", share.reason.as_str())];
            (labels, share.bytes - share.by_kernel)
        });
        out.gauges("kernel_rest_bytes", about, rest)
    }

    /// Encodes delays, capacities and losses of the paths to subscribers.
    fn paths(&self, out: &mut Out<'_>) -> fmt::Result {
        let sessions = &self.0.relay.sessions;
        let worst =
            |of: fn(&RelaySessionStatus) -> u64| sessions.iter().map(of).max().unwrap_or(0) as f64 / 1e6;
        let about = "Longest time that live media has waited at the relay for a subscriber; queue_us in the status for \
                     each session";
        out.gauge_f64("queue_delay", about, Unit::Seconds, worst(|session| session.queue_us))?;
        let about = "Queueing delay of the worst path: current round trip less the shortest; path_queue_us in the status \
                     for each session";
        out.gauge_f64("path_queue_delay", about, Unit::Seconds, worst(|session| session.path_queue_us))?;
        let subscribers = || sessions.iter().filter(|session| session.subscriber);
        let bandwidths = subscribers().filter_map(|session| session.bandwidth).map(|bytes| bytes as f64);
        let about = "Estimated capacity of subscribers' paths: lowest, 10th and 50th percentile; absent if the congestion \
                     control does not estimate it";
        out.quantiles("path_bandwidth_bytes_per_second", about, bandwidths, [0.0, 0.1, 0.5])?;
        let losses = subscribers().filter_map(|session| session.loss);
        let about = "Share of media packets lost in the last 5 to 10 seconds: 50th and 90th percentile of subscribers, \
                     and highest";
        out.quantiles("path_loss_ratio", about, losses, [0.5, 0.9, 1.0])
    }

    fn counters(&self, out: &mut Out<'_>) -> fmt::Result {
        let totals = &self.0.totals;
        let relay::Status { cache, receive, .. } = &self.0.relay;
        let events = self.0.events;
        out.plain_counters([
            ("cache_evicted_groups", "Groups dropped from the cache", cache.evicted),
            (
                "cache_share_evicted_groups",
                "Groups dropped since the client's share was full",
                cache.over_share,
            ),
            ("receive_limited", "Receive windows that a client's used-up share kept small", receive.limited),
            ("receive_reclaimed", "Sessions idle for 30 s, closed for others' windows", receive.reclaimed),
            ("receive_refused", "Connections refused for lack of room for receive windows", receive.refused),
            ("fetch_waits", "FETCH responses that waited, since a share was used up", totals.fetch_waits),
            ("message_waits", "Messages delayed because a request budget was used up", totals.message_waits),
            ("publisher_searches", "Searches for missing publishers of tracks", totals.publisher_searches),
            ("sessions_accepted", "Sessions since start", totals.sessions),
            ("retries", "Peers that got Retry, since 64 handshakes were in progress", totals.retries),
            ("requests", "Requests received", totals.requests),
            ("request_errors", "Requests answered with an error", totals.request_errors),
            ("objects_received", "Objects from publishers", totals.objects_received),
            ("packets_lost", "QUIC packets deemed lost", totals.packets_lost),
            ("packets_marked", "QUIC packets that paths have marked CE", totals.packets_marked),
            ("streams_opened", "Streams to subscribers", totals.streams_opened),
            ("streams_reset", "Streams to subscribers that were reset", totals.streams_reset),
            ("datagrams_sent", "Datagram objects sent", totals.datagrams_sent),
            ("send_calls", "Send system calls of the data plane", totals.send_calls),
            (
                "log_lines_suppressed",
                "Log lines over 20 a second from one place",
                totals.log_lines_suppressed,
            ),
            ("log_lines_dropped", "Log lines that were lost", totals.log_lines_dropped),
            ("event_listeners_refused", "Listeners refused because 64 were connected", events.refused),
            ("event_listeners_dropped", "Listeners dropped after 10 missed events in a row", events.dropped),
            ("events_missed", "Events that listeners were too slow for", events.missed),
            ("upstream_changes", "Changes to another or a preferred upstream relay", totals.upstream_changes),
            ("cluster_reroutes", "Tracks that moved to another relay", totals.reroutes),
            ("gaps_asked", "FETCHes for what tracks missed while their source was away", totals.gaps_asked),
            ("gap_objects", "Objects that FETCHes for missed objects have brought", totals.gap_objects),
            ("gaps_refused", "FETCHes for missed objects that the source refused", totals.gaps_refused),
            ("gaps_timed_out", "FETCHes for missed objects without an answer in time", totals.gaps_timed_out),
            ("gaps_cut", "FETCHes for missed objects that broke off or were too large", totals.gaps_cut),
            ("cluster_sessions_on_demand", "Sessions begun to reach a namespace", totals.sessions_on_demand),
            ("cluster_sessions_unneeded", "Sessions on demand that ended unneeded", totals.sessions_unneeded),
            ("cluster_loops", "Announcements and requests that came back to the relay", totals.routes_looped),
            ("cluster_refused", "Announcements that rules or cluster-routes forbid", totals.routes_refused),
        ])?;
        let received = totals.object_bytes_received;
        out.counter("objects_received", "Payload of objects from publishers", Some(Unit::Bytes), received)?;
        let again = totals.bytes_retransmitted;
        out.counter("retransmitted", "Stream data sent again", Some(Unit::Bytes), again)?;
        let senders = [("quinn", totals.quinn), ("data_plane", totals.data_plane), ("kernel", totals.kernel)];
        let about = "QUIC packets sent: kernel for media from the kernel, data_plane for media from userspace, quinn for \
                     the rest";
        per_sender(out, "packets_sent", about, None, senders, |sent| sent.packets)?;
        per_sender(out, "sent", "UDP payload sent", Some(&Unit::Bytes), senders, |sent| sent.bytes)?;
        self.shards(out)?;
        self.engine_counters(out)?;
        let about = "Subscriptions that continued with a lower (down) or a higher (up) rendition";
        let switches = [("down", totals.renditions_down), ("up", totals.renditions_up)];
        let switches = switches.map(|(direction, count)| ([("direction", direction)], count));
        out.counters("rendition_switches", about, switches.into_iter())?;
        let about = "Sessions and requests refused or ended because of missing rights or an exceeded budget";
        out.counts("refused", about, "reason", &self.0.access.refused)?;
        let about = "Streams and datagrams that were not forwarded, by reason";
        out.counts("drops", about, "reason", &self.0.drops)
    }

    /// Encodes the counts of each shard.
    fn shards(&self, out: &mut Out<'_>) -> fmt::Result {
        let shards = &self.0.relay.shards;
        let names: Vec<_> =
            shards.iter().map(|one| (one.address.to_string(), one.shard.to_string())).collect();
        let values = |value: fn(&ShardStatus) -> u64| {
            let labels = names.iter().map(|(addr, shard)| [("address", addr.as_str()), ("shard", shard)]);
            labels.zip(shards.iter().map(value))
        };
        let about = "Connections of each shard, a socket at an address of the relay";
        out.gauges("shard_connections", about, values(|shard| shard.connections))?;
        let about = "UDP datagrams that each shard has received";
        out.counters("shard_packets_received", about, values(|shard| shard.received))?;
        let about = "Packets with media that each shard has sent, without those of engine kernel";
        out.counters("shard_packets_sent", about, values(|shard| shard.sent.packets))?;
        let about =
            "Packets lost because they reached another shard than their session's: 0 in normal operation";
        out.counters("shard_packets_misdirected", about, values(|shard| shard.misdirected))
    }

    fn engine_counters(&self, out: &mut Out<'_>) -> fmt::Result {
        let EngineStatus { received, frames, openings, copies, further_runs, .. } = &self.0.engine;
        let engine = &self.0.engine;
        out.plain_counters([
            ("kernel_quiet_packets", "Packets whose arrival did not wake the relay", engine.deferred),
            ("kernel_quiet_dropped", "Quiet packets lost for lack of room", engine.deferred_dropped),
            ("kernel_ticks", "Periodic checks of the kernel's work that no packet caused", engine.ticks),
            ("kernel_commands", "Changes of sessions given to the kernel", engine.commands),
            (
                "kernel_commands_coalesced",
                "Changes of sessions that were replaced by newer ones before they were carried out",
                engine.commands_coalesced,
            ),
            ("kernel_records_taken", "Records taken from subscribers for publishers", engine.records_taken),
        ])?;
        for (name, about, counts) in [
            ("kernel_received", "Packets on the kernel engine's interfaces, by outcome", received),
            (
                "kernel_frames",
                "Frames of streams and objects in datagrams that the kernel may forward: good, or the reason why userspace \
                 did",
                frames,
            ),
            (
                "kernel_openings",
                "Streams that publishers began: bound if the kernel opens streams for them, or the reason why userspace \
                 does",
                openings,
            ),
            ("kernel_copies", "Copies that the kernel could send: sent, or why userspace did", copies),
            (
                "kernel_further_runs",
                "Runs that continued a packet with more copies than kernel-copies-per-run; left: userspace sent the rest",
                further_runs,
            ),
        ] {
            out.by_outcome(name, about, counts)?;
        }
        let about =
            "Packets sealed and opened, by whether their keystream was ready (ahead) or not (stale, dry)";
        let Keystreams { sealed, opened } = self.0.totals.keystreams;
        let all = [("sealed", sealed), ("opened", opened)].into_iter().flat_map(|(packets, supply)| {
            supply.counts().map(|(supply, count)| ([("packets", packets), ("supply", supply)], count))
        });
        out.counters("kernel_keystreams", about, all)
    }
}

/// Encodes what a relay has registered and looked up in the discovery store.
fn lookup_metrics(out: &mut Out<'_>, lookup: &LookupStatus) -> fmt::Result {
    let LookupStatus { registered, unwritten, refused, failed_writes, known, known_absent, evicted, .. } =
        *lookup;
    out.plain_gauges([
        ("cluster_registered", "Namespaces of this relay that the store has", registered),
        ("cluster_unregistered", "Namespaces of this relay that the store has not yet", unwritten),
        ("cluster_lookups_known", "Looked-up namespaces in memory that a relay has", known),
        ("cluster_lookups_absent", "Looked-up namespaces in memory that no relay has", known_absent),
    ])?;
    for (name, about, count) in [
        ("cluster_registration_failures", "Failed writes of registrations", failed_writes),
        ("cluster_registrations_refused", "Namespaces not registered: there are too many", refused),
        ("cluster_lookups_evicted", "Looked-up namespaces removed from memory for room", evicted),
    ] {
        out.counter(name, about, None, count)?;
    }
    let outcomes = [
        ("hit", lookup.hits),
        ("negative", lookup.negatives),
        ("found", lookup.found),
        ("absent", lookup.absent),
        ("store_error", lookup.failed),
        ("rate", lookup.limited),
    ];
    let outcomes = outcomes.into_iter().map(|(outcome, count)| ([("outcome", outcome)], count));
    out.counters("cluster_lookups", "Lookups of namespaces, by outcome", outcomes)
}

fn cluster_metrics(out: &mut Out<'_>, cluster: &ClusterStatus) -> fmt::Result {
    let up = cluster.peers.iter().filter(|peer| peer.session.is_some()).count() as u64;
    let suspect = cluster.links.iter().filter(|link| link.suspect).count() as u64;
    let peers = cluster.peers.len() as u64;
    let links = cluster.links.len() as u64;
    out.plain_gauges([
        ("cluster_peers", "Relays of the cluster that this relay connects to", peers),
        ("cluster_peers_up", "Relays of the cluster with an open session", up),
        ("cluster_links", "Sessions with relays that announce routes", links),
        ("cluster_links_suspect", "Sessions with relays that do not answer or are leaving", suspect),
        ("cluster_namespaces", "Namespaces with a route", cluster.namespaces),
        ("cluster_routes", "Routes to namespaces", cluster.routes),
        ("cluster_carried_namespaces", "Namespaces received from other relays", cluster.carried),
    ])?;
    let Some(discovery) = &cluster.discovery else { return Ok(()) };
    out.plain_gauges([
        ("cluster_discovery_up", "1 while the discovery store answers", discovery.error.is_empty().into()),
        ("cluster_discovery_relays", "Other relays found in the store", discovery.found),
        ("cluster_discovery_registered", "1 while the store lists this relay", discovery.registered.into()),
    ])?;
    let about = "Failed attempts to reach the discovery store";
    out.counter("cluster_discovery_failures", about, None, discovery.failures)?;
    discovery.lookup.as_ref().map_or(Ok(()), |lookup| lookup_metrics(out, lookup))
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
        AccessStatus, CacheStatus, FillStatus, InterfaceStatus, KeystreamStatus, MediaShare, MediaShares,
        ReceiveStatus, RelayTotals,
    };
    use crate::text::tests::session;

    #[test]
    fn metric_names_and_units_follow_the_conventions() {
        let relay = relay::Status {
            version: "1.2.3".into(),
            engine: EngineStatus {
                name: "user".into(),
                copies: Some([("window".to_owned(), 6)].into()),
                records: [("egresses".to_owned(), FillStatus { used: 3, max: 9 })].into(),
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
            shards: vec![ShardStatus {
                address: ([192, 0, 2, 1], 4443).into(),
                shard: 1,
                connections: 22,
                received: 23,
                misdirected: 24,
                sent: SentStatus { packets: 25, bytes: 26 },
            }],
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
        let text =
            encode(Status { relay, gate, shares, pid: 7, events, reload: None, upgrade: None }).unwrap();
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
            r#"millrace_relay_kernel_records{table="egresses"} 3"#,
            r#"millrace_relay_kernel_records_max{table="egresses"} 9"#,
            r#"millrace_relay_rendition_switches_total{direction="down"} 0"#,
            r#"millrace_relay_kernel_keystreams_total{packets="sealed",supply="stale"} 3"#,
            r#"millrace_relay_shard_connections{address="192.0.2.1:4443",shard="1"} 22"#,
            r#"millrace_relay_shard_packets_received_total{address="192.0.2.1:4443",shard="1"} 23"#,
            r#"millrace_relay_shard_packets_sent_total{address="192.0.2.1:4443",shard="1"} 25"#,
            r#"millrace_relay_shard_packets_misdirected_total{address="192.0.2.1:4443",shard="1"} 24"#,
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
