//! Keeps a session with one of the configured upstream relays, and decides when to change to another.
//!
//! There is one session at a time, with the first relay that can be reached. These events end it:
//!
//! | what happens | what the relay does |
//! | --- | --- |
//! | the session ends | connects to the first relay that answers; one that failed is not tried for a while, which doubles each time |
//! | GOAWAY | connects to the URI in GOAWAY, or to another relay if that one does not answer within a second, and closes the old session once the new one has all tracks |
//! | the peer answers no probe | looks for any relay that answers, and closes the session when there is one; the session stays if the peer answers first |
//! | a relay that is preferred to the present one answers | moves to it, as after GOAWAY |
//!
//! Subscriptions continue in all of these cases. They wait for the next session, and continue with the next group
//! (`live::absence`).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::code;
use millrace_relay_cluster::Pauses;
use millrace_relay_status as status;
use millrace_transport::{Connection, Health};
use millrace_webtransport::{
    Tunnel,
    attempts::{SERVER_DELAY, first_success},
};
use tokio::time;
use tracing::{info, warn};

use super::{LOOKS, ServerShared, dial};
use crate::{
    UpstreamRelay,
    hub::OperatorCounters,
    session::{Dialed, RelaySession},
};

/// How long a session is kept after the relay moved to a preferred upstream relay, so that open streams can end.
const LEAVING: Duration = Duration::from_secs(10);

/// The configured upstream relays, in order of preference.
struct UpstreamCandidates(Vec<UpstreamCandidate>);

struct UpstreamCandidate {
    upstream: UpstreamRelay,
    pauses: Pauses,
    /// The time before which this relay does not try to connect to the upstream relay again.
    until: Instant,
}

/// A connection to an upstream relay.
struct UpstreamLink {
    /// Index of the upstream relay in the list of the settings.
    source: usize,
    /// The relay under its present URI, which GOAWAY may have changed.
    upstream: UpstreamRelay,
    connection: Arc<Connection>,
    tunnel: Option<Tunnel>,
}

impl UpstreamCandidates {
    fn new(upstreams: &[UpstreamRelay], now: Instant) -> Self {
        let source = |upstream: &UpstreamRelay| UpstreamCandidate {
            upstream: upstream.clone(),
            pauses: Pauses::default(),
            until: now,
        };
        Self(upstreams.iter().map(source).collect())
    }

    /// Returns the indexes of the relays among the first `count` that may be tried now. If no relay may be tried yet,
    /// returns the time when the first of them may be.
    fn ready(&self, count: usize, now: Instant) -> Result<Vec<usize>, Instant> {
        let sources = self.0.iter().take(count);
        let ready: Vec<_> = sources
            .clone()
            .enumerate()
            .filter(|(_, source)| source.until <= now)
            .map(|(place, _)| place)
            .collect();
        match (ready.is_empty(), sources.map(|source| source.until).min()) {
            (true, Some(until)) => Err(until),
            _ => Ok(ready),
        }
    }

    /// Delays the next attempt to reach a relay, after a failed attempt or a session with the duration `lasted`.
    /// `invites` is true if the relay expects this one to connect again at once.
    fn rest(&mut self, source: usize, lasted: Duration, invites: bool, now: Instant) {
        let source = &mut self.0[source];
        source.until = now + source.pauses.next_pause(lasted, invites);
    }
}

impl ServerShared {
    /// Keeps a session with an upstream relay while the relay does not drain.
    pub(super) async fn keep_upstream(self: Arc<Self>) {
        let mut sources = UpstreamCandidates::new(&self.config.upstreams, Instant::now());
        let mut next = None;
        self.note_upstreams();
        loop {
            self.until_undrained().await;
            let link = match next.take() {
                Some(link) => link,
                None => self.reach(&mut sources, self.config.upstreams.len(), None, None).await,
            };
            next = self.follow(link, &mut sources).await;
        }
    }

    /// Connects to one of the first `count` relays, and keeps trying until one answers. The relay with the index in
    /// `moved` is tried before all others, once with the URI given there; the relay `last` is tried after all others.
    async fn reach(
        self: &Arc<Self>,
        sources: &mut UpstreamCandidates,
        count: usize,
        mut moved: Option<(usize, UpstreamRelay)>,
        last: Option<usize>,
    ) -> UpstreamLink {
        loop {
            let ready = match sources.ready(count, Instant::now()) {
                Ok(ready) => ready,
                Err(until) => {
                    time::sleep_until(until.into()).await;
                    continue;
                }
            };
            let moved = moved.take();
            let first = moved.as_ref().map(|(source, _)| *source);
            let attempts: Vec<_> = in_order(ready, first, last)
                .into_iter()
                .map(|source| {
                    let shared = Arc::clone(self);
                    let there = moved.as_ref().filter(|(place, _)| *place == source);
                    let upstream = there.map_or(&sources.0[source].upstream, |(_, there)| there).clone();
                    async move { shared.link(source, upstream).await.map_err(|error| (source, error)) }
                })
                .collect();
            let failed = |(source, error)| {
                // Each failure delays the next attempt at that relay.
                sources.rest(source, Duration::ZERO, false, Instant::now());
                self.note_failure(source, &error);
            };
            if let Some(link) = first_success(attempts, SERVER_DELAY, failed).await {
                return link;
            }
        }
    }

    async fn link(self: &Arc<Self>, source: usize, upstream: UpstreamRelay) -> anyhow::Result<UpstreamLink> {
        let (connection, tunnel) = dial::connect(self, &upstream.url).await?;
        Ok(UpstreamLink { source, upstream, connection, tunnel })
    }

    /// Runs a session until it ends or this relay moves to another upstream relay. Returns the connection to that
    /// relay, if it was made already.
    async fn follow(
        self: &Arc<Self>,
        link: UpstreamLink,
        sources: &mut UpstreamCandidates,
    ) -> Option<UpstreamLink> {
        let UpstreamLink { source, upstream, connection, tunnel } = link;
        let host = upstream.url.authority().to_owned();
        let dialed = Some(Dialed { setup: upstream.setup(), peer: None });
        let session = self.begin_session(Arc::clone(&connection), dialed, tunnel, None);
        info!(%host, session = session.id(), "connected to the upstream relay");
        self.note_session(source, &host, session.id());
        let began = Instant::now();
        let mut running = tokio::spawn(Arc::clone(self).run_session(Arc::clone(&session)));
        let mut watch = connection.watch();
        let mut is_silent = false;
        let next = loop {
            // While the present upstream relay is silent, this relay moves to any other one. While the present one
            // answers, this relay moves only to a preferred one.
            let better = if is_silent { sources.0.len() } else { source };
            tokio::select! {
                _ = &mut running => {
                    let forgotten = connection.is_forgotten();
                    if forgotten {
                        warn!(%host, "the upstream relay was restarted: connecting again");
                    }
                    sources.rest(source, began.elapsed(), forgotten, Instant::now());
                    break None;
                }
                health = watch.changed() => {
                    is_silent = health == Health::Dead;
                    match is_silent {
                        true => warn!(%host, "the upstream relay does not answer: looking for one that does"),
                        false => info!(%host, "the upstream relay answers again"),
                    }
                }
                uri = session.until_peer_goes_away() => {
                    tokio::spawn(Arc::clone(self).leave_upstream(session));
                    // A relay that sends GOAWAY at the beginning of each session is not connected to in a busy loop:
                    // the pause grows with each short session.
                    sources.rest(source, began.elapsed(), true, Instant::now());
                    let there = self.config.upstreams[source].at(&uri);
                    let there = there.unwrap_or_else(|| self.config.upstreams[source].clone());
                    break Some(self.reach(sources, sources.0.len(), Some((source, there)), None).await);
                }
                link = self.reach(sources, better, None, Some(source)), if better > 0 => {
                    OperatorCounters::count(&self.hub.counters.upstream_changes);
                    if is_silent {
                        warn!(%host, next = link.upstream.url.authority(), "the upstream relay does not answer: moving to another");
                        session.close(code::Session::NO_ERROR, "no answer");
                        // The old session must be removed from the tracks before the next session subscribes, or it
                        // would count as a second publisher.
                        let _ = running.await;
                        sources.rest(source, began.elapsed(), false, Instant::now());
                    } else {
                        info!(%host, next = link.upstream.url.authority(), "a preferred upstream relay answers: moving to it");
                        session.leave_upstream();
                        let left = Arc::clone(&session);
                        let leaving = Arc::clone(self).leave_upstream(session);
                        tokio::spawn(async move {
                            if time::timeout(LEAVING, leaving).await.is_err() {
                                left.close(code::Session::NO_ERROR, "moved to another session");
                            }
                        });
                    }
                    break Some(link);
                }
            }
        };
        self.note_no_session(&host);
        next
    }

    /// Closes the session with the previous upstream relay, once another session has taken over its tracks and the
    /// previous session is idle.
    async fn leave_upstream(self: Arc<Self>, session: Arc<RelaySession>) {
        // Session IDs grow, so a larger ID is a session that began later.
        let takes_over = |other: &RelaySession| other.id() > session.id() && other.is_attached();
        self.leave(&session, takes_over).await;
    }

    /// Closes a session with another relay, once a session for which `takes_over` is true runs and the earlier one is
    /// idle.
    pub(super) async fn leave(&self, session: &RelaySession, takes_over: impl Fn(&RelaySession) -> bool) {
        loop {
            // The notification is requested before the sessions are checked, so that no end of a session is missed.
            let over = self.session_over.notified();
            let sessions = self.sessions.lock().clone();
            if !sessions.contains_key(&session.id()) {
                return;
            }
            if sessions.values().any(|other| takes_over(other)) && session.is_idle() {
                return session.close(code::Session::NO_ERROR, "moved to another session");
            }
            let _ = time::timeout(LOOKS, over).await;
        }
    }

    /// Initialises the upstream relays' part of the status.
    fn note_upstreams(&self) {
        let host = |upstream: &UpstreamRelay| upstream.url.authority().to_owned();
        let source = |upstream| status::UpstreamSource { host: host(upstream), reason: String::new() };
        let sources: Vec<_> = self.config.upstreams.iter().map(source).collect();
        let first = sources.first().map(|source| source.host.clone()).unwrap_or_default();
        let upstream =
            status::UpstreamStatus { host: first, session: None, reason: "connecting".to_owned(), sources };
        *self.hub.upstream.lock() = Some(upstream);
    }

    fn note_session(&self, source: usize, host: &str, session: u64) {
        if let Some(upstream) = &mut *self.hub.upstream.lock() {
            upstream.host = host.to_owned();
            upstream.session = Some(session);
            upstream.reason.clear();
            upstream.sources[source].reason.clear();
        }
    }

    fn note_no_session(&self, host: &str) {
        if let Some(upstream) = &mut *self.hub.upstream.lock() {
            upstream.host = host.to_owned();
            upstream.session = None;
            upstream.reason = "the session is over".to_owned();
        }
    }

    /// Logs a failed connection attempt and shows it in the status. The URL's path may contain a token, so only the
    /// host is shown.
    fn note_failure(&self, source: usize, error: &anyhow::Error) {
        let reason = format!("{error:#}");
        if let Some(upstream) = &mut *self.hub.upstream.lock() {
            let source = &mut upstream.sources[source];
            warn!(
                host = source.host,
                error = reason,
                "cannot connect to the upstream relay: trying again later"
            );
            source.reason = reason.clone();
            if upstream.session.is_none() {
                upstream.host = source.host.clone();
                upstream.reason = reason;
            }
        }
    }
}

/// Returns the indexes of relays in the order in which they are tried.
fn in_order(mut ready: Vec<usize>, first: Option<usize>, last: Option<usize>) -> Vec<usize> {
    ready.sort_by_key(|place| (Some(*place) != first, Some(*place) == last));
    ready
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(count: usize, now: Instant) -> UpstreamCandidates {
        let upstream = |index| {
            let url = format!("moqt://relay-{index}.example").parse().unwrap();
            UpstreamRelay { url, token: None }
        };
        UpstreamCandidates::new(&(0..count).map(upstream).collect::<Vec<_>>(), now)
    }

    const FAILED: (Duration, bool) = (Duration::ZERO, false);

    #[test]
    fn preferred_upstream_is_tried_first_and_a_failed_one_after_a_delay() {
        let now = Instant::now();
        let mut sources = sources(3, now);
        assert_eq!(sources.ready(3, now), Ok(vec![0, 1, 2]));
        sources.rest(0, FAILED.0, FAILED.1, now);
        assert_eq!(sources.ready(3, now), Ok(vec![1, 2]));
        // Only the relays that are preferred to the one in use are tried.
        let rested = now + Duration::from_millis(250);
        assert_eq!(sources.ready(1, now), Err(rested));
        assert_eq!(sources.ready(1, rested), Ok(vec![0]));
    }

    #[test]
    fn restarted_upstream_relay_and_one_that_sends_goaway_are_tried_again_at_once() {
        let now = Instant::now();
        let mut sources = sources(1, now);
        // Earlier failures do not delay the attempt.
        (0..8).for_each(|_| sources.rest(0, FAILED.0, FAILED.1, now));
        assert!(sources.ready(1, now).is_err());
        sources.rest(0, Duration::from_secs(5), true, now);
        assert_eq!(sources.ready(1, now), Ok(vec![0]));
        // A relay that ends each session at once is not tried at once.
        sources.rest(0, Duration::from_millis(100), true, now);
        assert!(sources.ready(1, now).is_err());
    }

    #[test]
    fn relay_that_sent_goaway_is_tried_first_and_a_silent_one_last() {
        assert_eq!(in_order(vec![0, 1, 2], None, None), [0, 1, 2]);
        assert_eq!(in_order(vec![0, 1, 2], Some(1), None), [1, 0, 2]);
        assert_eq!(in_order(vec![0, 1, 2], None, Some(0)), [1, 2, 0]);
    }
}
