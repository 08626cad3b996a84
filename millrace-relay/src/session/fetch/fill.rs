//! The objects of a FETCH response.

use std::time::{Duration, Instant};

use millrace_proto::{
    moq::{
        GroupOrder, Location, Parameters, code,
        message::{FetchOk, RequestError},
    },
    relay::fetch::{Entry, Payload, Plan, plan},
};
use tokio::time::{Instant as Clock, timeout_at};
use tracing::debug;

use super::UnderWay;
use crate::session::upstream_fetch::after;

/// The longest that a FETCH waits for objects of the cache that are still arriving.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest that it waits for objects that may be on the way.
const GAP_TIMEOUT: Duration = Duration::from_millis(300);

impl UnderWay {
    /// Puts the objects of the range into the response, from the cache and from upstream.
    pub(super) async fn fill(&self) -> Result<FetchOk, RequestError> {
        let (range, response) = (&self.range, &self.response);
        let track = &range.track;
        let Some(largest) = track.data.largest() else { return self.fill_from_upstream().await };
        if range.first > largest {
            let reason = "the range begins behind the largest object";
            return Err(RequestError::new(code::Request::INVALID_RANGE, reason));
        }
        let last = range.last.min(largest);
        let (held_from, objects) = self.cached(last).await?;
        let ascending = range.order == GroupOrder::Ascending;
        if !ascending {
            objects.iter().cloned().for_each(|object| response.push(object));
            self.wake();
        }
        if held_from > range.first {
            self.fill_gap((range.first, last.min(location_before(held_from)))).await;
        }
        if ascending {
            objects.into_iter().for_each(|object| response.push(object));
        }
        response.finish(Instant::now());
        self.wake();
        let end_of_track = track.data.end().is_some_and(|end| location_before(end) <= last);
        Ok(FetchOk {
            end_of_track,
            end: after(last),
            parameters: Parameters::default(),
            properties: track.data.properties(),
        })
    }

    /// The objects of the range that the cache holds, once those that are arriving have arrived.
    async fn cached(&self, last: Location) -> Result<(Location, Vec<Entry>), RequestError> {
        let range = &self.range;
        let began = Clock::now();
        loop {
            let progress = range.track.progress.notified();
            let deadline = match plan(&range.track.data, range.first, last, range.order, Instant::now()) {
                Plan::Ready { held_from, objects } => return Ok((held_from, objects)),
                // Subgroups of lower priority come later; but not every ID needs to exist.
                Plan::Gaps { held_from, objects } if began.elapsed() >= GAP_TIMEOUT => {
                    return Ok((held_from, objects));
                }
                Plan::Gaps { .. } => {
                    let _ = timeout_at(began + GAP_TIMEOUT, progress).await; // then without what is missing
                    continue;
                }
                Plan::Unfinished => began + ARRIVAL_TIMEOUT,
            };
            if timeout_at(deadline, progress).await.is_err() {
                let reason = "the last objects of the range did not arrive in time";
                return Err(RequestError::new(code::Request::TIMEOUT, reason));
            }
        }
    }

    /// Fills what the cache does not hold from a publisher, or says that its status is unknown.
    async fn fill_gap(&self, missing: (Location, Location)) {
        if let Err(refused) = self.fetch_from_publishers(missing).await {
            let session = self.context().id();
            debug!(session, track = %self.range.track.name(), reason = refused.reason, "FETCH gap");
            self.response.push_unknown(missing.1);
        }
    }

    /// The whole range from upstream, for a track of which nothing is here.
    async fn fill_from_upstream(&self) -> Result<FetchOk, RequestError> {
        let ok = self.fetch_from_publishers((self.range.first, self.range.last)).await?;
        self.response.finish(Instant::now());
        self.wake();
        Ok(ok)
    }

    async fn fetch_from_publishers(&self, missing: (Location, Location)) -> Result<FetchOk, RequestError> {
        let (range, context) = (&self.range, self.context());
        let name = range.track.name();
        let mut refused = RequestError::new(code::Request::DOES_NOT_EXIST, "nobody publishes this track");
        for publisher in context.hub().publishers_of(name.namespace(), context.requester()) {
            let mut each = |item, payload| {
                self.response.push(Entry { item, payload: Payload::Owned(payload) });
                self.wake();
            };
            let fetch = publisher.fetch(name.clone(), missing, range.order, &mut each);
            match timeout_at(range.deadline, fetch).await {
                Ok(Ok(ok)) => return Ok(ok),
                Ok(Err(error)) => refused = error,
                Err(_) => refused = RequestError::new(code::Request::TIMEOUT, "upstream took too long"),
            }
        }
        Err(refused)
    }
}

/// The last location that is smaller than `location`.
fn location_before(location: Location) -> Location {
    match location.object.checked_sub(1) {
        Some(object) => Location { object, ..location },
        None => Location { group: location.group.saturating_sub(1), object: u64::MAX },
    }
}
