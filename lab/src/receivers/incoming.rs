//! Finds the objects on a unidirectional stream of the relay, to count them. Payloads are skipped.

use millrace_client::payload::{self, MIN_LEN, Stamp};
use millrace_moq::{DecodeError, Location, ObjectParser, StreamHeader};

/// A stream that is read in pieces of any size.
#[derive(Debug)]
pub struct IncomingStream(IncomingState);

#[derive(Debug)]
enum IncomingState {
    /// Start of the stream, whose header is not complete yet.
    Header(Vec<u8>),
    Objects(IncomingObjects),
    /// A stream without objects: the relay's control stream, or padding.
    Other,
}

#[derive(Debug)]
struct IncomingObjects {
    group: u64,
    parser: ObjectParser,
    current: Option<CurrentObject>,
}

/// An object whose payload has not arrived completely.
#[derive(Debug)]
struct CurrentObject {
    id: u64,
    /// Stream offset of the first byte after the object.
    end: u64,
    /// First bytes of the payload, at most as many as a stamp (number and time of sending) has.
    front: Vec<u8>,
    /// Number of bytes of the payload that belong to the stamp (number and time of sending).
    stamp_len: usize,
}

impl Default for IncomingStream {
    fn default() -> Self {
        Self(IncomingState::Header(Vec::new()))
    }
}

impl IncomingStream {
    /// Reads the next bytes of the stream. Calls `came` for each complete object, with its stamp (number and time of
    /// sending) if it has one.
    ///
    /// # Errors
    ///
    /// Fails if the stream is malformed.
    pub fn take(
        &mut self,
        bytes: &[u8],
        mut came: impl FnMut(Location, Option<Stamp>),
    ) -> Result<(), DecodeError> {
        match &mut self.0 {
            IncomingState::Header(front) => {
                front.extend_from_slice(bytes);
                let front = std::mem::take(front);
                self.begin(front, came)
            }
            IncomingState::Objects(objects) => objects.take(bytes, &mut came),
            IncomingState::Other => Ok(()),
        }
    }

    fn begin(
        &mut self,
        front: Vec<u8>,
        came: impl FnMut(Location, Option<Stamp>),
    ) -> Result<(), DecodeError> {
        let mut rest = &front[..];
        match StreamHeader::decode(&mut rest)? {
            None => self.0 = IncomingState::Header(front),
            Some(StreamHeader::Subgroup(header)) => {
                let parser = ObjectParser::new(&header, (front.len() - rest.len()) as u64);
                self.0 =
                    IncomingState::Objects(IncomingObjects { group: header.group, parser, current: None });
                return self.take(rest, came);
            }
            Some(_) => self.0 = IncomingState::Other,
        }
        Ok(())
    }

    /// Reports whether the stream may carry objects.
    pub fn is_media(&self) -> bool {
        !matches!(self.0, IncomingState::Other)
    }

    /// Reports whether the stream may end at this point.
    pub fn is_whole(&self) -> bool {
        match &self.0 {
            IncomingState::Header(front) => front.is_empty(),
            IncomingState::Objects(objects) => objects.parser.at_boundary(),
            IncomingState::Other => true,
        }
    }
}

impl IncomingObjects {
    fn take(
        &mut self,
        mut bytes: &[u8],
        came: &mut impl FnMut(Location, Option<Stamp>),
    ) -> Result<(), DecodeError> {
        loop {
            // The parser skips the payload, so copy the stamp's bytes first.
            self.fill_stamp(bytes);
            let start = self.parser.next(&mut bytes)?;
            self.end_current(came);
            let Some(start) = start else { return Ok(()) };
            let stamp_len = usize::try_from(start.payload_len).unwrap_or(usize::MAX).min(MIN_LEN);
            let id = start.id;
            let end = start.end();
            self.current = Some(CurrentObject { id, end, front: Vec::new(), stamp_len });
            // An empty payload is complete already: no later call would end this object.
            if start.payload_len == 0 {
                self.end_current(came);
            }
        }
    }

    /// Copies the part of `bytes` that belongs to the current object's stamp.
    fn fill_stamp(&mut self, bytes: &[u8]) {
        if let Some(current) = &mut self.current {
            let missing = current.stamp_len - current.front.len();
            current.front.extend_from_slice(&bytes[..missing.min(bytes.len())]);
        }
    }

    fn end_current(&mut self, came: &mut impl FnMut(Location, Option<Stamp>)) {
        if let Some(current) = self.current.take_if(|current| current.end <= self.parser.offset()) {
            came(Location::new(self.group, current.id), payload::check(&current.front).ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_moq::{Status, SubgroupHeader, SubgroupId, data::encode_object_header};

    use super::*;

    const GROUP: u64 = 3;

    fn stamp(sequence: u64) -> Stamp {
        Stamp { sequence, sent: Duration::from_nanos(77), total: 9 }
    }

    /// Returns a stream with three objects: one with a stamp, one without, and one too short for a stamp.
    fn stream() -> Vec<u8> {
        let header = SubgroupHeader {
            alias: 1,
            group: GROUP,
            subgroup: SubgroupId::Zero,
            priority: None,
            properties: false,
            end_of_group: false,
            first_object: true,
        };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        let payloads = [payload::build(stamp(4), 100).to_vec(), vec![7; 50], vec![7; 3], Vec::new()];
        for (id, payload) in (0..).zip(&payloads) {
            let previous = u64::checked_sub(id, 1);
            encode_object_header(previous, id, None, payload.len() as u64, Status::Normal, &mut bytes);
            bytes.extend_from_slice(payload);
        }
        bytes
    }

    #[test]
    fn objects_of_a_stream_are_parsed_from_reads_of_any_size() {
        let expected = [(0, Some(stamp(4))), (1, None), (2, None), (3, None)];
        let expected = expected.map(|(id, stamp)| (Location::new(GROUP, id), stamp));
        let bytes = stream();
        for size in [1, 2, 31, 33, 64, bytes.len()] {
            let mut incoming = IncomingStream::default();
            let mut found = Vec::new();
            for piece in bytes.chunks(size) {
                incoming.take(piece, |at, stamp| found.push((at, stamp))).unwrap();
            }
            assert_eq!(found, expected, "in pieces of {size}");
            assert!(incoming.is_whole());
        }
    }

    #[test]
    fn incomplete_object_is_not_counted_as_received() {
        let bytes = stream();
        let mut incoming = IncomingStream::default();
        let mut found = 0;
        incoming.take(&bytes[..60], |_, _| found += 1).unwrap();
        assert!(found == 0 && !incoming.is_whole());
    }

    #[test]
    fn streams_without_objects_are_skipped() {
        let mut setup = Vec::new();
        let message = millrace_moq::message::SetupOptions::default();
        millrace_moq::Message::from(message).encode(millrace_moq::Draft::NEWEST, &mut setup).unwrap();
        let mut incoming = IncomingStream::default();
        incoming.take(&setup, |_, _| panic!("an object")).unwrap();
        incoming.take(b"anything", |_, _| panic!("an object")).unwrap();
        assert!(incoming.is_whole() && !incoming.is_media());
        assert!(IncomingStream::default().take(&[0x3f], |_, _| {}).is_err());
    }
}
