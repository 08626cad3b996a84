//! Settings of `millrace relay`: flags and a TOML file with the same names, checked as a whole.
//!
//! [`Settings`] has the given values, [`Config`] the checked ones with defaults. Every setting is one line of the
//! `settings!` list, which generates the flag, the key of the file and the merging of both. A flag overrides the file.

mod access;
mod adaptive;
mod discovery;
mod queue;
mod tls;
mod values;

use std::{
    collections::HashMap,
    fmt,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::Range,
    path::PathBuf,
    time::Duration,
};

use clap::ValueEnum;
use millrace_base::settings::unknown;
use millrace_moq::Draft;
use millrace_relay::{AdaptiveMode, DelayRule, LadderRule, Origins, access::AccessRule};
use millrace_relay_kernel::KernelLimits;
use millrace_transport::Dscp;
use serde::{Deserialize, de};
use toml::de::{DeTable, ValueDeserializer};
use url::Url;

pub use self::{
    access::{AccessConfig, KeyFile, RevokedFile},
    adaptive::AdaptiveChoice,
    discovery::{DISCOVERY, DiscoveryConfig, DiscoveryStore, LookupConfig},
    queue::{DropPolicy, MaxDelay, QueueConfig},
    tls::{CipherSuite, ClusterConfig, IdentityConfig, PeerConfig, SYSTEM_ROOTS, UpstreamConfig},
    values::{ByteCount, CodePoint, DraftNumber, DurationValue, ListenOn, RelayUrl, ShardCount, name},
};

use millrace_daemon::{
    http::{self, ListenAddr, token::TokenFile},
    log::{self, LogFormat},
    render::in_words,
};

/// The checked settings of a relay.
#[derive(Clone, Debug)]
pub struct Config {
    /// UDP addresses to listen on. Each socket accepts its own address family only: `[::]` means IPv6.
    pub listen: Vec<SocketAddr>,
    /// Settings of access control.
    pub access: AccessConfig,
    /// The engine that sends and forwards packets.
    pub engine: EngineChoice,
    /// Network interfaces on which engine `kernel` forwards arriving packets and the packet gate (an XDP filter) runs.
    /// Empty: the interfaces that have the listen addresses.
    pub interfaces: Vec<String>,
    /// The interfaces on which the packet gate, an XDP filter, protects the relay's ports.
    pub gate: GateChoice,
    /// Largest number of sessions of one client; `None` for any number.
    pub gate_sessions: Option<u32>,
    /// Whether engine `kernel` attaches its BPF program again after the program was detached, or after its network
    /// interface was created again.
    pub reattach: bool,
    /// Memory that engine `kernel` uses for precomputed packet keystreams, in bytes.
    pub keystream_bytes: u64,
    /// Limits of the tables of engine `kernel`.
    pub kernel: KernelLimits,
    /// The source of the relay's certificate.
    pub identity: IdentityConfig,
    /// File with the secret of stateless resets; `None` if the secret is derived from the private key.
    pub reset_key_file: Option<PathBuf>,
    /// Origins of web pages that may connect; `None` if browsers may not connect.
    pub web: Option<Origins>,
    /// Supported drafts of MoQ Transport, in the server's order of preference.
    pub drafts: Vec<Draft>,
    /// TLS cipher suites, in the server's order of preference.
    pub cipher_suites: Vec<CipherSuite>,
    /// Congestion control of all connections.
    pub congestion_control: CongestionControl,
    /// Number of packets of a session after which its keys are updated. The cipher suite's limit applies if it is less.
    pub max_packets_per_key: u64,
    /// Limits of the media that is queued for subscribers.
    pub queue: QueueConfig,
    /// Whether subscribers get the rendition that fits the capacity of their path.
    pub adaptive: AdaptiveMode,
    /// Whether subscribers may name alternate tracks (renditions of the same content), of which they get the one that
    /// fits their path's bandwidth.
    pub switching_sets: bool,
    /// Limit of the media that the relay caches over all tracks, in bytes.
    pub cache_bytes: u64,
    /// Limit of bytes that peers may send before the relay has read them, over all connections.
    pub receive_bytes: u64,
    /// Age of cached groups beyond which they are evicted.
    pub cache_age: Duration,
    /// Time without a packet after which a session is closed.
    pub idle_timeout: Duration,
    /// Largest number of sessions.
    pub max_sessions: usize,
    /// Largest number of tracks that the relay keeps.
    pub max_tracks: usize,
    /// Time for which subscriptions wait for a publisher whose session was lost.
    pub linger: Duration,
    /// Largest number of MoQ requests that one session may have open.
    pub max_requests: usize,
    /// Time between sending GOAWAY and closing the sessions that are still open.
    pub drain_timeout: Duration,
    /// URI in GOAWAY to which clients move.
    pub goaway_uri: Option<Url>,
    /// Number of sockets at each address, each with tasks of its own.
    pub shards: usize,
    /// Whether packets are sent with UDP generic segmentation offload.
    pub gso: Gso,
    /// DSCP of all sent QUIC packets.
    pub dscp: Dscp,
    /// Whether media packets are marked ECT(0) on paths that support ECN.
    pub ecn: bool,
    /// Upstream relays and the credentials for them; `None` if the relay has none.
    pub upstream: Option<UpstreamConfig>,
    /// Settings of the cluster; `None` if the relay belongs to none.
    pub cluster: Option<ClusterConfig>,
    /// Address that metrics, health and status are served on.
    pub http: Option<SocketAddr>,
    /// Settings that decide which HTTP clients are served.
    pub http_access: http::access::HttpFlags,
    /// Settings of the log.
    pub log: log::Settings,
    /// File to which the TLS secrets of all sessions are appended, in the NSS key log format. For debugging only.
    pub key_log_file: Option<PathBuf>,
}

/// The setting `engine`: what sends and forwards the relay's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineChoice {
    /// The fastest engine that works on this machine
    Auto,
    /// Userspace sends all packets, through sockets
    User,
    /// BPF programs in the kernel forward packets, and userspace sends the rest
    Kernel,
}

/// The setting `gate`: on which interfaces the packet gate, an XDP filter, runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GateChoice {
    /// Run the packet gate on the interfaces whose driver supports XDP
    Auto,
    /// Run the packet gate on every interface with XDP in the driver, or fail to start
    On,
    /// Run the packet gate on every interface, with generic XDP where the driver does not support XDP
    Generic,
    #[allow(missing_docs, reason = "a comment would be printed in the help, and the name says it")]
    Off,
}

/// The setting `congestion-control`: the congestion control of the relay's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CongestionControl {
    /// CUBIC (RFC 9438)
    Cubic,
    /// NewReno (RFC 9002, section 7)
    #[value(name = "newreno")]
    NewReno,
    /// BBRv3 (draft-ietf-ccwg-bbr)
    Bbr,
}

/// UDP generic segmentation offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "comments would be printed in the help, and the names say it")]
pub enum Gso {
    /// Use GSO where the kernel supports it
    Auto,
    On,
    Off,
}

const PORT: u16 = 4443;
const MAX_SESSIONS: usize = 10_000;
/// Largest default of `kernel-sessions`. The kernel allocates the memory for all of them at the start.
const KERNEL_SESSIONS: usize = 16_384;
const LINGER: Duration = Duration::from_secs(5);
/// Longest value of `linger`, the time for which subscriptions wait for a lost publisher. A publisher that is away for
/// longer will not come back.
const MAX_LINGER: Duration = Duration::from_secs(3600);
const CACHE_BYTES: u64 = 256 << 20;
const RECEIVE_BYTES: u64 = 1 << 30;

/// Least value of `max-packets-per-key`. An update takes a round trip, and with fewer packets media would often wait
/// for it.
const MIN_PACKETS_PER_KEY: u64 = 100;

macro_rules! settings {
    ($($(#[$meta:meta])* $field:ident: $type:ty,)*) => {
        /// Unchecked settings, from flags or the file. A setting that neither contains is `None`.
        #[derive(clap::Args, Clone, Debug, Default)]
        pub struct Settings {
            $($(#[$meta])* pub $field: Option<$type>,)*
            /// The `[[allow]]` tables, which only the settings file can have.
            #[arg(skip)]
            pub allow: Vec<AccessRule>,
            /// The `[[issuer]]` tables, which only the settings file can have.
            #[arg(skip)]
            pub issuer: Vec<access::Issuer>,
            /// The `[[delay]]` tables, which only the settings file can have.
            #[arg(skip)]
            pub delay: Vec<DelayRule>,
            /// The `[[ladder]]` tables, which only the settings file can have.
            #[arg(skip)]
            pub ladder: Vec<LadderRule>,
            /// The `[[peer]]` tables, which only the settings file can have.
            #[arg(skip)]
            pub peer: Vec<PeerConfig>,
            /// The `[discovery]` table, which only the settings file can have.
            #[arg(skip)]
            pub discovery: Option<DiscoveryConfig>,
        }

        /// Returns the keys of all settings, in the order of the documentation.
        pub fn keys() -> Vec<String> {
            vec![$(stringify!($field).replace('_', "-")),*]
        }

        impl Settings {
            /// Sets the setting with the name `key` to the value from the TOML file.
            fn set(&mut self, key: &str, value: ValueDeserializer<'_>) -> Result<(), toml::de::Error> {
                match key.replace('-', "_").as_str() {
                    $(stringify!($field) => self.$field = Some(<$type>::deserialize(value)?),)*
                    _ => return Err(de::Error::custom("unknown key")),
                }
                Ok(())
            }

            fn is_set(&self, key: &str) -> bool {
                match key.replace('-', "_").as_str() {
                    $(stringify!($field) => self.$field.is_some(),)*
                    _ => false,
                }
            }

            fn or(self, other: Self) -> Self {
                let allow = if self.allow.is_empty() { other.allow } else { self.allow };
                let issuer = if self.issuer.is_empty() { other.issuer } else { self.issuer };
                let delay = if self.delay.is_empty() { other.delay } else { self.delay };
                let ladder = if self.ladder.is_empty() { other.ladder } else { self.ladder };
                let peer = if self.peer.is_empty() { other.peer } else { self.peer };
                let discovery = self.discovery.or(other.discovery);
                Self { $($field: self.$field.or(other.$field),)* allow, issuer, delay, ladder, peer, discovery }
            }
        }
    };
}

settings! {
    // `help` instead of a doc comment, in which rustdoc would take `[::]` for a link.
    #[allow(missing_docs, reason = "`help` describes the setting")]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "ADDR:PORT",
        help = "UDP address to serve MoQ on, or :PORT for all addresses, repeatable [default: 127.0.0.1:4443 and [::1]:4443]"
    )]
    listen: Vec<ListenOn>,
    /// Let anyone who reaches the relay publish and watch, without access rules, token keys or client-ca
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    public: bool,
    /// File with keys that verify clients' tokens: PEM, JWK or JWKS, repeatable; read again when it changes
    #[arg(long, value_name = "FILE")]
    token_keys: Vec<PathBuf>,
    /// File with an HMAC secret, as raw bytes, that verifies clients' tokens, repeatable; read again when it changes
    #[arg(long, value_name = "FILE")]
    token_secrets: Vec<PathBuf>,
    /// File with the IDs of revoked tokens, one per line; read again when it changes
    #[arg(long, value_name = "FILE")]
    token_revoked: PathBuf,
    /// Name of this relay as an audience of tokens: a token with audiences must name one of these, repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    token_audience: Vec<String>,
    /// Issuer whose tokens the keys of token-keys and token-secrets verify, repeatable [default: any without an
    /// [[issuer]] table in the file]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    token_issuer: Vec<String>,
    /// Limit of the tokens that one session may register, bytes [default: 16KiB]
    #[arg(long, value_name = "BYTES")]
    token_cache_bytes: ByteCount,
    /// Root certificates that clients' certificates are checked against, PEM; clients without a certificate may connect
    /// too
    #[arg(long, value_name = "FILE")]
    client_ca: PathBuf,
    /// Limit of sessions that are not authorized for anything yet; beyond it the oldest is closed [default: 1024, or
    /// half of max-sessions]
    #[arg(long, value_name = "N")]
    unproven_sessions: usize,
    /// Limit of requests per second in one session [default: 1000]
    #[arg(long, value_name = "N")]
    session_requests: u64,
    /// Limit of requests per second from one client (an IPv4 address or IPv6 /64); 8 times as many from a /24 or /56,
    /// 64 times from a /48 [default: 10000]
    #[arg(long, value_name = "N")]
    client_requests: u64,
    /// Limit of tracks in the open requests of one session: PUBLISH, SUBSCRIBE, FETCH, TRACK_STATUS [default: 10000]
    #[arg(long, value_name = "N")]
    session_tracks: u64,
    /// Limit of subscriptions of one session to the same track at a time [default: 4]
    #[arg(long, value_name = "N")]
    session_same_track: u64,
    /// Limit of tracks in the open requests of one client [default: 100000]
    #[arg(long, value_name = "N")]
    client_tracks: u64,
    /// Limit of cached media from one publishing client, bytes or with KiB, MiB, GiB [default: all of cache-bytes]
    #[arg(long, value_name = "BYTES")]
    client_cache_bytes: ByteCount,
    /// Limit of bytes per second that one client gets by FETCH [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    client_fetch_bytes: ByteCount,
    /// Limit of unread bytes that one client may send, in addition to 64 KiB for each session [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    client_receive_bytes: ByteCount,
    /// Engine that sends media packets [default: auto]
    #[arg(long, value_enum)]
    engine: EngineChoice,
    /// Network interface that packets arrive on, for engine kernel and the packet gate (an XDP filter), repeatable
    /// [default: those of the listen addresses]
    #[arg(long, value_delimiter = ',', value_name = "IF")]
    interface: Vec<String>,
    /// Guard the relay's ports against floods, at XDP [default: auto]
    #[arg(long, value_enum)]
    gate: GateChoice,
    /// Limit of sessions of one client (an IPv4 address or IPv6 /64); 8 times as many of a /24 or /56, 64 times of a
    /// /48 [default: any number]
    #[arg(long, value_name = "N")]
    gate_sessions: u32,
    /// Attach engine kernel again after its program was detached or its interface was replaced [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    reattach: bool,
    /// Memory of engine kernel for keystreams computed ahead of time, bytes or with KiB, MiB, GiB [default: 32MiB]
    #[arg(long, value_name = "BYTES")]
    keystream_bytes: ByteCount,
    /// Number of publishers' sessions that engine kernel has room for [default: 256]
    #[arg(long, value_name = "N")]
    kernel_publishers: u32,
    /// Number of sessions that engine kernel has room for, publishers' included [default: as
    /// max-sessions, at most 16384]
    #[arg(long, value_name = "N")]
    kernel_sessions: u32,
    /// Number of streams to subscribers that engine kernel has room for [default: 65536]
    #[arg(long, value_name = "N")]
    kernel_streams: u32,
    /// Number of tracks whose new streams engine kernel forwards from their first byte, by opening streams to
    /// subscribers itself [default: 1024]
    #[arg(long, value_name = "N")]
    kernel_tracks: u32,
    /// Number of copies that engine kernel makes of a packet in one run of its program, before other packets get a turn
    /// [default: 64]
    #[arg(long, value_name = "N")]
    kernel_copies_per_run: u32,
    /// Limit of runs of the kernel engine's BPF program for one packet; userspace sends the other copies [default: 64]
    #[arg(long, value_name = "N")]
    kernel_runs: u32,
    /// File with the relay's certificate chain, PEM; read again when it changes and on SIGHUP
    #[arg(long, value_name = "FILE")]
    tls_cert: PathBuf,
    /// File with the private key of the relay's certificate, PEM
    #[arg(long, value_name = "FILE")]
    tls_key: PathBuf,
    /// Use a self-signed certificate made at start-up, for trying out; its fingerprint is logged [default without
    /// --tls-cert]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    tls_self_signed: bool,
    /// Write the self-signed certificate to this file, PEM, for --tls-root of clients
    #[arg(long, value_name = "FILE")]
    tls_self_signed_out: PathBuf,
    /// File with the secret of stateless resets, which tell clients that the relay was restarted; created if it does
    /// not exist. Never use the same on two machines [default: derived from the private key, the machine ID and the
    /// address]
    #[arg(long, value_name = "FILE")]
    reset_key_file: PathBuf,
    /// Serve browsers as well, over WebTransport on the same addresses [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    webtransport: bool,
    /// Origin of web pages that may connect, such as https://example.org, repeatable [default: any]
    #[arg(long, value_delimiter = ',', value_name = "ORIGIN")]
    web_origin: Vec<String>,
    /// Draft of MoQ Transport that the relay speaks, repeatable; the newest that a peer knows is used [default: 18 to
    /// 22]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    drafts: Vec<DraftNumber>,
    /// TLS cipher suites in order of preference, repeatable [default: all, as listed]
    #[arg(long, value_enum, value_delimiter = ',')]
    cipher_suites: Vec<CipherSuite>,
    /// Congestion control of connections that carry media [default: bbr]
    #[arg(long, value_enum)]
    congestion_control: CongestionControl,
    /// Limit of packets that a session encrypts with one key, before it updates the key [default: what the cipher suite
    /// allows]
    #[arg(long, value_name = "N")]
    max_packets_per_key: u64,
    /// Time that media may wait for a slow subscriber before it is dropped, seconds, or "off" [default: 0.25]
    #[arg(long, value_name = "SECONDS")]
    max_delay: MaxDelay,
    /// Media to drop when a subscriber's path has too little capacity [default: live]
    #[arg(long, value_enum)]
    drop_policy: DropPolicy,
    /// Limit of media that waits for one subscriber, bytes or with KiB, MiB, GiB [default: 16MiB]
    #[arg(long, value_name = "BYTES")]
    queue_bytes: ByteCount,
    /// Limit of datagrams that wait for all subscribers together, bytes or with KiB, MiB, GiB [default: 64MiB]
    #[arg(long, value_name = "BYTES")]
    datagram_bytes: ByteCount,
    /// Send each subscriber the rendition (quality) that its path has capacity for [default: off]
    #[arg(long, value_enum)]
    adaptive: AdaptiveChoice,
    /// Let subscribers name alternate tracks (renditions of the same content) and get the one that their path has
    /// capacity for; the protocol extension may still change [default: false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    switching_sets: bool,
    /// Limit of all cached media, bytes or with KiB, MiB, GiB [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    cache_bytes: ByteCount,
    /// Limit of unread bytes that peers may send over all connections, bytes or with KiB, MiB, GiB [default: 1GiB]
    #[arg(long, value_name = "BYTES")]
    receive_bytes: ByteCount,
    /// Age after which cached groups are dropped, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    cache_seconds: DurationValue,
    /// Close a session that has been silent for this time, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    idle_timeout: DurationValue,
    /// Time that subscriptions are kept after their publisher left, in case it comes back, seconds; 0 ends them at once
    /// [default: 5]
    #[arg(long, value_name = "SECONDS")]
    linger: DurationValue,
    /// Limit of sessions at the same time [default: 10000]
    #[arg(long, value_name = "N")]
    max_sessions: usize,
    /// Limit of tracks at the same time [default: 100000]
    #[arg(long, value_name = "N")]
    max_tracks: usize,
    /// Limit of open requests in one session [default: 1000]
    #[arg(long, value_name = "N")]
    max_requests: usize,
    /// Time that sessions have to leave after GOAWAY when the relay ends, seconds [default: 10]
    #[arg(long, value_name = "SECONDS")]
    drain_timeout: DurationValue,
    /// Relay that GOAWAY sends clients to: moqt://HOST:PORT, or https:// [default: the same address]
    #[arg(long, value_name = "URL")]
    goaway_uri: RelayUrl,
    /// Number of sockets (shards) at each address, between which sessions are divided so that they use several CPUs;
    /// auto is one for each CPU, up to 16 [default: auto]
    #[arg(long, value_name = "N")]
    shards: ShardCount,
    /// UDP segmentation offload (GSO) for sending [default: auto]
    #[arg(long, value_enum)]
    gso: Gso,
    /// DSCP of the packets that are sent: a number up to 63, or a name such as cs5, af41, ef [default: 0]
    #[arg(long, value_name = "DSCP")]
    dscp: CodePoint,
    /// Use ECN: mark media packets ECT(0) if the path lets them through, and slow down when it marks them CE
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    ecn: bool,
    /// Upstream relay to ask for tracks that have no publisher here: moqt://HOST:PORT, or https:// for WebTransport;
    /// repeatable, the preferred one first
    #[arg(long, value_delimiter = ',', value_name = "URL")]
    upstream: Vec<RelayUrl>,
    /// Root certificates that the upstream relay's certificate is checked against, PEM [default: the system's]
    #[arg(long, value_name = "FILE")]
    upstream_tls_root: PathBuf,
    /// Accept any certificate from the upstream relay: for trying out only
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    upstream_tls_disable_verify: bool,
    /// File with the token for the upstream relay, read again for each connection
    #[arg(long, value_name = "FILE")]
    upstream_token: PathBuf,
    /// File with this relay's certificate chain as a client of the upstream relay, PEM
    #[arg(long, value_name = "FILE")]
    upstream_tls_cert: PathBuf,
    /// File with the private key of the certificate for the upstream relay, PEM
    #[arg(long, value_name = "FILE")]
    upstream_tls_key: PathBuf,
    /// Exchange routes to namespaces with other relays [default: true with cluster-peer]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    cluster: bool,
    /// Relay of the cluster to connect to, with the credentials of upstream-token and upstream-tls-cert, repeatable:
    /// moqt://HOST:PORT
    #[arg(long, value_delimiter = ',', value_name = "URL")]
    cluster_peer: Vec<RelayUrl>,
    /// URL of this relay for the other relays of its cluster, which the store of [discovery] names: moqt://HOST:PORT
    #[arg(long, value_name = "URL")]
    cluster_url: RelayUrl,
    /// Hop ID of this relay in the cluster, unique among its relays [default: drawn at each start]
    #[arg(long, value_name = "N")]
    cluster_hop: u64,
    /// Cost of receiving from this relay, as other relays see it; routes of the lowest cost are taken [default: 1]
    #[arg(long, value_name = "N")]
    cluster_cost: u64,
    /// Largest number of namespaces that one relay may announce [default: 10000]
    #[arg(long, value_name = "N")]
    cluster_routes: usize,
    /// Address that /metrics, /healthz and /status are served on, or "off" [default: 127.0.0.1:9184]
    #[arg(long, value_name = "ADDR:PORT")]
    http: ListenAddr,
    /// File with the token that HTTP requests must show, created if it does not exist, or "off" [default:
    /// /run/millrace/http.token for root, millrace/http.token in XDG_RUNTIME_DIR for others]
    #[arg(long, value_name = "FILE")]
    http_token_file: TokenFile,
    /// Host name that HTTP requests may use in addition to addresses and localhost, repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    http_name: Vec<String>,
    /// Log level (error, warn, info, debug, trace) or directives (info,millrace=debug) [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: String,
    /// Format of log lines [default: text]
    #[arg(long, value_enum)]
    log_format: LogFormat,
    /// Log to this file instead of standard error; opened again on SIGHUP
    #[arg(long, value_name = "FILE")]
    log_file: PathBuf,
    /// Append the TLS secrets of all sessions to this file: whoever reads it can decrypt the traffic
    #[arg(long, value_name = "FILE")]
    key_log_file: PathBuf,
}

/// A problem of one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// The location of the setting: `--flag`, or `FILE:LINE: key`.
    pub place: String,
    /// The problem as text.
    pub message: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// The list of all problems that were found in the settings of the file and the flags.
#[derive(Debug, thiserror::Error)]
pub struct ConfigErrors(pub Vec<ConfigProblem>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the relay's settings are not usable:")?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

/// Settings that a running relay cannot change until it restarts. Reloaded settings are checked together with these.
#[derive(Clone, Debug)]
pub struct RunningConfig {
    /// Listen addresses; where the settings had port 0, with the port that the kernel assigned.
    pub listen: Vec<SocketAddr>,
    /// Largest number of sessions.
    pub max_sessions: usize,
    /// Limits of the media that is queued for subscribers.
    pub queue: QueueConfig,
}

/// The error if reloaded settings would open the relay to everyone who reaches this address, on which it keeps
/// listening.
#[derive(Debug, thiserror::Error)]
#[error("the relay listens on {0} until it is restarted, and {reason}", reason = access::exposes(.0))]
pub struct Exposed(SocketAddr);

/// A configuration file: its name and its text.
pub struct ConfigFile<'a> {
    /// Name of the file, for error messages.
    pub name: &'a str,
    /// Contents of the file, in TOML.
    pub text: &'a str,
}

impl Config {
    /// Returns the settings of a running relay after a reload: `self`, with the values of `running` where only a
    /// restart can change them.
    ///
    /// # Errors
    /// Fails if the result would open the relay to everyone without the setting `public`.
    pub fn in_force(self, running: &RunningConfig) -> Result<Self, Exposed> {
        let RunningConfig { listen, max_sessions, queue } = running;
        // The check uses the addresses of the open sockets, since new listen addresses take effect only after a
        // restart.
        if let Some(addr) = self.access.exposed(listen) {
            return Err(Exposed(addr));
        }
        // The `[[delay]]` tables (per-namespace limits on how long media waits) are valid for one drop-policy only, and
        // only a restart can change the policy. If the reloaded settings name another policy, the previous delays stay.
        let delays = if self.queue.policy == queue.policy { self.queue.delays } else { queue.delays.clone() };
        let queue = QueueConfig { delays, ..queue.clone() };
        Ok(Self { listen: listen.clone(), max_sessions: *max_sessions, queue, ..self })
    }

    /// Merges flags and the file, where flags override the file, and checks the result.
    pub fn new(flags: Settings, file: Option<ConfigFile<'_>>) -> Result<Self, ConfigErrors> {
        let mut check = ConfigCheck { flags: flags.clone(), places: HashMap::new(), problems: Vec::new() };
        let settings = match file {
            Some(file) => flags.or(check.read(&file)),
            None => flags,
        };
        let config = check.config(settings);
        if check.problems.is_empty() { Ok(config) } else { Err(ConfigErrors(check.problems)) }
    }
}

/// A check of the settings that collects every problem it finds.
struct ConfigCheck {
    flags: Settings,
    /// The location in the file of each key that the file contains.
    places: HashMap<String, String>,
    problems: Vec<ConfigProblem>,
}

impl ConfigCheck {
    fn read(&mut self, file: &ConfigFile<'_>) -> Settings {
        let line = |span: Range<usize>| file.text[..span.start].matches('\n').count() + 1;
        let mut settings = Settings::default();
        let (table, syntax) = DeTable::parse_recoverable(file.text);
        for error in syntax {
            let place = format!("{}:{}", file.name, error.span().map_or(1, line));
            self.problems.push(ConfigProblem { place, message: error.message().to_owned() });
        }
        for (key, value) in table.into_inner() {
            let place = format!("{}:{}: {}", file.name, line(key.span()), key.get_ref());
            if key.get_ref() == access::ALLOW {
                self.rules(file, value, &mut settings);
            } else if key.get_ref() == access::ISSUER {
                self.issuers(file, value, &mut settings);
            } else if key.get_ref() == queue::DELAY {
                self.delays(file, value, &mut settings);
            } else if key.get_ref() == adaptive::LADDER {
                self.ladders(file, value, &mut settings);
            } else if key.get_ref() == tls::PEER {
                self.peers(file, value, &mut settings);
            } else if key.get_ref() == discovery::DISCOVERY {
                match DiscoveryConfig::read(value) {
                    Ok(discovery) => settings.discovery = Some(discovery),
                    Err(message) => self.problems.push(ConfigProblem { place, message }),
                }
            } else if !keys().iter().any(|known| known == key.get_ref()) {
                self.problems.push(ConfigProblem { place, message: unknown(key.get_ref(), &keys()) });
            } else if let Err(error) = settings.set(key.get_ref(), value.into()) {
                self.problems.push(ConfigProblem { place, message: in_words(error.message()) });
            } else {
                self.places.insert(key.into_inner().into_owned(), place);
            }
        }
        settings
    }

    fn problem(&mut self, key: &str, message: impl Into<String>) {
        // A flag overrides the file, so a problem is located at the flag if both have the setting.
        let place = match self.places.get(key) {
            Some(place) if !self.flags.is_set(key) => place.clone(),
            _ => format!("--{key}"),
        };
        self.problems.push(ConfigProblem { place, message: message.into() });
    }

    fn config(&mut self, mut settings: Settings) -> Config {
        let access = self.access(&mut settings);
        let queue = self.queue(&mut settings);
        let adaptive = self.adaptive(&mut settings);
        let cluster = self.cluster(&mut settings);
        let engine = settings.engine.unwrap_or(EngineChoice::Auto);
        let limits = KernelLimits::default();
        let max_sessions = self.at_least_one("max-sessions", settings.max_sessions, MAX_SESSIONS);
        let gate = settings.gate.unwrap_or(GateChoice::Auto);
        Config {
            listen: self.listen(settings.listen, &access),
            access,
            engine,
            interfaces: self.interfaces(settings.interface, engine, gate),
            gate,
            gate_sessions: self.gate_sessions(settings.gate_sessions),
            reattach: settings.reattach.unwrap_or(true),
            keystream_bytes: settings.keystream_bytes.map_or(32 << 20, |count| count.0),
            kernel: KernelLimits {
                publishers: self.positive_or_default(
                    "kernel-publishers",
                    settings.kernel_publishers,
                    limits.publishers,
                ),
                sessions: self.positive_or_default(
                    "kernel-sessions",
                    settings.kernel_sessions,
                    max_sessions.min(KERNEL_SESSIONS) as u32,
                ),
                streams: self.positive_or_default("kernel-streams", settings.kernel_streams, limits.streams),
                tracks: self.positive_or_default("kernel-tracks", settings.kernel_tracks, limits.tracks),
                copies_per_run: self.positive_or_default(
                    "kernel-copies-per-run",
                    settings.kernel_copies_per_run,
                    limits.copies_per_run,
                ),
                runs: self.positive_or_default("kernel-runs", settings.kernel_runs, limits.runs),
            },
            identity: self.identity(
                settings.tls_cert,
                settings.tls_key,
                settings.tls_self_signed,
                settings.tls_self_signed_out,
            ),
            reset_key_file: settings.reset_key_file,
            web: self.web(settings.webtransport.unwrap_or(true), settings.web_origin),
            drafts: self.drafts(settings.drafts),
            cipher_suites: self.cipher_suites(settings.cipher_suites),
            congestion_control: settings.congestion_control.unwrap_or(CongestionControl::Bbr),
            max_packets_per_key: self.max_packets_per_key(settings.max_packets_per_key),
            queue,
            adaptive,
            switching_sets: settings.switching_sets.unwrap_or(false),
            cache_bytes: settings.cache_bytes.map_or(CACHE_BYTES, |count| count.0),
            receive_bytes: settings.receive_bytes.map_or(RECEIVE_BYTES, |count| count.0),
            cache_age: self.positive("cache-seconds", settings.cache_seconds, 30),
            idle_timeout: self.positive("idle-timeout", settings.idle_timeout, 30),
            max_sessions,
            max_tracks: self.at_least_one("max-tracks", settings.max_tracks, 100_000),
            linger: self.linger(settings.linger),
            max_requests: self.at_least_one("max-requests", settings.max_requests, 1000),
            drain_timeout: settings.drain_timeout.map_or(Duration::from_secs(10), |seconds| seconds.0),
            goaway_uri: settings.goaway_uri.map(|url| url.0),
            shards: settings.shards.unwrap_or_else(ShardCount::auto).0,
            gso: settings.gso.unwrap_or(Gso::Auto),
            dscp: settings.dscp.unwrap_or_default().0,
            ecn: settings.ecn.unwrap_or(false),
            upstream: self.upstream(
                settings.upstream,
                tls::UpstreamTls {
                    root: settings.upstream_tls_root,
                    disable_verify: settings.upstream_tls_disable_verify.unwrap_or(false),
                    cert: settings.upstream_tls_cert,
                    key: settings.upstream_tls_key,
                },
                settings.upstream_token,
                cluster
                    .as_ref()
                    .is_some_and(|cluster| !cluster.peers.is_empty() || cluster.discovery.is_some()),
            ),
            cluster,
            http: settings.http.map_or(Some(SocketAddr::from(([127, 0, 0, 1], 9184))), |http| http.0),
            http_access: http::access::HttpFlags {
                http_token_file: settings.http_token_file,
                http_name: settings.http_name.unwrap_or_default(),
            },
            log: log::Settings {
                level: self.log_level(settings.log_level),
                format: settings.log_format.unwrap_or(LogFormat::Text),
                file: settings.log_file,
            },
            key_log_file: settings.key_log_file,
        }
    }

    fn listen(&mut self, given: Option<Vec<ListenOn>>, access: &AccessConfig) -> Vec<SocketAddr> {
        let both = || vec![(Ipv4Addr::LOCALHOST, PORT).into(), (Ipv6Addr::LOCALHOST, PORT).into()];
        let given = given.unwrap_or_else(|| vec![ListenOn(both())]);
        let listen: Vec<_> = given.into_iter().flat_map(ListenOn::there).collect();
        if let Some(addr) = access.exposed(&listen) {
            self.problem("listen", access::exposes(&addr));
        }
        if listen.is_empty() {
            self.problem("listen", "needs at least one address");
        }
        // Port 0 may be repeated, since the kernel assigns another port to each socket.
        if let Some(twice) = repeated(&listen).filter(|addr| addr.port() != 0) {
            self.problem("listen", format!("{twice} is given twice"));
        }
        listen
    }

    fn interfaces(
        &mut self,
        given: Option<Vec<String>>,
        engine: EngineChoice,
        gate: GateChoice,
    ) -> Vec<String> {
        let interfaces = given.unwrap_or_default();
        if !interfaces.is_empty() && engine == EngineChoice::User && gate == GateChoice::Off {
            self.problem("interface", "has no effect with engine user and without gate");
        }
        if let Some(twice) = interfaces.iter().enumerate().find(|(at, name)| interfaces[..*at].contains(name))
        {
            self.problem("interface", format!("{} is given twice", twice.1));
        }
        interfaces
    }

    fn gate_sessions(&mut self, given: Option<u32>) -> Option<u32> {
        if given == Some(0) {
            self.problem("gate-sessions", "must be at least 1");
        }
        given
    }

    fn max_packets_per_key(&mut self, given: Option<u64>) -> u64 {
        let value = given.unwrap_or(u64::MAX);
        if value < MIN_PACKETS_PER_KEY {
            self.problem("max-packets-per-key", format!("must be at least {MIN_PACKETS_PER_KEY}"));
        }
        value
    }

    fn log_level(&mut self, given: Option<String>) -> String {
        let level = given.unwrap_or_else(|| "info".to_owned());
        if let Err(error) = tracing_subscriber::EnvFilter::builder().parse(&level) {
            self.problem("log-level", error.to_string());
        }
        level
    }

    fn positive(&mut self, key: &str, given: Option<DurationValue>, default: u64) -> Duration {
        let value = given.map_or(Duration::from_secs(default), |seconds| seconds.0);
        if value.is_zero() {
            self.problem(key, "must be more than 0");
        }
        value
    }

    fn linger(&mut self, given: Option<DurationValue>) -> Duration {
        let linger = given.map_or(LINGER, |seconds| seconds.0);
        if linger > MAX_LINGER {
            self.problem("linger", format!("must be at most {} seconds", MAX_LINGER.as_secs()));
        }
        linger
    }

    /// Returns the configured size of a BPF map. Reports a problem if the size is 0 or larger than the kernel allows.
    fn positive_or_default(&mut self, key: &str, given: Option<u32>, default: u32) -> u32 {
        const MOST: u32 = 1 << 24;
        let value = given.unwrap_or(default);
        if !(1..=MOST).contains(&value) {
            self.problem(key, format!("must be 1 to {MOST}"));
        }
        value
    }

    fn at_least_one(&mut self, key: &str, given: Option<usize>, default: usize) -> usize {
        let value = given.unwrap_or(default);
        if value == 0 {
            self.problem(key, "must be at least 1");
        }
        value
    }
}

fn repeated<T: PartialEq + Copy>(items: &[T]) -> Option<T> {
    items.iter().enumerate().find(|(index, item)| items[..*index].contains(item)).map(|(_, item)| *item)
}

#[cfg(test)]
mod tests;
