//! A server with two senders, an unmodified quinn client, and the traffic between them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_quic::{
    keys::{KeySuite, TrafficSecret},
    packet,
    plane::{
        downstream::{AskedRange, Label, NewStream, Priority, StreamKey},
        source::{Source, SourceEnd, SourceExtent},
    },
};
use millrace_transport::{Config, Connection, Endpoint};
use parking_lot::Mutex;
use quinn::{TransportConfig, crypto::rustls::QuicClientConfig};
use rustls::{KeyLog, sign::CertifiedKey};

use crate::proxy::{Proxy, Towards};

/// Length of the connection IDs that both endpoints issue, bytes.
pub const ID_LEN: usize = 8;

const ALPN: &[u8] = b"moqt-18";

/// Longest time that a test waits for one operation.
pub const PATIENCE: Duration = millrace_testkit::BOUND;

/// A checkable sequence of bytes: a tag, then a pattern that depends on tag and offset.
pub struct PairPattern {
    tag: u64,
    len: u64,
    made: Instant,
}

impl PairPattern {
    fn byte(tag: u64, offset: u64) -> u8 {
        match offset {
            0..8 => tag.to_be_bytes()[offset as usize],
            _ => ((tag ^ offset).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8,
        }
    }

    pub fn bytes(tag: u64, len: u64) -> Vec<u8> {
        (0..len).map(|offset| Self::byte(tag, offset)).collect()
    }

    /// Returns the tag at the beginning of a complete test sequence of bytes. Panics if a byte of the sequence is
    /// wrong.
    pub fn check(bytes: &[u8]) -> u64 {
        let tag = u64::from_be_bytes(bytes[..8].try_into().unwrap());
        assert!(bytes == Self::bytes(tag, bytes.len() as u64), "stream {tag} arrived with wrong bytes");
        tag
    }
}

impl Source for PairPattern {
    fn extent(&self) -> SourceExtent {
        SourceExtent { len: self.len, end: SourceEnd::Fin { at: self.made } }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        buf.iter_mut().zip(offset..self.len).map(|(byte, at)| *byte = Self::byte(self.tag, at)).count()
    }

    fn received_at(&self, _: u64) -> Option<Instant> {
        Some(self.made)
    }
}

/// A key log that stores the traffic secrets of one connection.
#[derive(Debug, Default)]
pub struct PairSecrets(Mutex<BTreeMap<String, Vec<u8>>>);

impl KeyLog for PairSecrets {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        self.0.lock().insert(label.to_owned(), secret.to_vec());
    }
}

impl PairSecrets {
    pub fn secret(&self, suite: KeySuite, label: &str) -> TrafficSecret {
        TrafficSecret::new(suite, &self.0.lock()[label]).unwrap()
    }
}

pub struct PairOptions {
    pub suite: KeySuite,
    pub server: Config,
    pub client: TransportConfig,
    /// Two addresses: the one on which the server listens, and the one to which the client connects.
    pub listen: [Ipv4Addr; 2],
}

impl Default for PairOptions {
    fn default() -> Self {
        Self {
            suite: KeySuite::ChaCha20Poly1305,
            server: Config::default(),
            client: TransportConfig::default(),
            listen: [Ipv4Addr::LOCALHOST; 2],
        }
    }
}

pub struct SeamPair {
    pub suite: KeySuite,
    /// The server's endpoint, kept alive because its connections receive nothing without it.
    _endpoint: Endpoint,
    pub server: Arc<Connection>,
    pub client_endpoint: quinn::Endpoint,
    pub client: quinn::Connection,
    pub proxy: Arc<Proxy>,
    pub secrets: Arc<PairSecrets>,
}

impl SeamPair {
    pub async fn connect(options: PairOptions) -> Self {
        let generated = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = rustls::crypto::ring::sign::any_supported_type(
            &rustls::pki_types::PrivateKeyDer::try_from(generated.signing_key.serialize_der()).unwrap(),
        );
        let certificate = CertifiedKey::new(vec![generated.cert.der().clone()], key.unwrap());
        let secrets = Arc::new(PairSecrets::default());
        let config = Config {
            certificate: Some(Arc::new(certificate)),
            suites: vec![options.suite],
            alpn: vec![ALPN.to_vec()],
            key_log: Some(Arc::clone(&secrets) as _),
            ..options.server
        };
        let endpoint = Endpoint::bind((options.listen[0], 0).into(), config).unwrap();
        let proxy = Proxy::start((options.listen[1], endpoint.local_addr().port()).into(), 1).await;

        let mut roots = rustls::RootCertStore::empty();
        roots.add(generated.cert.der().clone()).unwrap();
        let mut tls =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
        tls.alpn_protocols = vec![ALPN.to_vec()];
        tls.key_log = Arc::clone(&secrets) as _;
        let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        config.transport_config(Arc::new(options.client));
        let endpoint_config = quinn::EndpointConfig::default();
        let client_endpoint =
            quinn::Endpoint::new(endpoint_config, None, local_socket(), Arc::new(quinn::TokioRuntime))
                .unwrap();
        let connecting = client_endpoint.connect_with(config, proxy.addr, "localhost").unwrap();
        let accepting = async { endpoint.accept().await.unwrap().accept().await.unwrap() };
        let (client, server) = tokio::join!(connecting, accepting);
        let pair = Self {
            suite: options.suite,
            _endpoint: endpoint,
            server,
            client_endpoint,
            client: client.unwrap(),
            proxy,
            secrets,
        };
        pair.set_up().await;
        pair
    }

    /// Opens the control stream, and echoes each of the client's bidirectional streams.
    async fn set_up(&self) {
        let mut setup = self.server.quic.open_uni().await.unwrap();
        setup.write_all(&PairPattern::bytes(u64::MAX, 100)).await.unwrap();
        setup.finish().unwrap();
        self.server.start();
        let quic = self.server.quic.clone();
        tokio::spawn(async move {
            while let Ok((mut send, mut recv)) = quic.accept_bi().await {
                tokio::spawn(async move {
                    while let Ok(Some(chunk)) = recv.read_chunk(usize::MAX, true).await {
                        send.write_all(&chunk.bytes).await.unwrap();
                    }
                    let _ = send.finish();
                });
            }
        });
    }

    /// Queues one stream to the client for each of `tags`, which identify the streams' contents.
    pub fn owe(&self, tags: std::ops::Range<u64>, len: u64) -> Vec<StreamKey> {
        let keys = {
            let mut downstream = self.server.downstream();
            tags.map(|tag| {
                let source = Arc::new(PairPattern { tag, len, made: Instant::now() });
                let priority = Priority { group: tag, ..Priority::default() };
                downstream.open(NewStream {
                    source,
                    priority,
                    owner: 0,
                    object_timeout: None,
                    subgroup_timeout: None,
                    max_delay: None,
                    asked: AskedRange::Nothing,
                    label: Label::default(),
                })
            })
            .collect()
        };
        self.server.transmit_now();
        keys
    }

    /// Reads the control stream, and streams until each of `tags` has arrived once.
    pub async fn receive(&self, tags: std::ops::Range<u64>, len: u64) {
        self.receive_all(tags.chain([u64::MAX]).collect(), len).await;
    }

    /// Reads streams until each of `tags` has arrived once.
    pub async fn receive_data(&self, tags: std::ops::Range<u64>, len: u64) {
        self.receive_all(tags.collect(), len).await;
    }

    async fn receive_all(&self, mut missing: BTreeSet<u64>, len: u64) {
        while !missing.is_empty() {
            let mut stream = self.client.accept_uni().await.expect("the client has no error");
            let bytes = stream.read_to_end(1 << 24).await.expect("the stream is complete");
            let tag = PairPattern::check(&bytes);
            assert!(missing.remove(&tag) || tag == u64::MAX, "stream {tag} came twice");
            assert!(tag == u64::MAX || bytes.len() as u64 == len);
        }
    }

    /// Sends `times` byte sequences of `len` bytes, one after the other, on quinn's bidirectional streams. Checks that
    /// the server returns each of them unchanged.
    pub async fn echo(&self, times: u64, len: u64) {
        for tag in 0..times {
            let (mut send, mut recv) = self.client.open_bi().await.expect("the client has no error");
            let sent = PairPattern::bytes(tag, len);
            let send_all = async {
                send.write_all(&sent).await.expect("the server has no error");
                send.finish().unwrap();
            };
            let (received, ()) = tokio::join!(recv.read_to_end(1 << 24), send_all);
            assert_eq!(PairPattern::check(&received.expect("the server has no error")), tag);
        }
    }

    /// Checks that both endpoints are open, and that the server has used no packet number twice. Returns the server's
    /// packets.
    pub fn check(&self) -> PairSent {
        assert_eq!(self.client.close_reason(), None);
        assert_eq!(self.server.quic.close_reason(), None);
        assert_eq!(self.server.stats().acks_refused, 0); // exact: no ACK may ever be refused, so the count stays 0
        let sent = PairSent::open(
            &self.proxy.seen(Towards::Client),
            self.suite,
            &self.secrets,
            "SERVER_TRAFFIC_SECRET_0",
        );
        // exact: packets are counted before they are sent, so the count includes all packets seen
        let stats = self.server.stats();
        assert!(sent.numbers.len() as u64 <= stats.quinn_packets + stats.data_plane_packets);
        sent
    }
}

/// The 1-RTT packets that one endpoint has sent.
pub struct PairSent {
    /// Key generation of each packet, by packet number.
    pub numbers: BTreeMap<u64, usize>,
    /// Destination connection IDs of the packets, in the order of their first use.
    pub ids: Vec<Vec<u8>>,
    pub largest: usize,
}

impl PairSent {
    /// Decrypts all 1-RTT packets that one endpoint has sent. `label` is the label of the endpoint's secret in the key
    /// log.
    pub fn open(datagrams: &[Vec<u8>], suite: KeySuite, secrets: &PairSecrets, label: &str) -> Self {
        let mut secret = secrets.secret(suite, label);
        let header_key = secret.header_key();
        let mut keys = vec![secret.packet_key()];
        let mut sent = Self { numbers: BTreeMap::new(), ids: Vec::new(), largest: 0 };
        let mut newest = 0;
        for packet in datagrams.iter().filter_map(|datagram| short_packet(datagram)) {
            let expected = sent.numbers.last_key_value().map_or(0, |(number, _)| number + 1);
            // The proxy may reorder packets, so a packet may have an older or a newer key generation than those before
            // it.
            let opened = (newest.max(1) - 1..newest + 3).find_map(|generation| {
                while keys.len() <= generation {
                    secret = secret.next();
                    keys.push(secret.packet_key());
                }
                let mut packet = packet.to_vec();
                let opened = packet::open(&mut packet, ID_LEN, expected, &header_key, |_| &keys[generation]);
                opened.ok().map(|opened| (opened.number, generation))
            });
            let (number, generation) = opened.expect("a packet of that end");
            newest = newest.max(generation);
            assert_eq!(sent.numbers.insert(number, generation), None, "number {number} was used twice");
            sent.largest = sent.largest.max(packet.len());
            let id = &packet[1..1 + ID_LEN];
            if !sent.ids.iter().any(|known| known == id) {
                sent.ids.push(id.to_vec());
            }
        }
        let generations: Vec<_> = sent.numbers.values().collect();
        assert!(generations.is_sorted(), "an older generation after a newer one");
        sent
    }

    pub fn generations(&self) -> usize {
        self.numbers.values().collect::<BTreeSet<_>>().len()
    }
}

/// Returns the 1-RTT packet in a datagram, which follows packets with long headers.
pub fn short_packet(datagram: &[u8]) -> Option<&[u8]> {
    let mut rest = datagram;
    while *rest.first()? & 0x80 != 0 {
        let kind = rest[0] >> 4 & 0x3;
        let mut at = 5;
        at += 1 + usize::from(rest[at]);
        at += 1 + usize::from(rest[at]);
        let mut fields = &rest[at..];
        if kind == 0 {
            let token = millrace_quic::varint::decode(&mut fields)? as usize;
            fields = &fields[token..];
        }
        let len = millrace_quic::varint::decode(&mut fields)? as usize;
        rest = &fields[len..];
    }
    Some(rest)
}

pub fn local_socket() -> std::net::UdpSocket {
    std::net::UdpSocket::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap()
}

/// Waits for `work`, and panics if it takes longer than `PATIENCE`.
pub async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("done in time")
}
