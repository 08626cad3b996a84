//! Asks a track's new source for the objects that the track has missed (docs/notes/design/0052-gaps.md).

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use millrace_moq::{FetchItem, GroupOrder, Location, code, data::RangeEnd, tracks::gap::GapEnd};
use tokio::time::{Instant as Clock, sleep, timeout, timeout_at};
use tracing::{debug, info};

use super::publish::{Publications, PublishedTrack};
use crate::{
    hub::{FetchAnswer, FetchPiece, FetchedObjects, OperatorCounters},
    live::fill::GapFill,
    upstream::UpstreamTrack,
};

/// The longest wait for the first stream of a new source that has named its largest location, and the longest wait for
/// the end of a lost source's streams.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the relay checks whether a source from which the track moves away still answers, and asks again.
const LOOKS: Duration = Duration::from_secs(1);
/// The longest wait for the objects that earlier sources still deliver while the track moves away from them. The new
/// source keeps what they do not deliver for a limited time.
const BACKLOG: Duration = Duration::from_secs(3);
/// After how many checks in a row without an answer its part is fetched as well.
const MISSES: u32 = 2;
/// The most FETCHes for one gap, while the source does not know all of it.
const ATTEMPTS: u32 = 3;
/// The most bytes that are fetched for one gap, if that is no more than a quarter of the cache.
const MAX_BYTES: usize = 64 << 20;
/// The bytes that an object counts for in addition to its payload and properties. Each object may need a stream of its
/// own to each subscriber, so their number is limited by this.
const OBJECT_COST: usize = 2048;

/// The reason why a gap was not filled: its counter, and its words.
type GapError = (fn(&OperatorCounters) -> &AtomicU64, &'static str);
const REFUSED: GapError = (|counters| &counters.gaps_refused, "it refused");
const TIMED_OUT: GapError = (|counters| &counters.gaps_timed_out, "it did not answer in time");
/// The response broke off, is wrong, or has more bytes than are accepted.
const CUT: GapError = (|counters| &counters.gaps_cut, "its answer broke off or is too large");

impl Publications {
    /// Fetches what the track has missed before the first group of this publisher. `claimed` is the largest location
    /// that the publisher named.
    pub(super) async fn fill_gap(&self, published: &PublishedTrack, claimed: Option<Location>) {
        let PublishedTrack { track, upstream } = published;
        let mut openings = track.gap.state.lock().openings();
        let may_fill = || {
            let is_source = track.has_source(upstream) && !upstream.is_leaving() && !upstream.stands_by();
            is_source && track.gap.is_open()
        };
        let patience = claimed.map_or(self.context.hub().cache.limits().age, |_| PATIENCE);
        let first = timeout(patience, upstream.first_group()).await.ok().flatten();
        let Some(group) = first.into_iter().chain(claimed.map(|claimed| claimed.group)).min() else { return };
        if may_fill() {
            track.gap.state.lock().ends_at(group);
        }
        let _one_at_a_time = track.gap.filling.lock().await;
        if !may_fill() {
            return; // Another session has filled the gap, or the next source will.
        }
        // Until the gap is filled, other relays that ask for its objects are not told that there are none.
        if track.missing_before(group).is_some() {
            track.data.missed_before(Some(Location { group, object: 0 }));
        }
        let silent = self.await_earlier_sources(published).await;
        if !may_fill() {
            return;
        }
        if silent.is_none() {
            let mut gap = track.gap.state.lock();
            gap.doubt(&track.data);
            gap.open(&track.data);
            openings += 1; // The line above has opened the gap for this request.
        }
        // After a failure the source may lack some groups itself, or have had streams refused while the track moved on.
        let last = track.data.last_seen().filter(|_| track.gap.state.lock().is_doubted());
        let group = last.map_or(group, |last| last.group.max(group));
        // If the track has left this source and returned meanwhile, it has refused streams that come by a later FETCH.
        let end = |how| {
            if track.gap.state.lock().openings() == openings {
                track.end_gap(group, how);
            }
        };
        if track.missing_before(group).is_none() {
            return end(GapEnd::Bridged);
        }
        if track.subscription_count() == 0 || !track.gap.state.lock().may_ask(std::time::Instant::now()) {
            return end(GapEnd::Unfilled);
        }
        let _place = self.gaps.acquire().await;
        let counters = &self.context.hub().counters;
        let filled = self.fetch_gap(published, group, &silent.unwrap_or_default()).await;
        let session = self.context.id();
        let is_over = self.context.connection().quic.close_reason().is_some() || !track.has_source(upstream);
        if filled.is_err() && is_over {
            return; // The next source is asked.
        }
        match filled {
            Ok((objects, is_whole)) => {
                info!(session, track = %track.name().typed(), group, objects, is_whole, "fetched the objects that the track missed while its source was away");
                end(if is_whole { GapEnd::Filled } else { GapEnd::Unfilled });
            }
            Err((counter, reason)) => {
                OperatorCounters::count(counter(counters));
                info!(session, track = %track.name().typed(), reason, "the source cannot give the objects that the track missed: subscribers do without them");
                end(GapEnd::Unfilled);
            }
        }
    }

    /// Waits until the sources from which the track moves to this one are gone or do not answer, as what they have still
    /// comes from them. Returns those that do not answer, or `None` if some still answer after [`BACKLOG`].
    async fn await_earlier_sources(
        &self,
        PublishedTrack { track, upstream }: &PublishedTrack,
    ) -> Option<Vec<Arc<UpstreamTrack>>> {
        let mut misses = 0;
        let until = Clock::now() + BACKLOG;
        loop {
            let mut earlier = track.upstreams();
            earlier.retain(|other| other.is_leaving() && !Arc::ptr_eq(other, upstream));
            let mut answers = false;
            for other in &earlier {
                answers |= other.answers(LOOKS).await;
            }
            misses = if answers { 0 } else { misses + 1 };
            if earlier.is_empty() || misses >= MISSES {
                return Some(earlier);
            }
            if Clock::now() >= until {
                return None;
            }
            sleep(LOOKS).await;
        }
    }

    /// Fetches what the track has missed before `group`, again if the source does not know all of it yet. Returns the
    /// number of objects that were added, and whether the source knew the whole range.
    async fn fetch_gap(
        &self,
        published: &PublishedTrack,
        group: u64,
        silent: &[Arc<UpstreamTrack>],
    ) -> Result<(u64, bool), GapError> {
        let mut left = MAX_BYTES.min(self.context.hub().cache.limits().bytes / 4);
        let mut added = 0;
        for attempt in 1..=ATTEMPTS {
            let Some(missing) = published.track.missing_before(group) else { break };
            OperatorCounters::count(&self.context.hub().counters.gaps_asked);
            let (objects, is_whole) =
                self.fetch_missing(published, missing, group, silent, &mut left).await?;
            added += objects;
            if is_whole || attempt == ATTEMPTS {
                return Ok((added, is_whole));
            }
            sleep(LOOKS).await;
        }
        Ok((added, true))
    }

    /// Fetches the objects of `missing`, all before `group`, and adds them to the track. `left` is the number of bytes
    /// that may still come for the gap. Returns the number of objects that were added, and whether the source knew the
    /// whole range.
    async fn fetch_missing(
        &self,
        PublishedTrack { track, upstream }: &PublishedTrack,
        missing: (Location, Location),
        group: u64,
        silent: &[Arc<UpstreamTrack>],
        left: &mut usize,
    ) -> Result<(u64, bool), GapError> {
        let asked = self.fetches.fetch(track.name().clone(), missing.0, missing.1, GroupOrder::Ascending);
        let FetchAnswer { ok, objects } = asked.await.map_err(|refused| {
            debug!(session = self.context.id(), track = %track.name().typed(), reason = refused.reason, "refused a FETCH for missed objects");
            if refused.code == code::Request::TIMEOUT { TIMED_OUT } else { REFUSED }
        })?;
        track.gap.state.lock().answered();
        // Only now are sources given up that may return, since what they would still send comes from this one.
        for other in silent {
            track.supersede(other, Duration::ZERO, std::time::Instant::now());
        }
        for lost in track.gap.lost_sources() {
            let _ = timeout(PATIENCE, lost.has_seen_all(0)).await; // Streams that stay open keep their subgroups.
        }
        let fill = GapFill::new(track, upstream, self.context.account(), missing.0, group);
        // A source that has nothing so new may lack the rest of the group that broke off, too.
        let is_new = ok.last.group >= missing.1.group;
        let mut response = GapResponse { fill, missing, left: *left, added: 0, is_whole: is_new };
        let deadline = Clock::now() + self.context.hub().cache.limits().age;
        let patience = self.context.hub().limits.request_timeout;
        timeout_at(deadline, response.receive(objects, patience)).await.unwrap_or(Err(TIMED_OUT))?;
        let GapResponse { fill, added, is_whole, .. } = response;
        *left = response.left;
        // Otherwise what is not complete is kept.
        if is_new {
            fill.finish(std::time::Instant::now());
        }
        OperatorCounters::add(&self.context.hub().counters.gap_objects, added);
        Ok((added, is_whole))
    }
}

/// A FETCH response with which a gap is filled.
struct GapResponse {
    fill: GapFill,
    missing: (Location, Location),
    /// Bytes that may still come.
    left: usize,
    added: u64,
    is_whole: bool,
}

impl GapResponse {
    /// Reads the response to its end. No piece may take longer than `patience`.
    async fn receive(
        &mut self,
        mut objects: Box<dyn FetchedObjects>,
        patience: Duration,
    ) -> Result<(), GapError> {
        loop {
            let piece = timeout(patience, objects.next()).await.map_err(|_| TIMED_OUT)?;
            match piece.map_err(|_| CUT)? {
                Some(FetchPiece::Payload(bytes)) => self.fill.extend(&bytes, std::time::Instant::now()),
                Some(FetchPiece::Item(item)) => self.take(item)?,
                None => return Ok(()),
            }
        }
    }

    fn take(&mut self, item: FetchItem) -> Result<(), GapError> {
        let now = std::time::Instant::now();
        match item {
            FetchItem::Object(object) => {
                let payload = usize::try_from(object.payload_len).map_err(|_| CUT)?;
                let cost = payload.saturating_add(object.properties.len() + OBJECT_COST);
                self.left = self.left.checked_sub(cost).ok_or(CUT)?;
                if !(self.missing.0..=self.missing.1).contains(&object.location) || !self.fill.is_current() {
                    return Err(CUT);
                }
                self.added += u64::from(self.fill.begin(&object, now));
            }
            FetchItem::Range { end: RangeEnd::NonExistent, .. } => {}
            FetchItem::Range { last, .. } => {
                self.is_whole = false;
                self.fill.skip(last.min(self.missing.1), now);
            }
        }
        Ok(())
    }
}
