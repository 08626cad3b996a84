//! What a receiver reports of the one source that it hears (RFC 3550, sections 6.4.1, A.1 and A.3), where whoever plays the media
//! does not report itself.

use std::time::Duration;

use super::{
    rtcp::{Block, receiver_report},
    rtp::Packet,
};

/// Times are of one clock that does not go back.
#[derive(Clone, Debug, Default)]
pub struct Reception {
    source: Option<Source>,
    /// The latest sender report, and when it came.
    sender: Option<(u32, Duration)>,
}

#[derive(Clone, Debug)]
struct Source {
    ssrc: u32,
    /// Extended sequence numbers.
    first: u32,
    highest: u32,
    received: u32,
    /// Expected and received when the last report was made.
    reported: (u32, u32),
}

/// Ahead of the highest by more, it is a source that began anew.
const JUMP_MAX: u16 = 3000;

impl Reception {
    pub fn packet(&mut self, packet: Packet, now: Duration) {
        match packet {
            Packet::Control { ntp_middle: Some(middle), .. } => self.sender = Some((middle, now)),
            Packet::Control { .. } => {}
            Packet::Media { ssrc, sequence, .. } => {
                let known = self.source.as_mut().filter(|source| source.ssrc == ssrc);
                if !known.is_some_and(|source| source.take(sequence)) {
                    self.source = Some(Source::new(ssrc, sequence));
                }
            }
        }
    }

    /// A compound packet of RTCP; `None`: nothing has come yet. Its jitter is 0: the clock that it would be counted by is not in RTP.
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
        let (ssrc, highest) = (source.ssrc, source.highest);
        let block = Block { ssrc, fraction_lost, highest, jitter: 0, last_report, delay };
        Some(receiver_report(from, &block, expected.saturating_sub(source.received).min(0x7f_ffff)))
    }
}

impl Source {
    fn new(ssrc: u32, sequence: u16) -> Self {
        let first = u32::from(sequence);
        Self { ssrc, first, highest: first, received: 1, reported: (0, 0) }
    }

    /// Whether it is one of this source's.
    fn take(&mut self, sequence: u16) -> bool {
        let ahead = sequence.wrapping_sub(self.highest as u16);
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

/// The round trip to who reports: a sender report passed here at a time, and came back so much later but for the time that it
/// lay there (RFC 3550, section 6.4.1). `passed_us`: of that report, modulo 2^32 microseconds, as `now_us`.
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

    fn media(sequence: u16) -> Packet {
        Packet::Media { ssrc: 7, sequence, timestamp: 0 }
    }

    fn block(reception: &mut Reception, now: Duration) -> Block {
        let mut found = None;
        let bytes = reception.report(1, now).expect("something came");
        walk(&bytes, |block| found = Some(block)).expect("RTCP");
        found.expect("a block")
    }

    #[test]
    fn loss_is_that_since_the_last_report() {
        let mut reception = Reception::default();
        assert_eq!(reception.report(1, NOW), None);
        for sequence in (65_530..=65_535).chain(0..4) {
            reception.packet(media(sequence), NOW);
        }
        let first = block(&mut reception, NOW);
        assert_eq!((first.ssrc, first.highest, first.fraction_lost), (7, 0x0001_0003, 0), "over the end");
        // Of 10 every second one; one of them late.
        for sequence in [5, 9, 7, 11, 13] {
            reception.packet(media(sequence), NOW);
        }
        let second = block(&mut reception, NOW);
        assert_eq!((second.highest, second.fraction_lost), (0x0001_000d, 128));
        assert_eq!(block(&mut reception, NOW).fraction_lost, 0, "nothing was expected");
        reception.packet(media(30_000), NOW);
        assert_eq!(block(&mut reception, NOW).highest, 30_000, "begun anew");
        reception.packet(Packet::Media { ssrc: 8, sequence: 1, timestamp: 0 }, NOW);
        assert_eq!(block(&mut reception, NOW).ssrc, 8);
    }

    #[test]
    fn a_sender_report_tells_the_round_trip() {
        let mut reception = Reception::default();
        reception.packet(media(1), NOW);
        reception.packet(Packet::Control { ssrc: 7, ntp_middle: Some(0xabcd_0123) }, NOW);
        let block = block(&mut reception, NOW + Duration::from_millis(1500));
        assert_eq!((block.last_report, block.delay), (0xabcd_0123, 98_304));
        // It passed the relay 10 ms before it came, and the report takes 20 ms back.
        let passed = 4_294_967_290;
        assert_eq!(round_trip(&block, passed, passed.wrapping_add(1_530_000)), Duration::from_millis(30));
        assert_eq!(round_trip(&block, passed, passed), Duration::ZERO, "it claims to have had it for longer");
    }
}
