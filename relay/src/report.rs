//! Builds the relay's status, which `/status` and `/metrics` show.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::Namespace;
use millrace_quic::{keys::KeySuite, plane::downstream};
use millrace_relay_cluster::{NamespaceRoute, RouteTable};
use millrace_relay_status::{self as status, RelayTotals, SentStatus, Status};
use millrace_transport::{
    Endpoint, ShardReport, Windows,
    offload::{ConnectionStatus, KeystreamCounts, OffloadInterface},
};
use millrace_webtransport::SessionRefused;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::{RelayEngine, admission::TooManySessions, hub::Hub, live::LiveTrack, session::RelaySession};
use millrace_access::{Access, ClientUse, UnreadSetting};

/// The parts of a relay that its status is built from.
pub struct StatusSources<'a> {
    pub hub: &'a Hub,
    pub access: &'a Access,
    pub engine: &'a RelayEngine,
    /// QUIC endpoints that accept connections from clients.
    pub endpoints: &'a [Endpoint],
    pub outgoing: &'a [Endpoint],
    /// The sessions that are open now.
    pub sessions: Vec<Arc<RelaySession>>,
    /// Number of handshakes with clients that are under way.
    pub handshakes: usize,
    /// Counters of closed sessions, and of refused connections.
    pub past: &'a PastCounts,
    pub windows: &'a Windows,
    pub uptime: Duration,
    pub draining: bool,
    pub trace_viewers: usize,
    /// The states of the relays of the cluster to which this relay connects.
    pub peers: Vec<status::ClusterPeerStatus>,
    /// The state of the store through which relays of the cluster are discovered.
    pub discovery: Option<status::ClusterDiscoveryStatus>,
}

/// Counters of closed sessions, and of connections and requests that were refused.
#[derive(Default)]
pub struct PastCounts {
    refused_sessions: AtomicU64,
    refused_of_clients: AtomicU64,
    refused_of_networks: AtomicU64,
    retries: AtomicU64,
    reclaimed_windows: AtomicU64,
    /// Refused WebTransport requests, by reason, in the order of [`SessionRefused::NAMES`].
    refused_requests: [AtomicU64; SessionRefused::NAMES.len()],
    sessions: Mutex<SessionSums>,
}

/// Sums of the sessions' own counters. They cover the sessions that have ended, or these and the open ones.
#[derive(Clone, Copy, Default)]
struct SessionSums {
    sessions: u64,
    totals: RelayTotals,
    drops: Drops,
    /// HTTP/3 requests, streams and datagrams outside the WebTransport sessions ([`millrace_webtransport::Foreign`]).
    foreign: [u64; 3],
}

/// Streams and datagrams that were dropped or reset on their way to subscribers, by reason.
#[derive(Clone, Copy, Default)]
struct Drops {
    resets: downstream::Resets,
    datagrams_expired: u64,
    datagrams_late: u64,
    datagrams_too_large: u64,
    datagrams_overflowed: u64,
}

impl Drops {
    fn from_stats(stats: &downstream::DownstreamStats) -> Self {
        Self {
            resets: stats.resets,
            datagrams_expired: stats.datagrams_expired,
            datagrams_late: stats.datagrams_late,
            datagrams_too_large: stats.datagrams_too_large,
            datagrams_overflowed: stats.datagrams_overflowed,
        }
    }

    fn add(&mut self, other: &Self) {
        let sum = &mut self.resets;
        let resets = &other.resets;
        sum.source += resets.source;
        sum.requested += resets.requested;
        sum.stopped += resets.stopped;
        sum.object_timeout += resets.object_timeout;
        sum.subgroup_timeout += resets.subgroup_timeout;
        sum.evicted += resets.evicted;
        sum.overflow += resets.overflow;
        sum.late += resets.late;
        sum.hopeless += resets.hopeless;
        sum.queue_full += resets.queue_full;
        self.datagrams_expired += other.datagrams_expired;
        self.datagrams_late += other.datagrams_late;
        self.datagrams_too_large += other.datagrams_too_large;
        self.datagrams_overflowed += other.datagrams_overflowed;
    }

    fn streams(&self) -> [(&'static str, u64); 10] {
        let resets = &self.resets;
        [
            ("reset_by_publisher", resets.source),
            ("cancelled", resets.requested),
            ("stopped_by_subscriber", resets.stopped),
            ("object_delivery_timeout", resets.object_timeout),
            ("subgroup_delivery_timeout", resets.subgroup_timeout),
            ("evicted", resets.evicted),
            ("late", resets.late),
            ("hopeless", resets.hopeless),
            ("queue_full", resets.queue_full),
            ("too_many_streams", resets.overflow),
        ]
    }

    fn datagrams(&self) -> [(&'static str, u64); 4] {
        [
            ("datagram_expired", self.datagrams_expired),
            ("datagram_late", self.datagrams_late),
            ("datagram_too_large", self.datagrams_too_large),
            ("datagram_queue_full", self.datagrams_overflowed),
        ]
    }

    fn counts_by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.streams().into_iter().chain(self.datagrams())
    }
}

impl PastCounts {
    pub fn count_refused_session(&self) {
        self.refused_sessions.fetch_add(1, Relaxed);
    }

    /// Counts a connection that was refused because the client or one of its networks has too many sessions.
    pub fn count_refused_of_client(&self, crowded: TooManySessions) {
        let count = match crowded {
            TooManySessions::Client => &self.refused_of_clients,
            TooManySessions::Network => &self.refused_of_networks,
        };
        count.fetch_add(1, Relaxed);
    }

    /// Counts a Retry packet, with which a client has to prove its address.
    pub fn count_retry(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    /// Counts a session that was closed to free the memory of its receive window.
    pub fn count_reclaimed_window(&self) {
        self.reclaimed_windows.fetch_add(1, Relaxed);
    }

    /// Counts a WebTransport request that was refused, by reason.
    pub fn count_refused_request(&self, refused: &SessionRefused) {
        let of = |name| SessionRefused::NAMES.iter().position(|known| *known == name);
        if let Some(counter) = refused.name().and_then(of).and_then(|at| self.refused_requests.get(at)) {
            counter.fetch_add(1, Relaxed);
        }
    }

    /// Adds the counters of a session that has ended to the totals.
    pub fn add(&self, session: &RelaySession) {
        let mut sums = self.sessions.lock();
        sums.sessions += 1;
        sums.add(session);
    }
}

impl SessionSums {
    fn add(&mut self, session: &RelaySession) {
        let stats = session.connection().downstream().stats();
        let seam = session.connection().stats();
        let unregistered = session.connection().offload(|offload| offload.unregistered(Instant::now()));
        let totals = &mut self.totals;
        totals.quinn.packets += seam.quinn_packets;
        totals.quinn.bytes += seam.quinn_bytes;
        totals.data_plane.packets += seam.data_plane_packets;
        totals.data_plane.bytes += seam.data_plane_bytes;
        totals.kernel.packets += stats.offloaded_packets;
        totals.kernel.bytes += stats.offloaded_bytes;
        totals.kernel_unregistered += unregistered.unwrap_or_default();
        if let Some(offload) = session.connection().offload_status() {
            let keystreams = keystreams(&offload);
            totals.keystreams.sealed.add(keystreams.sealed);
            totals.keystreams.opened.add(keystreams.opened);
        }
        totals.key_updates += seam.key_updates;
        totals.packets_lost += stats.recovery.packets_lost;
        totals.packets_marked += stats.recovery.marked;
        totals.bytes_retransmitted += stats.retransmitted_bytes;
        totals.streams_opened += stats.streams_opened;
        totals.datagrams_sent += stats.datagrams_sent;
        self.drops.add(&Drops::from_stats(&stats));
        for (sum, count) in self.foreign.iter_mut().zip(session.connection().foreign().counts()) {
            *sum += count;
        }
    }

    fn streams_reset(&self) -> u64 {
        self.drops.streams().iter().map(|(_, count)| count).sum()
    }
}

impl StatusSources<'_> {
    pub fn status(&self) -> Status {
        let sessions = &self.sessions;
        // The totals cover the open sessions and those that have ended.
        let mut sums = *self.past.sessions.lock();
        sessions.iter().for_each(|session| sums.add(session));
        let mut shown: Vec<_> = sessions.iter().map(|session| describe(session)).collect();
        shown.sort_by_key(|session| session.id);
        let mut tracks: Vec<_> = self.hub.tracks().iter().map(|track| describe_track(track)).collect();
        tracks.sort_by(|one, other| one.name.cmp(&other.name));
        let usage = self.hub.cache.usage();
        Status {
            upstream: self.hub.upstream.lock().clone(),
            cluster: self.describe_cluster(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engine: describe_engine(self.engine),
            uptime_s: self.uptime.as_secs_f64(),
            draining: self.draining,
            listen: self.endpoints.iter().map(Endpoint::local_addr).collect(),
            shards: self.endpoints.iter().chain(self.outgoing).flat_map(describe_shards).collect(),
            cache: status::CacheStatus {
                bytes: usage.bytes as u64,
                limit: self.hub.cache.limits().bytes as u64,
                groups: usage.groups as u64,
                evicted: usage.evicted,
                over_share: usage.over_share,
            },
            receive: status::ReceiveStatus {
                held: self.windows.held(),
                limit: self.windows.total(),
                refused: self.windows.refused(),
                limited: self.windows.limited(),
                reclaimed: self.past.reclaimed_windows.load(Relaxed),
            },
            drops: self.drops(&sums),
            access: self.describe_access(),
            trace_viewers: self.trace_viewers as u64,
            handshakes: self.handshakes as u64,
            tasks: Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks() as u64),
            totals: self.totals(&sums, sessions.len() as u64),
            sessions: shown,
            tracks,
        }
    }

    fn describe_cluster(&self) -> Option<status::ClusterStatus> {
        if !self.hub.is_in_cluster {
            return None;
        }
        let relays = self.sessions.iter().filter(|session| session.is_relay());
        let relays: Vec<_> =
            relays.map(|session| (session.id(), session.hop(), session.link_cost())).collect();
        self.hub.with_table(|table| {
            let mut links: Vec<_> = relays
                .iter()
                .map(|(session, hop, cost)| status::ClusterLinkStatus {
                    session: *session,
                    hop: hop.map_or(0, |hop| hop.id.0),
                    cost: *cost,
                    routes: table.count(*session) as u64,
                    suspect: table.is_suspect(*session),
                })
                .collect();
            links.sort_by_key(|link| link.session);
            let (namespaces, routes, carried) = table.size();
            status::ClusterStatus {
                hop: table.own().0,
                peers: self.peers.clone(),
                discovery: self.discovery.clone(),
                links,
                namespaces: namespaces as u64,
                routes: routes as u64,
                carried: carried as u64,
            }
        })
    }

    fn describe_access(&self) -> status::AccessStatus {
        let policy = self.access.policy();
        let (clients, networks) = self.access.clients();
        let refused = self.access.refused().into_iter();
        status::AccessStatus {
            open: policy.is_open(),
            rules: policy.rule_count() as u64,
            keys: policy.tokens.keys.len() as u64,
            revoked: policy.tokens.revoked_count() as u64,
            unproven: self.access.unproven().count() as u64,
            unread: self.access.unread().into_iter().map(unread).collect(),
            refused: refused.map(|(reason, count)| (reason.to_owned(), count)).collect(),
            clients: clients.into_iter().map(client).collect(),
            networks: networks.into_iter().map(client).collect(),
        }
    }

    fn totals(&self, sums: &SessionSums, open: u64) -> RelayTotals {
        let counters = &self.hub.counters;
        RelayTotals {
            sessions: sums.sessions + open,
            retries: self.past.retries.load(Relaxed),
            requests: counters.requests.load(Relaxed),
            request_errors: counters.request_errors.load(Relaxed),
            fetch_waits: counters.fetch_waits.load(Relaxed),
            message_waits: counters.message_waits.load(Relaxed),
            publisher_searches: counters.publisher_searches.load(Relaxed),
            upstream_changes: counters.upstream_changes.load(Relaxed),
            reroutes: counters.reroutes.load(Relaxed),
            gaps_asked: counters.gaps_asked.load(Relaxed),
            gap_objects: counters.gap_objects.load(Relaxed),
            gaps_refused: counters.gaps_refused.load(Relaxed),
            gaps_timed_out: counters.gaps_timed_out.load(Relaxed),
            gaps_cut: counters.gaps_cut.load(Relaxed),
            sessions_on_demand: counters.sessions_on_demand.load(Relaxed),
            sessions_unneeded: counters.sessions_unneeded.load(Relaxed),
            routes_looped: counters.routes_looped.load(Relaxed),
            routes_refused: counters.routes_refused.load(Relaxed),
            renditions_down: counters.renditions_down.load(Relaxed),
            renditions_up: counters.renditions_up.load(Relaxed),
            objects_received: counters.objects_received.load(Relaxed),
            object_bytes_received: counters.object_bytes_received.load(Relaxed),
            streams_reset: sums.streams_reset(),
            send_calls: self.endpoints.iter().chain(self.outgoing).map(|one| one.sent().system_calls).sum(),
            ..sums.totals
        }
    }

    fn drops(&self, sums: &SessionSums) -> BTreeMap<String, u64> {
        let counters = &self.hub.counters;
        let counted = [
            ("session_limit", self.past.refused_sessions.load(Relaxed)),
            ("client_session_limit", self.past.refused_of_clients.load(Relaxed)),
            ("network_session_limit", self.past.refused_of_networks.load(Relaxed)),
            ("protocol_violation", counters.protocol_violations.load(Relaxed)),
            ("unknown_track_alias", counters.unknown_alias.load(Relaxed)),
            ("duplicate_subgroup", counters.duplicate_subgroups.load(Relaxed)),
            ("handed_over_subgroup", counters.handed_over_subgroups.load(Relaxed)),
            ("standby", counters.standby_subgroups.load(Relaxed)),
            ("expired_subgroup", counters.expired_subgroups.load(Relaxed)),
            ("backup_publisher_limit", counters.backups_passed_over.load(Relaxed)),
            ("malformed_track", counters.malformed_tracks.load(Relaxed)),
            ("duplicate_datagram", counters.duplicate_datagrams.load(Relaxed)),
        ];
        let refused = self.past.refused_requests.each_ref().map(|count| count.load(Relaxed));
        let of_http = ["http_request", "http_stream", "http_datagram"].into_iter().zip(sums.foreign);
        let counted = counted.into_iter().chain(SessionRefused::NAMES.into_iter().zip(refused));
        let counted = counted.chain(of_http).chain(sums.drops.counts_by_reason());
        counted.map(|(reason, count)| (reason.to_owned(), count)).collect()
    }
}

fn describe_shards(endpoint: &Endpoint) -> Vec<status::ShardStatus> {
    let describe = |(shard, report): (usize, ShardReport)| status::ShardStatus {
        address: endpoint.local_addr(),
        shard: shard as u64,
        connections: report.connections as u64,
        received: report.received,
        misdirected: report.misdirected,
        sent: SentStatus { packets: report.sent.packets, bytes: report.sent.bytes },
    };
    endpoint.shards().into_iter().enumerate().map(describe).collect()
}

/// Returns the counters that are not 0, by name.
fn outcomes(counts: impl IntoIterator<Item = (&'static str, u64)>) -> BTreeMap<String, u64> {
    let counts = counts.into_iter().filter(|(_, count)| *count > 0);
    counts.map(|(name, count)| (name.to_owned(), count)).collect()
}

fn keystreams(offload: &ConnectionStatus) -> status::Keystreams {
    let [sealed, opened] = offload
        .keystreams
        .map(|KeystreamCounts { hit, stale, miss }| status::KeystreamStatus { hit, stale, miss });
    status::Keystreams { sealed, opened }
}

fn client(used: ClientUse) -> status::ClientStatus {
    status::ClientStatus {
        address: used.network.address,
        prefix: used.network.length,
        requests: used.requests,
        requests_refused: used.refused,
        tracks: used.tracks,
        cache_bytes: used.cache_bytes,
        fetched_bytes: used.fetched_bytes,
        receive_bytes: used.receive_bytes,
    }
}

fn unread(unread: UnreadSetting) -> status::UnreadStatus {
    status::UnreadStatus { what: unread.what, reason: unread.reason }
}

fn fill(used: u32, max: u32) -> status::FillStatus {
    status::FillStatus { used: used.into(), max: max.into() }
}

fn interface(interface: &OffloadInterface) -> status::InterfaceStatus {
    status::InterfaceStatus {
        name: interface.name.clone(),
        mechanism: interface.attached.clone().ok(),
        detached: interface.attached.clone().err(),
    }
}

/// Describes the routes to namespaces below `prefix`. The answer is truncated after a bounded number of namespaces.
pub fn describe_routes(table: &RouteTable, prefix: &Namespace) -> status::RoutesStatus {
    /// The most namespaces that one response to a query for routes contains.
    const MOST: usize = 10_000;
    let mut found = table.below(prefix);
    let namespaces = found.by_ref().take(MOST).map(|namespace| status::RoutedNamespace {
        namespace: namespace.typed().to_string(),
        routes: table
            .routes(namespace)
            .into_iter()
            .map(|route| describe_route(table, namespace, route))
            .collect(),
    });
    let namespaces = namespaces.collect();
    status::RoutesStatus { namespaces, truncated: found.next().is_some(), lookup: None }
}

fn describe_route(table: &RouteTable, namespace: &Namespace, route: &NamespaceRoute) -> status::RouteStatus {
    status::RouteStatus {
        session: route.key.link,
        path: route.path.hops().iter().map(|hop| hop.0).collect(),
        cost: route.cost,
        local: route.is_local,
        carried: table.is_carried(namespace, route.key.link),
        suspect: table.is_suspect(route.key.link),
    }
}

/// Returns the state of the engine, and of those sessions that send or receive media.
pub fn media(
    engine: &RelayEngine,
    sessions: &[Arc<RelaySession>],
) -> (status::EngineStatus, Vec<status::RelaySessionStatus>) {
    let active = sessions.iter().filter(|session| !session.is_idle());
    (describe_engine(engine), active.map(|session| describe(session)).collect())
}

fn describe_engine(engine: &RelayEngine) -> status::EngineStatus {
    let (name, reason) = engine.describe();
    let offload = engine.offload.as_ref().map(|offload| offload.status()).unwrap_or_default();
    status::EngineStatus {
        name: name.to_owned(),
        reason,
        interfaces: engine.interfaces().iter().map(interface).collect(),
        streams: offload.streams,
        prepared: offload.prepared,
        deferred: offload.deferred,
        deferred_dropped: offload.deferred_dropped,
        ticks: offload.ticks,
        commands_waiting: offload.commands_waiting,
        commands: offload.commands,
        commands_coalesced: offload.commands_coalesced,
        records_waiting: offload.offloads_waiting,
        records_taken: offload.offloads_taken,
        records: offload
            .records
            .into_iter()
            .map(|(table, used, max)| (table.to_owned(), fill(used, max)))
            .collect(),
        received: offload.received.map(outcomes),
        frames: offload.frames.map(outcomes),
        openings: offload.openings.map(outcomes),
        copies: offload.copies.map(outcomes),
        further_runs: offload.further_runs.map(outcomes),
    }
}

fn describe(session: &RelaySession) -> status::RelaySessionStatus {
    let unregistered = session.connection().offload(|offload| offload.unregistered(Instant::now()));
    let offload = session.connection().offload_status();
    let (stats, estimate) = {
        let downstream = session.connection().downstream();
        (downstream.stats(), downstream.estimate(Instant::now()))
    };
    let seam = session.connection().stats();
    let path = session.connection().quic.stats().path;
    let roles = session.roles();
    status::RelaySessionStatus {
        id: session.id(),
        remote: session.connection().quic.remote_address(),
        upstream: session.is_upstream(),
        relay: session.is_relay(),
        draft: session.draft().number(),
        publisher: roles.publisher,
        subscriber: roles.subscriber,
        age_s: session.age().as_secs_f64(),
        rtt_us: estimate.rtt.as_micros() as u64,
        path_queue_us: estimate.path_queue.as_micros() as u64,
        queue_us: estimate.queue.as_micros() as u64,
        cwnd: stats.window,
        bandwidth: estimate.bandwidth,
        loss: estimate.loss,
        ecn: stats.ecn.name().to_owned(),
        packets_marked: stats.recovery.marked,
        in_flight: stats.bytes_in_flight,
        path_mtu: path.current_mtu,
        cipher: session.connection().suite().map_or("unknown", suite_name).to_owned(),
        quinn: SentStatus { packets: seam.quinn_packets, bytes: seam.quinn_bytes },
        data_plane: SentStatus { packets: seam.data_plane_packets, bytes: seam.data_plane_bytes },
        kernel: SentStatus { packets: stats.offloaded_packets, bytes: stats.offloaded_bytes },
        kernel_deferred: offload.as_ref().map_or(0, |offload| offload.deferred),
        kernel_unregistered: unregistered.unwrap_or_default(),
        keystreams: offload.as_ref().map(keystreams),
        kernel_record: offload
            .as_ref()
            .and_then(|offload| offload.standing)
            .map(|standing| standing.name().to_owned()),
        kernel_ready: offload.as_ref().map(|offload| offload.is_ready),
        kernel_copies: offload.map(|offload| outcomes(offload.copies)),
        packets_lost: stats.recovery.packets_lost,
        bytes_retransmitted: stats.retransmitted_bytes,
        subscriptions: roles.subscriptions,
        publications: roles.publications,
        pending: stats.pending_bytes,
        drops: outcomes(Drops::from_stats(&stats).counts_by_reason()),
        identity: session.authority().identity().map(|identity| identity.to_string()),
        requests: session.authority().usage().admitted(),
        requests_refused: session.authority().usage().refused(),
        tracks: session.authority().usage().tracks(),
    }
}

fn describe_track(track: &LiveTrack) -> status::RelayTrackStatus {
    let held = track.data.held();
    let upstreams = track.upstreams();
    status::RelayTrackStatus {
        name: track.name().to_string(),
        alias: upstreams.first().map_or(0, |upstream| upstream.alias),
        publishers: upstreams.len() as u64,
        subscribers: track.subscription_count() as u64,
        groups_cached: held.groups as u64,
        objects_cached: held.objects as u64,
        bytes_cached: held.bytes as u64,
        largest: track.data.largest().map(|largest| (largest.group, largest.object)),
        owner: track.owner().map(|owner| owner.to_string()),
    }
}

fn suite_name(suite: KeySuite) -> &'static str {
    match suite {
        KeySuite::ChaCha20Poly1305 => "TLS_CHACHA20_POLY1305_SHA256",
        KeySuite::Aes128Gcm => "TLS_AES_128_GCM_SHA256",
        KeySuite::Aes256Gcm => "TLS_AES_256_GCM_SHA384",
    }
}
