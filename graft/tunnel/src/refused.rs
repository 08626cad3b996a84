//! Reasons for refusing a tunnel broker that has connected, with the names by which refusals are counted.

use quinn::{ConnectionError, TransportErrorCode};
use rustls::{AlertDescription, Error as Tls};

/// The limit of concurrent handshakes was reached.
pub const CROWDED: &str = "crowded";

/// The handshake took too long, and was aborted to make room for another host's handshake.
#[derive(Debug, thiserror::Error)]
#[error("its place for a handshake was given to another caller")]
pub struct CallerDisplaced;

/// The peer has shown a known key, and already has as many connections as it may.
#[derive(Debug, thiserror::Error)]
#[error("{peer} already has {most} connections, and that is the limit")]
pub struct CallerLimitReached {
    pub peer: String,
    pub most: usize,
}

pub fn name(why: &anyhow::Error) -> &'static str {
    if why.is::<CallerLimitReached>() {
        return "pool-full";
    }
    if why.is::<CallerDisplaced>() {
        return CROWDED;
    }
    match why.chain().any(speaks_otherwise) {
        true => "other-version",
        false => "unknown-caller",
    }
}

/// Reports whether a handshake failed because both ends have different versions of the carrier protocol. ALPN names the
/// version, and is used for nothing else.
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

/// Reports whether a QUIC connection failed because the versions of the carrier protocol differ.
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

    const DOCUMENTED: &str = include_str!("../../../docs/guide/carried.md");

    #[test]
    fn refused_carrier_connections_are_counted_by_reason() {
        let full = anyhow::Error::from(CallerLimitReached { peer: "a".into(), most: 4 });
        let version = || std::io::Error::other(Tls::NoApplicationProtocol);
        let table = [
            (full, "pool-full"),
            (CallerDisplaced.into(), CROWDED),
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
