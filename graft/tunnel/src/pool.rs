//! Pools of connections to a peer's tunnel broker by TCP, MPTCP or SCTP. Each carries one application's connection at a
//! time: the kernel provides back-pressure, and no connection waits for lost packets of another one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_graft::settings;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::{
    carrier_error::CarrierError,
    socket::{CarrierSocket, SocketGroup},
    stream::CarrierStream,
};

/// Time without use after which an idle connection is closed, if the pool has more than its minimum.
const IDLE: Duration = Duration::from_secs(30);

/// A pool of connections to one peer's tunnel broker.
///
/// A connection of the pool is *idle* after [`Self::put`], *busy* after [`Self::open`] has returned it, and then idle
/// again or gone. The task that maintains the pool waits for `lacking`, makes as many connections as [`Self::lacks`]
/// returns, and calls [`Self::sweep`] to remove those that have ended or were unused for long. The semaphore `free` has
/// a permit for each connection in `idle`, except for a moment in `put` and `open`: `put` adds the connection before
/// the permit, and `open` takes the permit before the connection. A task with a permit thus always finds a connection
/// or an emptied list, and tries again. [`Self::close`] ends the pool for good, and every `open` that waits fails.
pub struct ConnectionPool {
    limits: settings::PoolSettings,
    pub crowd: Arc<SocketGroup>,
    /// Idle connections, the most recently used last. For each one the semaphore `free` has a permit.
    idle: Mutex<Vec<(CarrierStream, Instant)>>,
    free: Semaphore,
    /// Number of tasks that wait for a connection.
    waiting: AtomicUsize,
    /// Round trip in microseconds, as measured on the latest connection.
    rtt_us: AtomicU64,
    /// Notified when the pool may have too few connections.
    pub lacking: Notify,
}

impl ConnectionPool {
    pub fn new(limits: settings::PoolSettings, rtt: Duration) -> Self {
        Self {
            limits,
            crowd: Arc::default(),
            idle: Mutex::default(),
            free: Semaphore::new(0),
            waiting: AtomicUsize::new(0),
            rtt_us: AtomicU64::new(micros(rtt)),
            lacking: Notify::new(),
        }
    }

    /// Takes an idle connection, and waits for one if there is none. The call may be cancelled.
    pub async fn open(&self) -> Result<CarrierStream, CarrierError> {
        let _waits = Waits::new(self);
        loop {
            // If no connection is idle, the task that maintains the pool makes another one.
            if self.free.available_permits() == 0 {
                self.lacking.notify_one();
            }
            // The semaphore's permit belongs to the idle connection that is taken below.
            self.free.acquire().await.map_err(|_| CarrierError::Lost)?.forget();
            // One connection fewer is idle, so the task that maintains the pool checks whether it needs another one.
            self.lacking.notify_one();
            let last = self.idle.lock().pop();
            // A connection that has ended, or has unread bytes, is dropped, and another one is tried.
            if let Some((stream, _)) = last.filter(|(stream, _)| stream.is_quiet()) {
                return Ok(stream);
            }
        }
    }

    /// Adds a new connection, or one that is no longer used, to the idle ones.
    pub fn put(&self, stream: CarrierStream) {
        if !self.is_closed() {
            self.idle.lock().push((stream, Instant::now()));
            self.free.add_permits(1);
        }
    }

    /// Removes connections that have ended, and idle connections beyond the pool's minimum that were unused for long.
    pub fn sweep(&self) {
        let mut idle = self.idle.lock();
        let mut spare = idle.len().saturating_sub(self.limits.warm);
        idle.retain(|(stream, since)| {
            let is_spare = spare > 0 && since.elapsed() > IDLE;
            let stays = stream.is_quiet() && !is_spare;
            spare -= usize::from(is_spare);
            if !stays {
                self.free.forget_permits(1);
            }
            stays
        });
    }

    /// Returns how many more connections the pool needs, in addition to the `coming` ones whose handshakes are in
    /// progress.
    pub fn lacks(&self, coming: usize) -> usize {
        let wanted = self.limits.warm + self.waiting.load(Relaxed);
        let room = self.limits.most.saturating_sub(self.count() + coming);
        wanted.saturating_sub(self.idle_count() + coming).min(room)
    }

    /// Reports whether the pool has no more connections than its minimum.
    pub fn is_small(&self) -> bool {
        self.count() <= self.limits.warm
    }

    pub fn count(&self) -> usize {
        self.crowd.count()
    }

    pub fn idle_count(&self) -> usize {
        self.idle.lock().len()
    }

    /// Returns the socket of an idle connection. An error of that socket most likely concerns all idle connections.
    pub fn an_idle_one(&self) -> Option<Arc<CarrierSocket>> {
        self.idle.lock().first().and_then(|(stream, _)| stream.socket().cloned())
    }

    /// Drops all idle connections, which have most likely ended without notice, so that new ones are made.
    pub fn doubt(&self) {
        // Permits and idle connections change together, under the lock.
        let mut idle = self.idle.lock();
        self.free.forget_permits(idle.len());
        idle.clear();
        self.lacking.notify_one();
    }

    pub fn rtt(&self) -> Duration {
        Duration::from_micros(self.rtt_us.load(Relaxed))
    }

    /// Records the round trip that was measured on the latest connection.
    pub fn note_rtt(&self, rtt: Duration) {
        self.rtt_us.store(micros(rtt), Relaxed);
    }

    pub fn is_closed(&self) -> bool {
        self.free.is_closed()
    }

    /// Closes the pool for new connections. Busy connections stay open.
    pub fn close(&self) {
        self.free.close();
        self.idle.lock().clear();
        self.lacking.notify_one();
    }

    /// Closes the pool and its busy connections.
    pub fn sever(&self) {
        self.close();
        self.crowd.sever();
    }
}

/// Counts one waiting task until this value is dropped.
struct Waits<'a>(&'a ConnectionPool);

impl<'a> Waits<'a> {
    fn new(pool: &'a ConnectionPool) -> Self {
        pool.waiting.fetch_add(1, Relaxed);
        Self(pool)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}
