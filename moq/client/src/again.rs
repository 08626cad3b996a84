//! The pauses between a client's attempts to connect, and the choice of the relay for the next session.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::code;
use millrace_webtransport::attempts::{SERVER_DELAY, SERVER_TIMEOUT, first_success};
use tokio::time::{Instant, sleep, timeout};
use url::Url;

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

    /// Waits for `pause`, a result of [`Self::after_error`], or up to half of it less: clients that lost their relay at
    /// the same time do not come back at the same time.
    pub async fn wait_for(&mut self, pause: Duration) {
        sleep(pause.mul_f64(1.0 - fastrand::f64() / 2.0)).await;
        self.next = match pause.is_zero() {
            true => SHORTEST,
            false => (self.next * 2).min(LONGEST),
        };
        self.since = Instant::now();
    }
}

/// The relays that a client may use: those of its settings, in their order, and the one that GOAWAY has named.
///
/// [`Self::connect`] tries them one after the other, and uses the first that answers. While its session runs,
/// [`Self::successor`] has to be polled. When the session has ended otherwise, [`Self::leave`] has to be called.
pub(crate) struct RelayList {
    settings: Remote,
    urls: Vec<Url>,
    /// Index of the relay that is tried first.
    next: usize,
    /// The relay that GOAWAY has named. It comes before the others until another one is used.
    named: Option<Url>,
    /// The relay of the latest session.
    present: Url,
    /// A session that was established while another one was running.
    ready: Option<Arc<Session>>,
}

impl RelayList {
    pub fn new(settings: &Remote) -> Self {
        let urls: Vec<_> = std::iter::once(&settings.url).chain(&settings.others).cloned().collect();
        let present = settings.url.clone();
        Self { settings: settings.clone(), urls, next: 0, named: None, present, ready: None }
    }

    /// Returns host and port of the relay of the latest session.
    pub fn host(&self) -> &str {
        self.present.authority()
    }

    /// Returns the session that [`Self::successor`] has established, or connects.
    ///
    /// # Errors
    /// Fails if no relay can be reached. The error is one that may pass, if any relay has failed with such an error.
    pub async fn connect(&mut self) -> Result<Arc<Session>, SessionConnectError> {
        match self.ready.take() {
            Some(session) => Ok(session),
            None => self.reach(self.named.iter().cloned().chain(self.list_from(self.next)).collect()).await,
        }
    }

    /// Returns the URLs of the settings from index `start` on, and then those before it.
    fn list_from(&self, start: usize) -> Vec<Url> {
        let count = self.urls.len();
        (start..start + count).map(|at| self.urls[at % count].clone()).collect()
    }

    /// Connects to the first of these relays that answers.
    async fn reach(&mut self, urls: Vec<Url>) -> Result<Arc<Session>, SessionConnectError> {
        let is_one = urls.len() == 1;
        let attempts: Vec<_> = urls.into_iter().map(|url| self.attempt(url, !is_one)).collect();
        let mut failure: Option<SessionConnectError> = None;
        let failed = |error: SessionConnectError| {
            if !is_one {
                tracing::warn!("cannot connect to one of the relays: {error}");
            }
            let kept = failure.take().filter(|known| known.may_pass() && !error.may_pass());
            failure = Some(kept.unwrap_or(error));
        };
        let Some((url, session)) = first_success(attempts, SERVER_DELAY, failed).await else {
            return Err(failure.unwrap_or_else(|| SessionConnectError::Late(self.present.clone())));
        };
        if self.named.take_if(|named| *named != url).is_some() {
            tracing::warn!(
                host = url.authority(),
                "the relay that GOAWAY has named does not answer: back at one that was given"
            );
        }
        if self.named.is_none() {
            self.next = self.urls.iter().position(|known| *known == url).unwrap_or(0);
        }
        self.present = url;
        Ok(session)
    }

    /// Connects to a relay. If there are others, it has to answer soon.
    fn attempt(
        &self,
        url: Url,
        is_bounded: bool,
    ) -> impl Future<Output = Result<(Url, Arc<Session>), SessionConnectError>> + Send + use<> {
        let remote = Remote { url, ..self.settings.clone() };
        async move {
            let connecting = Session::connect(&remote);
            let session = match is_bounded {
                true => timeout(SERVER_TIMEOUT, connecting)
                    .await
                    .unwrap_or_else(|_| Err(SessionConnectError::Late(remote.url.clone())))?,
                false => connecting.await?,
            };
            Ok((remote.url, session))
        }
    }

    /// Notes that a session has ended with `error`: the next relay of the list is tried first, except after a restart
    /// of this one, or while a relay that GOAWAY has named may be there.
    pub fn leave(&mut self, error: Option<&Error>) {
        if self.named.is_none() && !error.is_some_and(Error::is_forgotten) {
            self.next = (self.next + 1) % self.urls.len();
        }
    }

    /// Waits until another session has to take over from `session`, and establishes it: its relay has sent GOAWAY, or
    /// does not answer while another one does. [`Self::connect`] returns the new session. `session` stays open until
    /// then.
    ///
    /// After GOAWAY the client connects to its URI. If the URI is empty, it connects to the same one again, where
    /// another server may answer (draft-22, "GOAWAY").
    pub async fn successor(&mut self, session: &Session) {
        let mut goaway = session.goaway();
        let mut silent = session.silent();
        let uri = loop {
            tokio::select! {
                uri = goaway.wait_for(Option::is_some) => break uri.ok().and_then(|uri| uri.clone()),
                Ok(_) = silent.wait_for(|silent| *silent), if self.has_others() => {}
            }
            tracing::warn!(host = self.host(), "the relay does not answer: looking for another one");
            tokio::select! {
                Ok(_) = silent.wait_for(|silent| !silent) => {
                    tracing::info!("the relay answers again");
                }
                session = self.connect_to_another() => {
                    self.ready = Some(session);
                    return;
                }
            }
        };
        let Some(uri) = uri else { return std::future::pending().await };
        let url = parse_url(&uri).ok();
        let at = url.clone().unwrap_or_else(|| self.present.clone());
        let mut pause = Pause::new();
        loop {
            // The first attempt to connect also waits, so that two peers that redirect a client to each other do not
            // keep it busy.
            pause.wait().await;
            match self.attempt(at.clone(), false).await {
                Ok((at, session)) => {
                    self.present = at;
                    if url.is_some() {
                        (self.named, self.next) = (url, 0);
                    }
                    self.ready = Some(session);
                    return;
                }
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

    /// Reports whether there is a relay other than the present one.
    fn has_others(&self) -> bool {
        self.urls.iter().any(|url| *url != self.present)
    }

    /// Connects to a relay while the present one is silent, which is tried last.
    async fn connect_to_another(&mut self) -> Arc<Session> {
        let mut urls = self.list_from(self.next + usize::from(self.named.is_none()));
        urls.extend(self.named.clone());
        let mut pause = Pause::new();
        loop {
            match self.reach(urls.clone()).await {
                Ok(session) => return session,
                Err(error) => tracing::debug!("no other relay answers: {error}"),
            }
            pause.wait().await;
        }
    }
}

impl SessionConnectError {
    /// Reports whether another attempt to connect may succeed without a change of settings.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Dial(error) => error.may_pass(),
            Self::Session(error) => error.may_pass(),
            Self::Late(_) => true,
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
