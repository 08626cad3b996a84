//! What can go wrong with a session of messages.

use std::path::PathBuf;

use super::wire::Why;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no daemon of packet grafts with peers answers on {path}; is it running? ({source})")]
    NoDaemon { path: PathBuf, source: std::io::Error },
    #[error("{reason}")]
    Refused { why: Why, reason: String },
    /// Nothing is sent before both ends have agreed.
    #[error("the session is not agreed on: {0}")]
    NotAgreed(&'static str),
    /// Of a session that does not block.
    #[error("not now")]
    WouldBlock,
    #[error("not within the time that was given")]
    TimedOut,
    #[error("a message has at most {most} bytes, and this one {bytes}")]
    TooLong { bytes: usize, most: usize },
    #[error("this end has finished, and sends no more")]
    Finished,
    #[error("the session is over: {0}")]
    Over(String),
    #[error(
        "graft {graft} has no {missing}, without which a stream would have gaps: ask for reliability and order"
    )]
    NotAStream { graft: String, missing: &'static str },
    /// Of a stream.
    #[error("the other end has finished, and not all of what it has sent has come")]
    Incomplete,
    #[error("the session belongs to the process that opened it, and this one was forked from it")]
    Forked,
    #[error("the daemon says something else than was expected: {0}")]
    Protocol(String),
    #[error("socket: {0}")]
    Socket(#[from] std::io::Error),
}
