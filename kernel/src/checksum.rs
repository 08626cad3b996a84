//! The Internet checksum.

/// Returns the Internet checksum (RFC 1071).
pub fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match *pair {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(u16::from_be_bytes([high, 0])),
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    // Carries are added to the low 16 bits until no carry remains.
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
