//! Flags of the commands that connect to a relay as a client.

use std::{future::Future, io, path::PathBuf, time::Duration};

use millrace_client::{
    session::{Remote, UrlError, parse_url},
    tls::{CertificateTrust, Fingerprint},
};
use millrace_daemon::daemon::EndSignals;
use millrace_moq::Draft;
use url::Url;

/// The relay to connect to, the certificates to trust, and the drafts to offer.
#[derive(Clone, Debug, clap::Args)]
pub struct ConnectArgs {
    /// URL of the relay: moqt://HOST[:PORT][/PATH], or https:// for WebTransport. Of several URLs, separated by
    /// commas, the first one that answers is used, and another one when that fails
    #[arg(value_parser = parse_urls, value_name = "URL[,URL...]")]
    pub url: RelayUrls,
    /// Accept any certificate: only for tests on networks that you trust
    #[arg(long)]
    pub tls_disable_verify: bool,
    /// Trust the certificates in this PEM file instead of the system's
    #[arg(long, value_name = "FILE", conflicts_with = "tls_disable_verify")]
    pub tls_root: Option<PathBuf>,
    /// Trust only the certificate with this fingerprint, which the relay logs at start-up
    #[arg(long, value_name = "SHA256", conflicts_with_all = ["tls_disable_verify", "tls_root"])]
    pub tls_fingerprint: Option<Fingerprint>,
    /// Offer only this draft of MoQ Transport [default: the newest of 18 to 22 that the relay supports]
    #[arg(long, value_name = "N")]
    pub draft: Option<Draft>,
    /// Connect again when the session ends, and keep trying until one is established [default: true for publish, and
    /// for subscribe with several URLs]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub reconnect: Option<bool>,
}

/// Waits for Ctrl-C, SIGTERM, or the end of `time`. A second signal ends the process immediately, with the exit code
/// that shells use: 128 plus the number of the signal.
///
/// # Errors
/// Fails if signals cannot be received.
pub fn wait_until_stopped(time: Option<Duration>) -> io::Result<impl Future<Output = ()>> {
    let mut ends = EndSignals::new()?;
    Ok(async move {
        // After a signal, `next_signal` ignores repetitions within a second, which one Ctrl-C may cause. After a
        // timeout there was no signal yet, so any signal ends the process.
        let asked = tokio::select! {
            _ = ends.next() => true,
            () = over(time) => false,
        };
        tokio::spawn(async move {
            let kind = if asked { ends.next_signal().await } else { ends.next().await };
            std::process::exit(128 + kind.as_raw_value());
        });
    })
}

/// Waits for the end of `time`, or forever without one.
async fn over(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

impl ConnectArgs {
    /// Returns the relay to connect to.
    pub fn remote(self) -> Remote {
        let trust = match (self.tls_disable_verify, self.tls_root, self.tls_fingerprint) {
            (true, ..) => CertificateTrust::Anyone,
            (false, Some(file), _) => CertificateTrust::Roots(file),
            (false, None, Some(fingerprint)) => CertificateTrust::Fingerprint(fingerprint),
            (false, None, None) => CertificateTrust::System,
        };
        let drafts = self.draft.map_or_else(|| Draft::ALL.to_vec(), |draft| vec![draft]);
        let RelayUrls { first, others } = self.url;
        Remote { drafts, others, ..Remote::new(first, trust) }
    }
}

/// URLs of relays, the preferred one first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayUrls {
    first: Url,
    /// The URLs after the first one.
    pub others: Vec<Url>,
}

/// Parses URLs that are separated by commas. A comma separates only where another URL follows, since paths may have
/// commas.
fn parse_urls(text: &str) -> Result<RelayUrls, UrlError> {
    let mut begins: Vec<_> = [",moqt://", ",https://"]
        .iter()
        .flat_map(|next| text.match_indices(next))
        .map(|(at, _)| at)
        .collect();
    begins.sort_unstable();
    let mut others = Vec::new();
    let mut end = text.len();
    let parse = |text| match parse_url(text)? {
        // Only a URL of another scheme can be behind this comma.
        url if url.host_str().is_some_and(|host| host.contains(',')) => Err(UrlError::Scheme),
        url => Ok(url),
    };
    for at in begins.into_iter().rev() {
        others.insert(0, parse(&text[at + 1..end])?);
        end = at;
    }
    Ok(RelayUrls { first: parse(&text[..end])?, others })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comma_separates_urls_but_not_parts_of_a_path() {
        let hosts = |text: &str| {
            let RelayUrls { first, others } = parse_urls(text).unwrap();
            std::iter::once(first).chain(others).map(|url| url.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(hosts("moqt://a:1/x,y"), ["moqt://a:1/x,y"]);
        assert_eq!(hosts("moqt://a:1,https://b/,moqt://c"), ["moqt://a:1", "https://b/", "moqt://c"]);
        for bad in ["", ",moqt://a", "moqt://a,", "moqt://a,moqt://", "moqt://a,http://b"] {
            assert!(parse_urls(bad).is_err(), "{bad}");
        }
    }
}
