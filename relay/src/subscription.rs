//! One subscription of one subscriber: which subgroups it gets, as which streams.

mod options;
mod renditions;

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use bytes::Bytes;
use millrace_moq::{
    Datagram, Filter, GroupOrder, Location, code,
    tracks::{
        adapt::Choice,
        filter::Window,
        subgroup::Subgroup,
        track::{DatagramObject, GROUP_SLACK, Track},
        view::View,
    },
};
use millrace_quic::plane::{
    downstream::{Asked, Event, EventKind, Label, NewDatagram, NewStream, Priority, StreamKey},
    source::End,
};
use millrace_transport::{
    Connection,
    offload::{DatagramCopy, Ingress, OpeningTerms},
};
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use self::options::{Options, Timeouts};
use super::{delays::TrackDelays, outbox::Outbox};

/// The track that a subscription is of.
#[derive(Clone)]
pub struct TrackRef {
    /// Stands for the track in traces.
    pub number: u32,
    pub data: Arc<Track>,
    pub delays: TrackDelays,
}

/// Why a track's subscriptions end.
#[derive(Clone, Debug)]
pub struct Ended {
    pub code: code::Done,
    pub reason: String,
    /// It is our doing, and the publisher goes on.
    pub paused: bool,
    /// The publisher is gone without a word, and may come back.
    pub absent: bool,
}

impl Ended {
    pub fn new(code: code::Done, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), paused: false, absent: false }
    }
}

/// A subscription downstream of the relay.
pub struct Subscription {
    pub track: TrackRef,
    pub alias: u64,
    /// Tags the subscription's streams on its connection.
    pub owner: u64,
    connection: Arc<Connection>,
    state: Mutex<State>,
    /// What its groups may come from, its own track among them, if that is not its own track alone.
    renditions: OnceLock<Vec<TrackRef>>,
    /// The subscription ended, or one of its streams did.
    pub changed: Notify,
}

struct State {
    options: Options,
    /// Largest object when forwarding began: where a joining FETCH ends.
    joining: Option<Location>,
    /// By the subgroup's serial number, until its stream is over and the last news of it has come.
    streams: HashMap<u64, Stream>,
    /// What is sent, and the number of the track that it is of.
    open: HashMap<StreamKey, (u32, Arc<View>)>,
    ended: Option<Ended>,
    /// The track has gone past the window's last group.
    past_end: bool,
    /// Streams that were opened so far, for PUBLISH_DONE.
    opened: u64,
    origin: Origin,
}

/// Which groups it gets of which track.
enum Origin {
    /// All of its own.
    Own,
    /// Each of one of the renditions.
    Renditions(Choice),
    /// Those of its own that a switching set has chosen.
    Set(Place),
}

/// Of a subscription in a switching set. The choice is locked behind the subscription, and before the connection.
pub struct Place {
    pub choice: Arc<Mutex<Choice>>,
    pub number: usize,
}

#[derive(Clone, Copy)]
enum Stream {
    Open(StreamKey),
    /// The subgroup's last news has come.
    Ending(StreamKey),
    /// The subgroup gets no other stream.
    Over,
}

/// What a subscription is told about a subgroup, or a datagram.
#[derive(Clone, Copy)]
pub enum News<'a> {
    /// It is in the cache.
    Cached,
    /// It has grown; the ingress is the publisher's stream, if the offload can forward that.
    Grown(Option<&'a Arc<dyn Ingress>>),
    /// It has ended: the last news. The ingress is as of `Grown`.
    Ended(Option<&'a Arc<dyn Ingress>>),
}

impl Subscription {
    pub fn new(
        track: TrackRef,
        connection: Arc<Connection>,
        alias: u64,
        owner: u64,
        options: Options,
        joining: Option<Location>,
    ) -> Self {
        let state = State {
            options,
            joining,
            streams: HashMap::new(),
            open: HashMap::new(),
            ended: None,
            past_end: false,
            opened: 0,
            origin: Origin::Own,
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

    pub fn options(&self) -> Options {
        self.state.lock().options.clone()
    }

    /// Where a joining FETCH ends; `None` if nothing had been published then, or nothing is forwarded.
    pub fn joining(&self) -> Option<Location> {
        let state = self.state.lock();
        state.joining.filter(|_| state.options.forward)
    }

    /// First and last group that the subscription can get.
    pub fn group_range(&self) -> (u64, u64) {
        let window = self.state.lock().options.window;
        (window.start.group, window.end.map_or(u64::MAX, |end| end.group))
    }

    /// There is news of `subgroup`, of the track of number `from`: opens a stream for it or sends on, and leaves the rest to the
    /// kernel where that can be. Returns whether the subscription can do without hearing at once of what comes next.
    pub fn offer(
        &self,
        from: u32,
        subgroup: &Arc<Subgroup>,
        news: News<'_>,
        now: Instant,
        outbox: &mut Outbox,
    ) -> bool {
        let mut state = self.state.lock();
        let group = subgroup.header().group;
        if from == self.track.number && state.check_start(&self.track.data, group) {
            self.take_back(now);
        }
        if !state.past_end && state.options.window.is_past(group) {
            state.past_end = true;
            self.changed.notify_one();
        }
        let key = match state.streams.get(&subgroup.serial()).copied() {
            Some(Stream::Open(key) | Stream::Ending(key)) => {
                self.connection.downstream().wake(key);
                key
            }
            Some(Stream::Over) => {
                if matches!(news, News::Ended(_)) {
                    state.streams.remove(&subgroup.serial());
                }
                return true;
            }
            None if !self.takes(&mut state, from, group) => {
                self.pass_over(&mut state, subgroup, news, now);
                return true;
            }
            None => match state.view(subgroup, self.alias) {
                Some(view) => match self.open(&mut state, from, subgroup, self.bound(view), news, now) {
                    Some(key) => key,
                    None => return true,
                },
                // Its first object may be the next one.
                None => {
                    let wanted = state.wants_group(group);
                    if let (News::Grown(Some(ingress)), false) = (news, wanted && state.ended.is_none()) {
                        self.connection.offload(|offload| offload.refuse(now, ingress, self.owner));
                    }
                    return !wanted;
                }
            },
        };
        if matches!(news, News::Ended(_)) || subgroup.is_settled() {
            state.streams.insert(subgroup.serial(), Stream::Ending(key));
        }
        let view = state.open.get(&key).map(|(_, view)| Arc::clone(view));
        drop(state);
        outbox.transmit(&self.connection, now);
        match (news, view) {
            (News::Grown(Some(ingress)), Some(view)) if !view.is_cut() => {
                let (shift, from) = (view.shift(), view.received());
                self.connection.offload(|offload| offload.delegate(key, ingress, shift, from))
            }
            _ => false,
        }
    }

    /// The view as the subscriber's connection carries it.
    fn bound(&self, view: View) -> Arc<View> {
        Arc::new(view.behind(&self.connection.binding().uni()))
    }

    /// Whether a group is to come from the track of number `from`, which tells of it.
    fn takes(&self, state: &mut State, from: u32, group: u64) -> bool {
        match &mut state.origin {
            Origin::Own => true,
            Origin::Renditions(choice) => self.member(from).is_none_or(|member| choice.saw(member, group)),
            // It may have been served from several before it was one of a set; they still tell of theirs.
            Origin::Set(place) => from == self.track.number && place.choice.lock().saw(place.number, group),
        }
    }

    /// The group comes from another rendition.
    fn pass_over(&self, state: &mut State, subgroup: &Subgroup, news: News<'_>, now: Instant) {
        if let News::Grown(ingress) = news {
            // Until its last news, it is not looked at again.
            state.streams.insert(subgroup.serial(), Stream::Over);
            if let Some(ingress) = ingress {
                self.connection.offload(|offload| offload.refuse(now, ingress, self.owner));
            }
        }
    }

    /// Opens a stream, or takes over the one that the offload has opened; `None`: that is over.
    fn open(
        &self,
        state: &mut State,
        from: u32,
        subgroup: &Arc<Subgroup>,
        view: Arc<View>,
        news: News<'_>,
        now: Instant,
    ) -> Option<StreamKey> {
        let track = self.source(from);
        let priority = priority_of(track, &state.options, subgroup);
        let timeouts = state.options.timeouts(&track.data, Some(subgroup));
        let stream = NewStream {
            source: Arc::clone(&view) as _,
            priority,
            max_delay: self.max_delay(timeouts, priority),
            asked: if matches!(news, News::Cached) { Asked::Present } else { Asked::Nothing },
            object_timeout: timeouts.object,
            subgroup_timeout: timeouts.subgroup,
            owner: self.owner,
            label: Label { track: track.number, group: subgroup.header().group },
        };
        let key = match news {
            News::Grown(Some(ingress)) | News::Ended(Some(ingress)) => {
                self.connection.offload(|offload| offload.adopt(now, ingress, stream))
            }
            _ => Some(self.connection.downstream().open(stream)),
        };
        if key.is_some() || !matches!(news, News::Ended(_)) {
            state.streams.insert(subgroup.serial(), key.map_or(Stream::Over, Stream::Open));
        }
        key.inspect(|key| drop(state.open.insert(*key, (track.number, view))))
    }

    /// Has the offload open a stream for what the opening, of the track of number `from`, will be bound to, if the
    /// subscription wants that. Returns whether it can do without hearing at once of what comes.
    pub fn prepare(&self, from: u32, opening: &Arc<dyn Ingress>) -> bool {
        let state = self.state.lock();
        let options = &state.options;
        if !options.forward || state.ended.is_some() {
            return true;
        }
        let (start, Some(last_group)) = (options.window.start, options.window.last_whole_group()) else {
            return false;
        };
        let mut first = (start.group, start.object);
        // Held until it is prepared: a switch takes back what was.
        let mut chosen = None;
        let current = match &state.origin {
            Origin::Own => None,
            Origin::Renditions(choice) => Some((choice.current(), self.member(from))),
            Origin::Set(place) => {
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

    /// How long media may wait: what the relay is set to, unless publisher or subscriber say how long an object may.
    fn max_delay(&self, timeouts: Timeouts, priority: Priority) -> Option<Duration> {
        if timeouts.object.is_some() { None } else { self.track.delays.at(priority.publisher) }
    }

    /// Ends the streams over subgroups that the cache has dropped. Those that wait for credit would wait for ever.
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

    /// Sends an object that came as a datagram, if it passes the filter and the kernel has not sent it, and leaves
    /// those to come to the kernel where that can be. It is of the track of number `from`.
    pub fn offer_datagram(
        &self,
        from: u32,
        object: &DatagramObject,
        news: News<'_>,
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
        if let News::Grown(Some(ingress)) = news {
            self.delegate_datagrams(&state, ingress);
        }
        let location = object.location();
        let at = (location.group, location.object);
        if self.connection.offload(|offload| offload.take_delivered(now, self.owner, at)) {
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
        // What the cache had was asked for from the past.
        let is_live = matches!(news, News::Grown(_));
        let max_delay = self.max_delay(timeouts, priority).filter(|_| is_live);
        let datagram = NewDatagram {
            payload: self.encode(object),
            priority,
            late: max_delay.and_then(|most| object.received_at.checked_add(most)),
            expires: timeout.map(|timeout| object.received_at + timeout),
            label: Label { track: track.number, group: header.group },
        };
        drop(state);
        // Too large for this subscriber's path: dropped, as the draft says, and counted down there.
        let _ = self.connection.downstream().send_datagram(datagram);
        outbox.transmit(&self.connection, now);
    }

    /// Stops the offload from forwarding datagrams for the subscription and from opening streams, until the next call that allows it.
    fn take_back(&self, now: Instant) {
        self.connection.offload(|offload| {
            offload.recall_datagrams(self.owner);
            offload.withdraw(now, self.owner)
        });
    }

    fn delegate_datagrams(&self, state: &State, ingress: &Arc<dyn Ingress>) {
        let adapted = !matches!(state.origin, Origin::Own);
        if adapted || !state.options.forward || state.ended.is_some() {
            return;
        }
        let start = state.options.window.start;
        let Some(last_group) = state.options.window.last_whole_group() else { return };
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

    /// The object under this subscription's alias.
    fn encode(&self, object: &DatagramObject) -> Bytes {
        let datagram = Datagram { alias: self.alias, ..object.datagram.clone() };
        let mut bytes = Vec::with_capacity(datagram.payload.len() + datagram.properties.len() + 48);
        bytes.extend_from_slice(&self.connection.binding().datagram());
        datagram.encode(&mut bytes);
        bytes.into()
    }

    /// Applies REQUEST_UPDATE; `largest` is the track's. Streams that fell out of the window are reset.
    pub fn update(&self, options: Options, largest: Option<Location>) {
        let mut state = self.state.lock();
        let resumed = options.forward && !state.options.forward;
        state.options = options;
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

    /// Goes on with whatever group comes next, as the track starts over. A subscription whose groups come from several renditions,
    /// which share their IDs, ends instead.
    pub fn begin_anew(&self, now: Instant) {
        let mut state = self.state.lock();
        if !matches!(state.origin, Origin::Own) {
            drop(state);
            return self.end(Ended::new(
                code::Done::INTERNAL_ERROR,
                "the publisher numbers its groups from the beginning",
            ));
        }
        state.options.window = Window::resolve(state.options.filter.as_ref(), None);
        (state.past_end, state.joining) = (false, None);
        self.take_back(now);
    }

    /// No more subgroups will come.
    pub fn end(&self, ended: Ended) {
        let mut state = self.state.lock();
        state.ended.get_or_insert(ended);
        self.take_back(Instant::now());
        drop(state);
        self.changed.notify_one();
    }

    /// The subscriber is gone, or wants no more: resets what is open.
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

    /// Sends what may be sent now.
    pub fn transmit(&self, now: Instant, outbox: &mut Outbox) {
        outbox.transmit(&self.connection, now);
    }

    /// What happened to a stream of this subscription.
    pub fn on_event(&self, event: &Event) {
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

    /// Data streams that were opened for this subscription.
    pub fn stream_count(&self) -> u64 {
        self.state.lock().opened
    }

    pub fn ended(&self) -> Option<Ended> {
        self.state.lock().ended.clone()
    }

    /// Why the subscription ended, once its streams are closed and datagrams have left too.
    pub fn drained(&self) -> Option<Ended> {
        let state = self.state.lock();
        let closed =
            |_: &Ended| state.open.is_empty() && self.connection.downstream().queued_datagrams() == 0;
        state.ended.clone().filter(closed)
    }

    /// Whether the track has gone past the last group that was asked for.
    pub fn is_past_end(&self) -> bool {
        let state = self.state.lock();
        state.past_end && state.ended.is_none()
    }

    /// Whether it still is, some time later, and not because of an object that has gone astray.
    pub fn stays_past_end(&self) -> bool {
        let mut state = self.state.lock();
        let largest = self.track.data.largest();
        state.past_end = largest.is_none_or(|largest| state.options.window.is_past(largest.group));
        state.past_end
    }
}

impl State {
    /// Makes the window anew if the track goes on far before where it seemed to be: a publisher had said so, or an object
    /// had gone astray. `group` has come.
    fn check_start(&mut self, track: &Track, group: u64) -> bool {
        let start = self.options.window.start;
        let is_far = |group: u64| start.group.saturating_sub(group) > GROUP_SLACK;
        if !is_far(group)
            || matches!(self.options.filter, Some(Filter::AbsoluteStart(_) | Filter::AbsoluteRange { .. }))
        {
            return false;
        }
        let Some(largest) = track.largest().filter(|largest| is_far(largest.group)) else { return false };
        self.options.window = Window::resolve(self.options.filter.as_ref(), Some(largest));
        true
    }

    fn close(&mut self, key: StreamKey) {
        let Some((_, view)) = self.open.remove(&key) else { return };
        let subgroup = view.subgroup();
        // With the kernel, everything can be acknowledged before it is known here.
        match self.streams.get(&subgroup.serial()) {
            Some(Stream::Ending(_)) => drop(self.streams.remove(&subgroup.serial())),
            _ => drop(self.streams.insert(subgroup.serial(), Stream::Over)),
        }
    }

    fn wants_group(&self, group: u64) -> bool {
        self.options.forward && self.options.window.touches_group(group)
    }

    /// The subgroup as this subscription gets it; `None` if it does not, or not yet.
    fn view(&self, subgroup: &Arc<Subgroup>, alias: u64) -> Option<View> {
        let group = subgroup.header().group;
        if !self.wants_group(group) || self.ended.is_some() || subgroup.is_evicted() {
            return None;
        }
        let (first, last) = (self.options.window.first_object(group), self.options.window.last_object(group));
        let view = match subgroup.first_object_from(first) {
            Some((object, _)) if last.is_some_and(|last| object.start.id > last) => return None,
            Some((_, true)) => View::whole(Arc::clone(subgroup), alias),
            Some((object, false)) => View::from_object(Arc::clone(subgroup), alias, &object),
            // An empty subgroup is forwarded as such.
            None if first == 0 && matches!(subgroup.extent().end, End::Fin { .. }) => {
                View::whole(Arc::clone(subgroup), alias)
            }
            None => return None,
        };
        Some(view.up_to(last))
    }
}

fn priority_of(track: &TrackRef, options: &Options, subgroup: &Subgroup) -> Priority {
    let header = subgroup.header();
    Priority {
        subscriber: options.priority,
        publisher: header.priority.unwrap_or_else(|| track.data.default_priority()),
        group: ordered(options.order, header.group),
        subgroup: subgroup.id().unwrap_or_default(),
    }
}

fn ordered(order: GroupOrder, group: u64) -> u64 {
    match order {
        GroupOrder::Ascending => group,
        GroupOrder::Descending => !group,
    }
}
