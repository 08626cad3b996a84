//! A session's beginning and its end: SETTINGS, the CONNECT request, and the capsules on its stream.

use std::time::Duration;

use millrace_quic::{
    capsule::{Capsules, Closed, Malformed},
    webtransport::{self, Binding},
};
use parking_lot::Mutex;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use tokio::{runtime::Handle, time::timeout};
use url::Url;
use web_transport_proto::{ConnectRequest, ConnectResponse, Settings};

use crate::request::{self, Asked, Refused, Terms};

/// How long a client may take for its CONNECT request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the connection waits for the client to have read why its session is closed.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// Of the request's stream, what is read at a time, bytes.
const PIECE: usize = 16 * 1024;

/// A session, as long as it lasts.
pub struct Tunnel {
    pub asked: Asked,
    binding: Binding,
    /// This end of the request's stream, until the session is closed.
    send: Mutex<Option<SendStream>>,
    recv: Mutex<Option<RecvStream>>,
    /// Where the session is closed: whoever does that does not wait.
    runtime: Handle,
    /// A control stream that ends is an error.
    _control: SendStream,
}

/// Why there is no session with a server.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("the server did not answer in time")]
    Late,
    #[error("the server refused: {0}")]
    Refused(#[from] web_transport_proto::ConnectError),
    #[error("the server speaks none of {}", .0.join(", "))]
    Protocol(Vec<String>),
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Write(#[from] quinn::WriteError),
}

/// Waits for a client's request and lets it in, if it is to the terms. `bind` is called before the client hears of that, and so
/// before it opens a stream.
///
/// # Errors
/// It is not let in: the connection is closed.
pub async fn accept(
    connection: &Connection,
    terms: &Terms<'_>,
    bind: impl FnOnce(Binding),
) -> Result<Tunnel, Refused> {
    let accepted = timeout(REQUEST_TIMEOUT, negotiate(connection, terms, bind)).await;
    accepted.unwrap_or(Err(Refused::Late)).inspect_err(|refused| {
        connection.close(code(webtransport::error::REQUEST_REJECTED), refused.to_string().as_bytes());
    })
}

async fn negotiate(
    connection: &Connection,
    terms: &Terms<'_>,
    bind: impl FnOnce(Binding),
) -> Result<Tunnel, Refused> {
    let control = open_control(connection).await?;
    let (mut send, mut recv) = connection.accept_bi().await?;
    let asked = match request::read(&mut recv, terms).await {
        Ok(asked) => asked,
        Err(refused) => {
            if let Some(status) = refused.status() {
                let telling = async {
                    if answer(&mut send, ConnectResponse::new(status)).await.is_ok() {
                        let _ = send.finish(); // stopped: it does not want to know
                        let _ = send.stopped().await; // or the connection is lost
                    }
                };
                let _ = timeout(CLOSE_PATIENCE, telling).await; // who gives no credit for it is not told
            }
            return Err(refused);
        }
    };
    let binding = binding_of(&send);
    bind(binding);
    answer(&mut send, ConnectResponse::OK.with_protocol(&asked.protocol)).await?;
    Ok(Tunnel::new(asked, binding, (send, recv), control))
}

/// Asks a server for a session at `url`, which is to speak one of `protocols`, of which the first is preferred.
///
/// # Errors
/// There is none.
pub async fn connect(connection: &Connection, url: Url, protocols: &[&str]) -> Result<Tunnel, ConnectError> {
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
        let chosen = chosen.ok_or_else(|| ConnectError::Protocol(offered.collect()))?;
        let binding = binding_of(&send);
        Ok(Tunnel::new(Asked::of(&url, chosen), binding, (send, recv), control))
    };
    timeout(REQUEST_TIMEOUT, asking).await.unwrap_or(Err(ConnectError::Late))
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

async fn answer(send: &mut SendStream, response: ConnectResponse) -> Result<(), Refused> {
    let mut bytes = Vec::new();
    response.encode(&mut bytes)?;
    Ok(send.write_all(&bytes).await?)
}

impl Tunnel {
    /// Unidirectional streams that this end has opened for HTTP/3: the control stream.
    pub const STREAMS: u64 = 1;

    fn new(
        asked: Asked,
        binding: Binding,
        (send, recv): (SendStream, RecvStream),
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

    /// How the session's streams look.
    pub fn binding(&self) -> Binding {
        self.binding
    }

    /// Until the peer closes the session; with what, if it said that. Called once.
    ///
    /// # Errors
    /// It closes it with something else.
    pub async fn closed(&self) -> Result<Option<Closed>, Malformed> {
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

    /// Closes the session with a code and a reason that the client's application sees, and then the connection.
    pub fn close(&self, connection: &Connection, error: u64, reason: &str) {
        // Once: who closes first says why.
        let Some(mut send) = self.send.lock().take() else { return };
        let closed = Closed { code: u32::try_from(error).unwrap_or(u32::MAX), reason: reason.to_owned() };
        let mut frame = Vec::new();
        closed.encode(&mut frame);
        let connection = connection.clone();
        let last = code(self.binding.to_wire(error));
        self.runtime.spawn(async move {
            let telling = async {
                if send.write_all(&frame).await.is_ok() {
                    let _ = send.finish(); // stopped meanwhile
                    let _ = send.stopped().await; // or the connection is lost
                }
            };
            // A peer that gives no credit for it is not told.
            let _ = timeout(CLOSE_PATIENCE, telling).await;
            connection.close(last, closed.reason.as_bytes());
        });
    }
}

fn code(code: u64) -> VarInt {
    VarInt::from_u64(code).unwrap_or(VarInt::MAX)
}
