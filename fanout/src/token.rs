//! Proof that whoever asks hears what is answered, without any state: an authenticator over who asks, for what, and when.

use std::net::{IpAddr, SocketAddr};

use ring::hmac;

/// Which proves nothing if it is all zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Token(pub [u8; 8]);

/// How long one is good for, at least; at most twice as long.
pub const GOOD_S: u64 = 60;

/// Makes and checks tokens of one relay, from its start to its end.
pub struct Mint {
    key: hmac::Key,
}

impl Mint {
    /// `secret`: random.
    pub fn new(secret: [u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, &secret) }
    }

    pub fn token(&self, stream: &str, who: SocketAddr, now_s: u64) -> Token {
        self.of(stream, who, now_s / GOOD_S)
    }

    /// Whether it was given to them in this period or the one before.
    pub fn is_good(&self, token: Token, stream: &str, who: SocketAddr, now_s: u64) -> bool {
        let now = now_s / GOOD_S;
        let good = [Some(now), now.checked_sub(1)];
        // Which of two it is may be told by time.
        good.into_iter().flatten().any(|period| is_same(self.of(stream, who, period), token))
    }

    fn of(&self, stream: &str, who: SocketAddr, period: u64) -> Token {
        let mut context = hmac::Context::with_key(&self.key);
        match who.ip().to_canonical() {
            IpAddr::V4(ip) => context.update(&[&[4][..], &ip.octets()].concat()),
            IpAddr::V6(ip) => context.update(&[&[6][..], &ip.octets()].concat()),
        }
        context.update(&who.port().to_be_bytes());
        context.update(&period.to_be_bytes());
        context.update(stream.as_bytes());
        let mut token = Token::default();
        token.0.iter_mut().zip(context.sign().as_ref()).for_each(|(to, from)| *to = *from);
        token
    }
}

/// In a time that does not depend on where they differ.
fn is_same(one: Token, other: Token) -> bool {
    one.0.iter().zip(other.0).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_for_one_stream_address_and_time() {
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
        assert!(!mint.is_good(Token::default(), "live", who, 1000));
        assert!(!Mint::new([8; 32]).is_good(token, "live", who, 1000), "another relay's");
        assert!(mint.is_good(mint.token("live", who, 0), "live", who, 1), "at the beginning");
    }
}
