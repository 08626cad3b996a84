//! How clients come to a relay.

/// Of a client's connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Transport {
    /// MoQ on QUIC itself
    #[default]
    Raw,
    /// MoQ in a WebTransport session of HTTP/3
    Webtransport,
}

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Webtransport => "webtransport",
        }
    }

    /// Of the URL.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Raw => "moqt",
            Self::Webtransport => "https",
        }
    }

    /// The one that a URL's scheme is of.
    pub fn of_scheme(scheme: &str) -> Option<Self> {
        [Self::Raw, Self::Webtransport].into_iter().find(|transport| transport.scheme() == scheme)
    }
}
