//! One subscription of one subscriber: which subgroups are sent, and on which streams.

mod options;
mod renditions;

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use bytes::Bytes;
use millrace_moq::{
    Filter, GroupOrder, Location, ObjectDatagram, code,
    tracks::{
        adapt::RenditionChoice,
        filter::LocationWindow,
        subgroup::SubgroupStream,
        track::{CachedDatagram, GROUP_SLACK, Track},
        view::SubgroupView,
    },
};
use millrace_quic::plane::{
    downstream::{
        AskedRange, DownstreamEvent, EventKind, Label, NewDatagram, NewStream, Priority, StreamKey,
    },
    source::SourceEnd,
};
use millrace_transport::{
    Connection, Outbox,
    offload::{DatagramCopy, OffloadIngress, OpeningTerms},
};
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use self::options::{SubscriptionOptions, Timeouts};
use super::delays::TrackDelays;

/// Facts that a subscription has about its track: the track's number, its cached objects, and its limits for late
/// media.
#[derive(Clone)]
pub struct TrackRef {
    /// The number that stands for the track in trace events.
    pub number: u32,
    pub data: Arc<Track>,
    pub delays: TrackDelays,
}

/// The reason why a track's subscriptions end.
#[derive(Clone, Debug)]
pub struct SubscriptionEnd {
    pub code: code::Done,
    pub reason: String,
    /// True if the relay itself has unsubscribed, while the publisher goes on.
    pub paused: bool,
    /// True if the publisher was lost without ending the track, so that it may return.
    pub absent: bool,
}

impl SubscriptionEnd {
    pub fn new(code: code::Done, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), paused: false, absent: false }
    }
}

/// A subscription of one subscriber to a track.
///
/// For each subgroup, [`DownstreamStream`] tells its state: no stream yet, *open*, *ending* once the subgroup has
/// ended, or *over*. Only [`Self::offer`] opens streams. The connection reports their ends as events
/// ([`Self::on_event`]). The subscription is live until the first [`Self::end`], whose reason is kept. Open streams
/// then continue, and [`Self::drained`] returns the reason once the last of them is over and no datagram is queued.
/// Between calls, each key in `open` is a stream that the connection has not reported as ended.
pub struct Subscription {
    pub track: TrackRef,
    pub alias: u64,
    /// The number that identifies the subscription in events of its streams.
    pub owner: u64,
    connection: Arc<Connection>,
    state: Mutex<SubscriptionState>,
    /// The tracks that groups may come from, including the subscription's own. Unset if its own is the only one.
    renditions: OnceLock<Vec<TrackRef>>,
    /// Notified when the subscription or one of its streams has ended.
    pub changed: Notify,
}

struct SubscriptionState {
    options: SubscriptionOptions,
    /// The largest location when forwarding began. A joining FETCH ends at this location.
    joining: Option<Location>,
    /// The stream of each subgroup, by the subgroup's serial number. An entry is removed once its stream is over and
    /// the subgroup has ended.
    streams: HashMap<u64, DownstreamStream>,
    /// The subgroups that are being sent, each with the number of its track.
    open: HashMap<StreamKey, (u32, Arc<SubgroupView>)>,
    ended: Option<SubscriptionEnd>,
    /// True once an object after the last requested group has arrived.
    past_end: bool,
    /// Number of streams that were opened for the subscription so far, which PUBLISH_DONE contains.
    opened: u64,
    origin: GroupOrigin,
}

/// Decides which track each group is sent from.
enum GroupOrigin {
    /// The subscription's own track provides all groups.
    Own,
    /// Each group comes from one of several renditions.
    Renditions(RenditionChoice),
    /// Groups come from the subscription's own track, if the switching set has chosen it for the group.
    Set(SwitchingPlace),
}

/// The membership of a subscription in a switching set. Locks are taken in this order: the subscription's, then that of
/// `choice`, then the connection's.
pub struct SwitchingPlace {
    pub choice: Arc<Mutex<RenditionChoice>>,
    pub number: usize,
}

#[derive(Clone, Copy)]
enum DownstreamStream {
    Open(StreamKey),
    /// The subgroup has ended, and its stream is still being sent.
    Ending(StreamKey),
    /// The subgroup gets no further stream to this subscriber.
    Over,
}

/// Says what has happened to a subgroup or datagram that is offered to a subscription.
#[derive(Clone, Copy)]
pub enum SubgroupNews<'a> {
    /// The subgroup or datagram is in the cache already.
    Cached,
    /// The subgroup has new bytes. The ingress is the kernel engine's handle of the publisher's stream, if it can
    /// forward the stream.
    Grown(Option<&'a Arc<dyn OffloadIngress>>),
    /// The subgroup has ended, which is its last event. The ingress is the kernel engine's handle of the publisher's
    /// stream, if it can forward the stream.
    Ended(Option<&'a Arc<dyn OffloadIngress>>),
}

impl Subscription {
    pub fn new(
        track: TrackRef,
        connection: Arc<Connection>,
        alias: u64,
        owner: u64,
        options: SubscriptionOptions,
        joining: Option<Location>,
    ) -> Self {
        let state = SubscriptionState {
            options,
            joining,
            streams: HashMap::new(),
            open: HashMap::new(),
            ended: None,
            past_end: false,
            opened: 0,
            origin: GroupOrigin::Own,
        };
        Self {
            track,
            alias,
            owner,
            connection,
            state: Mutex::new(state),
            renditions: OnceLock::new(),
            changed: Notify::new(),
        }
    }

    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    pub fn options(&self) -> SubscriptionOptions {
        self.state.lock().options.clone()
    }

    /// Returns the location at which a joining FETCH ends. `None` if nothing was published when forwarding began, or if
    /// the subscription does not forward.
    pub fn joining(&self) -> Option<Location> {
        let state = self.state.lock();
        state.joining.filter(|_| state.options.forward)
    }

    /// Returns the first and the last group that the subscription may get.
    pub fn group_range(&self) -> (u64, u64) {
        let window = self.state.lock().options.window;
        (window.start.group, window.end.map_or(u64::MAX, |end| end.group))
    }

    /// Handles an event of `subgroup`, which belongs to the track with the number `from`. Opens a stream or sends more
    /// of it, and delegates later bytes to the kernel if possible. Returns true if userspace does not have to offer
    /// later bytes.
    pub fn offer(
        &self,
        from: u32,
        subgroup: &Arc<SubgroupStream>,
        news: SubgroupNews<'_>,
        now: Instant,
        outbox: &mut Outbox,
    ) -> bool {
        let mut state = self.state.lock();
        let group = subgroup.header().group;
        // If the track turns out to be far behind the location that its publisher claimed, the subscription's range of
        // locations is recomputed.
        if from == self.track.number && state.check_start(&self.track.data, group) {
            self.take_back(now);
        }
        if !state.past_end && state.options.window.is_past(group) {
            state.past_end = true;
            self.changed.notify_one();
        }
        // `serial` is unique among all subgroups, also among copies of the same subgroup ID.
        let key = match state.streams.get(&subgroup.serial()).copied() {
            Some(DownstreamStream::Open(key) | DownstreamStream::Ending(key)) => {
                self.connection.downstream().wake(key);
                key
            }
            Some(DownstreamStream::Over) => {
                if matches!(news, SubgroupNews::Ended(_)) {
                    state.streams.remove(&subgroup.serial());
                }
                return true;
            }
            None if !self.takes(&mut state, from, group) => {
                self.pass_over(&mut state, subgroup, news, now);
                return true;
            }
            None => match state.view(subgroup, self.alias, matches!(news, SubgroupNews::Grown(Some(_)))) {
                Some(view) => match self.open(&mut state, from, subgroup, self.bound(view), news, now) {
                    Some(key) => key,
                    None => return true,
                },
                // The subscriber's stream cannot begin before the first object in the subscription's range has arrived.
                // That may be the subgroup's next object.
                None => {
                    let wanted = state.wants_group(group);
                    if let (SubgroupNews::Grown(Some(ingress)), false) =
                        (news, wanted && state.ended.is_none())
                    {
                        self.connection.offload(|offload| offload.refuse(now, ingress, self.owner));
                    }
                    return !wanted;
                }
            },
        };
        if matches!(news, SubgroupNews::Ended(_)) || subgroup.is_settled() {
            state.streams.insert(subgroup.serial(), DownstreamStream::Ending(key));
        }
        let view = state.open.get(&key).map(|(_, view)| Arc::clone(view));
        drop(state);
        match news {
            // Many subscribers get this at the same time.
            SubgroupNews::Grown(None) | SubgroupNews::Ended(None) => outbox.postpone(&self.connection),
            _ => outbox.transmit(&self.connection, now),
        }
        match (news, view) {
            (SubgroupNews::Grown(Some(ingress)), Some(view)) if !view.is_cut() => {
                let shift = view.shift();
                let from = view.received();
                self.connection.offload(|offload| offload.delegate(key, ingress, shift, from))
            }
            _ => false,
        }
    }

    /// Adds the preamble with which streams begin on the subscriber's connection (WebTransport).
    fn bound(&self, view: SubgroupView) -> Arc<SubgroupView> {
        Arc::new(view.with_preamble(&self.connection.binding().uni()))
    }

    /// Reports whether the subscription takes this group from the track with the number `from`.
    fn takes(&self, state: &mut SubscriptionState, from: u32, group: u64) -> bool {
        match &mut state.origin {
            GroupOrigin::Own => true,
            GroupOrigin::Renditions(choice) => {
                self.member(from).is_none_or(|member| choice.saw(member, group))
            }
            // Before a subscription joins a switching set, the relay may have served it from several renditions. These
            // renditions still offer it their groups.
            GroupOrigin::Set(place) => {
                from == self.track.number && place.choice.lock().saw(place.number, group)
            }
        }
    }

    /// Skips a subgroup because its group is sent from another rendition.
    fn pass_over(
        &self,
        state: &mut SubscriptionState,
        subgroup: &SubgroupStream,
        news: SubgroupNews<'_>,
        now: Instant,
    ) {
        if let SubgroupNews::Grown(ingress) = news {
            // Marks the subgroup as over, so that it is not considered again until it ends.
            state.streams.insert(subgroup.serial(), DownstreamStream::Over);
            if let Some(ingress) = ingress {
                self.connection.offload(|offload| offload.refuse(now, ingress, self.owner));
            }
        }
    }

    /// Opens a stream for a subgroup, or adopts the stream that the kernel has opened. Returns `None` if the adopted
    /// stream is already over.
    fn open(
        &self,
        state: &mut SubscriptionState,
        from: u32,
        subgroup: &Arc<SubgroupStream>,
        view: Arc<SubgroupView>,
        news: SubgroupNews<'_>,
        now: Instant,
    ) -> Option<StreamKey> {
        let track = self.source(from);
        let priority = priority_of(track, &state.options, subgroup);
        let timeouts = state.options.timeouts(&track.data, Some(subgroup));
        let stream = NewStream {
            source: Arc::clone(&view) as _,
            priority,
            max_delay: self.max_delay(timeouts, priority),
            asked: if matches!(news, SubgroupNews::Cached) {
                AskedRange::Present
            } else {
                AskedRange::Nothing
            },
            object_timeout: timeouts.object,
            subgroup_timeout: timeouts.subgroup,
            owner: self.owner,
            label: Label { track: track.number, group: subgroup.header().group },
        };
        // The kernel may already have opened the subscriber's stream for this ingress (its handle of the publisher's
        // stream). If not, `adopt` keeps the kernel from opening a second stream.
        let key = match news {
            SubgroupNews::Grown(Some(ingress)) | SubgroupNews::Ended(Some(ingress)) => {
                self.connection.offload(|offload| offload.adopt(now, ingress, stream))
            }
            _ => Some(self.connection.downstream().open(stream)),
        };
        if key.is_some() || !matches!(news, SubgroupNews::Ended(_)) {
            state
                .streams
                .insert(subgroup.serial(), key.map_or(DownstreamStream::Over, DownstreamStream::Open));
        }
        key.inspect(|key| drop(state.open.insert(*key, (track.number, view))))
    }

    /// Lets the kernel open a stream to this subscriber when the publisher begins its next stream of the track with the
    /// number `from`. `opening` is the kernel engine's handle of that expected stream. Returns true if userspace does
    /// not have to offer the stream's bytes.
    pub fn prepare(&self, from: u32, opening: &Arc<dyn OffloadIngress>) -> bool {
        let state = self.state.lock();
        let options = &state.options;
        if !options.forward || state.ended.is_some() {
            return true;
        }
        // The kernel knows group IDs only, so subscriptions that end inside a group are left to userspace.
        let (start, Some(last_group)) = (options.window.start, options.window.last_whole_group()) else {
            return false;
        };
        let mut first = (start.group, start.object);
        // The switching set's lock is held until the kernel may open the stream. A switch to another track withdraws
        // that permission only for streams that have it already.
        let mut chosen = None;
        let current = match &state.origin {
            GroupOrigin::Own => None,
            GroupOrigin::Renditions(choice) => Some((choice.current(), self.member(from))),
            GroupOrigin::Set(place) => {
                let member = (from == self.track.number).then_some(place.number);
                Some((chosen.insert(place.choice.lock()).current(), member))
            }
        };
        if let Some((newest, member)) = current {
            if member != Some(newest.member) {
                return true;
            }
            first = first.max((newest.first, 0));
        }
        let track = self.source(from);
        let terms = OpeningTerms {
            owner: self.owner,
            alias: self.alias,
            first,
            last_group,
            level: u16::from_be_bytes([options.priority, track.data.default_priority()]),
            track: track.number,
        };
        self.connection.offload(|offload| offload.prepare(opening, &terms))
    }

    /// Returns how long media may wait: the relay's setting, unless the publisher or the subscriber has set a delivery
    /// timeout.
    fn max_delay(&self, timeouts: Timeouts, priority: Priority) -> Option<Duration> {
        if timeouts.object.is_some() { None } else { self.track.delays.at(priority.publisher) }
    }

    /// Wakes the streams whose subgroups the cache has dropped, so that they are reset. A stream that waits for flow
    /// control credit would otherwise stay open.
    pub fn drop_evicted(&self, now: Instant, outbox: &mut Outbox) {
        let state = self.state.lock();
        let evicted: Vec<_> = state
            .open
            .iter()
            .filter(|(_, (_, view))| view.subgroup().is_evicted())
            .map(|(key, _)| *key)
            .collect();
        drop(state);
        if !evicted.is_empty() {
            let mut downstream = self.connection.downstream();
            evicted.into_iter().for_each(|key| downstream.wake(key));
            drop(downstream);
            outbox.transmit(&self.connection, now);
        }
    }

    /// Sends an object that arrived as a datagram of the track `from`, if the filter selects it and the kernel has not
    /// sent it. Lets the kernel send the track's later datagrams if possible.
    pub fn offer_datagram(
        &self,
        from: u32,
        object: &CachedDatagram,
        news: SubgroupNews<'_>,
        now: Instant,
        outbox: &mut Outbox,
    ) {
        let mut state = self.state.lock();
        if !self.takes(&mut state, from, object.datagram.group) {
            return;
        }
        let track = self.source(from);
        if state.check_start(&self.track.data, object.datagram.group) {
            self.take_back(now);
        }
        // The kernel is allowed to send later datagrams before this one is checked, so that no datagram is missed in
        // between.
        if let SubgroupNews::Grown(Some(ingress)) = news {
            self.delegate_datagrams(&state, ingress);
        }
        let location = object.location();
        let at = (location.group, location.object);
        if self.connection.offload(|offload| offload.take_delivered(now, self.owner, at.0, at.1)) {
            drop(state);
            return outbox.transmit(&self.connection, now);
        }
        let options = &state.options;
        if !options.forward || state.ended.is_some() || !options.window.contains(object.location()) {
            return;
        }
        let header = &object.datagram;
        let timeouts = options.timeouts(&track.data, None);
        let timeout = match (timeouts.object, timeouts.subgroup) {
            (Some(object), Some(subgroup)) => Some(object.min(subgroup)),
            (one, other) => one.or(other),
        };
        let default_priority = || track.data.default_priority();
        let priority = Priority {
            subscriber: options.priority,
            publisher: header.priority.unwrap_or_else(default_priority),
            group: ordered(options.order, header.group),
            subgroup: 0,
        };
        // The subscriber has asked for these cached objects, so they are never dropped for being late.
        let is_live = matches!(news, SubgroupNews::Grown(_));
        let max_delay = self.max_delay(timeouts, priority).filter(|_| is_live);
        let datagram = NewDatagram {
            payload: self.encode(object),
            priority,
            late: max_delay.and_then(|most| object.received_at.checked_add(most)),
            expires: timeout.map(|timeout| object.received_at + timeout),
            label: Label { track: track.number, group: header.group },
        };
        drop(state);
        // A datagram that is too large for the subscriber's path is dropped and counted by the connection.
        let _ = self.connection.downstream().send_datagram(datagram);
        outbox.transmit(&self.connection, now);
    }

    /// Stops the kernel from sending datagrams and opening streams for the subscription, until userspace allows this
    /// again.
    fn take_back(&self, now: Instant) {
        self.connection.offload(|offload| {
            offload.recall_datagrams(self.owner);
            offload.withdraw(now, self.owner)
        });
    }

    fn delegate_datagrams(&self, state: &SubscriptionState, ingress: &Arc<dyn OffloadIngress>) {
        // If a subscription is served from several renditions, its groups come from several tracks. The kernel knows
        // only one of them.
        let adapted = !matches!(state.origin, GroupOrigin::Own);
        if adapted || !state.options.forward || state.ended.is_some() {
            return;
        }
        let start = state.options.window.start;
        // The kernel knows group IDs only, so a subscription that ends inside a group is left to userspace.
        let Some(last_group) = state.options.window.last_whole_group() else { return };
        // The subscriber's priority takes precedence, so it is in the high byte.
        let level = [state.options.priority, self.track.data.default_priority()];
        let datagrams = DatagramCopy {
            alias: self.alias,
            first: (start.group, start.object),
            last_group,
            tag: self.owner,
            level: u16::from_be_bytes(level),
            track: self.track.number,
        };
        self.connection.offload(|offload| offload.delegate_datagrams(ingress, &datagrams));
    }

    /// Encodes an object as a datagram with this subscription's track alias.
    fn encode(&self, object: &CachedDatagram) -> Bytes {
        let datagram = ObjectDatagram { alias: self.alias, ..object.datagram.clone() };
        let mut bytes = Vec::with_capacity(datagram.payload.len() + datagram.properties.len() + 48);
        bytes.extend_from_slice(&self.connection.binding().datagram());
        datagram.encode(&mut bytes);
        bytes.into()
    }

    /// Applies REQUEST_UPDATE. `largest` is the track's largest location. Streams of groups outside the new range of
    /// locations are reset.
    pub fn update(&self, options: SubscriptionOptions, largest: Option<Location>) {
        let mut state = self.state.lock();
        let resumed = options.forward && !state.options.forward;
        state.options = options;
        // The kernel works with the old options, so it has to stop sending for this subscription first.
        self.take_back(Instant::now());
        if resumed {
            state.joining = largest;
            let next = self.resume_at(&state.origin, largest);
            state.options.window.start = state.options.window.start.max(next);
        }
        let mut downstream = self.connection.downstream();
        for (key, (number, view)) in &state.open {
            let subgroup = view.subgroup();
            if state.wants_group(subgroup.header().group) {
                downstream.set_priority(*key, priority_of(self.source(*number), &state.options, subgroup));
            } else {
                downstream.reset(*key, code::Reset::CANCELLED.0);
            }
        }
    }

    /// Continues with the next group, whatever its ID is, because the track's numbering starts over. A subscription
    /// that is served from several renditions ends instead, since these share their group IDs.
    pub fn begin_anew(&self, now: Instant) {
        let mut state = self.state.lock();
        if !matches!(state.origin, GroupOrigin::Own) {
            drop(state);
            return self.end(SubscriptionEnd::new(
                code::Done::INTERNAL_ERROR,
                "the publisher numbers its groups from the beginning",
            ));
        }
        state.options.window = LocationWindow::resolve(state.options.filter.as_ref(), None);
        (state.past_end, state.joining) = (false, None);
        self.take_back(now);
    }

    /// Ends the subscription: no further subgroups will come. The first reason is kept.
    pub fn end(&self, ended: SubscriptionEnd) {
        let mut state = self.state.lock();
        state.ended.get_or_insert(ended);
        self.take_back(Instant::now());
        drop(state);
        self.changed.notify_one();
    }

    /// Resets all open streams, because the subscriber has left or does not want them any more.
    pub fn cancel(&self, code: code::Reset) {
        let state = self.state.lock();
        let now = Instant::now();
        self.connection.offload(|offload| {
            offload.recall_datagrams(self.owner);
            offload.abandon(now, self.owner);
        });
        let mut downstream = self.connection.downstream();
        state.open.keys().for_each(|key| downstream.reset(*key, code.0));
    }

    /// Adds the packets that may be sent now to `outbox`.
    pub fn transmit(&self, now: Instant, outbox: &mut Outbox) {
        outbox.transmit(&self.connection, now);
    }

    /// Handles an event of one of the subscription's streams.
    pub fn on_event(&self, event: &DownstreamEvent) {
        let mut state = self.state.lock();
        match event.kind {
            EventKind::Opened => state.opened += 1,
            EventKind::Stopped(_) => {}
            EventKind::Finished | EventKind::Reset(_) => {
                state.close(event.key);
                if state.open.is_empty() {
                    self.changed.notify_one();
                }
            }
        }
    }

    /// Returns the number of data streams that were opened for the subscription.
    pub fn stream_count(&self) -> u64 {
        self.state.lock().opened
    }

    pub fn ended(&self) -> Option<SubscriptionEnd> {
        self.state.lock().ended.clone()
    }

    /// Returns why the subscription ended, once its streams are closed and no datagram is queued.
    pub fn drained(&self) -> Option<SubscriptionEnd> {
        let state = self.state.lock();
        let closed = |_: &SubscriptionEnd| {
            state.open.is_empty() && self.connection.downstream().queued_datagrams() == 0
        };
        state.ended.clone().filter(closed)
    }

    /// Reports whether the track has passed the last requested group.
    pub fn is_past_end(&self) -> bool {
        let state = self.state.lock();
        state.past_end && state.ended.is_none()
    }

    /// Checks again whether the track has passed the last requested group. A single stray object of a later group does
    /// not count.
    pub fn stays_past_end(&self) -> bool {
        let mut state = self.state.lock();
        let largest = self.track.data.largest();
        state.past_end = largest.is_none_or(|largest| state.options.window.is_past(largest.group));
        state.past_end
    }
}

impl SubscriptionState {
    /// Recomputes the subscription's range of locations (its window) if the track continues far before the range's
    /// start, because a publisher's claimed location was wrong. `group` is a group that has arrived. Returns whether
    /// the range has changed.
    fn check_start(&mut self, track: &Track, group: u64) -> bool {
        let start = self.options.window.start;
        let is_far = |group: u64| start.group.saturating_sub(group) > GROUP_SLACK;
        if !is_far(group)
            || matches!(self.options.filter, Some(Filter::AbsoluteStart(_) | Filter::AbsoluteRange { .. }))
        {
            return false;
        }
        let Some(largest) = track.largest().filter(|largest| is_far(largest.group)) else { return false };
        self.options.window = LocationWindow::resolve(self.options.filter.as_ref(), Some(largest));
        true
    }

    fn close(&mut self, key: StreamKey) {
        let Some((_, view)) = self.open.remove(&key) else { return };
        let subgroup = view.subgroup();
        // If the kernel sends the stream, its acknowledgement may be processed before the subgroup's end.
        match self.streams.get(&subgroup.serial()) {
            Some(DownstreamStream::Ending(_)) => drop(self.streams.remove(&subgroup.serial())),
            _ => drop(self.streams.insert(subgroup.serial(), DownstreamStream::Over)),
        }
    }

    fn wants_group(&self, group: u64) -> bool {
        self.options.forward && self.options.window.touches_group(group)
    }

    /// Returns the part of the subgroup that this subscription sends. Returns `None` if there is no such part, or none
    /// yet. `is_offloaded`: the kernel may forward the bytes after the header.
    fn view(&self, subgroup: &Arc<SubgroupStream>, alias: u64, is_offloaded: bool) -> Option<SubgroupView> {
        let group = subgroup.header().group;
        if !self.wants_group(group) || self.ended.is_some() || subgroup.is_evicted() {
            return None;
        }
        let first = self.options.window.first_object(group);
        let last = self.options.window.last_object(group);
        let view = match subgroup.first_object_from(first) {
            Some((object, _)) if last.is_some_and(|last| object.start.id > last) => return None,
            Some((_, true)) => SubgroupView::whole(Arc::clone(subgroup), alias),
            Some((object, false)) => SubgroupView::from_object(Arc::clone(subgroup), alias, &object),
            None if first > 0 => return None,
            None => match subgroup.extent().end {
                // A subgroup that has ended without objects is sent as a header only.
                SourceEnd::Fin { .. } => SubgroupView::whole(Arc::clone(subgroup), alias),
                // The whole subgroup is in the subscription's range, so its header is sent at once. The kernel
                // continues with the first object.
                SourceEnd::Open if is_offloaded && last.is_none() => {
                    SubgroupView::whole(Arc::clone(subgroup), alias)
                }
                SourceEnd::Open | SourceEnd::Reset(_) => return None,
            },
        };
        Some(view.up_to(last))
    }
}

fn priority_of(track: &TrackRef, options: &SubscriptionOptions, subgroup: &SubgroupStream) -> Priority {
    let header = subgroup.header();
    Priority {
        subscriber: options.priority,
        publisher: header.priority.unwrap_or_else(|| track.data.default_priority()),
        group: ordered(options.order, header.group),
        subgroup: subgroup.id().unwrap_or_default(),
    }
}

// Returns the priority value of a group. Smaller values are more urgent, so for a subscription in descending order the
// bits of the group ID are inverted.
fn ordered(order: GroupOrder, group: u64) -> u64 {
    match order {
        GroupOrder::Ascending => group,
        GroupOrder::Descending => !group,
    }
}
