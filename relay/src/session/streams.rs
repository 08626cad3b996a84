//! Data streams of a peer: subgroups go to the cache and the subscribers, FETCH responses to the FETCH that asked for
//! them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use millrace_moq::{
    StreamHeader, SubgroupHeader, code,
    incomplete::HeldIncomplete,
    tracks::{
        malformed::TrackMalformed,
        subgroup::{PushError, Pushed, SubgroupReceiver, SubgroupStream},
        track::Duplicate,
    },
};
use millrace_transport::offload::{OffloadIngress, OffloadOpenings};
use millrace_webtransport::RecvStream;
use parking_lot::Mutex;
use quinn::{Dir, ReadError};
use tokio::{
    sync::{Semaphore, oneshot},
    time::sleep,
};
use tracing::warn;

use super::{
    context::SessionContext,
    publish::{Publications, PublishedTrack},
    standby::{READ_SIZE, STANDBY_LOOKS, StandbyCopy, StandbyEnd},
    upstream_fetch::UpstreamFetches,
};
use crate::{
    hub::OperatorCounters,
    live::{LiveTrack, copies::OrphanedSubgroup},
    upstream::EnteringStream,
    wire::{self, MessageReader, SessionError},
};
use millrace_transport::Outbox;

/// How long a stream may wait for the control message that defines its track alias. That message may be delayed by
/// loss; flow control bounds the stream's memory.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(10);
/// The most streams of a session that may wait for another publisher's copy of the same subgroup. Their received bytes
/// occupy the session's receive window.
const MAX_STANDBY: usize = 64;

/// The channel for the peer's control stream; `None` once that stream has come.
pub type ControlSender = Arc<Mutex<Option<oneshot::Sender<MessageReader>>>>;

/// Receives the unidirectional streams of one session.
pub struct StreamReceiver {
    context: Arc<SessionContext>,
    publications: Arc<Publications>,
    fetches: Arc<UpstreamFetches>,
    /// Limits the streams that wait for another copy of their subgroup to end.
    standby: Semaphore,
}

impl StreamReceiver {
    pub fn new(
        context: Arc<SessionContext>,
        publications: Arc<Publications>,
        fetches: Arc<UpstreamFetches>,
    ) -> Self {
        Self { context, publications, fetches, standby: Semaphore::new(MAX_STANDBY) }
    }

    /// Accepts streams until the session is over. The peer's control stream is passed to `control`.
    pub async fn accept(self: &Arc<Self>, control: ControlSender) -> Result<(), SessionError> {
        loop {
            let recv = self.context.connection().streams().accept_uni().await?;
            let streams = Arc::clone(self);
            let control = Arc::clone(&control);
            let open = self.context.connection().count_stream(Dir::Uni);
            self.context.spawn(async move {
                let _open = open;
                streams.take(recv, control).await
            });
        }
    }

    /// Reads a stream's header, and passes the stream to the code that handles its type.
    async fn take(&self, recv: RecvStream, control: ControlSender) -> Result<(), SessionError> {
        let id = recv.id();
        let mut buffer = BytesMut::new();
        let begun = self.enter(recv, &mut buffer).await;
        let entering =
            begun.as_ref().ok().and_then(Option::as_ref).and_then(|(_, header, _)| self.entering(header));
        // The kernel engine is asked for its handle of the stream only after the header has arrived. A WebTransport
        // preamble may arrive alone, and the kernel then opens subscribers' streams only when the header follows.
        let bound = self.context.connection().offload(|offload| offload.accept(id));
        let Some((recv, header, len)) = begun? else { return Ok(()) };
        let mut held = self.context.incomplete();
        match header {
            StreamHeader::Setup => {
                let first = control.lock().take();
                let first = first.ok_or_else(|| SessionError::violation("a second control stream"))?;
                let _ = first.send(self.context.control_reader(recv, buffer)); // An error means that the session is over.
            }
            StreamHeader::Subgroup(header) => {
                held.set(buffer.len())?;
                self.context.until_ready().await?;
                let offloaded = OffloadedStream { ingress: bound, entering };
                self.take_subgroup(recv, ReadHeader { header, len }, offloaded, buffer, held).await?;
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

    /// Counts a subgroup stream as entering (header read, not yet added to its track). The kernel may have forwarded
    /// its beginning already.
    fn entering(&self, header: &StreamHeader) -> Option<EnteringStream> {
        let StreamHeader::Subgroup(header) = header else { return None };
        Some(self.publications.get(header.alias)?.upstream.enter())
    }

    /// Reads a stream's header, and returns it with its length. Returns `None` if the stream ends first, or is not a
    /// MoQ stream. There is no timeout, since congestion may delay a header for long and the number of streams is
    /// limited.
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

    /// Reads a subgroup stream to its end, and forwards each piece as it arrives. `front` contains the bytes that
    /// followed the header.
    async fn take_subgroup(
        &self,
        mut recv: RecvStream,
        read: ReadHeader,
        offloaded: OffloadedStream,
        front: BytesMut,
        held: HeldIncomplete,
    ) -> Result<(), SessionError> {
        let ReadHeader { header, len } = read;
        let counters = &self.context.hub().counters;
        let Some(published) = self.publications.wait(header.alias, ALIAS_TIMEOUT).await else {
            OperatorCounters::count(&counters.unknown_alias);
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        };
        let upstream = Arc::clone(&published.upstream);
        // Counts the stream for PUBLISH_DONE, which says how many streams the publisher has opened.
        let _open = upstream.stream();
        if upstream.has_handed_over(header.group) {
            OperatorCounters::count(&counters.handed_over_subgroups);
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        }
        if !self.publications.takes(&published, header.group) {
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        }
        upstream.begins(header.group);
        // The kernel needs positions in the whole stream, so the writer counts the preamble and the header, too.
        let writer = SubgroupStream::begin_behind(recv.preamble(), header, len);
        let is_bound = offloaded.ingress.is_some();
        let begun =
            self.begin(&published, writer, &mut recv, front.freeze(), is_bound, offloaded.entering).await;
        let BegunSubgroup { writer, front, continues } = match begun {
            Ok(begun) => begun,
            Err(duplicate) => {
                match duplicate {
                    Duplicate::Malformed(malformed) => self.context.malformed(&published.track, malformed),
                    duplicate => counters.count_duplicate(duplicate),
                }
                stop(&mut recv, code::Reset::CANCELLED);
                return Ok(());
            }
        };
        let connection = self.context.connection();
        // Userspace sends the rest of a subgroup whose beginning came from another publisher.
        let ingress = offloaded
            .ingress
            .or_else(|| connection.offload(|offload| offload.ingress(recv.id())))
            .filter(|_| !continues);
        let places = || self.context.quotas().offloaded_track();
        let make = |last| connection.offload(|offload| offload.openings(upstream.alias, last));
        let openings = published.track.openings_of(&upstream, &places, make);
        let track = Arc::clone(&published.track);
        let subgroup = Arc::clone(writer.subgroup());
        track.copies.hold(&subgroup, &upstream);
        let mut arriving = ArrivingSubgroup {
            track: published.track,
            openings,
            subgroup: Arc::clone(&subgroup),
            writer: Some(writer),
            ingress,
            held,
            code: code::Reset::INTERNAL_ERROR,
            is_lost: true,
        };
        let end = tokio::select! {
            // The stream is read first, so that its first bytes are offered to subscribers before it breaks off.
            biased;
            end = arriving.read(counters, &mut recv, front) => end?,
            () = track.copies.asked(&subgroup) => broken_off(&mut recv),
            () = upstream.revoked() => broken_off(&mut recv),
        };
        if let SubgroupEnd::BrokenOff(code, is_reset) = end {
            arriving.is_lost = !is_reset || upstream.loses(code);
        }
        if let Err(malformed) = arriving.end(end)? {
            self.context.malformed(&track, malformed);
        }
        Ok(())
    }

    /// Adds a subgroup to the track. If another copy of it is arriving, this stream waits, bounded by flow control,
    /// until that copy is complete or has broken off, and then continues it. `received_reset` is not awaited while
    /// waiting, because quinn would keep its waker if the whole stream had arrived. A reset is noticed when the stream
    /// is read. `front` contains the bytes that followed the header.
    async fn begin(
        &self,
        PublishedTrack { track, upstream }: &PublishedTrack,
        writer: SubgroupReceiver,
        recv: &mut RecvStream,
        front: Bytes,
        is_bound: bool,
        mut entering: Option<EnteringStream>,
    ) -> Result<BegunSubgroup, Duplicate> {
        let mut place = None;
        let subgroup = Arc::clone(writer.subgroup());
        let mut copy = StandbyCopy::new(recv, front.clone());
        loop {
            let settled = track.settled.notified();
            let begun = track.begin(Instant::now(), upstream, &subgroup, is_bound, self.context.account());
            // The stream no longer counts as entering: the track has it now, or another copy of its subgroup.
            drop(entering.take());
            match begun {
                Ok(()) => return Ok(BegunSubgroup { writer, front, continues: false }),
                Err(Duplicate::Arriving) => {}
                Err(duplicate) => return Err(duplicate),
            }
            if place.is_none() {
                place = Some(self.standby.try_acquire().map_err(|_| Duplicate::Arriving)?);
            }
            let Some(waiting) = track.copies.wait(&subgroup) else {
                tokio::select! {
                    () = settled => {}
                    () = sleep(STANDBY_LOOKS) => {}
                }
                continue;
            };
            match copy.wait(track, &subgroup, waiting).await {
                StandbyEnd::Passed if !copy.is_read() => {}
                StandbyEnd::Passed | StandbyEnd::Differs => return Err(Duplicate::Subgroup),
                StandbyEnd::Continues(writer, front, was_silent) => {
                    if was_silent {
                        track.forward_from(upstream);
                    }
                    return Ok(BegunSubgroup { writer, front, continues: true });
                }
            }
        }
    }
}

/// A subgroup that a stream is read into.
struct BegunSubgroup {
    writer: SubgroupReceiver,
    /// The bytes that were read already, and do not belong to the subgroup yet.
    front: Bytes,
    /// True if another publisher has sent the beginning.
    continues: bool,
}

/// A SUBGROUP_HEADER, and its length in bytes.
struct ReadHeader {
    header: SubgroupHeader,
    len: usize,
}

/// The kernel engine's handles of a subgroup stream. `ingress` is set if the kernel has opened subscribers' streams for
/// it already. `entering` is set until the stream was added to its track.
struct OffloadedStream {
    ingress: Option<Arc<dyn OffloadIngress>>,
    entering: Option<EnteringStream>,
}

/// A subgroup that is arriving. Dropping it ends the subgroup, as incomplete unless its end was read.
struct ArrivingSubgroup {
    track: Arc<LiveTrack>,
    /// The track's openings (streams that the kernel may open by itself). `None` once this stream has prepared them for
    /// the next subgroups.
    openings: Option<Arc<dyn OffloadOpenings>>,
    subgroup: Arc<SubgroupStream>,
    writer: Option<SubgroupReceiver>,
    /// The kernel engine's handle of the stream, if the kernel can forward it.
    ingress: Option<Arc<dyn OffloadIngress>>,
    /// Counts the bytes of an incomplete object header against the session's limit.
    held: HeldIncomplete,
    /// The code with which streams to subscribers are reset if the subgroup does not end otherwise.
    code: code::Reset,
    /// False if the publisher itself has reset the stream. Otherwise the rest may come from another source.
    is_lost: bool,
}

impl Drop for ArrivingSubgroup {
    fn drop(&mut self) {
        let track = Arc::clone(&self.track);
        let settle = move |subgroup: &_, ingress: Option<&_>| {
            track.settle(Instant::now(), subgroup, ingress, &mut Outbox::default());
        };
        let copies = &self.track.copies;
        let keep_since = self.track.may_go_on().then(Instant::now).filter(|_| self.is_lost);
        if (keep_since.is_some() || copies.is_wanted(&self.subgroup))
            && let Some(writer) = self.writer.take()
        {
            // Another stream may continue the subgroup, so the kernel must not forward this one any more.
            drop(self.ingress.take());
            let orphan = OrphanedSubgroup::new(writer, self.code, move |subgroup| settle(subgroup, None));
            copies.release(&self.subgroup, Some(orphan), keep_since);
            // The track's last source may have left while the subgroup was being kept.
            if !self.track.may_go_on() {
                drop(copies.take_before(u64::MAX));
            }
            return;
        }
        copies.release(&self.subgroup, None, None);
        self.writer.take().into_iter().for_each(|writer| writer.reset(self.code));
        settle(&self.subgroup, self.ingress.as_ref());
    }
}

/// How the publisher's stream of a subgroup has ended.
enum SubgroupEnd {
    Fin,
    Reset(code::Reset),
    /// The stream has ended early, which is the publisher's reset if the flag is set. Another publisher's copy may
    /// continue the subgroup.
    BrokenOff(code::Reset, bool),
    Malformed(TrackMalformed),
}

impl ArrivingSubgroup {
    async fn read(
        &mut self,
        counters: &OperatorCounters,
        recv: &mut RecvStream,
        front: Bytes,
    ) -> Result<SubgroupEnd, SessionError> {
        let mut outbox = Outbox::default();
        let mut bytes = front;
        let mut is_first = true;
        loop {
            if self.is_contradicted() {
                return Ok(contradicted(recv));
            }
            // If the header arrived without objects, the kernel is told the position after it now, so that it can
            // forward the next packet.
            let is_news = !bytes.is_empty() || is_first && self.ingress.is_some();
            is_first = false;
            if let Some(writer) = self.writer.as_mut().filter(|_| is_news) {
                let now = Instant::now();
                let data = &self.track.data;
                let group = self.subgroup.header().group;
                let pushed = match bytes.is_empty() {
                    true => Ok(Pushed::default()),
                    false => writer.push(now, &bytes, |objects| data.judge(group, objects)),
                };
                let pushed = match pushed {
                    Ok(pushed) => pushed,
                    Err(PushError::Decode(error)) => {
                        // The parser has read invalid bytes, so no copy can continue the subgroup.
                        self.writer = None;
                        return Err(error.into());
                    }
                    Err(PushError::Malformed(malformed)) => {
                        stop(recv, code::Reset::MALFORMED_TRACK);
                        return Ok(SubgroupEnd::Malformed(malformed));
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
                Ok(None) => return Ok(SubgroupEnd::Fin),
                Err(ReadError::Reset(code)) => {
                    return Ok(SubgroupEnd::BrokenOff(code::Reset(code.into_inner()), true));
                }
                Err(error) => return Err(SessionError::Lost(error.to_string())),
            };
            if self.subgroup.is_evicted() {
                // The cache has dropped the group, so the rest of the stream is of no use.
                stop(recv, code::Reset::CANCELLED);
                return Ok(SubgroupEnd::Reset(code::Reset::CANCELLED));
            }
        }
    }

    fn is_contradicted(&self) -> bool {
        self.ingress.as_ref().is_some_and(|ingress| ingress.is_contradicted())
    }

    /// Ends the subgroup. An error in the inner `Result` reports that the subgroup's track is malformed.
    fn end(mut self, end: SubgroupEnd) -> Result<Result<(), TrackMalformed>, SessionError> {
        if let SubgroupEnd::BrokenOff(code, _) = end {
            self.code = code;
            return Ok(Ok(()));
        }
        let Some(writer) = self.writer.take() else { return Ok(Ok(())) };
        match end {
            SubgroupEnd::Fin => {
                let header = self.subgroup.header();
                let last = self.subgroup.last_object_id().filter(|_| header.end_of_group);
                // The last object of the group is recorded before subscribers see the end of the stream.
                let judged = last.map_or(Ok(()), |last| self.track.data.group_ended(header.group, last));
                writer.finish(Instant::now())?;
                Ok(judged)
            }
            SubgroupEnd::Reset(code) | SubgroupEnd::BrokenOff(code, _) => {
                writer.reset(code);
                Ok(Ok(()))
            }
            SubgroupEnd::Malformed(malformed) => {
                writer.reset(code::Reset::MALFORMED_TRACK);
                Ok(Err(malformed))
            }
        }
    }
}

/// Reads until the header is complete. Returns the header and its length, and leaves the bytes after it in `buffer`.
/// Returns `None` if the stream ended or was reset first.
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

/// Ends a stream because its publisher has sent different bytes for the same offset. Subscribers may have received
/// either version of these bytes.
fn contradicted(recv: &mut RecvStream) -> SubgroupEnd {
    warn!(stream = %recv.id(), "dropped a stream: its publisher has sent different bytes for the same offset");
    stop(recv, code::Reset::CANCELLED);
    SubgroupEnd::Reset(code::Reset::CANCELLED)
}

/// Ends a stream whose publisher is gone, or silent while another one has more of the subgroup.
fn broken_off(recv: &mut RecvStream) -> SubgroupEnd {
    stop(recv, code::Reset::CANCELLED);
    SubgroupEnd::BrokenOff(code::Reset::CANCELLED, false)
}

fn stop(recv: &mut RecvStream, code: code::Reset) {
    let _ = recv.stop(wire::var(code.0)); // An error means that the stream has ended.
}
