//! Transport parameters that the hostile client sends.

use millrace_quic::varint;

/// Limits that the client sets for the relay (RFC 9000, section 18.2).
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Largest amount of data on all streams together, and on each stream that the relay opens, bytes.
    pub max_data: u64,
    pub max_stream_data: u64,
    /// Largest amount of data that the relay may send on each stream that the client opens, bytes.
    pub max_answer_data: u64,
    pub max_streams: u64,
    pub max_datagram: u64,
}

impl Default for ClientLimits {
    fn default() -> Self {
        let per_stream = 1 << 30;
        Self {
            max_data: 1 << 40,
            max_stream_data: per_stream,
            max_answer_data: per_stream,
            max_streams: 1 << 20,
            max_datagram: 65535,
        }
    }
}

impl ClientLimits {
    pub fn encode(&self, source_id: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |id: u64, value: u64| {
            for field in [id, varint::len(value) as u64, value] {
                varint::encode(field, &mut out);
            }
        };
        put(0x01, 60_000); // max_idle_timeout, ms
        put(0x04, self.max_data);
        put(0x05, self.max_answer_data);
        for per_stream in [0x06, 0x07] {
            put(per_stream, self.max_stream_data);
        }
        put(0x08, self.max_streams);
        put(0x09, self.max_streams);
        put(0x20, self.max_datagram);
        varint::encode(0x0f, &mut out); // initial_source_connection_id
        varint::encode(source_id.len() as u64, &mut out);
        out.extend_from_slice(source_id);
        out
    }
}

/// Limits that the relay has set for the client, by transport parameters and later frames.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerCredit {
    pub data: u64,
    pub stream_bidi: u64,
    pub stream_uni: u64,
    pub streams_bidi: u64,
    pub streams_uni: u64,
}

impl PeerCredit {
    /// Parses the limits from encoded transport parameters. A missing limit counts as 0.
    pub fn parse(mut encoded: &[u8]) -> Self {
        let mut credit = Self::default();
        while let (Some(id), Some(len)) = (varint::decode(&mut encoded), varint::decode(&mut encoded)) {
            let Some((mut value, rest)) =
                usize::try_from(len).ok().and_then(|len| encoded.split_at_checked(len))
            else {
                break;
            };
            encoded = rest;
            let field = match id {
                0x04 => &mut credit.data,
                0x06 => &mut credit.stream_bidi,
                0x07 => &mut credit.stream_uni,
                0x08 => &mut credit.streams_bidi,
                0x09 => &mut credit.streams_uni,
                _ => continue,
            };
            *field = varint::decode(&mut value).unwrap_or_default();
        }
        credit
    }
}
