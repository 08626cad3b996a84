//! The table of tunnelled connections: counts them, shares memory among them, records how they ended, and finds the one
//! that a peer resumes.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
};

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::stream::CarrierStream;

/// Smallest window of a connection in bytes, however many connections there are. A smaller window would not be worth
/// the overhead of frames.
const WINDOW_LEAST: u64 = 16 << 10;
/// Limit of finished connections that are remembered, since the peer may not know yet that a connection is over.
const FINISHED_MAX: usize = 4096;

/// Identifies a tunnelled connection: name of the client's host as a peer, the random number that the peer's tunnel
/// broker chose when it started, and the connection's number at that broker.
pub type TunnelKey = (String, u64, u64);

/// A stream on which a peer resumes a connection, and the number of bytes that the peer has received.
pub type Resumption = (CarrierStream, u64);

/// The tunnelled connections that this broker handles as the client's host or as the server's host.
///
/// A task that begins a connection takes a place with [`Self::enter`], which counts until the task drops it. At the
/// client's host the task calls [`Self::note_room`] after it has taken and after it has dropped its place. If the
/// result is true, the kernel has to be told whether it may redirect. At the server's host a connection is *live* from
/// [`Self::host`] until [`Self::finish`]. It is then *finished* until `FINISHED_MAX` later connections have finished,
/// and unknown after that. [`Self::find`] tells which, when the peer resumes a connection on another carrier. The
/// counters are atomic and independent of each other. The number of live connections never exceeds the limit, because
/// `enter` checks and counts in one atomic step.
pub struct TunnelTable {
    /// Limit of concurrent connections.
    connections_max: usize,
    /// Largest window of a connection, in bytes.
    window: u64,
    /// Limit of the sum of the windows of all connections, in bytes.
    memory: u64,
    live: AtomicUsize,
    /// True while the table is almost full, so that the kernel should redirect no more connections.
    is_full: AtomicBool,
    ids: AtomicU64,
    hosted: Mutex<Hosted>,
    ended: Mutex<BTreeMap<&'static str, u64>>,
    /// Number of times that a connection continued on another carrier.
    pub resumed: AtomicU64,
    /// Number of bytes that peers have acknowledged on tunnelled connections.
    pub sent: AtomicU64,
    /// Number of bytes that this host has received on tunnelled connections.
    pub received: AtomicU64,
    /// Number of bytes that are kept until peers acknowledge them.
    pub kept: AtomicU64,
}

/// Connections whose servers are on this host, or behind it.
#[derive(Default)]
struct Hosted {
    live: HashMap<TunnelKey, mpsc::Sender<Resumption>>,
    /// Number of bytes that were received on each finished connection.
    finished: HashMap<TunnelKey, u64>,
    /// Finished connections, the oldest first.
    order: VecDeque<TunnelKey>,
}

/// A connection that counts towards the table's limit until this value is dropped.
pub struct TunnelPlace<'a>(&'a TunnelTable);

impl Drop for TunnelPlace<'_> {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Relaxed);
    }
}

impl TunnelTable {
    pub fn new(connections_max: usize, window: u64, memory: u64) -> Self {
        Self {
            connections_max,
            window,
            memory,
            live: AtomicUsize::new(0),
            is_full: AtomicBool::new(false),
            ids: AtomicU64::new(0),
            hosted: Mutex::default(),
            ended: Mutex::default(),
            resumed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            kept: AtomicU64::new(0),
        }
    }

    /// Takes a place in the table for one connection. Returns `None` if the limit is reached.
    pub fn enter(&self) -> Option<TunnelPlace<'_>> {
        let entered = self
            // The count never exceeds the limit, however many tasks enter at once.
            .live
            .fetch_update(Relaxed, Relaxed, |live| (live < self.connections_max).then_some(live + 1));
        entered.ok().map(|_| TunnelPlace(self))
    }

    pub fn live(&self) -> usize {
        self.live.load(Relaxed)
    }

    pub fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// Reports whether the table is almost full, so that the kernel should redirect no more connections.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Relaxed)
    }

    /// Updates whether the table is almost full, after a connection was added or removed. Returns whether that changed.
    /// Hysteresis keeps the state from changing with each connection.
    pub fn note_room(&self) -> bool {
        let room = self.connections_max - self.live().min(self.connections_max);
        let was_full = self.is_full();
        // A table that was almost full counts as almost full until a 16th of its limit is free.
        let least = self.connections_max / if was_full { 16 } else { 64 };
        self.is_full.store(room <= least, Relaxed);
        was_full != (room <= least)
    }

    /// Returns the window of one connection: the limit of bytes that are sent but not acknowledged. It shrinks as
    /// connections are added.
    pub fn window(&self) -> u64 {
        // Each connection has a window in both directions.
        let share = self.memory / (2 * self.live().max(1) as u64);
        share.clamp(WINDOW_LEAST, self.window)
    }

    /// Returns a number for a new connection that begins at this host. It is never used again.
    pub fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
    }

    /// Adds a connection whose server is at this host. Streams on which the peer resumes it come from the returned
    /// receiver.
    pub fn host(&self, key: TunnelKey) -> mpsc::Receiver<Resumption> {
        // A queue of one stream is enough, since the peer opens the next one only after this one was answered.
        let (sender, receiver) = mpsc::channel(1);
        self.hosted.lock().live.insert(key, sender);
        receiver
    }

    /// Removes a connection that is over. If the peer tries to resume it later, the answer says how many bytes were
    /// received.
    pub fn finish(&self, key: TunnelKey, received: Option<u64>) {
        let mut hosted = self.hosted.lock();
        hosted.live.remove(&key);
        let Some(received) = received else { return };
        hosted.finished.insert(key.clone(), received);
        hosted.order.push_back(key);
        if hosted.order.len() > FINISHED_MAX {
            let oldest = hosted.order.pop_front();
            oldest.map(|oldest| hosted.finished.remove(&oldest));
        }
    }

    /// Looks up a connection that a peer wants to resume.
    pub fn find(&self, key: &TunnelKey) -> TunnelLookup {
        let hosted = self.hosted.lock();
        match (hosted.live.get(key), hosted.finished.get(key)) {
            (Some(live), _) => TunnelLookup::Live(live.clone()),
            (None, Some(received)) => TunnelLookup::Finished(*received),
            (None, None) => TunnelLookup::Nothing,
        }
    }

    /// Counts a connection that has ended in this way.
    pub fn count(&self, ended: &'static str) {
        *self.ended.lock().entry(ended).or_default() += 1;
    }

    pub fn ended(&self) -> BTreeMap<String, u64> {
        self.ended.lock().iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }
}

/// The state of a connection that a peer wants to resume.
pub enum TunnelLookup {
    /// The connection is live. Its task gets the new stream through this sender.
    Live(mpsc::Sender<Resumption>),
    /// The connection has ended, after this number of bytes was received on it.
    Finished(u64),
    /// The connection is unknown, or ended too long ago.
    Nothing,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_window_per_connection_shrinks_with_their_number() {
        let table = TunnelTable::new(100, 1 << 20, 4 << 20);
        assert_eq!(table.window(), 1 << 20);
        let places: Vec<_> = (0..8).map(|_| table.enter().unwrap()).collect();
        assert_eq!(table.window(), 256 << 10);
        drop(places);
        let places: Vec<_> = (0..200).map_while(|_| table.enter()).collect();
        assert_eq!((places.len(), table.note_room(), table.window()), (100, true, 20971));
        assert!(table.is_full() && !table.note_room());
        drop(places);
        assert_eq!((table.live(), table.note_room(), table.is_full()), (0, true, false));
    }

    #[test]
    fn result_of_a_finished_tunnel_is_kept_until_thousands_have_followed() {
        let table = TunnelTable::new(1, 1 << 20, 1 << 20);
        let key = |id| ("a".to_owned(), 1, id);
        let _live = table.host(key(0));
        assert!(matches!(table.find(&key(0)), TunnelLookup::Live(_)));
        (0..5000).for_each(|id| table.finish(key(id), Some(id)));
        assert!(matches!(table.find(&key(0)), TunnelLookup::Nothing));
        assert!(matches!(table.find(&key(4999)), TunnelLookup::Finished(4999)));
        assert!(matches!(table.find(&("a".to_owned(), 2, 4999)), TunnelLookup::Nothing), "of another run");
        table.finish(key(6000), None);
        assert!(matches!(table.find(&key(6000)), TunnelLookup::Nothing));
    }
}
