//! Keys that stay the same when the process is restarted: the keys for stateless resets, for connection IDs, and for
//! address validation tokens.
//!
//! A restarted server answers a packet of an unknown connection with a stateless reset (RFC 9000, section 10.3).
//! Clients accept the reset only with the token that the previous process gave them. So both processes have to derive
//! the token from the same key.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use quinn::{
    EndpointConfig, ServerConfig,
    crypto::{HandshakeTokenKey, HmacKey},
};
use ring::{hkdf, hmac};

/// Shortest time between two stateless resets of an endpoint. It is short because all clients of a restarted relay need
/// a reset, which costs no more than any other packet.
const RESET_INTERVAL: Duration = Duration::from_micros(100);

/// The secret that an endpoint's permanent keys are derived from.
///
/// No two endpoints may use the same keys: an attacker could send a packet of one endpoint's connection to the other,
/// and would get its reset token (RFC 9000, section 21.11). So each endpoint adds its address to the derivation, and
/// [`LastingSecret::new`] adds an identifier of the machine.
#[derive(Clone)]
pub struct LastingSecret(hkdf::Prk);

/// Length of a derived key, bytes.
const KEY_LEN: usize = 32;

struct KeyLen;

impl hkdf::KeyType for KeyLen {
    fn len(&self) -> usize {
        KEY_LEN
    }
}

impl LastingSecret {
    /// Derives the secret of a machine from a secret that the operator keeps, such as a private key, by HKDF.
    pub fn new(secret: &[u8], machine: &[u8]) -> Self {
        Self(hkdf::Salt::new(hkdf::HKDF_SHA256, machine).extract(secret))
    }

    /// Makes an endpoint at `addr` send resets that clients of an earlier process at that address accept.
    pub(crate) fn apply(&self, addr: SocketAddr, endpoint: &mut EndpointConfig) {
        let reset = hmac::Key::new(hmac::HMAC_SHA256, &self.derive(b"stateless reset", addr));
        let reset: Arc<dyn HmacKey> = Arc::new(reset);
        endpoint.reset_key(reset).min_reset_interval(RESET_INTERVAL);
    }

    /// Returns the key by which an endpoint at `addr` recognizes connection IDs of an earlier process.
    pub(crate) fn id_key(&self, addr: SocketAddr) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.derive(b"connection IDs", addr);
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// Makes a server at `addr` accept the address validation tokens that an earlier process at that address has
    /// issued.
    pub(crate) fn apply_tokens(&self, addr: SocketAddr, server: &mut ServerConfig) {
        let master = self.derive(b"address validation tokens", addr);
        let key: Arc<dyn HandshakeTokenKey> =
            Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&master));
        server.token_key(key);
    }

    fn derive(&self, purpose: &[u8], addr: SocketAddr) -> [u8; KEY_LEN] {
        let mut key = [0; KEY_LEN];
        let addr = addr.to_string();
        let info = [b"millrace ".as_slice(), purpose, b" ", addr.as_bytes()];
        let derived = self.0.expand(&info, KeyLen).and_then(|okm| okm.fill(&mut key));
        derived.unwrap_or_else(|_| unreachable!("32 bytes are less than HKDF can give"));
        key
    }
}

impl fmt::Debug for LastingSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LastingSecret")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn reset_keys_depend_on_secret_machine_address_and_purpose() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        let derive = |secret: &[u8], machine: &[u8], purpose: &[u8], at: &str| {
            LastingSecret::new(secret, machine).derive(purpose, addr(at))
        };
        let first = derive(b"key", b"one", b"stateless reset", "0.0.0.0:4443");
        assert_eq!(first, derive(b"key", b"one", b"stateless reset", "0.0.0.0:4443"));
        let all = [
            first,
            derive(b"other key", b"one", b"stateless reset", "0.0.0.0:4443"),
            derive(b"key", b"two", b"stateless reset", "0.0.0.0:4443"),
            derive(b"key", b"one", b"connection IDs", "0.0.0.0:4443"),
            derive(b"key", b"one", b"stateless reset", "0.0.0.0:4444"),
            derive(b"key", b"one", b"stateless reset", "[::]:4443"),
        ];
        assert_eq!(HashSet::from(all).len(), all.len());
    }

    #[test]
    fn debug_output_shows_no_reset_secret() {
        assert_eq!(format!("{:?}", LastingSecret::new(b"key", b"one")), "LastingSecret");
    }
}
