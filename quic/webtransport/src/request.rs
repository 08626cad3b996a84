//! The CONNECT request by which a client requests a session.

use tokio::io::{AsyncRead, AsyncReadExt as _};
use url::{Position, Url};
use web_transport_proto::{ConnectRequest, http::StatusCode};

/// Largest number of bytes that a client may send up to the end of its request, including reserved frames before it.
pub const MAX_BYTES: u64 = 64 * 1024;

/// A server's conditions for accepting a CONNECT request.
pub struct SessionTerms<'a> {
    /// Application protocols of the server, the preferred one first. The request has to offer one of them.
    pub protocols: &'a [&'a str],
    /// A function that returns whether web pages of an origin may connect. Clients other than browsers send no origin.
    pub origin: &'a (dyn Fn(&str) -> bool + Sync),
}

/// A CONNECT request that meets the server's conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedRequest {
    /// Path and query of the requested URL.
    pub path: String,
    /// Authority of the requested URL: host, and port if there is one.
    pub authority: String,
    /// The negotiated application protocol of the session.
    pub protocol: String,
}

impl AcceptedRequest {
    pub(crate) fn from_url(url: &Url, protocol: &str) -> Self {
        Self {
            path: url[Position::BeforePath..Position::AfterQuery].to_owned(),
            authority: url.authority().to_owned(),
            protocol: protocol.to_owned(),
        }
    }
}

/// Reason why a client gets no session.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum SessionRefused {
    #[error("no CONNECT request arrived in time")]
    Late,
    #[error("no CONNECT request arrived in the first {MAX_BYTES} bytes")]
    TooLong,
    #[error("the request is not for WebTransport: {0}")]
    Request(#[from] web_transport_proto::ConnectError),
    #[error("the request's authority has a user name or password")]
    User,
    #[error("web pages of the origin {0} may not connect")]
    Origin(String),
    #[error("the client offers the protocols {offered:?}, and the server accepts only {ours:?}")]
    Protocol { offered: Vec<String>, ours: Vec<String> },
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Write(#[from] quinn::WriteError),
}

impl SessionRefused {
    /// The names of all counters of refused clients, one for each reason.
    pub const NAMES: [&str; 4] = ["web_late", "web_request", "web_origin", "web_protocol"];

    /// Returns the name of the counter for clients refused for this reason, or `None` if the client closed the
    /// connection.
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

    /// Returns the status code of the response to the client.
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

/// Reads a CONNECT request and no byte after it, and checks it against the server's conditions.
///
/// # Errors
/// Fails if the request does not meet the server's conditions, or is no CONNECT request.
pub async fn read<S: AsyncRead + Unpin>(
    stream: &mut S,
    terms: &SessionTerms<'_>,
) -> Result<AcceptedRequest, SessionRefused> {
    let mut front = stream.take(MAX_BYTES);
    match ConnectRequest::read(&mut front).await {
        Ok(request) => judge(&request, terms),
        Err(_) if front.limit() == 0 => Err(SessionRefused::TooLong),
        Err(error) => Err(error.into()),
    }
}

fn judge(request: &ConnectRequest, terms: &SessionTerms<'_>) -> Result<AcceptedRequest, SessionRefused> {
    if let Some(origin) = request.headers.get("origin") {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        if !(terms.origin)(&origin) {
            return Err(SessionRefused::Origin(front(&origin)));
        }
    }
    let offers = |ours: &&&str| request.protocols.iter().any(|offered| offered == **ours);
    let Some(protocol) = terms.protocols.iter().find(offers) else {
        // The peer's list of protocols may be long, so the error contains only its beginning.
        let offered = request.protocols.iter().take(16).map(|offered| front(offered)).collect();
        let ours = terms.protocols.iter().map(|&ours| ours.to_owned()).collect();
        return Err(SessionRefused::Protocol { offered, ours });
    };
    let url = &request.url;
    // The authority must not have the userinfo part (RFC 9114, section 4.3.1).
    if !url.username().is_empty() || url.password().is_some() {
        return Err(SessionRefused::User);
    }
    Ok(AcceptedRequest::from_url(url, protocol))
}

/// Returns the first 64 characters of a text that a peer sent, for an error message.
fn front(text: &str) -> String {
    text.chars().take(64).collect()
}
