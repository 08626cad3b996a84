//! Packet pacing: spreads the packets of a congestion window over the round trip (RFC 9002, section 7.7).

use std::time::{Duration, Instant};

/// Smallest burst, packets: as many as the initial window allows (RFC 9002, section 7.7).
const MIN_BURST: u64 = 10;
/// Size of the token bucket, as the time in which the current rate fills it. Timers wake a sender about every
/// millisecond, so a smaller bucket would limit the rate.
const BURST_TIME: Duration = Duration::from_millis(2);
/// Largest number of packets in one burst, at any rate.
const MAX_BURST: u64 = 256;

const NANOS: u64 = 1_000_000_000;

/// A token bucket in bytes, filled at the rate that is given to [`Pacer::ready`].
#[derive(Debug)]
pub struct Pacer {
    mtu: u64,
    tokens: u64,
    filled: Instant,
}

impl Pacer {
    /// Creates a full bucket. `mtu` is the size of the largest packet, bytes.
    pub fn new(mtu: u64, now: Instant) -> Self {
        Self { mtu, tokens: MIN_BURST * mtu, filled: now }
    }

    /// Sets the size of the largest packet, bytes.
    pub fn set_mtu(&mut self, mtu: u64) {
        self.mtu = mtu;
    }

    /// Returns `Ok` if a packet may leave now at `rate` bytes per second, and otherwise the time from which it may.
    pub fn ready(&mut self, now: Instant, rate: u64) -> Result<(), Instant> {
        let rate = rate.max(1);
        self.fill(now, rate);
        if self.tokens >= self.mtu {
            return Ok(());
        }
        let missing = self.mtu - self.tokens;
        // The wait is rounded up, so that the token bucket has enough bytes for a packet when the wait ends.
        Err(self.filled + Duration::from_nanos(scale(missing, NANOS, rate).saturating_add(1)))
    }

    /// Removes the bytes of a packet that was sent from the bucket.
    pub fn on_sent(&mut self, size: u64) {
        self.tokens = self.tokens.saturating_sub(size);
    }

    fn fill(&mut self, now: Instant, rate: u64) {
        let elapsed = now.saturating_duration_since(self.filled);
        let capacity = scale(rate, BURST_TIME.as_nanos() as u64, NANOS)
            .clamp(MIN_BURST * self.mtu, MAX_BURST * self.mtu);
        let earned = scale(rate, u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX), NANOS);
        self.tokens = self.tokens.saturating_add(earned);
        if self.tokens >= capacity {
            self.tokens = capacity;
            self.filled = now;
        } else {
            // Only whole bytes are added to the bucket. The time for the remaining fraction of a byte counts at the
            // next call.
            self.filled += Duration::from_nanos(scale(earned, NANOS, rate));
        }
    }
}

/// Returns `value * by / over`, rounded down, saturating.
fn scale(value: u64, by: u64, over: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(by) / u128::from(over)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u64 = 1200;

    /// Returns the number of packets that a paced sender sends between the times `start` and `end`.
    fn run(pacer: &mut Pacer, start: Instant, end: Instant, rate: u64) -> u64 {
        let mut now = start;
        let mut sent = 0;
        while now < end {
            match pacer.ready(now, rate) {
                Ok(()) => {
                    pacer.on_sent(MTU);
                    sent += 1;
                }
                Err(at) => {
                    assert!(at > now, "a deadline in the past makes the sender spin");
                    now = at;
                }
            }
        }
        sent
    }

    #[test]
    fn pacer_allows_a_burst_and_then_the_rate() {
        let start = Instant::now();
        let mut pacer = Pacer::new(MTU, start);
        assert_eq!(run(&mut pacer, start, start + Duration::from_nanos(1), 1_200_000), 10);
        let sent = run(&mut pacer, start, start + Duration::from_secs(1), 1_200_000);
        assert!((999..=1001).contains(&sent), "{sent} packets");
    }

    #[test]
    fn idle_time_allows_no_more_than_a_burst() {
        let start = Instant::now();
        let mut pacer = Pacer::new(MTU, start);
        let later = start + Duration::from_secs(60);
        assert_eq!(run(&mut pacer, later, later + Duration::from_nanos(1), 1_200_000), 10);
        let fast = 1_200_000_000;
        let later = later + Duration::from_secs(60);
        assert_eq!(run(&mut pacer, later, later + Duration::from_nanos(1), fast), MAX_BURST);
    }

    #[test]
    fn pacing_keeps_the_rate_at_slow_rates_and_frequent_polls() {
        let start = Instant::now();
        let mut pacer = Pacer::new(MTU, start);
        let sent = (0..1_000_000u64)
            .filter(|micros| {
                let ready = pacer.ready(start + Duration::from_micros(*micros), 12_000).is_ok();
                if ready {
                    pacer.on_sent(MTU);
                }
                ready
            })
            .count();
        assert!((19..=20).contains(&sent), "{sent} packets");
    }
}
