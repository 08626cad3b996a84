//! How an endpoint's connections are made.

use std::{sync::Arc, time::Duration};

use millrace_quic::{
    keys::Suite,
    plane::downstream::{self, ResetCodes},
};
use rustls::{KeyLog, RootCertStore, sign::CertifiedKey};

use crate::{
    dscp::Dscp, lasting::LastingSecret, offload::Engine, paths::Paths, tap::Tap, tls::Trust, windows::Windows,
};

/// Length of the connection IDs that quinn makes by default.
pub const ID_LEN: usize = 8;

/// How an endpoint's connections are made.
#[derive(Clone)]
pub struct Config {
    /// The server's certificate; `None`: the endpoint only connects.
    pub certificate: Option<Arc<CertifiedKey>>,
    /// Roots that clients' certificates have to lead to. Clients may come without one.
    pub client_roots: Option<Arc<RootCertStore>>,
    /// The secret of stateless resets and tokens that clients of an earlier process know; without it every process has its own.
    pub lasting: Option<LastingSecret>,
    /// Shown to servers that ask for it when connecting.
    pub client_certificate: Option<Arc<CertifiedKey>>,
    /// Whose certificates are accepted when connecting.
    pub trust: Trust,
    /// TLS cipher suites, most wanted first.
    pub suites: Vec<Suite>,
    pub alpn: Vec<Vec<u8>>,
    pub idle_timeout: Duration,
    pub keep_alive: Option<Duration>,
    /// Streams that the peer may have open at a time.
    pub max_bidi_streams: u32,
    pub max_uni_streams: u32,
    /// Receive windows, bytes: of a stream, and the most of a connection.
    pub stream_receive_window: u32,
    pub receive_window: u32,
    /// What the windows of all connections are taken from, of all endpoints that share it.
    pub windows: Arc<Windows>,
    /// Received datagrams that wait for the application, bytes.
    pub datagram_receive_buffer: usize,
    /// Whether packets may be handed to the kernel in batches of one destination (UDP GSO).
    pub gso: bool,
    /// Of all packets that are sent.
    pub dscp: Dscp,
    /// Where TLS secrets are logged, if the operator asks for it.
    pub key_log: Option<Arc<dyn KeyLog>>,
    /// Unidirectional streams that are opened through quinn, before the data plane's.
    pub control_streams: u64,
    /// Packets sealed with one key before it is updated, if the AEAD's own limit is not lower.
    pub max_packets_per_key: u64,
    /// Its reset codes are the application's; by default they are 0.
    pub downstream: downstream::Config,
    /// Has a part in every connection.
    pub offload: Option<Arc<dyn Engine>>,
    pub tap: Arc<Tap>,
    /// Told of the paths of all connections.
    pub paths: Arc<Paths>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            certificate: None,
            client_roots: None,
            lasting: None,
            client_certificate: None,
            trust: Trust::Roots(Arc::new(rustls::RootCertStore::empty())),
            suites: vec![Suite::ChaCha20Poly1305, Suite::Aes128Gcm, Suite::Aes256Gcm],
            alpn: Vec::new(),
            idle_timeout: Duration::from_secs(30),
            keep_alive: Some(Duration::from_secs(5)),
            max_bidi_streams: 1024,
            max_uni_streams: 4096,
            stream_receive_window: 4 << 20,
            receive_window: 32 << 20,
            windows: Arc::new(Windows::new(1 << 30)),
            datagram_receive_buffer: 1 << 20,
            gso: true,
            dscp: Dscp::default(),
            key_log: None,
            control_streams: 1,
            max_packets_per_key: u64::MAX,
            downstream: downstream::Config::new(ResetCodes { late: 0, behind: 0, gone: 0 }),
            offload: None,
            tap: Arc::default(),
            paths: Arc::default(),
        }
    }
}
