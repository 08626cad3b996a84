//! Errors of decoding and encoding messages and objects.

use crate::{code, draft::Draft};

/// The error for bytes from a peer that cannot be decoded. The session has to be closed with `code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct DecodeError {
    /// The error code with which to close the session.
    pub code: code::Session,
    /// Description of the error, for the reason phrase and the log.
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

/// The reason why a message cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum EncodeError {
    /// The message is longer than the 16-bit length field of a control message allows.
    #[error("a control message of {length} bytes is longer than 65535")]
    TooLong {
        /// Length of the message's payload, in bytes.
        length: usize,
    },
    /// The session's draft cannot express `what`.
    #[error("{draft} cannot express: {what}")]
    NotInDraft { draft: Draft, what: &'static str },
}
