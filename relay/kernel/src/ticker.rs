//! The engine's ticker, a periodic task. It reads reports about packets that the kernel has sent, unless connections'
//! tasks have read them. It also wakes readers of deferred packets, which did not wake the process when they arrived.
//! It is a task rather than a thread, because waking tasks from another thread costs system calls.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{sync::Notify, task::JoinHandle, time};

use super::RelayKernel;

/// How often connections are informed about sent packets if nothing else happens on them.
const TICK: Duration = Duration::from_millis(10);

/// The interval between ticks of the ticker (periodic timer) while packets arrive quickly. A publisher's whole
/// congestion window may wait until the next tick in a socket whose packets do not wake the process. The wait adds to
/// the publisher's round-trip time.
const FAST_TICK: Duration = Duration::from_millis(2);

/// If at least this many packets of publishers wait in a socket whose packets do not wake the process, the interval of
/// ticks is [`FAST_TICK`]. At some 1000 packets per second, that many arrive between two ticks.
const FAST: u64 = 8;

/// The ticker (periodic timer) rests after this time without any packet. Every packet wakes the process then.
const REST: Duration = Duration::from_millis(200);

/// The interval between two ticks while the ticker (periodic timer) rests, because no packets arrive.
const LOOK: Duration = Duration::from_secs(1);

/// The ticker is a periodic timer, whose task *ticks* or *rests*. It rests after some time without packets. Packets are
/// not deferred then, so the next one wakes the process and calls [`Self::wake`]. While it rests, the task still checks
/// for packets once a second. [`Self::start`] replaces a task whose runtime has ended.
#[derive(Default)]
pub(super) struct Ticker {
    awake: Arc<Notify>,
    ticks: AtomicU64,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Ticker {
    /// Starts the ticker task of the engine `kernel` (a periodic timer) in the present tokio runtime. Does nothing if
    /// such a task is running.
    pub fn start(&self, kernel: &Arc<RelayKernel>) {
        let mut task = self.task.lock();
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(tokio::spawn(tick(Arc::downgrade(kernel), Arc::clone(&self.awake))));
        }
    }

    /// Returns how often the ticker has checked for sent and deferred packets so far.
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Makes the ticker's task tick at short intervals again if it rests.
    pub fn wake(&self) {
        self.awake.notify_one();
    }
}

/// Runs the ticker, a periodic timer, until the engine is dropped.
async fn tick(kernel: Weak<RelayKernel>, awake: Arc<Notify>) {
    // `busy` is the time at which a tick last found packets. `rests` tells whether the task rests.
    let mut busy = Instant::now();
    let mut rests = true;
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
            // A packet that is deferred at this moment is found before the task rests.
            kernel.rest();
            rests = kernel.look_at_deferred().is_none();
        }
    }
}
