//! Flags of every command that connects to a relay.

use std::path::PathBuf;

use millrace_client::{
    session::{Remote, parse_url},
    tls::Trust,
};
use url::Url;

/// Where to connect, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct ConnectArgs {
    /// The relay: moqt://HOST[:PORT][/PATH], or https:// for WebTransport
    #[arg(value_parser = parse_url)]
    pub url: Url,
    /// Accept any certificate: for tests on networks that you trust
    #[arg(long)]
    pub tls_disable_verify: bool,
    /// Trust the certificates in this PEM file instead of the system's
    #[arg(long, value_name = "FILE", conflicts_with = "tls_disable_verify")]
    pub tls_root: Option<PathBuf>,
}

impl ConnectArgs {
    pub fn remote(self) -> Remote {
        let trust = match (self.tls_disable_verify, self.tls_root) {
            (true, _) => Trust::Anyone,
            (false, Some(file)) => Trust::Roots(file),
            (false, None) => Trust::System,
        };
        Remote { url: self.url, trust }
    }
}
