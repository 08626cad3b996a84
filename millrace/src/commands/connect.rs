//! Flags of every command that connects to a relay.

use std::{future::Future, io, path::PathBuf, time::Duration};

use millrace_client::{
    session::{Remote, parse_url},
    tls::{Fingerprint, Trust},
};
use millrace_daemon::daemon::Ends;
use millrace_moq::Draft;
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
    /// Trust the certificate with this fingerprint only, which the relay logs at start-up
    #[arg(long, value_name = "SHA256", conflicts_with_all = ["tls_disable_verify", "tls_root"])]
    pub tls_fingerprint: Option<Fingerprint>,
    /// Speak this draft of MoQ Transport only [default: the newest of 18 to 22 that the relay knows]
    #[arg(long, value_name = "N")]
    pub draft: Option<Draft>,
    /// Connect again when the session ends, and go on trying while there is none [default: true for publish, false for
    /// subscribe]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub reconnect: Option<bool>,
}

/// Waits for Ctrl-C, SIGTERM, or the end of `time`. The process ends at once when it is asked again then, by a shell's convention with 128 and the
/// number of the signal.
///
/// # Errors
/// Signals cannot be listened to.
pub fn until_stopped(time: Option<Duration>) -> io::Result<impl Future<Output = ()>> {
    let mut ends = Ends::new()?;
    Ok(async move {
        let asked = tokio::select! {
            _ = ends.next() => true,
            () = over(time) => false,
        };
        tokio::spawn(async move {
            let kind = if asked { ends.again().await } else { ends.next().await };
            std::process::exit(128 + kind.as_raw_value());
        });
    })
}

async fn over(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

impl ConnectArgs {
    /// Whom to connect to.
    pub fn remote(self) -> Remote {
        let trust = match (self.tls_disable_verify, self.tls_root, self.tls_fingerprint) {
            (true, ..) => Trust::Anyone,
            (false, Some(file), _) => Trust::Roots(file),
            (false, None, Some(fingerprint)) => Trust::Fingerprint(fingerprint),
            (false, None, None) => Trust::System,
        };
        let drafts = self.draft.map_or_else(|| Draft::ALL.to_vec(), |draft| vec![draft]);
        Remote { drafts, ..Remote::new(self.url, trust) }
    }
}
