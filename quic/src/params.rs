//! The peer's transport parameters (RFC 9000, section 18), as far as the data plane needs them.

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

/// Error: the parameters are not a sequence of ID, length and value, or a value is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the transport parameters are malformed")]
pub struct MalformedParams;

/// The peer's limits; parameters that are not listed here are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerParams {
    /// Largest UDP payload that the peer receives, bytes.
    pub max_udp_payload_size: u64,
    /// The peer's initial_max_data: connection credit for all streams together, bytes.
    pub initial_max_data: u64,
    /// The peer's initial credit for each unidirectional stream that this end opens, bytes.
    pub initial_max_stream_data_uni: u64,
    /// Number of unidirectional streams that this end may open.
    pub initial_max_streams_uni: u64,
    /// Exponent of the unit of ACK delays: the unit is 2^`ack_delay_exponent` microseconds.
    pub ack_delay_exponent: u32,
    /// Longest time by which the peer delays an acknowledgement on purpose.
    pub max_ack_delay: Duration,
    /// Largest DATAGRAM frame that the peer accepts, bytes, with type and length. 0 means no datagrams (RFC 9221).
    pub max_datagram_frame_size: u64,
}

impl Default for PeerParams {
    /// Returns the values that apply to absent parameters (RFC 9000, section 18.2).
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

impl PeerParams {
    /// Parses the peer's parameters.
    pub fn parse(mut encoded: &[u8]) -> Result<Self, MalformedParams> {
        let mut params = Self::default();
        while !encoded.is_empty() {
            let (id, value) = take(&mut encoded).ok_or(MalformedParams)?;
            params.set(id, value).ok_or(MalformedParams)?;
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
            // The fields for ack_delay_exponent and max_ack_delay are not `u64`, and their values have a limited range.
            // They are therefore checked and stored separately.
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

/// Returns the encoded parameters with `initial_max_data` lowered to `limit`. All other parameters stay as they are.
pub fn cap_initial_max_data(mut encoded: &[u8], limit: u64) -> Result<Vec<u8>, MalformedParams> {
    let mut out = Vec::with_capacity(encoded.len());
    while !encoded.is_empty() {
        let whole = encoded;
        let (id, mut value) = take(&mut encoded).ok_or(MalformedParams)?;
        if id == INITIAL_MAX_DATA {
            let limit = varint::decode(&mut value).ok_or(MalformedParams)?.min(limit);
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
    fn absent_transport_parameters_have_their_defaults() {
        assert_eq!(PeerParams::parse(&[]), Ok(PeerParams::default()));
    }

    #[test]
    fn known_transport_parameters_are_read_and_unknown_ones_skipped() {
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
        let params = PeerParams {
            max_udp_payload_size: 1472,
            initial_max_data: 65536,
            initial_max_stream_data_uni: 1024,
            initial_max_streams_uni: 9,
            ack_delay_exponent: 5,
            max_ack_delay: Duration::from_millis(40),
            max_datagram_frame_size: 65535,
        };
        assert_eq!(PeerParams::parse(&encoded), Ok(params));

        let capped = cap_initial_max_data(&encoded, 1000).unwrap();
        assert_eq!(PeerParams::parse(&capped), Ok(PeerParams { initial_max_data: 1000, ..params }));
        assert_eq!(capped.len(), encoded.len() - 2, "only the value is shorter");
        let raised = cap_initial_max_data(&encoded, varint::MAX).unwrap();
        assert_eq!(PeerParams::parse(&raised), Ok(params), "a cap never raises");
    }

    #[test]
    fn impossible_transport_parameters_are_refused() {
        for (id, value) in
            [(0x04, &[][..]), (0x04, &[0x40]), (0x04, &[1, 1]), (0x0a, &[21]), (0x0b, &[0x80, 0, 0x40, 0])]
        {
            assert_eq!(PeerParams::parse(&encode(&[(id, value)])), Err(MalformedParams), "{id:#x} {value:?}");
        }
        assert_eq!(PeerParams::parse(&[0x04, 2, 0]), Err(MalformedParams));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(encoded in proptest::collection::vec(any::<u8>(), 0..80), limit in 0..1u64 << 62) {
            if let (Ok(params), Ok(capped)) = (PeerParams::parse(&encoded), cap_initial_max_data(&encoded, limit)) {
                let expected = PeerParams { initial_max_data: params.initial_max_data.min(limit), ..params };
                prop_assert_eq!(PeerParams::parse(&capped), Ok(expected));
            }
        }
    }
}
