//! Connections to a peer's broker by TCP or MPTCP, each of which carries one of applications at a time: so back-pressure is the
//! kernel's, and none waits for what was lost of another.

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
    broken::Broken,
    socket::{Crowd, Socket},
    stream::Stream,
};

/// What is not needed any more is closed after so much time without use.
const IDLE: Duration = Duration::from_secs(30);

pub struct Pool {
    limits: settings::Pool,
    pub crowd: Arc<Crowd>,
    /// The last one that was used last. Each has a permit of `free`.
    idle: Mutex<Vec<(Stream, Instant)>>,
    free: Semaphore,
    waiting: AtomicUsize,
    rtt_us: AtomicU64,
    /// There may be too few.
    pub lacking: Notify,
}

impl Pool {
    pub fn new(limits: settings::Pool, rtt: Duration) -> Self {
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

    /// A connection that carries nothing, and waits for one where there may be more. May be cancelled.
    pub async fn open(&self) -> Result<Stream, Broken> {
        let _waits = Waits::new(self);
        loop {
            if self.free.available_permits() == 0 {
                self.lacking.notify_one();
            }
            self.free.acquire().await.map_err(|_| Broken::Lost)?.forget();
            self.lacking.notify_one();
            let last = self.idle.lock().pop();
            if let Some((stream, _)) = last.filter(|(stream, _)| stream.is_quiet()) {
                return Ok(stream);
            }
        }
    }

    /// It may be used, or used again.
    pub fn put(&self, stream: Stream) {
        if !self.is_closed() {
            self.idle.lock().push((stream, Instant::now()));
            self.free.add_permits(1);
        }
    }

    /// Without those that have ended, and those of too many that nobody has needed for long.
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

    /// How many more there are to be, when so many are being made.
    pub fn lacks(&self, coming: usize) -> usize {
        let wanted = self.limits.warm + self.waiting.load(Relaxed);
        let room = self.limits.most.saturating_sub(self.count() + coming);
        wanted.saturating_sub(self.idle_count() + coming).min(room)
    }

    /// Whether one more is of those that are always there.
    pub fn is_small(&self) -> bool {
        self.count() <= self.limits.warm
    }

    pub fn count(&self) -> usize {
        self.crowd.count()
    }

    pub fn idle_count(&self) -> usize {
        self.idle.lock().len()
    }

    /// One that is idle: what happens to it most likely happens to all.
    pub fn an_idle_one(&self) -> Option<Arc<Socket>> {
        self.idle.lock().first().and_then(|(stream, _)| stream.socket().cloned())
    }

    /// Those that wait have most likely ended, too, and nobody has been told: others are made.
    pub fn doubt(&self) {
        let mut idle = self.idle.lock();
        self.free.forget_permits(idle.len());
        idle.clear();
        self.lacking.notify_one();
    }

    pub fn rtt(&self) -> Duration {
        Duration::from_micros(self.rtt_us.load(Relaxed))
    }

    /// As one more connection has shown it.
    pub fn note_rtt(&self, rtt: Duration) {
        self.rtt_us.store(micros(rtt), Relaxed);
    }

    pub fn is_closed(&self) -> bool {
        self.free.is_closed()
    }

    /// No more are had from it; those that carry go on.
    pub fn close(&self) {
        self.free.close();
        self.idle.lock().clear();
        self.lacking.notify_one();
    }

    /// With those that carry.
    pub fn sever(&self) {
        self.close();
        self.crowd.sever();
    }
}

/// One who waits, until this is dropped.
struct Waits<'a>(&'a Pool);

impl<'a> Waits<'a> {
    fn new(pool: &'a Pool) -> Self {
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
