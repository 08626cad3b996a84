//! Transports of clients to a relay.

/// Transport of a client's connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum LabTransport {
    /// MoQ on QUIC itself
    #[default]
    Raw,
    /// MoQ in a WebTransport session of HTTP/3
    Webtransport,
}

impl LabTransport {
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Webtransport => "webtransport",
        }
    }

    /// Returns the scheme of the URL.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Raw => "moqt",
            Self::Webtransport => "https",
        }
    }

    /// Returns the transport of a URL's scheme.
    pub fn from_scheme(scheme: &str) -> Option<Self> {
        [Self::Raw, Self::Webtransport].into_iter().find(|transport| transport.scheme() == scheme)
    }
}
