//! Answers the requests of the worker process `agreements`, in the worker process `grafts`. No request is trusted: see
//! [`link`](super::link).

use std::{
    io,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use millrace_daemon::socket::converse;
use millrace_graft::GraftRuntime;
use millrace_graft_proto::message::OBJECT_MAX;
use tracing::warn;

use super::{
    daemon::GraftDaemon,
    link::{LinkAnswer, LinkRequest},
};

/// Longest request, in bytes. The longest ones have an object file.
const REQUEST_MAX: u64 = 2 * OBJECT_MAX as u64;
/// Largest number of requests that are answered in a second. Later ones wait for the next second.
const PER_SECOND: u32 = 400;
/// Shortest time between two reloads of the settings that requests cause.
const BETWEEN_RELOADS: Duration = Duration::from_secs(1);

/// Answers the requests of a connection, in the worker process `grafts`. When the last connection has ended, all
/// agreements end, since nobody renews them.
pub fn serve(daemon: Arc<GraftDaemon>, stream: UnixStream, live: Arc<AtomicUsize>) -> io::Result<()> {
    let runtime = tokio::runtime::Handle::current();
    let serve = move || {
        let _inside = runtime.enter();
        live.fetch_add(1, Relaxed);
        let mut pace = Pace::new(Instant::now());
        converse(&stream, REQUEST_MAX, |line| {
            thread::sleep(pace.pause(Instant::now()));
            answer(
                &daemon,
                &mut pace,
                serde_json::from_slice(line).context("not a request of the part agreements")?,
            )
        });
        if live.fetch_sub(1, Relaxed) == 1
            && let Err(error) = daemon.with(GraftRuntime::release_all)
        {
            warn!("agreements cannot be ended, and stay in force until they expire: {error}");
        }
    };
    thread::Builder::new().name("agreements".into()).spawn(serve).map(drop)
}

/// The rate of one connection's requests.
struct Pace {
    second: Instant,
    requests: u32,
    reloaded: Option<Instant>,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { second: now, requests: 0, reloaded: None }
    }

    /// Counts a request. Returns the time for which its answer has to wait.
    fn pause(&mut self, now: Instant) -> Duration {
        const SECOND: Duration = Duration::from_secs(1);
        if now >= self.second + SECOND {
            (self.second, self.requests) = (now, 0);
        }
        self.requests += 1;
        if self.requests <= PER_SECOND {
            return Duration::ZERO;
        }
        self.requests = 1;
        self.second += SECOND;
        self.second.saturating_duration_since(now)
    }
}

fn answer(daemon: &GraftDaemon, pace: &mut Pace, request: LinkRequest) -> anyhow::Result<Option<LinkAnswer>> {
    check(daemon, &request)?;
    Ok(Some(match request {
        LinkRequest::Revision { strangers } => LinkAnswer::Revision(daemon.with(|runtime| {
            runtime.count_strangers(strangers);
            runtime.revision()
        })),
        LinkRequest::IsAgreed { peer, called_at } => {
            LinkAnswer::IsAgreed(daemon.with(|runtime| match called_at {
                Some(epoch) => runtime.has_called(&peer, epoch),
                None => runtime.is_agreed(&peer),
            }))
        }
        LinkRequest::Statement(ends) => {
            let (statement, revision) = daemon.with(|runtime| (runtime.statement(&ends), runtime.revision()));
            LinkAnswer::Statement(statement?.into(), revision)
        }
        LinkRequest::Consider { ends, theirs } => {
            LinkAnswer::Considered(daemon.with(|runtime| runtime.consider(&ends, &theirs))?)
        }
        LinkRequest::Bind { ends, session, revision, theirs, timing } => {
            let bound = daemon.with(|runtime| runtime.bind(&ends, session, revision, &theirs, timing))?;
            LinkAnswer::Bound(bound)
        }
        LinkRequest::End { peer, session, state } => {
            daemon.with(|runtime| runtime.ended(&peer, session, state.bounded()))?;
            return Ok(None);
        }
        LinkRequest::NotePath { peer, verdict } => {
            daemon.with(|runtime| runtime.note_path(&peer, &verdict));
            return Ok(None);
        }
        LinkRequest::NoteProbe { peer, report } => {
            daemon.with(|runtime| runtime.note_probe(peer, report));
            return Ok(None);
        }
        LinkRequest::ReleaseAll => {
            daemon.with(GraftRuntime::release_all)?;
            return Ok(None);
        }
        LinkRequest::Keep { graft, manifest, image } => {
            let is_early = pace.reloaded.is_some_and(|at| at.elapsed() < BETWEEN_RELOADS);
            ensure!(!is_early, "the settings were read a moment ago");
            pace.reloaded = Some(Instant::now());
            let settings = daemon.with(|runtime| runtime.settings().clone());
            let mut fetch = settings.agreement.iter().flat_map(|it| &it.fetch);
            let wanted = fetch.find(|it| it.graft == graft).context("no [[fetch]] names this graft")?;
            settings.keep(wanted, &manifest, &BASE64.decode(image)?)?;
            return daemon.reloads.run(|| daemon.read_settings()).map(|()| None);
        }
    }))
}

/// Refuses a request about a peer that the settings do not name, and a statement beyond the limits of statements.
fn check(daemon: &GraftDaemon, request: &LinkRequest) -> anyhow::Result<()> {
    let (peer, theirs) = match request {
        LinkRequest::Consider { ends, theirs } | LinkRequest::Bind { ends, theirs, .. } => {
            (&ends.peer, Some(theirs))
        }
        LinkRequest::Statement(ends) => (&ends.peer, None),
        LinkRequest::IsAgreed { peer, .. }
        | LinkRequest::End { peer, .. }
        | LinkRequest::NotePath { peer, .. } => (peer, None),
        LinkRequest::Revision { .. }
        | LinkRequest::NoteProbe { .. }
        | LinkRequest::ReleaseAll
        | LinkRequest::Keep { .. } => return Ok(()),
    };
    theirs.map_or(Ok(()), |theirs| theirs.check())?;
    let is_known = daemon.agreement().is_some_and(|agreement| agreement.peer(peer).is_some());
    ensure!(is_known, "the settings have no such peer");
    Ok(())
}

#[cfg(test)]
mod tests {
    use millrace_graft::agreements::NegotiationState;
    use millrace_graft_proto::message::RefusalReason;

    use super::*;

    #[test]
    fn requests_beyond_the_limit_of_a_second_wait_for_the_next_second() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert!((0..PER_SECOND).all(|_| pace.pause(start).is_zero()));
        assert_eq!(pace.pause(start), Duration::from_secs(1));
        let later = start + Duration::from_millis(2500);
        assert!((0..PER_SECOND).all(|_| pace.pause(later).is_zero()));
        assert!(!pace.pause(later).is_zero());
    }

    #[test]
    fn link_request_with_an_unknown_field_is_refused() {
        let text =
            serde_json::to_string(&LinkRequest::IsAgreed { peer: "b".into(), called_at: None }).unwrap();
        assert!(serde_json::from_str::<LinkRequest>(&text).is_ok());
        let more = text.replace("}", ",\"more\":1}");
        assert!(serde_json::from_str::<LinkRequest>(&more).is_err());
        let long =
            NegotiationState::Refused {
                by_peer: true, reason: RefusalReason::Nat, detail: "é".repeat(5000)
            };
        let NegotiationState::Refused { detail, .. } = long.bounded() else { panic!("another state") };
        assert!(detail.len() <= 512 && detail.len() > 500);
    }
}
