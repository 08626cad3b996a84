//! A third sender on the connection: it sends stream bytes and datagrams by itself, within a [`Share`] of credit and window,
//! and says so afterwards.
//!
//! A stream is *lent* to it once everything that its source has was sent. Registrations fill holes as packets
//! of this sender do; they may be about bytes that the source does not have yet. A lent stream that is to be
//! reset has to be given back first: RESET_STREAM names the final size, and nothing may go past it.

use std::time::Instant;

use super::{Content, Downstream, Label, Level, Sent, StreamKey};

/// A packet with one STREAM frame that somebody else sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    pub sent: Instant,
    pub number: u64,
    /// UDP payload, bytes.
    pub size: usize,
    pub key: StreamKey,
    pub offset: u64,
    pub len: u16,
    pub fin: bool,
}

/// What the other sender may send, or has sent without having said so yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// UDP payload, of the congestion window.
    pub bytes: u64,
    /// Stream bytes, of the connection's credit.
    pub data: u64,
}

/// A stream that the other sender may send on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loan {
    pub id: u64,
    /// The peer's limit of the stream; [`Downstream::on_max_stream_data`] raises it.
    pub max_offset: u64,
    /// [`Priority::level`](super::Priority::level).
    pub level: Level,
    pub label: Label,
}

/// Packets that are kept out of the share, so that the QUIC stack can always send something.
const RESERVED_PACKETS: u64 = 2;

impl Downstream {
    /// Lends a stream that has been opened and owes nothing at the moment; `None` if it is not in that state, or
    /// lent already.
    pub fn lend(&mut self, key: StreamKey) -> Option<Loan> {
        let stream = self.streams.get_mut(key).filter(|stream| !stream.lent && stream.is_caught_up())?;
        let id = stream.id?;
        stream.lent = true;
        Some(Loan { id, max_offset: stream.credit, level: stream.priority.level(), label: stream.label })
    }

    /// The other sender sends no more on the stream, and all that it has sent was registered.
    pub fn on_returned(&mut self, key: StreamKey) {
        if let Some(stream) = self.streams.get_mut(key) {
            stream.lent = false;
            self.place(key);
        }
    }

    /// A lent stream that is over, or that is to be reset once it has been given back.
    pub fn poll_recall(&mut self) -> Option<StreamKey> {
        self.recalls.pop()
    }

    /// Packets may be registered in any order, and later than numbers that were drawn after theirs.
    pub fn on_sent_elsewhere(&mut self, packet: &Elsewhere) {
        let Elsewhere { sent, number, size, key, offset, len, fin } = *packet;
        self.stats.elsewhere_packets += 1;
        self.stats.elsewhere_bytes += size as u64;
        if let Some(stream) = self.streams.get_mut(key) {
            let fresh = stream.on_sent_elsewhere(offset..offset + u64::from(len), fin);
            self.data_sent += fresh;
            self.stats.stream_bytes += fresh;
            self.stats.retransmitted_bytes += u64::from(len).saturating_sub(fresh);
            self.place(key);
        }
        let mut content = Content::default();
        content.0.push(Sent::Bytes { key, offset, len, fin, again: false });
        self.recovery.on_sent_elsewhere(sent, number, size, content);
    }

    /// The other sender sent a datagram of an object, in a packet of its own.
    pub fn on_datagram_elsewhere(&mut self, sent: Instant, number: u64, size: usize, label: Label) {
        self.stats.elsewhere_packets += 1;
        self.stats.elsewhere_bytes += size as u64;
        self.stats.datagrams_sent += 1;
        let mut content = Content::default();
        content.0.push(Sent::Datagram { label });
        self.recovery.on_sent_elsewhere(sent, number, size, content);
    }

    /// What the other sender may send from now on, on streams before the level of [`Self::waiting`]. It is not set
    /// aside: lower it and [set](Self::set_outstanding) what is outstanding before the next call of
    /// [`Self::poll_frames`] or [`Self::take_max_data`].
    pub fn share(&self) -> Share {
        let reserved = RESERVED_PACKETS * self.config.mtu as u64;
        Share {
            bytes: self.recovery.room().saturating_sub(reserved),
            data: self.peer.max_data.saturating_sub(self.data_sent),
        }
    }

    /// The level of what waits here to be sent. So that priorities hold, the other sender leaves streams of this
    /// level, and of those behind it, to this one; `None`: it need not.
    pub fn waiting(&self) -> Option<Level> {
        if self.recovery.probes() > 0 {
            return Some(Level::default());
        }
        let stream = self.ready.first().map(|(level, _)| level);
        let datagram = self.datagrams.first_key_value().map(|((priority, _), _)| priority.level());
        stream.into_iter().chain(datagram).min()
    }

    /// Whether acknowledgements may be read some time after they came: nothing waits to be sent or repaired, and the
    /// QUIC stack has nothing in flight.
    pub fn is_calm(&self) -> bool {
        !self.has_work() && self.recovery.is_calm()
    }

    /// The other sender may have sent this much that was not registered, and sends no more.
    pub fn set_outstanding(&mut self, outstanding: Share) {
        self.outstanding = outstanding;
    }

    /// Credit of the connection that is left.
    pub(super) fn data_credit(&self) -> u64 {
        self.peer.max_data.saturating_sub(self.data_sent + self.outstanding.data)
    }

    /// Somebody has to give a lent stream back.
    pub(super) fn recall(&mut self, key: StreamKey) {
        if self.streams.get(key).is_some_and(|stream| stream.lent) {
            self.recalls.push(key);
        }
    }
}
