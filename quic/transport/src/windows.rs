//! Receive windows: a budget shared by all connections for the bytes that peers may send before they are read.
//!
//! Flow control credit cannot be withdrawn before the peer has used it, so it counts as if the bytes had arrived. A
//! connection begins with a small window, which doubles as long as it limits the peer. So a peer that sends nothing
//! holds a small window, and a peer whose data is not read holds one window at most.
//!
//! A window that is four times as large as it needs to be is halved. The peer gets no larger limit until it has used up
//! the bytes by which the window shrank. Until then these bytes count in the budget. So the window of a peer that
//! becomes slow shrinks. A peer that becomes silent holds its window as long as the connection exists. When the budget
//! is used up, [`Windows::take_pressed`] reports it, and the application may close idle connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// The receive window with which a connection begins, bytes.
const LEAST: u64 = 64 << 10;
/// The budget divided by this number is reserved for new connections: no window grows into this part.
const RESERVE: u64 = 4;
/// Size of a receive window, in round trips of data at the peer's rate.
const ROUND_TRIPS: u64 = 2;
/// Shortest round trip for which windows are sized, because reading the data takes time, too.
const LEAST_ROUND_TRIP: Duration = Duration::from_millis(20);
/// Longest round trip for which windows are sized, because a peer may delay its acknowledgements to get a larger
/// window.
const MOST_ROUND_TRIP: Duration = Duration::from_secs(1);
/// A window is halved if it is larger than the needed size times this factor.
const TOO_LARGE: u64 = 4;

/// The budget of receive windows, for all endpoints that share it.
///
/// The sum of all windows is one atomic number. It grows only by compare-and-exchange, so it never exceeds the budget's
/// size. It orders no other memory, so relaxed ordering is enough.
#[derive(Debug)]
pub struct Windows {
    total: u64,
    held: AtomicU64,
    refused: AtomicU64,
    limited: AtomicU64,
    pressed: AtomicBool,
}

impl Windows {
    /// Creates a budget of `total` bytes for receive windows.
    pub fn new(total: u64) -> Self {
        let [held, refused, limited] = [0; 3].map(AtomicU64::new);
        Self { total, held, refused, limited, pressed: AtomicBool::new(false) }
    }

    /// Returns the size of the budget for receive windows, bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the part of the budget in use, bytes: what peers may still send, and what they have sent but the
    /// application has not read.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that were refused because the budget was used up.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns how many times a window could not grow because the share of its client or network was used up.
    pub fn limited(&self) -> u64 {
        self.limited.load(Ordering::Relaxed)
    }

    /// Returns whether a window could not grow, or a connection was refused, for lack of budget since the last call.
    pub fn take_pressed(&self) -> bool {
        self.pressed.swap(false, Ordering::Relaxed)
    }

    /// Adds `bytes` to the sum of all windows if the sum stays within `limit`. Returns whether the bytes were added.
    fn take(&self, bytes: u64, limit: u64) -> bool {
        let add = |held: u64| held.checked_add(bytes).filter(|held| *held <= limit);
        let taken = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok();
        if !taken {
            self.pressed.store(true, Ordering::Relaxed);
        }
        taken
    }
}

/// The part of the budget that a group of connections shares, such as those of one client, or of one network.
#[derive(Debug)]
pub struct WindowShare {
    limit: u64,
    held: AtomicU64,
    within: Option<Arc<WindowShare>>,
}

impl WindowShare {
    /// Creates a share of the budget with `limit` bytes. Bytes that it uses also count against `within`, the share of a
    /// network, if one is given. When the share is used up, windows do not grow, but new connections still get their
    /// first window.
    pub fn new(limit: u64, within: Option<Arc<WindowShare>>) -> Self {
        Self { limit, held: AtomicU64::new(0), within }
    }

    /// Returns the part of the share in use, bytes: what its peers may still send, and what they have sent but the
    /// application has not read.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns this share of the budget, followed by the shares of the networks that contain its client or network, the
    /// smallest network first.
    fn levels(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |share| share.within.as_deref())
    }

    pub(crate) fn take(&self, bytes: u64) -> bool {
        let add = |share: &Self| {
            let add = |held: u64| held.checked_add(bytes).filter(|held| *held <= share.limit);
            share.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
        };
        let taken = self.levels().take_while(|share| add(share)).count();
        let all = taken == self.levels().count();
        // The share of a larger network is used up, so the bytes are returned to the shares within it, to which they
        // were added before.
        if !all {
            self.levels().take(taken).for_each(|share| share.give_level(bytes));
        }
        all
    }

    /// Adds the first window of a connection, even if the share's limit is exceeded.
    fn take_anyway(&self, bytes: u64) {
        for share in self.levels() {
            share.held.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn give(&self, bytes: u64) {
        self.levels().for_each(|share| share.give_level(bytes));
    }

    fn give_level(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The receive window of one connection. Dropping it returns its bytes to the budget.
///
/// # States
///
/// A window is *steady* or *shrunk*. [`Self::on_max_data`] measures how fast the peer has used its last limit, and
/// grows, shrinks or keeps the window. It returns whether the size changed. The driver then passes [`Self::bytes`] to
/// quinn, and calls [`Self::on_applied`]. A shrunk window does not shrink again. It becomes steady when the second
/// larger limit after that call is sent, because by then the peer has used up the bytes by which the window shrank.
/// Until then these bytes count in the budget. While no method runs, the sum in [`Windows`] and in the window's
/// [`WindowShare`] equals the bytes of all windows plus the bytes of unfinished reductions.
#[derive(Debug)]
pub(crate) struct ConnectionWindow {
    of: Arc<Windows>,
    most: u64,
    state: Mutex<WindowState>,
}

#[derive(Debug)]
struct WindowState {
    bytes: u64,
    /// Bytes added by [`ConnectionWindow::nudge`], which do not count in the budget.
    nudges: u64,
    share: Option<Arc<WindowShare>>,
    /// The largest limit in a MAX_DATA frame so far.
    limit: u64,
    /// Time of the MAX_DATA frame with the largest limit, and the limit that it would have had if the window had always
    /// had its present size.
    last: (Instant, u64),
    shrunk: Option<Shrunk>,
}

/// The bytes by which a window was reduced, and which the peer may still send.
#[derive(Debug)]
struct Shrunk {
    bytes: u64,
    /// Number of larger limits sent to the peer since quinn got the reduced window; `None` until quinn gets it. The
    /// first of these limits may have been computed earlier. quinn sends a second one only after the old window is used
    /// up.
    told: Option<u32>,
}

/// Size and idle time of a connection's receive window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveWindow {
    /// Bytes that the peer may still send, or has sent and that were not read.
    pub held: u64,
    /// Time since the last MAX_DATA frame. In this time the peer has sent little, or the application has read little.
    pub idle: Duration,
}

impl ConnectionWindow {
    /// Creates the window of a new connection, which may grow to `most` bytes. Returns `None` if the budget is used up.
    pub fn open(of: &Arc<Windows>, most: u32, now: Instant) -> Option<Self> {
        let most = u64::from(most);
        let bytes = LEAST.min(most);
        if !of.take(bytes, of.total) {
            of.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let state =
            WindowState { bytes, nudges: 0, share: None, limit: bytes, last: (now, bytes), shrunk: None };
        Some(Self { of: Arc::clone(of), most, state: Mutex::new(state) })
    }

    /// Counts the window in `share` from now on, instead of in its previous share.
    pub fn join(&self, share: Arc<WindowShare>) {
        let mut state = self.state.lock();
        let held = state.held();
        share.take_anyway(held);
        if let Some(before) = state.share.replace(share) {
            before.give(held);
        }
    }

    pub fn status(&self, now: Instant) -> ReceiveWindow {
        let state = self.state.lock();
        ReceiveWindow { held: state.held(), idle: now.saturating_duration_since(state.last.0) }
    }

    pub fn bytes(&self) -> u32 {
        let state = self.state.lock();
        u32::try_from(state.bytes + state.nudges).unwrap_or(u32::MAX)
    }

    /// Notes that quinn uses a receive window of `bytes` bytes from now on.
    pub fn on_applied(&self, bytes: u32) {
        let mut state = self.state.lock();
        let is_newest = state.bytes + state.nudges == u64::from(bytes);
        if let Some(shrunk) = state.shrunk.as_mut().filter(|shrunk| is_newest && shrunk.told.is_none()) {
            shrunk.told = Some(0);
        }
    }

    /// Notes a MAX_DATA frame to the peer, which may send up to `limit` on the connection. Returns whether the window's
    /// size has changed.
    pub fn on_max_data(&self, now: Instant, limit: u64, round_trip: Duration) -> bool {
        let mut state = self.state.lock();
        // A retransmitted MAX_DATA frame has no larger limit, and is ignored.
        if limit <= state.limit {
            return false;
        }
        state.limit = limit;
        self.settle(&mut state);
        let (since, before) = std::mem::replace(&mut state.last, (now, limit));
        let round_trip = round_trip.clamp(LEAST_ROUND_TRIP, MOST_ROUND_TRIP).as_nanos();
        let took = now.saturating_duration_since(since).as_nanos().max(1);
        // The window has to hold the peer's rate times `ROUND_TRIPS` round trips.
        let wanted = u128::from(limit.saturating_sub(before) * ROUND_TRIPS) * round_trip / took;
        let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
        match wanted {
            _ if wanted > state.bytes => self.grow(&mut state),
            _ if wanted < state.bytes / TOO_LARGE => self.shrink(&mut state),
            _ => false,
        }
    }

    fn grow(&self, state: &mut WindowState) -> bool {
        let more = state.bytes.min(self.most - state.bytes);
        let grows = more > 0 && self.take(state, more);
        if grows {
            state.bytes += more;
            // The next MAX_DATA limit grows by the window's increase although the application read no data for it.
            state.last.1 += more;
        }
        grows
    }

    fn shrink(&self, state: &mut WindowState) -> bool {
        let less = state.bytes - (state.bytes / 2).max(LEAST.min(self.most));
        // The window is not reduced again before the peer has used up the previous reduction, since only one is
        // tracked.
        if less == 0 || state.shrunk.is_some() {
            return false;
        }
        state.bytes -= less;
        // While the peer uses up the bytes by which the window was reduced, reading data does not raise the peer's
        // limit.
        state.last.1 = state.last.1.saturating_sub(less);
        state.shrunk = Some(Shrunk { bytes: less, told: None });
        true
    }

    /// Counts a larger limit sent to the peer. When the peer has used up the bytes by which the window was reduced,
    /// returns those bytes to the budget.
    fn settle(&self, state: &mut WindowState) {
        let Some(Shrunk { bytes, told: Some(told) }) = &mut state.shrunk else { return };
        *told += 1;
        if *told < 2 {
            return;
        }
        let bytes = *bytes;
        state.shrunk = None;
        self.of.held.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(share) = &state.share {
            share.give(bytes);
        }
    }

    fn take(&self, state: &WindowState, more: u64) -> bool {
        if state.share.as_ref().is_some_and(|share| !share.take(more)) {
            self.of.limited.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let taken = self.of.take(more, self.of.total - self.of.total / RESERVE);
        // The budget of all connections is used up, so the bytes are returned to the share, which had admitted them.
        if let (false, Some(share)) = (taken, &state.share) {
            share.give(more);
        }
        taken
    }

    /// Adds a byte to the window, so that quinn sends a new limit to the peer. Returns the window's size.
    pub fn nudge(&self) -> u32 {
        self.state.lock().nudges += 1;
        self.bytes()
    }
}

impl Drop for ConnectionWindow {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let held = state.held();
        self.of.held.fetch_sub(held, Ordering::Relaxed);
        if let Some(share) = &state.share {
            share.give(held);
        }
    }
}

impl WindowState {
    fn held(&self) -> u64 {
        self.bytes + self.shrunk.as_ref().map_or(0, |shrunk| shrunk.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn open(windows: &Arc<Windows>, most: u32) -> Option<ConnectionWindow> {
        ConnectionWindow::open(windows, most, Instant::now())
    }

    /// Simulates a peer that sends as much as it may while all data is read at once, for `updates` MAX_DATA frames.
    /// Returns the window.
    fn busy(window: &ConnectionWindow, updates: u32) -> u64 {
        let mut now = Instant::now();
        for _ in 0..updates {
            now += MS;
            let eighth = u64::from(window.bytes()) / 8;
            let limit = window.state.lock().last.1 + eighth;
            window.on_max_data(now, limit, 10 * MS);
        }
        window.bytes().into()
    }

    /// Simulates a peer that sends an eighth of `LEAST` (the first window's bytes) in a second, at a round trip of 10
    /// ms. Returns whether the window's size changed.
    fn slow(window: &ConnectionWindow) -> bool {
        let (now, limit) = {
            let state = window.state.lock();
            (state.last.0, state.limit)
        };
        window.on_max_data(now + 1000 * MS, limit + LEAST / 8, 10 * MS)
    }

    #[test]
    fn receive_window_shrinks_when_the_peer_is_slow() {
        let windows = Arc::new(Windows::new(1 << 30));
        let share = Arc::new(WindowShare::new(1 << 30, None));
        let window = open(&windows, 1 << 20).unwrap();
        window.join(Arc::clone(&share));
        busy(&window, 20);
        let held = || (windows.held(), share.held());
        assert!(slow(&window));
        assert_eq!((window.bytes(), held()), (1 << 19, (1 << 20, 1 << 20)), "the granted bytes still count");
        // The bytes by which the window was reduced are not returned to the budget while quinn has the old window, nor
        // with the first larger limit after quinn has the new window.
        assert!(!slow(&window) && !slow(&window));
        window.on_applied(1 << 20);
        assert!(!slow(&window) && !slow(&window), "quinn still has the old size");
        window.on_applied(1 << 19);
        assert!(!slow(&window));
        let limit = window.state.lock().limit;
        assert!(!window.on_max_data(Instant::now(), limit, 10 * MS), "a retransmitted frame changes nothing");
        assert_eq!(held(), (1 << 20, 1 << 20));
        assert!(slow(&window));
        assert_eq!(
            (window.bytes(), held()),
            (1 << 18, (1 << 19, 1 << 19)),
            "the peer has used the difference, and the window is halved again"
        );
        for _ in 0..30 {
            window.on_applied(window.bytes());
            slow(&window);
        }
        assert_eq!((u64::from(window.bytes()), held()), (LEAST, (LEAST, LEAST)));
        assert_eq!(busy(&window, 20), 1 << 20, "the window grows again");
    }

    /// Three clients that were fast earlier hold the whole budget, except the reserve for new connections.
    #[test]
    fn exhausted_receive_window_memory_is_reported_with_idle_times() {
        let windows = Arc::new(Windows::new(64 * LEAST));
        let of_some: Vec<_> = (0..3).map(|_| open(&windows, 16 << 16).unwrap()).collect();
        of_some.iter().for_each(|window| assert_eq!(busy(window, 20), 16 * LEAST));
        assert_eq!(windows.held(), 48 * LEAST);
        assert!(!windows.take_pressed());
        let other = open(&windows, u32::MAX).unwrap();
        assert_eq!(busy(&other, 20), LEAST);
        assert!(windows.take_pressed() && !windows.take_pressed());
        let later = Instant::now() + 60_000 * MS;
        let limit = other.state.lock().limit + LEAST;
        other.on_max_data(later, limit, 10 * MS);
        assert_eq!(other.status(later), ReceiveWindow { held: LEAST, idle: Duration::ZERO });
        let silent = of_some[0].status(later);
        assert!(silent.held == 16 * LEAST && silent.idle > 59_000 * MS, "{silent:?}");
    }

    #[test]
    fn forged_one_hour_round_trip_grows_receive_window_to_at_most_4_mb() {
        let windows = Arc::new(Windows::new(1 << 30));
        let window = open(&windows, 1 << 30).unwrap();
        let mut now = Instant::now();
        // The peer sends a million bytes per second, and claims a round trip of an hour.
        for _ in 0..1000 {
            now += 100 * MS;
            let limit = window.state.lock().last.1 + 100_000;
            window.on_max_data(now, limit, 3_600_000 * MS);
        }
        assert!(window.bytes() <= 4_000_000, "{}", window.bytes());
    }

    #[test]
    fn receive_window_grows_while_it_limits_the_peer() {
        let windows = Arc::new(Windows::new(1 << 30));
        let window = open(&windows, 1 << 20).unwrap();
        assert_eq!(u64::from(window.bytes()), LEAST);
        assert!(!slow(&window));
        assert_eq!(busy(&window, 2), 4 * LEAST);
        assert_eq!(busy(&window, 9), 1 << 20);
        assert_eq!(windows.held(), 1 << 20);
        assert_eq!(window.nudge(), (1 << 20) + 1);
        drop(window);
        assert_eq!(windows.held(), 0);
    }

    #[test]
    fn receive_windows_of_a_client_stay_within_the_clients_memory_limit() {
        let windows = Arc::new(Windows::new(1 << 30));
        let share = Arc::new(WindowShare::new(9 * LEAST, None));
        let mut of_client: Vec<_> = (0..2).map(|_| open(&windows, u32::MAX).unwrap()).collect();
        assert_eq!(busy(&of_client[0], 1), 2 * LEAST, "the window grows before it joins the share");
        of_client.iter().for_each(|window| window.join(Arc::clone(&share)));
        assert_eq!(share.held(), 3 * LEAST);
        assert_eq!(of_client.iter().map(|window| busy(window, 20)).sum::<u64>(), 9 * LEAST);
        assert_eq!(share.held(), 9 * LEAST);
        assert!(windows.limited() > 0);
        // The share is used up, but the window of a connection outside the share may still grow.
        let other = open(&windows, 1 << 22).unwrap();
        assert_eq!(busy(&other, 20), 1 << 22);
        // A used-up share never refuses a connection its first window.
        of_client.push(open(&windows, u32::MAX).unwrap());
        of_client[2].join(Arc::clone(&share));
        assert_eq!((share.held(), busy(&of_client[2], 20)), (10 * LEAST, LEAST));
        of_client.clear();
        assert_eq!((share.held(), windows.held()), (0, 1 << 22));
    }

    #[test]
    fn grown_receive_windows_leave_a_quarter_of_memory_to_new_connections() {
        let windows = Arc::new(Windows::new(64 * LEAST));
        let mut all: Vec<_> = (0..4).map(|_| open(&windows, u32::MAX).unwrap()).collect();
        let grown: u64 = all.iter().map(|window| busy(window, 20)).sum();
        assert_eq!((grown, windows.held()), (48 * LEAST, 48 * LEAST), "windows leave the reserve");
        while let Some(window) = open(&windows, u32::MAX) {
            assert_eq!(busy(&window, 20), LEAST, "it cannot grow");
            all.push(window);
        }
        assert_eq!((all.len(), windows.held(), windows.refused()), (4 + 16, 64 * LEAST, 1));
        all.pop();
        assert!(open(&windows, u32::MAX).is_some());
    }
}
