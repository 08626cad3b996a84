//! The sessions of a broadcast, one at a time. The next one begins when a session ends or its relay sends GOAWAY.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::code;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::again::{Pause, successor};
use crate::broadcast::{Broadcast, group_of_now};
use crate::serve::BroadcastServer;
use crate::session::{self, Remote, Session, SessionConnectError, SessionRequest};

/// The reason why the broadcast has no session with its relay any more.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error(transparent)]
    Connect(#[from] SessionConnectError),
    #[error("the relay refused the namespace: {0}")]
    Announce(#[source] session::Error),
    #[error("the session ended: {0}")]
    Ended(#[source] session::Error),
}

/// A task that keeps a broadcast available at a relay.
///
/// [`run`](Self::run) has one session at a time, and goes through these states:
///
/// * Connecting: `serve` makes a session, or takes the one that GOAWAY led to, numbers the groups and announces the
///   broadcast. On failure it waits and tries again, if the error may pass.
/// * Serving: `current` has the session. It lasts until the session ends or the relay sends GOAWAY.
/// * Moving: after GOAWAY the old session keeps serving until `serve` has made the new one; then it is dropped.
///
/// Group numbers are set once, by the first session. Later sessions continue them, so viewers see a gap and no
/// repetition.
pub(crate) struct BroadcastKeeper {
    pub remote: Remote,
    pub broadcast: Arc<Broadcast>,
    /// Whether to push the tracks with PUBLISH.
    pub push: bool,
    /// Whether to connect again when a session ends or none can be established.
    pub reconnect: bool,
    /// The first group's ID; `None` until the first session has reported which groups the relay already has.
    pub first_group: Option<u64>,
    /// The session that serves the broadcast now, if there is one.
    pub current: watch::Sender<Option<ServingSession>>,
}

/// Time that a relay may take to report which groups of a broadcast it has.
const LARGEST_WAIT: Duration = Duration::from_secs(1);

/// The session that serves now.
#[derive(Clone)]
pub(crate) struct ServingSession {
    pub server: Arc<BroadcastServer>,
    pub session: Arc<Session>,
    /// Whether every pushed track is delivered. Without pushing it is true from the start.
    pushed: watch::Receiver<bool>,
}

impl ServingSession {
    /// Waits, after the end of the broadcast, until everything is delivered to subscribers.
    pub async fn delivered(mut self) {
        // This fails when the session ends, which the keeper notices itself.
        let _ = self.pushed.wait_for(|pushed| *pushed).await;
        self.server.idle().await;
    }
}

/// Guard of a session that serves the broadcast. Dropping it closes the session.
struct LiveSessionGuard {
    current: ServingSession,
    serving: JoinHandle<session::Error>,
    /// The namespace is announced for as long as this request's stream is open.
    _announced: Option<SessionRequest>,
    pushing: Option<JoinHandle<()>>,
}

impl Drop for LiveSessionGuard {
    fn drop(&mut self) {
        self.current.session.close(code::Session::NO_ERROR, "the publisher leaves");
        self.serving.abort();
        if let Some(pushing) = &self.pushing {
            pushing.abort();
        }
    }
}

/// The reason why a session is no longer served.
enum KeepEnd {
    Over(session::Error),
    /// Another session exists already, to which the broadcast moves.
    Moved(Arc<Session>, Remote),
}

impl BroadcastKeeper {
    /// Keeps the broadcast available at its relay. Returns the error that makes this impossible.
    pub async fn run(mut self) -> Error {
        let configured = self.remote.url.clone();
        let mut pause = Pause::new();
        let mut was_there = false;
        // The old session serves until the new one does.
        let mut live: Option<LiveSessionGuard> = None;
        let mut moved = None;
        loop {
            let next;
            match self.serve(moved.take()).await {
                Ok(served) => {
                    self.current.send_replace(Some(served.current.clone()));
                    was_there = true;
                    let serving = live.insert(served);
                    match serving.end(&self.remote).await {
                        KeepEnd::Moved(session, remote) => {
                            self.remote = remote;
                            moved = Some(session);
                            continue;
                        }
                        KeepEnd::Over(error) if self.is_over() || !error.may_pass() => {
                            return Error::Ended(error);
                        }
                        KeepEnd::Over(error) => {
                            next = pause.after_error(Some(&error));
                            match next.is_zero() {
                                true => tracing::warn!("the relay was restarted, connecting again"),
                                false => {
                                    tracing::warn!(
                                        "the session ended: {error}; connecting again in {next:?}"
                                    );
                                }
                            }
                        }
                    }
                }
                Err(error) if self.is_over() || !self.may_pass(&error, was_there) => return error,
                Err(error) => {
                    next = pause.next_pause();
                    tracing::warn!("cannot publish yet: {error}; trying again in {next:?}");
                }
            }
            // A relay may redirect us for a time only, so the next attempt uses the configured address.
            self.remote.url.clone_from(&configured);
            pause.wait_for(next).await;
        }
    }

    /// Reports whether no other session is wanted: reconnecting is off, or the broadcast has ended.
    fn is_over(&self) -> bool {
        !self.reconnect || *self.broadcast.ended().borrow()
    }

    fn may_pass(&self, error: &Error, was_there: bool) -> bool {
        match error {
            Error::Connect(error) => error.may_pass(),
            // The relay may still hold our previous session, if it has not noticed the session's end.
            Error::Announce(session::Error::Refused(_)) => was_there,
            Error::Announce(error) | Error::Ended(error) => error.may_pass(),
        }
    }

    /// Serves the broadcast on an existing session, or on a new one.
    async fn serve(&mut self, session: Option<Arc<Session>>) -> Result<LiveSessionGuard, Error> {
        let session = match session {
            Some(session) => session,
            None => Session::connect(&self.remote).await?,
        };
        let server = BroadcastServer::new(session.clone(), self.broadcast.clone());
        let serving = tokio::spawn(session.clone().run(server.clone()));
        let (done, pushed) = watch::channel(!self.push);
        let current = ServingSession { server: server.clone(), session, pushed };
        let mut live = LiveSessionGuard { current, serving, _announced: None, pushing: None };
        self.number_groups(&server).await;
        match self.push {
            true => live.pushing = Some(tokio::spawn(push_all(server, self.broadcast.clone(), done))),
            false => live._announced = Some(server.announce().await.map_err(Error::Announce)?),
        }
        tracing::info!(name = %self.broadcast.namespace().typed(), host = %self.remote.url.authority(), "publishing the broadcast");
        Ok(live)
    }
}

impl BroadcastKeeper {
    /// Makes group numbers begin above those of the broadcast that the relay still has, before any group is requested.
    /// Later sessions continue these numbers.
    async fn number_groups(&mut self, server: &BroadcastServer) {
        if self.first_group.is_some() {
            return;
        }
        let known = tokio::time::timeout(LARGEST_WAIT, server.largest_group()).await;
        let first = group_of_now(known.ok().flatten());
        self.broadcast.number_groups_from(first);
        self.first_group = Some(first);
    }
}

impl LiveSessionGuard {
    async fn end(&mut self, remote: &Remote) -> KeepEnd {
        tokio::select! {
            (session, remote) = successor(&self.current.session, remote) => KeepEnd::Moved(session, remote),
            ended = &mut self.serving => KeepEnd::Over(ended.unwrap_or(session::Error::Cancelled)),
        }
    }
}

/// Pushes every track, including those added later, until the broadcast has ended and is delivered.
async fn push_all(server: Arc<BroadcastServer>, broadcast: Arc<Broadcast>, done: watch::Sender<bool>) {
    let mut ended = broadcast.ended();
    let mut pushes = JoinSet::new();
    let mut pushed = Vec::new();
    loop {
        let is_over = *ended.borrow_and_update();
        for track in broadcast.tracks() {
            if !pushed.contains(track.name()) {
                pushed.push(track.name().clone());
                let server = server.clone();
                pushes.spawn(async move {
                    if let Err(error) = server.publish(track.clone()).await {
                        tracing::warn!(track = %track.name().typed(), "a track is not published: {error}");
                    }
                });
            }
        }
        if is_over || ended.changed().await.is_err() {
            break;
        }
    }
    while pushes.join_next().await.is_some() {}
    done.send_replace(true);
}
