//! Congestion control: how many bytes may be in flight (RFC 9002, section 7).
//!
//! Loss recovery decides what was acknowledged, lost, or wrongly taken for lost. Controllers that go by losses
//! are told of them once per round trip at most; those that model the path get every packet, and samples of the
//! rate at which it delivers. Windows are in bytes.

mod bbr;
mod cubic;
mod new_reno;
mod rate;
mod slow_start;

use std::{
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant},
};

pub use bbr::Bbr;
pub use cubic::Cubic;
pub use new_reno::NewReno;
pub use rate::{Delivery, LATELY, RateSample, Snapshot};

/// An algorithm that sets the window of one path.
pub trait Controller: Send {
    /// A packet that elicits an acknowledgement is sent.
    fn on_sent(&mut self, _sending: &Sending) {}

    /// A packet was lost.
    fn on_lost(&mut self, _lost: &LostPacket) {}

    /// An ACK frame acknowledged something; its losses have been told.
    fn on_delivered(&mut self, _delivered: &Delivered) {}

    /// Packets sent outside of a recovery period were acknowledged.
    fn on_ack(&mut self, now: Instant, acked: &Acked);

    /// Congestion, for the first time since the last reduction took effect.
    fn on_congestion(&mut self, now: Instant);

    /// All packets whose loss led to the last [`Controller::on_congestion`] were delivered after all.
    fn on_spurious_congestion(&mut self);

    /// Persistent congestion (RFC 9002, section 7.6): the path carried nothing for several timeouts.
    fn on_persistent_congestion(&mut self, now: Instant);

    /// The largest packet changed, bytes.
    fn set_mtu(&mut self, mtu: u64);

    /// Bytes that may be in flight.
    fn window(&self) -> u64;

    /// Bytes in flight up to which a sender may send that does not pace: what it sends leaves at once, and waits on the path.
    fn unpaced_window(&self) -> u64 {
        self.window()
    }

    /// Bytes per second at which packets should leave: by default a quarter more than the window per
    /// round trip (RFC 9002, section 7.7).
    fn pacing_rate(&self, rtt: Duration) -> u64 {
        let nanos = rtt.as_nanos().max(1);
        let rate = u128::from(self.window()) * 1_250_000_000 / nanos;
        u64::try_from(rate).unwrap_or(u64::MAX)
    }

    /// Bytes per second that the path is thought to carry; `None` where the algorithm does not estimate it.
    fn bandwidth(&self) -> Option<u64> {
        None
    }
}

/// A packet that is sent.
#[derive(Clone, Copy, Debug)]
pub struct Sending {
    pub now: Instant,
    /// Bytes, without it.
    pub in_flight: u64,
    /// The last time that sending stopped, there was no more to send.
    pub app_limited: bool,
}

/// A packet that was lost.
#[derive(Clone, Copy, Debug)]
pub struct LostPacket {
    pub now: Instant,
    pub size: u64,
    /// Bytes in flight when it was sent, with it.
    pub in_flight: u64,
    /// Bytes lost since then, with it.
    pub lost: u64,
    pub app_limited: bool,
    /// Bytes delivered so far.
    pub delivered: u64,
}

/// What an ACK frame said.
#[derive(Clone, Copy, Debug)]
pub struct Delivered {
    pub now: Instant,
    /// Bytes newly acknowledged.
    pub acked: u64,
    /// Bytes delivered so far.
    pub total: u64,
    pub sample: RateSample,
    /// The frame's round trip, if it made a sample.
    pub rtt: Option<Duration>,
    /// Bytes in flight now.
    pub in_flight: u64,
    /// The window was full before.
    pub window_limited: bool,
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
    Cubic,
    NewReno,
    #[default]
    Bbr,
}

impl Algorithm {
    pub fn start(self, mtu: u64, now: Instant) -> Box<dyn Controller> {
        match self {
            Self::Cubic => Box::new(Cubic::new(mtu, now)),
            Self::NewReno => Box::new(NewReno::new(mtu)),
            Self::Bbr => Box::new(Bbr::new(mtu, now, seed())),
        }
    }
}

/// Another one each time, but in simulations, which can be repeated.
fn seed() -> u64 {
    if cfg!(test) { 1 } else { RandomState::new().hash_one(()) }
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
mod link;
#[cfg(test)]
mod tests;
