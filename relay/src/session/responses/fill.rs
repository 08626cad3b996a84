//! Collects the objects of a FETCH response from the cache and from publishers.

use std::time::{Duration, Instant};

use millrace_moq::{
    FetchItem, Location, Parameters, code,
    data::RangeEnd,
    message::{FetchOk, RequestError},
    tracks::fetch::{FetchEntry, FetchWalk, PayloadPlace, Readiness, WalkStep, readiness},
};
use tokio::time::{sleep, timeout, timeout_at};
use tracing::debug;

use super::{Clock, UnderWay};
use crate::hub::{FetchAnswer, FetchPiece, FetchedObjects};

/// How long a FETCH waits without progress for objects that are still arriving.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a FETCH waits for missing objects that may be on their way.
const GAP_TIMEOUT: Duration = Duration::from_millis(300);
/// How long after a group's beginning an earlier group may still begin. While the track moves from one source to
/// another, they may be any time apart.
const LATE_GROUPS: Duration = Duration::from_secs(1);
/// The shortest time between two checks of the cache for new objects. Media arrives in many small pieces, and each
/// would cause a check.
const LOOKS: Duration = Duration::from_millis(10);
/// The most cached objects that are added to a response at once.
const BATCH: usize = 256;

/// The source (cache or publisher) of the first objects of a FETCH response.
pub enum FillStart {
    Cache(FetchWalk),
    /// None of the objects is cached, so they come from a publisher.
    Upstream(Box<dyn FetchedObjects>),
}

/// The response cannot be completed, and its stream is reset.
struct FillError;

impl UnderWay {
    /// Waits for objects that are arriving, then returns FETCH_OK and the source of the objects.
    pub async fn begin(&self) -> Result<(FetchOk, FillStart), RequestError> {
        let range = &self.range;
        let track = &range.track;
        // A location that a publisher announced counts even if its objects have not arrived: the subscriber may know it.
        let told = range.told.then_some(range.last).max(track.data.claimed());
        let Some(largest) = track.data.largest().max(told) else {
            let FetchAnswer { ok, objects } = self.ask_publishers((range.first, range.last)).await?;
            return Ok((ok, FillStart::Upstream(objects)));
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
        Ok((ok, FillStart::Cache(FetchWalk::new(range.first, last, range.order))))
    }

    /// Waits for objects of the range that are arriving. A FILL_TIMEOUT of 0 means no wait.
    async fn until_arrived(&self, last: Location) -> Result<(), RequestError> {
        let range = &self.range;
        if range.fill.is_zero() {
            return Ok(());
        }
        let began = Clock::now();
        let limit = began + range.fill.max(ARRIVAL_TIMEOUT);
        loop {
            // The notification is requested before the check, so that progress in between is noticed.
            let progress = range.track.progress.notified();
            let deadline = match self.readiness(last) {
                Readiness::Ready => return Ok(()),
                // Missing objects may still arrive in subgroups of lower priority, or may not exist, since object IDs
                // can have gaps.
                Readiness::Gaps if began.elapsed() >= GAP_TIMEOUT => return Ok(()),
                Readiness::Gaps => None,
                Readiness::Unfinished => Some(limit.min(Clock::now() + ARRIVAL_TIMEOUT)),
            };
            let late = timeout_at(deadline.unwrap_or(began + GAP_TIMEOUT), progress).await.is_err();
            if deadline.is_some() && (late || Clock::now() >= limit) {
                let reason = "the last objects of the range did not arrive in time";
                return Err(RequestError::new(code::Request::TIMEOUT, reason));
            }
            // Each check walks the whole range, so a burst of small pieces must not cause one check for each piece.
            sleep(LOOKS).await;
        }
    }

    /// Returns whether the cache holds all objects up to `last`, or whether missing ones may still arrive.
    fn readiness(&self, last: Location) -> Readiness {
        let data = &self.range.track.data;
        match data.known_from().is_some_and(|known| known <= last) && data.largest() < Some(last) {
            true => Readiness::Unfinished,
            false => readiness(data, self.range.first, last, self.late_since()),
        }
    }

    /// Returns since when groups must have begun so that earlier ones may still be on their way. `None`: at any time.
    fn late_since(&self) -> Option<Instant> {
        Instant::now().checked_sub(LATE_GROUPS).filter(|_| !self.range.track.moves())
    }

    /// Adds the objects to the response as fast as the subscriber acknowledges them.
    pub(super) async fn fill(&self, start: FillStart) {
        let filled = match start {
            FillStart::Cache(walk) => self.fill_from_cache(walk).await,
            FillStart::Upstream(objects) => {
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
            Err(FillError) => self.response.abort(code::Reset::INTERNAL_ERROR.0),
        }
        self.wake();
    }

    async fn fill_from_cache(&self, mut walk: FetchWalk) -> Result<(), FillError> {
        loop {
            self.room().await;
            match walk.next(&self.range.track.data, Instant::now(), self.late_since(), BATCH) {
                WalkStep::Objects(objects) => {
                    self.fetched(objects.iter().map(payload_len).sum());
                    objects.into_iter().for_each(|object| self.response.push(object));
                    self.wake();
                }
                WalkStep::Missing(first, last) => self.fill_gap((first, last)).await?,
                WalkStep::Done => return Ok(()),
            }
        }
    }

    /// Fetches objects that the cache does not have from a publisher, and adds them to the response. If that is
    /// impossible, adds the reason to the response.
    async fn fill_gap(&self, missing: (Location, Location)) -> Result<(), FillError> {
        // A FILL_TIMEOUT of 0 asks for cached objects only.
        let absent = match self.range.fill.is_zero() {
            true => Some(RangeEnd::TimedOut),
            false => match self.ask_publishers(missing).await {
                Ok(FetchAnswer { objects, .. }) => self.fill_from_upstream(objects, missing).await?,
                Err(refused) => {
                    let session = self.context().id();
                    let track = self.range.track.name();
                    debug!(session, track = %track.typed(), reason = refused.reason, "no publisher can fill a gap of a FETCH");
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

    /// Copies the objects that a publisher sends for `range` into the response. Returns the reason if some of the
    /// objects are missing.
    async fn fill_from_upstream(
        &self,
        mut objects: Box<dyn FetchedObjects>,
        range: (Location, Location),
    ) -> Result<Option<RangeEnd>, FillError> {
        let mut missing: u64 = 0;
        loop {
            // While this response may not grow, nothing is read from the publisher, so QUIC flow control stops the
            // publisher.
            self.room().await;
            match timeout(self.range.patience(), objects.next()).await {
                Ok(Ok(Some(FetchPiece::Item(item)))) => {
                    if !is_within(&item, range.0, range.1) {
                        return Err(FillError);
                    }
                    if let FetchItem::Object(object) = &item {
                        missing = object.payload_len;
                    }
                    self.response
                        .push(FetchEntry { item, payload: PayloadPlace::Owned(bytes::Bytes::new()) });
                }
                Ok(Ok(Some(FetchPiece::Payload(bytes)))) => {
                    missing = missing.saturating_sub(bytes.len() as u64);
                    self.fetched(bytes.len() as u64);
                    self.response.push_payload(bytes);
                }
                Ok(Ok(None)) => return Ok(None),
                // An object whose payload breaks off makes the response fail, since the header with the payload length
                // was already sent.
                _ if missing > 0 => return Err(FillError),
                Ok(Err(failed)) => {
                    let session = self.context().id();
                    let track = self.range.track.name();
                    debug!(session, track = %track.typed(), reason = failed.reason, "a publisher's answer to a FETCH broke off: the rest of the range stays unknown");
                    return Ok(Some(RangeEnd::Unknown));
                }
                Err(_) => return Ok(Some(RangeEnd::TimedOut)),
            }
            self.wake();
        }
    }

    async fn ask_publishers(&self, missing: (Location, Location)) -> Result<FetchAnswer, RequestError> {
        let range = &self.range;
        let context = self.context();
        let name = range.track.name();
        let mut refused = context.hub().absent();
        let deadline = Clock::now() + range.fill;
        if let Ok(Err(error)) = timeout_at(deadline, context.hub().seek(name, context.requester())).await {
            refused = error;
        }
        for publisher in context.hub().publishers_of(name.namespace(), context.requester()).all {
            match timeout_at(deadline, publisher.fetch(name.clone(), missing, range.order)).await {
                Ok(Ok(fetched)) => return Ok(fetched),
                Ok(Err(error)) => refused = error,
                Err(_) => refused = RequestError::new(code::Request::TIMEOUT, "upstream took too long"),
            }
        }
        Err(refused)
    }
}

fn payload_len(entry: &FetchEntry) -> u64 {
    match &entry.item {
        FetchItem::Object(object) => object.payload_len,
        FetchItem::Range { .. } => 0,
    }
}

/// Reports whether an object lies in the range that was requested from the publisher.
fn is_within(item: &FetchItem, first: Location, last: Location) -> bool {
    let at = match item {
        FetchItem::Object(object) => object.location,
        FetchItem::Range { last, .. } => *last,
    };
    (first..=last).contains(&at)
}

/// Returns the location after `location`. After the largest object ID, that is the next group's first object.
fn after_object(location: Location) -> Location {
    match location.object.checked_add(1) {
        Some(object) => Location { object, ..location },
        None => Location { group: location.group.saturating_add(1), object: 0 },
    }
}
