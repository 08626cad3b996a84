//! Congestion control: how many bytes may be in flight (RFC 9002, section 7).
//!
//! Loss recovery decides which packets were acknowledged, lost, or wrongly declared lost. Controllers that react to
//! losses learn of them once per round trip at most. Controllers that model the path get every packet, and samples of
//! the rate at which it delivers. Windows are in bytes.

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
pub use rate::{Delivery, LATELY, RateSample, RateSnapshot};

/// An algorithm that sets the window of one path.
///
/// [`Self::on_sent`] is called for each packet that leaves. For each ACK frame the order is [`Self::on_ack`], then
/// [`Self::on_lost`] for each loss that the frame reveals, [`Self::on_congestion`] at most once per round trip, and
/// [`Self::on_delivered`]. The window, the pacing rate and the bandwidth may be read at any time.
pub trait Controller: Send {
    /// Notes that an ack-eliciting packet is sent.
    fn on_sent(&mut self, _sending: &SendingPacket) {}

    /// Notes that a packet was lost.
    fn on_lost(&mut self, _lost: &LostPacket) {}

    /// Notes that an ACK frame acknowledged packets. [`Controller::on_lost`] has already reported the losses that the
    /// frame revealed.
    fn on_delivered(&mut self, _delivered: &AckEffect) {}

    /// Notes that packets sent outside of a recovery period were acknowledged.
    fn on_ack(&mut self, now: Instant, acked: &Acked);

    /// Notes congestion: packets were lost or marked CE. Called only if the newest of them was sent after the last
    /// reduction of the window.
    fn on_congestion(&mut self, now: Instant);

    /// Undoes the last [`Controller::on_congestion`]: all packets whose loss led to it were delivered after all.
    fn on_spurious_congestion(&mut self);

    /// Notes persistent congestion (RFC 9002, section 7.6): the path carried nothing for several timeouts.
    fn on_persistent_congestion(&mut self, now: Instant);

    /// Sets the size of the largest packet, bytes.
    fn set_mtu(&mut self, mtu: u64);

    /// Returns the bytes that may be in flight.
    fn window(&self) -> u64;

    /// Returns the largest number of bytes that a sender without pacing may have in flight. Its bursts queue on the
    /// path, so this may be less than the window.
    fn unpaced_window(&self) -> u64 {
        self.window()
    }

    /// Returns the pacing rate in bytes per second. By default it is a quarter more than the window per round trip
    /// (RFC 9002, section 7.7).
    fn pacing_rate(&self, rtt: Duration) -> u64 {
        let nanos = rtt.as_nanos().max(1);
        let rate = u128::from(self.window()) * 1_250_000_000 / nanos;
        u64::try_from(rate).unwrap_or(u64::MAX)
    }

    /// Returns the estimated bandwidth of the path in bytes per second; `None` if the algorithm does not estimate it.
    fn bandwidth(&self) -> Option<u64> {
        None
    }
}

/// A packet that is being sent.
#[derive(Clone, Copy, Debug)]
pub struct SendingPacket {
    /// The time at which the packet is sent.
    pub now: Instant,
    /// Bytes in flight when the packet is sent, without the packet itself.
    pub in_flight: u64,
    /// True if sending last stopped because there was no more data, and not because the window was full.
    pub app_limited: bool,
}

/// A packet that was lost.
#[derive(Clone, Copy, Debug)]
pub struct LostPacket {
    /// The time when the loss was detected.
    pub now: Instant,
    /// UDP payload of the packet, bytes.
    pub size: u64,
    /// Bytes in flight when the packet was sent, including the packet itself.
    pub in_flight: u64,
    /// Bytes lost since the packet was sent, including the packet itself.
    pub lost: u64,
    /// True if the sender had too little data to fill the window when the packet was sent.
    pub app_limited: bool,
    /// Bytes delivered on the path so far.
    pub delivered: u64,
}

/// Changes of a connection's state by one ACK frame, and measurements from the frame.
#[derive(Clone, Copy, Debug)]
pub struct AckEffect {
    /// The time when the frame arrived.
    pub now: Instant,
    /// Bytes newly acknowledged.
    pub acked: u64,
    /// Bytes delivered on the path so far.
    pub total: u64,
    /// The sample of the delivery rate.
    pub sample: RateSample,
    /// The round-trip time that the frame measured, if any.
    pub rtt: Option<Duration>,
    /// Bytes in flight now.
    pub in_flight: u64,
    /// True if the congestion window was full when the ACK frame arrived.
    pub window_limited: bool,
}

/// The packets that one ACK frame newly acknowledged.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    /// Bytes newly acknowledged.
    pub bytes: u64,
    /// Time when the newest of the acknowledged packets was sent.
    pub sent: Instant,
    /// The newest round-trip sample.
    pub rtt: Duration,
    /// The smoothed round-trip time.
    pub smoothed_rtt: Duration,
    /// True if the sender had too little data to fill the window, so the window must not grow.
    pub app_limited: bool,
}

/// The available congestion controllers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CongestionAlgorithm {
    /// CUBIC (RFC 9438).
    Cubic,
    /// NewReno (RFC 9002, section 7).
    NewReno,
    /// BBRv3 (draft-ietf-ccwg-bbr).
    #[default]
    Bbr,
}

impl CongestionAlgorithm {
    /// Creates a controller. `mtu` is the size of the largest packet, bytes.
    pub fn start(self, mtu: u64, now: Instant) -> Box<dyn Controller> {
        match self {
            Self::Cubic => Box::new(Cubic::new(mtu, now)),
            Self::NewReno => Box::new(NewReno::new(mtu)),
            Self::Bbr => Box::new(Bbr::new(mtu, now, seed())),
        }
    }
}

/// Returns a random seed, or a fixed one in simulations, so that each run gives the same result.
fn seed() -> u64 {
    if cfg!(test) { 1 } else { RandomState::new().hash_one(()) }
}

/// Returns the initial window (RFC 9002, section 7.2): ten packets, but no more than the larger of two packets and
/// 14,720 bytes.
fn initial_window(mtu: u64) -> u64 {
    (10 * mtu).min((2 * mtu).max(14_720))
}

/// Returns the minimum window (RFC 9002, section 7.2).
fn minimum_window(mtu: u64) -> u64 {
    2 * mtu
}

#[cfg(test)]
mod link;
#[cfg(test)]
mod tests;
