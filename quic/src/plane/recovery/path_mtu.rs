//! Detects whether the path still carries packets larger than the base MTU, and probes it again (RFC 8899, sections
//! 4.3 and 5.2).

use std::time::{Duration, Instant};

/// UDP payload that every QUIC path carries, bytes (RFC 9000, section 14).
pub const BASE_MTU: u64 = 1200;
/// Round trips in which larger packets were lost and none arrived after which the path counts as a black hole. A
/// queue that overflows loses as many, but some of each round trip get through.
const BLACK_HOLE: u32 = 3;
/// Time from the detection of a black hole to the first probe. It doubles after each probe.
const FIRST_PROBE: Duration = Duration::from_secs(10);
const MAX_PROBE: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(super) struct PathMtu {
    /// Largest packet that is sent, bytes of UDP payload.
    size: u64,
    /// MTU that the QUIC stack found, bytes of UDP payload.
    found: u64,
    suspicions: u32,
    /// Time of the latest suspicion. Packets sent before it were lost in the same round trip.
    suspected: Option<Instant>,
    /// Time of the next probe in a black hole, and the interval after it.
    probe: Option<(Instant, Duration)>,
}

impl PathMtu {
    /// Starts with a path that takes packets of `size` bytes of UDP payload.
    pub fn new(size: u64) -> Self {
        Self { size, found: size, suspicions: 0, suspected: None, probe: None }
    }

    /// Returns the largest packet to send, bytes of UDP payload.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the size to pad the next packet to, if the path is to be probed now.
    pub fn probe_size(&self, now: Instant) -> Option<u64> {
        self.probe.filter(|(at, _)| *at <= now).map(|_| self.found)
    }

    /// Notes that a packet was sent. A probe schedules the next one.
    pub fn on_sent(&mut self, now: Instant, size: u64) {
        if let Some((at, wait)) = &mut self.probe
            && size > self.size
        {
            *at = now + *wait;
            *wait = (*wait * 2).min(MAX_PROBE);
        }
    }

    /// Notes that a packet of `size` bytes arrived.
    pub fn on_acked(&mut self, size: u64) {
        if size > BASE_MTU {
            self.suspicions = 0;
        }
        if self.probe.is_some() && size > self.size {
            *self = Self::new(self.found.min(size));
        }
    }

    /// Notes that a packet larger than [`BASE_MTU`] was lost, which was no probe and was sent at `sent`.
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
