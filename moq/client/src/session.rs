//! The client's side of a MoQ session: control streams, request streams, and what the peer opens.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use millrace_moq as moq;
use millrace_moq::param::Assignment;
use millrace_moq::{DecodeError, Draft, EncodeError, Message, StreamHeader, code, message};
use millrace_quic::silence::{self, Silence};
use millrace_webtransport as webtransport;
use millrace_webtransport::{Foreign, NotOurs, RecvStream, SendStream, Streams, Tunnel};
use parking_lot::Mutex;
use quinn::VarInt;
use tokio::sync::watch;
use url::{Position, Url};

use crate::dial::{self, Prober};
use crate::tls::Trust;

/// How long the end of a session may take to reach the peer.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The peer to connect to, usually a relay.
#[derive(Clone, Debug)]
pub struct Remote {
    /// As [`parse_url`] takes it.
    pub url: Url,
    pub trust: Trust,
    /// What to offer to speak, the preferred one first. The peer chooses.
    pub drafts: Vec<Draft>,
    /// Say in SETUP that switching sets may be asked for (draft-wilaw-moq-moqt-ssts). Its code points are provisional.
    pub switching_sets: bool,
}

impl Remote {
    pub fn new(url: Url, trust: Trust) -> Self {
        Self { url, trust, drafts: Draft::ALL.to_vec(), switching_sets: false }
    }
}

/// Why text is not the URL of a peer.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    #[error(transparent)]
    Syntax(#[from] url::ParseError),
    #[error("the URL begins neither with moqt:// nor with https://")]
    Scheme,
    #[error("the URL has no host")]
    NoHost,
    #[error("the URL names a user or a password, which relays do not know: use a token")]
    User,
}

/// Reads `moqt://HOST[:PORT][/PATH]`, or the same with `https://` for WebTransport; the port is 443 where there is none.
///
/// # Errors
/// It is another URL, or none.
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

/// The path and the query of a URL, as a peer is told them.
pub fn path_of(url: &Url) -> &str {
    &url[Position::BeforePath..Position::AfterQuery]
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Dial(#[from] dial::Error),
    #[error("no WebTransport session: {0}")]
    WebTransport(#[from] webtransport::ConnectError),
    #[error(transparent)]
    Session(#[from] Error),
}

/// Why a session or one of its requests ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the connection is closed: {0}")]
    Closed(#[from] quinn::ConnectionError),
    #[error("the peer broke the protocol: {0}")]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("the peer refused: {} {}", .0.code, .0.reason)]
    Refused(message::RequestError),
    #[error("the request was cancelled")]
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

/// A stream that the peer gave up is no failure of who reads it.
pub(crate) fn reset_of(error: Error) -> Result<(), Error> {
    match error {
        Error::Cancelled => Ok(()),
        error => Err(error),
    }
}

/// All application error codes of the draft fit; a peer's own may not.
fn varint(code: u64) -> VarInt {
    VarInt::from_u64(code).unwrap_or(VarInt::MAX)
}

pub(crate) fn reset(stream: &mut SendStream, code: code::Reset) {
    // Fails only when the stream has ended already.
    let _ = stream.reset(varint(code.0));
}

/// What the peer starts.
pub trait Handler: Send + Sync + 'static {
    /// A request. The default refuses it.
    fn request(
        self: Arc<Self>,
        _message: Message,
        mut request: Request,
    ) -> impl Future<Output = Result<(), Error>> + Send {
        async move { request.refuse(code::Request::NOT_SUPPORTED, "this client does not take requests").await }
    }

    /// A data stream. The default stops it.
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

    /// An object in a datagram. The default drops it.
    fn datagram(&self, _datagram: moq::Datagram) {}
}

/// A peer as its SETUP describes it.
#[derive(Clone, Debug)]
struct Peer {
    /// Whether switching sets may be asked for.
    switches: bool,
    is_millrace: bool,
}

/// One MoQ session over QUIC, or over WebTransport.
pub struct Session {
    endpoint: quinn::Endpoint,
    connection: quinn::Connection,
    draft: Draft,
    tunnel: Option<Tunnel>,
    foreign: Foreign,
    next_request: AtomicU64,
    goaway: watch::Sender<Option<String>>,
    /// The peer's description, once its SETUP has come.
    peer: watch::Sender<Option<Peer>>,
    /// Taken by [`Session::run`].
    prober: Mutex<Option<Prober>>,
    /// Held open: a control stream that ends is a violation.
    _control: SendStream,
}

impl Session {
    /// Connects and sends SETUP; the peer's comes while [`Session::run`] runs.
    ///
    /// # Errors
    /// No address of the host can be connected to, or the connection ends at once.
    pub async fn connect(remote: &Remote) -> Result<Arc<Self>, ConnectError> {
        Self::connect_from(remote, quinn::EndpointConfig::default()).await
    }

    /// As [`Session::connect`], from an endpoint of this configuration.
    ///
    /// # Errors
    /// As there.
    pub async fn connect_from(
        remote: &Remote,
        endpoint: quinn::EndpointConfig,
    ) -> Result<Arc<Self>, ConnectError> {
        let (endpoint, connection, prober) =
            dial::connect(&remote.url, &remote.trust, &remote.drafts, endpoint).await?;
        let prober = Some(prober);
        let setup = setup_of(remote);
        if remote.url.scheme() != "https" {
            return Ok(Self::start((endpoint, connection, prober), None, setup, 0).await?);
        }
        let protocols: Vec<_> = remote.drafts.iter().map(|draft| draft.protocol()).collect();
        let tunnel = webtransport::connect(&connection, remote.url.clone(), &protocols).await?;
        // The request has said where to.
        let setup = message::Setup { path: None, authority: None, ..setup };
        Ok(Self::start((endpoint, connection, prober), Some(tunnel), setup, 0).await?)
    }

    /// Begins a session on a connection, as the client if `first_request` is 0 and as the server if 1.
    pub(crate) async fn start(
        (endpoint, connection, prober): (quinn::Endpoint, quinn::Connection, Option<Prober>),
        tunnel: Option<Tunnel>,
        setup: message::Setup,
        first_request: u64,
    ) -> Result<Arc<Self>, Error> {
        let binding = tunnel.as_ref().map(Tunnel::binding).unwrap_or_default();
        let foreign = Foreign::default();
        let streams = Streams { connection: &connection, binding, foreign: &foreign };
        let draft = agreed(&connection, tunnel.as_ref());
        tracing::debug!(%draft, "connected");
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
            peer: watch::Sender::new(None),
            prober: Mutex::new(prober),
            _control: control,
        }))
    }

    pub fn connection(&self) -> &quinn::Connection {
        &self.connection
    }

    /// What is spoken.
    pub fn draft(&self) -> Draft {
        self.draft
    }

    /// Its streams and datagrams.
    pub fn streams(&self) -> Streams<'_> {
        let binding = self.tunnel.as_ref().map(Tunnel::binding).unwrap_or_default();
        Streams { connection: &self.connection, binding, foreign: &self.foreign }
    }

    /// The connection's own, which can move to another socket.
    pub fn endpoint(&self) -> &quinn::Endpoint {
        &self.endpoint
    }

    /// Whether the peer has announced that it will close the session, and where it wants us to go on: empty for where we are.
    pub fn goaway(&self) -> watch::Receiver<Option<String>> {
        self.goaway.subscribe()
    }

    /// Whether the peer knows switching sets; waits for its SETUP.
    pub async fn switches(&self) -> bool {
        self.peer().await.is_some_and(|peer| peer.switches)
    }

    /// Whether the peer is a relay of this project; waits for its SETUP.
    pub(crate) async fn is_with_millrace(&self) -> bool {
        self.peer().await.is_some_and(|peer| peer.is_millrace)
    }

    async fn peer(&self) -> Option<Peer> {
        let mut peer = self.peer.subscribe();
        peer.wait_for(Option::is_some).await.ok().and_then(|peer| peer.clone())
    }

    /// The request ID for the next request: even from the client, odd from the server.
    pub fn next_request_id(&self) -> u64 {
        self.next_request.fetch_add(2, Ordering::Relaxed)
    }

    /// Opens a request stream with `message`.
    pub async fn request(&self, message: impl Into<Message>) -> Result<Request, Error> {
        let (send, recv) = self.streams().open_bi().await?;
        let mut request = Request { draft: self.draft, send, recv, buffer: BytesMut::new() };
        request.send(message).await?;
        Ok(request)
    }

    /// Serves what the peer starts until the session ends.
    pub async fn run<H: Handler>(self: Arc<Self>, handler: Arc<H>) -> Error {
        let mut closed = pin!(self.tunnel_closed());
        let mut silent = pin!(self.probe_when_silent());
        loop {
            let served: Result<(), quinn::ConnectionError> = tokio::select! {
                never = &mut silent => match never {},
                close = &mut closed => Err(quinn::ConnectionError::ApplicationClosed(close)),
                stream = self.streams().accept_uni() => stream.map(|stream| {
                    let (session, handler) = (self.clone(), handler.clone());
                    tokio::spawn(async move {
                        let result = session.serve_uni(handler, stream).await;
                        session.note(result);
                    });
                }),
                streams = self.streams().accept_bi() => streams.map(|streams| {
                    let (session, handler) = (self.clone(), handler.clone());
                    tokio::spawn(async move {
                        let result = session.serve_bi(handler, streams).await;
                        session.note(result);
                    });
                }),
                datagram = self.streams().read_datagram() => datagram.map(|datagram| {
                    match moq::Datagram::decode(datagram) {
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

    /// Probes the peer whenever media came and nothing comes any more: a relay that was restarted says then that it does not know
    /// the connection, which would otherwise be found by the idle time-out.
    async fn probe_when_silent(&self) -> Infallible {
        let Some(mut prober) = self.prober.lock().take() else { return std::future::pending().await };
        let mut looks = tokio::time::interval(silence::LOOKS);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut silence = Silence::new(Instant::now());
        loop {
            looks.tick().await;
            if silence.look(Instant::now(), self.connection.stats().udp_rx.datagrams) {
                tracing::debug!("the peer is silent: probing it");
                prober.probe(&self.connection);
            }
        }
    }

    /// Until the peer closes the session inside of the connection.
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
        match self.streams().enter_bi(streams).await? {
            Some((send, recv)) => {
                let request = Request { draft: self.draft, send, recv, buffer: BytesMut::new() };
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
                        tracing::debug!(implementation = setup.implementation, "session is set up");
                        let switches = setup.switching_algorithms.contains(&Assignment::ALGORITHM);
                        let said = setup.implementation.as_deref().unwrap_or_default();
                        let is_millrace = said.starts_with("millrace");
                        self.peer.send_replace(Some(Peer { switches, is_millrace }));
                        is_set_up = true;
                    }
                    Message::GoAway(goaway) if is_set_up && self.goaway.borrow().is_none() => {
                        tracing::info!(
                            timeout_ms = goaway.timeout,
                            uri = goaway.uri,
                            "the peer is going away"
                        );
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

    /// A violation ends the session; a cancelled stream concerns only itself.
    fn note(&self, result: Result<(), Error>) {
        match result {
            Err(Error::Decode(error)) => {
                tracing::warn!(code = %error.code, "closing the session: {error}");
                self.close(error.code, error.reason);
            }
            Err(error) => tracing::debug!("a stream ended early: {error}"),
            Ok(()) => {}
        }
    }

    pub fn close(&self, code: code::Session, reason: &str) {
        match &self.tunnel {
            Some(tunnel) => tunnel.close(&self.connection, code.0, reason),
            None => self.connection.close(varint(code.0), reason.as_bytes()),
        }
    }

    /// Returns when the peer has been told that the session is closed, as far as it is there to be told.
    pub async fn closed(&self) {
        let _ = tokio::time::timeout(LAST_WORDS, self.endpoint.wait_idle()).await;
    }
}

/// The draft that was agreed on; where nothing was, the oldest.
fn agreed(connection: &quinn::Connection, tunnel: Option<&Tunnel>) -> Draft {
    let draft = match tunnel {
        Some(tunnel) => Draft::of_protocol(&tunnel.asked.protocol),
        None => {
            let data = connection.handshake_data();
            let data = data.and_then(|data| data.downcast::<quinn::crypto::rustls::HandshakeData>().ok());
            data.and_then(|data| Draft::of_alpn(data.protocol.as_deref()?))
        }
    };
    draft.unwrap_or(Draft::D18)
}

async fn serve_request<H: Handler>(handler: Arc<H>, mut request: Request) -> Result<(), Error> {
    match request.next().await? {
        Some(message) if message.opens_request() => handler.request(message, request).await,
        Some(_) => Err(violation("a request stream begins with a message that is not a request")),
        None => Ok(()),
    }
}

fn setup_of(Remote { url, switching_sets, .. }: &Remote) -> message::Setup {
    message::Setup {
        switching_algorithms: switching_sets.then_some(Assignment::ALGORITHM).into_iter().collect(),
        path: Some(path_of(url).to_owned()),
        authority: Some(url.authority().to_owned()),
        implementation: Some(concat!("millrace ", env!("CARGO_PKG_VERSION")).to_owned()),
        ..message::Setup::default()
    }
}

/// A request stream: a request one way, its answers (and updates of it) both ways.
pub struct Request {
    draft: Draft,
    send: SendStream,
    recv: RecvStream,
    buffer: BytesMut,
}

impl Request {
    pub async fn send(&mut self, message: impl Into<Message>) -> Result<(), Error> {
        let mut out = Vec::new();
        message.into().encode(self.draft, &mut out)?;
        Ok(self.send.write_all(&out).await?)
    }

    /// The next message, or `None` at the end of the peer's side. Can be cancelled without loss.
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

    /// The first answer: a message other than REQUEST_ERROR.
    pub async fn answer(&mut self) -> Result<Message, Error> {
        match self.next().await? {
            Some(Message::RequestError(error)) => Err(Error::Refused(error)),
            Some(message) => Ok(message),
            None => Err(Error::Cancelled),
        }
    }

    pub async fn refuse(&mut self, code: code::Request, reason: &str) -> Result<(), Error> {
        self.send(message::RequestError::new(code, reason)).await?;
        self.finish();
        Ok(())
    }

    /// Resolves when the peer wants no more messages, or has all of them after [`Request::finish`].
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.send.stopped();
        async move {
            let _ = stopped.await;
        }
    }

    /// Ends this side.
    pub fn finish(&mut self) {
        // Fails only when the stream has ended already.
        let _ = self.send.finish();
    }

    /// Takes the request back, or gives it up.
    pub fn cancel(&mut self) {
        reset(&mut self.send, code::Reset::CANCELLED);
        let _ = self.recv.stop(varint(code::Reset::CANCELLED.0));
    }
}

/// A unidirectional stream behind its header.
pub struct DataStream {
    stream: RecvStream,
    /// Read with the header, but behind it.
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

    /// The QUIC stream ID.
    pub fn id(&self) -> u64 {
        VarInt::from(self.stream.id()).into_inner()
    }

    /// Stream offset of the next byte that [`DataStream::chunk`] returns.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next bytes, or `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let chunk = match self.ahead.is_empty() {
            false => Some(std::mem::take(&mut self.ahead)),
            true => self.stream.read_chunk(usize::MAX, true).await?.map(|chunk| chunk.bytes),
        };
        self.offset += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
        Ok(chunk)
    }

    pub fn stop(&mut self, code: code::Reset) {
        // Fails only when the stream has ended already.
        let _ = self.stream.stop(varint(code.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        assert!(parse_url("moqt://localhost:4443/a?b").is_ok());
        assert!(parse_url("https://localhost:4443/a?b").is_ok());
        for bad in ["http://localhost", "moqt://", "https://", "localhost:4443", "moqt:///path", "moqt://a@b"]
        {
            assert!(parse_url(bad).is_err(), "{bad}");
        }
        let at = |url| Remote::new(parse_url(url).unwrap(), Trust::Anyone);
        let setup = setup_of(&at("moqt://localhost:4443/a?b"));
        assert_eq!(setup.path.as_deref(), Some("/a?b"));
        assert_eq!(setup.authority.as_deref(), Some("localhost:4443"));
        let bare = setup_of(&at("moqt://[::1]:4443"));
        assert_eq!(bare.path.as_deref(), Some(""));
        assert_eq!(bare.authority.as_deref(), Some("[::1]:4443"));
    }
}
