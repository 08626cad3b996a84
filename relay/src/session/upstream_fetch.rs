//! FETCH of the relay's own, at a publisher.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::Arc,
};

use bytes::{Bytes, BytesMut};
use millrace_moq::{
    FetchItem, Filter, GroupOrder, Location, Message, Parameters, TrackName, code,
    data::FetchParser,
    message::{Fetch, FetchKind, RequestError},
};
use millrace_webtransport::RecvStream;
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::timeout};

use super::{
    ask::{ask, failed, wrong_answer},
    context::Context,
};
use crate::{
    hub::{Fetched, Objects, Piece},
    incomplete::Held,
    wire::{RequestStream, SessionError},
};

/// Bytes that are taken from a stream at once.
const READ_SIZE: usize = 64 * 1024;

/// A FETCH response behind its header: the stream, and what was read of it with the header.
pub type Response = (RecvStream, BytesMut);

/// Our FETCH requests at the peer of one session.
pub struct UpstreamFetches {
    context: Arc<Context>,
    /// Those whose data stream has not come, by request ID.
    waiting: Mutex<HashMap<u64, oneshot::Sender<Response>>>,
}

impl UpstreamFetches {
    pub fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, waiting: Mutex::default() })
    }

    /// Fetches objects from `first` to `last`, both inclusive, in `order`.
    ///
    /// # Errors
    /// The publisher refused, or did not answer in time.
    pub async fn fetch(
        &self,
        track: TrackName,
        (first, last): (Location, Location),
        order: GroupOrder,
    ) -> Result<Fetched, RequestError> {
        let request_id = self.context.next_request_id();
        let (sender, stream) = oneshot::channel();
        self.waiting.lock().insert(request_id, sender);
        let _forget = Forget { family: self, request_id };
        let kind = FetchKind::Standalone { track, range: Filter::range(first, last) };
        let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
        let (request, answer) = ask(&self.context, Fetch { request_id, kind, parameters }).await?;
        let ok = match answer {
            Message::FetchOk(ok) => ok,
            other => return Err(wrong_answer(&self.context, &other)),
        };
        let broken = |reason: &str| RequestError::new(code::Request::INTERNAL_ERROR, reason);
        let (recv, front) = timeout(self.context.hub().limits.request_timeout, stream)
            .await
            .map_err(|_| RequestError::new(code::Request::TIMEOUT, "the FETCH stream did not come in time"))?
            .map_err(|_| broken("the session ended"))?;
        let objects = Arriving {
            context: Arc::clone(&self.context),
            _request: request,
            recv,
            held: self.context.incomplete(),
            parser: FetchParser::new(self.context.draft(), order, 0),
            unread: front.freeze(),
            pieces: VecDeque::new(),
            missing: 0,
        };
        Ok(Fetched { ok, objects: Box::new(objects) })
    }

    /// The data stream of a FETCH has come; given back if nobody waits for it.
    pub fn take(&self, request_id: u64, response: Response) -> Result<(), Response> {
        match self.waiting.lock().remove(&request_id) {
            Some(waiting) => {
                let _ = waiting.send(response); // given up meanwhile
                Ok(())
            }
            None => Err(response),
        }
    }
}

/// Forgets a FETCH whose data stream did not come.
struct Forget<'a> {
    family: &'a UpstreamFetches,
    request_id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.family.waiting.lock().remove(&self.request_id);
    }
}

/// A FETCH response that is arriving.
struct Arriving {
    context: Arc<Context>,
    _request: RequestStream,
    recv: RecvStream,
    held: Held,
    parser: FetchParser,
    /// Read and not parsed.
    unread: Bytes,
    pieces: VecDeque<Piece>,
    /// Bytes of the last item's payload that have not come.
    missing: u64,
}

impl Objects for Arriving {
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Result<Option<Piece>, RequestError>> + Send + '_>> {
        Box::pin(async {
            let next = self.read().await;
            next.map_err(|error| failed(&self.context, error))
        })
    }
}

impl Arriving {
    async fn read(&mut self) -> Result<Option<Piece>, SessionError> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Some(piece));
            }
            let chunk = std::mem::take(&mut self.unread);
            self.parse(&chunk)?;
            if !self.pieces.is_empty() {
                continue;
            }
            match self.recv.read_chunk(READ_SIZE, true).await {
                Ok(Some(chunk)) => self.unread = chunk.bytes,
                Ok(None) if self.parser.at_boundary() => return Ok(None),
                Ok(None) => return Err(SessionError::violation("a FETCH stream ends inside an object")),
                Err(error) => return Err(SessionError::Lost(error.to_string())),
            }
        }
    }

    fn parse(&mut self, chunk: &[u8]) -> Result<(), SessionError> {
        let mut rest = chunk;
        loop {
            let payload = rest;
            let found = self.parser.next(&mut rest)?;
            // The parser passed over the rest of the payload, up to the next header.
            let len =
                usize::try_from(self.missing).map_or(payload.len(), |missing| missing.min(payload.len()));
            if len > 0 {
                self.missing -= len as u64;
                // Copied: a slice would keep the whole batch of packets that it came in, which nobody counts.
                self.pieces.push_back(Piece::Payload(Bytes::copy_from_slice(&payload[..len])));
            }
            let Some(found) = found else { break };
            if let FetchItem::Object(object) = &found.item {
                self.missing = object.payload_len;
            }
            self.pieces.push_back(Piece::Item(found.item));
        }
        Ok(self.held.set(self.parser.incomplete())?)
    }
}
