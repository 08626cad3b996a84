//! Tests of tokens (JWT and CAT), of key files, and of access decisions.

mod decisions;
mod key_files;
mod tokens;

use std::time::{Duration, SystemTime};

use millrace_moq::{Namespace, token::Credential};

use super::{
    grant::{Action, Grant, Resource},
    keys::{self, AccessKey, Signer},
    refusal::TokenError,
    token::{self, KIND_CAT, Requirements},
};

const SECRET: &[u8; 32] = b"0123456789abcdef0123456789abcdef";

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn signer() -> Signer {
    Signer::read_secret(SECRET).unwrap()
}

fn keys() -> Vec<AccessKey> {
    vec![keys::read_secret(SECRET).unwrap()]
}

fn namespace(path: &str) -> Namespace {
    match path {
        "" => Namespace::default(),
        path => Namespace::from_path(path).unwrap(),
    }
}

fn resource(path: &str, track: Option<&str>) -> Resource {
    Resource { namespace: namespace(path), track: track.map(|name| name.to_owned().into()) }
}
