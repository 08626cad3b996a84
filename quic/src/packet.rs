//! 1-RTT packets (RFC 9000, section 17.3.1; RFC 9001, section 5).

use std::{fmt, ops::Range};

use thiserror::Error;

use super::keys::{DirectionKey, HeaderKey, NotAuthentic, SAMPLE_LEN, TAG_LEN};

/// Length of every packet number that is sent, bytes. With 4 bytes the peer decodes the number even if many packets of
/// all senders are lost or late.
pub const NUMBER_LEN: usize = 4;

const LONG_HEADER: u8 = 0x80;
const FIXED: u8 = 0x40;
const KEY_PHASE: u8 = 0x04;
const NUMBER_LEN_MASK: u8 = 0x03;
/// Bits of the first byte that header protection covers in long and in short headers.
const LONG_PROTECTED: u8 = 0x0f;
const SHORT_PROTECTED: u8 = 0x1f;

/// A connection ID of QUIC version 1: 0 to 20 bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    len: u8,
    bytes: [u8; 20],
}

impl ConnectionId {
    /// Creates a connection ID. Returns `None` if `id` is longer than 20 bytes.
    pub fn new(id: &[u8]) -> Option<Self> {
        let mut bytes = [0; 20];
        bytes.get_mut(..id.len())?.copy_from_slice(id);
        Some(Self { len: id.len() as u8, bytes })
    }
}

impl std::ops::Deref for ConnectionId {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Returns the length of a packet's header and authentication tag together, bytes.
pub const fn overhead(id_len: usize) -> usize {
    header_len(id_len) + TAG_LEN
}

/// Returns the length of the header that [`start`] writes, bytes.
pub const fn header_len(id_len: usize) -> usize {
    1 + id_len + NUMBER_LEN
}

/// Returns the key phase bit of a key generation (RFC 9001, section 6).
pub const fn key_phase(generation: u16) -> bool {
    generation % 2 == 1
}

/// Writes a short header with space for the packet number. The caller appends at least one frame, then calls
/// [`finish`].
pub fn start(id: &ConnectionId, out: &mut Vec<u8>) {
    out.push(FIXED | (NUMBER_LEN as u8 - 1));
    out.extend_from_slice(id);
    // The packet number is not known yet. `finish` writes it.
    out.extend_from_slice(&[0; NUMBER_LEN]);
}

/// Numbers and seals the packet that starts at `at` and goes to the end of `out`, and appends its tag.
///
/// The packet number is drawn only here, so that no number is used for a packet that turns out to have no frames.
pub fn finish(
    out: &mut Vec<u8>,
    at: usize,
    id_len: usize,
    generation: u16,
    number: u64,
    key: &DirectionKey,
    header_key: &HeaderKey,
) {
    let header_len = header_len(id_len);
    let (header, payload) = out[at..].split_at_mut(header_len);
    // The key generation is known only now, together with the packet number, so `start` could not set the key phase.
    header[0] |= if key_phase(generation) { KEY_PHASE } else { 0 };
    header[header_len - NUMBER_LEN..].copy_from_slice(&(number as u32).to_be_bytes());
    let tag = key.seal(number, header, payload);
    out.extend_from_slice(&tag);
    protect(&mut out[at..], header_len - NUMBER_LEN, header_key);
}

/// Applies header protection to a sealed packet whose number starts at `number_at` (RFC 9001, section 5.4.1). Packets
/// too short for a sample, which QUIC does not allow, stay unchanged.
pub fn protect(packet: &mut [u8], number_at: usize, key: &HeaderKey) {
    let Some(mask) = mask(packet, number_at, key) else { return };
    let number_len = usize::from(packet[0] & NUMBER_LEN_MASK) + 1;
    apply(packet, number_at, number_len, mask);
}

/// Removes header protection and returns the length of the packet number, bytes.
pub fn unprotect(packet: &mut [u8], number_at: usize, key: &HeaderKey) -> Result<usize, OpenError> {
    let mask = mask(packet, number_at, key).ok_or(OpenError::Truncated)?;
    // The length of the number is itself protected, so the first byte is unmasked before `apply` knows how much to
    // unmask.
    let first = packet[0] ^ (mask[0] & protected_bits(packet[0]));
    let number_len = usize::from(first & NUMBER_LEN_MASK) + 1;
    apply(packet, number_at, number_len, mask);
    Ok(number_len)
}

fn mask(packet: &[u8], number_at: usize, key: &HeaderKey) -> Option<[u8; 5]> {
    // The sample begins where a packet number of 4 bytes would end, even if the packet number is shorter (RFC 9001,
    // section 5.4.2).
    let sample = packet.get(number_at + 4..)?.first_chunk::<SAMPLE_LEN>()?;
    Some(key.mask(sample))
}

fn apply(packet: &mut [u8], number_at: usize, number_len: usize, mask: [u8; 5]) {
    packet[0] ^= mask[0] & protected_bits(packet[0]);
    for (byte, mask) in packet[number_at..number_at + number_len].iter_mut().zip(&mask[1..]) {
        *byte ^= mask;
    }
}

const fn protected_bits(first: u8) -> u8 {
    if first & LONG_HEADER == 0 { SHORT_PROTECTED } else { LONG_PROTECTED }
}

/// Reason why a packet was not decrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum OpenError {
    #[error("the packet is not a 1-RTT packet")]
    NotShort,
    #[error("the packet is too short")]
    Truncated,
    #[error(transparent)]
    NotAuthentic(#[from] NotAuthentic),
}

/// A 1-RTT packet that [`open`] has decrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedPacket {
    /// The full packet number (RFC 9000, appendix A.3).
    pub number: u64,
    /// The key phase bit: the lowest bit of the key generation.
    pub key_phase: bool,
    /// Range of the packet's bytes that hold the decrypted frames.
    pub payload: Range<usize>,
}

/// Opens a 1-RTT packet in place. `expected` is one more than the largest packet number received. `key` returns the key
/// for the packet's key phase.
pub fn open<'k>(
    packet: &mut [u8],
    id_len: usize,
    expected: u64,
    header_key: &HeaderKey,
    key: impl FnOnce(bool) -> &'k DirectionKey,
) -> Result<OpenedPacket, OpenError> {
    if packet.first().is_none_or(|first| first & LONG_HEADER != 0) {
        return Err(OpenError::NotShort);
    }
    let number_at = 1 + id_len;
    let number_len = unprotect(packet, number_at, header_key)?;
    let key_phase = packet[0] & KEY_PHASE != 0;
    let header_len = number_at + number_len;
    let (header, sealed) = packet.split_at_mut(header_len);
    let truncated = header[number_at..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let number = decode_number(expected, truncated, number_len);
    let len = key(key_phase).open(number, header, sealed)?.len();
    Ok(OpenedPacket { number, key_phase, payload: header_len..header_len + len })
}

/// Returns the packet number closest to `expected` whose last `len` bytes are `truncated` (RFC 9000, appendix A.3).
pub fn decode_number(expected: u64, truncated: u64, len: usize) -> u64 {
    let window = 1 << (8 * len);
    let candidate = expected & !(window - 1) | truncated;
    // The candidate is moved by one window (the range of the truncated number) if that brings it closer to `expected`.
    if candidate + window / 2 <= expected && candidate + window < 1 << 62 {
        candidate + window
    } else if candidate > expected + window / 2 && candidate >= window {
        candidate - window
    } else {
        candidate
    }
}

#[cfg(test)]
mod tests;
