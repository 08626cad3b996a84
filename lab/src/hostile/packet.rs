//! Builds and parses QUIC packets of all encryption levels, with the keys of `millrace-quic`, and frames that
//! `millrace-quic` itself does not write.

use std::{collections::BTreeSet, sync::Arc};

use millrace_quic::{
    keys::{DirectionKey, HeaderKey, KeySuite, TrafficSecret, initial_secrets},
    packet::{self, ConnectionId},
    varint,
};
use parking_lot::Mutex;
use rustls::{CipherSuite, KeyLog};

/// Encryption levels, each with its packet number space (RFC 9001, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptionLevel {
    Initial,
    Handshake,
    OneRtt,
}

pub const LEVELS: [EncryptionLevel; 3] =
    [EncryptionLevel::Initial, EncryptionLevel::Handshake, EncryptionLevel::OneRtt];

const VERSION: [u8; 4] = 1u32.to_be_bytes();
const RETRY: u8 = 0b11;
const KEY_PHASE: u8 = 0x04;
/// Minimum length of a datagram with an Initial packet, bytes (RFC 9000, section 14.1).
pub const MIN_INITIAL: usize = 1200;

/// Keys of one encryption level: our own to encrypt, the peer's to decrypt.
pub struct LevelKeys {
    ours: (TrafficSecret, DirectionKey, HeaderKey),
    theirs: (TrafficSecret, DirectionKey, HeaderKey),
    /// Number of key updates so far: of our own keys, and of the peer's.
    generations: [u16; 2],
}

impl LevelKeys {
    fn new(ours: TrafficSecret, theirs: TrafficSecret) -> Self {
        let of = |secret: TrafficSecret| {
            let keys = (secret.packet_key(), secret.header_key());
            (secret, keys.0, keys.1)
        };
        Self { ours: of(ours), theirs: of(theirs), generations: [0; 2] }
    }

    /// Returns the keys for Initial packets, derived from the client's first destination connection ID.
    pub fn initial(id: &[u8]) -> Self {
        let (client, server) = initial_secrets(id);
        Self::new(client, server)
    }

    /// Encrypts with the next 1-RTT keys from now on, provided that the peer already uses the current keys (RFC 9001,
    /// section 6.5).
    pub fn update(&mut self) {
        let [ours, theirs] = self.generations;
        if ours == theirs {
            self.advance();
        }
    }

    fn advance(&mut self) {
        self.generations[0] += 1;
        self.ours.0 = self.ours.0.next();
        self.ours.1 = self.ours.0.packet_key();
    }

    /// Decrypts a packet whose header protection has been removed. A 1-RTT packet with the other key phase may use the
    /// next keys. If so, our own keys are updated as well (RFC 9001, section 6).
    fn open(&mut self, level: EncryptionLevel, number: u64, header: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let phase = header[0] & KEY_PHASE != 0;
        let open = |key: &DirectionKey| {
            let mut payload = sealed.to_vec();
            let len = key.open(number, header, &mut payload).ok()?.len();
            payload.truncate(len);
            Some(payload)
        };
        let [ours, theirs] = self.generations;
        if level != EncryptionLevel::OneRtt || phase == packet::key_phase(theirs) {
            return open(&self.theirs.1);
        }
        // The packet has the other key phase. Try the next keys, and keep them only if they decrypt the packet.
        let next = self.theirs.0.next();
        let opened = open(&next.packet_key())?;
        self.generations[1] = theirs + 1;
        self.theirs.1 = next.packet_key();
        self.theirs.0 = next;
        // The peer began this key update, so our own keys are updated too.
        if ours == theirs {
            self.advance();
        }
        Some(opened)
    }
}

/// Handshake and traffic secrets of client and server, as TLS reports them.
#[derive(Default)]
pub struct TlsSecrets(Mutex<[Option<Vec<u8>>; 4]>);

impl TlsSecrets {
    const LABELS: [&str; 4] = [
        "CLIENT_HANDSHAKE_TRAFFIC_SECRET",
        "SERVER_HANDSHAKE_TRAFFIC_SECRET",
        "CLIENT_TRAFFIC_SECRET_0",
        "SERVER_TRAFFIC_SECRET_0",
    ];

    /// Returns the keys of an encryption level; `None` until TLS has reported their secrets.
    pub fn keys(&self, level: EncryptionLevel, suite: CipherSuite) -> Option<LevelKeys> {
        let suite = match suite {
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => KeySuite::ChaCha20Poly1305,
            CipherSuite::TLS13_AES_128_GCM_SHA256 => KeySuite::Aes128Gcm,
            CipherSuite::TLS13_AES_256_GCM_SHA384 => KeySuite::Aes256Gcm,
            _ => return None,
        };
        let first = if level == EncryptionLevel::Handshake { 0 } else { 2 };
        let secrets = self.0.lock();
        let secret = |index: usize| TrafficSecret::new(suite, secrets[index].as_deref()?);
        Some(LevelKeys::new(secret(first)?, secret(first + 1)?))
    }
}

impl std::fmt::Debug for TlsSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsSecrets").finish_non_exhaustive()
    }
}

impl KeyLog for TlsSecrets {
    fn log(&self, label: &str, _client_random: &[u8], secret: &[u8]) {
        if let Some(index) = Self::LABELS.iter().position(|known| *known == label) {
            self.0.lock()[index] = Some(secret.to_vec());
        }
    }
}

/// TLS secrets, shared between TLS and the connection.
pub type SharedSecrets = Arc<TlsSecrets>;

/// Connection IDs for a packet's header, and the token of a Retry.
pub struct PacketRoute<'a> {
    pub to: &'a ConnectionId,
    pub from: &'a ConnectionId,
    pub token: &'a [u8],
}

/// Builds an encrypted packet that contains `frames`.
pub fn seal(
    level: EncryptionLevel,
    route: &PacketRoute<'_>,
    number: u64,
    frames: &[u8],
    keys: &LevelKeys,
) -> Vec<u8> {
    let (_, key, header_key) = &keys.ours;
    let mut out = Vec::with_capacity(frames.len() + 128);
    if level == EncryptionLevel::OneRtt {
        packet::start(route.to, &mut out);
        out.extend_from_slice(frames);
        packet::finish(&mut out, 0, route.to.len(), keys.generations[0], number, key, header_key);
        return out;
    }
    let kind = if level == EncryptionLevel::Initial { 0 } else { 2 };
    // Write a long header with the fixed bit set.
    out.push(0xc0 | kind << 4 | (packet::NUMBER_LEN as u8 - 1));
    out.extend_from_slice(&VERSION);
    for id in [route.to, route.from] {
        out.push(id.len() as u8);
        out.extend_from_slice(id);
    }
    if level == EncryptionLevel::Initial {
        varint::encode(route.token.len() as u64, &mut out);
        out.extend_from_slice(route.token);
    }
    // The length covers the packet number and the AEAD's tag of 16 bytes too.
    let length = packet::NUMBER_LEN + frames.len() + 16;
    varint::encode(length as u64, &mut out);
    let number_at = out.len();
    out.extend_from_slice(&(number as u32).to_be_bytes());
    let header_len = out.len();
    out.extend_from_slice(frames);
    let (header, payload) = out.split_at_mut(header_len);
    let tag = key.seal(number, header, payload);
    out.extend_from_slice(&tag);
    packet::protect(&mut out, number_at, header_key);
    out
}

/// Content of one packet of a datagram.
pub enum DatagramContent {
    Packet { level: EncryptionLevel, number: u64, from: Option<ConnectionId>, frames: Vec<u8> },
    Retry { from: ConnectionId, token: Vec<u8> },
}

/// Error of a long header that ends too early.
struct TruncatedHeader;

/// Removes the next packet from a datagram and decrypts it. Skips packets that cannot be decrypted. Returns `None` at
/// the end.
pub fn next(
    datagram: &mut Vec<u8>,
    id_len: usize,
    keys: &mut [Option<LevelKeys>; 3],
    expected: &[u64; 3],
) -> Option<DatagramContent> {
    while let Some(first) = datagram.first().copied() {
        let (level, mut packet, number_at, from) = if first & 0x80 == 0 {
            // A short header has no length, so its packet takes the rest of the datagram.
            (EncryptionLevel::OneRtt, std::mem::take(datagram), 1 + id_len, None)
        } else {
            match long_header(datagram) {
                Ok(LongHeaderPacket::Packet { level, end, number_at, from }) => {
                    let rest = datagram.split_off(end);
                    (level, std::mem::replace(datagram, rest), number_at, Some(from))
                }
                Ok(LongHeaderPacket::Retry(retry)) => {
                    // A Retry packet has no length either, so it takes the rest of the datagram.
                    datagram.clear();
                    return Some(retry);
                }
                Err(TruncatedHeader) => return None,
            }
        };
        let Some(keys) = &mut keys[level as usize] else { continue };
        let Ok(number_len) = packet::unprotect(&mut packet, number_at, &keys.theirs.2) else { continue };
        let (header, sealed) = packet.split_at(number_at + number_len);
        let truncated = header[number_at..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let number = packet::decode_number(expected[level as usize], truncated, number_len);
        if let Some(frames) = keys.open(level, number, header, sealed) {
            return Some(DatagramContent::Packet { level, number, from, frames });
        }
    }
    None
}

enum LongHeaderPacket {
    Packet { level: EncryptionLevel, end: usize, number_at: usize, from: ConnectionId },
    Retry(DatagramContent),
}

fn long_header(datagram: &[u8]) -> Result<LongHeaderPacket, TruncatedHeader> {
    // Skip the first byte and the version.
    let mut rest = datagram.get(5..).ok_or(TruncatedHeader)?;
    take_id(&mut rest)?;
    let from = take_id(&mut rest)?;
    let kind = datagram[0] >> 4 & 0b11;
    if kind == RETRY {
        // The last 16 bytes are the integrity tag, which is not checked.
        let token = rest.split_last_chunk::<16>().ok_or(TruncatedHeader)?.0.to_vec();
        return Ok(LongHeaderPacket::Retry(DatagramContent::Retry { from, token }));
    }
    let level = match kind {
        0 => {
            // Skip the token, which only Initial packets have.
            let len = varint::decode(&mut rest).ok_or(TruncatedHeader)?;
            rest = rest.get(usize::try_from(len).map_err(|_| TruncatedHeader)?..).ok_or(TruncatedHeader)?;
            EncryptionLevel::Initial
        }
        _ => EncryptionLevel::Handshake,
    };
    let length =
        varint::decode(&mut rest).and_then(|len| usize::try_from(len).ok()).ok_or(TruncatedHeader)?;
    let number_at = datagram.len() - rest.len();
    match number_at.checked_add(length) {
        Some(end) if end <= datagram.len() => Ok(LongHeaderPacket::Packet { level, end, number_at, from }),
        _ => Err(TruncatedHeader),
    }
}

fn take_id(rest: &mut &[u8]) -> Result<ConnectionId, TruncatedHeader> {
    let len = usize::from(*rest.split_off_first().ok_or(TruncatedHeader)?);
    let (id, behind) = rest.split_at_checked(len).ok_or(TruncatedHeader)?;
    *rest = behind;
    ConnectionId::new(id).ok_or(TruncatedHeader)
}

const MAX_ACK_RANGES: usize = 64;

/// Appends an ACK frame for `numbers`. If there are too many ranges, the oldest are left out.
pub fn write_ack(numbers: &BTreeSet<u64>, out: &mut Vec<u8>) {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for number in numbers.iter().rev() {
        let full = ranges.len() == MAX_ACK_RANGES;
        match ranges.last_mut() {
            Some((first, _)) if *number + 1 == *first => *first = *number,
            _ if full => break,
            _ => ranges.push((*number, *number)),
        }
    }
    let Some((first, last)) = ranges.first().copied() else { return };
    // Type, largest number, delay, number of further ranges, length of the first range.
    for field in [0x02, last, 0, ranges.len() as u64 - 1, last - first] {
        varint::encode(field, out);
    }
    // Each further range: the gap before it and its length, both minus one (RFC 9000, section 19.3.1).
    for pair in ranges.windows(2) {
        varint::encode(pair[0].0 - pair[1].1 - 2, out);
        varint::encode(pair[1].1 - pair[1].0, out);
    }
}

/// Appends a frame whose fields are all variable-length integers, starting with the type.
pub fn write_fields(fields: &[u64], out: &mut Vec<u8>) {
    fields.iter().for_each(|field| varint::encode(*field, out));
}

/// Appends a NEW_CONNECTION_ID frame that asks the peer to retire all earlier IDs.
pub fn write_new_id(sequence: u64, id: &ConnectionId, out: &mut Vec<u8>) {
    write_fields(&[0x18, sequence, sequence, id.len() as u64], out);
    out.extend_from_slice(id);
    out.extend_from_slice(&[0; 16]); // stateless reset token
}

/// Appends a CRYPTO frame with data at this offset.
pub fn write_crypto(offset: u64, data: &[u8], out: &mut Vec<u8>) {
    write_fields(&[0x06, offset, data.len() as u64], out);
    out.extend_from_slice(data);
}
