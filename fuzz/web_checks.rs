//! Checks arbitrary bytes as a client's request for a WebTransport session, for a fuzz target and for a test that
//! replays its fixtures.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use millrace_relay::access::{
    AccessRule, SessionPeer,
    keys::{self, AccessKey},
    pattern::Pattern,
    token,
};
use millrace_webtransport::{
    SessionRefused, SessionTerms,
    request::{self, AcceptedRequest, MAX_BYTES},
};

const PROTOCOLS: [&str; 2] = ["moqt-19", "moqt-18"];

/// Checks a request. The first byte selects whether the remaining bytes are the raw stream, or lines `name: value` that
/// are encoded in a HEADERS frame.
pub fn web_request(data: &[u8]) {
    let Some((&choice, bytes)) = data.split_first() else { return };
    let built;
    let stream = match choice % 2 {
        0 => bytes,
        _ => {
            built = headers(bytes);
            &built
        }
    };
    let mut rest = stream;
    let asked = read(&mut rest);
    assert!((stream.len() - rest.len()) as u64 <= MAX_BYTES);
    match asked {
        Ok(asked) => let_in(&asked),
        Err(refused) => {
            assert!(refused.name().is_some_and(|name| SessionRefused::NAMES.contains(&name)), "{refused}");
            assert!(!matches!(refused, SessionRefused::TooLong) || stream.len() as u64 >= MAX_BYTES);
        }
    }
}

fn read(stream: &mut &[u8]) -> Result<AcceptedRequest, SessionRefused> {
    let terms = SessionTerms { protocols: &PROTOCOLS, origin: &|origin| !origin.contains("evil") };
    let reading = pin!(request::read(stream, &terms));
    match reading.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(asked) => asked,
        Poll::Pending => panic!("a slice is ready at once"),
    }
}

/// Checks an accepted request as the relay does: the URL's path and tokens, and an access rule.
fn let_in(asked: &AcceptedRequest) {
    assert!(PROTOCOLS.contains(&&*asked.protocol));
    assert!(asked.path.starts_with('/') && !asked.path.contains('#'), "{asked:?}");
    assert!(!asked.authority.is_empty() && !asked.authority.contains(['@', '/', '?', '#']), "{asked:?}");
    let (path, tokens) = token::credentials_from_url(&asked.path);
    assert!(!path.contains('?') && tokens.len() <= 2);
    let keys: Vec<AccessKey> = vec![keys::read_secret(&[7; 32]).expect("a secret")];
    for token in tokens {
        assert!(token::open(&token, &keys).is_err(), "nobody has signed it");
    }
    let peer = SessionPeer {
        address: [127, 0, 0, 1].into(),
        certificate: None,
        path: path.to_owned(),
        authority: Some(asked.authority.clone()),
    };
    let pattern: Pattern = "live/*/cam".parse().expect("a pattern");
    let rule = AccessRule {
        namespace: Pattern::any(),
        publish: Vec::new(),
        subscribe: Vec::new(),
        path: Some(pattern),
        authority: "relay.example:4443".parse().ok(),
    };
    if rule.is_for(&peer) {
        let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
        assert!(matches!(parts[..], ["live", _, "cam"]), "{path}");
    }
}

/// Returns a HEADERS frame with lines `name: value` as literal fields (RFC 9204, section 4.5.6).
fn headers(lines: &[u8]) -> Vec<u8> {
    let mut section = vec![0, 0];
    for line in lines.split(|byte| *byte == b'\n') {
        let colon = line.iter().skip(1).position(|byte| *byte == b':').map_or(line.len(), |at| at + 1);
        let (name, value) = line.split_at(colon);
        let value = value.strip_prefix(b":").unwrap_or(value);
        literal(0x20, 0x07, name, &mut section);
        literal(0x00, 0x7f, value.strip_prefix(b" ").unwrap_or(value), &mut section);
    }
    let len = (section.len() as u32).to_be_bytes();
    [&[1, len[0] | 0x80, len[1], len[2], len[3]], &section[..]].concat()
}

/// Appends a string after its length, which is a prefixed integer (RFC 7541, section 5.1).
fn literal(flags: u8, mask: u8, text: &[u8], out: &mut Vec<u8>) {
    match text.len().checked_sub(mask.into()) {
        None => out.push(flags | text.len() as u8),
        Some(mut left) => {
            out.push(flags | mask);
            while left >= 128 {
                out.push(left as u8 | 0x80);
                left >>= 7;
            }
            out.push(left as u8);
        }
    }
    out.extend_from_slice(text);
}
