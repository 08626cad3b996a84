//! Streams of the hostile client, and MoQ messages on them.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail};
use bytes::BytesMut;
use millrace_moq::{Message, message::SetupOptions};
use millrace_quic::{frame, webtransport::Binding};

use super::{DRAFT, HostilePeer, PATIENCE, PeerTarget, ROOM};

/// Longest time that a scenario waits for credit. The relay gives it once it has handled the earlier requests and
/// streams, which takes a while on a busy machine and with the relay's limit of requests per second.
const CREDIT_PATIENCE: Duration = Duration::from_secs(120);

/// Received data of a stream.
#[derive(Default)]
pub struct ReceivedStream {
    chunks: BTreeMap<u64, Vec<u8>>,
    /// Number of bytes that have been read.
    taken: u64,
    pub fin: bool,
    pub reset: Option<u64>,
    pub stopped: Option<u64>,
}

impl ReceivedStream {
    pub fn insert(&mut self, offset: u64, data: &[u8]) {
        let known = self.chunks.entry(offset).or_default();
        if known.len() < data.len() {
            *known = data.to_vec();
        }
    }

    /// Returns the contiguous bytes that arrived since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        while let Some(first) = self.chunks.first_entry() {
            let offset = *first.key();
            if offset > self.taken {
                break;
            }
            let data = first.remove();
            // A retransmission may overlap what has been read already.
            let known = usize::try_from(self.taken - offset).unwrap_or(usize::MAX).min(data.len());
            out.extend_from_slice(&data[known..]);
            self.taken += (data.len() - known) as u64;
        }
        out
    }
}

/// Kind of a stream that the client opens. The number is the lowest two bits of the stream's ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    Request = 0,
    Data = 2,
}

impl HostilePeer {
    /// Opens the MoQ control stream and sends SETUP on it.
    pub fn setup(&mut self, target: &PeerTarget) -> Result<()> {
        let is_bare = self.binding == Binding::Bare;
        let setup = SetupOptions {
            path: is_bare.then(|| target.path.clone()),
            authority: is_bare.then(|| target.name.clone()),
            implementation: Some("millrace-lab lab hostile".to_owned()),
            ..SetupOptions::default()
        };
        self.open(StreamKind::Data, &encoded(setup)?, false)?;
        self.settle()
    }

    /// Opens a MoQ stream that starts with `data`, as soon as the relay's limit allows one more.
    pub fn open(&mut self, kind: StreamKind, data: &[u8], fin: bool) -> Result<u64> {
        // In a WebTransport session, each stream starts with a prefix that names the session.
        let preamble = match kind {
            StreamKind::Request => self.binding.bidi(),
            StreamKind::Data => self.binding.uni(),
        };
        self.open_bare(kind, &[&preamble, data].concat(), fin)
    }

    /// Opens a QUIC stream that starts with `data`, without the prefix of a WebTransport session.
    pub fn open_bare(&mut self, kind: StreamKind, data: &[u8], fin: bool) -> Result<u64> {
        let index = usize::from(kind == StreamKind::Data);
        let may = |peer: &Self| {
            let limits = [peer.credit.streams_bidi, peer.credit.streams_uni];
            peer.opened[index] < limits[index]
        };
        if !may(self) && !self.pump(CREDIT_PATIENCE, may) {
            bail!(
                "the relay does not allow another stream: {}",
                self.closed.as_deref().unwrap_or("no credit in time")
            );
        }
        let id = self.opened[index] * 4 + kind as u64;
        self.opened[index] += 1;
        self.counts.streams_opened += 1;
        self.write(id, data, fin)?;
        Ok(id)
    }

    /// Appends `data` to a stream, as fast as the relay's credit allows.
    pub fn write(&mut self, id: u64, data: &[u8], fin: bool) -> Result<()> {
        let mut rest = data;
        loop {
            let offset = self.offsets.get(&id).copied().unwrap_or_default();
            let room = self.room(id);
            if room == 0 && !rest.is_empty() {
                if !self.pump(CREDIT_PATIENCE, |peer| peer.room(id) > 0 || peer.is_stopped(id))
                    || self.is_stopped(id)
                {
                    bail!(
                        "the relay allows no more data on stream {id}: {}",
                        self.closed.as_deref().unwrap_or("no credit, or the stream was stopped")
                    );
                }
                continue;
            }
            let (chunk, behind) = rest.split_at(rest.len().min(room).min(ROOM));
            rest = behind;
            let mut frames = Vec::with_capacity(ROOM + 50);
            frame::write_stream(id, offset, chunk, fin && rest.is_empty(), &mut frames);
            self.offsets.insert(id, offset + chunk.len() as u64);
            self.data_sent += chunk.len() as u64;
            self.counts.stream_bytes += chunk.len() as u64;
            self.send(frames, true)?;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Reserves the next bytes of a stream, which the caller sends in frames of its own. Returns the offset of the
    /// first one.
    pub fn claim(&mut self, id: u64, bytes: u64) -> u64 {
        let end = self.offsets.entry(id).or_default();
        let offset = *end;
        *end += bytes;
        self.data_sent += bytes;
        self.counts.stream_bytes += bytes;
        offset
    }

    /// Returns how many more bytes the relay allows on a stream.
    fn room(&self, id: u64) -> usize {
        // Bit 1 of a stream's ID is set if the stream is unidirectional.
        let initial = if id & 2 == 0 { self.credit.stream_bidi } else { self.credit.stream_uni };
        let limit = self.stream_credit.get(&id).map_or(initial, |limit| initial.max(*limit));
        let sent = self.offsets.get(&id).copied().unwrap_or_default();
        let room = limit.saturating_sub(sent).min(self.credit.data.saturating_sub(self.data_sent));
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    /// Reports whether the relay has sent STOP_SENDING for a stream.
    pub fn is_stopped(&self, id: u64) -> bool {
        self.received.get(&id).is_some_and(|stream| stream.stopped.is_some())
    }

    /// Resets a stream (RESET_STREAM) at its current length.
    pub fn reset(&mut self, id: u64) -> Result<()> {
        let mut frames = Vec::new();
        frame::write_reset_stream(id, 0, self.offsets.get(&id).copied().unwrap_or_default(), &mut frames);
        self.send(frames, true)
    }

    /// Opens a request stream with this message.
    pub fn request(&mut self, message: impl Into<Message>) -> Result<u64> {
        self.open(StreamKind::Request, &encoded(message)?, false)
    }

    /// Waits for the next message on a stream, and returns it.
    pub fn answer(&mut self, id: u64) -> Result<Message> {
        let mut buffer = BytesMut::new();
        loop {
            if let Some(message) = Message::decode(DRAFT, &mut buffer)? {
                return Ok(message);
            }
            buffer.extend_from_slice(&self.more(id)?);
        }
    }

    /// Returns the IDs of the relay's unidirectional streams. The first of them is its control stream.
    pub fn incoming_streams(&self) -> Vec<u64> {
        self.received.keys().copied().filter(|id| id & 3 == 3).collect()
    }

    /// Returns the bytes of a stream that arrived since the last call.
    pub fn take(&mut self, id: u64) -> Vec<u8> {
        self.received.get_mut(&id).map(ReceivedStream::take).unwrap_or_default()
    }

    /// Waits for bytes on a stream, and returns them.
    pub fn more(&mut self, id: u64) -> Result<Vec<u8>> {
        let has_more = |peer: &Self| peer.received.get(&id).is_some_and(ReceivedStream::has_more);
        if !self.pump(PATIENCE, has_more) {
            bail!(
                "the relay sent nothing on stream {id}: {}",
                self.closed.as_deref().unwrap_or("no data in time")
            );
        }
        Ok(self.received.entry(id).or_default().take())
    }
}

impl ReceivedStream {
    fn has_more(&self) -> bool {
        self.chunks
            .first_key_value()
            .is_some_and(|(offset, data)| *offset <= self.taken && offset + data.len() as u64 > self.taken)
    }
}

/// Returns the message as bytes on the wire.
pub fn encoded(message: impl Into<Message>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    message.into().encode(DRAFT, &mut bytes)?;
    Ok(bytes)
}
