//! Frames between two brokers (the proxies that tunnel TCP connections), in the order in which they are sent. They are
//! sent on the streams of a carrier, such as a QUIC connection between the brokers. Integers are big-endian; offsets
//! and lengths are QUIC's variable-length integers.
//!
//! | type | name | fields |
//! | --- | --- | --- |
//! | 1 | open | id (8), server, client |
//! | 2 | resume | id (8), offset |
//! | 3 | accepted | offset |
//! | 4 | refused | reason (1) |
//! | 5 | data | length, bytes |
//! | 6 | end | |
//! | 7 | confirm | offset |
//! | 8 | hello | run (8) |
//! | 9 | ask | |
//! | 10 | answer | |
//!
//! Only version 2 has the frames `Ask` and `Answer`. Two brokers use version 2 if both support it.
//!
//! An address is one byte (4 or 6), 4 or 16 bytes of the IP address, and a port of 2 bytes.

use std::net::{IpAddr, SocketAddr};

use bytes::{Buf as _, Bytes, BytesMut};
use millrace_quic::varint;

/// ALPN name of version 1 of the protocol.
pub const ALPN: &[u8] = b"millrace-carry/1";
/// ALPN name of version 2 of the protocol, which adds [`CarryFrame::Ask`] and its answer.
pub const ALPN_ASKS: &[u8] = b"millrace-carry/2";

/// Maximum length in bytes of a frame's head: everything before the data of a data frame.
const HEAD_MAX: usize = 64;

/// A frame between two brokers, on a stream of a carrier (such as a QUIC connection between the brokers).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CarryFrame {
    /// Opens a connection. The client's tunnel broker sends this as the first frame on the connection's first stream.
    Open(OpenFrame),
    /// Resumes a connection on a new carrier (a connection between the brokers). This is the first frame on each later
    /// stream of the connection.
    Resume {
        /// ID of the connection.
        id: u64,
        /// Number of the connection's bytes that the sender of this frame has received.
        received: u64,
    },
    /// Accepts an `Open` or a `Resume` frame.
    Accepted {
        /// Number of the connection's bytes that the sender of this frame has received.
        received: u64,
    },
    /// Refuses an `Open` or a `Resume` frame, with the reason.
    Refused(CarryReason),
    /// Bytes of the application, which are a whole data frame or a part of one.
    Data(Bytes),
    /// Ends this direction of the connection, since the application sends no more. Offsets count the end as one byte.
    End,
    /// Confirms delivery: the kernel has accepted all bytes before an offset for the receiving application.
    Confirm {
        /// Offset up to which bytes were delivered, in bytes.
        delivered: u64,
    },
    /// Names the sending broker's run, a number that changes whenever the tunnel broker starts. The frame belongs to no
    /// connection.
    Hello {
        /// Number that identifies the run.
        run: u64,
    },
    /// Requests an [`Answer`](Self::Answer) from the other broker, to test whether the carrier (the connection between
    /// the brokers) still works.
    Ask,
    /// Answers [`Ask`](Self::Ask).
    Answer,
}

/// The connection that one broker requests the other one to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFrame {
    /// ID of the connection, unique among the connections that the opening tunnel broker has opened since it started.
    pub id: u64,
    /// Address and port of the server.
    pub server: SocketAddr,
    /// Address and port of the client.
    pub client: SocketAddr,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal);* $(;)?) => {
        /// Why a connection is not tunnelled, or not tunnelled any longer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum CarryReason { $($(#[$doc])* $name = $code),* }

        impl CarryReason {
            /// The reasons for refusing or ending a connection, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            fn from_code(code: u8) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| *reason as u8 == code)
            }

            /// Returns the reason's name in status, metrics and documentation.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

reasons! {
    /// The server refused the connection.
    Refused = 1, "refused";
    /// No rule at the server's host contains the server's port.
    NotListed = 2, "not-listed";
    /// The server's address does not belong to the tunnel broker's host.
    NotHere = 3, "not-here";
    /// The peer's key does not permit this client address.
    Client = 4, "client";
    /// The tunnel broker already has as many connections as allowed.
    Busy = 5, "busy";
    /// The server did not answer, or there is no route to it.
    Unreachable = 6, "unreachable";
    /// The tunnel broker knows no connection with the ID that should be resumed.
    Unknown = 7, "unknown";
}

impl CarryReason {
    /// Returns whether the tunnel broker refused without contacting the server, so that the client may connect to it
    /// directly.
    pub fn is_brokers(self) -> bool {
        !matches!(self, Self::Refused | Self::Unreachable | Self::Unknown)
    }
}

/// The bytes are not a valid frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent a malformed frame of a tunnelled connection")]
pub struct MalformedFrame;

const OPEN: u8 = 1;
const RESUME: u8 = 2;
const ACCEPTED: u8 = 3;
const REFUSED: u8 = 4;
const DATA: u8 = 5;
const END: u8 = 6;
const CONFIRM: u8 = 7;
const HELLO: u8 = 8;
const ASK: u8 = 9;
const ANSWER: u8 = 10;

impl CarryFrame {
    /// Encodes a frame. To avoid copying data, use [`head_of_data`] and send the data behind it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Open(open) => {
                out.push(OPEN);
                out.extend_from_slice(&open.id.to_be_bytes());
                encode_address(open.server, out);
                encode_address(open.client, out);
            }
            Self::Resume { id, received } => {
                out.push(RESUME);
                out.extend_from_slice(&id.to_be_bytes());
                varint::encode(*received, out);
            }
            Self::Accepted { received } => encode_offset(ACCEPTED, *received, out),
            Self::Refused(reason) => out.extend_from_slice(&[REFUSED, *reason as u8]),
            Self::Data(bytes) => {
                encode_offset(DATA, bytes.len() as u64, out);
                out.extend_from_slice(bytes);
            }
            Self::End => out.push(END),
            Self::Ask => out.push(ASK),
            Self::Answer => out.push(ANSWER),
            Self::Confirm { delivered } => encode_offset(CONFIRM, *delivered, out),
            Self::Hello { run } => {
                out.push(HELLO);
                out.extend_from_slice(&run.to_be_bytes());
            }
        }
    }
}

/// Returns the head of a data frame with `length` bytes of data.
pub fn head_of_data(length: usize) -> Bytes {
    let mut out = Vec::new();
    encode_offset(DATA, length as u64, &mut out);
    out.into()
}

fn encode_offset(kind: u8, offset: u64, out: &mut Vec<u8>) {
    out.push(kind);
    varint::encode(offset, out);
}

fn encode_address(address: SocketAddr, out: &mut Vec<u8>) {
    match address.ip() {
        IpAddr::V4(v4) => {
            out.push(4);
            out.extend_from_slice(&v4.octets());
        }
        IpAddr::V6(v6) => {
            out.push(6);
            out.extend_from_slice(&v6.octets());
        }
    }
    out.extend_from_slice(&address.port().to_be_bytes());
}

/// Decodes the frames of a stream from pieces of any size. Data is returned as it arrives, so the decoder stores at
/// most an incomplete frame head.
#[derive(Debug, Default)]
pub struct Decoder {
    head: BytesMut,
    rest: Bytes,
    /// Bytes of the current data frame that were not returned yet.
    data: u64,
}

impl Decoder {
    /// Adds received bytes. All frames in earlier bytes have to be read by [`frame`](Self::frame) first.
    pub fn push(&mut self, bytes: Bytes) {
        self.rest = match self.rest.is_empty() {
            true => bytes,
            // Bytes are copied only if earlier ones were not read yet, which is rare.
            false => Bytes::from([&self.rest[..], &bytes].concat()),
        };
    }

    /// Returns whether the stream is at the boundary of two frames, and all frames were read.
    pub fn is_between(&self) -> bool {
        self.head.is_empty() && self.rest.is_empty() && self.data == 0
    }

    /// Returns the next frame, or a part of a data frame. `None` means that more bytes have to arrive.
    pub fn frame(&mut self) -> Result<Option<CarryFrame>, MalformedFrame> {
        loop {
            if self.data > 0 {
                return Ok(self.some_data());
            }
            match self.whole_head()? {
                // A data frame of length 0 is skipped.
                Some(FrameHead::Data(length)) => self.data = length,
                Some(FrameHead::Frame(frame)) => return Ok(Some(frame)),
                None => return Ok(None),
            }
        }
    }

    fn some_data(&mut self) -> Option<CarryFrame> {
        // Data is returned in pieces as it arrives, since a frame may be larger than the memory.
        let length = usize::try_from(self.data).unwrap_or(usize::MAX).min(self.rest.len());
        if length == 0 {
            return None;
        }
        self.data -= length as u64;
        Some(CarryFrame::Data(self.rest.split_to(length)))
    }

    /// Decodes the head of a frame. An incomplete head is stored until more bytes arrive.
    fn whole_head(&mut self) -> Result<Option<FrameHead>, MalformedFrame> {
        let kept = self.head.len();
        let more = self.rest.len().min(HEAD_MAX - kept);
        self.head.extend_from_slice(&self.rest[..more]);
        let mut input = &self.head[..];
        let before = input.len();
        match FrameHead::decode(&mut input)? {
            Some(head) => {
                // Earlier calls consumed `kept` bytes of the head; only the remaining bytes of the head are removed
                // from this piece.
                let used = before - input.len();
                self.rest.advance(used - kept);
                self.head.clear();
                Ok(Some(head))
            }
            // No valid head is that long, so more bytes cannot complete it.
            None if self.head.len() == HEAD_MAX => Err(MalformedFrame),
            None => {
                self.rest.advance(more);
                Ok(None)
            }
        }
    }
}

enum FrameHead {
    Data(u64),
    Frame(CarryFrame),
}

impl FrameHead {
    /// Decodes the head of a frame from the beginning of `input`. `None` means that the head is incomplete.
    fn decode(input: &mut &[u8]) -> Result<Option<Self>, MalformedFrame> {
        let Some(kind) = take::<1>(input) else { return Ok(None) };
        let frame = match kind[0] {
            OPEN => return decode_open(input),
            RESUME => number(input)
                .and_then(|id| varint::decode(input).map(|received| CarryFrame::Resume { id, received })),
            ACCEPTED => varint::decode(input).map(|received| CarryFrame::Accepted { received }),
            REFUSED => match take::<1>(input) {
                Some([code]) => {
                    Some(CarryFrame::Refused(CarryReason::from_code(code).ok_or(MalformedFrame)?))
                }
                None => None,
            },
            DATA => return Ok(varint::decode(input).map(Self::Data)),
            END => Some(CarryFrame::End),
            ASK => Some(CarryFrame::Ask),
            ANSWER => Some(CarryFrame::Answer),
            CONFIRM => varint::decode(input).map(|delivered| CarryFrame::Confirm { delivered }),
            HELLO => number(input).map(|run| CarryFrame::Hello { run }),
            _ => return Err(MalformedFrame),
        };
        Ok(frame.map(Self::Frame))
    }
}

fn decode_open(input: &mut &[u8]) -> Result<Option<FrameHead>, MalformedFrame> {
    let Some(id) = number(input) else { return Ok(None) };
    let Some(server) = decode_address(input)? else { return Ok(None) };
    let Some(client) = decode_address(input)? else { return Ok(None) };
    Ok(Some(FrameHead::Frame(CarryFrame::Open(OpenFrame { id, server, client }))))
}

fn decode_address(input: &mut &[u8]) -> Result<Option<SocketAddr>, MalformedFrame> {
    let ip = match take::<1>(input) {
        None => return Ok(None),
        Some([4]) => take::<4>(input).map(IpAddr::from),
        Some([6]) => take::<16>(input).map(IpAddr::from),
        Some(_) => return Err(MalformedFrame),
    };
    let Some((ip, port)) = ip.zip(take::<2>(input)) else { return Ok(None) };
    Ok(Some(SocketAddr::new(ip, u16::from_be_bytes(port))))
}

fn number(input: &mut &[u8]) -> Option<u64> {
    take::<8>(input).map(u64::from_be_bytes)
}

fn take<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = input.split_first_chunk::<N>()?;
    *input = rest;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = CarryFrame> {
        let offset = 0..=varint::MAX;
        let address = (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port));
        prop_oneof![
            (any::<u64>(), address.clone(), address)
                .prop_map(|(id, server, client)| CarryFrame::Open(OpenFrame { id, server, client })),
            (any::<u64>(), offset.clone()).prop_map(|(id, received)| CarryFrame::Resume { id, received }),
            offset.clone().prop_map(|received| CarryFrame::Accepted { received }),
            prop::sample::select(CarryReason::ALL).prop_map(CarryFrame::Refused),
            prop::collection::vec(any::<u8>(), 1..300).prop_map(|bytes| CarryFrame::Data(bytes.into())),
            Just(CarryFrame::End),
            offset.prop_map(|delivered| CarryFrame::Confirm { delivered }),
            any::<u64>().prop_map(|run| CarryFrame::Hello { run }),
            Just(CarryFrame::Ask),
            Just(CarryFrame::Answer),
        ]
    }

    /// Joins adjacent data frames of the decoder's output, so that it can be compared with the frames that were
    /// encoded.
    fn joined(frames: impl IntoIterator<Item = CarryFrame>) -> Vec<CarryFrame> {
        let mut all: Vec<CarryFrame> = Vec::new();
        for frame in frames {
            match (all.last_mut(), frame) {
                (Some(CarryFrame::Data(before)), CarryFrame::Data(more)) => {
                    *before = [&before[..], &more].concat().into();
                }
                (_, frame) => all.push(frame),
            }
        }
        all
    }

    fn decoded(bytes: &[u8], sizes: &[usize]) -> Result<Vec<CarryFrame>, MalformedFrame> {
        let mut decoder = Decoder::default();
        let mut frames = Vec::new();
        let mut rest = bytes;
        let mut sizes = sizes.iter().copied().cycle();
        while !rest.is_empty() {
            let (piece, more) = rest.split_at(sizes.next().unwrap_or(1).min(rest.len()));
            rest = more;
            decoder.push(Bytes::copy_from_slice(piece));
            while let Some(frame) = decoder.frame()? {
                frames.push(frame);
            }
            assert!(decoder.rest.is_empty() && decoder.head.len() < HEAD_MAX);
        }
        Ok(joined(frames))
    }

    proptest! {
        #[test]
        fn carrier_frames_are_decoded_from_pieces_of_any_size(
            said in prop::collection::vec(frames(), 0..20),
            sizes in prop::collection::vec(1_usize..200, 1..20),
        ) {
            let mut bytes = Vec::new();
            said.iter().for_each(|frame| frame.encode(&mut bytes));
            prop_assert_eq!(decoded(&bytes, &sizes), Ok(joined(said)));
        }

        #[test]
        fn arbitrary_bytes_are_decoded_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..500),
            sizes in prop::collection::vec(1_usize..50, 1..5),
        ) {
            let _ = decoded(&bytes, &sizes);
        }
    }

    #[test]
    fn malformed_frame_is_refused() {
        for bytes in [&[0_u8][..], &[11], &[4, 0], &[4, 99], &[1, 0, 0, 0, 0, 0, 0, 0, 0, 5]] {
            assert_eq!(decoded(bytes, &[1]), Err(MalformedFrame), "{bytes:?}");
        }
        assert_eq!(head_of_data(3)[..], [DATA, 3]);
    }
}
