//! Lets another publisher's copy of a subgroup continue the subgroup, when the publisher that it came from breaks off.
//!
//! Each arriving subgroup has one *holder*, whose stream is read into the cache. Streams of other publishers with the
//! same subgroup wait. If the holder's stream breaks off, the first waiting stream gets the subgroup, and continues it
//! behind the bytes that subscribers already have. So they get neither a gap nor anything twice. If no stream waits, a
//! subgroup whose source was lost is *kept* for a while, for a stream or a FETCH that comes later (`gap`).

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    SubgroupId, code,
    tracks::subgroup::{SubgroupReceiver, SubgroupStream},
};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::upstream::UpstreamTrack;

/// A group and a subgroup ID.
type SubgroupKey = (u64, u64);

/// The most subgroups of a track that are kept for a later source.
const MAX_KEPT: usize = 64;
/// The most bytes of an incomplete object header that a kept subgroup may hold, since no session's limit counts them.
const MAX_INCOMPLETE: usize = 64;

/// The arriving subgroups of a track, with the streams that wait for them.
#[derive(Default)]
pub struct SharedSubgroups {
    arriving: Mutex<HashMap<SubgroupKey, SharedSubgroup>>,
    /// Notified when a waiting stream asks a holder for its subgroup.
    asked: Notify,
}

struct SharedSubgroup {
    subgroup: Arc<SubgroupStream>,
    holder: Arc<UpstreamTrack>,
    waiting: Vec<oneshot::Sender<OrphanedSubgroup>>,
    is_asked: bool,
    /// The subgroup without a holder, and the time since when it is kept.
    kept: Option<(OrphanedSubgroup, Instant)>,
}

/// A place in the queue of streams that may continue a subgroup.
pub struct WaitingCopy {
    /// The subgroup as far as its holder has sent it.
    pub subgroup: Arc<SubgroupStream>,
    pub holder: Arc<UpstreamTrack>,
    /// Completes with the subgroup when the holder breaks off, or with an error when the subgroup has ended or another
    /// stream continues it.
    pub given: oneshot::Receiver<OrphanedSubgroup>,
}

/// Tells the subscriptions of a track that a subgroup has ended.
type SettleSubgroup = Box<dyn Fn(&Arc<SubgroupStream>) + Send + Sync>;

/// A subgroup whose holder has broken off. Dropping it ends the subgroup as incomplete.
pub struct OrphanedSubgroup {
    writer: Option<SubgroupReceiver>,
    /// The code with which streams to subscribers are reset if nothing continues the subgroup.
    code: code::Reset,
    settle: SettleSubgroup,
}

impl OrphanedSubgroup {
    /// Makes an orphan of a subgroup. `settle` is called if nothing continues it.
    pub fn new(
        writer: SubgroupReceiver,
        code: code::Reset,
        settle: impl Fn(&Arc<SubgroupStream>) + Send + Sync + 'static,
    ) -> Self {
        Self { writer: Some(writer), code, settle: Box::new(settle) }
    }

    /// Reports whether the subgroup can be kept for a later source.
    fn may_be_kept(&self) -> bool {
        let writer = self.writer.as_ref();
        writer.is_some_and(|writer| writer.incomplete() <= MAX_INCOMPLETE && !writer.subgroup().is_evicted())
    }

    pub fn subgroup(&self) -> Option<&Arc<SubgroupStream>> {
        self.writer.as_ref().map(SubgroupReceiver::subgroup)
    }

    /// Returns the receiving end of the subgroup, to append what was fetched, and the subgroup.
    pub fn writer(&mut self) -> Option<(&mut SubgroupReceiver, Arc<SubgroupStream>)> {
        let subgroup = self.subgroup().map(Arc::clone)?;
        Some((self.writer.as_mut()?, subgroup))
    }

    /// Ends the subgroup as complete, unless its last object is not.
    pub fn finish(mut self, now: Instant) {
        let Some(writer) = self.writer.take() else { return };
        let subgroup = Arc::clone(writer.subgroup());
        let _ = writer.finish(now); // An incomplete last object ends the subgroup as reset.
        (self.settle)(&subgroup);
    }

    /// Returns the receiving end of the subgroup, with which another publisher's stream continues it.
    pub fn adopt(mut self) -> Option<SubgroupReceiver> {
        self.writer.take()
    }
}

impl Drop for OrphanedSubgroup {
    fn drop(&mut self) {
        let Some(writer) = self.writer.take() else { return };
        let subgroup = Arc::clone(writer.subgroup());
        writer.reset(self.code);
        (self.settle)(&subgroup);
    }
}

impl SharedSubgroups {
    /// Notes that the stream of `holder` is read into the subgroup.
    pub fn hold(&self, subgroup: &Arc<SubgroupStream>, holder: &Arc<UpstreamTrack>) {
        let Some(key) = key_of(subgroup) else { return };
        let shared = SharedSubgroup {
            subgroup: Arc::clone(subgroup),
            holder: Arc::clone(holder),
            waiting: Vec::new(),
            is_asked: false,
            kept: None,
        };
        // A kept subgroup that is replaced ends after the lock is released, because that takes other locks.
        let _replaced = self.arriving.lock().insert(key, shared);
    }

    /// Queues a stream that has a copy of `subgroup`. Returns `None` if no holder of it is known.
    pub fn wait(&self, subgroup: &SubgroupStream) -> Option<WaitingCopy> {
        let mut arriving = self.arriving.lock();
        let key = key_of(subgroup)?;
        let shared = arriving.get_mut(&key)?;
        // Streams whose sessions have ended do not wait any more.
        shared.waiting.retain(|waiting| !waiting.is_closed());
        let (sender, given) = oneshot::channel();
        let waiting =
            WaitingCopy { subgroup: Arc::clone(&shared.subgroup), holder: Arc::clone(&shared.holder), given };
        match shared.kept.take() {
            Some((orphan, _)) => {
                arriving.remove(&key);
                let _ = sender.send(orphan); // The receiver is in `waiting`, so the send cannot fail.
            }
            None => shared.waiting.push(sender),
        }
        Some(waiting)
    }

    /// Asks the holder of `subgroup` to break off, so that a waiting stream continues the subgroup.
    pub fn ask(&self, subgroup: &Arc<SubgroupStream>) {
        if let Some(shared) = self.arriving.lock().values_mut().find(|shared| shared.is(subgroup)) {
            shared.is_asked = true;
        }
        self.asked.notify_waiters();
    }

    /// Waits until a waiting stream asks for `subgroup`.
    pub async fn asked(&self, subgroup: &Arc<SubgroupStream>) {
        let Some(key) = key_of(subgroup) else { return std::future::pending().await };
        loop {
            // The notification is requested before the flag is read, so that no `ask` in between is missed.
            let asked = self.asked.notified();
            if self.arriving.lock().get(&key).is_some_and(|shared| shared.is_asked) {
                return;
            }
            asked.await;
        }
    }

    /// Reports whether a stream waits for `subgroup`.
    pub fn is_wanted(&self, subgroup: &Arc<SubgroupStream>) -> bool {
        let arriving = self.arriving.lock();
        let shared = key_of(subgroup).and_then(|key| arriving.get(&key)).filter(|shared| shared.is(subgroup));
        shared.is_some_and(|shared| shared.waiting.iter().any(|waiting| !waiting.is_closed()))
    }

    /// Ends the holder's part in the subgroup. The first stream that waits for it gets `orphan`. If none does, the
    /// subgroup is kept from `keep_since` on, or ends if that is `None`.
    pub fn release(
        &self,
        subgroup: &Arc<SubgroupStream>,
        orphan: Option<OrphanedSubgroup>,
        keep_since: Option<Instant>,
    ) {
        let Some(key) = key_of(subgroup) else { return };
        let mut arriving = self.arriving.lock();
        // A second stream with the same subgroup may hold it by now, after the first one was reset.
        if !arriving.get(&key).is_some_and(|shared| shared.is(subgroup)) {
            return;
        }
        let Some(mut shared) = arriving.remove(&key) else { return };
        let mut orphan = orphan;
        for waiting in std::mem::take(&mut shared.waiting) {
            let Some(one) = orphan.take() else { return };
            // A stream whose session has ended does not wait any more, and returns the subgroup.
            orphan = waiting.send(one).err();
        }
        let count = arriving.values().filter(|shared| shared.kept.is_some()).count();
        if let Some(since) = keep_since.filter(|_| count < MAX_KEPT)
            && let Some(orphan) = orphan.take_if(|orphan| orphan.may_be_kept())
        {
            let kept = Some((orphan, since));
            arriving.insert(key, SharedSubgroup { is_asked: false, kept, ..shared });
        }
        // Whatever is not kept ends here, which takes other locks.
        drop(arriving);
    }

    /// Removes and returns the kept subgroups whose group and time `wanted` selects.
    fn take_kept(&self, wanted: impl Fn(u64, Instant) -> bool) -> Vec<OrphanedSubgroup> {
        let mut arriving = self.arriving.lock();
        let is_wanted = |key: &SubgroupKey, shared: &mut SharedSubgroup| {
            shared.kept.as_ref().is_some_and(|(_, since)| wanted(key.0, *since))
        };
        arriving.extract_if(is_wanted).filter_map(|(_, shared)| Some(shared.kept?.0)).collect()
    }

    /// Returns the smallest group that has a kept subgroup.
    pub fn first_kept(&self) -> Option<u64> {
        let arriving = self.arriving.lock();
        arriving.iter().filter(|(_, shared)| shared.kept.is_some()).map(|(key, _)| key.0).min()
    }

    /// Removes and returns the kept subgroups of groups before `group`.
    pub fn take_before(&self, group: u64) -> Vec<OrphanedSubgroup> {
        self.take_kept(|kept, _| kept < group)
    }

    /// Ends the subgroups as incomplete that were kept for longer than `longest`.
    pub fn expire(&self, now: Instant, longest: Duration) {
        drop(self.take_kept(|_, since| now.saturating_duration_since(since) > longest));
    }
}

impl SharedSubgroup {
    fn is(&self, subgroup: &Arc<SubgroupStream>) -> bool {
        Arc::ptr_eq(&self.subgroup, subgroup)
    }
}

/// Returns the key of a subgroup whose header names it. Subgroups that are named by their first object are not shared.
fn key_of(subgroup: &SubgroupStream) -> Option<SubgroupKey> {
    let header = subgroup.header();
    match header.subgroup {
        SubgroupId::Zero => Some((header.group, 0)),
        SubgroupId::Explicit(id) => Some((header.group, id)),
        SubgroupId::FirstObject => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use millrace_moq::SubgroupHeader;

    use super::*;
    use crate::upstream::UpstreamSession;

    #[test]
    fn streams_whose_sessions_have_ended_leave_the_queue_of_copies() {
        let place =
            UpstreamSession { session: 1, is_upstream: false, is_relay: false, connection: Weak::new() };
        let holder = UpstreamTrack::new(place, 1, true).0;
        let header = SubgroupHeader {
            alias: 1,
            group: 7,
            subgroup: SubgroupId::Zero,
            priority: None,
            properties: false,
            end_of_group: false,
            first_object: true,
        };
        let writer = SubgroupStream::begin(header, 3);
        let copies = SharedSubgroups::default();
        copies.hold(writer.subgroup(), &holder);
        for _ in 0..100 {
            drop(copies.wait(writer.subgroup()).expect("the holder is known"));
        }
        let _waiting = copies.wait(writer.subgroup()).expect("the holder is known");
        assert_eq!(copies.arriving.lock()[&(7, 0)].waiting.len(), 1);
    }
}
