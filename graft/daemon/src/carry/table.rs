//! The connections that are carried: how many, how much memory each may have, what became of them, and where they are found
//! by who resumes them.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
};

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::stream::Stream;

/// However many there are: less is not worth the frames.
const WINDOW_LEAST: u64 = 16 << 10;
/// Connections that are over and of which the other end may not know yet.
const FINISHED_MAX: usize = 4096;

/// By the peer that has the client, the run of its broker, and the number in that run.
pub type Key = (String, u64, u64);

/// A stream by which a connection goes on, and what the other end has received.
pub type Resumption = (Stream, u64);

pub struct Table {
    connections_max: usize,
    window: u64,
    memory: u64,
    live: AtomicUsize,
    is_full: AtomicBool,
    ids: AtomicU64,
    hosted: Mutex<Hosted>,
    ended: Mutex<BTreeMap<&'static str, u64>>,
    pub resumed: AtomicU64,
    pub sent: AtomicU64,
    pub received: AtomicU64,
    pub kept: AtomicU64,
}

/// Those whose servers are here.
#[derive(Default)]
struct Hosted {
    live: HashMap<Key, mpsc::Sender<Resumption>>,
    /// With what was received of each.
    finished: HashMap<Key, u64>,
    order: VecDeque<Key>,
}

/// The place of one connection, until this is dropped.
pub struct Place<'a>(&'a Table);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Relaxed);
    }
}

impl Table {
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

    pub fn enter(&self) -> Option<Place<'_>> {
        let entered = self
            .live
            .fetch_update(Relaxed, Relaxed, |live| (live < self.connections_max).then_some(live + 1));
        entered.ok().map(|_| Place(self))
    }

    pub fn live(&self) -> usize {
        self.live.load(Relaxed)
    }

    pub fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// Whether no more are to be led here.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Relaxed)
    }

    /// After one has come or gone: whether that changed. It does not with every one.
    pub fn note_room(&self) -> bool {
        let room = self.connections_max - self.live().min(self.connections_max);
        let was_full = self.is_full();
        let least = self.connections_max / if was_full { 16 } else { 64 };
        self.is_full.store(room <= least, Relaxed);
        was_full != (room <= least)
    }

    /// Unconfirmed bytes that a connection may have: less where there are many.
    pub fn window(&self) -> u64 {
        let share = self.memory / (2 * self.live().max(1) as u64);
        share.clamp(WINDOW_LEAST, self.window)
    }

    pub fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
    }

    pub fn host(&self, key: Key) -> mpsc::Receiver<Resumption> {
        let (sender, receiver) = mpsc::channel(1);
        self.hosted.lock().live.insert(key, sender);
        receiver
    }

    /// It is over. Who resumes it hears what was received of it.
    pub fn finish(&self, key: Key, received: Option<u64>) {
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

    pub fn find(&self, key: &Key) -> Found {
        let hosted = self.hosted.lock();
        match (hosted.live.get(key), hosted.finished.get(key)) {
            (Some(live), _) => Found::Live(live.clone()),
            (None, Some(received)) => Found::Finished(*received),
            (None, None) => Found::Nothing,
        }
    }

    pub fn count(&self, ended: &'static str) {
        *self.ended.lock().entry(ended).or_default() += 1;
    }

    pub fn ended(&self) -> BTreeMap<String, u64> {
        self.ended.lock().iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }
}

pub enum Found {
    Live(mpsc::Sender<Resumption>),
    Finished(u64),
    Nothing,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_have_less_each() {
        let table = Table::new(100, 1 << 20, 4 << 20);
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
    fn what_is_finished_is_known_for_a_while() {
        let table = Table::new(1, 1 << 20, 1 << 20);
        let key = |id| ("a".to_owned(), 1, id);
        let _live = table.host(key(0));
        assert!(matches!(table.find(&key(0)), Found::Live(_)));
        (0..5000).for_each(|id| table.finish(key(id), Some(id)));
        assert!(matches!(table.find(&key(0)), Found::Nothing));
        assert!(matches!(table.find(&key(4999)), Found::Finished(4999)));
        assert!(matches!(table.find(&("a".to_owned(), 2, 4999)), Found::Nothing), "of another run");
        table.finish(key(6000), None);
        assert!(matches!(table.find(&key(6000)), Found::Nothing));
    }
}
