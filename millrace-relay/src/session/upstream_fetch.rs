//! FETCH of the relay's own, at a publisher.

use std::{collections::HashMap, sync::Arc};

use bytes::{Bytes, BytesMut};
use millrace_proto::moq::{
    FetchItem, GroupOrder, Location, Message, Parameters, TrackName, code,
    data::FetchParser,
    message::{Fetch, FetchKind, FetchOk, RequestError},
};
use parking_lot::Mutex;
use quinn::RecvStream;
use tokio::{sync::oneshot, time::timeout};

use super::{
    ask::{ask, failed, wrong_answer},
    context::Context,
};
use crate::wire::SessionError;

/// The largest object that is taken from an upstream FETCH, in bytes: it is held whole until complete.
const MAX_FETCHED_OBJECT: u64 = 64 << 20;

/// A FETCH response behind its header: the stream, and what was read of it with the header.
pub type Response = (RecvStream, BytesMut);

/// Takes the objects of a FETCH response, each with its payload.
pub type Each<'a> = &'a mut (dyn FnMut(FetchItem, Bytes) + Send);

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

    /// Fetches objects from `first` to `last`, both inclusive; `each` gets them in `order`.
    ///
    /// # Errors
    /// The publisher refused, or its answer broke off.
    pub async fn fetch(
        &self,
        track: TrackName,
        (first, last): (Location, Location),
        order: GroupOrder,
        each: Each<'_>,
    ) -> Result<FetchOk, RequestError> {
        let request_id = self.context.next_request_id();
        let (sender, stream) = oneshot::channel();
        self.waiting.lock().insert(request_id, sender);
        let _forget = Forget { family: self, request_id };
        let kind = FetchKind::Standalone { track, start: first, end: after(last) };
        let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
        let (_request, answer) = ask(&self.context, Fetch { request_id, kind, parameters }).await?;
        let ok = match answer {
            Message::FetchOk(ok) => ok,
            other => return Err(wrong_answer(&self.context, &other)),
        };
        let broken = |reason: &str| RequestError::new(code::Request::INTERNAL_ERROR, reason);
        let (recv, front) = timeout(self.context.hub().limits.request_timeout, stream)
            .await
            .map_err(|_| RequestError::new(code::Request::TIMEOUT, "the FETCH stream did not come in time"))?
            .map_err(|_| broken("the session ended"))?;
        match read(recv, front, order, each).await {
            Ok(()) => Ok(ok),
            Err(error) => Err(failed(&self.context, error)),
        }
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

/// The end of a range in FETCH's encoding: the last object plus 1.
pub fn after(last: Location) -> Location {
    // An object ID of 0 means the whole group, which is what no object behind the last one is.
    Location { object: last.object.checked_add(1).unwrap_or(0), ..last }
}

/// The last location of a range whose end is in FETCH's encoding.
pub fn before(end: Location) -> Location {
    Location { object: end.object.checked_sub(1).unwrap_or(u64::MAX), ..end }
}

/// Reads the items of a FETCH response; `front` was read from the stream already, behind its header.
async fn read(
    mut recv: RecvStream,
    front: BytesMut,
    order: GroupOrder,
    each: Each<'_>,
) -> Result<(), SessionError> {
    let mut parser = FetchParser::new(order, 0);
    let mut pending = Pending::default();
    pending.take(&front, &mut parser, each)?;
    loop {
        match recv.read_chunk(64 * 1024, true).await {
            Ok(Some(chunk)) => pending.take(&chunk.bytes, &mut parser, each)?,
            Ok(None) if parser.at_boundary() => return Ok(()),
            Ok(None) => return Err(SessionError::violation("a FETCH stream ends inside an object")),
            Err(error) => return Err(SessionError::Lost(error.to_string())),
        }
    }
}

/// The object of a FETCH response whose payload is arriving.
#[derive(Default)]
struct Pending {
    item: Option<FetchItem>,
    payload: BytesMut,
    missing: usize,
}

impl Pending {
    fn take(
        &mut self,
        mut chunk: &[u8],
        parser: &mut FetchParser,
        each: Each<'_>,
    ) -> Result<(), SessionError> {
        loop {
            let payload = chunk;
            let found = parser.next(&mut chunk)?;
            // The parser passed over the rest of the payload, up to the next header.
            let n = self.missing.min(payload.len());
            self.payload.extend_from_slice(&payload[..n]);
            self.missing -= n;
            if self.missing == 0
                && let Some(item) = self.item.take()
            {
                each(item, self.payload.split().freeze());
            }
            let Some(found) = found else { return Ok(()) };
            self.begin(found.item, each)?;
        }
    }

    fn begin(&mut self, item: FetchItem, each: Each<'_>) -> Result<(), SessionError> {
        match &item {
            FetchItem::Object(object) if object.payload_len > MAX_FETCHED_OBJECT => {
                Err(SessionError::Lost(format!("a fetched object of {} bytes", object.payload_len)))
            }
            FetchItem::Object(object) if object.payload_len > 0 => {
                self.missing = object.payload_len as usize;
                self.item = Some(item);
                Ok(())
            }
            _ => {
                each(item, Bytes::new());
                Ok(())
            }
        }
    }
}
