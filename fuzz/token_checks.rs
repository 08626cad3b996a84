//! Checks arbitrary bytes as tokens, claims and keys, for a fuzz target and for a test that replays its fixtures.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use coset::{CoseMac0Builder, HeaderBuilder, TaggedCborSerializable, iana};
use millrace_moq::{
    Namespace,
    param::AuthToken,
    token::{Credential, Form, RegisteredTokens},
};
use millrace_relay::access::{
    grant::{Action, Resource},
    keys::{self, Signer},
    token,
};

const SECRET: [u8; 32] = [7; 32];

/// Checks `data`, whose first byte selects its kind: a Token structure, an unsigned token, claims to be signed, or a
/// key.
pub fn relay_token(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    match kind % 6 {
        0 => structure(bytes),
        1 => forged(token::KIND_CAT, bytes),
        2 => forged(token::KIND_AGREED, bytes),
        3 => signed_cat(bytes),
        4 => signed_jwt(bytes),
        _ => drop((keys::read(bytes), keys::read_secret(bytes))),
    }
}

/// Checks that a parsed Token structure round-trips, and that the cache of registered tokens keeps its size limit.
fn structure(bytes: &[u8]) {
    let sent = AuthToken(bytes.to_vec().into());
    let mut registered = RegisteredTokens::new(64);
    for _ in 0..3 {
        let _ = registered.resolve_request_tokens(std::slice::from_ref(&sent));
        assert!(registered.size() <= 64);
    }
    let Ok(form) = Form::decode(&sent) else { return };
    assert_eq!(Form::decode(&form.encode()), Ok(form));
}

/// Checks that bytes without a signature are refused.
fn forged(kind: u64, bytes: &[u8]) {
    let credential = Credential { kind, value: bytes.to_vec().into() };
    assert!(token::open(&credential, &[keys::read_secret(&SECRET).expect("a secret")]).is_err());
    let _ = token::credential_from_bytes(bytes);
}

fn signed_cat(claims: &[u8]) {
    let signer = Signer::read_secret(&SECRET).expect("a secret");
    let header = HeaderBuilder::new().algorithm(iana::Algorithm::HMAC_256_256).build();
    let mac = CoseMac0Builder::new().protected(header).payload(claims.to_vec());
    let mac = mac.create_tag(&[], |data| signer.sign(data).expect("signed")).build();
    open(token::KIND_CAT, mac.to_tagged_vec().expect("encoded"));
}

fn signed_jwt(claims: &[u8]) {
    let signer = Signer::read_secret(&SECRET).expect("a secret");
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let message = format!("{}.{}", encode(br#"{"alg":"HS256"}"#), encode(claims));
    let tag = encode(&signer.sign(message.as_bytes()).expect("signed"));
    open(token::KIND_AGREED, format!("{message}.{tag}").into_bytes());
}

/// Opens a validly signed token with arbitrary claims. It must be refused, or give rights that
/// can be checked for every action without a panic.
fn open(kind: u64, value: Vec<u8>) {
    let credential = Credential { kind, value: value.into() };
    let Ok(grant) = token::open(&credential, &[keys::read_secret(&SECRET).expect("a secret")]) else {
        return;
    };
    let namespace = Namespace::new(["a", "b"]).expect("a namespace");
    for action in [Action::ClientSetup, Action::Publish, Action::SubscribeTracks] {
        for track in [None, Some("t".into())] {
            let _ = grant.allows(action, &Resource { namespace: namespace.clone(), track });
        }
    }
}
