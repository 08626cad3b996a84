//! Whether the path still carries packets larger than every path has to, and when that is tried again (RFC 8899, sections 4.3
//! and 5.2).

use std::time::{Duration, Instant};

/// What every path of QUIC carries, bytes of UDP payload (RFC 9000, section 14).
pub const BASE_MTU: u64 = 1200;
/// Round trips in which larger packets were lost and none arrived, until the path counts as a black hole. A queue that
/// overflows loses as many, but some of each round trip get through.
const BLACK_HOLE: u32 = 3;
/// From the black hole to the first probe, and from there on twice as long each time.
const FIRST_PROBE: Duration = Duration::from_secs(10);
const MAX_PROBE: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(super) struct PathMtu {
    /// Largest packet that is sent, bytes of UDP payload.
    size: u64,
    /// What the QUIC stack found the path to take.
    found: u64,
    suspicions: u32,
    /// When the last of them arose. What was sent before then was lost in the same round trip.
    suspected: Option<Instant>,
    /// Of a black hole: when it is probed next, and how long after that again.
    probe: Option<(Instant, Duration)>,
}

impl PathMtu {
    pub fn new(size: u64) -> Self {
        Self { size, found: size, suspicions: 0, suspected: None, probe: None }
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// What the next packet is padded to, if the path is to be probed now.
    pub fn probe_size(&self, now: Instant) -> Option<u64> {
        self.probe.filter(|(at, _)| *at <= now).map(|_| self.found)
    }

    pub fn on_sent(&mut self, now: Instant, size: u64) {
        if let Some((at, wait)) = &mut self.probe
            && size > self.size
        {
            *at = now + *wait;
            *wait = (*wait * 2).min(MAX_PROBE);
        }
    }

    /// A packet of `size` bytes arrived.
    pub fn on_acked(&mut self, size: u64) {
        if size > BASE_MTU {
            self.suspicions = 0;
        }
        if self.probe.is_some() && size > self.size {
            *self = Self::new(self.found.min(size));
        }
    }

    /// A packet larger than [`BASE_MTU`] was lost, which was no probe and was sent at `sent`.
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
