//! Settings of `millrace relay`: flags and a TOML file with the same names, checked as a whole.
//!
//! [`Settings`] is what was given, [`Config`] what it comes to. Every setting is one line of the `settings!`
//! list, which makes the flag, the key of the file and the merging of both. A flag overrides the file.

mod access;
mod adaptive;
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
use millrace_relay::{Adaptive, DelayRule, LadderRule, Origins, access::Rule};
use millrace_relay_kernel::Limits;
use millrace_transport::Dscp;
use serde::{Deserialize, de};
use toml::de::{DeTable, ValueDeserializer};
use url::Url;

pub use self::{
    access::{Access, KeyFile, RevokedFile},
    adaptive::AdaptiveChoice,
    queue::{DropPolicy, MaxDelay, Queue},
    tls::{CipherSuite, Identity, Upstream},
    values::{ByteCount, CodePoint, DraftNumber, ListenOn, RelayUrl, Seconds, name},
};

use millrace_daemon::{
    http::{self, ListenAddr, token::TokenFile},
    log::{self, Format},
    render::in_words,
};

/// What the relay runs with.
#[derive(Clone, Debug)]
pub struct Config {
    /// UDP addresses; each takes its own address family only, `[::]` IPv6.
    pub listen: Vec<SocketAddr>,
    pub access: Access,
    pub engine: EngineChoice,
    /// Interfaces that engine `kernel` forwards from, and that are guarded; empty: those of the listen addresses.
    pub interfaces: Vec<String>,
    /// Whether the relay's ports are guarded.
    pub gate: GateChoice,
    /// Sessions that one client may have; `None`: any number.
    pub gate_sessions: Option<u32>,
    /// Attach again where somebody else detaches the program, or the interface is made anew.
    pub reattach: bool,
    /// Memory of engine `kernel` for keystreams that are computed ahead.
    pub keystream_bytes: u64,
    pub kernel: Limits,
    pub identity: Identity,
    /// File with the secret of stateless resets; `None`: it comes from the private key.
    pub reset_key_file: Option<PathBuf>,
    /// From where browsers may connect; `None`: they may not.
    pub web: Option<Origins>,
    /// Drafts of MoQ Transport that are spoken, in the server's order of preference.
    pub drafts: Vec<Draft>,
    /// The server's order of preference.
    pub cipher_suites: Vec<CipherSuite>,
    pub congestion_control: CongestionControl,
    /// After so many packets of a session its keys are updated, or as many as the suite allows if that is less.
    pub max_packets_per_key: u64,
    pub queue: Queue,
    /// Whether subscribers get the rendition that their path has room for.
    pub adaptive: Adaptive,
    /// Whether subscribers may name alternates themselves.
    pub switching_sets: bool,
    /// Limit of all cached media.
    pub cache_bytes: u64,
    /// Limit of what peers may send before it is read, over all connections.
    pub receive_bytes: u64,
    /// Cached groups older than this are evicted.
    pub cache_age: Duration,
    /// A session without a packet for this long is closed.
    pub idle_timeout: Duration,
    pub max_sessions: usize,
    pub max_tracks: usize,
    /// How long subscriptions wait for a publisher that is gone without a word.
    pub linger: Duration,
    /// Open requests of one session.
    pub max_requests: usize,
    /// From GOAWAY until sessions that are still open are closed.
    pub drain_timeout: Duration,
    /// Where clients are told to go on with GOAWAY.
    pub goaway_uri: Option<Url>,
    pub gso: Gso,
    /// Of all packets that are sent over QUIC.
    pub dscp: Dscp,
    /// Media packets are marked ECT(0) where the path takes that.
    pub ecn: bool,
    pub upstream: Option<Upstream>,
    /// Where metrics, health and status are served.
    pub http: Option<SocketAddr>,
    /// To whom.
    pub http_access: http::access::Flags,
    pub log: log::Settings,
    /// TLS secrets of all sessions are appended here (NSS key log format). For debugging only.
    pub key_log_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineChoice {
    /// The fastest that works here
    Auto,
    /// Sockets
    User,
    /// Packets leave from inside the kernel
    Kernel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GateChoice {
    /// Where it can be, in the driver
    Auto,
    /// In the driver, on every interface, or not at all
    On,
    /// The same, in the stack where the driver cannot
    Generic,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CongestionControl {
    /// RFC 9438
    Cubic,
    /// RFC 9002, section 7
    #[value(name = "newreno")]
    NewReno,
    /// draft-ietf-ccwg-bbr, BBRv3
    Bbr,
}

/// UDP generic segmentation offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Gso {
    /// Where the kernel has it
    Auto,
    On,
    Off,
}

const PORT: u16 = 4443;
const MAX_SESSIONS: usize = 10_000;
const LINGER: Duration = Duration::from_secs(5);
/// Longer than that a publisher is not away, but gone.
const MAX_LINGER: Duration = Duration::from_secs(3600);
const CACHE_BYTES: u64 = 256 << 20;
const RECEIVE_BYTES: u64 = 1 << 30;

/// An update takes a round trip. With fewer packets to a key, media would wait for updates all the time.
const MIN_PACKETS_PER_KEY: u64 = 100;

macro_rules! settings {
    ($($(#[$meta:meta])* $field:ident: $type:ty,)*) => {
        /// Settings as given; what was not given is `None`.
        #[derive(clap::Args, Clone, Debug, Default)]
        pub struct Settings {
            $($(#[$meta])* pub $field: Option<$type>,)*
            /// `[[allow]]`, in the file only.
            #[arg(skip)]
            pub allow: Vec<Rule>,
            /// `[[issuer]]`, in the file only.
            #[arg(skip)]
            pub issuer: Vec<access::Issuer>,
            /// `[[delay]]`, in the file only.
            #[arg(skip)]
            pub delay: Vec<DelayRule>,
            /// `[[ladder]]`, in the file only.
            #[arg(skip)]
            pub ladder: Vec<LadderRule>,
        }

        /// Every key, in the order of the documentation.
        pub fn keys() -> Vec<String> {
            vec![$(stringify!($field).replace('_', "-")),*]
        }

        impl Settings {
            /// Sets one key of the file.
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
                Self { $($field: self.$field.or(other.$field),)* allow, issuer, delay, ladder }
            }
        }
    };
}

settings! {
    // No documentation comment: rustdoc would take `[::]` for a link.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "ADDR:PORT",
        help = "UDP address to serve MoQ on, :PORT for all of them, repeatable [default: 127.0.0.1:4443 and [::1]:4443]"
    )]
    listen: Vec<ListenOn>,
    /// Serve anyone who reaches an address beyond this machine, without rules, keys of tokens or client-ca
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    public: bool,
    /// Keys that tokens are checked with: PEM, JWK or JWKS, repeatable; read again when they change
    #[arg(long, value_name = "FILE")]
    token_keys: Vec<PathBuf>,
    /// HMAC secrets that tokens are checked with, as they are, repeatable; read again when they change
    #[arg(long, value_name = "FILE")]
    token_secrets: Vec<PathBuf>,
    /// IDs of tokens that are not good any more, one a line; read again when it changes
    #[arg(long, value_name = "FILE")]
    token_revoked: PathBuf,
    /// Audiences of which tokens may be for one, if they are for somebody; repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    token_audience: Vec<String>,
    /// Issuers that token-keys and token-secrets speak for, repeatable [default: any without an [[issuer]] table in the file]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    token_issuer: Vec<String>,
    /// Tokens that one session may register, bytes [default: 16KiB]
    #[arg(long, value_name = "BYTES")]
    token_cache_bytes: ByteCount,
    /// Roots that clients' certificates have to lead to, PEM; clients may come without one
    #[arg(long, value_name = "FILE")]
    client_ca: PathBuf,
    /// Sessions that have shown no right yet; beyond, the oldest is closed [default: 1024, or half of max-sessions]
    #[arg(long, value_name = "N")]
    unproven_sessions: usize,
    /// Requests per second of one session [default: 1000]
    #[arg(long, value_name = "N")]
    session_requests: u64,
    /// Requests per second of one client, by address or /64; of a /24 or /56 8, of a /48 64 times as many [default: 10000]
    #[arg(long, value_name = "N")]
    client_requests: u64,
    /// Tracks that the requests of one session hold at a time [default: 10000]
    #[arg(long, value_name = "N")]
    session_tracks: u64,
    /// Subscriptions of one session to one track at a time [default: 4]
    #[arg(long, value_name = "N")]
    session_same_track: u64,
    /// Tracks that the requests of one client hold at a time [default: 100000]
    #[arg(long, value_name = "N")]
    client_tracks: u64,
    /// Cached media of what one client publishes [default: all of cache-bytes]
    #[arg(long, value_name = "BYTES")]
    client_cache_bytes: ByteCount,
    /// Bytes per second that one client fetches [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    client_fetch_bytes: ByteCount,
    /// What one client may send before it is read, beyond 64 KiB for each session [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    client_receive_bytes: ByteCount,
    /// How media packets leave [default: auto]
    #[arg(long, value_enum)]
    engine: EngineChoice,
    /// Interfaces that packets arrive on, for engine kernel and the gate, repeatable [default: those of the listen addresses]
    #[arg(long, value_delimiter = ',', value_name = "IF")]
    interface: Vec<String>,
    /// Guard the relay's ports at XDP [default: auto]
    #[arg(long, value_enum)]
    gate: GateChoice,
    /// Sessions that one client may have, by address or /64; a /24 or /56 8, a /48 64 times as many [default: any number]
    #[arg(long, value_name = "N")]
    gate_sessions: u32,
    /// Let engine kernel attach again where somebody detached it or an interface came back [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    reattach: bool,
    /// Memory of engine kernel for cryptography ahead of time, bytes or with KiB, MiB, GiB [default: 32MiB]
    #[arg(long, value_name = "BYTES")]
    keystream_bytes: ByteCount,
    /// Publishers' sessions that engine kernel has room for [default: 256]
    #[arg(long, value_name = "N")]
    kernel_publishers: u32,
    /// Sessions that engine kernel has room for, all of them [default: 4096]
    #[arg(long, value_name = "N")]
    kernel_sessions: u32,
    /// Streams to subscribers that engine kernel has room for [default: 32768]
    #[arg(long, value_name = "N")]
    kernel_streams: u32,
    /// Tracks for whose streams engine kernel opens streams to subscribers [default: 1024]
    #[arg(long, value_name = "N")]
    kernel_tracks: u32,
    /// Copies that engine kernel makes of a packet before it lets others in [default: 64]
    #[arg(long, value_name = "N")]
    kernel_copies_per_run: u32,
    /// Times that a packet may have that turn; further copies leave from userspace [default: 64]
    #[arg(long, value_name = "N")]
    kernel_runs: u32,
    /// Certificate chain, PEM; read again when it changes and on SIGHUP
    #[arg(long, value_name = "FILE")]
    tls_cert: PathBuf,
    /// Private key of the certificate, PEM
    #[arg(long, value_name = "FILE")]
    tls_key: PathBuf,
    /// Make a certificate at start-up, for trying out; its fingerprint is logged [default without --tls-cert]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    tls_self_signed: bool,
    /// Write the certificate that is made here, PEM, for --tls-root of clients
    #[arg(long, value_name = "FILE")]
    tls_self_signed_out: PathBuf,
    /// Secret that stateless resets are made with, by which clients see that the relay was restarted; made if it is not there. Never
    /// the same on two machines [default: derived from the private key, the machine ID and the address]
    #[arg(long, value_name = "FILE")]
    reset_key_file: PathBuf,
    /// Serve browsers too, by WebTransport on the same addresses [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    webtransport: bool,
    /// Origins of web pages that may connect, such as https://example.org, repeatable [default: any]
    #[arg(long, value_delimiter = ',', value_name = "ORIGIN")]
    web_origin: Vec<String>,
    /// Drafts of MoQ Transport to speak, of which the newest that a peer knows is taken; repeatable [default: 18 to 22]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    drafts: Vec<DraftNumber>,
    /// Cipher suites in order of preference, repeatable [default: all, as listed]
    #[arg(long, value_enum, value_delimiter = ',')]
    cipher_suites: Vec<CipherSuite>,
    /// Congestion control of media [default: bbr]
    #[arg(long, value_enum)]
    congestion_control: CongestionControl,
    /// Packets of a session that are sealed with one key at most [default: what the cipher suite allows]
    #[arg(long, value_name = "N")]
    max_packets_per_key: u64,
    /// How long media may wait for a subscriber before it is dropped, or "off" [default: 0.25]
    #[arg(long, value_name = "SECONDS")]
    max_delay: MaxDelay,
    /// What is dropped where there is too little room [default: live]
    #[arg(long, value_enum)]
    drop_policy: DropPolicy,
    /// Media that may wait for one subscriber, bytes or with KiB, MiB, GiB [default: 16MiB]
    #[arg(long, value_name = "BYTES")]
    queue_bytes: ByteCount,
    /// Datagrams that may wait, of all subscribers, bytes or with KiB, MiB, GiB [default: 64MiB]
    #[arg(long, value_name = "BYTES")]
    datagram_bytes: ByteCount,
    /// Send each subscriber the rendition that its path has room for [default: off]
    #[arg(long, value_enum)]
    adaptive: AdaptiveChoice,
    /// Let subscribers name the tracks of which they get the one that their path has room for (provisional) [default: false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    switching_sets: bool,
    /// Limit of all cached media, bytes or with KiB, MiB, GiB [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    cache_bytes: ByteCount,
    /// Limit of what peers may send before it is read, over all connections, bytes or with KiB, MiB, GiB [default: 1GiB]
    #[arg(long, value_name = "BYTES")]
    receive_bytes: ByteCount,
    /// Cached groups older than this are dropped [default: 30]
    #[arg(long, value_name = "SECONDS")]
    cache_seconds: Seconds,
    /// Close a session that is silent for this long [default: 30]
    #[arg(long, value_name = "SECONDS")]
    idle_timeout: Seconds,
    /// Keep subscriptions for this long when their publisher is gone, in case it comes back; 0 for not at all [default: 5]
    #[arg(long, value_name = "SECONDS")]
    linger: Seconds,
    /// Sessions at once [default: 10000]
    #[arg(long, value_name = "N")]
    max_sessions: usize,
    /// Tracks at once [default: 100000]
    #[arg(long, value_name = "N")]
    max_tracks: usize,
    /// Open requests of one session [default: 1000]
    #[arg(long, value_name = "N")]
    max_requests: usize,
    /// Time that sessions have to leave after GOAWAY [default: 10]
    #[arg(long, value_name = "SECONDS")]
    drain_timeout: Seconds,
    /// Relay that clients are told to go on at then: moqt://HOST:PORT, or https:// [default: where they are]
    #[arg(long, value_name = "URL")]
    goaway_uri: RelayUrl,
    /// UDP segmentation offload [default: auto]
    #[arg(long, value_enum)]
    gso: Gso,
    /// DSCP of what is sent: a number up to 63, or a name such as cs5, af41, ef [default: 0]
    #[arg(long, value_name = "DSCP")]
    dscp: CodePoint,
    /// Mark media packets ECT(0) where the path takes that, and slow down where it marks them CE
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    ecn: bool,
    /// Relay to ask for what nobody here publishes: moqt://HOST:PORT, or https:// for WebTransport
    #[arg(long, value_name = "URL")]
    upstream: RelayUrl,
    /// Roots that the upstream's certificate must lead to, PEM [default: the system's]
    #[arg(long, value_name = "FILE")]
    upstream_tls_root: PathBuf,
    /// Take any certificate from the upstream: for trying out only
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    upstream_tls_disable_verify: bool,
    /// Token for the upstream relay, read again for each connection
    #[arg(long, value_name = "FILE")]
    upstream_token: PathBuf,
    /// Certificate chain for the upstream relay, PEM
    #[arg(long, value_name = "FILE")]
    upstream_tls_cert: PathBuf,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE")]
    upstream_tls_key: PathBuf,
    /// Where /metrics, /healthz and /status are served, or "off" [default: 127.0.0.1:9184]
    #[arg(long, value_name = "ADDR:PORT")]
    http: ListenAddr,
    /// The token that HTTP requests must show, made if it is not there, or "off" [default: /run/millrace/http.token for
    /// root, millrace/http.token in XDG_RUNTIME_DIR for others]
    #[arg(long, value_name = "FILE")]
    http_token_file: TokenFile,
    /// A name under which HTTP is asked, besides addresses and localhost, repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    http_name: Vec<String>,
    /// A level (error, warn, info, debug, trace) or directives (info,millrace=debug) [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: String,
    /// [default: text]
    #[arg(long, value_enum)]
    log_format: Format,
    /// Log to this file instead of standard error; opened again on SIGHUP
    #[arg(long, value_name = "FILE")]
    log_file: PathBuf,
    /// Append the TLS secrets of all sessions to this file: whoever reads it reads the traffic
    #[arg(long, value_name = "FILE")]
    key_log_file: PathBuf,
}

/// What is wrong with one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// `--flag`, or `FILE:LINE: key`.
    pub place: String,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Everything that is wrong with the settings, file and flags together.
#[derive(Debug, thiserror::Error)]
pub struct Errors(pub Vec<Problem>);

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the relay's settings are not usable:")?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

/// What a running relay keeps until it ends, whatever the settings say, and what they say is judged by.
#[derive(Clone, Debug)]
pub struct Running {
    /// Ports filled in.
    pub listen: Vec<SocketAddr>,
    pub max_sessions: usize,
    pub queue: Queue,
}

/// Settings that were read again would open a relay to everybody who reaches this address, which it goes on to listen on.
#[derive(Debug, thiserror::Error)]
#[error("the relay listens on {0} until it is started anew, and {reason}", reason = access::exposes(.0))]
pub struct Exposed(SocketAddr);

/// A configuration file: its name and its text.
pub struct File<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

impl Config {
    /// Returns what a running relay comes to when it takes these settings: what only a start can change stays as it is.
    ///
    /// # Errors
    /// Together they open a relay to everybody that nobody said is public.
    pub fn in_force(self, running: &Running) -> Result<Self, Exposed> {
        let Running { listen, max_sessions, queue } = running;
        if let Some(addr) = self.access.exposed(listen) {
            return Err(Exposed(addr));
        }
        // How long media may wait is said for a drop-policy, and means something else under another.
        let delays = if self.queue.policy == queue.policy { self.queue.delays } else { queue.delays.clone() };
        let queue = Queue { delays, ..queue.clone() };
        Ok(Self { listen: listen.clone(), max_sessions: *max_sessions, queue, ..self })
    }

    /// Merges flags over the file and checks the whole.
    pub fn new(flags: Settings, file: Option<File<'_>>) -> Result<Self, Errors> {
        let mut check = Check { flags: flags.clone(), places: HashMap::new(), problems: Vec::new() };
        let settings = match file {
            Some(file) => flags.or(check.read(&file)),
            None => flags,
        };
        let config = check.config(settings);
        if check.problems.is_empty() { Ok(config) } else { Err(Errors(check.problems)) }
    }
}

/// Collects problems, and knows where each key was given.
struct Check {
    flags: Settings,
    places: HashMap<String, String>,
    problems: Vec<Problem>,
}

impl Check {
    fn read(&mut self, file: &File<'_>) -> Settings {
        let line = |span: Range<usize>| file.text[..span.start].matches('\n').count() + 1;
        let mut settings = Settings::default();
        let (table, syntax) = DeTable::parse_recoverable(file.text);
        for error in syntax {
            let place = format!("{}:{}", file.name, error.span().map_or(1, line));
            self.problems.push(Problem { place, message: error.message().to_owned() });
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
            } else if !keys().iter().any(|known| known == key.get_ref()) {
                self.problems.push(Problem { place, message: unknown(key.get_ref(), &keys()) });
            } else if let Err(error) = settings.set(key.get_ref(), value.into()) {
                self.problems.push(Problem { place, message: in_words(error.message()) });
            } else {
                self.places.insert(key.into_inner().into_owned(), place);
            }
        }
        settings
    }

    fn problem(&mut self, key: &str, message: impl Into<String>) {
        let place = match self.places.get(key) {
            Some(place) if !self.flags.is_set(key) => place.clone(),
            _ => format!("--{key}"),
        };
        self.problems.push(Problem { place, message: message.into() });
    }

    fn config(&mut self, mut settings: Settings) -> Config {
        let access = self.access(&mut settings);
        let queue = self.queue(&mut settings);
        let adaptive = self.adaptive(&mut settings);
        let engine = settings.engine.unwrap_or(EngineChoice::Auto);
        let limits = Limits::default();
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
            kernel: Limits {
                publishers: self.some("kernel-publishers", settings.kernel_publishers, limits.publishers),
                sessions: self.some("kernel-sessions", settings.kernel_sessions, limits.sessions),
                streams: self.some("kernel-streams", settings.kernel_streams, limits.streams),
                tracks: self.some("kernel-tracks", settings.kernel_tracks, limits.tracks),
                copies_per_run: self.some(
                    "kernel-copies-per-run",
                    settings.kernel_copies_per_run,
                    limits.copies_per_run,
                ),
                runs: self.some("kernel-runs", settings.kernel_runs, limits.runs),
            },
            identity: self.identity(
                (settings.tls_cert, settings.tls_key),
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
            max_sessions: self.at_least_one("max-sessions", settings.max_sessions, MAX_SESSIONS),
            max_tracks: self.at_least_one("max-tracks", settings.max_tracks, 100_000),
            linger: self.linger(settings.linger),
            max_requests: self.at_least_one("max-requests", settings.max_requests, 1000),
            drain_timeout: settings.drain_timeout.map_or(Duration::from_secs(10), |seconds| seconds.0),
            goaway_uri: settings.goaway_uri.map(|url| url.0),
            gso: settings.gso.unwrap_or(Gso::Auto),
            dscp: settings.dscp.unwrap_or_default().0,
            ecn: settings.ecn.unwrap_or(false),
            upstream: self.upstream(
                settings.upstream,
                settings.upstream_tls_root,
                settings.upstream_tls_disable_verify.unwrap_or(false),
                settings.upstream_token,
                (settings.upstream_tls_cert, settings.upstream_tls_key),
            ),
            http: settings.http.map_or(Some(SocketAddr::from(([127, 0, 0, 1], 9184))), |http| http.0),
            http_access: http::access::Flags {
                http_token_file: settings.http_token_file,
                http_name: settings.http_name.unwrap_or_default(),
            },
            log: log::Settings {
                level: self.log_level(settings.log_level),
                format: settings.log_format.unwrap_or(Format::Text),
                file: settings.log_file,
            },
            key_log_file: settings.key_log_file,
        }
    }

    fn listen(&mut self, given: Option<Vec<ListenOn>>, access: &Access) -> Vec<SocketAddr> {
        let both = || vec![(Ipv4Addr::LOCALHOST, PORT).into(), (Ipv6Addr::LOCALHOST, PORT).into()];
        let given = given.unwrap_or_else(|| vec![ListenOn(both())]);
        let listen: Vec<_> = given.into_iter().flat_map(ListenOn::there).collect();
        if let Some(addr) = access.exposed(&listen) {
            self.problem("listen", access::exposes(&addr));
        }
        if listen.is_empty() {
            self.problem("listen", "needs at least one address");
        }
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
            self.problem("interface", "means nothing with engine user and without gate");
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

    fn positive(&mut self, key: &str, given: Option<Seconds>, default: u64) -> Duration {
        let value = given.map_or(Duration::from_secs(default), |seconds| seconds.0);
        if value.is_zero() {
            self.problem(key, "must be more than 0");
        }
        value
    }

    fn linger(&mut self, given: Option<Seconds>) -> Duration {
        let linger = given.map_or(LINGER, |seconds| seconds.0);
        if linger > MAX_LINGER {
            self.problem("linger", format!("must be at most {} seconds", MAX_LINGER.as_secs()));
        }
        linger
    }

    /// The kernel takes no more entries than this in a map.
    fn some(&mut self, key: &str, given: Option<u32>, default: u32) -> u32 {
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
