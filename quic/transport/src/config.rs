//! Settings of an endpoint's connections.

use std::{sync::Arc, time::Duration};

use millrace_quic::{
    keys::KeySuite,
    plane::downstream::{self, ResetCodes},
};
use rustls::{KeyLog, RootCertStore, sign::CertifiedKey};

use crate::{
    dscp::Dscp, lasting::LastingSecret, offload::OffloadEngine, paths::PathReports, tap::Tap,
    tls::ServerTrust, windows::Windows,
};

/// Settings of an endpoint's connections.
#[derive(Clone)]
pub struct Config {
    /// Number of shards, from 1 to [`MAX_SHARDS`](crate::MAX_SHARDS). Each has a UDP socket on the endpoint's address,
    /// and tasks of its own, so that the endpoint's connections use several CPUs. An endpoint has one shard where the
    /// kernel cannot select sockets by connection ID.
    pub shards: usize,
    /// The server's certificate, or `None` for an endpoint that only connects.
    pub certificate: Option<Arc<CertifiedKey>>,
    /// CA certificates that clients' certificates have to chain to. Clients may connect without a certificate.
    pub client_roots: Option<Arc<RootCertStore>>,
    /// The secret that stateless reset tokens and address validation tokens are derived from, so that clients of an
    /// earlier process recognize them. Without it each process uses a random one.
    pub lasting: Option<LastingSecret>,
    /// The generation of this process among those that have used the endpoint's socket at the same time: one more than
    /// that of its [predecessor](crate::takeover::Predecessor), modulo 256.
    pub generation: u8,
    /// The certificate that is presented to servers that request one.
    pub client_certificate: Option<Arc<CertifiedKey>>,
    /// The server certificates that this endpoint accepts when it connects to a server.
    pub trust: ServerTrust,
    /// TLS cipher suites, the preferred one first.
    pub suites: Vec<KeySuite>,
    /// Application protocols (ALPN) to offer or accept, the preferred one first.
    pub alpn: Vec<Vec<u8>>,
    /// Time without a packet from the peer after which a connection is lost. The shorter of both endpoints' timeouts
    /// applies (RFC 9000, section 10.1).
    pub idle_timeout: Duration,
    /// True if quinn sends a PING on a connection that was silent for a third of the idle timeout, or for half of it if
    /// the peer has opened the connection. Otherwise idle connections time out.
    pub keep_alive: bool,
    /// Bidirectional streams that the peer may have open at a time. A client may open 32 at first, and these once the
    /// application has counted many ([`Connection::count_stream`](crate::Connection::count_stream)).
    pub max_bidi_streams: u32,
    /// Unidirectional streams that the peer may have open at a time; a client may open 64 at first.
    pub max_uni_streams: u32,
    /// Receive window of a stream, bytes.
    pub stream_receive_window: u32,
    /// Largest receive window of a connection, bytes.
    pub receive_window: u32,
    /// The budget for the receive windows of all connections. Several endpoints may share it.
    pub windows: Arc<Windows>,
    /// Size of the buffer for received datagrams that the application has not read, bytes.
    pub datagram_receive_buffer: usize,
    /// True if packets to one destination may be passed to the kernel in batches (UDP GSO).
    pub gso: bool,
    /// The DSCP of all sent packets.
    pub dscp: Dscp,
    /// The key log that receives the TLS secrets, if the operator wants them logged.
    pub key_log: Option<Arc<dyn KeyLog>>,
    /// Number of unidirectional streams that are opened by quinn, before the data plane opens any.
    pub control_streams: u64,
    /// Largest number of packets sealed with one key before a key update, unless the AEAD's own limit is lower.
    pub max_packets_per_key: u64,
    /// The data plane's settings. The application has to set the error codes for RESET_STREAM, which are 0 by default.
    pub downstream: downstream::Config,
    /// The engine whose offloads forward the connections' packets without waking this process, for example in the
    /// kernel.
    pub offload: Option<Arc<dyn OffloadEngine>>,
    /// Collector of packet traces: while a trace filter is set, it receives a record of each packet that the data
    /// planes send.
    pub tap: Arc<Tap>,
    /// The reporter that receives path estimates of every connection.
    pub paths: Arc<PathReports>,
}

impl Config {
    /// Returns the time after which quinn sends a PING on a silent connection; `None`: quinn sends none.
    ///
    /// It is a third of the idle timeout for the end that has opened the connection, so that the timeout allows for two
    /// PINGs that are lost (RFC 9000, section 10.1.2). It is half of the timeout for the other end. So only one end
    /// sends PINGs if both could.
    pub(crate) fn keep_alive_interval(&self, is_client: bool) -> Option<Duration> {
        let part = if is_client { 3 } else { 2 };
        Some(self.idle_timeout / part).filter(|interval| self.keep_alive && !interval.is_zero())
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            shards: 1,
            certificate: None,
            client_roots: None,
            lasting: None,
            generation: 0,
            client_certificate: None,
            trust: ServerTrust::Roots(Arc::new(rustls::RootCertStore::empty())),
            suites: vec![KeySuite::ChaCha20Poly1305, KeySuite::Aes128Gcm, KeySuite::Aes256Gcm],
            alpn: Vec::new(),
            idle_timeout: Duration::from_secs(30),
            keep_alive: true,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_alive_interval_is_a_third_of_the_idle_timeout_for_clients_and_half_for_servers() {
        let of = |keep_alive, seconds, is_client| {
            let idle_timeout = Duration::from_secs(seconds);
            Config { keep_alive, idle_timeout, ..Config::default() }.keep_alive_interval(is_client)
        };
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!([of(true, 30, true), of(true, 6, true)], [seconds(10), seconds(2)]);
        assert_eq!([of(true, 30, false), of(true, 6, false)], [seconds(15), seconds(3)]);
        assert_eq!(
            [of(false, 30, true), of(true, 0, false)],
            [None; 2],
            "0 is no timeout (RFC 9000, section 18.2)"
        );
    }
}
