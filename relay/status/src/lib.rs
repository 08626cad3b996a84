//! What a relay reports about itself: its [status](Status), and the events of its [trace].

#![deny(missing_docs)]

mod counters;
pub mod trace;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

pub use counters::OperatorCounters;
pub use millrace_relay_cluster::LookupStatus;
use serde::{Deserialize, Serialize};

/// The state of a relay, which `/status` returns as JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The version of Millrace.
    pub version: String,
    /// The engine that sends media.
    pub engine: EngineStatus,
    /// Seconds since the relay started.
    pub uptime_s: f64,
    /// True if the relay has sent GOAWAY and refuses new sessions.
    pub draining: bool,
    /// The addresses that the relay listens on.
    pub listen: Vec<SocketAddr>,
    /// The shards of all addresses: the sockets between which sessions are divided.
    pub shards: Vec<ShardStatus>,
    /// The sessions that are open.
    pub sessions: Vec<RelaySessionStatus>,
    /// The tracks that are subscribed, published or cached.
    pub tracks: Vec<RelayTrackStatus>,
    /// The use of the object cache.
    pub cache: CacheStatus,
    /// The use of the memory budget for receive windows.
    pub receive: ReceiveStatus,
    /// Objects and streams that were not forwarded since the start, by reason.
    pub drops: BTreeMap<String, u64>,
    /// The access rules, and the requests that were refused.
    pub access: AccessStatus,
    /// Number of viewers of `/trace` that are connected.
    pub trace_viewers: u64,
    /// The upstream relay, which is asked for tracks that nobody publishes here. Absent if none is configured.
    pub upstream: Option<UpstreamStatus>,
    /// The cluster that the relay belongs to. Absent if it is in none.
    pub cluster: Option<ClusterStatus>,
    /// Number of handshakes under way.
    pub handshakes: u64,
    /// Number of asynchronous tasks in the relay's process.
    pub tasks: u64,
    /// Counters since the relay started.
    pub totals: RelayTotals,
}

/// The upstream relay, which is asked for tracks that nobody publishes here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpstreamStatus {
    /// Host name and port of the upstream relay.
    pub host: String,
    /// The ID of the session with the upstream relay. Absent if there is none.
    pub session: Option<u64>,
    /// The reason why there is no session with the upstream relay. Empty if there is a session.
    pub reason: String,
    /// The configured upstream relays, in order of preference.
    pub sources: Vec<UpstreamSource>,
}

/// A configured upstream relay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpstreamSource {
    /// Host name and port of the upstream relay.
    pub host: String,
    /// Why the last attempt to connect failed. Empty if it succeeded.
    pub reason: String,
}

/// The state of the cluster, as this relay sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterStatus {
    /// The relay's own hop ID.
    pub hop: u64,
    /// Relays that this one connects to: those that the settings name, then those that the discovery store names.
    pub peers: Vec<ClusterPeerStatus>,
    /// The store through which relays are discovered, if the settings name one.
    pub discovery: Option<ClusterDiscoveryStatus>,
    /// Sessions with relays of the cluster that announce routes to this one.
    pub links: Vec<ClusterLinkStatus>,
    /// Number of namespaces that are announced in the cluster.
    pub namespaces: u64,
    /// Number of routes to the announced namespaces, including those of publishers with a session at this relay.
    pub routes: u64,
    /// Number of namespaces whose tracks this relay receives from other relays.
    pub carried: u64,
}

/// The state of the store through which relays of a cluster are discovered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterDiscoveryStatus {
    /// The store: `etcd`, or the file or the host that a list of relays is read from.
    pub store: String,
    /// Number of relays that the discovery store names, without this relay.
    pub found: u64,
    /// True if the store contains this relay's record. Always false for a list of relays.
    pub registered: bool,
    /// Why the last attempt to read the store failed. Empty if it succeeded.
    pub error: String,
    /// Number of failed attempts to read the store since the relay started.
    pub failures: u64,
    /// The namespaces that are registered and looked up in the store. Absent if relays announce them to each other.
    pub lookup: Option<LookupStatus>,
}

/// A relay of the cluster to which this relay connects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterPeerStatus {
    /// Host name and port of the other relay.
    pub host: String,
    /// The ID of the session with the relay. Absent if there is none.
    pub session: Option<u64>,
    /// Why there is no session with the relay. Empty if there is a session.
    pub reason: String,
    /// True if the relay was discovered through a store and is not in the settings.
    pub found: bool,
    /// True if the session was begun because a namespace was asked for, and ends when nobody needs it.
    pub on_demand: bool,
}

/// A session with another relay of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterLinkStatus {
    /// The session's ID.
    pub session: u64,
    /// The hop ID that the other relay announces. 0 if it announces none.
    pub hop: u64,
    /// The cost of receiving from the other relay.
    pub cost: u64,
    /// Number of namespaces that the other relay announces.
    pub routes: u64,
    /// True if the other relay does not answer, or has sent GOAWAY. Routes through this session are then used only if
    /// there is no other route.
    pub suspect: bool,
}

/// The routes to the namespaces below a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoutesStatus {
    /// The namespaces, each with its routes.
    pub namespaces: Vec<RoutedNamespace>,
    /// True if there are more namespaces than the answer may contain.
    pub truncated: bool,
    /// The discovery store's answer about the prefix. Absent if relays announce namespaces to each other.
    pub lookup: Option<NamespaceLookupStatus>,
}

/// The discovery store's answer about a namespace, and the attempts to get it from the relays that have registered it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NamespaceLookupStatus {
    /// True if the store's answer is in memory. Otherwise, the store was not asked lately, or did not answer.
    pub known: bool,
    /// The relays that have registered the namespace or a prefix of it.
    pub registered: Vec<RegisteredRelay>,
    /// The relays that were tried last, the nearest first.
    pub tried: Vec<TriedRelay>,
    /// Seconds since they were tried.
    pub tried_s: u64,
}

/// A relay that has registered a namespace in the discovery store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegisteredRelay {
    /// Host name and port of the relay.
    pub host: String,
    /// The registered namespace, as text in the form that commands accept.
    pub namespace: String,
    /// True if the relay's present run has registered it. A registration of an earlier run is not used.
    pub usable: bool,
}

/// An attempt to get a namespace from a relay that has registered it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TriedRelay {
    /// Host name and port of the relay.
    pub host: String,
    /// Why the relay cannot be used. Empty if it has announced the namespace.
    pub failure: String,
}

/// The routes to a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoutedNamespace {
    /// The namespace, as text in the form that commands accept.
    pub namespace: String,
    /// The routes to the namespace, in order of preference.
    pub routes: Vec<RouteStatus>,
}

/// A route to a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouteStatus {
    /// The ID of the session that announces the route.
    pub session: u64,
    /// The hop IDs on the path, beginning with the publisher's relay.
    pub path: Vec<u64>,
    /// The cost of the route, including the link to the relay that announces it.
    pub cost: u64,
    /// True if the namespace's publisher has its session with this relay.
    pub local: bool,
    /// True if this relay receives tracks of the namespace by this route.
    pub carried: bool,
    /// True if the relay that announces the route does not answer, or has sent GOAWAY.
    pub suspect: bool,
}

/// The access control: its rules and keys, and how many requests, tracks and bytes clients use of what they are
/// allowed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AccessStatus {
    /// True if there are no rules, so that every client may do everything.
    pub open: bool,
    /// Number of configured access rules.
    pub rules: u64,
    /// Number of keys with which access tokens are verified.
    pub keys: u64,
    /// Number of IDs of revoked access tokens.
    pub revoked: u64,
    /// Sessions and requests that were refused or ended, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Clients that have sessions, with the requests, tracks and bytes that each uses.
    pub clients: Vec<ClientStatus>,
    /// Networks that contain several of the clients. A network is allowed a multiple of what one client is allowed.
    pub networks: Vec<ClientStatus>,
    /// Sessions that have not proved an access right yet, or whose right has ended.
    pub unproven: u64,
    /// Settings whose file could not be read the last time. Their previous contents stay in effect.
    pub unread: Vec<UnreadStatus>,
}

/// A setting whose file could not be read or used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadStatus {
    /// The setting and the file that could not be read.
    pub what: String,
    /// The reason why the file could not be read or used.
    pub reason: String,
}

/// The resources that all sessions of one client, or of one network, use together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// The address of the client, or the first address of the network.
    pub address: IpAddr,
    /// Length of the address prefix in bits: 32 or 64 for a client, less for a network.
    #[serde(default)]
    pub prefix: u8,
    /// Requests of the client or network that were admitted.
    pub requests: u64,
    /// Requests that were refused because the request budget was used up.
    pub requests_refused: u64,
    /// Tracks that the client's requests refer to.
    pub tracks: u64,
    /// Bytes in the cache that groups published by the client occupy.
    #[serde(default)]
    pub cache_bytes: u64,
    /// Bytes of objects sent in FETCH responses to the client.
    #[serde(default)]
    pub fetched_bytes: u64,
    /// Bytes of receive windows that the client occupies: bytes that it may send, or has sent without being read.
    #[serde(default)]
    pub receive_bytes: u64,
}

/// The engine that sends media, and its counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineStatus {
    /// Name of the engine: `user` or `kernel`.
    pub name: String,
    /// The reason why the relay uses this engine.
    pub reason: String,
    /// Network interfaces that the kernel engine should be attached to.
    pub interfaces: Vec<InterfaceStatus>,
    /// Number of streams to subscribers that the kernel currently sends.
    pub streams: u64,
    /// Number of prepared streams to subscribers that the kernel may open by itself.
    pub prepared: u64,
    /// Received packets that did not wake the relay, because only the kernel had to act on them.
    #[serde(rename = "quiet")]
    pub deferred: u64,
    /// Packets that were deferred (did not wake the relay) and were dropped because their socket's receive buffer was
    /// full. This happens only if the relay's process gets no CPU time for a long time.
    #[serde(rename = "quiet_dropped")]
    pub deferred_dropped: u64,
    /// Times that the kernel engine read the kernel's reports on a timer, without a packet that woke it.
    pub ticks: u64,
    /// Sessions with a change, such as a new network path or new keys, that waits for the kernel engine's thread.
    pub commands_waiting: u64,
    /// Changes of sessions, such as a new network path or new keys, that were passed to the kernel engine.
    pub commands: u64,
    /// Changes of sessions, such as a new network path or new keys, that were never applied, because a newer change of
    /// the session replaced them.
    pub commands_coalesced: u64,
    /// Sessions that have proved an access right and wait for a record in the kernel's tables.
    pub records_waiting: u64,
    /// Times that a record in the kernel's tables was taken from a subscriber's session for a publisher's.
    pub records_taken: u64,
    /// Entries in use in each kernel table: `downstreams` has the sessions, `upstreams` those of publishers, `egresses`
    /// the streams to subscribers.
    pub records: BTreeMap<String, FillStatus>,
    /// Packets that arrived on the kernel engine's interfaces, by outcome.
    pub received: Option<BTreeMap<String, u64>>,
    /// Stream frames that the kernel could forward, by outcome. Userspace handles all but `good`.
    pub frames: Option<BTreeMap<String, u64>>,
    /// Publishers' streams that began while the kernel could open subscribers' streams for them, by outcome. Userspace
    /// opens all but `bound`.
    pub openings: Option<BTreeMap<String, u64>>,
    /// Copies of publishers' frames for one subscriber each, which the kernel tried to send, by outcome. Userspace
    /// sends all but `sent`.
    pub copies: Option<BTreeMap<String, u64>>,
    /// Additional runs of the BPF program for packets with more copies than fit into one run, by their outcome.
    pub further_runs: Option<BTreeMap<String, u64>>,
}

/// The use of one of the kernel engine's tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FillStatus {
    /// Number of the table's entries in use.
    pub used: u64,
    /// Number of entries that the table can hold.
    pub max: u64,
}

/// A network interface that the kernel engine should be attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceStatus {
    /// The interface's name, such as `eth0`.
    pub name: String,
    /// How the program is attached to the interface: `TCX` or `clsact`.
    pub mechanism: Option<String>,
    /// The reason why the kernel engine is not attached to the interface. Absent if it is.
    pub detached: Option<String>,
}

/// A MoQ session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelaySessionStatus {
    /// The session's ID, unique in this process.
    pub id: u64,
    /// The peer's address and port.
    pub remote: SocketAddr,
    /// True if this is the session with the upstream relay.
    pub upstream: bool,
    /// True if the peer is a relay of the cluster.
    #[serde(default)]
    pub relay: bool,
    /// The number of the MoQ Transport draft that the session uses.
    #[serde(default)]
    pub draft: u8,
    /// True if the peer has announced a namespace or published a track.
    pub publisher: bool,
    /// True if the peer has subscriptions or FETCH responses.
    pub subscriber: bool,
    /// Seconds since the session was accepted or connected.
    pub age_s: f64,
    /// Smoothed round-trip time, microseconds.
    pub rtt_us: u64,
    /// The part of `rtt_us` that is caused by queues on the path: the excess over the shortest sample, in microseconds.
    #[serde(default)]
    pub path_queue_us: u64,
    /// How long the oldest unsent live data has waited in the relay, in microseconds.
    #[serde(default)]
    pub queue_us: u64,
    /// Congestion window, shared by userspace and the kernel, in bytes.
    pub cwnd: u64,
    /// Estimated bandwidth of the path, bytes per second. Absent where the congestion controller does not estimate it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Share of media packets lost in the last 5 to 10 seconds, from 0 to 1. Absent if fewer than 20 were sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Whether media packets are marked ECT(0): `testing` and `unknown` until it is known if the marks arrive, then
    /// `capable` or `failed`; `off` if ECN is not used.
    #[serde(default)]
    pub ecn: String,
    /// Packets that the path has marked CE (congestion experienced).
    #[serde(default)]
    pub packets_marked: u64,
    /// Bytes sent by userspace and the kernel that are neither acknowledged nor lost.
    pub in_flight: u64,
    /// Largest UDP payload that is known to fit the path, in bytes.
    pub path_mtu: u16,
    /// The TLS cipher suite of the connection, or `unknown`.
    pub cipher: String,
    /// Packets sent by the QUIC stack: handshakes, control messages, acknowledgements.
    pub quinn: SentStatus,
    /// Packets with media sent by userspace.
    pub data_plane: SentStatus,
    /// Packets with media sent by the kernel.
    #[serde(default)]
    pub kernel: SentStatus,
    /// Whether the session has an entry (record) in the kernel's tables, without which the kernel sends nothing for it.
    /// `held` if it has one. `no right yet`: it is not known yet that the client may subscribe; `waiting`: no entry is
    /// free; `taken for a publisher`: a publisher got it. Absent without a kernel engine.
    pub kernel_record: Option<String>,
    /// Whether the kernel has the keys and the network path of this session, and can decrypt its packets if media
    /// arrives. Absent if it cannot send for it.
    pub kernel_ready: Option<bool>,
    /// Copies of publishers' frames that the kernel tried to send to this session, by outcome. Absent if it cannot send
    /// for it. `not_arriving` counts how often the kernel stopped sending for a while, because the subscriber
    /// acknowledged none of its packets.
    pub kernel_copies: Option<BTreeMap<String, u64>>,
    /// Acknowledgement packets of the subscriber that did not wake the relay.
    #[serde(default, rename = "kernel_quiet")]
    pub kernel_deferred: u64,
    /// Packets that the kernel sent without reporting them. Always 0; any other value is a bug.
    #[serde(default)]
    pub kernel_unregistered: u64,
    /// Packets that the kernel encrypted and decrypted, by whether their keystream was precomputed. Absent if it did
    /// neither.
    pub keystreams: Option<Keystreams>,
    /// Packets with media that were lost, sent by userspace or the kernel.
    pub packets_lost: u64,
    /// Stream bytes that were sent again after a loss.
    pub bytes_retransmitted: u64,
    /// Number of the peer's open subscriptions and FETCH responses.
    pub subscriptions: u64,
    /// Number of tracks that the peer publishes.
    pub publications: u64,
    /// Media that waits to be sent to the peer, in bytes.
    pub pending: u64,
    /// Objects and streams that were not sent to the peer, or only in part, by reason. Counters that are 0 are left
    /// out.
    #[serde(default)]
    pub drops: BTreeMap<String, u64>,
    /// The identity under which the peer was admitted. Absent before its SETUP has arrived.
    pub identity: Option<String>,
    /// Number of the peer's requests that were admitted.
    #[serde(default)]
    pub requests: u64,
    /// Requests of the peer that were refused because its request budget was used up.
    #[serde(default)]
    pub requests_refused: u64,
    /// Tracks that the peer's requests refer to.
    #[serde(default)]
    pub tracks: u64,
}

/// The packets that the kernel encrypted and decrypted, by whether their keystream was precomputed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keystreams {
    /// Packets that the kernel has encrypted.
    pub sealed: KeystreamStatus,
    /// Packets that the kernel has decrypted.
    pub opened: KeystreamStatus,
}

/// Numbers of packets, by whether their keystream was precomputed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeystreamStatus {
    /// Packets whose keystream was precomputed.
    #[serde(rename = "ahead")]
    pub hit: u64,
    /// Packets whose keystream the kernel computed itself, because the slot of the keystream ring held another packet's
    /// keystream.
    pub stale: u64,
    /// Packets whose keystream the kernel computed itself, because the slot of the keystream ring was empty.
    #[serde(rename = "dry")]
    pub miss: u64,
}

impl KeystreamStatus {
    /// Adds another connection's counters of encrypted or decrypted packets to these.
    pub fn add(&mut self, other: Self) {
        self.hit += other.hit;
        self.stale += other.stale;
        self.miss += other.miss;
    }

    /// Returns the counters under the names that metrics and tables use.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        [("ahead", self.hit), ("stale", self.stale), ("dry", self.miss)]
    }
}

/// Packets and bytes of one sender: the QUIC stack, the relay's sender of media in userspace, or the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentStatus {
    /// Number of UDP datagrams that this sender has sent.
    pub packets: u64,
    /// Number of UDP payload bytes that this sender has sent.
    pub bytes: u64,
}

/// One of the sockets at an address of the relay, with its share of the sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// The address of the socket. Connections to other relays have an address of their own.
    pub address: SocketAddr,
    /// The number of the shard among those at its address, from 0.
    pub shard: u64,
    /// Number of connections that belong to the shard.
    pub connections: u64,
    /// Number of UDP datagrams that the socket has received.
    pub received: u64,
    /// Number of packets that the socket has received although their session belongs to another shard, and which were
    /// lost. 0 in normal operation: any other value means that the kernel does not distribute packets as it should.
    pub misdirected: u64,
    /// Packets with media that the shard has sent. The kernel engine's are not among them.
    pub sent: SentStatus,
}

/// A track, its publishers and subscriptions, and its use of the cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelayTrackStatus {
    /// Full track name, in the text form that the MoQ Transport draft defines.
    pub name: String,
    /// The track alias of the first publisher.
    pub alias: u64,
    /// Number of sessions that publish the track.
    pub publishers: u64,
    /// Number of subscriptions to the track.
    pub subscribers: u64,
    /// Number of the track's groups in the cache.
    pub groups_cached: u64,
    /// Number of the track's objects in the cache.
    pub objects_cached: u64,
    /// Bytes of the track in the cache.
    pub bytes_cached: u64,
    /// Group ID and object ID of the track's largest object so far.
    pub largest: Option<(u64, u64)>,
    /// The identity that owns the track while it is published.
    pub owner: Option<String>,
}

/// The use of the object cache by all tracks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Number of the cache's bytes in use.
    pub bytes: u64,
    /// The most bytes that the cache may use.
    pub limit: u64,
    /// Number of groups in the cache, of all tracks.
    pub groups: u64,
    /// Number of groups that were evicted from the cache since the relay started.
    pub evicted: u64,
    /// Groups that were evicted because their client exceeded its share of the cache.
    #[serde(default)]
    pub over_share: u64,
}

/// The memory budget for the receive windows of all connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReceiveStatus {
    /// Bytes of receive windows in use: bytes that peers may send, or have sent without being read.
    pub held: u64,
    /// Largest permitted value of [`Self::held`], bytes.
    pub limit: u64,
    /// Connections that were refused because the budget for receive windows was used up.
    pub refused: u64,
    /// Times that a receive window did not grow because its client's share of the memory budget was used up.
    pub limited: u64,
    /// Idle sessions that were closed because other sessions needed the memory of their receive windows.
    pub reclaimed: u64,
}

/// Counters since the relay started, including closed sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RelayTotals {
    /// Number of sessions that the relay has accepted or opened.
    pub sessions: u64,
    /// Clients that had to prove their address (Retry) because many handshakes were under way.
    pub retries: u64,
    /// Number of requests that peers have sent.
    pub requests: u64,
    /// Number of peers' requests that were answered with REQUEST_ERROR.
    pub request_errors: u64,
    /// Times that a FETCH response waited because its client had exceeded its fetch rate.
    pub fetch_waits: u64,
    /// Times that a message on a request stream, such as REQUEST_UPDATE, waited because its client had exceeded its
    /// request rate.
    pub message_waits: u64,
    /// Searches for publishers of a track that had none. A SUBSCRIBE that waits for a publisher causes several.
    pub publisher_searches: u64,
    /// Times that the relay left an upstream relay that did not answer, or returned to a preferred one.
    pub upstream_changes: u64,
    /// Times that a track moved from one relay of the cluster to another.
    pub reroutes: u64,
    /// FETCHes that the relay sent for objects that a track missed while its source was away or changed.
    pub gaps_asked: u64,
    /// Objects that these FETCHes have brought.
    pub gap_objects: u64,
    /// FETCHes for missed objects that the source refused.
    pub gaps_refused: u64,
    /// FETCHes for missed objects that the source did not answer in time.
    pub gaps_timed_out: u64,
    /// FETCHes for missed objects whose response broke off, or had more bytes than the relay accepts.
    pub gaps_cut: u64,
    /// Sessions with other relays that were begun because a namespace was asked for.
    pub sessions_on_demand: u64,
    /// Sessions with other relays that were closed because nobody needed them any more.
    pub sessions_unneeded: u64,
    /// Announcements and requests of other relays that were refused because they had passed this relay before.
    pub routes_looped: u64,
    /// Announcements of other relays that were refused because they are not allowed or too many.
    pub routes_refused: u64,
    /// Times that a subscription was switched to a lower rendition.
    pub renditions_down: u64,
    /// Times that a subscription was switched to a higher rendition.
    pub renditions_up: u64,
    /// Number of objects that the relay has received from publishers.
    pub objects_received: u64,
    /// Number of payload bytes of the objects that the relay has received from publishers.
    pub object_bytes_received: u64,
    /// Packets sent by the QUIC stack: handshakes, control messages, acknowledgements.
    pub quinn: SentStatus,
    /// Packets with media sent by userspace.
    pub data_plane: SentStatus,
    /// Packets with media sent by the kernel.
    pub kernel: SentStatus,
    /// Packets that the kernel sent without reporting them. Always 0; any other value is a bug.
    pub kernel_unregistered: u64,
    /// Packets that the kernel encrypted and decrypted, by whether their keystream was precomputed.
    pub keystreams: Keystreams,
    /// Packets with media that were lost, sent by userspace or the kernel.
    pub packets_lost: u64,
    /// Packets that paths have marked CE (congestion experienced).
    pub packets_marked: u64,
    /// Stream bytes that were sent again after a loss.
    pub bytes_retransmitted: u64,
    /// Number of key updates on connections to subscribers.
    pub key_updates: u64,
    /// Number of streams that were opened to subscribers.
    pub streams_opened: u64,
    /// Number of streams to subscribers that were reset.
    pub streams_reset: u64,
    /// Number of objects that were sent to subscribers as datagrams.
    pub datagrams_sent: u64,
    /// Number of system calls with which userspace sent media.
    pub send_calls: u64,
    /// Log lines that were suppressed because there were too many like them. The program that writes the log counts
    /// them.
    pub log_lines_suppressed: u64,
    /// Log lines that were lost because the disk was slow or full. The program that writes the log counts them.
    pub log_lines_dropped: u64,
}
