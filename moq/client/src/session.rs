//! The client's side of a MoQ session: control streams, request streams, and streams that the peer opens.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use millrace_moq as moq;
use millrace_moq::param::Assignment;
use millrace_moq::{DecodeError, Draft, EncodeError, HopId, Message, StreamHeader, code, message};
use millrace_quic::silence::{self, PacketTotals, Silence};
use millrace_webtransport as webtransport;
use millrace_webtransport::attempts::SERVER_TIMEOUT;
use millrace_webtransport::{Foreign, NotOurs, RecvStream, SendStream, SessionStreams, Tunnel};
use parking_lot::Mutex;
use quinn::VarInt;
use tokio::sync::watch;
use url::{Position, Url};

use crate::dial::{self, Prober};
use crate::tls::CertificateTrust;

/// Longest time to wait until the peer has received the close of a session.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A peer to connect to, usually a relay.
///
/// ```
/// use millrace_client::session::{Remote, parse_url};
/// use millrace_client::tls::CertificateTrust;
/// use millrace_moq::Draft;
///
/// let mut remote = Remote::new(parse_url("moqt://relay.example/live")?, CertificateTrust::System);
/// remote.drafts = vec![Draft::D18];
/// # Ok::<(), millrace_client::session::UrlError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Remote {
    /// The URL, as returned by [`parse_url`].
    pub url: Url,
    /// URLs of further peers that serve the same broadcasts. [`publish`](crate::publish::publish) and the functions of
    /// [`subscribe`](crate::subscribe) use the first one that answers, and go on to the next one when that fails.
    pub others: Vec<Url>,
    /// The server certificates that are accepted.
    pub trust: CertificateTrust,
    /// Drafts to offer, the preferred one first. The peer chooses one.
    pub drafts: Vec<Draft>,
    /// Whether to announce in SETUP that switching sets are supported (draft-wilaw-moq-moqt-ssts). The code points of
    /// that draft are provisional.
    pub switching_sets: bool,
    /// The identity (HOP_ID) that this endpoint states in SETUP (draft-lcurley-moq-cluster). A relay of a cluster then
    /// requires HOP_PATH in every announcement of this endpoint.
    pub hop: Option<HopId>,
}

impl Remote {
    /// Makes a peer with the default options.
    pub fn new(url: Url, trust: CertificateTrust) -> Self {
        Self { url, others: Vec::new(), trust, drafts: Draft::ALL.to_vec(), switching_sets: false, hop: None }
    }
}

/// The reason why text is not the URL of a peer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum UrlError {
    #[error(transparent)]
    Syntax(#[from] url::ParseError),
    #[error("the URL must begin with moqt:// or https://")]
    Scheme,
    #[error("the URL has no host")]
    NoHost,
    #[error("the URL has a user name or a password, which relays do not support: use a token")]
    User,
}

/// Parses `moqt://HOST[:PORT][/PATH]`, or the same with `https://` for WebTransport. The default port is 443.
///
/// # Errors
/// Fails if the text is not a URL, or a URL of another form.
pub fn parse_url(text: &str) -> Result<Url, UrlError> {
    let url = Url::parse(text)?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(UrlError::User);
    }
    match (url.scheme(), url.host_str()) {
        ("moqt" | "https", Some(host)) if !host.is_empty() => Ok(url),
        ("moqt" | "https", _) => Err(UrlError::NoHost),
        _ => Err(UrlError::Scheme),
    }
}

/// Returns the path and query of a URL, in the form that the SETUP message or WebTransport's CONNECT request carries.
pub fn path_of(url: &Url) -> &str {
    &url[Position::BeforePath..Position::AfterQuery]
}

/// The reason why no session was established.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum SessionConnectError {
    #[error(transparent)]
    Dial(#[from] dial::Error),
    #[error("no WebTransport session: {0}")]
    WebTransport(#[from] webtransport::TunnelConnectError),
    #[error(transparent)]
    Session(#[from] Error),
    #[error("{} did not answer within {} s", .0.authority(), SERVER_TIMEOUT.as_secs())]
    Late(Url),
}

/// The reason why a session or one of its requests ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("the connection is closed: {0}")]
    Closed(#[from] quinn::ConnectionError),
    #[error("the peer broke the protocol: {0}")]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("the peer refused: {} {}", .0.code, .0.reason)]
    Refused(message::RequestError),
    #[error("the peer cancelled the request")]
    Cancelled,
}

impl From<quinn::WriteError> for Error {
    fn from(error: quinn::WriteError) -> Self {
        match error {
            quinn::WriteError::ConnectionLost(error) => Self::Closed(error),
            _ => Self::Cancelled,
        }
    }
}

impl From<quinn::ReadError> for Error {
    fn from(error: quinn::ReadError) -> Self {
        match error {
            quinn::ReadError::ConnectionLost(error) => Self::Closed(error),
            _ => Self::Cancelled,
        }
    }
}

impl From<NotOurs> for Error {
    fn from(error: NotOurs) -> Self {
        match error {
            NotOurs::Read(error) => error.into(),
            _ => violation("a stream of another session"),
        }
    }
}

pub(crate) const fn violation(reason: &'static str) -> Error {
    Error::Decode(DecodeError { code: code::Session::PROTOCOL_VIOLATION, reason })
}

/// Turns [`Error::Cancelled`] into success: if the peer cancels a stream, the task that reads it has not failed.
pub(crate) fn reset_of(error: Error) -> Result<(), Error> {
    match error {
        Error::Cancelled => Ok(()),
        error => Err(error),
    }
}

/// Converts an error code to a QUIC varint. All error codes that MoQ Transport defines fit, but a code that a peer has
/// sent may not.
fn varint(code: u64) -> VarInt {
    VarInt::from_u64(code).unwrap_or(VarInt::MAX)
}

pub(crate) fn reset(stream: &mut SendStream, code: code::Reset) {
    // `reset` fails only if the stream has already ended.
    let _ = stream.reset(varint(code.0));
}

/// A handler of the requests, data streams and datagrams that the peer sends.
pub trait Handler: Send + Sync + 'static {
    /// Handles a request of the peer. The default implementation refuses it.
    fn request(
        self: Arc<Self>,
        _message: Message,
        mut request: SessionRequest,
    ) -> impl Future<Output = Result<(), Error>> + Send {
        async move { request.refuse(code::Request::NOT_SUPPORTED, "this client does not take requests").await }
    }

    /// Handles a data stream of the peer. The default implementation sends STOP_SENDING.
    fn stream(
        self: Arc<Self>,
        _header: StreamHeader,
        mut stream: DataStream,
    ) -> impl Future<Output = Result<(), Error>> + Send {
        async move {
            stream.stop(code::Reset::CANCELLED);
            Ok(())
        }
    }

    /// Handles an object that arrived in a datagram. The default implementation drops it.
    fn datagram(&self, _datagram: moq::ObjectDatagram) {}
}

/// The fields of the peer's SETUP.
#[derive(Clone, Debug)]
struct PeerSetup {
    /// Whether the peer supports switching sets.
    switches: bool,
    is_millrace: bool,
}

/// One MoQ session over QUIC, or over WebTransport.
///
/// [`connect`](Self::connect) establishes the connection and sends SETUP. [`run`](Self::run) must then run in a task of
/// its own: it receives the peer's SETUP, requests, streams and datagrams, and returns why the session ended.
/// [`request`](Self::request) and [`streams`](Self::streams) may be used before the peer's SETUP has arrived.
/// [`close`](Self::close) ends the session. [`closed`](Self::closed) waits until the peer has received the close.
pub struct Session {
    endpoint: quinn::Endpoint,
    connection: quinn::Connection,
    draft: Draft,
    tunnel: Option<Tunnel>,
    foreign: Foreign,
    next_request: AtomicU64,
    goaway: watch::Sender<Option<String>>,
    /// Whether the peer has left probes unanswered for so long that it is likely dead.
    silent: watch::Sender<bool>,
    /// The fields of the peer's SETUP, once it has arrived.
    peer: watch::Sender<Option<PeerSetup>>,
    /// The prober, which tests whether a silent peer still has state for the connection. `None` after [`Session::run`]
    /// has taken it.
    prober: Mutex<Option<Prober>>,
    /// Our control stream. It is kept open, because closing it would be a protocol violation.
    _control: SendStream,
}

impl Session {
    /// Connects and sends SETUP. The peer's SETUP is received while [`Session::run`] runs.
    ///
    /// # Errors
    /// Fails if no address of the host can be connected to, or the connection ends at once.
    pub async fn connect(remote: &Remote) -> Result<Arc<Self>, SessionConnectError> {
        Self::connect_from(remote, quinn::EndpointConfig::default()).await
    }

    /// Does the same as [`Session::connect`], with the quinn endpoint configuration `endpoint`.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Session::connect`].
    pub async fn connect_from(
        remote: &Remote,
        endpoint: quinn::EndpointConfig,
    ) -> Result<Arc<Self>, SessionConnectError> {
        let (endpoint, connection, prober) =
            dial::connect(&remote.url, &remote.trust, &remote.drafts, endpoint).await?;
        let prober = Some(prober);
        let setup = setup_of(remote);
        if remote.url.scheme() != "https" {
            return Ok(Self::start(endpoint, connection, prober, None, setup, 0).await?);
        }
        let protocols: Vec<_> = remote.drafts.iter().map(|draft| draft.protocol()).collect();
        let tunnel = webtransport::connect(&connection, remote.url.clone(), &protocols).await?;
        // Over WebTransport the CONNECT request carries path and authority, so SETUP must not.
        let setup = message::SetupOptions { path: None, authority: None, ..setup };
        Ok(Self::start(endpoint, connection, prober, Some(tunnel), setup, 0).await?)
    }

    /// Begins a session on a connection. `first_request` is the first request ID of this endpoint: 0 for a client and 1
    /// for a server.
    pub(crate) async fn start(
        endpoint: quinn::Endpoint,
        connection: quinn::Connection,
        prober: Option<Prober>,
        tunnel: Option<Tunnel>,
        setup: message::SetupOptions,
        first_request: u64,
    ) -> Result<Arc<Self>, Error> {
        let binding = tunnel.as_ref().map(Tunnel::binding).unwrap_or_default();
        let foreign = Foreign::default();
        let streams = SessionStreams { connection: &connection, binding, foreign: &foreign };
        let draft = agreed(&connection, tunnel.as_ref());
        tracing::debug!(%draft, "connected to the relay");
        let mut control = streams.open_uni().await?;
        let mut out = Vec::new();
        Message::from(setup).encode(draft, &mut out)?;
        control.write_all(&out).await?;
        Ok(Arc::new(Self {
            endpoint,
            connection,
            draft,
            tunnel,
            foreign,
            next_request: AtomicU64::new(first_request),
            goaway: watch::Sender::new(None),
            silent: watch::Sender::new(false),
            peer: watch::Sender::new(None),
            prober: Mutex::new(prober),
            _control: control,
        }))
    }

    /// Returns the QUIC connection.
    pub fn connection(&self) -> &quinn::Connection {
        &self.connection
    }

    /// Returns the draft that was agreed on.
    pub fn draft(&self) -> Draft {
        self.draft
    }

    /// Returns the session's streams and datagrams.
    pub fn streams(&self) -> SessionStreams<'_> {
        let binding = self.tunnel.as_ref().map(Tunnel::binding).unwrap_or_default();
        SessionStreams { connection: &self.connection, binding, foreign: &self.foreign }
    }

    /// Returns the connection's endpoint, which can be rebound to another socket.
    pub fn endpoint(&self) -> &quinn::Endpoint {
        &self.endpoint
    }

    /// Returns a receiver of the URI in the peer's GOAWAY. An empty URI means the URI to which this session was
    /// connected.
    pub fn goaway(&self) -> watch::Receiver<Option<String>> {
        self.goaway.subscribe()
    }

    /// Returns a receiver that says whether the peer is likely dead, because it answers no probe. The connection stays
    /// open until its idle timeout, since the peer may answer again.
    pub fn silent(&self) -> watch::Receiver<bool> {
        self.silent.subscribe()
    }

    /// Reports whether the peer supports switching sets. Waits for the peer's SETUP.
    pub async fn switches(&self) -> bool {
        self.peer().await.is_some_and(|peer| peer.switches)
    }

    /// Reports whether the peer is a Millrace relay. Waits for the peer's SETUP.
    pub(crate) async fn is_with_millrace(&self) -> bool {
        self.peer().await.is_some_and(|peer| peer.is_millrace)
    }

    async fn peer(&self) -> Option<PeerSetup> {
        let mut peer = self.peer.subscribe();
        peer.wait_for(Option::is_some).await.ok().and_then(|peer| peer.clone())
    }

    /// Returns the ID for the next request: even from the client, odd from the server.
    pub fn next_request_id(&self) -> u64 {
        self.next_request.fetch_add(2, Ordering::Relaxed)
    }

    /// Opens a request stream with `message`.
    pub async fn request(&self, message: impl Into<Message>) -> Result<SessionRequest, Error> {
        let (send, recv) = self.streams().open_bi().await?;
        let mut request = SessionRequest { draft: self.draft, send, recv, buffer: BytesMut::new() };
        request.send(message).await?;
        Ok(request)
    }

    /// Handles all requests, streams and datagrams of the peer until the session ends. Returns the reason for its end.
    pub async fn run<H: Handler>(self: Arc<Self>, handler: Arc<H>) -> Error {
        let mut closed = pin!(self.tunnel_closed());
        let mut silent = pin!(self.probe_when_silent());
        loop {
            let served: Result<(), quinn::ConnectionError> = tokio::select! {
                never = &mut silent => match never {},
                close = &mut closed => Err(quinn::ConnectionError::ApplicationClosed(close)),
                stream = self.streams().accept_uni() => stream.map(|stream| {
                    let session = self.clone();
                    let handler = handler.clone();
                    tokio::spawn(async move {
                        let result = session.serve_uni(handler, stream).await;
                        session.note(result);
                    });
                }),
                streams = self.streams().accept_bi() => streams.map(|streams| {
                    let session = self.clone();
                    let handler = handler.clone();
                    tokio::spawn(async move {
                        let result = session.serve_bi(handler, streams).await;
                        session.note(result);
                    });
                }),
                datagram = self.streams().read_datagram() => datagram.map(|datagram| {
                    match moq::ObjectDatagram::decode(datagram) {
                        Ok(Some(datagram)) => handler.datagram(datagram),
                        Ok(None) => {}
                        Err(error) => self.note(Err(error.into())),
                    }
                }),
            };
            if let Err(error) = served {
                return error.into();
            }
        }
    }

    /// Probes the peer when no packets arrive any more, and reports when it answers no probe. A restarted relay answers
    /// with a stateless reset, because it has no state for the connection. Without a probe, only the idle timeout would
    /// reveal the restart.
    async fn probe_when_silent(&self) -> Infallible {
        let Some(mut prober) = self.prober.lock().take() else { return std::future::pending().await };
        let mut looks = tokio::time::interval(silence::LOOKS);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut silence = Silence::new(Instant::now());
        loop {
            looks.tick().await;
            let stats = self.connection.stats();
            let frames = stats.frame_rx;
            let received = frames.acks + frames.datagram + frames.ping + frames.stream;
            let packets = PacketTotals { received, sent: stats.udp_tx.datagrams };
            if silence.look(Instant::now(), packets) {
                tracing::debug!("the relay has been silent: probing the connection");
                prober.probe(&self.connection);
            }
            let is_dead = silence.is_dead(stats.path.rtt);
            self.silent.send_if_modified(|was_dead| std::mem::replace(was_dead, is_dead) != is_dead);
        }
    }

    /// Waits until the peer closes the WebTransport session that this connection carries.
    async fn tunnel_closed(&self) -> quinn::ApplicationClose {
        let Some(tunnel) = &self.tunnel else { return std::future::pending().await };
        let (code, reason) = match tunnel.closed().await {
            Ok(closed) => closed.map_or_else(Default::default, |closed| (closed.code, closed.reason)),
            Err(malformed) => (0, malformed.to_string()),
        };
        self.connection.close(VarInt::from_u32(0), b"");
        quinn::ApplicationClose { error_code: VarInt::from_u32(code), reason: reason.into() }
    }

    async fn serve_bi<H: Handler>(
        &self,
        handler: Arc<H>,
        streams: (SendStream, RecvStream),
    ) -> Result<(), Error> {
        match self.streams().enter_bi(streams.0, streams.1).await? {
            Some((send, recv)) => {
                let request = SessionRequest { draft: self.draft, send, recv, buffer: BytesMut::new() };
                serve_request(handler, request).await
            }
            None => Ok(()),
        }
    }

    async fn serve_uni<H: Handler>(&self, handler: Arc<H>, stream: RecvStream) -> Result<(), Error> {
        let Some(stream) = self.streams().enter_uni(stream).await? else { return Ok(()) };
        let (header, mut stream) = DataStream::open(stream).await?;
        match header {
            StreamHeader::Setup => self.read_control(stream).await,
            StreamHeader::Padding => {
                while stream.chunk().await?.is_some() {}
                Ok(())
            }
            header => handler.stream(header, stream).await,
        }
    }

    async fn read_control(&self, mut stream: DataStream) -> Result<(), Error> {
        let mut buffer = BytesMut::new();
        let mut is_set_up = false;
        loop {
            while let Some(message) = Message::decode(self.draft, &mut buffer)? {
                match message {
                    Message::Setup(setup) if !is_set_up => {
                        tracing::debug!(
                            implementation = setup.implementation,
                            "the MoQ session is established"
                        );
                        let switches = setup.switching_algorithms.contains(&Assignment::ALGORITHM);
                        let said = setup.implementation.as_deref().unwrap_or_default();
                        let is_millrace = said.starts_with("millrace");
                        self.peer.send_replace(Some(PeerSetup { switches, is_millrace }));
                        is_set_up = true;
                    }
                    Message::GoAway(goaway) if is_set_up && self.goaway.borrow().is_none() => {
                        tracing::info!(timeout_ms = goaway.timeout, uri = goaway.uri, "the peer sent GOAWAY");
                        self.goaway.send_replace(Some(goaway.uri));
                    }
                    _ => return Err(violation("a message that the control stream does not allow")),
                }
            }
            match stream.chunk().await? {
                Some(chunk) => buffer.extend_from_slice(&chunk),
                None => return Err(violation("the control stream ended")),
            }
        }
    }

    /// Closes the session if `result` is a protocol violation. Other errors affect only one stream, and are logged.
    fn note(&self, result: Result<(), Error>) {
        match result {
            Err(Error::Decode(error)) => {
                tracing::warn!(code = %error.code, "closing the session, because the peer violated the protocol: {error}");
                self.close(error.code, error.reason);
            }
            Err(error) => tracing::debug!("a stream of the session ended early: {error}"),
            Ok(()) => {}
        }
    }

    /// Closes the session.
    pub fn close(&self, code: code::Session, reason: &str) {
        match &self.tunnel {
            Some(tunnel) => tunnel.close(&self.connection, code.0, reason),
            None => self.connection.close(varint(code.0), reason.as_bytes()),
        }
    }

    /// Waits until the peer has received the close of the session, but not longer than `LAST_WORDS`.
    pub async fn closed(&self) {
        let _ = tokio::time::timeout(LAST_WORDS, self.endpoint.wait_idle()).await;
    }
}

/// Returns the draft that was agreed on, or the oldest one if none was.
fn agreed(connection: &quinn::Connection, tunnel: Option<&Tunnel>) -> Draft {
    let draft = match tunnel {
        Some(tunnel) => Draft::from_protocol(&tunnel.asked.protocol),
        None => {
            let data = connection.handshake_data();
            let data = data.and_then(|data| data.downcast::<quinn::crypto::rustls::HandshakeData>().ok());
            data.and_then(|data| Draft::from_alpn(data.protocol.as_deref()?))
        }
    };
    draft.unwrap_or(Draft::D18)
}

async fn serve_request<H: Handler>(handler: Arc<H>, mut request: SessionRequest) -> Result<(), Error> {
    match request.next().await? {
        Some(message) if message.opens_request() => handler.request(message, request).await,
        Some(_) => Err(violation("a request stream begins with a message that is not a request")),
        None => Ok(()),
    }
}

fn setup_of(Remote { url, switching_sets, hop, .. }: &Remote) -> message::SetupOptions {
    message::SetupOptions {
        switching_algorithms: switching_sets.then_some(Assignment::ALGORITHM).into_iter().collect(),
        path: Some(path_of(url).to_owned()),
        authority: Some(url.authority().to_owned()),
        implementation: Some(concat!("millrace ", env!("CARGO_PKG_VERSION")).to_owned()),
        hop_id: *hop,
        ..message::SetupOptions::default()
    }
}

/// A request's bidirectional stream. The requester sends the request, and the peer sends responses. Both may send
/// updates of the request.
pub struct SessionRequest {
    draft: Draft,
    send: SendStream,
    recv: RecvStream,
    buffer: BytesMut,
}

impl SessionRequest {
    /// Sends a message.
    pub async fn send(&mut self, message: impl Into<Message>) -> Result<(), Error> {
        let mut out = Vec::new();
        message.into().encode(self.draft, &mut out)?;
        Ok(self.send.write_all(&out).await?)
    }

    /// Returns the next message, or `None` at the end of the peer's side. It is cancel safe: no message is lost if the
    /// future is dropped.
    pub async fn next(&mut self) -> Result<Option<Message>, Error> {
        loop {
            if let Some(message) = Message::decode(self.draft, &mut self.buffer)? {
                return Ok(Some(message));
            }
            match self.recv.read_chunk(usize::MAX, true).await? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk.bytes),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(violation("a request stream ends inside a message")),
            }
        }
    }

    /// Returns the first response to the request. A REQUEST_ERROR becomes [`Error::Refused`].
    pub async fn answer(&mut self) -> Result<Message, Error> {
        match self.next().await? {
            Some(Message::RequestError(error)) => Err(Error::Refused(error)),
            Some(message) => Ok(message),
            None => Err(Error::Cancelled),
        }
    }

    /// Refuses the peer's request.
    pub async fn refuse(&mut self, code: code::Request, reason: &str) -> Result<(), Error> {
        self.send(message::RequestError::new(code, reason)).await?;
        self.finish();
        Ok(())
    }

    /// Waits until the peer has stopped our side of the stream, or has acknowledged all of it after
    /// [`SessionRequest::finish`].
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.send.stopped();
        async move {
            let _ = stopped.await;
        }
    }

    /// Ends our side of the stream.
    pub fn finish(&mut self) {
        // `finish` fails only if the stream has already ended.
        let _ = self.send.finish();
    }

    /// Cancels the request.
    pub fn cancel(&mut self) {
        reset(&mut self.send, code::Reset::CANCELLED);
        let _ = self.recv.stop(varint(code::Reset::CANCELLED.0));
    }
}

/// A unidirectional stream whose header was read.
pub struct DataStream {
    stream: RecvStream,
    /// Bytes that were read together with the header, but follow it.
    ahead: Bytes,
    offset: u64,
}

impl DataStream {
    async fn open(mut stream: RecvStream) -> Result<(StreamHeader, Self), Error> {
        let mut front = BytesMut::new();
        loop {
            let chunk = stream.read_chunk(usize::MAX, true).await?;
            let Some(chunk) = chunk else { return Err(violation("a stream ends inside its header")) };
            front.extend_from_slice(&chunk.bytes);
            let mut rest = &front[..];
            if let Some(header) = StreamHeader::decode(&mut rest)? {
                let read = front.len() - rest.len();
                let ahead = front.freeze().slice(read..);
                let offset = (stream.preamble() + read) as u64;
                return Ok((header, Self { stream, ahead, offset }));
            }
        }
    }

    /// Returns the QUIC stream ID.
    pub fn id(&self) -> u64 {
        VarInt::from(self.stream.id()).into_inner()
    }

    /// Returns the stream offset of the next byte that [`DataStream::chunk`] returns.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next bytes, or `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let chunk = match self.ahead.is_empty() {
            false => Some(std::mem::take(&mut self.ahead)),
            true => self.stream.read_chunk(usize::MAX, true).await?.map(|chunk| chunk.bytes),
        };
        self.offset += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
        Ok(chunk)
    }

    /// Sends STOP_SENDING, because the rest of the stream is not needed.
    pub fn stop(&mut self, code: code::Reset) {
        // `stop` fails only if the stream has already ended.
        let _ = self.stream.stop(varint(code.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_moqt_and_https_urls_without_user_name_are_accepted() {
        assert!(parse_url("moqt://localhost:4443/a?b").is_ok());
        assert!(parse_url("https://localhost:4443/a?b").is_ok());
        for bad in ["http://localhost", "moqt://", "https://", "localhost:4443", "moqt:///path", "moqt://a@b"]
        {
            assert!(parse_url(bad).is_err(), "{bad}");
        }
        let at = |url| Remote::new(parse_url(url).unwrap(), CertificateTrust::Anyone);
        let setup = setup_of(&at("moqt://localhost:4443/a?b"));
        assert_eq!(setup.path.as_deref(), Some("/a?b"));
        assert_eq!(setup.authority.as_deref(), Some("localhost:4443"));
        let bare = setup_of(&at("moqt://[::1]:4443"));
        assert_eq!(bare.path.as_deref(), Some(""));
        assert_eq!(bare.authority.as_deref(), Some("[::1]:4443"));
    }
}
