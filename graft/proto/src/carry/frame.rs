//! Frames. Integers are big endian, offsets and lengths QUIC's variable-length integers.
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
//! The last two are of version 2, which pools speak where both ends do.
//!
//! An address is 4 or 6 (1), 4 or 16 bytes, and a port (2).

use std::net::{IpAddr, SocketAddr};

use bytes::{Buf as _, Bytes, BytesMut};
use millrace_quic::varint;

/// As TLS' ALPN names it.
pub const ALPN: &[u8] = b"millrace-carry/1";
/// The same, and [`Frame::Ask`].
pub const ALPN_ASKS: &[u8] = b"millrace-carry/2";

/// Of what stands before the bytes of any frame.
const HEAD_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The first of a connection's first stream, by who has the client.
    Open(Open),
    /// The first of each further stream: `received` is what this end has got.
    Resume { id: u64, received: u64 },
    /// The answer to either, with what this end has got.
    Accepted { received: u64 },
    /// The other answer.
    Refused(Reason),
    /// Some of the bytes of a data frame, as they came.
    Data(Bytes),
    /// The application sends no more. It counts as one byte.
    End,
    /// All before this was delivered.
    Confirm { delivered: u64 },
    /// Of no connection: the run of the broker that says it, another after each start.
    Hello { run: u64 },
    /// Whether this still arrives.
    Ask,
    /// Something has.
    Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Of the connection, among all of this run of the broker that opens it.
    pub id: u64,
    pub server: SocketAddr,
    pub client: SocketAddr,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal);* $(;)?) => {
        /// Why a connection is not carried, or no longer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Reason { $($(#[$doc])* $name = $code),* }

        impl Reason {
            pub const ALL: &[Self] = &[$(Self::$name),*];

            fn of(code: u8) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| *reason as u8 == code)
            }

            /// As status, metrics and the documentation call it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

reasons! {
    /// The server refuses connections to this port.
    Refused = 1, "refused";
    /// No rule of that host names the port.
    NotListed = 2, "not-listed";
    /// The address is not one of that host.
    NotHere = 3, "not-here";
    /// The peer's key does not stand for this client's address.
    Client = 4, "client";
    /// That host carries as many as it may.
    Busy = 5, "busy";
    /// The server did not answer, or cannot be reached.
    Unreachable = 6, "unreachable";
    /// There is no connection of this number.
    Unknown = 7, "unknown";
}

impl Reason {
    /// Whether it was the broker that refused: the server has not been asked, and may be.
    pub fn is_brokers(self) -> bool {
        !matches!(self, Self::Refused | Self::Unreachable | Self::Unknown)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no frame of a carried connection")]
pub struct Malformed;

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

impl Frame {
    /// A data frame's bytes follow as they are: [`head_of_data`] stands before them.
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

/// What stands before so many bytes of data.
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

/// Takes a stream apart. Data is handed on as it comes, so what it keeps is less than one frame's head.
#[derive(Debug, Default)]
pub struct Decoder {
    head: BytesMut,
    rest: Bytes,
    /// Bytes of the data frame that are yet to come.
    data: u64,
}

impl Decoder {
    /// What has come; all that came before was taken.
    pub fn push(&mut self, bytes: Bytes) {
        self.rest = match self.rest.is_empty() {
            true => bytes,
            false => Bytes::from([&self.rest[..], &bytes].concat()),
        };
    }

    /// All that has come was taken, and was whole.
    pub fn is_between(&self) -> bool {
        self.head.is_empty() && self.rest.is_empty() && self.data == 0
    }

    /// The next frame, or some bytes of data. `None`: more has to come.
    pub fn frame(&mut self) -> Result<Option<Frame>, Malformed> {
        loop {
            if self.data > 0 {
                return Ok(self.some_data());
            }
            match self.whole_head()? {
                // An empty data frame says nothing.
                Some(Head::Data(length)) => self.data = length,
                Some(Head::Frame(frame)) => return Ok(Some(frame)),
                None => return Ok(None),
            }
        }
    }

    fn some_data(&mut self) -> Option<Frame> {
        let length = usize::try_from(self.data).unwrap_or(usize::MAX).min(self.rest.len());
        if length == 0 {
            return None;
        }
        self.data -= length as u64;
        Some(Frame::Data(self.rest.split_to(length)))
    }

    /// Of a head that came in pieces the beginning is kept.
    fn whole_head(&mut self) -> Result<Option<Head>, Malformed> {
        let kept = self.head.len();
        let more = self.rest.len().min(HEAD_MAX - kept);
        self.head.extend_from_slice(&self.rest[..more]);
        let mut input = &self.head[..];
        let before = input.len();
        match Head::decode(&mut input)? {
            Some(head) => {
                let used = before - input.len();
                self.rest.advance(used - kept);
                self.head.clear();
                Ok(Some(head))
            }
            None if self.head.len() == HEAD_MAX => Err(Malformed),
            None => {
                self.rest.advance(more);
                Ok(None)
            }
        }
    }
}

enum Head {
    Data(u64),
    Frame(Frame),
}

impl Head {
    /// `None`: it is not all there.
    fn decode(input: &mut &[u8]) -> Result<Option<Self>, Malformed> {
        let Some(kind) = take::<1>(input) else { return Ok(None) };
        let frame = match kind[0] {
            OPEN => return decode_open(input),
            RESUME => number(input)
                .and_then(|id| varint::decode(input).map(|received| Frame::Resume { id, received })),
            ACCEPTED => varint::decode(input).map(|received| Frame::Accepted { received }),
            REFUSED => match take::<1>(input) {
                Some([code]) => Some(Frame::Refused(Reason::of(code).ok_or(Malformed)?)),
                None => None,
            },
            DATA => return Ok(varint::decode(input).map(Self::Data)),
            END => Some(Frame::End),
            ASK => Some(Frame::Ask),
            ANSWER => Some(Frame::Answer),
            CONFIRM => varint::decode(input).map(|delivered| Frame::Confirm { delivered }),
            HELLO => number(input).map(|run| Frame::Hello { run }),
            _ => return Err(Malformed),
        };
        Ok(frame.map(Self::Frame))
    }
}

fn decode_open(input: &mut &[u8]) -> Result<Option<Head>, Malformed> {
    let Some(id) = number(input) else { return Ok(None) };
    let Some(server) = decode_address(input)? else { return Ok(None) };
    let Some(client) = decode_address(input)? else { return Ok(None) };
    Ok(Some(Head::Frame(Frame::Open(Open { id, server, client }))))
}

fn decode_address(input: &mut &[u8]) -> Result<Option<SocketAddr>, Malformed> {
    let ip = match take::<1>(input) {
        None => return Ok(None),
        Some([4]) => take::<4>(input).map(IpAddr::from),
        Some([6]) => take::<16>(input).map(IpAddr::from),
        Some(_) => return Err(Malformed),
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

    fn frames() -> impl Strategy<Value = Frame> {
        let offset = 0..=varint::MAX;
        let address = (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port));
        prop_oneof![
            (any::<u64>(), address.clone(), address).prop_map(|(id, server, client)| Frame::Open(Open {
                id,
                server,
                client
            })),
            (any::<u64>(), offset.clone()).prop_map(|(id, received)| Frame::Resume { id, received }),
            offset.clone().prop_map(|received| Frame::Accepted { received }),
            prop::sample::select(Reason::ALL).prop_map(Frame::Refused),
            prop::collection::vec(any::<u8>(), 1..300).prop_map(|bytes| Frame::Data(bytes.into())),
            Just(Frame::End),
            offset.prop_map(|delivered| Frame::Confirm { delivered }),
            any::<u64>().prop_map(|run| Frame::Hello { run }),
            Just(Frame::Ask),
            Just(Frame::Answer),
        ]
    }

    /// With neighbouring data as one: where it was cut does not matter.
    fn joined(frames: impl IntoIterator<Item = Frame>) -> Vec<Frame> {
        let mut all: Vec<Frame> = Vec::new();
        for frame in frames {
            match (all.last_mut(), frame) {
                (Some(Frame::Data(before)), Frame::Data(more)) => {
                    *before = [&before[..], &more].concat().into();
                }
                (_, frame) => all.push(frame),
            }
        }
        all
    }

    fn decoded(bytes: &[u8], sizes: &[usize]) -> Result<Vec<Frame>, Malformed> {
        let (mut decoder, mut frames, mut rest) = (Decoder::default(), Vec::new(), bytes);
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
        fn what_is_said_is_heard_however_it_is_cut(
            said in prop::collection::vec(frames(), 0..20),
            sizes in prop::collection::vec(1_usize..200, 1..20),
        ) {
            let mut bytes = Vec::new();
            said.iter().for_each(|frame| frame.encode(&mut bytes));
            prop_assert_eq!(decoded(&bytes, &sizes), Ok(joined(said)));
        }

        #[test]
        fn anything_is_taken_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..500),
            sizes in prop::collection::vec(1_usize..50, 1..5),
        ) {
            let _ = decoded(&bytes, &sizes);
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for bytes in [&[0_u8][..], &[11], &[4, 0], &[4, 99], &[1, 0, 0, 0, 0, 0, 0, 0, 0, 5]] {
            assert_eq!(decoded(bytes, &[1]), Err(Malformed), "{bytes:?}");
        }
        assert_eq!(head_of_data(3)[..], [DATA, 3]);
    }
}
