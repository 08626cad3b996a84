//! The attacked server and its clients, which speak HTTP/3 (h3 on quinn).

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use bytes::{Buf as _, Bytes};
use h3::client::SendRequest;
use h3_quinn::OpenStreams;
use millrace_kernel::clock::monotonic_ns;
use quinn::{
    ClientConfig, Endpoint, EndpointConfig, Incoming, ServerConfig, TokioRuntime, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::task::JoinSet;

const ALPN: &[u8] = b"h3";
/// HTTP/3 error code H3_EXCESSIVE_LOAD (RFC 9114, section 8.1).
const EXCESSIVE_LOAD: VarInt = VarInt::from_u32(0x107);
const URI: &str = "https://localhost/body";
/// Interval of keep-alives. It is shorter than `idle_timeout` in the gate's policy, after which the gate forgets a
/// silent connection.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Longest time of one attempt to get a body over a new connection. It is shorter than a client's first probe timeout
/// of 1 s (RFC 9002, section 6.2.2). So no unanswered attempt retransmits its Initial.
const ATTEMPT: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
pub struct Http3Serve {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    tls_cert: PathBuf,
    #[arg(long)]
    tls_key: PathBuf,
    #[arg(long)]
    body_bytes: usize,
    /// Refuse new connections from an address that has this many connections
    #[arg(long)]
    connections: Option<usize>,
    /// Refuse new connections beyond this rate, per second
    #[arg(long)]
    new_per_second: Option<u32>,
    /// Refuse silently before the handshake; otherwise the handshake is done and the connection is closed
    #[arg(long)]
    early: bool,
}

/// Answers HTTP/3 requests until the process is killed.
pub fn serve(args: Http3Serve) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        let endpoint = Endpoint::server(server_config(&args)?, args.listen)?;
        let body = Bytes::from(vec![0x2a; args.body_bytes]);
        let limits = Arc::new(Http3Limits::new(&args));
        while let Some(incoming) = endpoint.accept().await {
            if !args.early {
                tokio::spawn(answer_or_close(incoming, body.clone(), limits.clone()));
                continue;
            }
            match limits.admit(incoming.remote_address().ip()) {
                Some(counted) => drop(tokio::spawn(answer_early(incoming, body.clone(), counted))),
                // `Incoming::ignore` sends nothing, as the gate does, and is the cheapest refusal that quinn offers.
                None => incoming.ignore(),
            }
        }
        Ok(())
    })
}

/// Enforces the limits after the handshake, as applications do: only then do they see a connection.
async fn answer_or_close(incoming: Incoming, body: Bytes, limits: Arc<Http3Limits>) -> anyhow::Result<()> {
    let connection = incoming.await?;
    match limits.admit(connection.remote_address().ip()) {
        Some(counted) => answer(connection, body, counted).await,
        None => {
            connection.close(EXCESSIVE_LOAD, b"too many connections");
            Ok(())
        }
    }
}

/// Serves a connection that was admitted early: on its first Initial, before the handshake. That is the earliest moment
/// at which quinn lets an application decide.
async fn answer_early(incoming: Incoming, body: Bytes, counted: CountedHttp3) -> anyhow::Result<()> {
    answer(incoming.await?, body, counted).await
}

/// Limits that the server enforces, and the state that they need.
struct Http3Limits {
    connections: Option<usize>,
    new_per_second: Option<u32>,
    counts: Mutex<HashMap<IpAddr, usize>>,
    bucket: Mutex<(f64, Instant)>,
}

/// An admitted connection. It counts towards its client's limit until it is dropped.
struct CountedHttp3(Arc<Http3Limits>, IpAddr);

impl Http3Limits {
    fn new(args: &Http3Serve) -> Self {
        let burst = f64::from(args.new_per_second.unwrap_or(0));
        Self {
            connections: args.connections,
            new_per_second: args.new_per_second,
            counts: Mutex::default(),
            bucket: Mutex::new((burst, Instant::now())),
        }
    }

    fn admit(self: &Arc<Self>, client: IpAddr) -> Option<CountedHttp3> {
        if !self.within_rate() {
            return None;
        }
        let mut counts = lock(&self.counts);
        let count = counts.entry(client).or_default();
        if self.connections.is_some_and(|most| *count >= most) {
            return None;
        }
        *count += 1;
        Some(CountedHttp3(self.clone(), client))
    }

    fn within_rate(&self) -> bool {
        let Some(rate) = self.new_per_second.map(f64::from) else { return true };
        let mut bucket = lock(&self.bucket);
        let now = Instant::now();
        let tokens = (bucket.0 + rate * now.duration_since(bucket.1).as_secs_f64()).min(rate);
        let within = tokens >= 1.0;
        *bucket = (if within { tokens - 1.0 } else { tokens }, now);
        within
    }
}

impl Drop for CountedHttp3 {
    fn drop(&mut self) {
        let mut counts = lock(&self.0.counts);
        if let Some(count) = counts.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.1);
            }
        }
    }
}

async fn answer(connection: quinn::Connection, body: Bytes, _counted: CountedHttp3) -> anyhow::Result<()> {
    let connection = h3_quinn::Connection::new(connection);
    let mut connection = h3::server::Connection::<_, Bytes>::new(connection).await?;
    while let Some(resolver) = connection.accept().await? {
        let body = body.clone();
        tokio::spawn(async move {
            let (_, mut stream) = resolver.resolve_request().await?;
            stream.send_response(http::Response::new(())).await?;
            stream.send_data(body).await?;
            stream.finish().await?;
            anyhow::Ok(())
        });
    }
    Ok(())
}

/// Times at which an honest client requested a response body and had received it; `CLOCK_MONOTONIC`, ns.
#[derive(Debug, Clone, Copy)]
pub struct BodyTimes {
    pub asked_ns: u64,
    pub done_ns: u64,
}

/// The server that clients connect to, and the certificate that they trust.
#[derive(Debug, Clone)]
pub struct Http3Target {
    pub server: SocketAddr,
    pub certificate: PathBuf,
    pub body_bytes: usize,
}

/// Runs honest clients until `until` returns true. Each requests one response body after the other over one connection,
/// at most one per `interval`. Must be called in the clients' network namespace; returns when all clients are done.
///
/// # Errors
///
/// Fails if a client lost its connection or got no body.
pub fn honest(
    target: &Http3Target,
    addresses: &[IpAddr],
    interval: Duration,
    until: impl Fn() -> bool + Clone + Send + 'static,
) -> anyhow::Result<Vec<BodyTimes>> {
    local_runtime()?.block_on(async {
        let mut clients = JoinSet::new();
        for address in addresses {
            clients.spawn(client(target.clone(), *address, interval, until.clone()));
        }
        let mut all = Vec::new();
        while let Some(got) = clients.join_next().await {
            all.extend(got??);
        }
        all.sort_unstable_by_key(|got| got.done_ns);
        Ok(all)
    })
}

async fn client(
    target: Http3Target,
    address: IpAddr,
    interval: Duration,
    until: impl Fn() -> bool,
) -> anyhow::Result<Vec<BodyTimes>> {
    let endpoint = endpoint(address, &client_config(&target)?)?;
    let mut session =
        Http3Session::open(&endpoint, &target).await.context("an honest client's connection")?;
    let mut all = Vec::new();
    let mut ticks = tokio::time::interval(interval.max(Duration::from_nanos(1)));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !until() {
        if !interval.is_zero() {
            ticks.tick().await;
        }
        let asked_ns = monotonic_ns();
        session.get(target.body_bytes).await.context("an honest client's request")?;
        all.push(BodyTimes { asked_ns, done_ns: monotonic_ns() });
    }
    Ok(all)
}

/// Totals of the attackers' connection attempts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attempts {
    pub made: u64,
    pub served: u64,
    /// Sum of the durations of connection attempts that got no response body, ns.
    pub refused_ns: u64,
    /// Start time of the attackers' last connection attempt; `CLOCK_MONOTONIC`, ns.
    pub last_ns: u64,
}

impl Attempts {
    pub fn refused_after_ms(&self) -> Option<f64> {
        let refused = self.made - self.served;
        (refused > 0).then(|| self.refused_ns as f64 / refused as f64 / 1e6)
    }

    fn add(&mut self, attempt: &Attempt) {
        self.made += 1;
        self.served += u64::from(attempt.served);
        self.refused_ns += if attempt.served { 0 } else { attempt.done_ns - attempt.began_ns };
        self.last_ns = self.last_ns.max(attempt.began_ns);
    }
}

struct Attempt {
    began_ns: u64,
    done_ns: u64,
    served: bool,
}

/// Runs attackers that each hold one connection. On each message from the channel `go`, every attacker makes `requests`
/// attempts at the rate `rate_hz`. Each attempt requests a response body over a new connection, without waiting for
/// earlier attempts. Returns when the channel is closed.
pub fn attack(
    target: &Http3Target,
    addresses: &[IpAddr],
    requests: u64,
    rate_hz: u32,
    mut go: tokio::sync::mpsc::Receiver<tokio::sync::oneshot::Sender<Attempts>>,
) -> anyhow::Result<()> {
    local_runtime()?.block_on(async {
        let config = client_config(target)?;
        let mut held = Vec::new();
        for address in addresses {
            let endpoint = endpoint(*address, &config)?;
            held.push(Http3Session::open(&endpoint, target).await.context("an attacker's first connection")?);
        }
        while let Some(tell) = go.recv().await {
            let _ = tell.send(attempts(target, addresses, &config, requests, rate_hz).await);
        }
        Ok(())
    })
}

async fn attempts(
    target: &Http3Target,
    addresses: &[IpAddr],
    config: &ClientConfig,
    requests: u64,
    rate_hz: u32,
) -> Attempts {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate_hz.max(1));
    let mut running = JoinSet::new();
    for _ in 0..requests {
        ticks.tick().await;
        for address in addresses {
            let target = target.clone();
            let address = *address;
            let config = config.clone();
            running.spawn(async move { attempt(&target, address, &config).await });
        }
    }
    let mut attempts = Attempts::default();
    while let Some(attempt) = running.join_next().await {
        // A connection attempt whose task panicked is not counted.
        attempt.iter().for_each(|attempt| attempts.add(attempt));
    }
    attempts
}

/// Makes one attempt from a new port, as a program that is started for each attempt would.
async fn attempt(target: &Http3Target, address: IpAddr, config: &ClientConfig) -> Attempt {
    let began_ns = monotonic_ns();
    let body = async {
        let endpoint = endpoint(address, config)?;
        Http3Session::open(&endpoint, target).await?.get(target.body_bytes).await
    };
    let served = matches!(tokio::time::timeout(ATTEMPT, body).await, Ok(Ok(())));
    Attempt { began_ns, done_ns: monotonic_ns(), served }
}

struct Http3Session {
    requests: SendRequest<OpenStreams, Bytes>,
    _driver: JoinSet<()>,
}

impl Http3Session {
    async fn open(endpoint: &Endpoint, target: &Http3Target) -> anyhow::Result<Self> {
        let connection = endpoint.connect(target.server, "localhost")?.await?;
        let (mut driver, requests) = h3::client::new(h3_quinn::Connection::new(connection)).await?;
        let mut drive = JoinSet::new();
        drive.spawn(async move {
            driver.wait_idle().await;
        });
        Ok(Self { requests, _driver: drive })
    }

    async fn get(&mut self, body_bytes: usize) -> anyhow::Result<()> {
        let mut stream = self.requests.send_request(http::Request::get(URI).body(())?).await?;
        stream.finish().await?;
        stream.recv_response().await?;
        let mut received = 0;
        while let Some(data) = stream.recv_data().await? {
            received += data.remaining();
        }
        anyhow::ensure!(received == body_bytes, "received a body of {received} bytes, expected {body_bytes}");
        Ok(())
    }
}

fn endpoint(address: IpAddr, config: &ClientConfig) -> anyhow::Result<Endpoint> {
    let socket = UdpSocket::bind((address, 0)).with_context(|| address.to_string())?;
    let mut endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime))?;
    endpoint.set_default_client_config(config.clone());
    Ok(endpoint)
}

fn client_config(target: &Http3Target) -> anyhow::Result<ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&target.certificate)?)?;
    let mut tls = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    let mut transport = TransportConfig::default();
    transport.keep_alive_interval(Some(KEEP_ALIVE));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

fn server_config(args: &Http3Serve) -> anyhow::Result<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(&args.tls_cert).context("cannot read the certificate")?;
    let key = PrivateKeyDer::from_pem_file(&args.tls_key).context("cannot read the private key")?;
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    Ok(ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?)))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

/// Builds a runtime that runs in the calling thread, which has entered the network namespace.
fn local_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
