//! QUIC packets and frames of a peer of the relay program, made by the userspace implementation.

use fastrand::Rng;
use millrace_quic::frame;
use millrace_quic::keys::{DirectionKey, HeaderKey, KeySuite, TrafficSecret};
use millrace_quic::keystream::KeystreamKey;
use millrace_quic::packet::{self, ConnectionId};

use super::{Compute, QuicKeys};

pub const SUITES: [KeySuite; 3] = [KeySuite::ChaCha20Poly1305, KeySuite::Aes128Gcm, KeySuite::Aes256Gcm];
/// How many generations of keys a connection has, for key updates.
const GENERATIONS: usize = 4;

/// The keys of one direction of a connection, of all generations.
pub struct DirectionKeys {
    pub id: Vec<u8>,
    secrets: Vec<TrafficSecret>,
    keys: Vec<DirectionKey>,
    header: HeaderKey,
}

impl DirectionKeys {
    pub fn new(suite: KeySuite, id_len: usize, rng: &mut Rng) -> Self {
        let first = TrafficSecret::new(suite, &bytes(suite.secret_len(), rng)).expect("a secret");
        let secrets: Vec<_> =
            std::iter::successors(Some(first), |secret| Some(secret.next())).take(GENERATIONS).collect();
        let keys = secrets.iter().map(TrafficSecret::packet_key).collect();
        Self { id: bytes(id_len, rng), header: secrets[0].header_key(), secrets, keys }
    }

    /// Returns the keys of a generation as the kernel program uses them.
    pub fn kernel_keys(&self, generation: u16) -> QuicKeys {
        let material = self.secrets[usize::from(generation)].key_material();
        let header = self.secrets[0].key_material().header;
        match self.secrets[0].suite() {
            KeySuite::ChaCha20Poly1305 => QuicKeys::chacha20_poly1305(&material.key, &material.iv, &header),
            KeySuite::Aes128Gcm => QuicKeys::aes128_gcm(
                material.key.first_chunk().expect("16 bytes"),
                &material.iv,
                header.first_chunk().expect("16 bytes"),
            ),
            KeySuite::Aes256Gcm => QuicKeys::aes256_gcm(&material.key, &material.iv, &header),
        }
    }

    /// Returns a function that computes the keystream of a packet from its key generation and packet number, without
    /// the packet.
    pub fn keystreams(&self) -> impl Compute + use<> {
        let keys: Vec<_> = self.secrets.iter().map(KeystreamKey::new).collect();
        move |generation, number, once, text| {
            keys[usize::from(generation)].compute(number, once, text);
            true
        }
    }

    /// Returns a packet as the userspace builder makes it. `word` is its key generation and its packet number.
    pub fn build(&self, word: (u16, u64), frames: &[u8]) -> Vec<u8> {
        let id = ConnectionId::new(&self.id).expect("a connection ID");
        let mut out = Vec::new();
        packet::start(&id, &mut out);
        out.extend_from_slice(frames);
        packet::finish(&mut out, 0, id.len(), word.0, word.1, &self.keys[usize::from(word.0)], &self.header);
        out
    }

    /// Returns a packet as any peer may send it, with 1 to 4 bytes of its number.
    pub fn seal(&self, generation: u16, number: u64, number_len: usize, frames: &[u8]) -> Vec<u8> {
        self.seal_with_bits(0, generation, number, number_len, frames)
    }

    /// Returns a packet as [`Self::seal`] does, with further bits set in the first byte.
    pub fn seal_with_bits(
        &self,
        bits: u8,
        generation: u16,
        number: u64,
        number_len: usize,
        frames: &[u8],
    ) -> Vec<u8> {
        let phase = if packet::key_phase(generation) { 0x04 } else { 0 };
        let mut out = vec![0x40 | bits | phase | (number_len as u8 - 1)];
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&number.to_be_bytes()[8 - number_len..]);
        let header = out.clone();
        let mut payload = frames.to_vec();
        let tag = self.keys[usize::from(generation)].seal(number, &header, &mut payload);
        out.extend(payload);
        out.extend(tag);
        packet::protect(&mut out, 1 + self.id.len(), &self.header);
        out
    }
}

pub fn bytes(len: usize, rng: &mut Rng) -> Vec<u8> {
    std::iter::repeat_with(|| rng.u8(..)).take(len).collect()
}

/// A part of a stream: consecutive bytes at a stream offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamPart {
    pub stream: u64,
    pub offset: u64,
    pub data: Vec<u8>,
    pub fin: bool,
}

impl StreamPart {
    /// Returns the STREAM frame in the encoding of the relay.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        frame::write_stream(self.stream, self.offset, &self.data, self.fin, &mut out);
        out
    }
}

/// Returns a varint of `width` bytes (1, 2, 4 or 8), or the shortest that has room for the value.
pub fn varint(value: u64, width: usize) -> Vec<u8> {
    let least = match value {
        0..0x40 => 1,
        0x40..0x4000 => 2,
        0x4000..0x4000_0000 => 4,
        _ => 8,
    };
    let width = width.max(least);
    let mut out = value.to_be_bytes()[8 - width..].to_vec();
    out[0] |= (width.trailing_zeros() as u8) << 6;
    out
}

/// Returns a varint of a random length.
pub fn any_varint(value: u64, rng: &mut Rng) -> Vec<u8> {
    varint(value, 1 << rng.u32(..4))
}

/// Returns a STREAM frame in a random valid encoding. Only the last frame of a packet may have no length.
pub fn any_stream(chunk: &StreamPart, last: bool, rng: &mut Rng) -> Vec<u8> {
    let with_offset = chunk.offset != 0 || rng.bool();
    let with_len = !last || rng.bool();
    let kind = 0x08 | u64::from(chunk.fin) | u64::from(with_len) << 1 | u64::from(with_offset) << 2;
    let mut out = varint(kind, 1);
    out.extend(any_varint(chunk.stream, rng));
    if with_offset {
        out.extend(any_varint(chunk.offset, rng));
    }
    if with_len {
        out.extend(any_varint(chunk.data.len() as u64, rng));
    }
    out.extend(&chunk.data);
    out
}

/// Returns a random frame that the relay program does not forward.
pub fn any_other(rng: &mut Rng) -> Vec<u8> {
    let fields = |kind: u64, count: usize, rng: &mut Rng| {
        let mut out = varint(kind, 1);
        for _ in 0..count {
            let bits = rng.u32(1..62);
            let value = rng.u64(..1 << bits);
            out.extend(any_varint(value, rng));
        }
        out
    };
    let prefixed = |kind: u64, before: usize, rng: &mut Rng| {
        let mut out = fields(kind, before, rng);
        let data = bytes(rng.usize(..40), rng);
        out.extend(any_varint(data.len() as u64, rng));
        out.extend(data);
        out
    };
    match rng.u32(..14) {
        // a PADDING frame
        0 => vec![0; rng.usize(1..40)],
        // PING, HANDSHAKE_DONE and IMMEDIATE_ACK frames
        1 => vec![[0x01, 0x1e, 0x1f][rng.usize(..3)]],
        // ACK frames, the longer one with ECN counts
        2 | 3 => {
            let ranges = rng.usize(..12);
            let ecn = rng.bool();
            let mut out = varint(0x02 | u64::from(ecn), 1);
            out.extend(varint(1 << 40, 8));
            out.extend(any_varint(rng.u64(..1 << 14), rng));
            out.extend(any_varint(ranges as u64, rng));
            for _ in 0..1 + 2 * ranges + if ecn { 3 } else { 0 } {
                out.extend(any_varint(rng.u64(..1 << 14), rng));
            }
            out
        }
        // a RESET_STREAM frame
        4 => fields(0x04, 3, rng),
        // STOP_SENDING, MAX_STREAM_DATA and STREAM_DATA_BLOCKED frames
        5 => fields([0x05, 0x11, 0x15][rng.usize(..3)], 2, rng),
        // MAX_DATA, MAX_STREAMS, DATA_BLOCKED, STREAMS_BLOCKED and RETIRE_CONNECTION_ID frames
        6 => fields([0x10, 0x12, 0x13, 0x14, 0x16, 0x17, 0x19][rng.usize(..7)], 1, rng),
        // a CRYPTO frame
        7 => prefixed(0x06, 1, rng),
        // NEW_TOKEN and DATAGRAM frames
        8 => prefixed([0x07, 0x31][rng.usize(..2)], 0, rng),
        // a NEW_CONNECTION_ID frame
        9 => {
            let mut out = varint(0x18, 1);
            out.extend(varint(rng.u64(5..60), 1));
            out.extend(varint(rng.u64(..5), 1));
            let len = rng.u8(1..=20);
            out.push(len);
            out.extend(bytes(usize::from(len) + 16, rng));
            out
        }
        // PATH_CHALLENGE and PATH_RESPONSE frames
        10 => [vec![[0x1a, 0x1b][rng.usize(..2)]], bytes(8, rng)].concat(),
        // CONNECTION_CLOSE frames of the transport and of the application
        11 => prefixed(0x1c, 2, rng),
        12 => prefixed(0x1d, 1, rng),
        // an ACK_FREQUENCY frame
        _ => fields(0xaf, 4, rng),
    }
}
