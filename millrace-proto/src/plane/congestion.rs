//! Congestion control: how many bytes may be in flight (RFC 9002, section 7).
//!
//! Loss recovery decides what was acknowledged, lost, or wrongly taken for lost, and calls the
//! controller at most once per round trip for losses. Windows are in bytes.

mod cubic;
mod new_reno;
mod slow_start;

use std::time::{Duration, Instant};

pub use cubic::Cubic;
pub use new_reno::NewReno;

/// An algorithm that sets the window of one path.
pub trait Controller: Send {
    /// Packets sent outside of a recovery period were acknowledged.
    fn on_ack(&mut self, now: Instant, acked: &Acked);

    /// Congestion, for the first time since the last reduction took effect.
    fn on_congestion(&mut self, now: Instant);

    /// All packets whose loss led to the last [`Controller::on_congestion`] were delivered after all.
    fn on_spurious_congestion(&mut self);

    /// Persistent congestion (RFC 9002, section 7.6): the path carried nothing for several timeouts.
    fn on_persistent_congestion(&mut self);

    /// The largest packet changed, bytes.
    fn set_mtu(&mut self, mtu: u64);

    /// Bytes that may be in flight.
    fn window(&self) -> u64;

    /// Bytes per second at which packets should leave: by default a quarter more than the window per
    /// round trip (RFC 9002, section 7.7).
    fn pacing_rate(&self, rtt: Duration) -> u64 {
        let nanos = rtt.as_nanos().max(1);
        let rate = u128::from(self.window()) * 1_250_000_000 / nanos;
        u64::try_from(rate).unwrap_or(u64::MAX)
    }
}

/// What one ACK frame newly acknowledged.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    pub bytes: u64,
    /// When the newest of the packets was sent.
    pub sent: Instant,
    /// Newest round-trip sample.
    pub rtt: Duration,
    pub smoothed_rtt: Duration,
    /// The sender had too little to send to fill the window, which must therefore not grow.
    pub app_limited: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    #[default]
    Cubic,
    NewReno,
}

impl Algorithm {
    pub fn start(self, mtu: u64, now: Instant) -> Box<dyn Controller> {
        match self {
            Self::Cubic => Box::new(Cubic::new(mtu, now)),
            Self::NewReno => Box::new(NewReno::new(mtu)),
        }
    }
}

/// RFC 9002, section 7.2: ten packets, but no more than the larger of two packets and 14,720 bytes.
fn initial_window(mtu: u64) -> u64 {
    (10 * mtu).min((2 * mtu).max(14_720))
}

/// RFC 9002, section 7.2.
fn minimum_window(mtu: u64) -> u64 {
    2 * mtu
}

#[cfg(test)]
mod tests;
