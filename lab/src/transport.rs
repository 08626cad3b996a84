//! Transports of clients to a relay: raw QUIC and WebTransport.

/// Transport of a client's connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum LabTransport {
    /// MoQ directly on QUIC
    #[default]
    Raw,
    /// MoQ in a WebTransport session over HTTP/3
    Webtransport,
}

impl LabTransport {
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Webtransport => "webtransport",
        }
    }

    /// Returns the URL scheme for this transport.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Raw => "moqt",
            Self::Webtransport => "https",
        }
    }

    /// Returns the transport for a URL scheme; `None` if the scheme is unknown.
    pub fn from_scheme(scheme: &str) -> Option<Self> {
        [Self::Raw, Self::Webtransport].into_iter().find(|transport| transport.scheme() == scheme)
    }
}
