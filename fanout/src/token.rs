//! Proof that a client receives at its address, without any state: an authenticator over address, stream and time.

use std::net::{IpAddr, SocketAddr};

use ring::hmac;

/// A token that proves a client's address. A token of zeroes proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverToken(pub [u8; 8]);

/// Shortest time for which a token is valid, in seconds. A token is valid for at most twice this time.
pub const GOOD_S: u64 = 60;

/// Creates and checks a relay's tokens. Its secret lasts for one run of the relay.
pub struct Mint {
    key: hmac::Key,
}

impl Mint {
    /// Creates a [`Mint`] from a random secret.
    pub fn new(secret: [u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, &secret) }
    }

    /// Returns the token of an address for a stream in the present period of [`GOOD_S`] seconds.
    pub fn token(&self, stream: &str, who: SocketAddr, now_s: u64) -> ReceiverToken {
        self.mint_token(stream, who, now_s / GOOD_S)
    }

    /// Reports whether this address got the token for this stream in the present period of [`GOOD_S`] seconds, or in
    /// the one before.
    pub fn is_good(&self, token: ReceiverToken, stream: &str, who: SocketAddr, now_s: u64) -> bool {
        let now = now_s / GOOD_S;
        let good = [Some(now), now.checked_sub(1)];
        // Timing may tell which of the two periods matched.
        good.into_iter().flatten().any(|period| is_same(self.mint_token(stream, who, period), token))
    }

    fn mint_token(&self, stream: &str, who: SocketAddr, period: u64) -> ReceiverToken {
        let mut context = hmac::Context::with_key(&self.key);
        match who.ip().to_canonical() {
            IpAddr::V4(ip) => context.update(&[&[4][..], &ip.octets()].concat()),
            IpAddr::V6(ip) => context.update(&[&[6][..], &ip.octets()].concat()),
        }
        context.update(&who.port().to_be_bytes());
        context.update(&period.to_be_bytes());
        context.update(stream.as_bytes());
        let mut token = ReceiverToken::default();
        token.0.iter_mut().zip(context.sign().as_ref()).for_each(|(to, from)| *to = *from);
        token
    }
}

/// Compares tokens in constant time.
fn is_same(one: ReceiverToken, other: ReceiverToken) -> bool {
    one.0.iter().zip(other.0).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_valid_for_one_stream_address_and_time() {
        let mint = Mint::new([7; 32]);
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let who = at("192.0.2.1:5000");
        let token = mint.token("live", who, 1000);
        for (good, stream, who, now_s) in [
            (true, "live", who, 1000),
            (true, "live", at("[::ffff:192.0.2.1]:5000"), 1000),
            (true, "live", who, 1000 + GOOD_S),
            (false, "live", who, 1000 + 2 * GOOD_S),
            (false, "live", who, 1000 - GOOD_S),
            (false, "other", who, 1000),
            (false, "live", at("192.0.2.2:5000"), 1000),
            (false, "live", at("192.0.2.1:5001"), 1000),
        ] {
            assert_eq!(mint.is_good(token, stream, who, now_s), good, "{stream} {who} {now_s}");
        }
        assert!(!mint.is_good(ReceiverToken::default(), "live", who, 1000));
        assert!(!Mint::new([8; 32]).is_good(token, "live", who, 1000), "another relay's");
        assert!(mint.is_good(mint.token("live", who, 0), "live", who, 1), "at the beginning");
    }
}
