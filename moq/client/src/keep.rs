//! Keeps a broadcast published at a relay: opens a new session when a session ends or the relay sends GOAWAY.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::code;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::again::{Pause, RelayList};
use crate::broadcast::{Broadcast, group_of_now};
use crate::serve::BroadcastServer;
use crate::session::{self, Session, SessionConnectError, SessionRequest};

/// The reason why the broadcast is no longer published at its relay.
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
/// * Connecting: `serve` establishes a session, or uses the one established while moving. It sets the group numbers and
///   announces the broadcast. If it fails with a temporary error, it waits and tries again.
/// * Serving: `current` contains the session, until the session ends, or its relay sends GOAWAY or falls silent.
/// * Moving: the old session keeps serving until `serve` has set up the new session. Then the old session no longer
///   announces the broadcast, and ends once its relay gets the tracks from elsewhere, or after [`LEAVE`].
///
/// The first session sets the broadcast's group numbers. Later sessions continue them, so viewers see a gap but no
/// repeated group IDs.
pub(crate) struct BroadcastPublisher {
    pub relays: RelayList,
    pub broadcast: Arc<Broadcast>,
    /// Whether to push the tracks with PUBLISH.
    pub push: bool,
    /// Whether to connect to the relay again when a session ends or cannot be established.
    pub reconnect: bool,
    /// The ID of the broadcast's first group. `None` until the first session has asked the relay which groups of the
    /// broadcast it has.
    pub first_group: Option<u64>,
    /// The session that serves the broadcast now, if there is one.
    pub current: watch::Sender<Option<ServingSession>>,
}

/// Longest time to wait for a relay's report of the groups that it has of a broadcast.
const LARGEST_WAIT: Duration = Duration::from_secs(1);
/// Longest time that a session goes on serving its subscriptions after another session has replaced it.
const LEAVE: Duration = Duration::from_secs(15);

/// The session that serves the broadcast now.
#[derive(Clone)]
pub(crate) struct ServingSession {
    pub server: Arc<BroadcastServer>,
    pub session: Arc<Session>,
    /// Whether every pushed track was delivered to its end. Without PUBLISH it is true from the start.
    pushed: watch::Receiver<bool>,
}

impl ServingSession {
    /// Waits until all objects of the broadcast are delivered to subscribers. Call it after the end of the broadcast.
    pub async fn delivered(mut self) {
        // `wait_for` fails when the session ends. [`BroadcastPublisher::run`] handles the end of the session.
        let _ = self.pushed.wait_for(|pushed| *pushed).await;
        self.server.idle().await;
    }
}

/// Guard of a session that serves the broadcast. Dropping it closes the session.
struct LiveSessionGuard {
    current: ServingSession,
    serving: JoinHandle<session::Error>,
    /// The PUBLISH_NAMESPACE request. The namespace stays announced while the request's stream is open.
    announced: Option<SessionRequest>,
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

/// The reason why a session stopped serving the broadcast.
enum KeepEnd {
    Over(session::Error),
    /// The relay sent GOAWAY or is silent, and a new session for the broadcast is already established.
    Moved,
}

impl BroadcastPublisher {
    /// Keeps the broadcast published at its relay, until an error makes that impossible. Returns the error.
    pub async fn run(mut self) -> Error {
        let mut pause = Pause::new();
        let mut was_there = false;
        // While the broadcast moves, this session keeps serving it until the session that replaces it is set up.
        let mut live: Option<LiveSessionGuard> = None;
        let mut leaving = JoinSet::new();
        loop {
            let next;
            match self.serve().await {
                Ok(served) => {
                    self.current.send_replace(Some(served.current.clone()));
                    was_there = true;
                    while leaving.try_join_next().is_some() {} // Sessions that have left are forgotten.
                    if let Some(left) = live.take() {
                        leaving.spawn(left.leave());
                    }
                    let serving = live.insert(served);
                    match serving.end(&mut self.relays).await {
                        KeepEnd::Moved => continue,
                        KeepEnd::Over(error) if self.is_over() || !error.may_pass() => {
                            return Error::Ended(error);
                        }
                        KeepEnd::Over(error) => {
                            self.relays.leave(Some(&error));
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
                    if !matches!(error, Error::Connect(_)) {
                        self.relays.leave(None);
                    }
                    next = pause.next_pause();
                    tracing::warn!("cannot publish yet: {error}; trying again in {next:?}");
                }
            }
            pause.wait_for(next).await;
        }
    }

    /// Reports whether the broadcast needs no further session: reconnecting is off, or the broadcast has ended.
    fn is_over(&self) -> bool {
        !self.reconnect || *self.broadcast.ended().borrow()
    }

    fn may_pass(&self, error: &Error, was_there: bool) -> bool {
        match error {
            Error::Connect(error) => error.may_pass(),
            // The relay may still have our previous session, because it has not noticed the session's end.
            Error::Announce(session::Error::Refused(_)) => was_there,
            Error::Announce(error) | Error::Ended(error) => error.may_pass(),
        }
    }

    /// Sets up an existing session, or a new one, to serve the broadcast.
    async fn serve(&mut self) -> Result<LiveSessionGuard, Error> {
        let session = self.relays.connect().await?;
        let server = BroadcastServer::new(session.clone(), self.broadcast.clone());
        let serving = tokio::spawn(session.clone().run(server.clone()));
        let (done, pushed) = watch::channel(!self.push);
        let current = ServingSession { server: server.clone(), session, pushed };
        let mut live = LiveSessionGuard { current, serving, announced: None, pushing: None };
        self.number_groups(&server).await;
        match self.push {
            true => live.pushing = Some(tokio::spawn(push_all(server, self.broadcast.clone(), done))),
            false => live.announced = Some(server.announce().await.map_err(Error::Announce)?),
        }
        tracing::info!(name = %self.broadcast.namespace().typed(), host = self.relays.host(), "publishing the broadcast");
        Ok(live)
    }
}

impl BroadcastPublisher {
    /// Makes the group numbers begin above those that the relay has of this broadcast. This method runs before any
    /// group can be requested. Later sessions continue these numbers.
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
    /// Serves the session's subscriptions until the relay has ended them.
    async fn leave(mut self) {
        self.announced = None;
        tokio::select! {
            _ = tokio::time::timeout(LEAVE, self.current.server.idle()) => {}
            _ = &mut self.serving => {}
        }
    }

    async fn end(&mut self, relays: &mut RelayList) -> KeepEnd {
        tokio::select! {
            () = relays.successor(&self.current.session) => KeepEnd::Moved,
            ended = &mut self.serving => KeepEnd::Over(ended.unwrap_or(session::Error::Cancelled)),
        }
    }
}

/// Pushes every track with PUBLISH, including tracks that are added later. Ends when the broadcast has ended and all
/// tracks are delivered.
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
