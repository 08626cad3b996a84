//! Errors that calls of sessions and listeners for messages return.

use std::path::PathBuf;

use crate::wire::SessionRefusal;

/// The reason why a call of a session or listener failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("no daemon of packet grafts with peers answers on {path}; is it running? ({source})")]
    NoDaemon { path: PathBuf, source: std::io::Error },
    #[error("{reason}")]
    Refused { why: SessionRefusal, reason: String },
    /// Both hosts have not agreed on the session yet, so no message can be sent.
    #[error("the other end has not agreed to the session yet: {0}")]
    NotAgreed(&'static str),
    /// The call would have to wait. Only a nonblocking session returns this.
    #[error("the call would have to wait, and the session is nonblocking")]
    WouldBlock,
    #[error("the call on the session timed out")]
    TimedOut,
    #[error("the message has {bytes} bytes, and {most} is the limit")]
    TooLong { bytes: usize, most: usize },
    #[error("this end has finished the session and cannot send")]
    Finished,
    #[error("the session is over: {0}")]
    Over(String),
    #[error("graft {graft} has no {missing}, and a stream needs it: ask for reliability and order")]
    NotAStream { graft: String, missing: &'static str },
    /// The other side has ended the stream, but data is missing. Only a stream returns this.
    #[error("the other end has finished, but some of its data has not arrived")]
    Incomplete,
    #[error("the session belongs to the process that opened it, and this is a forked child")]
    Forked,
    #[error("the daemon sent an unexpected message: {0}")]
    Protocol(String),
    #[error("the session's socket: {0}")]
    Socket(#[from] std::io::Error),
}
