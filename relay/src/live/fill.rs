//! Fills the gap of a track: the objects that it missed while its source was away or changed
//! (docs/notes/design/0052-gaps.md).
//!
//! A gap is *open* from the time at which a track gets another source, or at which its second source begins to lead. A
//! session with that source asks for the missing objects by FETCH, one session at a time, and adds them with a
//! [`GapFill`]. The gap is closed when the source has answered. If the session ends before, it stays open for the next
//! source.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use millrace_moq::{
    FetchObject, Location, SubgroupHeader, SubgroupId, code,
    tracks::{
        account::Account,
        gap::GapEnd,
        subgroup::{Pushed, SubgroupStream},
        track::SUBGROUP_COST,
    },
};

use super::{LiveTrack, copies::OrphanedSubgroup};
use crate::upstream::{UpstreamRequest, UpstreamTrack};
use millrace_transport::Outbox;

impl LiveTrack {
    /// Reports whether the track has a source, or waits for one.
    pub fn may_go_on(&self) -> bool {
        self.is_established() || self.is_waiting()
    }

    /// Reports whether the track moves from one source to another. Objects of either source may then be late.
    pub fn moves(&self) -> bool {
        self.gap.is_open() || self.upstreams.lock().iter().any(|upstream| upstream.is_leaving())
    }

    /// Reports whether `upstream` publishes the track.
    pub fn has_source(&self, upstream: &Arc<UpstreamTrack>) -> bool {
        self.upstreams.lock().iter().any(|other| Arc::ptr_eq(other, upstream))
    }

    /// Removes a publisher from `upstreams`, the track's list. If it was the leading one, the next in the list leads.
    pub(super) fn take_source(
        &self,
        upstreams: &mut Vec<Arc<UpstreamTrack>>,
        upstream: &UpstreamTrack,
    ) -> Option<Arc<UpstreamTrack>> {
        let place = upstreams.iter().position(|other| std::ptr::eq(&**other, upstream))?;
        let taken = upstreams.remove(place);
        self.gap.lost(&taken);
        if let Some(first) = upstreams.first().filter(|_| place == 0) {
            self.lead(first);
        }
        self.forwarding.lock().choose(upstreams);
        Some(taken)
    }

    /// Makes `first` the leading publisher, since the earlier ones are gone, and lets it fill the gap that they leave.
    fn lead(&self, first: &UpstreamTrack) {
        let mut gap = self.gap.state.lock();
        if let Some(from) = first.lead(self.data.position()) {
            gap.open_at(&self.data, from);
        }
        // A gap that was open before was to be filled by a publisher that is gone.
        if gap.from().is_some() {
            first.ask(UpstreamRequest::FillGap);
        }
    }

    /// Closes the gap, and ends the subgroups that were kept for another source.
    pub(super) fn close_gap(&self) {
        self.end_gap(u64::MAX, GapEnd::Over);
    }

    /// Closes the gap before `group`, with which the present source begins. Subgroups that are still kept end as
    /// incomplete.
    pub fn end_gap(&self, group: u64, end: GapEnd) {
        self.gap.state.lock().close(&self.data, end);
        drop(self.copies.take_before(group));
    }

    /// Returns the first and the last location of what the track may have missed before `group`.
    pub fn missing_before(&self, group: u64) -> Option<(Location, Location)> {
        let from = self.gap.state.lock().from()?;
        let kept = self.copies.first_kept().map(|group| Location { group, object: 0 });
        let first = kept.map_or(from, |kept| kept.min(from));
        let first = self.data.first_missing(first, Location { group, object: 0 })?;
        Some((first, Location { group: group.checked_sub(1)?, object: u64::MAX }))
    }
}

/// Subgroups that are not complete, by group and subgroup ID.
type OpenSubgroups = BTreeMap<(u64, u64), OrphanedSubgroup>;

/// Adds fetched objects to a track. Subgroups that broke off continue, others begin. Dropping it keeps the subgroups
/// that are not complete for another source.
pub struct GapFill {
    track: Arc<LiveTrack>,
    account: Arc<Account>,
    upstream: Arc<UpstreamTrack>,
    open: OpenSubgroups,
    /// The location of the last item of the FETCH response.
    at: Location,
    /// The subgroup of the object that is arriving, and the offset of the object's next byte in it. `None` if the object
    /// is not added.
    arriving: Option<((u64, u64), u64)>,
    outbox: Outbox,
}

impl GapFill {
    /// Begins to fill the gap from `first` on and before `group`, with objects of `upstream`. Their memory is counted in
    /// `account`.
    pub fn new(
        track: &Arc<LiveTrack>,
        upstream: &Arc<UpstreamTrack>,
        account: &Arc<Account>,
        first: Location,
        group: u64,
    ) -> Self {
        let mut fill = Self {
            track: Arc::clone(track),
            account: Arc::clone(account),
            upstream: Arc::clone(upstream),
            open: BTreeMap::new(),
            at: first,
            arriving: None,
            outbox: Outbox::default(),
        };
        track.copies.take_before(group).into_iter().for_each(|orphan| fill.hold(orphan));
        fill
    }

    fn hold(&mut self, orphan: OrphanedSubgroup) {
        if let Some(subgroup) = orphan.subgroup() {
            self.track.copies.hold(subgroup, &self.upstream);
            self.open.insert((subgroup.header().group, subgroup.id().unwrap_or_default()), orphan);
        }
    }

    /// Reports whether the source still publishes the track. If it does not, the track may belong to another owner.
    pub fn is_current(&self) -> bool {
        self.track.has_source(&self.upstream)
    }

    /// Begins to add an object, unless the track has it. Returns whether it is added. Objects that were sent as
    /// datagrams are not added: their publisher has accepted their loss.
    pub fn begin(&mut self, object: &FetchObject, now: Instant) -> bool {
        self.finish_before(object.location.group, now);
        self.at = object.location;
        self.arriving = None;
        let Some(id) = object.subgroup.filter(|_| !self.track.data.has(object.location)) else {
            return false;
        };
        let key = (object.location.group, id);
        if !self.open.contains_key(&key) {
            self.begin_subgroup(object, id, now);
        }
        let Some(subgroup) = self.open.get(&key).and_then(OrphanedSubgroup::subgroup) else { return false };
        let Some((offset, header)) = subgroup.fetched_header(object) else { return false };
        self.arriving = Some((key, offset));
        self.extend(&header, now);
        self.arriving.is_some()
    }

    /// Adds bytes of the object that is arriving.
    pub fn extend(&mut self, bytes: &[u8], now: Instant) {
        let Some((key, offset)) = self.arriving else { return };
        let Some(orphan) = self.open.get_mut(&key) else { return };
        let Some((writer, subgroup)) = orphan.writer() else { return };
        let data = &self.track.data;
        match writer.push_at(now, offset, bytes, |objects| data.judge(key.0, objects)) {
            Ok(pushed) => {
                // Old objects say nothing about the track's largest location.
                let pushed = Pushed { ids: None, ..pushed };
                self.track.advance(now, &subgroup, &pushed, None, &mut self.outbox);
                self.arriving = Some((key, offset + bytes.len() as u64));
            }
            Err(_) => {
                // The subgroup cannot go on with other bytes, so it ends as incomplete.
                self.arriving = None;
                self.track.copies.release(&subgroup, self.open.remove(&key), None);
            }
        }
    }

    /// Begins a subgroup that the track does not have yet.
    fn begin_subgroup(&mut self, object: &FetchObject, id: u64, now: Instant) {
        let header = SubgroupHeader {
            alias: self.upstream.alias,
            group: object.location.group,
            subgroup: if id == 0 { SubgroupId::Zero } else { SubgroupId::Explicit(id) },
            priority: Some(object.priority),
            properties: self.track.data.has_object_properties() || !object.properties.is_empty(),
            end_of_group: false,
            first_object: false,
        };
        let mut encoded = Vec::with_capacity(32);
        header.encode(&mut encoded);
        let writer = SubgroupStream::begin(header, encoded.len());
        let LiveTrack { data, cache, .. } = &*self.track;
        let Ok(is_new) = data.add_subgroup(now, Arc::clone(writer.subgroup()), &self.account) else { return };
        if is_new {
            cache.began(now, &Arc::downgrade(data), header.group, &self.account);
        }
        cache.grew(SUBGROUP_COST);
        let track = Arc::clone(&self.track);
        let settle = move |subgroup: &_| {
            track.settle(Instant::now(), subgroup, None, &mut Outbox::default());
        };
        self.hold(OrphanedSubgroup::new(writer, code::Reset::INTERNAL_ERROR, settle));
    }

    /// Handles a range up to `last` whose objects the source does not know yet. Its subgroups are kept until the gap is
    /// closed.
    pub fn skip(&mut self, last: Location, now: Instant) {
        self.finish_before(self.at.group, now);
        let behind = self.open.split_off(&(last.group.saturating_add(1), 0));
        let unknown = std::mem::replace(&mut self.open, behind);
        self.release(unknown, Some(now));
        (self.at, self.arriving) = (last, None);
    }

    /// Passes subgroups to streams that wait for them, or else keeps them from `keep_since` on.
    fn release(&self, open: OpenSubgroups, keep_since: Option<Instant>) {
        for orphan in open.into_values() {
            if let Some(subgroup) = orphan.subgroup().map(Arc::clone) {
                self.track.copies.release(&subgroup, Some(orphan), keep_since);
            }
        }
    }

    /// Ends all subgroups as complete, since the source has sent all that it has.
    pub fn finish(mut self, now: Instant) {
        self.finish_before(u64::MAX, now);
    }

    /// Ends the subgroups of groups before `group` as complete.
    fn finish_before(&mut self, group: u64, now: Instant) {
        while let Some(first) = self.open.first_entry().filter(|first| first.key().0 < group) {
            let orphan = first.remove();
            let Some(subgroup) = orphan.subgroup().map(Arc::clone) else { continue };
            if let (true, Some(last)) = (subgroup.header().end_of_group, subgroup.last_object_id()) {
                let _ = self.track.data.group_ended(subgroup.header().group, last); // An earlier end of the group stays.
            }
            orphan.finish(now);
            self.track.copies.release(&subgroup, None, None);
        }
    }
}

impl Drop for GapFill {
    fn drop(&mut self) {
        let open = std::mem::take(&mut self.open);
        self.release(open, self.track.may_go_on().then(Instant::now));
    }
}
