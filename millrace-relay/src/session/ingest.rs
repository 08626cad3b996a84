//! Media from publishers: subgroup streams and datagrams into the cache and on to the subscribers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use millrace_proto::{
    moq::{Datagram, StreamHeader, SubgroupHeader, code},
    relay::{
        subgroup::{Pushed, Subgroup, SubgroupWriter},
        track::{DatagramObject, Duplicate},
    },
};
use millrace_transport::offload::Ingress;
use quinn::{ReadError, RecvStream};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

use super::Session;
use crate::{
    hub::Counters,
    outbox::Outbox,
    upstream::Upstream,
    wire::{self, MessageReader, SessionError},
};

/// How long a stream may wait for the control message that says what its track alias means. Loss can hold
/// that message up for a while, and the stream waits in its flow control window.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for datagrams, and how many of a session may wait.
const DATAGRAM_PATIENCE: Duration = Duration::from_millis(500);
const MAX_WAITING_DATAGRAMS: usize = 64;
/// Bytes that are taken from a stream at once.
const READ_SIZE: usize = 64 * 1024;

impl Session {
    pub(super) async fn accept_streams(
        self: &Arc<Self>,
        control: mpsc::Sender<MessageReader>,
    ) -> Result<(), SessionError> {
        loop {
            let recv = self.connection.quic.accept_uni().await?;
            let (session, control) = (Arc::clone(self), control.clone());
            tokio::spawn(async move {
                if let Err(error) = session.take_stream(recv, control).await {
                    session.fail(error);
                }
            });
        }
    }

    /// Reads a stream's header and takes the stream to where it belongs.
    async fn take_stream(
        self: &Arc<Self>,
        mut recv: RecvStream,
        control: mpsc::Sender<MessageReader>,
    ) -> Result<(), SessionError> {
        let mut buffer = BytesMut::new();
        // Without a limit of time: congestion can hold a header up for long, and streams are limited.
        match read_header(&mut recv, &mut buffer).await? {
            Some((StreamHeader::Setup, _)) => {
                let _ = control.send(MessageReader::new(recv, buffer)).await; // the session is over
                Ok(())
            }
            Some((StreamHeader::Subgroup(header), len)) => {
                self.until_ready().await?;
                self.take_subgroup(recv, header, len, buffer).await
            }
            Some((StreamHeader::Fetch { request_id }, _)) => {
                match self.state.lock().fetches.remove(&request_id) {
                    Some(waiting) => drop(waiting.send((recv, buffer))), // given up meanwhile
                    None => stop(&mut recv, code::Reset::CANCELLED),
                }
                Ok(())
            }
            Some((StreamHeader::Padding, _)) => discard(recv).await,
            None => Ok(()),
        }
    }

    /// Reads a subgroup stream to its end, passing on every piece as it comes.
    async fn take_subgroup(
        self: &Arc<Self>,
        mut recv: RecvStream,
        header: SubgroupHeader,
        header_len: usize,
        front: BytesMut,
    ) -> Result<(), SessionError> {
        let Some(upstream) = self.upstream_of(header.alias, ALIAS_TIMEOUT).await else {
            Counters::count(&self.hub.counters.unknown_alias);
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        };
        let _open = upstream.stream();
        let mut writer = Subgroup::begin(header, header_len);
        if let Err(duplicate) = upstream.track.begin(Instant::now(), writer.subgroup()) {
            self.count_duplicate(duplicate);
            stop(&mut recv, code::Reset::CANCELLED);
            return Ok(());
        }
        let subgroup = Arc::clone(writer.subgroup());
        let ingress = self.connection.ingress(recv.id());
        let result = self.read_subgroup(&mut recv, &mut writer, &upstream, ingress.as_ref(), front).await;
        let (now, mut outbox) = (Instant::now(), Outbox::default());
        let result = match result {
            Ok(Finish::Fin) => writer.finish(now).map_err(SessionError::from),
            Ok(Finish::Reset(code)) => {
                writer.reset(code);
                Ok(())
            }
            Err(error) => {
                drop(writer); // incomplete
                Err(error)
            }
        };
        upstream.track.settle(now, &subgroup, &mut outbox);
        result
    }

    async fn read_subgroup(
        &self,
        recv: &mut RecvStream,
        writer: &mut SubgroupWriter,
        upstream: &Arc<Upstream>,
        ingress: Option<&Arc<dyn Ingress>>,
        front: BytesMut,
    ) -> Result<Finish, SessionError> {
        let subgroup = Arc::clone(writer.subgroup());
        let mut outbox = Outbox::default();
        let mut bytes = front.freeze();
        loop {
            if !bytes.is_empty() {
                let now = Instant::now();
                let pushed = writer.push(now, &bytes)?;
                self.count_objects(&pushed);
                upstream.track.advance(now, &subgroup, &pushed, ingress, &mut outbox);
            }
            bytes = match recv.read_chunk(READ_SIZE, true).await {
                Ok(Some(chunk)) => chunk.bytes,
                Ok(None) => return Ok(Finish::Fin),
                Err(ReadError::Reset(code)) => return Ok(Finish::Reset(code::Reset(code.into_inner()))),
                Err(error) => return Err(SessionError::Lost(error.to_string())),
            };
            if subgroup.is_evicted() {
                // Too old to be of use for anybody.
                stop(recv, code::Reset::CANCELLED);
                return Ok(Finish::Reset(code::Reset::CANCELLED));
            }
        }
    }

    fn count_objects(&self, pushed: &Pushed) {
        let counters = &self.hub.counters;
        Counters::add(&counters.objects_received, pushed.objects);
        Counters::add(&counters.object_bytes_received, pushed.payload_bytes);
    }

    fn count_duplicate(&self, duplicate: Duplicate) {
        let counters = &self.hub.counters;
        Counters::count(match duplicate {
            Duplicate::Subgroup => &counters.duplicate_subgroups,
            Duplicate::Expired => &counters.expired_subgroups,
            Duplicate::Datagram => &counters.duplicate_datagrams,
        });
    }

    /// The subscription that a track alias stands for, once it is known.
    async fn upstream_of(&self, alias: u64, patience: Duration) -> Option<Arc<Upstream>> {
        let known = async {
            loop {
                let changed = self.aliases_changed.notified();
                if let Some(upstream) = self.state.lock().upstreams.get(&alias).cloned() {
                    return upstream;
                }
                changed.await;
            }
        };
        timeout(patience, known).await.ok()
    }

    pub(super) async fn accept_datagrams(self: &Arc<Self>) -> Result<(), SessionError> {
        let mut outbox = Outbox::default();
        let places = Arc::new(Semaphore::new(MAX_WAITING_DATAGRAMS));
        loop {
            let bytes = self.connection.quic.read_datagram().await?;
            let Some(datagram) = Datagram::decode(bytes)? else { continue };
            let object = DatagramObject { datagram: owned(datagram), received_at: Instant::now() };
            let upstream = self.state.lock().upstreams.get(&object.datagram.alias).cloned();
            match (upstream, Arc::clone(&places).try_acquire_owned()) {
                (Some(upstream), _) => self.take_datagram(&upstream, object, &mut outbox),
                // The control message that explains it may be right behind.
                (None, Ok(place)) => drop(tokio::spawn(Arc::clone(self).hold_datagram(object, place))),
                (None, Err(_)) => Counters::count(&self.hub.counters.unknown_alias),
            }
        }
    }

    async fn hold_datagram(self: Arc<Self>, object: DatagramObject, _place: OwnedSemaphorePermit) {
        match self.upstream_of(object.datagram.alias, DATAGRAM_PATIENCE).await {
            Some(upstream) => self.take_datagram(&upstream, object, &mut Outbox::default()),
            None => Counters::count(&self.hub.counters.unknown_alias),
        }
    }

    fn take_datagram(&self, upstream: &Upstream, object: DatagramObject, outbox: &mut Outbox) {
        upstream.saw_datagram();
        let payload_bytes = object.datagram.payload.len() as u64;
        self.count_objects(&Pushed { objects: 1, payload_bytes, ..Pushed::default() });
        let ingress = upstream.datagram_ingress(|| self.connection.ingress_datagrams(upstream.alias));
        if let Err(duplicate) = upstream.track.datagram(object, ingress.as_ref(), outbox) {
            self.count_duplicate(duplicate);
        }
    }
}

enum Finish {
    Fin,
    Reset(code::Reset),
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

async fn discard(mut recv: RecvStream) -> Result<(), SessionError> {
    while let Ok(Some(_)) = recv.read_chunk(READ_SIZE, false).await {}
    Ok(())
}

fn stop(recv: &mut RecvStream, code: code::Reset) {
    let _ = recv.stop(wire::var(code.0)); // it has ended by itself
}

/// A copy that does not keep the whole received packet in memory.
fn owned(datagram: Datagram) -> Datagram {
    Datagram {
        properties: Bytes::copy_from_slice(&datagram.properties),
        payload: Bytes::copy_from_slice(&datagram.payload),
        ..datagram
    }
}
