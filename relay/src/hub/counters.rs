//! Counts for the operator.

use std::{
    cmp::Ordering,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use millrace_moq::tracks::{subgroup::Pushed, track::Duplicate};

/// Counts for the operator, since start.
#[derive(Debug, Default)]
pub struct Counters {
    pub requests: AtomicU64,
    pub request_errors: AtomicU64,
    pub objects_received: AtomicU64,
    pub object_bytes_received: AtomicU64,
    pub protocol_violations: AtomicU64,
    pub unknown_alias: AtomicU64,
    pub duplicate_subgroups: AtomicU64,
    /// Of publishers that are being left, from where another goes on.
    pub handed_over_subgroups: AtomicU64,
    /// Subgroups and datagrams of publishers that stand by for another.
    pub standby_subgroups: AtomicU64,
    pub expired_subgroups: AtomicU64,
    pub duplicate_datagrams: AtomicU64,
    pub malformed_tracks: AtomicU64,
    /// Searches for the publishers of a track that had none.
    pub publisher_searches: AtomicU64,
    /// Messages of requests under way that waited, since their client had sent as many as it may.
    pub message_waits: AtomicU64,
    /// Times that a FETCH response waited, since its client had fetched as much as it may.
    pub fetch_waits: AtomicU64,
    /// Times that a subscription went on with a lower, or a higher, rendition.
    pub renditions_down: AtomicU64,
    pub renditions_up: AtomicU64,
    /// Tracks that were not subscribed to at a further publisher, since too many were waiting for that.
    pub backups_passed_over: AtomicU64,
}

impl Counters {
    pub fn count(counter: &AtomicU64) {
        Self::add(counter, 1);
    }

    /// A subscription, or a switching set, went on with another rendition; the places are by what they take.
    pub fn count_switch<P: Ord>(&self, before: P, after: P) {
        match after.cmp(&before) {
            Ordering::Less => Self::count(&self.renditions_down),
            Ordering::Greater => Self::count(&self.renditions_up),
            Ordering::Equal => {}
        }
    }

    /// Objects came from a publisher.
    pub fn count_objects(&self, objects: u64, payload_bytes: u64) {
        Self::add(&self.objects_received, objects);
        Self::add(&self.object_bytes_received, payload_bytes);
    }

    /// The objects of a subgroup stream that [`Pushed`] tells of.
    pub fn count_pushed(&self, pushed: &Pushed) {
        self.count_objects(pushed.objects, pushed.payload_bytes);
    }

    /// A stream or datagram was dropped as a copy of one that is here.
    pub fn count_duplicate(&self, duplicate: Duplicate) {
        Self::count(match duplicate {
            Duplicate::Subgroup | Duplicate::Arriving => &self.duplicate_subgroups,
            Duplicate::Expired => &self.expired_subgroups,
            Duplicate::Datagram => &self.duplicate_datagrams,
            Duplicate::Malformed(_) => &self.malformed_tracks,
        });
    }

    fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Relaxed);
    }
}
