//! Assembles whole objects from the bytes of a data stream.

use bytes::{Bytes, BytesMut};
use millrace_moq::data::{FetchItem, FetchParser, ObjectParser, RangeEnd};
use millrace_moq::{Draft, GroupOrder, Location, Status, SubgroupHeader, code};

use crate::session::{DataStream, Error, SessionRequest, violation};

/// The longest payload that a client accepts, in bytes. It bounds the memory for one object.
const MAX_PAYLOAD: u64 = 64 << 20;

/// An object with its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedObject {
    /// The object's location.
    pub location: Location,
    /// The payload.
    pub payload: Bytes,
}

enum StreamObjectParser {
    Subgroup { group: u64, parser: ObjectParser },
    Fetch(FetchParser),
}

impl StreamObjectParser {
    /// Parses `chunk` up to the next object's payload. Returns the object's location and the length of the payload. Sets
    /// `is_partial` at a range of a FETCH response whose objects the sender does not know.
    fn next(&mut self, chunk: &mut &[u8], is_partial: &mut bool) -> Result<Option<(Location, u64)>, Error> {
        match self {
            Self::Subgroup { group, parser } => loop {
                match parser.next(chunk)? {
                    Some(object) if matches!(object.status, None | Some(Status::Normal)) => {
                        return Ok(Some((Location::new(*group, object.id), object.payload_len)));
                    }
                    Some(_) => {}
                    None => return Ok(None),
                }
            },
            Self::Fetch(parser) => loop {
                match parser.next(chunk)?.map(|start| start.item) {
                    Some(FetchItem::Object(object)) => {
                        return Ok(Some((object.location, object.payload_len)));
                    }
                    Some(FetchItem::Range { end, .. }) => *is_partial |= end != RangeEnd::NonExistent,
                    None => return Ok(None),
                }
            },
        }
    }

    fn at_boundary(&self) -> bool {
        match self {
            Self::Subgroup { parser, .. } => parser.at_boundary(),
            Self::Fetch(parser) => parser.at_boundary(),
        }
    }
}

/// The objects of one data stream, in order.
pub struct ObjectStream {
    stream: DataStream,
    parser: StreamObjectParser,
    chunk: Bytes,
    is_partial: bool,
    /// The request stream of the FETCH that this data stream answers. Dropping it before the end would cancel the
    /// request.
    _request: Option<SessionRequest>,
}

impl ObjectStream {
    /// Makes a stream of the objects of a subgroup.
    pub fn subgroup(header: &SubgroupHeader, stream: DataStream) -> Self {
        let parser = ObjectParser::new(header, stream.offset());
        Self {
            stream,
            parser: StreamObjectParser::Subgroup { group: header.group, parser },
            chunk: Bytes::new(),
            is_partial: false,
            _request: None,
        }
    }

    /// Makes a stream of the objects of a FETCH response. `order` is the group order that the FETCH asked for.
    pub fn fetch(draft: Draft, order: GroupOrder, stream: DataStream) -> Self {
        let parser = FetchParser::new(draft, order, stream.offset());
        let parser = StreamObjectParser::Fetch(parser);
        Self { stream, parser, chunk: Bytes::new(), is_partial: false, _request: None }
    }

    /// Keeps the request stream `request` open until this data stream is dropped.
    pub fn answering(self, request: SessionRequest) -> Self {
        Self { _request: Some(request), ..self }
    }

    /// Reports whether a FETCH response has said so far that its sender does not know some of the objects.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Returns the next object, or `None` at FIN. END_OF_GROUP and END_OF_TRACK statuses are skipped. If the peer
    /// resets the stream, the error is [`Error::Cancelled`].
    pub async fn next(&mut self) -> Result<Option<ReceivedObject>, Error> {
        loop {
            let mut rest = &self.chunk[..];
            let found = self.parser.next(&mut rest, &mut self.is_partial)?;
            let consumed = self.chunk.len() - rest.len();
            self.chunk = self.chunk.slice(consumed..);
            if let Some((location, payload_len)) = found {
                let payload = self.payload(payload_len).await?;
                return Ok(Some(ReceivedObject { location, payload }));
            }
            match self.stream.chunk().await? {
                Some(chunk) => self.chunk = chunk,
                None if self.parser.at_boundary() => return Ok(None),
                None => return Err(violation("a stream ends inside an object")),
            }
        }
    }

    /// Returns the next `length` bytes of the stream. Bytes that arrived in one chunk are not copied.
    async fn payload(&mut self, length: u64) -> Result<Bytes, Error> {
        if length > MAX_PAYLOAD {
            self.stream.stop(code::Reset::EXCESSIVE_LOAD);
            return Err(Error::Cancelled);
        }
        let length = length as usize;
        if let Some(payload) = self.chunk.get(..length).map(|_| self.chunk.slice(..length)) {
            self.skip(length)?;
            return Ok(payload);
        }
        let mut payload = BytesMut::with_capacity(length);
        loop {
            let taken = self.chunk.len().min(length - payload.len());
            payload.extend_from_slice(&self.chunk[..taken]);
            self.skip(taken)?;
            if payload.len() == length {
                return Ok(payload.freeze());
            }
            let chunk = self.stream.chunk().await?;
            self.chunk = chunk.ok_or(violation("a stream ends inside an object"))?;
        }
    }

    /// Makes the parser skip `length` bytes of payload.
    fn skip(&mut self, length: usize) -> Result<(), Error> {
        let mut payload = &self.chunk[..length];
        let found = self.parser.next(&mut payload, &mut self.is_partial)?;
        debug_assert!(found.is_none());
        self.chunk = self.chunk.slice(length..);
        Ok(())
    }
}
