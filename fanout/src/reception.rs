//! Reception reports about one source (RFC 3550, sections 6.4.1, A.1 and A.3), for players that send no reports
//! themselves.

use std::time::Duration;

use super::{
    rtcp::{Block, receiver_report},
    rtp::DatagramKind,
};

/// Statistics about the reception of one source (SSRC). Times are of one clock that does not go back.
#[derive(Clone, Debug, Default)]
pub struct Reception {
    source: Option<RtpSource>,
    /// The latest sender report: the middle 32 bits of its NTP time, and its time of arrival.
    sender: Option<(u32, Duration)>,
}

#[derive(Clone, Debug)]
struct RtpSource {
    ssrc: u32,
    /// Extended sequence number of the first packet, and of the highest one.
    first: u32,
    highest: u32,
    received: u32,
    /// Numbers of packets that were expected and received when the last report was made.
    reported: (u32, u32),
}

/// Jump ahead in sequence numbers that is too large for loss. A jump of this size or more means that the source has
/// restarted.
const JUMP_MAX: u16 = 3000;

impl Reception {
    /// Records a packet of the stream that has arrived.
    pub fn packet(&mut self, packet: DatagramKind, now: Duration) {
        match packet {
            DatagramKind::Control { ntp_middle: Some(middle), .. } => self.sender = Some((middle, now)),
            DatagramKind::Control { .. } => {}
            DatagramKind::Media { ssrc, sequence, .. } => {
                let known = self.source.as_mut().filter(|source| source.ssrc == ssrc);
                if !known.is_some_and(|source| source.take(sequence)) {
                    self.source = Some(RtpSource::new(ssrc, sequence));
                }
            }
        }
    }

    /// Returns a compound RTCP packet, or `None` if nothing has arrived yet. Its jitter is 0, because the rate of the
    /// media clock is not in RTP.
    pub fn report(&mut self, from: u32, now: Duration) -> Option<Vec<u8>> {
        let source = self.source.as_mut()?;
        let expected = source.highest.wrapping_sub(source.first).wrapping_add(1);
        let (expected_before, received_before) = source.reported;
        source.reported = (expected, source.received);
        let new = expected.wrapping_sub(expected_before);
        let lost = new.saturating_sub(source.received.wrapping_sub(received_before));
        let fraction_lost = (u64::from(lost) << 8).checked_div(new.into()).unwrap_or(0).min(255) as u8;
        let (last_report, delay) = match self.sender {
            Some((middle, at)) => (middle, in_65536ths(now.saturating_sub(at))),
            None => (0, 0),
        };
        let RtpSource { ssrc, highest, .. } = *source;
        let block = Block { ssrc, fraction_lost, highest, jitter: 0, last_report, delay };
        Some(receiver_report(from, &block, expected.saturating_sub(source.received).min(0x7f_ffff)))
    }
}

impl RtpSource {
    fn new(ssrc: u32, sequence: u16) -> Self {
        let first = u32::from(sequence);
        Self { ssrc, first, highest: first, received: 1, reported: (0, 0) }
    }

    /// Counts a packet. Returns whether it belongs to this source.
    fn take(&mut self, sequence: u16) -> bool {
        let ahead = sequence.wrapping_sub(self.highest as u16);
        // A packet that is a little behind the highest one is late. Any other jump means that the source has restarted.
        if ahead < JUMP_MAX {
            self.highest = self.highest.wrapping_add(ahead.into());
        } else if ahead < JUMP_MAX.wrapping_neg() {
            return false;
        }
        self.received = self.received.wrapping_add(1);
        true
    }
}

fn in_65536ths(time: Duration) -> u32 {
    u32::try_from((time.as_micros() << 16) / 1_000_000).unwrap_or(u32::MAX)
}

/// Returns the round trip to a receiver that reports. A sender report passed this host at `passed_us`. The receiver's
/// `block` names that sender report, and the delay from its arrival to the receiver's own report (RFC 3550, section
/// 6.4.1). `passed_us` and `now_us` are microseconds modulo 2^32.
pub fn round_trip(block: &Block, passed_us: u32, now_us: u32) -> Duration {
    let lay_us = (u64::from(block.delay) * 1_000_000) >> 16;
    let past_us = u64::from(now_us.wrapping_sub(passed_us));
    Duration::from_micros(past_us.saturating_sub(lay_us))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rtcp::walk;

    const NOW: Duration = Duration::from_secs(100);

    fn media(sequence: u16) -> DatagramKind {
        DatagramKind::Media { ssrc: 7, sequence, timestamp: 0 }
    }

    fn block(reception: &mut Reception, now: Duration) -> Block {
        let mut found = None;
        let bytes = reception.report(1, now).expect("something came");
        walk(&bytes, |block| found = Some(block)).expect("RTCP");
        found.expect("a block")
    }

    #[test]
    fn reported_loss_covers_the_time_since_the_last_report() {
        let mut reception = Reception::default();
        assert_eq!(reception.report(1, NOW), None);
        for sequence in (65_530..=65_535).chain(0..4) {
            reception.packet(media(sequence), NOW);
        }
        let first = block(&mut reception, NOW);
        assert_eq!((first.ssrc, first.highest, first.fraction_lost), (7, 0x0001_0003, 0), "over the end");
        // Five of ten packets arrive, and one of these is late.
        for sequence in [5, 9, 7, 11, 13] {
            reception.packet(media(sequence), NOW);
        }
        let second = block(&mut reception, NOW);
        assert_eq!((second.highest, second.fraction_lost), (0x0001_000d, 128));
        assert_eq!(block(&mut reception, NOW).fraction_lost, 0, "nothing was expected");
        reception.packet(media(30_000), NOW);
        assert_eq!(block(&mut reception, NOW).highest, 30_000, "begun anew");
        reception.packet(DatagramKind::Media { ssrc: 8, sequence: 1, timestamp: 0 }, NOW);
        assert_eq!(block(&mut reception, NOW).ssrc, 8);
    }

    #[test]
    fn sender_report_gives_the_round_trip() {
        let mut reception = Reception::default();
        reception.packet(media(1), NOW);
        reception.packet(DatagramKind::Control { ssrc: 7, ntp_middle: Some(0xabcd_0123) }, NOW);
        let block = block(&mut reception, NOW + Duration::from_millis(1500));
        assert_eq!((block.last_report, block.delay), (0xabcd_0123, 98_304));
        // The sender report passes the relay 10 ms before it reaches the receiver, and the receiver's report takes 20
        // ms to the relay: 30 ms together.
        let passed = 4_294_967_290;
        assert_eq!(round_trip(&block, passed, passed.wrapping_add(1_530_000)), Duration::from_millis(30));
        assert_eq!(round_trip(&block, passed, passed), Duration::ZERO, "it claims to have had it for longer");
    }
}
