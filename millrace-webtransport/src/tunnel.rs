//! A session's beginning and its end: SETTINGS, the CONNECT request, and the capsules on its stream.

use std::time::Duration;

use millrace_proto::quic::{
    varint,
    webtransport::{self, Binding},
};
use parking_lot::Mutex;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use tokio::{runtime::Handle, time::timeout};
use url::{Position, Url};
use web_transport_proto::{
    Capsule, ConnectRequest, ConnectResponse, Http3CapsuleReader, Settings, http::StatusCode,
};

/// How long a client may take for its CONNECT request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the connection waits for the client to have read why its session is closed.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// A session, as long as it lasts.
pub struct Tunnel {
    /// Path and query of the request.
    pub path: String,
    pub authority: String,
    binding: Binding,
    /// This end of the request's stream, until the session is closed.
    send: Mutex<Option<SendStream>>,
    recv: Mutex<Option<RecvStream>>,
    /// Where the session is closed: whoever does that does not wait.
    runtime: Handle,
    /// A control stream that ends is an error.
    _control: SendStream,
}

/// What a server asks of clients.
pub struct Terms<'a> {
    /// The application protocol, which has to be among the request's.
    pub protocol: &'a str,
    /// Whether web pages of an origin may connect. Clients that are no browsers name none.
    pub origin: &'a (dyn Fn(&str) -> bool + Sync),
}

/// Why a client has no session.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("no CONNECT request in time")]
    Late,
    #[error("no request for WebTransport: {0}")]
    Request(#[from] web_transport_proto::ConnectError),
    #[error("pages of {0} may not connect")]
    Origin(String),
    #[error("the client speaks {offered:?}, not {ours}")]
    Protocol { offered: Vec<String>, ours: String },
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Write(#[from] quinn::WriteError),
}

/// Why there is no session with a server.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("the server did not answer in time")]
    Late,
    #[error("the server refused: {0}")]
    Refused(#[from] web_transport_proto::ConnectError),
    #[error("the server does not speak {0}")]
    Protocol(String),
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Write(#[from] quinn::WriteError),
}

impl Refused {
    /// What the client is answered.
    fn status(&self) -> Option<StatusCode> {
        use web_transport_proto::ConnectError as Request;
        Some(match self {
            Self::Origin(_) => StatusCode::FORBIDDEN,
            Self::Protocol { .. } => StatusCode::BAD_REQUEST,
            Self::Request(Request::WrongMethod(_)) => StatusCode::NOT_FOUND,
            Self::Request(Request::WrongProtocol(_)) => StatusCode::NOT_IMPLEMENTED,
            Self::Request(_) => StatusCode::BAD_REQUEST,
            Self::Late | Self::Lost(_) | Self::Write(_) => return None,
        })
    }
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
    let asked = match ConnectRequest::read(&mut recv).await {
        Ok(request) => check(&request, terms).map(|()| request),
        Err(error) => Err(error.into()),
    };
    let request = match asked {
        Ok(request) => request,
        Err(refused) => {
            if let Some(status) = refused.status() {
                answer(&mut send, ConnectResponse::new(status)).await?;
                let _ = send.finish(); // stopped: it does not want to know
                let _ = timeout(CLOSE_PATIENCE, send.stopped()).await;
            }
            return Err(refused);
        }
    };
    let binding = binding_of(&send);
    bind(binding);
    answer(&mut send, ConnectResponse::OK.with_protocol(terms.protocol)).await?;
    Ok(Tunnel::new(&request.url, binding, (send, recv), control))
}

fn check(request: &ConnectRequest, terms: &Terms<'_>) -> Result<(), Refused> {
    if let Some(origin) = request.headers.get("origin") {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        if !(terms.origin)(&origin) {
            return Err(Refused::Origin(front(&origin)));
        }
    }
    if !request.protocols.iter().any(|offered| offered == terms.protocol) {
        let offered = request.protocols.iter().take(16).map(|offered| front(offered)).collect();
        return Err(Refused::Protocol { offered, ours: terms.protocol.to_owned() });
    }
    Ok(())
}

/// As much of what a peer says as goes into a message.
fn front(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Asks a server for a session at `url`, which is to speak `protocol`.
///
/// # Errors
/// There is none.
pub async fn connect(connection: &Connection, url: Url, protocol: &str) -> Result<Tunnel, ConnectError> {
    let asking = async {
        let control = open_control(connection).await?;
        let (mut send, mut recv) = connection.open_bi().await?;
        let request = ConnectRequest::new(url.clone()).with_protocol(protocol);
        let mut bytes = Vec::new();
        request.encode(&mut bytes)?;
        send.write_all(&bytes).await?;
        let response = ConnectResponse::read(&mut recv).await?;
        if response.protocol.as_deref() != Some(protocol) {
            return Err(ConnectError::Protocol(protocol.to_owned()));
        }
        let binding = binding_of(&send);
        Ok(Tunnel::new(&url, binding, (send, recv), control))
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

    fn new(url: &Url, binding: Binding, (send, recv): (SendStream, RecvStream), control: SendStream) -> Self {
        Self {
            path: url[Position::BeforePath..Position::AfterQuery].to_owned(),
            authority: url.authority().to_owned(),
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

    /// Until the peer closes the session; its code and its reason, if it said them. Called once.
    pub async fn closed(&self) -> Option<(u32, String)> {
        let recv = self.recv.lock().take();
        let Some(recv) = recv else { return std::future::pending().await };
        let mut capsules = Http3CapsuleReader::new(recv);
        loop {
            match capsules.read().await {
                Ok(Some(Capsule::CloseWebTransportSession { code, reason })) => return Some((code, reason)),
                Ok(Some(_)) => {} // of no meaning here
                Ok(None) | Err(_) => return None,
            }
        }
    }

    /// Closes the session with a code and a reason that the client's application sees, and then the connection.
    pub fn close(&self, connection: &Connection, error: u64, reason: &str) {
        // Once: who closes first says why.
        let Some(mut send) = self.send.lock().take() else { return };
        let number = u32::try_from(error).unwrap_or(u32::MAX);
        let mut payload = Vec::new();
        Capsule::CloseWebTransportSession { code: number, reason: reason.to_owned() }.encode(&mut payload);
        let mut frame = Vec::new();
        for field in [0, payload.len() as u64] {
            varint::encode(field, &mut frame); // DATA
        }
        frame.extend_from_slice(&payload);
        let connection = connection.clone();
        let last = code(self.binding.to_wire(error));
        let reason = reason.to_owned();
        self.runtime.spawn(async move {
            if send.write_all(&frame).await.is_ok() {
                let _ = send.finish(); // stopped meanwhile
                let _ = timeout(CLOSE_PATIENCE, send.stopped()).await;
            }
            connection.close(last, reason.as_bytes());
        });
    }
}

fn code(code: u64) -> VarInt {
    VarInt::from_u64(code).unwrap_or(VarInt::MAX)
}
