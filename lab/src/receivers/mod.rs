//! Thousands of subscribers in one process: `millrace-lab lab receivers`.
//!
//! Each is a QUIC client of quinn's own state machine with real handshakes, acknowledgements and migration; what it is spared is
//! a task, a socket and buffers of its own. One thread serves all ([`ReceiverRun`]): a few [`sockets`] for all connections, one queue of
//! timers. [`session`] speaks as much of MoQ as one subscription takes, [`incoming`] finds the objects on a stream, [`sequence`]
//! counts gaps and duplicates, and [`moves`] says who goes on from another address when.

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

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Settings {
    pub relay: SocketAddr,
    /// Name of the relay in the URL.
    pub host: String,
    /// Path and query of the URL.
    pub path: String,
    pub track: TrackName,
    pub sessions: usize,
    pub sockets: usize,
    /// Addresses that sockets are bound to in turn; if empty, any.
    pub from: Vec<IpAddr>,
    /// Streams that the relay may have open at a time on each session.
    pub streams: u32,
    /// Time to stay, from when the first session begins; `None`: until the track is over.
    pub duration: Option<Duration>,
    /// A repeated move, and its interval.
    pub moves: Option<(Duration, WaveSettings)>,
}

/// A handle of a run, for other threads: it moves and stops the sessions, and counts them.
#[derive(Debug, Default)]
pub struct ReceiverControl {
    stops: AtomicBool,
    wanted: Mutex<Option<WaveSettings>>,
    served: AtomicU64,
    resumed: AtomicU64,
    ended_early: AtomicU64,
}

impl ReceiverControl {
    /// Ends all sessions.
    pub fn stop(&self) {
        self.stops.store(true, Relaxed);
    }

    /// Moves a part of the sessions to another address. A move that has not begun yet is replaced.
    pub fn move_sessions(&self, wanted: WaveSettings) {
        *self.wanted.lock() = Some(wanted);
    }

    fn stops(&self) -> bool {
        self.stops.load(Relaxed)
    }

    fn take_move(&self) -> Option<WaveSettings> {
        self.wanted.lock().take()
    }

    fn tell(&self, figures: &ReceiverCounters) {
        self.served.store(figures.served, Relaxed);
        self.resumed.store(figures.resumed, Relaxed);
        self.ended_early.store(figures.ended_early(), Relaxed);
    }

    /// Returns how many sessions have received an object.
    pub fn served(&self) -> u64 {
        self.served.load(Relaxed)
    }

    /// Returns how many times a session has received an object at an address that it had moved to.
    pub fn resumed(&self) -> u64 {
        self.resumed.load(Relaxed)
    }

    /// Returns how many sessions were over before their track.
    pub fn ended_early(&self) -> u64 {
        self.ended_early.load(Relaxed)
    }
}
