//! The engine's tick: from time to time a task looks at what the kernel has sent, and at packets whose wake-up was deferred,
//! where nothing else does. It is a task, not a thread, since it wakes other tasks: from another thread each of them costs
//! system calls.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{sync::Notify, task::JoinHandle, time};

use super::Kernel;

/// How often connections find out what was sent on them if nothing else happens there.
const TICK: Duration = Duration::from_millis(10);

/// The same while packets come fast. A publisher's congestion window may be all that waits in a deferred socket, and a
/// round trip as long as this then.
const FAST_TICK: Duration = Duration::from_millis(2);

/// Packets of publishers that wait in a deferred socket, from which on they come fast: of one some 1000 in a second.
const FAST: u64 = 8;

/// After so long in which nothing was found it is not looked any more until a packet has woken the process.
const REST: Duration = Duration::from_millis(200);

/// How often it is looked all the same, where every packet wakes the process.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Ticker {
    awake: Arc<Notify>,
    ticks: AtomicU64,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Ticker {
    /// Has a task tick for `kernel`, within a tokio runtime. One is enough; that of a runtime which has ended ticks no more.
    pub fn start(&self, kernel: &Arc<Kernel>) {
        let mut task = self.task.lock();
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(tokio::spawn(tick(Arc::downgrade(kernel), Arc::clone(&self.awake))));
        }
    }

    /// Ticks so far.
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Has it tick again if it rests.
    pub fn wake(&self) {
        self.awake.notify_one();
    }
}

/// Until the engine is gone.
async fn tick(kernel: Weak<Kernel>, awake: Arc<Notify>) {
    // When there was last a reason to look, and whether it is over.
    let (mut busy, mut rests) = (Instant::now(), true);
    let mut waiting = None;
    loop {
        let is_told = rests && time::timeout(LOOK, awake.notified()).await.is_ok();
        match waiting {
            Some(FAST..) => time::sleep(FAST_TICK).await,
            _ if rests => {}
            _ => time::sleep(TICK).await,
        }
        let Some(kernel) = kernel.upgrade() else { return };
        kernel.ticker.ticks.fetch_add(1, Ordering::Relaxed);
        let found = kernel.look();
        waiting = kernel.look_at_deferred();
        if found || is_told || waiting.is_some() {
            (busy, rests) = (Instant::now(), false);
        } else if !rests && busy.elapsed() > REST {
            // A packet that is deferred at this moment is found a tick later.
            kernel.rest();
            rests = kernel.look_at_deferred().is_none();
        }
    }
}
