//! Counters that the relay's status and metrics show.

use std::{
    cmp::Ordering,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use millrace_moq::tracks::{subgroup::Pushed, track::Duplicate};

/// Counters of the relay since it started, for its status and metrics.
#[derive(Debug, Default)]
pub struct OperatorCounters {
    /// Requests received.
    pub requests: AtomicU64,
    /// Requests answered with an error.
    pub request_errors: AtomicU64,
    /// Objects from publishers.
    pub objects_received: AtomicU64,
    /// Payload of objects from publishers, in bytes.
    pub object_bytes_received: AtomicU64,
    /// Sessions closed because the peer violated the protocol.
    pub protocol_violations: AtomicU64,
    /// Streams whose track alias stayed unknown.
    pub unknown_alias: AtomicU64,
    /// Subgroups that the track had already.
    pub duplicate_subgroups: AtomicU64,
    /// Number of subgroups that a publisher sent after another publisher had taken over its track.
    pub handed_over_subgroups: AtomicU64,
    /// Number of subgroups and datagrams that were dropped because their publisher is a standby: another publisher of
    /// the track sends other group IDs.
    pub standby_subgroups: AtomicU64,
    /// Subgroups of groups that were dropped from the cache.
    pub expired_subgroups: AtomicU64,
    /// Datagrams of objects that the track had already.
    pub duplicate_datagrams: AtomicU64,
    /// Tracks that were found malformed.
    pub malformed_tracks: AtomicU64,
    /// Number of searches for publishers of a track that had none.
    pub publisher_searches: AtomicU64,
    /// Messages on request streams that waited because their client had exceeded its request rate.
    pub message_waits: AtomicU64,
    /// Times that a FETCH response waited because its client had exceeded its fetch rate.
    pub fetch_waits: AtomicU64,
    /// Times that a subscription was switched to a lower rendition.
    pub renditions_down: AtomicU64,
    /// Times that a subscription was switched to a higher rendition.
    pub renditions_up: AtomicU64,
    /// Times that the relay moved to another upstream relay, because the present one was silent or a preferred one
    /// answered.
    pub upstream_changes: AtomicU64,
    /// Times that a track moved from one relay of the cluster to another.
    pub reroutes: AtomicU64,
    /// FETCHes for objects that tracks have missed while their source was away or changed.
    pub gaps_asked: AtomicU64,
    /// Objects that FETCHes for missed objects have brought.
    pub gap_objects: AtomicU64,
    /// FETCHes for missed objects that were refused.
    pub gaps_refused: AtomicU64,
    /// FETCHes for missed objects that had no answer in time.
    pub gaps_timed_out: AtomicU64,
    /// FETCHes for missed objects whose answer broke off or was too large.
    pub gaps_cut: AtomicU64,
    /// Sessions with other relays that were begun because a namespace was asked for.
    pub sessions_on_demand: AtomicU64,
    /// Sessions of that kind that ended because nobody needed them.
    pub sessions_unneeded: AtomicU64,
    /// Announcements from other relays that were refused because their hop path contains this relay.
    pub routes_looped: AtomicU64,
    /// Announcements from other relays that were refused because the relay may not announce the namespace, or announces
    /// too many.
    pub routes_refused: AtomicU64,
    /// Number of tracks for which no SUBSCRIBE was sent to an additional publisher, because too many such requests were
    /// queued.
    pub backups_passed_over: AtomicU64,
}

impl OperatorCounters {
    /// Adds 1 to a counter.
    pub fn count(counter: &AtomicU64) {
        Self::add(counter, 1);
    }

    /// Counts a switch of a subscription or switching set from rendition `before` to `after`. Of two renditions, `Ord`
    /// has to order the one with the lower bitrate first.
    pub fn count_switch<P: Ord>(&self, before: P, after: P) {
        match after.cmp(&before) {
            Ordering::Less => Self::count(&self.renditions_down),
            Ordering::Greater => Self::count(&self.renditions_up),
            Ordering::Equal => {}
        }
    }

    /// Adds objects received from a publisher, and their payload bytes.
    pub fn count_objects(&self, objects: u64, payload_bytes: u64) {
        Self::add(&self.objects_received, objects);
        Self::add(&self.object_bytes_received, payload_bytes);
    }

    /// Adds objects of a subgroup stream that were read to their end, and their payload bytes.
    pub fn count_pushed(&self, pushed: &Pushed) {
        self.count_objects(pushed.objects, pushed.payload_bytes);
    }

    /// Counts a stream or datagram that was dropped, by the reason why it was dropped.
    pub fn count_duplicate(&self, duplicate: Duplicate) {
        Self::count(match duplicate {
            Duplicate::Subgroup | Duplicate::Arriving => &self.duplicate_subgroups,
            Duplicate::Expired => &self.expired_subgroups,
            Duplicate::Datagram => &self.duplicate_datagrams,
            Duplicate::Malformed(_) => &self.malformed_tracks,
        });
    }

    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Relaxed);
    }
}
