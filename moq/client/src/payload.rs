//! Payloads that can be measured and checked: a sequence number, the time of sending, and a pattern.

use std::time::Duration;

use bytes::Bytes;
use nix::time::{ClockId, clock_gettime};

/// Marks a payload as one of ours.
const MAGIC: [u8; 8] = *b"millrace";
/// The shortest payload, in bytes: magic, sequence number, time, total.
pub const MIN_LEN: usize = 32;

/// `CLOCK_MONOTONIC`: all processes of a host share it, whatever their network namespaces, so that a publisher's stamps
/// can be compared with a subscriber's clock.
pub fn now() -> Duration {
    // It always exists on Linux.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// What a payload says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Counts the objects of a track from 0.
    pub sequence: u64,
    /// [`now`] when it was handed to the transport.
    pub sent: Duration,
    /// How many objects the track will have, or 0 if that is not known.
    pub total: u64,
}

/// The pattern behind the stamp: every word depends on the sequence number and its place.
fn word(sequence: u64, index: u64) -> [u8; 8] {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    (sequence.wrapping_mul(ODD) ^ index).wrapping_mul(ODD).to_le_bytes()
}

/// A payload of `length` bytes, at least [`MIN_LEN`].
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

/// What is wrong with a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// It has no stamp.
    Unstamped,
    /// It is ours, but was changed on the way.
    Corrupted(Stamp),
}

/// Reads and checks a payload.
pub fn check(payload: &[u8]) -> Result<Stamp, Bad> {
    let Some((head, pattern)) = payload.split_first_chunk::<MIN_LEN>() else { return Err(Bad::Unstamped) };
    let (words, _) = head.as_chunks::<8>();
    let &[magic, sequence, sent, total] = words else { return Err(Bad::Unstamped) };
    if magic != MAGIC {
        return Err(Bad::Unstamped);
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
        false => Err(Bad::Corrupted(stamp)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_checks_at_every_length() {
        let stamp = Stamp { sequence: 7, sent: Duration::from_nanos(123), total: 9 };
        for length in [0, 31, 32, 33, 39, 40, 41, 1200] {
            let payload = build(stamp, length);
            assert_eq!(payload.len(), length.max(MIN_LEN));
            assert_eq!(check(&payload), Ok(stamp));
        }
    }

    #[test]
    fn every_changed_byte_of_the_pattern_is_found() {
        let stamp = Stamp { sequence: 7, sent: Duration::ZERO, total: 0 };
        let payload = build(stamp, 100);
        for at in MIN_LEN..100 {
            let mut damaged = payload.to_vec();
            damaged[at] ^= 1;
            assert_eq!(check(&damaged), Err(Bad::Corrupted(stamp)));
        }
        assert_eq!(check(b"short"), Err(Bad::Unstamped));
        assert_eq!(check(&[0; 100]), Err(Bad::Unstamped));
    }
}
