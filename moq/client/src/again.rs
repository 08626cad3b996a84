//! The pauses between a client's attempts to connect, and the choice of the next session after a GOAWAY.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::code;
use tokio::time::{Instant, sleep};

use crate::session::{Error, Remote, Session, SessionConnectError, parse_url};

/// Shortest and longest pause between two attempts to connect.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(5);
/// Duration after which a session counts as stable. After a stable session, the pause before the next attempt to
/// connect is the shortest again.
const GOOD: Duration = Duration::from_secs(10);
/// Shortest duration of a session after which a stateless reset by the peer makes the client connect again without a
/// pause.
const BRIEF: Duration = Duration::from_secs(1);

/// The pause before the next attempt to connect, which grows with each attempt.
pub(crate) struct Pause {
    next: Duration,
    since: Instant,
}

impl Pause {
    pub fn new() -> Self {
        Self { next: SHORTEST, since: Instant::now() }
    }

    /// Returns the pause before the next attempt to connect. Call it when an attempt or a session has failed.
    pub fn next_pause(&mut self) -> Duration {
        if self.since.elapsed() > GOOD {
            self.next = SHORTEST;
        }
        self.next
    }

    /// Returns the pause after an attempt that ended with `error`: the same as [`Self::next_pause`], or zero if the
    /// peer was restarted and has forgotten the session.
    pub fn after_error(&mut self, error: Option<&Error>) -> Duration {
        match error.is_some_and(Error::is_forgotten) && self.since.elapsed() > BRIEF {
            true => Duration::ZERO,
            false => self.next_pause(),
        }
    }

    pub async fn wait(&mut self) {
        let pause = self.next_pause();
        self.wait_for(pause).await;
    }

    /// Waits for `pause`, a result of [`Self::after_error`].
    pub async fn wait_for(&mut self, pause: Duration) {
        sleep(pause).await;
        self.next = match pause.is_zero() {
            true => SHORTEST,
            false => (self.next * 2).min(LONGEST),
        };
        self.since = Instant::now();
    }
}

/// Returns the session to continue with, and its peer, once `remote`, the peer of `session`, has sent GOAWAY. The
/// client connects to the GOAWAY's URI. If the URI is empty, it connects to the same URI again, where another server
/// may answer (draft-22, "GOAWAY"). `session` stays open until this function returns. It never returns if the new
/// session cannot be established.
pub(crate) async fn successor(session: &Session, remote: &Remote) -> (Arc<Session>, Remote) {
    let mut goaway = session.goaway();
    let uri = goaway.wait_for(Option::is_some).await.ok().and_then(|uri| uri.clone());
    let Some(uri) = uri else { return std::future::pending().await };
    let url = parse_url(&uri).unwrap_or_else(|_| remote.url.clone());
    let next = Remote { url, ..remote.clone() };
    let mut pause = Pause::new();
    loop {
        // The first attempt to connect also waits, so that two peers that redirect a client to each other do not keep
        // it busy.
        pause.wait().await;
        match Session::connect(&next).await {
            Ok(session) => return (session, next),
            Err(error) if error.may_pass() => {
                tracing::info!(
                    "staying with the peer that sent GOAWAY, and trying again to connect to its successor: {error}"
                );
            }
            Err(error) => {
                tracing::warn!(
                    "staying with the peer that sent GOAWAY: no connection to its successor: {error}"
                );
                return std::future::pending().await;
            }
        }
    }
}

impl SessionConnectError {
    /// Reports whether another attempt to connect may succeed without a change of settings.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Dial(error) => error.may_pass(),
            Self::Session(error) => error.may_pass(),
            Self::WebTransport(_) => false,
        }
    }
}

impl Error {
    /// Reports whether the peer sent a stateless reset: it was restarted and has forgotten the session.
    pub fn is_forgotten(&self) -> bool {
        matches!(self, Self::Closed(quinn::ConnectionError::Reset))
    }

    /// Reports whether a new session may succeed after this error. It cannot if the peer closed the session with an
    /// error code that blames this client.
    pub fn may_pass(&self) -> bool {
        let Self::Closed(error) = self else { return false };
        match error {
            quinn::ConnectionError::ApplicationClosed(close) => {
                let ours =
                    [code::Session::NO_ERROR, code::Session::INTERNAL_ERROR, code::Session::GOAWAY_TIMEOUT];
                ours.iter().any(|code| code.0 == close.error_code.into_inner())
            }
            quinn::ConnectionError::LocallyClosed => false,
            _ => true,
        }
    }
}
