//! Thousands of subscribers in one process: `millrace-lab lab receivers`.
//!
//! Each subscriber is a QUIC client with quinn's own state machine, and does real handshakes, acknowledgements and
//! migrations. It has no task, socket or buffers of its own: one thread serves all ([`ReceiverRun`]), with a few
//! [`sockets`] and one queue of timers. [`session`] implements the part of MoQ that one subscription needs.
//! [`incoming`] finds the objects on a stream, [`sequence`] counts gaps and duplicates, and [`moves`] decides which
//! sessions move to another address when.

pub mod cli;
mod engine;
mod incoming;
pub mod moves;
pub mod report;
pub mod sequence;
mod session;
mod sockets;

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use millrace_moq::TrackName;
use parking_lot::Mutex;

pub use self::engine::ReceiverRun;
use self::{moves::WaveSettings, report::ReceiverCounters};

/// Settings of many sessions, which run in this process.
#[derive(Clone, Debug)]
pub struct Settings {
    pub relay: SocketAddr,
    /// Host name of the relay, from the URL.
    pub host: String,
    /// Path and query of the relay's URL.
    pub path: String,
    /// The track that each session subscribes to; `None` for sessions that only stay connected.
    pub track: Option<TrackName>,
    /// Whether sessions subscribe as soon as they are connected; otherwise when [`ReceiverControl::subscribe`] is called.
    pub subscribes_at_once: bool,
    pub sessions: usize,
    pub sockets: usize,
    /// Local addresses that sockets are bound to in turn; if empty, any address.
    pub from: Vec<IpAddr>,
    /// Number of streams that the relay may have open on each session.
    pub streams: u32,
    /// Time after the start of the first session when all sessions are closed; `None` to stay until the track is over.
    pub duration: Option<Duration>,
    /// Interval at which sessions move to another address, and how many of them move within which time.
    pub moves: Option<(Duration, WaveSettings)>,
}

/// Control of the sessions from other threads, which can move them to other addresses, stop them and count them.
#[derive(Debug, Default)]
pub struct ReceiverControl {
    stops: AtomicBool,
    wanted: Mutex<Option<WaveSettings>>,
    storm: Mutex<Option<Duration>>,
    measures_anew: AtomicBool,
    connected: AtomicU64,
    served: AtomicU64,
    resumed: AtomicU64,
    ended_early: AtomicU64,
}

impl ReceiverControl {
    /// Ends all sessions.
    pub fn stop(&self) {
        self.stops.store(true, Relaxed);
    }

    /// Moves a share of the sessions to another address. A requested move that has not started yet is replaced.
    pub fn move_sessions(&self, wanted: WaveSettings) {
        *self.wanted.lock() = Some(wanted);
    }

    /// Lets all sessions subscribe that are connected and have not yet, evenly spread over `within`.
    pub fn subscribe(&self, within: Duration) {
        *self.storm.lock() = Some(within);
    }

    /// Drops the latencies measured so far. It takes effect within a tenth of a second.
    pub fn measure_anew(&self) {
        self.measures_anew.store(true, Relaxed);
    }

    fn stops(&self) -> bool {
        self.stops.load(Relaxed)
    }

    fn take_move(&self) -> Option<WaveSettings> {
        self.wanted.lock().take()
    }

    fn take_storm(&self) -> Option<Duration> {
        self.storm.lock().take()
    }

    fn tell(&self, figures: &ReceiverCounters) {
        self.connected.store(figures.connected, Relaxed);
        self.served.store(figures.served, Relaxed);
        self.resumed.store(figures.resumed, Relaxed);
        self.ended_early.store(figures.ended_early(), Relaxed);
    }

    /// Returns the number of sessions that have been connected.
    pub fn connected(&self) -> u64 {
        self.connected.load(Relaxed)
    }

    /// Returns the number of sessions that have received an object.
    pub fn served(&self) -> u64 {
        self.served.load(Relaxed)
    }

    /// Returns how many times a session has moved and then received an object at its new address, summed over all
    /// sessions.
    pub fn resumed(&self) -> u64 {
        self.resumed.load(Relaxed)
    }

    /// Returns the number of sessions that ended before their track.
    pub fn ended_early(&self) -> u64 {
        self.ended_early.load(Relaxed)
    }
}
