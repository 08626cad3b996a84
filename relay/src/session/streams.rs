//! Data streams of the peer: subgroups into the cache and on to the subscribers, FETCH responses.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_moq::{
    StreamHeader, SubgroupHeader, SubgroupId, code,
    tracks::{
        malformed::Malformed,
        subgroup::{PushError, Subgroup, SubgroupWriter},
        track::Duplicate,
    },
};
use millrace_transport::offload::{Ingress, Openings};
use millrace_webtransport::RecvStream;
use quinn::ReadError;
use tokio::sync::{Semaphore, mpsc};
use tracing::warn;

use super::{context::Context, publish::Publications, upstream_fetch::UpstreamFetches};
use crate::{
    hub::Counters,
    incomplete::Held,
    live::LiveTrack,
    outbox::Outbox,
    wire::{self, MessageReader, SessionError},
};

/// How long a stream may wait for the control message that says what its track alias means. Loss can hold
/// that message up for a while, and the stream waits in its flow control window.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are taken from a stream at once.
const READ_SIZE: usize = 64 * 1024;
/// Streams of a session that may wait for another publisher's copy of the same subgroup to end. What has come of them
/// counts against the session's receive window.
const MAX_STANDBY: usize = 64;

/// Where the streams of one session go.
pub struct Streams {
    context: Arc<Context>,
    publications: Arc<Publications>,
    fetches: Arc<UpstreamFetches>,
    /// Places for streams that wait for another copy of theirs to end.
    standby: Semaphore,
}

impl Streams {
    pub fn new(
        context: Arc<Context>,
        publications: Arc<Publications>,
        fetches: Arc<UpstreamFetches>,
    ) -> Self {
        Self { context, publications, fetches, standby: Semaphore::new(MAX_STANDBY) }
    }

    /// Takes streams until the session is over; the control stream goes to `control`.
    pub async fn accept(self: &Arc<Self>, control: mpsc::Sender<MessageReader>) -> Result<(), SessionError> {
        loop {
            let recv = self.context.connection().streams().accept_uni().await?;
            let (streams, control) = (Arc::clone(self), control.clone());
            self.context.spawn(async move { streams.take(recv, control).await });
        }
    }

    /// Reads a stream's header and takes the stream to where it belongs.
    async fn take(&self, recv: RecvStream, control: mpsc::Sender<MessageReader>) -> Result<(), SessionError> {
        let (id, mut buffer) = (recv.id(), BytesMut::new());
        let begun = self.enter(recv, &mut buffer).await;
        // Not before: what has come may be a preamble, behind which the kernel opens streams for the header.
        let bound = self.context.connection().offload(|offload| offload.accept(id));
        let Some((recv, header, len)) = begun? else { return Ok(()) };
        let mut held = self.context.incomplete();
        match header {
            StreamHeader::Setup => {
                let reader = self.context.control_reader(recv, buffer);
                let _ = control.send(reader).await; // the session is over
            }
            StreamHeader::Subgroup(header) => {
                held.set(buffer.len())?;
                self.context.until_ready().await?;
                self.take_subgroup(recv, (header, len), bound, buffer, held).await?;
            }
            StreamHeader::Fetch { request_id } => {
                if let Err((mut recv, _)) = self.fetches.take(request_id, (recv, buffer)) {
                    stop(&mut recv, code::Reset::CANCELLED);
                }
            }
            StreamHeader::Padding => recv.discard().await,
        }
        Ok(())
    }

    /// Reads a stream's header, and says its length; `None`: it has none, or is not the application's. Without a limit of time:
    /// congestion can hold a header up for long, and streams are limited.
    async fn enter(
        &self,
        recv: RecvStream,
        buffer: &mut BytesMut,
    ) -> Result<Option<(RecvStream, StreamHeader, usize)>, SessionError> {
        let entered = self.context.connection().streams().enter_uni(recv).await?;
        let Some(mut recv) = entered else { return Ok(None) };
        let header = read_header(&mut recv, buffer).await?;
        Ok(header.map(|(header, len)| (recv, header, len)))
    }

    /// Reads a subgroup stream to its end, passing on every piece as it comes. `bound` is what the offload has opened
    /// streams for, if it has.
    async fn take_subgroup(
        &self,
        mut recv: RecvStream,
        (header, header_len): (SubgroupHeader, usize),
        bound: Option<Arc<dyn Ingress>>,
        front: BytesMut,
        held: Held,
    ) -> Result<(), SessionError> {
        let counters = &self.context.hub().counters;
        let Some(published) = self.publications.wait(header.alias, ALIAS_TIMEOUT).await else {
            Counters::count(&counters.unknown_alias);
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        };
        let upstream = Arc::clone(&published.upstream);
        let _open = upstream.stream();
        if upstream.has_handed_over(header.group) {
            Counters::count(&counters.handed_over_subgroups);
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        }
        if !self.publications.takes(&published, header.group) {
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        }
        let writer = Subgroup::begin_behind(recv.preamble(), header, header_len);
        if let Err(duplicate) = self.begin(&published.track, writer.subgroup(), &mut recv).await {
            match duplicate {
                Duplicate::Malformed(malformed) => self.context.malformed(&published.track, malformed),
                duplicate => counters.count_duplicate(duplicate),
            }
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        }
        let connection = self.context.connection();
        let ingress = bound.or_else(|| connection.offload(|offload| offload.ingress(recv.id())));
        let subgroup = (header.group, explicit_id(&header));
        let places = || self.context.quotas().offloaded_track();
        let make = || connection.offload(|offload| offload.openings(upstream.alias, subgroup));
        let openings = upstream.openings(&places, make);
        openings.iter().for_each(|openings| openings.began(subgroup));
        let track = Arc::clone(&published.track);
        let mut arriving = Arriving {
            track: published.track,
            openings,
            subgroup: Arc::clone(writer.subgroup()),
            writer: Some(writer),
            ingress,
            held,
        };
        let end = tokio::select! {
            end = arriving.read(counters, &mut recv, front) => end?,
            () = upstream.revoked() => {
                stop(&mut recv, code::Reset::CANCELLED);
                End::Reset(code::Reset::CANCELLED)
            }
        };
        if let Err(malformed) = arriving.end(end)? {
            self.context.malformed(&track, malformed);
        }
        Ok(())
    }

    /// Has the track take a subgroup. One that is arriving from elsewhere too waits, in its flow control window, until
    /// the other copy is whole or has broken off.
    async fn begin(
        &self,
        track: &LiveTrack,
        subgroup: &Arc<Subgroup>,
        recv: &mut RecvStream,
    ) -> Result<(), Duplicate> {
        let mut place = None;
        loop {
            let settled = track.settled.notified();
            match track.begin(Instant::now(), subgroup, self.context.account()) {
                Err(Duplicate::Arriving) => {}
                decided => return decided,
            }
            if place.is_none() {
                place = Some(self.standby.try_acquire().map_err(|_| Duplicate::Arriving)?);
            }
            tokio::select! {
                () = settled => {}
                () = reset(recv) => return Err(Duplicate::Arriving),
            }
        }
    }
}

/// A subgroup that is arriving. When dropped it has ended: incomplete, unless its end had come.
struct Arriving {
    track: Arc<LiveTrack>,
    /// Of the track, until it is known that the next subgroups need some.
    openings: Option<Arc<dyn Openings>>,
    subgroup: Arc<Subgroup>,
    writer: Option<SubgroupWriter>,
    /// As the offload may forward it.
    ingress: Option<Arc<dyn Ingress>>,
    /// Of an object header that is not complete.
    held: Held,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        drop(self.writer.take());
        self.track.settle(Instant::now(), &self.subgroup, self.ingress.as_ref(), &mut Outbox::default());
    }
}

/// How a stream ended.
enum End {
    Fin,
    Reset(code::Reset),
    Malformed(Malformed),
}

impl Arriving {
    async fn read(
        &mut self,
        counters: &Counters,
        recv: &mut RecvStream,
        front: BytesMut,
    ) -> Result<End, SessionError> {
        let mut outbox = Outbox::default();
        let mut bytes = front.freeze();
        loop {
            if self.is_contradicted() {
                return Ok(contradicted(recv));
            }
            if let Some(writer) = self.writer.as_mut().filter(|_| !bytes.is_empty()) {
                let now = Instant::now();
                let (data, group) = (&self.track.data, self.subgroup.header().group);
                let pushed = match writer.push(now, &bytes, |objects| data.judge(group, objects)) {
                    Ok(pushed) => pushed,
                    Err(PushError::Decode(error)) => return Err(error.into()),
                    Err(PushError::Malformed(malformed)) => {
                        stop(recv, code::Reset::MALFORMED_TRACK);
                        return Ok(End::Malformed(malformed));
                    }
                };
                self.held.set(writer.incomplete())?;
                counters.count_pushed(&pushed);
                let ingress = self.ingress.as_ref();
                if let Some(ingress) = ingress {
                    ingress.advance(&writer.position());
                    if ingress.is_contradicted() {
                        return Ok(contradicted(recv));
                    }
                }
                self.track.advance(now, &self.subgroup, &pushed, ingress, &mut outbox);
                if let Some(openings) = self.openings.take() {
                    self.track.replenish(&openings);
                }
            }
            bytes = match recv.read_chunk(READ_SIZE, true).await {
                Ok(Some(chunk)) => chunk.bytes,
                Ok(None) => return Ok(End::Fin),
                Err(ReadError::Reset(code)) => return Ok(End::Reset(code::Reset(code.into_inner()))),
                Err(error) => return Err(SessionError::Lost(error.to_string())),
            };
            if self.subgroup.is_evicted() {
                // Too old to be of use for anybody.
                stop(recv, code::Reset::CANCELLED);
                return Ok(End::Reset(code::Reset::CANCELLED));
            }
        }
    }

    fn is_contradicted(&self) -> bool {
        self.ingress.as_ref().is_some_and(|ingress| ingress.is_contradicted())
    }

    /// Has the subgroup end; what shows then that its track is malformed.
    fn end(mut self, end: End) -> Result<Result<(), Malformed>, SessionError> {
        let Some(writer) = self.writer.take() else { return Ok(Ok(())) };
        match end {
            End::Fin => {
                let header = self.subgroup.header();
                let last = self.subgroup.last_object_id().filter(|_| header.end_of_group);
                // Before anybody hears of the end.
                let judged = last.map_or(Ok(()), |last| self.track.data.group_ended(header.group, last));
                writer.finish(Instant::now())?;
                Ok(judged)
            }
            End::Reset(code) => {
                writer.reset(code);
                Ok(Ok(()))
            }
            End::Malformed(malformed) => {
                writer.reset(code::Reset::MALFORMED_TRACK);
                Ok(Err(malformed))
            }
        }
    }
}

/// Reads until the header is complete; it and its length, with what follows left in `buffer`. `None`: the
/// stream ended or was reset before.
async fn read_header(
    recv: &mut RecvStream,
    buffer: &mut BytesMut,
) -> Result<Option<(StreamHeader, usize)>, SessionError> {
    loop {
        let mut front = &buffer[..];
        if let Some(header) = StreamHeader::decode(&mut front)? {
            let len = buffer.len() - front.len();
            let _header = buffer.split_to(len);
            return Ok(Some((header, len)));
        }
        match recv.read_chunk(READ_SIZE, true).await {
            Ok(Some(chunk)) => buffer.extend_from_slice(&chunk.bytes),
            Ok(None) | Err(ReadError::Reset(_)) => return Ok(None),
            Err(error) => return Err(SessionError::Lost(error.to_string())),
        }
    }
}

/// The subgroup's ID as far as the header says it.
fn explicit_id(header: &SubgroupHeader) -> u64 {
    match header.subgroup {
        SubgroupId::Explicit(id) => id,
        SubgroupId::Zero | SubgroupId::FirstObject => 0,
    }
}

/// Until the peer resets the stream, or the connection is lost.
async fn reset(recv: &mut RecvStream) {
    if let Ok(None) = recv.received_reset().await {
        std::future::pending().await // all of it has arrived
    }
}

/// The publisher has sent two versions of the stream, and subscribers may have begun to get the other one.
fn contradicted(recv: &mut RecvStream) -> End {
    warn!(stream = %recv.id(), "gave up a stream of which the publisher has sent different bytes for one offset");
    stop(recv, code::Reset::CANCELLED);
    End::Reset(code::Reset::CANCELLED)
}

fn stop(recv: &mut RecvStream, code: code::Reset) {
    let _ = recv.stop(wire::var(code.0)); // it has ended by itself
}
