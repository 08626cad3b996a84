//! A broadcast's sessions: one at a time, and the next one when that ends or its relay wants to be left.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::code;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::again::{Pause, successor};
use crate::broadcast::{Broadcast, group_of_now};
use crate::serve::Server;
use crate::session::{self, ConnectError, Remote, Request, Session};

/// Why there is no session with the relay any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the relay does not take the namespace: {0}")]
    Announce(#[source] session::Error),
    #[error("the session ended: {0}")]
    Ended(#[source] session::Error),
}

/// How a broadcast is kept at a relay.
pub(crate) struct Keeper {
    pub remote: Remote,
    pub broadcast: Arc<Broadcast>,
    /// Push the tracks with PUBLISH.
    pub push: bool,
    /// Connect again when a session ends, or there is none.
    pub reconnect: bool,
    /// The first group's ID; `None` until the first session has said what the relay has already.
    pub first_group: Option<u64>,
    /// Who serves now.
    pub current: watch::Sender<Option<Current>>,
}

/// How long a relay may take to say what it has of a broadcast.
const LARGEST_WAIT: Duration = Duration::from_secs(1);

/// The session that serves at the moment.
#[derive(Clone)]
pub(crate) struct Current {
    pub server: Arc<Server>,
    pub session: Arc<Session>,
    /// Everything that is to be pushed was.
    pushed: watch::Receiver<bool>,
}

impl Current {
    /// Until everything that subscribers were owed is delivered, once the broadcast has ended.
    pub async fn delivered(mut self) {
        // Fails when the session ends, which its keeper notices.
        let _ = self.pushed.wait_for(|pushed| *pushed).await;
        self.server.idle().await;
    }
}

/// A session, until it is dropped.
struct Live {
    current: Current,
    serving: JoinHandle<session::Error>,
    /// Held: the namespace is announced for as long as its stream is open.
    _announced: Option<Request>,
    pushing: Option<JoinHandle<()>>,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.current.session.close(code::Session::NO_ERROR, "the publisher leaves");
        self.serving.abort();
        if let Some(pushing) = &self.pushing {
            pushing.abort();
        }
    }
}

/// Why a session is not served any more.
enum End {
    Over(session::Error),
    /// To a session that is there already.
    Moved(Arc<Session>, Remote),
}

impl Keeper {
    /// Keeps the broadcast at its relay, until that is not possible.
    pub async fn run(mut self) -> Error {
        let configured = self.remote.url.clone();
        let mut pause = Pause::new();
        let mut was_there = false;
        // Served until the next one is.
        let mut live: Option<Live> = None;
        let mut moved = None;
        loop {
            let next;
            match self.serve(moved.take()).await {
                Ok(served) => {
                    self.current.send_replace(Some(served.current.clone()));
                    was_there = true;
                    let serving = live.insert(served);
                    match serving.end(&self.remote).await {
                        End::Moved(session, remote) => {
                            self.remote = remote;
                            moved = Some(session);
                            continue;
                        }
                        End::Over(error) if self.is_over() || !error.may_pass() => {
                            return Error::Ended(error);
                        }
                        End::Over(error) => {
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
                    next = pause.after();
                    tracing::warn!("{error}; trying again in {next:?}");
                }
            }
            // Where a relay has sent us it may not be good for ever.
            self.remote.url.clone_from(&configured);
            pause.wait_for(next).await;
        }
    }

    /// Nothing is to be gained from another session.
    fn is_over(&self) -> bool {
        !self.reconnect || *self.broadcast.ended().borrow()
    }

    fn may_pass(&self, error: &Error, was_there: bool) -> bool {
        match error {
            Error::Connect(error) => error.may_pass(),
            // Our session of before, of which the relay does not know yet that it is over, may be in the way.
            Error::Announce(session::Error::Refused(_)) => was_there,
            Error::Announce(error) | Error::Ended(error) => error.may_pass(),
        }
    }

    /// Serves the broadcast, on a session that is there or on a new one.
    async fn serve(&mut self, session: Option<Arc<Session>>) -> Result<Live, Error> {
        let session = match session {
            Some(session) => session,
            None => Session::connect(&self.remote).await?,
        };
        let server = Server::new(session.clone(), self.broadcast.clone());
        let serving = tokio::spawn(session.clone().run(server.clone()));
        let (done, pushed) = watch::channel(!self.push);
        let current = Current { server: server.clone(), session, pushed };
        let mut live = Live { current, serving, _announced: None, pushing: None };
        self.number_groups(&server).await;
        match self.push {
            true => live.pushing = Some(tokio::spawn(push_all(server, self.broadcast.clone(), done))),
            false => live._announced = Some(server.announce().await.map_err(Error::Announce)?),
        }
        tracing::info!(name = %self.broadcast.namespace().typed(), host = %self.remote.url.authority(), "publishing");
        Ok(live)
    }
}

impl Keeper {
    /// Numbers the groups from above what the relay still has of the broadcast, before anybody asks for some. Later sessions go on
    /// with these numbers.
    async fn number_groups(&mut self, server: &Server) {
        if self.first_group.is_some() {
            return;
        }
        let known = tokio::time::timeout(LARGEST_WAIT, server.largest_group()).await;
        let first = group_of_now(known.ok().flatten());
        self.broadcast.number_groups_from(first);
        self.first_group = Some(first);
    }
}

impl Live {
    async fn end(&mut self, remote: &Remote) -> End {
        tokio::select! {
            (session, remote) = successor(&self.current.session, remote) => End::Moved(session, remote),
            ended = &mut self.serving => End::Over(ended.unwrap_or(session::Error::Cancelled)),
        }
    }
}

/// Pushes every track, those to come included, until the broadcast is over and delivered.
async fn push_all(server: Arc<Server>, broadcast: Arc<Broadcast>, done: watch::Sender<bool>) {
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
                        tracing::warn!(track = %track.name().typed(), "not published: {error}");
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
