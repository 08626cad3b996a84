//! The data plane's interface for an offload, another sender on the connection. An offload sends stream bytes and
//! datagrams by itself, within an [`OffloadBudget`] of window and credit, and reports each packet afterwards.
//!
//! A stream is *delegated* to the offload once all bytes of its source were sent. The offload may send bytes that the
//! source does not have yet. Reported bytes count as if the data plane had sent them, and the data plane sends the
//! bytes that the offload skipped. RESET_STREAM names the final size, so a delegated stream is reset only after the
//! data plane has *recalled* it and the offload has *returned* it.

use std::time::Instant;

use super::{Downstream, EventKind, Label, PacketContent, PriorityLevel, SentFrame, StreamKey};

/// A packet with one STREAM frame that the kernel offload sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedPacket {
    /// The time at which the kernel offload sent the packet.
    pub sent: Instant,
    /// The packet number.
    pub number: u64,
    /// Size of the UDP payload, bytes.
    pub size: usize,
    /// The stream that the frame belongs to.
    pub key: StreamKey,
    /// Offset of the first byte on the stream.
    pub offset: u64,
    /// Number of stream bytes.
    pub len: u16,
    /// True if the frame ends the stream.
    pub fin: bool,
}

/// The number of bytes that the kernel offload may send, or that it may have sent and not reported yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadBudget {
    /// Bytes of UDP payload, which count in the congestion window.
    pub bytes: u64,
    /// Bytes of streams, which count against the connection's flow control credit.
    pub data: u64,
}

/// A stream that the kernel offload may send on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamGrant {
    /// The stream's ID.
    pub id: u64,
    /// The peer's limit for the stream; [`Downstream::on_max_stream_data`] raises it.
    pub max_offset: u64,
    /// The stream's priority level: see [`Priority::level`](super::Priority::level).
    pub level: PriorityLevel,
    /// The stream's track and group, for packet traces.
    pub label: Label,
}

/// Number of packets of the congestion window that are never granted to the kernel offload, so that the QUIC stack can
/// always send.
const RESERVED_PACKETS: u64 = 2;

impl Downstream {
    /// Delegates a stream to the kernel offload. Returns `None` if the stream has no ID yet, still has data to send, or
    /// is delegated already.
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

    /// Notes that the kernel offload has returned the stream. The offload sends no more on the stream, and has reported
    /// all its packets.
    pub fn on_returned(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.delegated = false;
        match (stream.id, stream.reset_code()) {
            (None, Some(code)) => self.close(key, EventKind::Reset(code)),
            _ => self.place(key),
        }
    }

    /// Returns a delegated stream that the kernel offload has to return, because the stream ended, is to be reset, or
    /// has a new priority.
    pub fn poll_recall(&mut self) -> Option<StreamKey> {
        self.recalls.pop()
    }

    /// Notes a packet that the kernel offload reports. Packets may be reported in any order.
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
        let mut content = PacketContent::default();
        content.0.push(SentFrame::Bytes { key, offset, len, fin, again: false });
        self.recovery.on_offloaded_sent(sent, number, size, content);
    }

    /// Notes a packet with one DATAGRAM frame that the kernel offload reports.
    pub fn on_offloaded_datagram(&mut self, sent: Instant, number: u64, size: usize, label: Label) {
        self.stats.offloaded_packets += 1;
        self.stats.offloaded_bytes += size as u64;
        self.stats.datagrams_sent += 1;
        let mut content = PacketContent::default();
        content.0.push(SentFrame::Datagram { label });
        self.recovery.on_offloaded_sent(sent, number, size, content);
    }

    /// Returns the budget that the kernel offload may get now, for streams more urgent than the level that
    /// [`Self::waiting`] returns.
    ///
    /// The offload does not pace, so its budget is limited to bursts that the path can queue. The budget is not
    /// reserved. Before the next call of [`Self::poll_frames`] or [`Self::take_max_data`], the caller reclaims it from
    /// the offload, and passes the part that may have been used to [`Self::set_outstanding`].
    pub fn budget(&self) -> OffloadBudget {
        let reserved = RESERVED_PACKETS * self.recovery.mtu();
        OffloadBudget {
            bytes: self.recovery.unpaced_room().saturating_sub(reserved),
            data: self.peer.max_data.saturating_sub(self.data_sent),
        }
    }

    /// Returns the level of the most urgent data that waits in the data plane, or `None` if none waits. The kernel
    /// offload must not send on streams of this level or a less urgent one, so that priorities hold across both
    /// senders.
    pub fn waiting(&self) -> Option<PriorityLevel> {
        if self.recovery.probes() > 0 {
            return Some(PriorityLevel::default());
        }
        let stream = self.ready.first().map(|(level, _)| level);
        stream.into_iter().chain(self.datagrams.level()).min()
    }

    /// Returns whether the peer's acknowledgements need not be read at once: no data waits to be sent or retransmitted,
    /// and the QUIC stack has nothing in flight.
    pub fn is_steady(&self) -> bool {
        !self.has_work() && self.recovery.is_steady()
    }

    /// Notes that the kernel offload's budget was withdrawn, but that it may have sent up to `outstanding` bytes that
    /// it has not reported yet.
    pub fn set_outstanding(&mut self, outstanding: OffloadBudget) {
        self.outstanding = outstanding;
    }

    /// Returns the connection's flow control credit that no sender has used yet, bytes.
    pub(super) fn data_credit(&self) -> u64 {
        self.peer.max_data.saturating_sub(self.data_sent + self.outstanding.data)
    }

    /// Recalls the stream from the kernel offload, if it is delegated.
    pub(super) fn recall(&mut self, key: StreamKey) {
        if self.streams.get(key).is_some_and(|stream| stream.delegated) {
            self.recalls.push(key);
        }
    }
}
