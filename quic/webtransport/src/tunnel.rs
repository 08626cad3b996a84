//! The start and end of a session: SETTINGS, the CONNECT request, and the capsules on its stream.

use std::time::Duration;

use millrace_quic::{
    capsule::{Capsules, Closed, MalformedCapsule},
    webtransport::{self, Binding},
};
use parking_lot::Mutex;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use tokio::{runtime::Handle, time::timeout};
use url::Url;
use web_transport_proto::{ConnectRequest, ConnectResponse, Settings};

use crate::request::{self, AcceptedRequest, SessionRefused, SessionTerms};

/// Longest time for which a server waits for the CONNECT request, and a client for the response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for which the connection stays open after the session was closed, so that the peer can read the reason.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// Largest number of bytes read at a time from the CONNECT request's stream.
const PIECE: usize = 16 * 1024;

/// An established session.
///
/// [`accept`] or [`connect`] creates it. It ends once: the peer closes it ([`Self::closed`]), this endpoint does
/// ([`Self::close`]), or the connection is lost. Streams and datagrams of the session are used through
/// [`SessionStreams`](crate::SessionStreams), not through the tunnel.
pub struct Tunnel {
    /// The CONNECT request of the session.
    pub asked: AcceptedRequest,
    binding: Binding,
    /// The sending side of the CONNECT request's stream; `None` once the session is closed.
    send: Mutex<Option<SendStream>>,
    recv: Mutex<Option<RecvStream>>,
    /// The runtime in which the session is closed, so that [`Self::close`] does not block.
    runtime: Handle,
    /// HTTP/3's control stream. It has to stay open, because its end is an error (RFC 9114, section 6.2.1).
    _control: SendStream,
}

/// Reason why a client got no session from a server.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum TunnelConnectError {
    #[error("the server did not answer in time")]
    Late,
    #[error("the server refused the session: {0}")]
    Refused(#[from] web_transport_proto::ConnectError),
    #[error("the server accepts none of the protocols {}", .0.join(", "))]
    Protocol(Vec<String>),
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Write(#[from] quinn::WriteError),
}

/// Waits for a client's CONNECT request, and accepts it if it meets the conditions. `bind` is called before the
/// response is sent, and thus before the client opens a stream.
///
/// # Errors
/// Fails if the request is refused or the connection is lost. The connection is closed in both cases.
pub async fn accept(
    connection: &Connection,
    terms: &SessionTerms<'_>,
    bind: impl FnOnce(Binding),
) -> Result<Tunnel, SessionRefused> {
    let accepted = timeout(REQUEST_TIMEOUT, negotiate(connection, terms, bind)).await;
    accepted.unwrap_or(Err(SessionRefused::Late)).inspect_err(|refused| {
        connection.close(code(webtransport::error::REQUEST_REJECTED), refused.to_string().as_bytes());
    })
}

async fn negotiate(
    connection: &Connection,
    terms: &SessionTerms<'_>,
    bind: impl FnOnce(Binding),
) -> Result<Tunnel, SessionRefused> {
    let control = open_control(connection).await?;
    let (mut send, mut recv) = connection.accept_bi().await?;
    let asked = match request::read(&mut recv, terms).await {
        Ok(asked) => asked,
        Err(refused) => {
            if let Some(status) = refused.status() {
                let telling = async {
                    if answer(&mut send, ConnectResponse::new(status)).await.is_ok() {
                        let _ = send.finish(); // `finish` fails if the client has stopped the stream
                        let _ = send.stopped().await; // `stopped` fails if the connection is lost
                    }
                };
                // If the client gives no flow control credit, the wait ends at its timeout, and the client gets no
                // response.
                let _ = timeout(CLOSE_PATIENCE, telling).await;
            }
            return Err(refused);
        }
    };
    let binding = binding_of(&send);
    bind(binding);
    answer(&mut send, ConnectResponse::OK.with_protocol(&asked.protocol)).await?;
    Ok(Tunnel::new(asked, binding, send, recv, control))
}

/// Requests a session at `url` with one of `protocols`, the preferred one first.
///
/// # Errors
/// Fails if the server gives no session.
pub async fn connect(
    connection: &Connection,
    url: Url,
    protocols: &[&str],
) -> Result<Tunnel, TunnelConnectError> {
    let asking = async {
        let control = open_control(connection).await?;
        let (mut send, mut recv) = connection.open_bi().await?;
        let offered = protocols.iter().map(|&protocol| protocol.to_owned());
        let request = ConnectRequest::new(url.clone()).with_protocols(offered.clone());
        let mut bytes = Vec::new();
        request.encode(&mut bytes)?;
        send.write_all(&bytes).await?;
        let response = ConnectResponse::read(&mut recv).await?;
        let chosen = response.protocol.as_deref().filter(|chosen| protocols.contains(chosen));
        let chosen = chosen.ok_or_else(|| TunnelConnectError::Protocol(offered.collect()))?;
        let binding = binding_of(&send);
        Ok(Tunnel::new(AcceptedRequest::from_url(&url, chosen), binding, send, recv, control))
    };
    timeout(REQUEST_TIMEOUT, asking).await.unwrap_or(Err(TunnelConnectError::Late))
}

fn binding_of(request: &SendStream) -> Binding {
    Binding::Session(VarInt::from(request.id()).into_inner())
}

/// Opens HTTP/3's control stream, with SETTINGS.
async fn open_control(connection: &Connection) -> Result<SendStream, quinn::WriteError> {
    let mut settings = Settings::default();
    settings.enable_webtransport(1);
    let mut bytes = Vec::new();
    settings.encode(&mut bytes);
    let mut control = connection.open_uni().await?;
    control.write_all(&bytes).await?;
    Ok(control)
}

async fn answer(send: &mut SendStream, response: ConnectResponse) -> Result<(), SessionRefused> {
    let mut bytes = Vec::new();
    response.encode(&mut bytes)?;
    Ok(send.write_all(&bytes).await?)
}

impl Tunnel {
    /// Number of unidirectional streams that this endpoint opens for HTTP/3: the control stream.
    pub const STREAMS: u64 = 1;

    fn new(
        asked: AcceptedRequest,
        binding: Binding,
        send: SendStream,
        recv: RecvStream,
        control: SendStream,
    ) -> Self {
        Self {
            asked,
            binding,
            send: Mutex::new(Some(send)),
            recv: Mutex::new(Some(recv)),
            runtime: Handle::current(),
            _control: control,
        }
    }

    /// Returns the session's [`Binding`], which determines the WebTransport header of its streams and datagrams.
    pub fn binding(&self) -> Binding {
        self.binding
    }

    /// Waits until the peer closes the session. Returns its code and reason, if it sent them. A second call never
    /// returns.
    ///
    /// # Errors
    /// Fails if the capsules on the CONNECT request's stream are malformed.
    pub async fn closed(&self) -> Result<Option<Closed>, MalformedCapsule> {
        let recv = self.recv.lock().take();
        let Some(mut recv) = recv else { return std::future::pending().await };
        let mut capsules = Capsules::default();
        loop {
            match recv.read_chunk(PIECE, true).await {
                Ok(Some(chunk)) => match capsules.next(&mut &chunk.bytes[..])? {
                    None => {}
                    closed => return Ok(closed),
                },
                Ok(None) => return capsules.finish().map(|()| None),
                Err(_) => return Ok(None),
            }
        }
    }

    /// Closes the session with a code and a reason for the peer's application, and then the connection.
    pub fn close(&self, connection: &Connection, error: u64, reason: &str) {
        // Only the first call of `close` has an effect.
        let Some(mut send) = self.send.lock().take() else { return };
        let closed = Closed { code: u32::try_from(error).unwrap_or(u32::MAX), reason: reason.to_owned() };
        let mut frame = Vec::new();
        closed.encode(&mut frame);
        let connection = connection.clone();
        let last = code(self.binding.to_wire(error));
        self.runtime.spawn(async move {
            let telling = async {
                if send.write_all(&frame).await.is_ok() {
                    let _ = send.finish(); // `finish` fails if the peer has stopped the stream
                    let _ = send.stopped().await; // `stopped` fails if the connection is lost
                }
            };
            // If the peer gives no flow control credit, the wait ends at its timeout, and the peer does not get the
            // reason in a capsule.
            let _ = timeout(CLOSE_PATIENCE, telling).await;
            connection.close(last, closed.reason.as_bytes());
        });
    }
}

fn code(code: u64) -> VarInt {
    VarInt::from_u64(code).unwrap_or(VarInt::MAX)
}
