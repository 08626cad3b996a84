//! Trace events about single packets.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::LoadedObject;

use super::config::EVENTS_BYTES;
use super::intf;
use super::memory::{MappedArray, RingReader};
use super::outcome::{EgressOutcome, Outcome};
use super::shared::lock;

/// Selects the packets for which the program reports trace events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayTraceSelection {
    /// The sampling interval: publishers' packets whose packet number is a multiple of it are traced, with all their
    /// copies.
    pub every: NonZero<u32>,
    /// Traces only copies of this track ([`EgressRecord::track`](super::EgressRecord::track)).
    pub track: Option<NonZero<u32>>,
    /// Traces only packets of this session, and copies from or to it.
    pub session: Option<NonZero<u32>>,
}

/// The outcome of a packet or of a copy, with its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardingEvent {
    /// Arrival time of the packet on `CLOCK_MONOTONIC`, in nanoseconds.
    pub arrived_ns: u64,
    /// Time when the program had finished the packet or the copy, on the same clock and in the same unit.
    pub time_ns: u64,
    /// The session on which the packet arrived: [`UpstreamRecord::set_session`](super::UpstreamRecord::set_session).
    pub publisher: u32,
    /// Packet number on that session. 0 if it could not be decoded, and a guess if the packet is not authentic.
    pub received: u64,
    /// The outcome of the packet, or of one copy.
    pub what: ForwardingEventKind,
}

/// The outcome of a packet that was not copied, or of one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardingEventKind {
    /// A packet that was not copied. [`Outcome::Forwarded`] and [`Outcome::Continued`] are left out, since their copies
    /// have events.
    Packet {
        /// The outcome of the packet.
        outcome: Outcome,
        /// Size of the packet's UDP payload, in bytes.
        size: u16,
    },
    /// A copy of one frame for one subscriber.
    Copy {
        /// The outcome of the copy.
        outcome: EgressOutcome,
        /// The session that the copy is for: [`DownstreamRecord::set_session`](super::DownstreamRecord::set_session).
        subscriber: u32,
        /// Packet number of the copy and size of its UDP payload in bytes. `None` if it got no packet number.
        sent: Option<(u64, u16)>,
        /// The track's number: [`EgressRecord::track`](super::EgressRecord::track).
        track: u32,
        /// ID of the group that the copied frame belongs to.
        group: u64,
        /// ID of the stream on the subscriber's connection.
        stream_id: u64,
        /// Offset in the subscriber's stream, or the object ID of a datagram.
        offset: u64,
        /// Number of stream bytes, or length of the datagram in bytes.
        len: u16,
        /// True if the frame ends the stream.
        fin: bool,
    },
}

impl ForwardingEvent {
    /// Converts an event from the program's ring buffer. Returns `None` if its outcome is unknown.
    fn new(raw: &intf::Event) -> Option<Self> {
        let outcome = usize::from(raw.outcome);
        let what = match raw.is_copy {
            0 => ForwardingEventKind::Packet { outcome: *Outcome::ALL.get(outcome)?, size: raw.size },
            _ => {
                let outcome = *EgressOutcome::ALL.get(outcome)?;
                // Only a copy that was sent, or lost after it was encrypted, has a packet number.
                let drawn = matches!(outcome, EgressOutcome::Sent | EgressOutcome::Lost);
                ForwardingEventKind::Copy {
                    outcome,
                    subscriber: raw.subscriber,
                    sent: drawn.then_some((raw.number, raw.size)),
                    track: raw.track,
                    group: raw.group,
                    stream_id: raw.stream_id,
                    offset: raw.offset,
                    len: raw.len,
                    fin: raw.fin != 0,
                }
            }
        };
        let intf::Event { arrived_ns, time_ns, publisher, received, .. } = *raw;
        Some(Self { arrived_ns, time_ns, publisher, received, what })
    }
}

/// The ring of the program's events, and the filter for them.
pub(super) struct RelayTraceRing {
    ring: Mutex<RingReader>,
    table: MappedArray<intf::Tracing>,
}

impl RelayTraceRing {
    pub fn new(object: &mut LoadedObject) -> Result<Self, Error> {
        let ring = RingReader::new(object.handle("events")?, EVENTS_BYTES as usize)
            .map_err(|source| Error::Memory { what: "events", source })?;
        Ok(Self { ring: Mutex::new(ring), table: object.table(".data.tracing")? })
    }

    pub fn set(&self, tracing: Option<RelayTraceSelection>) {
        let entry = self.table.get(0);
        // While the filter changes, no packet is traced.
        entry.every.store(0, Ordering::SeqCst);
        let Some(tracing) = tracing else { return };
        let name = |name: Option<NonZero<u32>>| name.map_or(0, NonZero::get);
        entry.track.store(name(tracing.track), Ordering::Relaxed);
        entry.session.store(name(tracing.session), Ordering::Relaxed);
        entry.every.store(tracing.every.get(), Ordering::Release);
    }

    pub fn drain(&self, mut read: impl FnMut(ForwardingEvent)) -> u64 {
        lock(&self.ring).drain(|bytes| {
            if let Some(event) = intf::Event::from_bytes(bytes).and_then(|raw| ForwardingEvent::new(&raw)) {
                read(event);
            }
        });
        self.table.get(0).lost.swap(0, Ordering::Relaxed)
    }
}
