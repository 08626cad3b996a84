//! A subscription of the relay's own, at one publisher.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use millrace_moq::Location;
use millrace_transport::{
    Connection,
    offload::{Ingress, Made, Openings},
};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};

/// A publisher that is silent for so long, although it was asked for something, is taken for gone if there is another one.
pub const RIVAL_PATIENCE: Duration = Duration::from_millis(500);

/// One publisher of one track, by its PUBLISH or by our SUBSCRIBE.
pub struct Upstream {
    /// The publisher's session.
    pub publisher: u64,
    /// Whether that session is with the configured upstream relay.
    pub is_of_upstream: bool,
    connection: Weak<Connection>,
    /// The publisher's track alias.
    pub alias: u64,
    /// We subscribed, and may unsubscribe when nobody needs it.
    pub subscribed: bool,
    asks: mpsc::UnboundedSender<Ask>,
    /// Data streams that arrived, for comparison with PUBLISH_DONE.
    streams: AtomicU64,
    open_streams: AtomicU64,
    datagrams: AtomicBool,
    datagram_ingress: Mutex<Offered<dyn Ingress>>,
    openings: Mutex<Offered<dyn Openings>>,
    stream_ended: Notify,
    revoked: AtomicBool,
    revoking: Notify,
    /// The publisher wants the subscription to go on elsewhere.
    leaving: AtomicBool,
    handover: Mutex<Option<Handover>>,
    /// Other publishers were there before.
    rival: AtomicBool,
    standing_by: AtomicBool,
    /// Whether the publisher's numbering of groups is still unknown.
    unnumbered: AtomicBool,
    /// A note about a publisher that took over from another one, until its groups are known.
    returned: Mutex<Option<Returned>>,
    /// The publisher has come to where another one goes on.
    passing: Notify,
}

/// A publisher that took over from another one.
struct Returned {
    /// The largest object that the publisher says it has.
    claimed: Option<Location>,
    _unfinished: Option<Unfinished>,
}

/// The streams of a publisher that is silent, which a publisher that comes may replace. They are reset when this is dropped.
pub struct Unfinished(Arc<Upstream>);

impl Unfinished {
    pub fn new(silent: Arc<Upstream>) -> Self {
        Self(silent)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.revoke();
    }
}

/// Where another subscription goes on.
struct Handover {
    /// Its first group. What is before comes from here, to its end.
    group: u64,
    to: Weak<Upstream>,
    passed: bool,
}

/// Something of the subscription as the offload may forward it.
enum Offered<T: ?Sized> {
    /// It has not been wanted yet, or the offload could not when it was.
    Unknown,
    Known {
        known: Arc<T>,
        /// Among those of its session.
        _place: OwnedSemaphorePermit,
    },
    Withheld,
}

/// What gives a place for one more of the session's tracks at the offload, if there is one.
type Places<'a> = &'a dyn Fn() -> Option<OwnedSemaphorePermit>;

impl<T: Made + ?Sized> Offered<T> {
    /// What `make` has made, now or before; `None` once it is withheld, and as long as there is no place for it.
    fn get(&mut self, places: Places<'_>, make: impl FnOnce() -> Option<Arc<T>>) -> Option<Arc<T>> {
        if matches!(self, Self::Known { known, .. } if known.is_over()) {
            *self = Self::Unknown;
        }
        if let Self::Unknown = self {
            let _place = places()?;
            *self = Self::Known { known: make()?, _place };
        }
        self.known()
    }

    fn known(&self) -> Option<Arc<T>> {
        match self {
            Self::Known { known, .. } => Some(Arc::clone(known)),
            Self::Unknown | Self::Withheld => None,
        }
    }
}

/// What an upstream subscription is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// NEW_GROUP_REQUEST.
    NewGroup(u64),
    /// Nobody needs it any more.
    Cancel,
    /// No objects are wanted for now, or they are again.
    Forward(bool),
}

/// The session that a subscription is in.
pub struct Place {
    pub session: u64,
    /// Whether it is with the configured upstream relay.
    pub is_upstream: bool,
    pub connection: Weak<Connection>,
}

impl Upstream {
    pub fn new(place: Place, alias: u64, subscribed: bool) -> (Arc<Self>, mpsc::UnboundedReceiver<Ask>) {
        let (asks, receiver) = mpsc::unbounded_channel();
        let upstream = Self {
            publisher: place.session,
            is_of_upstream: place.is_upstream,
            connection: place.connection,
            alias,
            subscribed,
            asks,
            streams: AtomicU64::new(0),
            open_streams: AtomicU64::new(0),
            datagrams: AtomicBool::new(false),
            datagram_ingress: Mutex::new(Offered::Unknown),
            openings: Mutex::new(Offered::Unknown),
            stream_ended: Notify::new(),
            revoked: AtomicBool::new(false),
            revoking: Notify::new(),
            leaving: AtomicBool::new(false),
            handover: Mutex::default(),
            rival: AtomicBool::new(false),
            standing_by: AtomicBool::new(false),
            unnumbered: AtomicBool::new(false),
            returned: Mutex::default(),
            passing: Notify::new(),
        };
        (Arc::new(upstream), receiver)
    }

    pub fn ask(&self, ask: Ask) {
        let _ = self.asks.send(ask); // the subscription is over
    }

    /// A data stream of the subscription arrived; it is open while the guard lives.
    pub fn stream(self: &Arc<Self>) -> OpenStream {
        self.open_streams.fetch_add(1, Relaxed);
        self.streams.fetch_add(1, Relaxed);
        OpenStream(Arc::clone(self))
    }

    /// The publisher may not publish any more: its open streams end.
    pub fn revoke(&self) {
        self.revoked.store(true, Relaxed);
        self.revoking.notify_waiters();
    }

    /// Waits for [`Self::revoke`].
    pub async fn revoked(&self) {
        loop {
            let revoking = self.revoking.notified();
            if self.revoked.load(Relaxed) {
                return;
            }
            revoking.await;
        }
    }

    /// The publisher wants the subscription to go on elsewhere.
    pub fn leave(&self) {
        self.leaving.store(true, Relaxed);
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// Asks the publisher's session for something, and reports whether anything comes of it within a while. An answer that is not older than
    /// `age`, to whichever of its tracks, is good enough.
    pub async fn answers(&self, age: Duration) -> bool {
        match self.connection.upgrade() {
            Some(connection) => connection.answers(RIVAL_PATIENCE, age).await,
            None => false,
        }
    }

    /// Others published the track before.
    pub fn set_rival(&self, rival: bool) {
        self.rival.store(rival, Relaxed);
    }

    pub fn is_rival(&self) -> bool {
        self.rival.load(Relaxed)
    }

    /// Asks the publisher for no objects, as its groups are others than the leader's.
    pub fn stand_by(&self) {
        if !self.standing_by.swap(true, Relaxed) {
            self.ask(Ask::Forward(false));
        }
    }

    pub fn stands_by(&self) -> bool {
        self.standing_by.load(Relaxed)
    }

    /// Makes the publisher the track's first one, as those before it are gone.
    pub fn lead(&self) {
        self.set_rival(false);
        if self.stands_by() {
            self.returns(None, None);
            self.standing_by.store(false, Relaxed);
            self.ask(Ask::Forward(true));
        }
    }

    /// The publisher takes over from another one, and says that it is at `claimed`. Its first group shows how it numbers them,
    /// and decides how the `unfinished` streams end.
    pub fn returns(&self, claimed: Option<Location>, unfinished: Option<Unfinished>) {
        *self.returned.lock() = Some(Returned { claimed, _unfinished: unfinished });
        self.unnumbered.store(true, Relaxed);
    }

    /// Whether the publisher has taken over and has yet to show how it numbers its groups.
    pub fn is_unnumbered(&self) -> bool {
        self.unnumbered.load(Relaxed)
    }

    /// Calls `decide` for the publisher's first group after it took over, and returns its answer. Later groups wait until that is
    /// done.
    pub fn number(&self, decide: impl FnOnce(Option<Location>) -> bool) -> bool {
        if !self.is_unnumbered() {
            return false;
        }
        let mut returned = self.returned.lock();
        let decided = returned.take().is_some_and(|returned| decide(returned.claimed));
        self.unnumbered.store(false, Relaxed);
        decided
    }

    /// From `group` on the track comes from `to`, while that lasts.
    pub fn hand_over(&self, group: u64, to: &Arc<Self>) {
        let handover = Handover { group, to: Arc::downgrade(to), passed: false };
        self.handover.lock().get_or_insert(handover);
    }

    /// Whether a stream of `group` is another subscription's.
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

    /// Whether the other subscription goes on. Without it, all is this one's again.
    pub fn is_handed_over(&self) -> bool {
        let mut handover = self.handover.lock();
        handover.take_if(|handover| handover.to.strong_count() == 0);
        handover.is_some()
    }

    /// Waits until the publisher has come to what is another subscription's.
    pub async fn passed(&self) {
        while !self.handover.lock().as_ref().is_some_and(|handover| handover.passed) {
            self.passing.notified().await;
        }
    }

    /// The publisher sends datagrams. Nothing announces the last one.
    pub fn saw_datagram(&self) {
        self.datagrams.store(true, Relaxed);
    }

    /// Datagrams as the offload may forward them: what `make` has made, now or before. `None` once they are withheld.
    pub fn datagram_ingress(
        &self,
        places: Places<'_>,
        make: impl FnOnce() -> Option<Arc<dyn Ingress>>,
    ) -> Option<Arc<dyn Ingress>> {
        self.datagram_ingress.lock().get(places, make)
    }

    /// The same of streams that begin.
    pub fn openings(
        &self,
        places: Places<'_>,
        make: impl FnOnce() -> Option<Arc<dyn Openings>>,
    ) -> Option<Arc<dyn Openings>> {
        self.openings.lock().get(places, make)
    }

    /// Streams that begin, if the offload may forward them already.
    pub fn known_openings(&self) -> Option<Arc<dyn Openings>> {
        self.openings.lock().known()
    }

    /// Takes back from the offload what it cannot do without knowing of other publishers, for good.
    pub fn withhold(&self) {
        let withheld = std::mem::replace(&mut *self.datagram_ingress.lock(), Offered::Withheld);
        drop(withheld);
        let withheld = std::mem::replace(&mut *self.openings.lock(), Offered::Withheld);
        drop(withheld);
    }

    pub fn has_datagrams(&self) -> bool {
        self.datagrams.load(Relaxed)
    }

    /// Returns when `announced` data streams have arrived and all that arrived have ended.
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

/// An upstream data stream that is being read.
pub struct OpenStream(Arc<Upstream>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.open_streams.fetch_sub(1, Relaxed);
        self.0.stream_ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ingress whose offload has been released, or not.
    struct Fake(AtomicBool);

    impl Made for Fake {
        fn is_over(&self) -> bool {
            self.0.load(Relaxed)
        }
    }

    #[test]
    fn what_a_released_offload_has_made_is_made_anew() {
        let places = Arc::new(tokio::sync::Semaphore::new(1));
        let place = || Arc::clone(&places).try_acquire_owned().ok();
        let make = || Some(Arc::new(Fake(AtomicBool::new(false))));
        let mut offered = Offered::Unknown;
        let first = offered.get(&place, make).expect("there is a place");
        assert!(Arc::ptr_eq(&first, &offered.get(&place, make).expect("it is known")));
        first.0.store(true, Relaxed);
        let second = offered.get(&place, make).expect("its place is free again");
        assert!(!Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn what_has_no_place_is_not_offloaded() {
        let place = Place { session: 1, is_upstream: false, connection: Weak::new() };
        let (upstream, _asks) = Upstream::new(place, 7, false);
        assert!(upstream.openings(&|| None, || panic!("there is no place")).is_none());
        assert!(upstream.datagram_ingress(&|| None, || panic!("there is no place")).is_none());
    }
}
