//! Lets quinn read the tokens of the gate's Retry packets, through its trait `HandshakeTokenKey`.

use std::{net::IpAddr, sync::Arc};

use millrace_gate::Scope;
use quinn::{
    ServerConfig,
    crypto::{AeadKey, CryptoError, HandshakeTokenKey},
};

/// Makes the server accept the gate's Retry tokens, and send no tokens of its own.
pub fn take_part(config: &mut ServerConfig, scope: Scope) {
    config.token_key(Arc::new(Tokens(scope)));
    config.validation_token.sent(0);
}

/// Presents the gate's tokens to quinn as its own. quinn takes the last 16 bytes of a token for a nonce; in the gate's
/// tokens these are the tag. It decrypts the other bytes and expects its own encoding of a Retry token in them.
struct Tokens(Scope);

struct ScopeToken {
    scope: Scope,
    tag: Vec<u8>,
}

impl HandshakeTokenKey for Tokens {
    fn aead_from_hkdf(&self, tag: &[u8]) -> Box<dyn AeadKey> {
        Box::new(ScopeToken { scope: self.0.clone(), tag: tag.to_vec() })
    }
}

impl AeadKey for ScopeToken {
    fn seal(&self, _: &mut Vec<u8>, _: &[u8]) -> Result<(), CryptoError> {
        Err(CryptoError)
    }

    /// Checks the token and writes its contents in quinn's encoding. quinn then compares the address and the time.
    fn open<'a>(&self, data: &'a mut [u8], _: &[u8]) -> Result<&'a mut [u8], CryptoError> {
        let bytes = [&*data, &self.tag].concat();
        let token = self.scope.open_token(&bytes).map_err(|_| CryptoError)?;
        let mut retry = vec![0];
        match token.client.ip() {
            IpAddr::V4(address) => retry.extend([&[0][..], &address.octets()].concat()),
            IpAddr::V6(address) => retry.extend([&[1][..], &address.octets()].concat()),
        }
        retry.extend(token.client.port().to_be_bytes());
        retry.push(token.original_id().len() as u8);
        retry.extend(token.original_id());
        retry.extend(token.issued.to_be_bytes());
        let out = data.get_mut(..retry.len()).ok_or(CryptoError)?;
        out.copy_from_slice(&retry);
        Ok(out)
    }
}
