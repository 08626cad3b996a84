//! Why a broker that called was let go, as it is counted.

use quinn::{ConnectionError, TransportErrorCode};
use rustls::{AlertDescription, Error as Tls};

/// No place was left for its handshake.
pub const CROWDED: &str = "crowded";

/// The connection had the time of a handshake, and its place went to another stranger.
#[derive(Debug, thiserror::Error)]
#[error("it has made way for the next one")]
pub struct Crowded;

/// It has shown a known key, and has as many connections as it may.
#[derive(Debug, thiserror::Error)]
#[error("{peer} has {most} connections: one more is too many")]
pub struct Full {
    pub peer: String,
    pub most: usize,
}

pub fn name(why: &anyhow::Error) -> &'static str {
    if why.is::<Full>() {
        return "pool-full";
    }
    if why.is::<Crowded>() {
        return CROWDED;
    }
    match why.chain().any(speaks_otherwise) {
        true => "other-version",
        false => "unknown-caller",
    }
}

/// The only thing that both sides of a handshake may lack is the version of carriers.
fn speaks_otherwise(cause: &(dyn std::error::Error + 'static)) -> bool {
    let inner = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    let tls = cause.downcast_ref().or_else(|| inner.and_then(|inner| inner.downcast_ref()));
    if matches!(
        tls,
        Some(Tls::NoApplicationProtocol | Tls::AlertReceived(AlertDescription::NoApplicationProtocol))
    ) {
        return true;
    }
    cause.downcast_ref().is_some_and(is_about_the_version)
}

/// Of QUIC.
pub fn is_about_the_version(error: &ConnectionError) -> bool {
    let code = TransportErrorCode::crypto(AlertDescription::NoApplicationProtocol.into());
    match error {
        ConnectionError::ConnectionClosed(close) => close.error_code == code,
        ConnectionError::TransportError(error) => error.code == code,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    const DOCUMENTED: &str = include_str!("../../../../docs/carried.md");

    #[test]
    fn callers_are_counted_by_why_they_were_let_go() {
        let full = anyhow::Error::from(Full { peer: "a".into(), most: 4 });
        let version = || std::io::Error::other(Tls::NoApplicationProtocol);
        let table = [
            (full, "pool-full"),
            (Crowded.into(), CROWDED),
            (version().into(), "other-version"),
            (Err::<(), _>(version()).context("no handshake").unwrap_err(), "other-version"),
            (std::io::Error::other(Tls::DecryptError).into(), "unknown-caller"),
            (anyhow!("no key that is known"), "unknown-caller"),
        ];
        for (why, want) in table {
            assert_eq!(name(&why), want, "{why:#}");
            assert!(DOCUMENTED.contains(&format!("| `{want}` |")), "{want}");
        }
        assert!(DOCUMENTED.contains(&format!("| `{CROWDED}` |")));
    }
}
