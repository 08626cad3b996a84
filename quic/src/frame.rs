//! QUIC frames (RFC 9000, section 19; RFC 9221; draft-ietf-quic-ack-frequency): walks a decrypted 1-RTT payload, and
//! writes the frames that the data plane sends.

use std::ops::Range;

pub use super::cursor::Error;
use super::{ack, cursor::PayloadCursor, varint};

const PADDING: u64 = 0x00;
const PING: u64 = 0x01;
const ACK: u64 = 0x02;
const ACK_ECN: u64 = 0x03;
const RESET_STREAM: u64 = 0x04;
const STOP_SENDING: u64 = 0x05;
const CRYPTO: u64 = 0x06;
const NEW_TOKEN: u64 = 0x07;
const STREAM: u64 = 0x08;
const STREAM_LAST: u64 = 0x0f;
/// Type of the MAX_DATA frame.
pub const MAX_DATA: u64 = 0x10;
const MAX_STREAM_DATA: u64 = 0x11;
const MAX_STREAMS_BIDI: u64 = 0x12;
const MAX_STREAMS_UNI: u64 = 0x13;
const DATA_BLOCKED: u64 = 0x14;
const STREAM_DATA_BLOCKED: u64 = 0x15;
const STREAMS_BLOCKED_BIDI: u64 = 0x16;
const STREAMS_BLOCKED_UNI: u64 = 0x17;
const NEW_CONNECTION_ID: u64 = 0x18;
const RETIRE_CONNECTION_ID: u64 = 0x19;
const PATH_CHALLENGE: u64 = 0x1a;
const PATH_RESPONSE: u64 = 0x1b;
const CONNECTION_CLOSE: u64 = 0x1c;
const APPLICATION_CLOSE: u64 = 0x1d;
const HANDSHAKE_DONE: u64 = 0x1e;
const IMMEDIATE_ACK: u64 = 0x1f;
const DATAGRAM: u64 = 0x30;
const DATAGRAM_LEN: u64 = 0x31;
const ACK_FREQUENCY: u64 = 0xaf;

const STREAM_FIN: u64 = 0x01;
const STREAM_LEN: u64 = 0x02;
const STREAM_OFF: u64 = 0x04;

/// The direction of the streams that a MAX_STREAMS or STREAMS_BLOCKED frame limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of RFC 9000")]
pub enum Direction {
    Bidirectional,
    Unidirectional,
}

/// A STREAM frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamFrame<'a> {
    /// The stream's ID.
    pub id: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// True if the stream ends after these bytes.
    pub fin: bool,
    /// The stream data in the frame.
    pub data: &'a [u8],
}

/// One frame, borrowed from its payload. Limits, offsets and sizes are in bytes or in streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "names and fields are those of RFC 9000, section 19, RFC 9221 and draft-ietf-quic-ack-frequency"
)]
pub enum Frame<'a> {
    /// A run of PADDING frames.
    Padding,
    Ping,
    Ack(ack::AckFrame<'a>),
    ResetStream {
        id: u64,
        code: u64,
        final_size: u64,
    },
    StopSending {
        id: u64,
        code: u64,
    },
    Crypto {
        offset: u64,
        data: &'a [u8],
    },
    NewToken(&'a [u8]),
    Stream(StreamFrame<'a>),
    MaxData(u64),
    MaxStreamData {
        id: u64,
        limit: u64,
    },
    MaxStreams(Direction, u64),
    DataBlocked(u64),
    StreamDataBlocked {
        id: u64,
        limit: u64,
    },
    StreamsBlocked(Direction, u64),
    NewConnectionId {
        sequence: u64,
        retire_prior_to: u64,
        id: &'a [u8],
        reset_token: &'a [u8],
    },
    RetireConnectionId(u64),
    PathChallenge([u8; 8]),
    PathResponse([u8; 8]),
    ConnectionClose {
        code: u64,
        frame_type: u64,
        reason: &'a [u8],
    },
    ApplicationClose {
        code: u64,
        reason: &'a [u8],
    },
    HandshakeDone,
    ImmediateAck,
    Datagram(&'a [u8]),
    AckFrequency {
        sequence: u64,
        threshold: u64,
        max_ack_delay_us: u64,
        reordering: u64,
    },
}

impl Frame<'_> {
    /// Returns whether the peer must acknowledge a packet that holds this frame (RFC 9000, section 13.2).
    pub fn is_ack_eliciting(&self) -> bool {
        !matches!(
            self,
            Self::Padding | Self::Ack(_) | Self::ConnectionClose { .. } | Self::ApplicationClose { .. }
        )
    }
}

/// Returns the frame that starts at offset `at`, and its range of bytes; `None` at the end of `payload`.
///
/// This is a function of an offset and not an iterator, so that the caller can overwrite a frame before the next call.
pub fn next(payload: &[u8], at: usize) -> Result<Option<(Range<usize>, Frame<'_>)>, Error> {
    let input = payload.get(at..).unwrap_or_default();
    if input.is_empty() {
        return Ok(None);
    }
    let mut cursor = PayloadCursor { rest: input };
    let frame = cursor.frame()?;
    let end = payload.len() - cursor.rest.len();
    Ok(Some((at..end, frame)))
}

/// An iterator over the frames of a payload. It ends after the first error.
#[derive(Clone, Debug)]
pub struct Walker<'a> {
    payload: &'a [u8],
    at: usize,
}

impl<'a> Walker<'a> {
    /// Creates an iterator that starts at the first frame of a payload.
    pub fn new(payload: &'a [u8]) -> Self {
        Self { payload, at: 0 }
    }
}

impl<'a> Iterator for Walker<'a> {
    type Item = Result<(Range<usize>, Frame<'a>), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = next(self.payload, self.at).transpose()?;
        self.at = item.as_ref().map_or(self.payload.len(), |(range, _)| range.end);
        Some(item)
    }
}

impl<'a> PayloadCursor<'a> {
    fn frame(&mut self) -> Result<Frame<'a>, Error> {
        let kind = self.varint()?;
        Ok(match kind {
            // A run of zero bytes is returned as one PADDING item, so that a run of padding takes one iteration instead
            // of one iteration per byte.
            PADDING => {
                let run = self.rest.iter().take_while(|byte| **byte == 0).count();
                self.bytes(run)?;
                Frame::Padding
            }
            PING => Frame::Ping,
            ACK | ACK_ECN => Frame::Ack(ack::AckFrame::parse(self, kind, kind == ACK_ECN)?),
            RESET_STREAM => {
                Frame::ResetStream { id: self.varint()?, code: self.varint()?, final_size: self.varint()? }
            }
            STOP_SENDING => Frame::StopSending { id: self.varint()?, code: self.varint()? },
            CRYPTO => Frame::Crypto { offset: self.varint()?, data: self.prefixed()? },
            NEW_TOKEN => Frame::NewToken(self.prefixed()?),
            STREAM..=STREAM_LAST => Frame::Stream(self.stream(kind)?),
            MAX_DATA => Frame::MaxData(self.varint()?),
            MAX_STREAM_DATA => Frame::MaxStreamData { id: self.varint()?, limit: self.varint()? },
            MAX_STREAMS_BIDI => Frame::MaxStreams(Direction::Bidirectional, self.varint()?),
            MAX_STREAMS_UNI => Frame::MaxStreams(Direction::Unidirectional, self.varint()?),
            DATA_BLOCKED => Frame::DataBlocked(self.varint()?),
            STREAM_DATA_BLOCKED => Frame::StreamDataBlocked { id: self.varint()?, limit: self.varint()? },
            STREAMS_BLOCKED_BIDI => Frame::StreamsBlocked(Direction::Bidirectional, self.varint()?),
            STREAMS_BLOCKED_UNI => Frame::StreamsBlocked(Direction::Unidirectional, self.varint()?),
            NEW_CONNECTION_ID => self.new_connection_id()?,
            RETIRE_CONNECTION_ID => Frame::RetireConnectionId(self.varint()?),
            PATH_CHALLENGE => Frame::PathChallenge(self.array()?),
            PATH_RESPONSE => Frame::PathResponse(self.array()?),
            CONNECTION_CLOSE => Frame::ConnectionClose {
                code: self.varint()?,
                frame_type: self.varint()?,
                reason: self.prefixed()?,
            },
            APPLICATION_CLOSE => Frame::ApplicationClose { code: self.varint()?, reason: self.prefixed()? },
            HANDSHAKE_DONE => Frame::HandshakeDone,
            IMMEDIATE_ACK => Frame::ImmediateAck,
            // A datagram without a length extends to the end of the packet (RFC 9221, section 4).
            DATAGRAM => Frame::Datagram(self.remainder()),
            DATAGRAM_LEN => Frame::Datagram(self.prefixed()?),
            ACK_FREQUENCY => Frame::AckFrequency {
                sequence: self.varint()?,
                threshold: self.varint()?,
                max_ack_delay_us: self.varint()?,
                reordering: self.varint()?,
            },
            unknown => return Err(Error::Unknown(unknown)),
        })
    }

    fn stream(&mut self, kind: u64) -> Result<StreamFrame<'a>, Error> {
        let id = self.varint()?;
        let offset = if kind & STREAM_OFF == 0 { 0 } else { self.varint()? };
        let data = if kind & STREAM_LEN == 0 { self.remainder() } else { self.prefixed()? };
        // RFC 9000, section 19.8: the largest offset delivered on a stream cannot exceed 2^62-1.
        if offset + data.len() as u64 > varint::MAX {
            return Err(Error::Malformed(kind));
        }
        Ok(StreamFrame { id, offset, fin: kind & STREAM_FIN != 0, data })
    }

    fn new_connection_id(&mut self) -> Result<Frame<'a>, Error> {
        let sequence = self.varint()?;
        let retire_prior_to = self.varint()?;
        let [len] = self.array()?;
        // A NEW_CONNECTION_ID frame is malformed if it retires later connection IDs than its own, or its ID is empty or
        // too long (RFC 9000, section 19.15).
        if retire_prior_to > sequence || !(1..=20).contains(&len) {
            return Err(Error::Malformed(NEW_CONNECTION_ID));
        }
        let id = self.bytes(usize::from(len))?;
        Ok(Frame::NewConnectionId { sequence, retire_prior_to, id, reset_token: self.bytes(16)? })
    }
}

/// Returns the header length of a STREAM frame with a Length field, that precedes `len` bytes of data. The data's
/// length is not included.
pub const fn stream_overhead(id: u64, offset: u64, len: usize) -> usize {
    let offset_len = if offset == 0 { 0 } else { varint::len(offset) };
    1 + varint::len(id) + offset_len + varint::len(len as u64)
}

/// Appends the header of a STREAM frame with an explicit length; `len` bytes of data must follow.
pub fn write_stream_header(id: u64, offset: u64, len: usize, fin: bool, out: &mut Vec<u8>) {
    let offset_bit = if offset == 0 { 0 } else { STREAM_OFF };
    let fin_bit = if fin { STREAM_FIN } else { 0 };
    varint::encode(STREAM | STREAM_LEN | offset_bit | fin_bit, out);
    varint::encode(id, out);
    if offset != 0 {
        varint::encode(offset, out);
    }
    varint::encode(len as u64, out);
}

/// Appends a STREAM frame with an explicit length.
pub fn write_stream(id: u64, offset: u64, data: &[u8], fin: bool, out: &mut Vec<u8>) {
    write_stream_header(id, offset, data.len(), fin, out);
    out.extend_from_slice(data);
}

/// Appends a RESET_STREAM frame.
pub fn write_reset_stream(id: u64, code: u64, final_size: u64, out: &mut Vec<u8>) {
    for field in [RESET_STREAM, id, code, final_size] {
        varint::encode(field, out);
    }
}

/// Appends a DATAGRAM frame with an explicit length.
pub fn write_datagram(data: &[u8], out: &mut Vec<u8>) {
    varint::encode(DATAGRAM_LEN, out);
    varint::encode(data.len() as u64, out);
    out.extend_from_slice(data);
}

/// Appends a MAX_DATA frame.
pub fn write_max_data(limit: u64, out: &mut Vec<u8>) {
    varint::encode(MAX_DATA, out);
    varint::encode(limit, out);
}

/// Appends a PING frame.
pub fn write_ping(out: &mut Vec<u8>) {
    varint::encode(PING, out);
}

/// Appends `len` PADDING frames.
pub fn write_padding(len: usize, out: &mut Vec<u8>) {
    out.resize(out.len() + len, PADDING as u8);
}

/// Overwrites a whole frame with PING and PADDING. PING and PADDING have no effect, but the packet stays ack-eliciting.
pub fn blank(frame: &mut [u8]) {
    frame.fill(PADDING as u8);
    if let Some(first) = frame.first_mut() {
        *first = PING as u8;
    }
}

#[cfg(test)]
mod tests;
