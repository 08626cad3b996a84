//! An offload is another sender on the connection. It sends stream bytes and datagrams by itself, within a [`Budget`]
//! of window and credit, and reports each packet afterwards.
//!
//! A stream is *delegated* to it once everything that its source has was sent. The offload may send bytes that the
//! source does not have yet: what it reports is noted as if it had been sent from here, and what it skipped becomes
//! a hole. RESET_STREAM names the final size, so a delegated stream is reset only after the plane has *recalled* it
//! and the offload has *returned* it.

use std::time::Instant;

use super::{Content, Downstream, EventKind, Label, Level, Sent, StreamKey};

/// A packet with one STREAM frame that the offload sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedPacket {
    pub sent: Instant,
    pub number: u64,
    /// UDP payload, bytes.
    pub size: usize,
    pub key: StreamKey,
    pub offset: u64,
    pub len: u16,
    pub fin: bool,
}

/// What the offload may send, or has sent without having reported it yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// UDP payload, of the congestion window.
    pub bytes: u64,
    /// Stream bytes, of the connection's credit.
    pub data: u64,
}

/// A stream that the offload may send on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamGrant {
    pub id: u64,
    /// The peer's limit of the stream; [`Downstream::on_max_stream_data`] raises it.
    pub max_offset: u64,
    /// [`Priority::level`](super::Priority::level).
    pub level: Level,
    pub label: Label,
}

/// Packets of the window that no budget includes, so that the QUIC stack can always send something.
const RESERVED_PACKETS: u64 = 2;

impl Downstream {
    /// Delegates a stream to the offload. `None` if it has no ID yet, still has something to send, or is delegated
    /// already.
    pub fn delegate(&mut self, key: StreamKey) -> Option<StreamGrant> {
        let stream = self.streams.get_mut(key).filter(|stream| !stream.delegated && stream.is_caught_up())?;
        let id = stream.id?;
        stream.delegated = true;
        Some(StreamGrant {
            id,
            max_offset: stream.credit,
            level: stream.priority.level(),
            label: stream.label,
        })
    }

    /// The offload has returned the stream: it sends no more on it and has reported all that it sent.
    pub fn on_returned(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.delegated = false;
        match (stream.id, stream.reset_code()) {
            (None, Some(code)) => self.close(key, EventKind::Reset(code)),
            _ => self.place(key),
        }
    }

    /// A delegated stream that the offload has to return: it is over, is to be reset, or has another priority now.
    pub fn poll_recall(&mut self) -> Option<StreamKey> {
        self.recalls.pop()
    }

    /// The offload reports a packet. The order of reports does not matter, nor whether later packet numbers were
    /// reported before.
    pub fn on_offloaded_sent(&mut self, packet: &OffloadedPacket) {
        let OffloadedPacket { sent, number, size, key, offset, len, fin } = *packet;
        self.stats.offloaded_packets += 1;
        self.stats.offloaded_bytes += size as u64;
        if let Some(stream) = self.streams.get_mut(key) {
            let fresh = stream.on_offloaded_sent(offset..offset + u64::from(len), fin);
            self.data_sent += fresh;
            self.stats.stream_bytes += fresh;
            self.stats.retransmitted_bytes += u64::from(len).saturating_sub(fresh);
            self.place(key);
        }
        let mut content = Content::default();
        content.0.push(Sent::Bytes { key, offset, len, fin, again: false });
        self.recovery.on_offloaded_sent(sent, number, size, content);
    }

    /// The offload reports a packet with one DATAGRAM frame.
    pub fn on_offloaded_datagram(&mut self, sent: Instant, number: u64, size: usize, label: Label) {
        self.stats.offloaded_packets += 1;
        self.stats.offloaded_bytes += size as u64;
        self.stats.datagrams_sent += 1;
        let mut content = Content::default();
        content.0.push(Sent::Datagram { label });
        self.recovery.on_offloaded_sent(sent, number, size, content);
    }

    /// What the offload may be granted now, for streams that go before the level of [`Self::waiting`].
    ///
    /// It does not pace: what would be too much at once is left to this side. Nothing is set aside for it here. Before the next
    /// call of [`Self::poll_frames`] or [`Self::take_max_data`], reclaim the budget and say how much of it may have been used:
    /// [`Self::set_outstanding`].
    pub fn budget(&self) -> Budget {
        let reserved = RESERVED_PACKETS * self.recovery.mtu();
        Budget {
            bytes: self.recovery.unpaced_room().saturating_sub(reserved),
            data: self.peer.max_data.saturating_sub(self.data_sent),
        }
    }

    /// The level of what waits here to be sent; `None` if nothing does. The offload must not send on streams of
    /// this level or a later one, so that priorities hold across both senders.
    pub fn waiting(&self) -> Option<Level> {
        if self.recovery.probes() > 0 {
            return Some(Level::default());
        }
        let stream = self.ready.first().map(|(level, _)| level);
        stream.into_iter().chain(self.datagrams.level()).min()
    }

    /// Whether acknowledgements may be read some time after they came: nothing waits to be sent or repaired, and
    /// the QUIC stack has nothing in flight.
    pub fn is_steady(&self) -> bool {
        !self.has_work() && self.recovery.is_steady()
    }

    /// The offload has no budget now, but may have sent up to `outstanding` that it has not reported yet.
    pub fn set_outstanding(&mut self, outstanding: Budget) {
        self.outstanding = outstanding;
    }

    /// Credit of the connection that is left.
    pub(super) fn data_credit(&self) -> u64 {
        self.peer.max_data.saturating_sub(self.data_sent + self.outstanding.data)
    }

    /// Asks for the stream back, if it is delegated.
    pub(super) fn recall(&mut self, key: StreamKey) {
        if self.streams.get(key).is_some_and(|stream| stream.delegated) {
            self.recalls.push(key);
        }
    }
}
