//! What a client asks for a session with: its CONNECT request.

use tokio::io::{AsyncRead, AsyncReadExt as _};
use url::{Position, Url};
use web_transport_proto::{ConnectRequest, http::StatusCode};

/// What a client may say up to the end of its request, bytes: frames of no meaning before it count too.
pub const MAX_BYTES: u64 = 64 * 1024;

/// What a server asks of clients.
pub struct Terms<'a> {
    /// The application protocols that are spoken, the preferred one first. One has to be among the request's.
    pub protocols: &'a [&'a str],
    /// Whether web pages of an origin may connect. Clients that are no browsers name none.
    pub origin: &'a (dyn Fn(&str) -> bool + Sync),
}

/// A request that was to the terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Path and query.
    pub path: String,
    pub authority: String,
    /// The application protocol that was agreed on.
    pub protocol: String,
}

impl Asked {
    pub(crate) fn of(url: &Url, protocol: &str) -> Self {
        Self {
            path: url[Position::BeforePath..Position::AfterQuery].to_owned(),
            authority: url.authority().to_owned(),
            protocol: protocol.to_owned(),
        }
    }
}

/// Why a client has no session.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("no CONNECT request in time")]
    Late,
    #[error("no CONNECT request in the first {MAX_BYTES} bytes")]
    TooLong,
    #[error("no request for WebTransport: {0}")]
    Request(#[from] web_transport_proto::ConnectError),
    #[error("an authority with a user")]
    User,
    #[error("pages of {0} may not connect")]
    Origin(String),
    #[error("the client speaks {offered:?}, and none of {ours:?}")]
    Protocol { offered: Vec<String>, ours: Vec<String> },
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Write(#[from] quinn::WriteError),
}

impl Refused {
    /// All that [`Self::name`] says.
    pub const NAMES: [&str; 4] = ["web_late", "web_request", "web_origin", "web_protocol"];

    /// How it is counted; `None`: the client went away.
    pub fn name(&self) -> Option<&'static str> {
        let [late, request, origin, protocol] = Self::NAMES;
        Some(match self {
            Self::Late => late,
            Self::TooLong | Self::Request(_) | Self::User => request,
            Self::Origin(_) => origin,
            Self::Protocol { .. } => protocol,
            Self::Lost(_) | Self::Write(_) => return None,
        })
    }

    /// What the client is answered.
    pub(crate) fn status(&self) -> Option<StatusCode> {
        use web_transport_proto::ConnectError as Request;
        Some(match self {
            Self::Origin(_) => StatusCode::FORBIDDEN,
            Self::Request(Request::WrongMethod(_)) => StatusCode::NOT_FOUND,
            Self::Request(Request::WrongProtocol(_)) => StatusCode::NOT_IMPLEMENTED,
            Self::Protocol { .. } | Self::Request(_) | Self::TooLong | Self::User => StatusCode::BAD_REQUEST,
            Self::Late | Self::Lost(_) | Self::Write(_) => return None,
        })
    }
}

/// Reads a request, and nothing behind it, and looks whether it is to the terms.
///
/// # Errors
/// It is not, or it is none.
pub async fn read<S: AsyncRead + Unpin>(stream: &mut S, terms: &Terms<'_>) -> Result<Asked, Refused> {
    let mut front = stream.take(MAX_BYTES);
    match ConnectRequest::read(&mut front).await {
        Ok(request) => judge(&request, terms),
        Err(_) if front.limit() == 0 => Err(Refused::TooLong),
        Err(error) => Err(error.into()),
    }
}

fn judge(request: &ConnectRequest, terms: &Terms<'_>) -> Result<Asked, Refused> {
    if let Some(origin) = request.headers.get("origin") {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        if !(terms.origin)(&origin) {
            return Err(Refused::Origin(front(&origin)));
        }
    }
    let offers = |ours: &&&str| request.protocols.iter().any(|offered| offered == **ours);
    let Some(protocol) = terms.protocols.iter().find(offers) else {
        let offered = request.protocols.iter().take(16).map(|offered| front(offered)).collect();
        let ours = terms.protocols.iter().map(|&ours| ours.to_owned()).collect();
        return Err(Refused::Protocol { offered, ours });
    };
    let url = &request.url;
    // RFC 9114, section 4.3.1.
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Refused::User);
    }
    Ok(Asked::of(url, protocol))
}

/// As much of what a peer says as goes into a message.
fn front(text: &str) -> String {
    text.chars().take(64).collect()
}
