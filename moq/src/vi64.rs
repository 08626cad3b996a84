//! Variable-length integers of MoQ Transport (draft-18, section 1.4.1).
//!
//! The number of leading 1 bits of the first byte is the number of bytes that follow it; unlike a QUIC
//! varint, all 64-bit values have an encoding. Longer forms than necessary are legal.

/// Length of the longest encoding, in bytes.
pub const MAX_LEN: usize = 9;

/// Returns the number of bytes that [`encode`] writes for `value`: 1 to 9.
pub const fn len(value: u64) -> usize {
    match u64::BITS - value.leading_zeros() {
        0..=7 => 1,
        bits @ 8..=56 => bits.div_ceil(7) as usize,
        _ => MAX_LEN,
    }
}

/// Appends `value` in its shortest form.
pub fn encode(value: u64, out: &mut Vec<u8>) {
    encode_in(value, len(value), out);
}

/// Appends `value` in `width` bytes: at least the length of its shortest form, at most [`MAX_LEN`].
pub fn encode_in(value: u64, width: usize, out: &mut Vec<u8>) {
    debug_assert!((len(value)..=MAX_LEN).contains(&width));
    let bytes = value.to_be_bytes();
    match width {
        MAX_LEN => {
            out.push(0xff);
            out.extend_from_slice(&bytes);
        }
        _ => {
            let start = out.len();
            out.extend_from_slice(&bytes[8 - width..]);
            // The first byte begins with `width - 1` one bits, and the value has zeros in the place of these bits.
            out[start] |= !(0xffu8.checked_shr(width as u32 - 1).unwrap_or(0));
        }
    }
}

/// Returns the length in bytes of the encoding that begins with `first`.
pub const fn encoded_len(first: u8) -> usize {
    first.leading_ones() as usize + 1
}

/// Removes one integer from the front of `input` and returns it. If the integer is incomplete, returns `None` and
/// leaves `input` unchanged.
pub fn decode(input: &mut &[u8]) -> Option<u64> {
    let first = *input.first()?;
    let len = encoded_len(first);
    let (head, rest) = input.split_at_checked(len)?;
    // The first byte contains `8 - len` bits of the value, or none if `len` is 8 or more.
    let top = u64::from(first & 0xffu8.checked_shr(len as u32).unwrap_or(0));
    let value = head[1..].iter().fold(top, |value, byte| value << 8 | u64::from(*byte));
    *input = rest;
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn encodings_of_all_widths_decode_to_the_same_value(value: u64, extra in 0usize..9) {
            let width = (len(value) + extra).min(MAX_LEN);
            let mut out = Vec::new();
            encode_in(value, width, &mut out);
            prop_assert_eq!(out.len(), width);
            prop_assert_eq!(decode(&mut &out[..]), Some(value));
        }
    }

    #[test]
    fn vi64_examples_of_the_draft_are_encoded() {
        let table: [(&[u8], u64); 8] = [
            (&[0x25], 37),
            (&[0x80, 0x25], 37),
            (&[0xbb, 0xbd], 15_293),
            (&[0xed, 0x7f, 0x3e, 0x7d], 226_442_877),
            (&[0xfa, 0xa1, 0xa0, 0xe4, 0x03, 0xd8], 2_893_212_287_960),
            (&[0xfc, 0x89, 0x98, 0xab, 0xc6, 0x6b, 0xc0], 151_288_809_941_952),
            (&[0xfe, 0xfa, 0x31, 0x8f, 0xa8, 0xe3, 0xca, 0x11], 70_423_237_261_249_041),
            (&[0xff; 9], u64::MAX),
        ];
        for (bytes, value) in table {
            let mut input = bytes;
            assert_eq!(decode(&mut input), Some(value));
            assert!(input.is_empty());
            if bytes != [0x80, 0x25] {
                let mut out = Vec::new();
                encode(value, &mut out);
                assert_eq!(out, bytes);
            }
        }
    }

    #[test]
    fn vi64_encoding_grows_by_one_byte_per_seven_bits() {
        for bits in 1..=9u32 {
            let max = if bits == 9 { u64::MAX } else { (1 << (7 * bits)) - 1 };
            assert_eq!(len(max), bits as usize, "{max:#x}");
            if bits < 9 {
                assert_eq!(len(max + 1), bits as usize + 1, "{max:#x} + 1");
            }
        }
        assert_eq!(len(0), 1);
    }

    proptest! {
        #[test]
        fn vi64_integers_round_trip(value: u64, shift in 0..64u32) {
            let value = value >> shift;
            let mut out = Vec::new();
            encode(value, &mut out);
            prop_assert_eq!(out.len(), len(value));
            prop_assert_eq!(encoded_len(out[0]), out.len());
            let mut short = &out[..out.len() - 1];
            prop_assert_eq!(decode(&mut short), None);
            prop_assert_eq!(short.len(), out.len() - 1);
            let mut input = out.as_slice();
            prop_assert_eq!(decode(&mut input), Some(value));
            prop_assert!(input.is_empty());
        }
    }
}
