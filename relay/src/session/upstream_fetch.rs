//! Sends the relay's own FETCH requests to a publisher, and reads their responses.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::Arc,
};

use bytes::{Bytes, BytesMut};
use millrace_moq::{
    FetchItem, Filter, GroupOrder, Location, Message, Parameters, TrackName, code,
    data::FetchParser,
    incomplete::HeldIncomplete,
    message::{FetchKind, FetchRequest, RequestError},
};
use millrace_webtransport::RecvStream;
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::timeout};

use super::{
    ask::{ask, failed, wrong_answer},
    context::SessionContext,
};
use crate::{
    hub::{FetchAnswer, FetchPiece, FetchedObjects},
    wire::{RequestStream, SessionError},
};

/// The most bytes that are read from a stream at once.
const READ_SIZE: usize = 64 * 1024;

/// A FETCH response without its header: the stream, and the bytes that were read after the header.
pub type UpstreamResponse = (RecvStream, BytesMut);

/// The relay's FETCH requests to the peer of one session.
pub struct UpstreamFetches {
    context: Arc<SessionContext>,
    /// FETCH requests whose data stream has not arrived yet, by request ID.
    waiting: Mutex<HashMap<u64, oneshot::Sender<UpstreamResponse>>>,
    /// Each FETCH that is under way holds a copy.
    under_way: Arc<()>,
}

impl UpstreamFetches {
    pub fn new(context: Arc<SessionContext>) -> Arc<Self> {
        Arc::new(Self { context, waiting: Mutex::default(), under_way: Arc::default() })
    }

    /// Reports whether no FETCH is under way.
    pub fn is_idle(&self) -> bool {
        Arc::strong_count(&self.under_way) == 1
    }

    /// Fetches objects from `first` to `last` in `order`. Both ends are included.
    ///
    /// # Errors
    /// Returns an error if the publisher refused, or did not answer in time.
    pub async fn fetch(
        &self,
        track: TrackName,
        first: Location,
        last: Location,
        order: GroupOrder,
    ) -> Result<FetchAnswer, RequestError> {
        let under_way = Arc::clone(&self.under_way);
        let request_id = self.context.next_request_id();
        let (sender, stream) = oneshot::channel();
        // The FETCH is registered before the request is sent, since the data stream may arrive before FETCH_OK.
        self.waiting.lock().insert(request_id, sender);
        let _forget = ForgetFetch { family: self, request_id };
        let kind = FetchKind::Standalone { track, range: Filter::range(first, last) };
        let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
        let (request, answer) = ask(&self.context, FetchRequest { request_id, kind, parameters }).await?;
        let ok = match answer {
            Message::FetchOk(ok) => ok,
            other => return Err(wrong_answer(&self.context, &other)),
        };
        let broken = |reason: &str| RequestError::new(code::Request::INTERNAL_ERROR, reason);
        let (recv, front) = timeout(self.context.hub().limits.request_timeout, stream)
            .await
            .map_err(|_| RequestError::new(code::Request::TIMEOUT, "the FETCH stream did not come in time"))?
            .map_err(|_| broken("the session ended"))?;
        let objects = ArrivingResponse {
            context: Arc::clone(&self.context),
            _request: request,
            _under_way: under_way,
            recv,
            held: self.context.incomplete(),
            parser: FetchParser::new(self.context.draft(), order, 0),
            unread: front.freeze(),
            pieces: VecDeque::new(),
            missing: 0,
        };
        Ok(FetchAnswer { ok, objects: Box::new(objects) })
    }

    /// Passes the data stream of a FETCH response to the task that has sent the FETCH. Returns the stream if no FETCH
    /// waits for it.
    pub fn take(&self, request_id: u64, response: UpstreamResponse) -> Result<(), UpstreamResponse> {
        match self.waiting.lock().remove(&request_id) {
            Some(waiting) => {
                let _ = waiting.send(response); // An error means that the FETCH was cancelled in the meantime.
                Ok(())
            }
            None => Err(response),
        }
    }
}

/// A guard that, when dropped, removes a FETCH from those that wait for their data stream.
struct ForgetFetch<'a> {
    family: &'a UpstreamFetches,
    request_id: u64,
}

impl Drop for ForgetFetch<'_> {
    fn drop(&mut self) {
        self.family.waiting.lock().remove(&self.request_id);
    }
}

/// A FETCH response that is being received.
struct ArrivingResponse {
    context: Arc<SessionContext>,
    _request: RequestStream,
    _under_way: Arc<()>,
    recv: RecvStream,
    held: HeldIncomplete,
    parser: FetchParser,
    /// Bytes that were read from the FETCH response's stream but not parsed yet.
    unread: Bytes,
    pieces: VecDeque<FetchPiece>,
    /// Number of payload bytes of the last received object that have not arrived.
    missing: u64,
}

impl FetchedObjects for ArrivingResponse {
    fn next(
        &mut self,
    ) -> Pin<Box<dyn Future<Output = Result<Option<FetchPiece>, RequestError>> + Send + '_>> {
        Box::pin(async {
            let next = self.read().await;
            next.map_err(|error| failed(&self.context, error))
        })
    }
}

impl ArrivingResponse {
    async fn read(&mut self) -> Result<Option<FetchPiece>, SessionError> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Some(piece));
            }
            // Bytes that were read with the stream's header, or by the previous read, are parsed first.
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
            // The parser has skipped payload bytes up to the next header; they belong to the previous object.
            let len =
                usize::try_from(self.missing).map_or(payload.len(), |missing| missing.min(payload.len()));
            if len > 0 {
                self.missing -= len as u64;
                // The bytes are copied, because a slice would keep the buffer of a whole batch of received packets in
                // memory, and no limit counts that buffer.
                self.pieces.push_back(FetchPiece::Payload(Bytes::copy_from_slice(&payload[..len])));
            }
            let Some(found) = found else { break };
            if let FetchItem::Object(object) = &found.item {
                self.missing = object.payload_len;
            }
            self.pieces.push_back(FetchPiece::Item(found.item));
        }
        Ok(self.held.set(self.parser.incomplete())?)
    }
}
