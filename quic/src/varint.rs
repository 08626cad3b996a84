//! Variable-length integers of QUIC (RFC 9000, section 16).

/// The largest value that a QUIC varint can hold: 2^62 - 1.
pub const MAX: u64 = (1 << 62) - 1;

/// Returns the number of bytes that [`encode`] writes for `value`.
pub const fn len(value: u64) -> usize {
    match value {
        0..=0x3f => 1,
        0x40..=0x3fff => 2,
        0x4000..=0x3fff_ffff => 4,
        _ => 8,
    }
}

/// Appends `value` in its shortest form.
///
/// Values above [`MAX`] have no encoding; their top two bits would be read as a length. So callers pass only values
/// that were decoded from QUIC, or counts, which are smaller than [`MAX`].
pub fn encode(value: u64, out: &mut Vec<u8>) {
    debug_assert!(value <= MAX);
    let bytes = value.to_be_bytes();
    match len(value) {
        1 => out.push(bytes[7]),
        2 => out.extend_from_slice(&[bytes[6] | 0x40, bytes[7]]),
        4 => out.extend_from_slice(&[bytes[4] | 0x80, bytes[5], bytes[6], bytes[7]]),
        _ => {
            out.push(bytes[0] | 0xc0);
            out.extend_from_slice(&bytes[1..]);
        }
    }
}

/// Encodes `value` in all bytes of `out` (1, 2, 4 or 8). QUIC allows an encoding longer than needed.
///
/// Returns whether the value fits the width; `out` is untouched if it does not.
pub fn fill(value: u64, out: &mut [u8]) -> bool {
    let (tag, bits) = match out.len() {
        1 => (0x00, 6),
        2 => (0x40, 14),
        4 => (0x80, 30),
        8 => (0xc0, 62),
        _ => return false,
    };
    if value >> bits != 0 {
        return false;
    }
    let bytes = value.to_be_bytes();
    out.copy_from_slice(&bytes[8 - out.len()..]);
    out[0] |= tag;
    true
}

/// Removes one integer from the front of `input` and returns it. If `input` is too short, returns `None` and does not
/// change `input`.
pub fn decode(input: &mut &[u8]) -> Option<u64> {
    let first = *input.first()?;
    let len = 1 << (first >> 6);
    let (head, rest) = input.split_at_checked(len)?;
    let value = head[1..].iter().fold(u64::from(first & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    *input = rest;
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_matches_the_examples_of_rfc_9000() {
        let table: [(&[u8], u64); 5] = [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
            (&[0x40, 0x25], 37),
        ];
        for (mut bytes, value) in table {
            assert_eq!(decode(&mut bytes), Some(value));
            assert!(bytes.is_empty());
        }
    }

    #[test]
    fn quic_varints_of_every_width_round_trip() {
        for value in [0, 63, 64, 16_383, 16_384, (1 << 30) - 1, 1 << 30, MAX] {
            let mut out = Vec::new();
            encode(value, &mut out);
            assert_eq!(out.len(), len(value));
            let mut input = out.as_slice();
            assert_eq!(decode(&mut input), Some(value));
            let mut wide = [0; 8];
            assert!(fill(value, &mut wide));
            assert_eq!(decode(&mut wide.as_slice()), Some(value));
            let mut exact = vec![0; out.len()];
            assert!(fill(value, &mut exact));
            assert_eq!(exact, out);
            assert!(out.len() == 1 || !fill(value, &mut exact[..out.len() / 2]));
            let mut short = &out[..out.len() - 1];
            assert_eq!(decode(&mut short), None);
        }
    }
}
