//! Helpers that CATs and JWTs have in common.

use std::time::{Duration, SystemTime};

use super::refusal::TokenError;

/// Returns the time that is `seconds` after the start of 1970.
pub(super) fn time(seconds: f64) -> Result<SystemTime, TokenError> {
    let since = Duration::try_from_secs_f64(seconds).ok();
    since
        .and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since))
        .ok_or(TokenError::Malformed("a time that is none"))
}

/// Returns the three parts of a token that is written `a.b.c`.
pub(super) fn parts(token: &[u8]) -> Option<[&[u8]; 3]> {
    let mut parts = token.split(|byte| *byte == b'.');
    let all = [parts.next()?, parts.next()?, parts.next()?];
    parts.next().is_none().then_some(all)
}
