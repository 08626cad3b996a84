//! The objects of a FETCH response.

use std::time::{Duration, Instant};

use millrace_moq::{
    FetchItem, Location, Parameters, code,
    data::RangeEnd,
    message::{FetchOk, RequestError},
    tracks::fetch::{Entry, Payload, Readiness, Step, Walk, readiness},
};
use tokio::time::{sleep, timeout, timeout_at};
use tracing::debug;

use super::{Clock, UnderWay};
use crate::hub::{Fetched, Objects, Piece};

/// The longest that nothing may arrive while a FETCH waits for objects that are to come into the cache.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest that it waits for objects that may be on the way.
const GAP_TIMEOUT: Duration = Duration::from_millis(300);
/// How often it looks at most: media comes in many small pieces.
const LOOKS: Duration = Duration::from_millis(10);
/// Cached objects that are put into a response at once.
const BATCH: usize = 256;

/// Where the objects of a response come from.
pub enum Start {
    Cache(Walk),
    /// Nothing is here: all from a publisher.
    Upstream(Box<dyn Objects>),
}

/// Why a response cannot be completed.
struct Broken;

impl UnderWay {
    /// The answer to the FETCH, once what is arriving has arrived.
    pub async fn begin(&self) -> Result<(FetchOk, Start), RequestError> {
        let range = &self.range;
        let track = &range.track;
        // Of what a publisher has told of, some may not have arrived.
        let told = range.told.then_some(range.last);
        let Some(largest) = track.data.largest().max(told) else {
            let Fetched { ok, objects } = self.ask_publishers((range.first, range.last)).await?;
            return Ok((ok, Start::Upstream(objects)));
        };
        if range.first > largest {
            let reason = "the range begins behind the largest object";
            return Err(RequestError::new(code::Request::INVALID_RANGE, reason));
        }
        let last = range.last.min(largest);
        self.until_arrived(last).await?;
        let ok = FetchOk {
            end_of_track: track.data.end().is_some_and(|end| end <= after_object(last)),
            last,
            parameters: Parameters::default(),
            properties: track.data.properties(),
        };
        Ok((ok, Start::Cache(Walk::new(range.first, last, range.order))))
    }

    /// Waits for what is arriving of the range; not at all with a FILL_TIMEOUT of 0.
    async fn until_arrived(&self, last: Location) -> Result<(), RequestError> {
        let range = &self.range;
        if range.fill.is_zero() {
            return Ok(());
        }
        let began = Clock::now();
        let limit = began + range.fill.max(ARRIVAL_TIMEOUT);
        loop {
            let progress = range.track.progress.notified();
            let deadline = match self.readiness(last) {
                Readiness::Ready => return Ok(()),
                // Subgroups of lower priority come later; but not every ID needs to exist.
                Readiness::Gaps if began.elapsed() >= GAP_TIMEOUT => return Ok(()),
                Readiness::Gaps => None,
                Readiness::Unfinished => Some(limit.min(Clock::now() + ARRIVAL_TIMEOUT)),
            };
            let late = timeout_at(deadline.unwrap_or(began + GAP_TIMEOUT), progress).await.is_err();
            if deadline.is_some() && (late || Clock::now() >= limit) {
                let reason = "the last objects of the range did not arrive in time";
                return Err(RequestError::new(code::Request::TIMEOUT, reason));
            }
            sleep(LOOKS).await;
        }
    }

    /// Whether the cache has the range, or what it will have of it.
    fn readiness(&self, last: Location) -> Readiness {
        let data = &self.range.track.data;
        match data.known_from().is_some_and(|known| known <= last) && data.largest() < Some(last) {
            true => Readiness::Unfinished,
            false => readiness(data, self.range.first, last),
        }
    }

    /// Puts the objects into the response, as the subscriber takes them.
    pub(super) async fn fill(&self, start: Start) {
        let filled = match start {
            Start::Cache(walk) => self.fill_from_cache(walk).await,
            Start::Upstream(objects) => {
                let range = (self.range.first, self.range.last);
                let filled = self.fill_from_upstream(objects, range).await;
                filled.map(|absent| {
                    if let Some(absent) = absent {
                        self.response.push_absent(range.1, absent);
                    }
                })
            }
        };
        match filled {
            Ok(()) => self.response.finish(Instant::now()),
            Err(Broken) => self.response.abort(code::Reset::INTERNAL_ERROR.0),
        }
        self.wake();
    }

    async fn fill_from_cache(&self, mut walk: Walk) -> Result<(), Broken> {
        loop {
            self.room().await;
            match walk.next(&self.range.track.data, Instant::now(), BATCH) {
                Step::Objects(objects) => {
                    self.fetched(objects.iter().map(payload_len).sum());
                    objects.into_iter().for_each(|object| self.response.push(object));
                    self.wake();
                }
                Step::Missing(first, last) => self.fill_gap((first, last)).await?,
                Step::Done => return Ok(()),
            }
        }
    }

    /// Fills what the cache does not hold from a publisher, or says why it is not there.
    async fn fill_gap(&self, missing: (Location, Location)) -> Result<(), Broken> {
        let absent = match self.range.fill.is_zero() {
            true => Some(RangeEnd::TimedOut),
            false => match self.ask_publishers(missing).await {
                Ok(Fetched { objects, .. }) => self.fill_from_upstream(objects, missing).await?,
                Err(refused) => {
                    let (session, track) = (self.context().id(), self.range.track.name());
                    debug!(session, track = %track.typed(), reason = refused.reason, "FETCH gap");
                    let is_late = refused.code == code::Request::TIMEOUT;
                    Some(if is_late { RangeEnd::TimedOut } else { RangeEnd::Unknown })
                }
            },
        };
        if let Some(absent) = absent {
            self.response.push_absent(missing.1, absent);
            self.wake();
        }
        Ok(())
    }

    /// Passes on what a publisher sends of `range`; if it was not all, why.
    async fn fill_from_upstream(
        &self,
        mut objects: Box<dyn Objects>,
        range: (Location, Location),
    ) -> Result<Option<RangeEnd>, Broken> {
        let mut missing: u64 = 0;
        loop {
            self.room().await;
            match timeout(self.range.patience(), objects.next()).await {
                Ok(Ok(Some(Piece::Item(item)))) => {
                    if !is_within(&item, range) {
                        return Err(Broken);
                    }
                    if let FetchItem::Object(object) = &item {
                        missing = object.payload_len;
                    }
                    self.response.push(Entry { item, payload: Payload::Owned(bytes::Bytes::new()) });
                }
                Ok(Ok(Some(Piece::Payload(bytes)))) => {
                    missing = missing.saturating_sub(bytes.len() as u64);
                    self.fetched(bytes.len() as u64);
                    self.response.push_payload(bytes);
                }
                Ok(Ok(None)) => return Ok(None),
                _ if missing > 0 => return Err(Broken),
                Ok(Err(failed)) => {
                    let (session, track) = (self.context().id(), self.range.track.name());
                    debug!(session, track = %track.typed(), reason = failed.reason, "FETCH from upstream broke off");
                    return Ok(Some(RangeEnd::Unknown));
                }
                Err(_) => return Ok(Some(RangeEnd::TimedOut)),
            }
            self.wake();
        }
    }

    async fn ask_publishers(&self, missing: (Location, Location)) -> Result<Fetched, RequestError> {
        let (range, context) = (&self.range, self.context());
        let name = range.track.name();
        let mut refused = context.hub().absent();
        let deadline = Clock::now() + range.fill;
        for publisher in context.hub().publishers_of(name.namespace(), context.requester()) {
            match timeout_at(deadline, publisher.fetch(name.clone(), missing, range.order)).await {
                Ok(Ok(fetched)) => return Ok(fetched),
                Ok(Err(error)) => refused = error,
                Err(_) => refused = RequestError::new(code::Request::TIMEOUT, "upstream took too long"),
            }
        }
        Err(refused)
    }
}

fn payload_len(entry: &Entry) -> u64 {
    match &entry.item {
        FetchItem::Object(object) => object.payload_len,
        FetchItem::Range { .. } => 0,
    }
}

/// Whether what a publisher sent is part of what it was asked for.
fn is_within(item: &FetchItem, (first, last): (Location, Location)) -> bool {
    let at = match item {
        FetchItem::Object(object) => object.location,
        FetchItem::Range { last, .. } => *last,
    };
    (first..=last).contains(&at)
}

/// The location right behind `location`, or the next group's first.
fn after_object(location: Location) -> Location {
    match location.object.checked_add(1) {
        Some(object) => Location { object, ..location },
        None => Location { group: location.group.saturating_add(1), object: 0 },
    }
}
