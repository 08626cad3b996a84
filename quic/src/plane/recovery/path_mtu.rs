//! Detects whether the path still carries packets larger than the base MTU, and probes it again (RFC 8899, sections
//! 4.3 and 5.2).

use std::time::{Duration, Instant};

/// UDP payload that every QUIC path carries, bytes (RFC 9000, section 14).
pub const BASE_MTU: u64 = 1200;
/// A black hole is detected after this many round trips in a row in which packets above the base MTU were lost and none
/// arrived. If a queue overflows, some large packets arrive in each round trip.
const BLACK_HOLE: u32 = 3;
/// Time from the detection of a black hole to the first probe with a large packet. The interval doubles after each
/// probe.
const FIRST_PROBE: Duration = Duration::from_secs(10);
/// Longest time between two probes with a large packet.
const MAX_PROBE: Duration = Duration::from_secs(600);

/// The path MTU: the largest packet that a path carries.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathMtu {
    /// Largest packet that is sent, bytes of UDP payload.
    size: u64,
    /// MTU that the QUIC stack found, bytes of UDP payload.
    found: u64,
    /// Number of round trips in a row in which packets above the base MTU were lost and none arrived.
    suspicions: u32,
    /// Time when `suspicions`, the number of round trips that suggest a black hole, last grew. Losses of packets sent
    /// before it belong to the same round trip.
    suspected: Option<Instant>,
    /// Time of the next probe of a black hole, and the interval to the probe after it.
    probe: Option<(Instant, Duration)>,
}

impl PathMtu {
    /// Creates the state of a path that carries packets of `size` bytes of UDP payload.
    pub fn new(size: u64) -> Self {
        Self { size, found: size, suspicions: 0, suspected: None, probe: None }
    }

    /// Returns the largest packet to send, bytes of UDP payload.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the size of a probe, if the path is to be probed now.
    pub fn probe_size(&self, now: Instant) -> Option<u64> {
        self.probe.filter(|(at, _)| *at <= now).map(|_| self.found)
    }

    /// Notes that a packet was sent. If it was a probe, the next probe is scheduled.
    pub fn on_sent(&mut self, now: Instant, size: u64) {
        if let Some((at, wait)) = &mut self.probe
            && size > self.size
        {
            *at = now + *wait;
            *wait = (*wait * 2).min(MAX_PROBE);
        }
    }

    /// Notes that the peer has acknowledged a packet of `size` bytes.
    pub fn on_acked(&mut self, size: u64) {
        if size > BASE_MTU {
            self.suspicions = 0;
        }
        if self.probe.is_some() && size > self.size {
            *self = Self::new(self.found.min(size));
        }
    }

    /// Notes that a packet larger than [`BASE_MTU`], sent at `sent`, was lost. Lost probes are not reported here.
    pub fn on_lost(&mut self, now: Instant, sent: Instant) {
        if self.size <= BASE_MTU || self.suspected.is_some_and(|at| sent < at) {
            return;
        }
        self.suspected = Some(now);
        self.suspicions += 1;
        if self.suspicions == BLACK_HOLE {
            *self = Self {
                size: BASE_MTU,
                probe: Some((now + FIRST_PROBE, 2 * FIRST_PROBE)),
                ..Self::new(self.found)
            };
        }
    }
}
