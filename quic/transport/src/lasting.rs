//! Keys that stay the same when the process is restarted: the keys for stateless resets, for connection IDs, and for
//! address validation tokens.
//!
//! A restarted server answers a packet of an unknown connection with a stateless reset (RFC 9000, section 10.3).
//! Clients accept the reset only with the token that the previous process gave them. So both processes have to derive
//! the token from the same key.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use quinn::{
    EndpointConfig, ServerConfig,
    crypto::{CryptoError, HandshakeTokenKey, HmacKey},
};
use ring::{
    hkdf, hmac,
    rand::{SecureRandom as _, SystemRandom},
};

use crate::ids::ConnectionIds;

/// Shortest time between two stateless resets of an endpoint: none. All clients of a restarted relay need a reset, and
/// quinn gives all packets that it reads in one turn the same time, so that any interval allows one reset a turn. Only
/// packets with an ID that an earlier process has issued get a reset, and the reset is shorter than they are.
const RESET_INTERVAL: Duration = Duration::ZERO;

/// The secret that an endpoint's permanent keys are derived from.
///
/// No two endpoints may use the same keys: an attacker could send a packet of one endpoint's connection to the other,
/// and would get its reset token (RFC 9000, section 21.11). So each endpoint adds its address to the derivation, and
/// [`LastingSecret::new`] adds an identifier of the machine.
#[derive(Clone)]
pub struct LastingSecret([u8; KEY_LEN]);

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
        let mut extracted = [0; KEY_LEN];
        // HKDF-Extract is HMAC (RFC 5869, section 2.2). ring's own does not let a successor have the result.
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, machine), secret);
        extracted.copy_from_slice(tag.as_ref());
        Self(extracted)
    }

    /// Makes a random secret, which only this process and its successors know. If the system has no randomness, the
    /// secret is `None`.
    pub fn random() -> Option<Self> {
        let mut secret = [0; KEY_LEN];
        SystemRandom::new().fill(&mut secret).ok()?;
        Some(Self(secret))
    }

    /// Returns the secret as bytes, for a successor.
    pub fn to_bytes(&self) -> [u8; KEY_LEN] {
        self.0
    }

    /// Returns the secret that [`Self::to_bytes`] has returned as bytes.
    pub fn from_bytes(bytes: [u8; KEY_LEN]) -> Self {
        Self(bytes)
    }

    /// Makes an endpoint at `addr` send resets that clients of an earlier process at that address accept. For IDs of the
    /// predecessor, the resets are those of the predecessor's secret.
    pub(crate) fn apply(
        &self,
        addr: SocketAddr,
        endpoint: &mut EndpointConfig,
        predecessor: Option<(ConnectionIds, &Self)>,
    ) {
        let key = |secret: &Self| hmac::Key::new(hmac::HMAC_SHA256, &secret.derive(b"stateless reset", addr));
        let predecessor = predecessor.map(|(ids, secret)| (ids, key(secret)));
        let reset: Arc<dyn HmacKey> = Arc::new(ResetKeys { own: key(self), predecessor });
        endpoint.reset_key(reset).min_reset_interval(RESET_INTERVAL);
    }

    /// Returns the connection IDs of the process with this generation, at the address `addr`.
    pub(crate) fn ids(&self, addr: SocketAddr, generation: u8) -> ConnectionIds {
        ConnectionIds::new(&self.derive(b"connection IDs", addr), generation)
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
        let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &self.0);
        let derived = secret.expand(&info, KeyLen).and_then(|okm| okm.fill(&mut key));
        derived.unwrap_or_else(|_| unreachable!("32 bytes are less than HKDF can give"));
        key
    }
}

/// The keys of stateless reset tokens: each process's own key for the connection IDs that it has issued.
struct ResetKeys {
    own: hmac::Key,
    predecessor: Option<(ConnectionIds, hmac::Key)>,
}

impl ResetKeys {
    fn key_for(&self, id: &[u8]) -> &dyn HmacKey {
        match &self.predecessor {
            Some((ids, key)) if ids.has_issued(id) => key,
            _ => &self.own,
        }
    }
}

impl HmacKey for ResetKeys {
    fn sign(&self, id: &[u8], token: &mut [u8]) {
        self.key_for(id).sign(id, token);
    }

    fn signature_len(&self) -> usize {
        self.own.signature_len()
    }

    fn verify(&self, id: &[u8], token: &[u8]) -> Result<(), CryptoError> {
        self.key_for(id).verify(id, token)
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
