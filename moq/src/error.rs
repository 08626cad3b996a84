//! What cannot be read, and what cannot be written.

use crate::{code, draft::Draft};

/// What a peer sent cannot be understood: close the session with `code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct DecodeError {
    pub code: code::Session,
    /// What was wrong, for the reason phrase and the log.
    pub reason: &'static str,
}

impl DecodeError {
    pub(crate) const fn violation(reason: &'static str) -> Self {
        Self { code: code::Session::PROTOCOL_VIOLATION, reason }
    }

    pub(crate) const fn key_value(reason: &'static str) -> Self {
        Self { code: code::Session::KEY_VALUE_FORMATTING_ERROR, reason }
    }
}

/// Why a message cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The length field of a control message has 16 bits.
    #[error("a control message of {length} bytes is longer than 65535")]
    TooLong {
        /// Length of the message's payload, in bytes.
        length: usize,
    },
    /// The session's draft has no words for it.
    #[error("{draft} has no {what}")]
    NotInDraft { draft: Draft, what: &'static str },
}
