//! Payloads for measurements: each has a sequence number, the time of sending, and a pattern to check.

use std::time::Duration;

use bytes::Bytes;
use nix::time::{ClockId, clock_gettime};

/// The first bytes of a payload, which mark it as made by this module.
const MAGIC: [u8; 8] = *b"millrace";
/// Length of the shortest payload, in bytes. Such a payload has only `MAGIC`, the object's sequence number, its sending
/// time, and the number of objects of the track.
pub const MIN_LEN: usize = 32;

/// Returns the time of `CLOCK_MONOTONIC`. All processes of a host share it, in any network namespace, so a subscriber
/// can compute the latency of an object from the sending time in it.
pub fn now() -> Duration {
    // `CLOCK_MONOTONIC` always exists on Linux.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// The fields of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The object's number in its track, from 0.
    pub sequence: u64,
    /// The time of [`now`] when the object was handed to the transport.
    pub sent: Duration,
    /// Number of objects that the track will have, or 0 if unknown.
    pub total: u64,
}

/// Returns the 64-bit word with index `index` of the pattern that fills a payload after its stamp (sequence number and
/// sending time). The word depends on the object's sequence number, too.
fn word(sequence: u64, index: u64) -> [u8; 8] {
    // The factor is 2^64 divided by the golden ratio. Multiplication by it spreads successive numbers over all bits.
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    (sequence.wrapping_mul(ODD) ^ index).wrapping_mul(ODD).to_le_bytes()
}

/// Makes a payload of `length` bytes, at least [`MIN_LEN`].
pub fn build(stamp: Stamp, length: usize) -> Bytes {
    let mut out = Vec::with_capacity(length + 8);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&stamp.sequence.to_le_bytes());
    out.extend_from_slice(&(stamp.sent.as_nanos() as u64).to_le_bytes());
    out.extend_from_slice(&stamp.total.to_le_bytes());
    for index in 0.. {
        if out.len() >= length {
            break;
        }
        out.extend_from_slice(&word(stamp.sequence, index));
    }
    out.truncate(length.max(MIN_LEN));
    out.into()
}

/// The reason why a payload is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadFault {
    /// The payload has no stamp: it does not begin with sequence number and time as this module writes them.
    Unstamped,
    /// The payload has a stamp, but the pattern after the stamp is not the expected one.
    Corrupted(Stamp),
}

/// Reads and checks a payload.
pub fn check(payload: &[u8]) -> Result<Stamp, PayloadFault> {
    let Some((head, pattern)) = payload.split_first_chunk::<MIN_LEN>() else {
        return Err(PayloadFault::Unstamped);
    };
    let (words, _) = head.as_chunks::<8>();
    let &[magic, sequence, sent, total] = words else { return Err(PayloadFault::Unstamped) };
    if magic != MAGIC {
        return Err(PayloadFault::Unstamped);
    }
    let stamp = Stamp {
        sequence: u64::from_le_bytes(sequence),
        sent: Duration::from_nanos(u64::from_le_bytes(sent)),
        total: u64::from_le_bytes(total),
    };
    let is_intact = (0u64..).zip(pattern.chunks(8)).all(|(index, bytes)| {
        let expected = word(stamp.sequence, index);
        expected.starts_with(bytes)
    });
    match is_intact {
        true => Ok(stamp),
        false => Err(PayloadFault::Corrupted(stamp)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_payload_passes_check_at_every_length() {
        let stamp = Stamp { sequence: 7, sent: Duration::from_nanos(123), total: 9 };
        for length in [0, 31, 32, 33, 39, 40, 41, 1200] {
            let payload = build(stamp, length);
            assert_eq!(payload.len(), length.max(MIN_LEN));
            assert_eq!(check(&payload), Ok(stamp));
        }
    }

    #[test]
    fn change_of_any_byte_of_the_pattern_is_detected() {
        let stamp = Stamp { sequence: 7, sent: Duration::ZERO, total: 0 };
        let payload = build(stamp, 100);
        for at in MIN_LEN..100 {
            let mut damaged = payload.to_vec();
            damaged[at] ^= 1;
            assert_eq!(check(&damaged), Err(PayloadFault::Corrupted(stamp)));
        }
        assert_eq!(check(b"short"), Err(PayloadFault::Unstamped));
        assert_eq!(check(&[0; 100]), Err(PayloadFault::Unstamped));
    }
}
