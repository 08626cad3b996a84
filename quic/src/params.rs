//! Transport parameters (RFC 9000, section 18): what the data plane needs of the peer's.

use std::time::Duration;

use thiserror::Error;

use super::varint;

const MAX_UDP_PAYLOAD_SIZE: u64 = 0x03;
const INITIAL_MAX_DATA: u64 = 0x04;
const INITIAL_MAX_STREAM_DATA_UNI: u64 = 0x07;
const INITIAL_MAX_STREAMS_UNI: u64 = 0x09;
const ACK_DELAY_EXPONENT: u64 = 0x0a;
const MAX_ACK_DELAY: u64 = 0x0b;
const MAX_DATAGRAM_FRAME_SIZE: u64 = 0x20;

/// The parameters are not a sequence of ID, length and value, or a value is out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("malformed transport parameters")]
pub struct Malformed;

/// The peer's limits; parameters that are not listed here are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// Bytes.
    pub max_udp_payload_size: u64,
    /// Bytes, on all streams together.
    pub initial_max_data: u64,
    /// Bytes, on each unidirectional stream that we open.
    pub initial_max_stream_data_uni: u64,
    pub initial_max_streams_uni: u64,
    /// ACK delays are in units of 2^this microseconds.
    pub ack_delay_exponent: u32,
    pub max_ack_delay: Duration,
    /// Bytes, type and length of the frame included; 0: no datagrams (RFC 9221).
    pub max_datagram_frame_size: u64,
}

impl Default for Params {
    /// What holds for parameters that the peer leaves out.
    fn default() -> Self {
        Self {
            max_udp_payload_size: 65527,
            initial_max_data: 0,
            initial_max_stream_data_uni: 0,
            initial_max_streams_uni: 0,
            ack_delay_exponent: 3,
            max_ack_delay: Duration::from_millis(25),
            max_datagram_frame_size: 0,
        }
    }
}

impl Params {
    pub fn parse(mut encoded: &[u8]) -> Result<Self, Malformed> {
        let mut params = Self::default();
        while !encoded.is_empty() {
            let (id, value) = take(&mut encoded).ok_or(Malformed)?;
            params.set(id, value).ok_or(Malformed)?;
        }
        Ok(params)
    }

    fn set(&mut self, id: u64, mut value: &[u8]) -> Option<()> {
        let field = match id {
            MAX_UDP_PAYLOAD_SIZE => &mut self.max_udp_payload_size,
            INITIAL_MAX_DATA => &mut self.initial_max_data,
            INITIAL_MAX_STREAM_DATA_UNI => &mut self.initial_max_stream_data_uni,
            INITIAL_MAX_STREAMS_UNI => &mut self.initial_max_streams_uni,
            MAX_DATAGRAM_FRAME_SIZE => &mut self.max_datagram_frame_size,
            ACK_DELAY_EXPONENT | MAX_ACK_DELAY => &mut 0,
            _ => return Some(()),
        };
        *field = varint::decode(&mut value)?;
        match (id, *field) {
            (ACK_DELAY_EXPONENT, exponent @ 0..=20) => self.ack_delay_exponent = exponent as u32,
            (MAX_ACK_DELAY, delay @ 0..=0x3fff) => self.max_ack_delay = Duration::from_millis(delay),
            (ACK_DELAY_EXPONENT | MAX_ACK_DELAY, _) => return None,
            _ => {}
        }
        value.is_empty().then_some(())
    }
}

/// The same parameters with `initial_max_data` lowered to `limit`, everything else byte for byte.
pub fn cap_initial_max_data(mut encoded: &[u8], limit: u64) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(encoded.len());
    while !encoded.is_empty() {
        let whole = encoded;
        let (id, mut value) = take(&mut encoded).ok_or(Malformed)?;
        if id == INITIAL_MAX_DATA {
            let limit = varint::decode(&mut value).ok_or(Malformed)?.min(limit);
            for field in [id, varint::len(limit) as u64, limit] {
                varint::encode(field, &mut out);
            }
        } else {
            out.extend_from_slice(&whole[..whole.len() - encoded.len()]);
        }
    }
    Ok(out)
}

fn take<'a>(encoded: &mut &'a [u8]) -> Option<(u64, &'a [u8])> {
    let id = varint::decode(encoded)?;
    let len = usize::try_from(varint::decode(encoded)?).ok()?;
    let (value, rest) = encoded.split_at_checked(len)?;
    *encoded = rest;
    Some((id, value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(params: &[(u64, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (id, value) in params {
            varint::encode(*id, &mut out);
            varint::encode(value.len() as u64, &mut out);
            out.extend_from_slice(value);
        }
        out
    }

    #[test]
    fn absent_parameters_have_their_defaults() {
        assert_eq!(Params::parse(&[]), Ok(Params::default()));
    }

    #[test]
    fn known_parameters_are_read_and_unknown_skipped() {
        let encoded = encode(&[
            (0x03, &[0x45, 0xc0]),
            (0x04, &[0x80, 0x01, 0x00, 0x00]),
            (0x0f, b"connection"),
            (0x07, &[0x44, 0x00]),
            (0x09, &[9]),
            (0x0a, &[5]),
            (0x0b, &[40]),
            (0x20, &[0x80, 0, 0xff, 0xff]),
            (0x3fff, b"grease"),
            (0x0c, &[]),
        ]);
        let params = Params {
            max_udp_payload_size: 1472,
            initial_max_data: 65536,
            initial_max_stream_data_uni: 1024,
            initial_max_streams_uni: 9,
            ack_delay_exponent: 5,
            max_ack_delay: Duration::from_millis(40),
            max_datagram_frame_size: 65535,
        };
        assert_eq!(Params::parse(&encoded), Ok(params));

        let capped = cap_initial_max_data(&encoded, 1000).unwrap();
        assert_eq!(Params::parse(&capped), Ok(Params { initial_max_data: 1000, ..params }));
        assert_eq!(capped.len(), encoded.len() - 2, "only the value is shorter");
        let raised = cap_initial_max_data(&encoded, varint::MAX).unwrap();
        assert_eq!(Params::parse(&raised), Ok(params), "a cap never raises");
    }

    #[test]
    fn impossible_values_are_refused() {
        for (id, value) in
            [(0x04, &[][..]), (0x04, &[0x40]), (0x04, &[1, 1]), (0x0a, &[21]), (0x0b, &[0x80, 0, 0x40, 0])]
        {
            assert_eq!(Params::parse(&encode(&[(id, value)])), Err(Malformed), "{id:#x} {value:?}");
        }
        assert_eq!(Params::parse(&[0x04, 2, 0]), Err(Malformed));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(encoded in proptest::collection::vec(any::<u8>(), 0..80), limit in 0..1u64 << 62) {
            if let (Ok(params), Ok(capped)) = (Params::parse(&encoded), cap_initial_max_data(&encoded, limit)) {
                let expected = Params { initial_max_data: params.initial_max_data.min(limit), ..params };
                prop_assert_eq!(Params::parse(&capped), Ok(expected));
            }
        }
    }
}
