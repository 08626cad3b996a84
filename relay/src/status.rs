//! What a running relay says about itself.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub engine: Engine,
    pub uptime_s: f64,
    /// GOAWAY has been sent and new sessions are refused.
    pub draining: bool,
    pub listen: Vec<SocketAddr>,
    pub sessions: Vec<Session>,
    pub tracks: Vec<Track>,
    pub cache: Cache,
    #[serde(default)]
    pub receive: Receive,
    /// What was not forwarded, by reason, since start.
    pub drops: BTreeMap<String, u64>,
    /// Who may do what, and what was refused.
    #[serde(default)]
    pub access: Access,
    /// Who watches single packets at the moment.
    #[serde(default)]
    pub trace_viewers: u64,
    /// The relay that is asked for what nobody here publishes, if there is to be one.
    #[serde(default)]
    pub upstream: Option<Upstream>,
    /// Handshakes under way.
    #[serde(default)]
    pub handshakes: u64,
    /// Tasks of the runtime that the relay is in.
    #[serde(default)]
    pub tasks: u64,
    pub totals: Totals,
}

/// The relay that is asked for what nobody here publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Upstream {
    /// Name and port.
    pub host: String,
    /// The session with it; none: it is away.
    pub session: Option<u64>,
    /// Why it is away.
    pub reason: String,
}

/// The authoriser.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Access {
    /// Anyone may do anything.
    pub open: bool,
    pub rules: u64,
    /// That tokens are checked with.
    pub keys: u64,
    /// IDs of tokens that are not good any more.
    pub revoked: u64,
    /// Sessions and requests that were refused or ended, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Those that have sessions.
    pub clients: Vec<Client>,
    /// Wider networks that several of them are in; each may have a multiple of what one client may.
    pub networks: Vec<Client>,
    /// Sessions that have shown no right yet, or have none any more.
    pub unproven: u64,
    /// Settings whose file could not be read, or used, when it was read last: what they say now does not hold.
    pub unread: Vec<Unread>,
}

/// A setting whose file could not be read, or used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// The setting and its file.
    pub what: String,
    pub reason: String,
}

/// Use by the sessions of one client, or of one network, together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Client {
    /// Its own, or the network's.
    pub address: IpAddr,
    /// Bits of the address that make the client (32, or 64 of IPv6) or the network.
    #[serde(default)]
    pub prefix: u8,
    /// Requests that were let in.
    pub requests: u64,
    /// For want of its budget.
    pub requests_refused: u64,
    /// Tracks that its requests hold.
    pub tracks: u64,
    /// Of the groups that it published.
    #[serde(default)]
    pub cache_bytes: u64,
    /// Of objects in its FETCH responses.
    #[serde(default)]
    pub fetched_bytes: u64,
    /// That it may send, or has sent without being read.
    #[serde(default)]
    pub receive_bytes: u64,
}

/// How sealed packets reach the network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Engine {
    /// `user` or `kernel`.
    pub name: String,
    /// Why this one.
    pub reason: String,
    /// Where the kernel engine is to forward from.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Streams to subscribers that the kernel sends on at the moment.
    #[serde(default)]
    pub streams: u64,
    /// Streams to subscribers that the kernel may open.
    #[serde(default)]
    pub prepared: u64,
    /// Packets that did not wake the relay when they came, since nothing in them was left to do.
    #[serde(default, rename = "quiet")]
    pub deferred: u64,
    /// Of these, packets that were lost for want of room: 0 unless the relay did not get to run for long.
    #[serde(default, rename = "quiet_dropped")]
    pub deferred_dropped: u64,
    /// Times that the kernel engine has looked what the kernel did, where no packet had it look.
    #[serde(default)]
    pub ticks: u64,
    /// Sessions whose changes (path, keys, streams to be given back) wait for the kernel engine's thread.
    #[serde(default)]
    pub commands_waiting: u64,
    /// Changes of sessions that the kernel engine was told.
    #[serde(default)]
    pub commands: u64,
    /// Changes that newer ones of the same session have replaced before they were carried out.
    #[serde(default)]
    pub commands_coalesced: u64,
    /// Sessions that have shown a right and wait for one of the kernel's records.
    #[serde(default)]
    pub records_waiting: u64,
    /// Records of subscribers that publishers have taken.
    #[serde(default)]
    pub records_taken: u64,
    /// How full the kernel engine's tables are: `downstreams` has sessions, `upstreams` those of publishers, `egresses` streams to
    /// subscribers.
    #[serde(default)]
    pub records: BTreeMap<String, Fill>,
    /// What became of packets that arrived on the kernel engine's interfaces, by reason.
    #[serde(default)]
    pub received: Option<BTreeMap<String, u64>>,
    /// What became of frames of streams that the kernel may forward; all but `good` are userspace's.
    #[serde(default)]
    pub frames: Option<BTreeMap<String, u64>>,
    /// What became of streams of publishers that began without the kernel forwarding them already; all but `bound` are opened
    /// by userspace.
    #[serde(default)]
    pub openings: Option<BTreeMap<String, u64>>,
    /// What became of copies that the kernel could have sent, by reason; all but `sent` are userspace's.
    #[serde(default)]
    pub copies: Option<BTreeMap<String, u64>>,
    /// Runs that went on with a packet which becomes more copies than fit one run, by how they ended.
    #[serde(default)]
    pub further_runs: Option<BTreeMap<String, u64>>,
}

/// Entries of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    pub used: u64,
    pub max: u64,
}

/// An interface that media is forwarded from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    /// `TCX` or `clsact`, where it is attached to.
    pub mechanism: Option<String>,
    /// Why it is not.
    pub detached: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Session {
    pub id: u64,
    pub remote: SocketAddr,
    /// This relay opened the session, towards its upstream.
    pub upstream: bool,
    /// The draft of MoQ Transport that it speaks, its number.
    #[serde(default)]
    pub draft: u8,
    /// Has announced a namespace or published a track.
    pub publisher: bool,
    /// Has subscribed or fetched.
    pub subscriber: bool,
    pub age_s: f64,
    /// Smoothed round-trip time, microseconds.
    pub rtt_us: u64,
    /// What of that is queues on the path: what it is longer than the shortest sample, microseconds.
    #[serde(default)]
    pub path_queue_us: u64,
    /// How long the oldest of what is sent live has waited here, microseconds.
    #[serde(default)]
    pub queue_us: u64,
    /// Congestion window that both senders share, bytes.
    pub cwnd: u64,
    /// What the path is thought to carry, bytes per second; absent where the congestion controller does not estimate it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Share of media packets that were lost in the last 5 to 10 seconds, 0 to 1; absent where there were fewer than 20.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Whether media packets are marked ECT(0): `off`, `testing` and `unknown` until it is known whether marks arrive, `capable`
    /// where they do, `failed` where they do not.
    #[serde(default)]
    pub ecn: String,
    /// Packets that the path has marked CE.
    #[serde(default)]
    pub packets_marked: u64,
    /// Bytes of both senders that are neither acknowledged nor lost.
    pub in_flight: u64,
    /// Largest UDP payload that the path is known to carry, bytes.
    pub path_mtu: u16,
    pub cipher: String,
    /// Sent by the QUIC stack: handshake, control, acknowledgements.
    pub quinn: Sent,
    /// Sent by the data plane in userspace: media.
    pub data_plane: Sent,
    /// Sent by the kernel: media.
    #[serde(default)]
    pub kernel: Sent,
    /// Why the kernel does nothing for this session: `cipher suite`, it has not that one.
    #[serde(default)]
    pub kernel_refused: Option<String>,
    /// Whether this session has one of the kernel's records (`held`), or why not: `no right yet`, `waiting`, `taken for a publisher`; none:
    /// there is no kernel engine, or it refuses the session.
    #[serde(default)]
    pub kernel_record: Option<String>,
    /// Whether the kernel has keys for this session and knows the way to it; none: it does nothing for it.
    #[serde(default)]
    pub kernel_ready: Option<bool>,
    /// What became of copies that the kernel could have sent to this session, by reason; none: it never can.
    /// `not_arriving` counts times that nothing of what it sent had arrived.
    #[serde(default)]
    pub kernel_copies: Option<BTreeMap<String, u64>>,
    /// Packets of a subscriber that did not wake the relay when they came: acknowledgements.
    #[serde(default, rename = "kernel_quiet")]
    pub kernel_deferred: u64,
    /// Packets that the kernel sent without registering them: always 0.
    #[serde(default)]
    pub kernel_unregistered: u64,
    /// Packets that the kernel sealed and opened by where their keystream came from; none: it never does either.
    #[serde(default)]
    pub keystreams: Option<Keystreams>,
    pub packets_lost: u64,
    pub bytes_retransmitted: u64,
    /// Subscriptions and fetches that are open.
    pub subscriptions: u64,
    /// Tracks that this session publishes.
    pub publications: u64,
    /// Media that is owed and not yet sent, bytes.
    pub pending: u64,
    /// What was not sent to it, or not all of it, by reason; those that are not 0.
    #[serde(default)]
    pub drops: BTreeMap<String, u64>,
    /// As whom it was let in; none before its SETUP.
    #[serde(default)]
    pub identity: Option<String>,
    /// Requests that were let in.
    #[serde(default)]
    pub requests: u64,
    /// For want of its budget.
    #[serde(default)]
    pub requests_refused: u64,
    /// Tracks that its requests hold.
    #[serde(default)]
    pub tracks: u64,
}

/// Packets of the kernel by where their keystream came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keystreams {
    pub sealed: KeystreamUse,
    pub opened: KeystreamUse,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeystreamUse {
    /// It had been computed ahead.
    #[serde(rename = "ahead")]
    pub hit: u64,
    /// The kernel computed it: another packet's was in its place.
    pub stale: u64,
    /// The kernel computed it: nothing was in its place.
    #[serde(rename = "dry")]
    pub miss: u64,
}

impl KeystreamUse {
    pub fn add(&mut self, other: Self) {
        self.hit += other.hit;
        self.stale += other.stale;
        self.miss += other.miss;
    }

    /// By the names that metrics and tables have.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        [("ahead", self.hit), ("stale", self.stale), ("dry", self.miss)]
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    pub packets: u64,
    /// UDP payload bytes.
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Track {
    /// Full track name in the draft's serialized form.
    pub name: String,
    /// Alias in the streams to subscribers.
    pub alias: u64,
    pub publishers: u64,
    pub subscribers: u64,
    pub groups_cached: u64,
    pub objects_cached: u64,
    pub bytes_cached: u64,
    /// Group and object ID of the largest object seen.
    pub largest: Option<(u64, u64)>,
    /// Whose it is, while somebody publishes it.
    #[serde(default)]
    pub owner: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    pub bytes: u64,
    pub limit: u64,
    pub groups: u64,
    /// Groups evicted since start.
    pub evicted: u64,
    /// Those of them whose client had more than its share.
    #[serde(default)]
    pub over_share: u64,
}

/// Receive windows of all connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receive {
    /// Bytes that peers may send or have sent without having been read.
    pub held: u64,
    pub limit: u64,
    /// Connections for which there was no room.
    pub refused: u64,
    /// Times that a window did not grow, since its client's share was used up.
    #[serde(default)]
    pub limited: u64,
    /// Sessions that were closed since they were idle and others needed the room of their windows.
    #[serde(default)]
    pub reclaimed: u64,
}

/// Counters since start, closed sessions included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    pub sessions: u64,
    /// Peers that had to prove their address, since there were many handshakes under way.
    pub retries: u64,
    pub requests: u64,
    /// Requests answered with REQUEST_ERROR.
    pub request_errors: u64,
    /// Times that a FETCH response waited, since its client had fetched as much as it may.
    pub fetch_waits: u64,
    /// Times that a message of a request under way, such as REQUEST_UPDATE, waited, since its client had sent as many requests as it may.
    pub message_waits: u64,
    /// Searches for the publishers of a track that had none; each SUBSCRIBE that waits for one begins some.
    pub publisher_searches: u64,
    /// Times that a subscription went on with a lower, or a higher, rendition.
    pub renditions_down: u64,
    pub renditions_up: u64,
    pub objects_received: u64,
    /// Payload bytes of the objects received.
    pub object_bytes_received: u64,
    pub quinn: Sent,
    pub data_plane: Sent,
    pub kernel: Sent,
    /// Packets that the kernel sent without registering them: always 0.
    pub kernel_unregistered: u64,
    pub keystreams: Keystreams,
    pub packets_lost: u64,
    /// Packets that paths have marked CE.
    pub packets_marked: u64,
    pub bytes_retransmitted: u64,
    /// Times that a session of subscribers went on with new keys.
    pub key_updates: u64,
    pub streams_opened: u64,
    pub streams_reset: u64,
    pub datagrams_sent: u64,
    /// Send system calls of the data plane.
    pub send_calls: u64,
    /// Log lines that were not written, since there were too many like them. Counted by whoever writes the log, as the next is.
    pub log_lines_suppressed: u64,
    /// Log lines lost to a slow or full disk.
    pub log_lines_dropped: u64,
}
