//! Receive windows: what peers may send before it is read, of all connections together.
//!
//! A window is a promise: until it is used up it cannot be taken back, so what was promised counts as if it had come. A
//! connection begins with little, and its window doubles as long as that holds it up. So who sends nothing holds next to
//! nothing, and who sends and is not read holds a window, not the budget.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// What a connection begins with, bytes.
const LEAST: u64 = 64 << 10;
/// The part of the budget that no window grows into: it is left to connections that are to come.
const RESERVE: u64 = 4;
/// A window is large enough for what comes in so many round trips.
const ROUND_TRIPS: u64 = 2;
/// A round trip is taken for this long at least: data also has to be read.
const LEAST_ROUND_TRIP: Duration = Duration::from_millis(20);

/// The budget, for all endpoints that share it.
#[derive(Debug)]
pub struct Windows {
    total: u64,
    held: AtomicU64,
    refused: AtomicU64,
    limited: AtomicU64,
}

impl Windows {
    /// `total`: bytes.
    pub fn new(total: u64) -> Self {
        Self { total, held: AtomicU64::new(0), refused: AtomicU64::new(0), limited: AtomicU64::new(0) }
    }

    /// Bytes that there are.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that peers may send or have sent without having been read.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Connections for which there was no room.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Times that a window did not grow, since its share was used up.
    pub fn limited(&self) -> u64 {
        self.limited.load(Ordering::Relaxed)
    }

    /// Whether there are so many bytes, which are held from then on, below `limit`.
    fn take(&self, bytes: u64, limit: u64) -> bool {
        let add = |held: u64| held.checked_add(bytes).filter(|held| *held <= limit);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }
}

/// The part of the budget that some connections share, such as those of one client.
#[derive(Debug)]
pub struct Share {
    limit: u64,
    held: AtomicU64,
}

impl Share {
    /// `limit`: bytes. Beyond it, windows stay as they are; those that connections begin with are theirs.
    pub fn new(limit: u64) -> Self {
        Self { limit, held: AtomicU64::new(0) }
    }

    /// Bytes that their peers may send or have sent without having been read.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let add = |held: u64| held.checked_add(bytes).filter(|held| *held <= self.limit);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The window of one connection, until it is dropped.
#[derive(Debug)]
pub(crate) struct Window {
    of: Arc<Windows>,
    most: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    bytes: u64,
    /// Bytes on top that nobody counts: see [`Window::nudge`].
    nudges: u64,
    share: Option<Arc<Share>>,
    /// The last MAX_DATA, and when it was sent.
    last: (Instant, u64),
}

impl Window {
    /// `most`: bytes that it may grow to. `None`: there is no room for another connection.
    pub fn open(of: &Arc<Windows>, most: u32, now: Instant) -> Option<Self> {
        let most = u64::from(most);
        let bytes = LEAST.min(most);
        if !of.take(bytes, of.total) {
            of.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let state = State { bytes, nudges: 0, share: None, last: (now, bytes) };
        Some(Self { of: Arc::clone(of), most, state: Mutex::new(state) })
    }

    /// Counts it with others from now on, in place of those of before.
    pub fn join(&self, share: Arc<Share>) {
        let mut state = self.state.lock();
        share.held.fetch_add(state.bytes, Ordering::Relaxed);
        if let Some(before) = state.share.replace(share) {
            before.give(state.bytes);
        }
    }

    pub fn bytes(&self) -> u32 {
        let state = self.state.lock();
        u32::try_from(state.bytes + state.nudges).unwrap_or(u32::MAX)
    }

    /// The peer is told that it may send up to `limit` on the connection. Returns whether the window is larger now.
    pub fn on_max_data(&self, now: Instant, limit: u64, round_trip: Duration) -> bool {
        let mut state = self.state.lock();
        let (since, before) = std::mem::replace(&mut state.last, (now, limit));
        let round_trip = round_trip.max(LEAST_ROUND_TRIP).as_nanos();
        let took = now.saturating_duration_since(since).as_nanos().max(1);
        let wanted = u128::from(limit.saturating_sub(before) * ROUND_TRIPS) * round_trip / took;
        let more = state.bytes.min(self.most - state.bytes);
        let grows = wanted > u128::from(state.bytes) && more > 0 && self.take(&state, more);
        if grows {
            state.bytes += more;
            // Which the peer is told in the next: nobody has read that.
            state.last.1 += more;
        }
        grows
    }

    fn take(&self, state: &State, more: u64) -> bool {
        if state.share.as_ref().is_some_and(|share| !share.take(more)) {
            self.of.limited.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let taken = self.of.take(more, self.of.total - self.of.total / RESERVE);
        if let (false, Some(share)) = (taken, &state.share) {
            share.give(more);
        }
        taken
    }

    /// One byte more, so that quinn has something to tell the peer. Returns the window.
    pub fn nudge(&self) -> u32 {
        self.state.lock().nudges += 1;
        self.bytes()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        self.of.held.fetch_sub(state.bytes, Ordering::Relaxed);
        if let Some(share) = &state.share {
            share.give(state.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn open(windows: &Arc<Windows>, most: u32) -> Option<Window> {
        Window::open(windows, most, Instant::now())
    }

    /// The peer sends as much as it may, and all is read at once, in so many updates. Returns the window.
    fn busy(window: &Window, updates: u32) -> u64 {
        let mut now = Instant::now();
        for _ in 0..updates {
            now += MS;
            let eighth = u64::from(window.bytes()) / 8;
            let limit = window.state.lock().last.1 + eighth;
            window.on_max_data(now, limit, 10 * MS);
        }
        window.bytes().into()
    }

    #[test]
    fn a_window_grows_while_it_holds_up() {
        let windows = Arc::new(Windows::new(1 << 30));
        let window = open(&windows, 1 << 20).unwrap();
        assert_eq!(u64::from(window.bytes()), LEAST);
        let slow = |window: &Window| {
            let (now, limit) = window.state.lock().last;
            // An eighth in a second, at a round trip of 10 ms.
            window.on_max_data(now + 1000 * MS, limit + LEAST / 8, 10 * MS)
        };
        assert!(!slow(&window));
        assert_eq!(busy(&window, 2), 4 * LEAST);
        assert!(!slow(&window));
        assert_eq!(busy(&window, 9), 1 << 20);
        assert_eq!(windows.held(), 1 << 20);
        assert_eq!(window.nudge(), (1 << 20) + 1);
        drop(window);
        assert_eq!(windows.held(), 0);
    }

    #[test]
    fn those_that_share_keep_to_their_share() {
        let windows = Arc::new(Windows::new(1 << 30));
        let share = Arc::new(Share::new(9 * LEAST));
        let mut of_client: Vec<_> = (0..2).map(|_| open(&windows, u32::MAX).unwrap()).collect();
        assert_eq!(busy(&of_client[0], 1), 2 * LEAST, "before anybody knows whose it is");
        of_client.iter().for_each(|window| window.join(Arc::clone(&share)));
        assert_eq!(share.held(), 3 * LEAST);
        assert_eq!(of_client.iter().map(|window| busy(window, 20)).sum::<u64>(), 9 * LEAST);
        assert_eq!(share.held(), 9 * LEAST);
        assert!(windows.limited() > 0);
        // Another's is its own matter, and there is room.
        let other = open(&windows, 1 << 22).unwrap();
        assert_eq!(busy(&other, 20), 1 << 22);
        // What it begins with is not refused.
        of_client.push(open(&windows, u32::MAX).unwrap());
        of_client[2].join(Arc::clone(&share));
        assert_eq!((share.held(), busy(&of_client[2], 20)), (10 * LEAST, LEAST));
        of_client.clear();
        assert_eq!((share.held(), windows.held()), (0, 1 << 22));
    }

    #[test]
    fn all_together_keep_to_the_budget_and_leave_room() {
        let windows = Arc::new(Windows::new(64 * LEAST));
        let mut all: Vec<_> = (0..4).map(|_| open(&windows, u32::MAX).unwrap()).collect();
        let grown: u64 = all.iter().map(|window| busy(window, 20)).sum();
        assert_eq!((grown, windows.held()), (48 * LEAST, 48 * LEAST), "as far as they may");
        while let Some(window) = open(&windows, u32::MAX) {
            assert_eq!(busy(&window, 20), LEAST, "it cannot grow");
            all.push(window);
        }
        assert_eq!((all.len(), windows.held(), windows.refused()), (4 + 16, 64 * LEAST, 1));
        all.pop();
        assert!(open(&windows, u32::MAX).is_some());
    }
}
