//! A record of the first bytes of a connection, for the process that recognises the protocol.

use crate::SEGMENT_MAX;

/// Largest number of TCP segments in a record of a connection's first bytes, both directions together.
pub const SEGMENTS_MAX: usize = 10;
/// Largest number of payload bytes in a record of a connection's first bytes, both directions together.
pub const BYTES_MAX: usize = 4096;
const PORT: usize = 2;
/// Number of bytes in front of each segment, which contain the segment's sender and length.
const HEAD: usize = 3;
/// Largest size of a record of a connection's first bytes, in bytes.
pub const RECORD_MAX: usize = PORT + SEGMENTS_MAX * HEAD + BYTES_MAX;

/// A record of a connection's first bytes. It contains the server's port, then for each segment 1 (client) or 0
/// (server), its length and its bytes. Numbers are in network order.
pub struct NdpiSample {
    record: Vec<u8>,
    segments: usize,
    bytes: usize,
}

impl NdpiSample {
    pub fn new(port: u16) -> Self {
        Self { record: port.to_be_bytes().to_vec(), segments: 0, bytes: 0 }
    }

    /// Appends bytes that the client or the server has sent, until the record is full. Returns whether the record is
    /// full.
    pub fn take(&mut self, by_client: bool, bytes: &[u8]) -> bool {
        for piece in bytes.chunks(SEGMENT_MAX) {
            let room = BYTES_MAX - self.bytes;
            if room == 0 || self.segments == SEGMENTS_MAX {
                return true;
            }
            let piece = piece.get(..room).unwrap_or(piece);
            self.record.push(u8::from(by_client));
            // The cast is lossless, since `chunks` returns at most SEGMENT_MAX bytes at once.
            self.record.extend((piece.len() as u16).to_be_bytes());
            self.record.extend(piece);
            self.segments += 1;
            self.bytes += piece.len();
        }
        self.bytes == BYTES_MAX || self.segments == SEGMENTS_MAX
    }

    pub fn is_empty(&self) -> bool {
        self.segments == 0
    }

    pub fn record(&self) -> &[u8] {
        &self.record
    }
}

/// Segments of a record. The flag is true if the client sent the segment.
type Segments<'a> = Vec<(bool, &'a [u8])>;

/// Returns the port and the segments of a record; `None` if it is malformed.
pub fn parse(record: &[u8]) -> Option<(u16, Segments<'_>)> {
    let (port, mut rest) = record.split_first_chunk::<PORT>()?;
    let mut segments = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD>() {
        let [by_client @ 0..=1, high, low] = *head else { return None };
        let (bytes, behind) = behind.split_at_checked(usize::from(u16::from_be_bytes([high, low])))?;
        if segments.len() == SEGMENTS_MAX {
            return None;
        }
        segments.push((by_client == 1, bytes));
        rest = behind;
    }
    rest.is_empty().then_some((u16::from_be_bytes(*port), segments))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ndpi_sample_record_parses_into_the_appended_segments(pieces in prop::collection::vec((any::<bool>(), 1_usize..5000), 0..20)) {
            let mut sample = NdpiSample::new(443);
            let mut taken = Vec::new();
            for (by_client, length) in pieces {
                let is_full = sample.take(by_client, &vec![7; length]);
                taken.extend(vec![by_client; length]);
                prop_assert!(sample.record().len() <= RECORD_MAX);
                if is_full {
                    break;
                }
            }
            let (port, segments) = parse(sample.record()).expect("a record");
            prop_assert_eq!(port, 443);
            let all: Vec<bool> = segments.iter().flat_map(|(by_client, bytes)| vec![*by_client; bytes.len()]).collect();
            prop_assert!(all.len() <= BYTES_MAX && segments.len() <= SEGMENTS_MAX);
            prop_assert!(taken.starts_with(&all));
            prop_assert!(segments.iter().all(|(_, bytes)| bytes.iter().all(|byte| *byte == 7)));
        }

        #[test]
        fn malformed_ndpi_sample_record_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Some((_, segments)) = parse(&bytes) {
                let length: usize = segments.iter().map(|(_, bytes)| HEAD + bytes.len()).sum();
                prop_assert_eq!(length + PORT, bytes.len());
            }
        }
    }
}
