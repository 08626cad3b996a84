//! When to connect again, and when not to.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::code;
use tokio::time::{Instant, sleep};

use crate::session::{ConnectError, Error, Remote, Session, parse_url};

/// Pauses between attempts.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(5);
/// A session that has lasted for so long was a good one: the next attempt comes soon.
const GOOD: Duration = Duration::from_secs(10);
/// One that has lasted for so long and that the peer has forgotten is followed by another at once.
const BRIEF: Duration = Duration::from_secs(1);

/// The pause before the next attempt, which grows.
pub(crate) struct Pause {
    next: Duration,
    since: Instant,
}

impl Pause {
    pub fn new() -> Self {
        Self { next: SHORTEST, since: Instant::now() }
    }

    /// How long it will be; an attempt was begun when the last one was over.
    pub fn after(&mut self) -> Duration {
        if self.since.elapsed() > GOOD {
            self.next = SHORTEST;
        }
        self.next
    }

    /// Returns the pause after an attempt that ended with `error`: as [`Self::after`], or zero if the peer was restarted and does
    /// not know the session any more.
    pub fn after_error(&mut self, error: Option<&Error>) -> Duration {
        match error.is_some_and(Error::is_forgotten) && self.since.elapsed() > BRIEF {
            true => Duration::ZERO,
            false => self.after(),
        }
    }

    pub async fn wait(&mut self) {
        let pause = self.after();
        self.wait_for(pause).await;
    }

    /// Waits for `pause`, which [`Self::after_error`] has said.
    pub async fn wait_for(&mut self, pause: Duration) {
        sleep(pause).await;
        self.next = match pause.is_zero() {
            true => SHORTEST,
            false => (self.next * 2).min(LONGEST),
        };
        self.since = Instant::now();
    }
}

/// The session to go on with, and its peer, once `remote`, the peer of `session`, has announced that it goes away: at the URI of
/// its GOAWAY, or at the same one without (draft-22, "GOAWAY": somebody else may be there by now). `session` goes on until then,
/// which may be never.
pub(crate) async fn successor(session: &Session, remote: &Remote) -> (Arc<Session>, Remote) {
    let mut goaway = session.goaway();
    let uri = goaway.wait_for(Option::is_some).await.ok().and_then(|uri| uri.clone());
    let Some(uri) = uri else { return std::future::pending().await };
    let url = parse_url(&uri).unwrap_or_else(|_| remote.url.clone());
    let next = Remote { url, ..remote.clone() };
    let mut pause = Pause::new();
    loop {
        // Before the first attempt too: peers that send each other their clients would keep these busy.
        pause.wait().await;
        match Session::connect(&next).await {
            Ok(session) => return (session, next),
            Err(error) if error.may_pass() => {
                tracing::info!("still with the peer that is going away: {error}");
            }
            Err(error) => {
                tracing::warn!("staying with the peer that is going away: {error}");
                return std::future::pending().await;
            }
        }
    }
}

impl ConnectError {
    /// Whether it may be otherwise in a while.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Dial(error) => error.may_pass(),
            Self::Session(error) => error.may_pass(),
            Self::WebTransport(_) => false,
        }
    }
}

impl Error {
    /// Whether the peer has said, by a stateless reset, that it does not know the session: it was restarted.
    pub fn is_forgotten(&self) -> bool {
        matches!(self, Self::Closed(quinn::ConnectionError::Reset))
    }

    /// Whether another session may do better: the peer has not closed this one because of us.
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
