//! A subscription that the relay itself has at one publisher.

use std::{
    sync::{
        Arc, Weak,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use millrace_moq::{Location, code};
use millrace_transport::{Connection, offers::Offers};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};

/// A publisher that does not answer a probe for this long is considered lost, if the track has another publisher.
pub const RIVAL_PATIENCE: Duration = Duration::from_millis(500);

/// One publisher of one track, by its PUBLISH or by our SUBSCRIBE.
///
/// # States
///
/// Flags tell the publisher's state. [`LiveTrack`](super::live::LiveTrack) changes them while it holds the lock of its
/// publishers:
///
/// * *leading*, or a *rival* of earlier publishers ([`Self::follow`], [`Self::lead`]). A rival with different group
///   IDs *stands by* ([`Self::stand_by`]), and is asked for no objects until it leads.
/// * *unnumbered* after [`Self::returns`], when the publisher takes over from another one, until [`Self::number`] has
///   seen its first group. Later groups wait on the lock of `returned` until then.
/// * *leaving* ([`Self::leave`], [`Self::stay`]), and *handed over* from a certain group on ([`Self::hand_over`]). The
///   handover ends if the other subscription is dropped.
/// * *revoked* for good ([`Self::revoke`]): its open streams end.
///
/// The flags are read without a lock, so a stream that begins during a change may see the old or the new value. The
/// track checks each stream again. Only `entering` depends on the order of accesses, see [`Self::has_entering`].
pub struct UpstreamTrack {
    /// The ID of the session with the publisher.
    pub publisher: u64,
    /// True if the publisher's session is the one with the configured upstream relay.
    pub is_of_upstream: bool,
    /// True if the publisher's session is with a relay of the cluster.
    pub is_of_relay: bool,
    connection: Weak<Connection>,
    /// The publisher's track alias.
    pub alias: u64,
    /// True if we sent SUBSCRIBE, and so may unsubscribe when nobody needs the track. False after the publisher's
    /// PUBLISH.
    pub subscribed: bool,
    asks: mpsc::UnboundedSender<UpstreamRequest>,
    /// Number of data streams that have arrived, to be compared with the stream count of PUBLISH_DONE.
    streams: AtomicU64,
    open_streams: AtomicU64,
    datagrams: AtomicBool,
    /// The kernel engine's handles for the publisher's next streams and its datagrams. With them, the kernel forwards
    /// objects before userspace reads them. [`LiveTrack`](super::live::LiveTrack) allows them to one publisher at a
    /// time.
    pub offers: Offers,
    /// Number of subgroup streams whose header was read, and which were not added to the track yet.
    entering: AtomicUsize,
    stream_ended: Notify,
    revoked: AtomicBool,
    revoking: Notify,
    /// True once the subscription is being moved to another session or publisher.
    leaving: AtomicBool,
    handover: Mutex<Option<TrackHandover>>,
    /// True if the track had other publishers before this publisher.
    rival: AtomicBool,
    /// The first location that the track had not got when this publisher was added as a rival. Earlier publishers owe
    /// what lies between it and this publisher's first group.
    joined: Mutex<Option<Location>>,
    standing_by: AtomicBool,
    /// True while it is unknown whether the publisher continues the track's group IDs.
    unnumbered: AtomicBool,
    /// Set for a publisher that took over from another one, until its first group has arrived.
    returned: Mutex<Option<Returned>>,
    /// Notified when the publisher reaches the group at which another one takes over.
    passing: Notify,
    /// The smallest group of a stream that the publisher has begun.
    first_group: watch::Sender<Option<u64>>,
}

/// State of a publisher that took over from another one.
struct Returned {
    /// The largest location of the track that the publisher named when it took over.
    claimed: Option<Location>,
    /// True if the publisher may be a copy of the other one, or a relay, and lag behind it.
    may_lag: bool,
    _unfinished: Option<Unfinished>,
}

/// The open streams of a silent publisher, which its successor may complete. Dropping this resets them.
pub struct Unfinished(Arc<UpstreamTrack>);

impl Unfinished {
    pub fn new(silent: Arc<UpstreamTrack>) -> Self {
        Self(silent)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.revoke();
    }
}

/// The handover of a track from this publisher's subscription to another subscription.
struct TrackHandover {
    /// The first group that comes from the other subscription. Earlier groups still come from this publisher.
    group: u64,
    to: Weak<UpstreamTrack>,
    passed: bool,
}

/// A request to the task of an upstream subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamRequest {
    /// The task has to send NEW_GROUP_REQUEST for this group.
    NewGroup(u64),
    /// The task has to unsubscribe, because nobody needs the track any more.
    Cancel,
    /// The task has to pause (`false`) or resume the delivery of objects (FORWARD).
    Forward(bool),
    /// The task has to ask for what the track has missed, since this publisher leads now.
    FillGap,
}

/// The session that a publisher's subscription belongs to.
pub struct UpstreamSession {
    pub session: u64,
    /// True if this is the session with the configured upstream relay.
    pub is_upstream: bool,
    /// True if this is a session with a relay of the cluster.
    pub is_relay: bool,
    pub connection: Weak<Connection>,
}

impl UpstreamTrack {
    pub fn new(
        place: UpstreamSession,
        alias: u64,
        subscribed: bool,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<UpstreamRequest>) {
        let (asks, receiver) = mpsc::unbounded_channel();
        let upstream = Self {
            publisher: place.session,
            is_of_upstream: place.is_upstream,
            is_of_relay: place.is_relay,
            connection: place.connection,
            alias,
            subscribed,
            asks,
            streams: AtomicU64::new(0),
            open_streams: AtomicU64::new(0),
            datagrams: AtomicBool::new(false),
            offers: Offers::default(),
            entering: AtomicUsize::new(0),
            stream_ended: Notify::new(),
            revoked: AtomicBool::new(false),
            revoking: Notify::new(),
            leaving: AtomicBool::new(false),
            handover: Mutex::default(),
            rival: AtomicBool::new(false),
            joined: Mutex::default(),
            standing_by: AtomicBool::new(false),
            unnumbered: AtomicBool::new(false),
            returned: Mutex::default(),
            passing: Notify::new(),
            first_group: watch::Sender::new(None),
        };
        (Arc::new(upstream), receiver)
    }

    pub fn ask(&self, ask: UpstreamRequest) {
        let _ = self.asks.send(ask); // The send fails only if the subscription is over.
    }

    /// Counts a data stream of the subscription that has arrived. The stream counts as open while the guard lives.
    pub fn stream(self: &Arc<Self>) -> OpenStream {
        self.open_streams.fetch_add(1, Relaxed);
        self.streams.fetch_add(1, Relaxed);
        OpenStream(Arc::clone(self))
    }

    /// Ends the publisher's right to publish the track. The publisher's open streams end.
    pub fn revoke(&self) {
        self.revoked.store(true, Relaxed);
        self.revoking.notify_waiters();
    }

    /// Waits until the publisher's right to publish the track was ended by [`Self::revoke`].
    pub async fn revoked(&self) {
        loop {
            // The notification is requested before the flag is read, so that a `revoke` in between is noticed.
            let revoking = self.revoking.notified();
            if self.revoked.load(Relaxed) {
                return;
            }
            revoking.await;
        }
    }

    /// Records that the subscription is being moved to another session or publisher.
    pub fn leave(&self) {
        self.leaving.store(true, Relaxed);
    }

    /// Takes back [`Self::leave`]: the track returns to this publisher.
    pub fn stay(&self) {
        *self.handover.lock() = None;
        self.first_group.send_replace(None);
        self.leaving.store(false, Relaxed);
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// Probes the publisher's session, and reports whether it answers within [`RIVAL_PATIENCE`]. An answer on the
    /// session that is at most `age` old is enough.
    pub async fn answers(&self, age: Duration) -> bool {
        match self.connection.upgrade() {
            Some(connection) => connection.answers(RIVAL_PATIENCE, age).await,
            None => false,
        }
    }

    /// Returns a number that grows while the publisher sends, or `None` if its connection is closed.
    pub fn heard(&self) -> Option<u64> {
        self.connection.upgrade().map(|connection| connection.heard())
    }

    /// Records that the track had other publishers before this one, and had got the objects before `joined`.
    pub fn follow(&self, joined: Option<Location>) {
        *self.joined.lock() = joined;
        self.rival.store(true, Relaxed);
    }

    pub fn is_rival(&self) -> bool {
        self.rival.load(Relaxed)
    }

    /// Makes the publisher a standby, whose objects are dropped, because its group IDs differ from the leading
    /// publisher's. The publisher is asked to pause (FORWARD 0).
    pub fn stand_by(&self) {
        if !self.standing_by.swap(true, Relaxed) {
            self.ask(UpstreamRequest::Forward(false));
        }
    }

    pub fn stands_by(&self) -> bool {
        self.standing_by.load(Relaxed)
    }

    /// Makes the publisher the leading one, because the earlier publishers of the track are gone. `at` is the first
    /// location that the track has not got. Returns the location from which on earlier publishers may owe objects.
    pub fn lead(&self, at: Option<Location>) -> Option<Location> {
        self.rival.store(false, Relaxed);
        let joined = self.joined.lock().take();
        if self.stands_by() {
            // The group IDs of a standby were never compared with the track's. So its first group decides whether the
            // track's group numbering starts over.
            self.returns(None, None, false);
            self.first_group.send_replace(None);
            self.standing_by.store(false, Relaxed);
            self.ask(UpstreamRequest::Forward(true));
            // A relay passes on the group IDs of the publisher, which are those of the track.
            return at.filter(|_| self.passes_on());
        }
        // Objects that arrive as datagrams are never asked for.
        joined.filter(|_| self.first_group.borrow().is_some() || !self.has_datagrams())
    }

    /// Reports whether the publisher is a relay, which passes on what another publisher has sent.
    fn passes_on(&self) -> bool {
        self.is_of_upstream || self.is_of_relay
    }

    /// Records that the publisher takes over from another one. Its first group will show whether it continues the group
    /// IDs, and decides how the `unfinished` streams end. `claimed` is the largest location that the publisher named.
    /// `is_copy`: both may be publishers of the same objects, of which one is a moment behind the other.
    pub fn returns(&self, claimed: Option<Location>, unfinished: Option<Unfinished>, is_copy: bool) {
        let may_lag = is_copy || self.passes_on();
        *self.returned.lock() = Some(Returned { claimed, may_lag, _unfinished: unfinished });
        self.unnumbered.store(true, Relaxed);
    }

    /// Reports whether the publisher has taken over, and its first group has not arrived yet.
    pub fn is_unnumbered(&self) -> bool {
        self.unnumbered.load(Relaxed)
    }

    /// Calls `decide` for the first group after the publisher took over, and returns its result. Its arguments are the
    /// largest location that the publisher named, and whether it may lag. Other groups wait until that is done.
    pub fn number(&self, decide: impl FnOnce(Option<Location>, bool) -> bool) -> bool {
        if !self.is_unnumbered() {
            return false;
        }
        // Streams of other groups block on this lock while `decide` runs. They find `returned` empty afterwards.
        let mut returned = self.returned.lock();
        let decided = returned.take().is_some_and(|returned| decide(returned.claimed, returned.may_lag));
        self.unnumbered.store(false, Relaxed);
        decided
    }

    /// Hands the track over to the subscription `to` from `group` on, as long as `to` exists. An earlier handover counts,
    /// unless its subscription leaves as well.
    pub fn hand_over(&self, group: u64, to: &Arc<Self>) {
        let mut handover = self.handover.lock();
        let earlier = handover.as_ref().and_then(|earlier| earlier.to.upgrade());
        if earlier.is_none_or(|earlier| earlier.is_leaving()) {
            *handover = Some(TrackHandover { group, to: Arc::downgrade(to), passed: false });
        }
    }

    /// Reports whether `group` comes from the subscription that takes over from this one. Notes that this publisher has
    /// reached such a group.
    pub fn has_handed_over(&self, group: u64) -> bool {
        let mut handover = self.handover.lock();
        let Some(handover) = handover.as_mut() else { return false };
        if group < handover.group || handover.to.strong_count() == 0 {
            return false;
        }
        handover.passed = true;
        self.passing.notify_one();
        true
    }

    /// Reports whether a stream of the publisher that was reset with `code` may go on from another source: a relay
    /// resets its streams with these codes when it has lost the source or the subscription.
    pub fn loses(&self, code: code::Reset) -> bool {
        self.passes_on() && [code::Reset::INTERNAL_ERROR, code::Reset::CANCELLED].contains(&code)
    }

    /// Records that the publisher has begun a stream of `group`.
    pub fn begins(&self, group: u64) {
        self.first_group.send_if_modified(|first| {
            let is_smaller = first.is_none_or(|first| group < first);
            *first = Some(group).filter(|_| is_smaller).or(*first);
            is_smaller
        });
    }

    /// Waits until the publisher has begun a stream, and returns the smallest group of its streams.
    pub async fn first_group(&self) -> Option<u64> {
        let mut first = self.first_group.subscribe();
        first.wait_for(|first| first.is_some()).await.ok().and_then(|first| *first)
    }

    /// Reports whether the subscription that takes over still exists. If it does not, all groups come from this
    /// subscription again.
    pub fn is_handed_over(&self) -> bool {
        let mut handover = self.handover.lock();
        handover.take_if(|handover| handover.to.strong_count() == 0);
        handover.is_some()
    }

    /// Waits until this publisher has reached the first group of the subscription that takes over.
    pub async fn passed(&self) {
        while !self.handover.lock().as_ref().is_some_and(|handover| handover.passed) {
            self.passing.notified().await;
        }
    }

    /// Records that the publisher sends datagrams. No message says which one is the last, so the end of the track is
    /// delayed to wait for late datagrams.
    pub fn saw_datagram(&self) {
        self.datagrams.store(true, Relaxed);
    }

    /// Counts a stream as entering: its header was read, and it is not added to the track yet. Dropping the guard ends
    /// this.
    pub fn enter(self: &Arc<Self>) -> EnteringStream {
        self.entering.fetch_add(1, SeqCst);
        EnteringStream(Arc::clone(self))
    }

    /// Reports whether a stream has begun that the kernel may have forwarded and the track does not know yet.
    pub fn has_entering(&self) -> bool {
        // The order matters: a stream enters `entering` before it leaves `has_bound`, so one of the two reads sees it.
        self.offers.has_bound() || self.entering.load(SeqCst) > 0
    }

    pub fn has_datagrams(&self) -> bool {
        self.datagrams.load(Relaxed)
    }

    /// Waits until `announced` data streams have arrived, and all that arrived have ended.
    pub async fn has_seen_all(&self, announced: u64) {
        loop {
            let ended = self.stream_ended.notified();
            if self.streams.load(Relaxed) >= announced && self.open_streams.load(Relaxed) == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// A data stream of a publisher that is being read.
pub struct OpenStream(Arc<UpstreamTrack>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.open_streams.fetch_sub(1, Relaxed);
        self.0.stream_ended.notify_waiters();
    }
}

/// A stream that is counted in [`UpstreamTrack::entering`] until this is dropped.
pub struct EnteringStream(Arc<UpstreamTrack>);

impl Drop for EnteringStream {
    fn drop(&mut self) {
        self.0.entering.fetch_sub(1, SeqCst);
    }
}
