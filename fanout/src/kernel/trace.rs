//! Events about single packets.

use std::num::NonZero;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::{MappedArray, RingReader};
use millrace_kernel::object::LoadedObject;

use super::config::EVENTS_BYTES;
use super::intf;
use super::outcome::{CopyOutcome, Outcome};

/// A filter that selects the senders' packets about which the BPF program writes trace events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FanoutTraceSelection {
    /// Selects packets whose sequence number is a multiple of this number, and all their copies. RTCP counts as number
    /// 0.
    pub every: NonZero<u32>,
    /// Restricts events to this stream ([`SenderStream::number`](super::SenderStream::number)).
    pub stream: Option<NonZero<u32>>,
    /// Restricts events about copies to this receiver ([`ReceiverCopy::number`](super::ReceiverCopy::number)).
    pub receiver: Option<NonZero<u32>>,
}

/// An event of a sender's packet, or of one of its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyEvent {
    /// Arrival time of the packet, `CLOCK_MONOTONIC`.
    pub arrived_ns: u64,
    /// Time when the program decided what happens to the packet or the copy, `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// Number of the stream.
    pub stream: u32,
    /// SSRC of the packet.
    pub ssrc: u32,
    /// RTP timestamp; 0 for RTCP.
    pub timestamp: u32,
    /// RTP sequence number; 0 for RTCP.
    pub sequence: u16,
    /// Second byte of the packet: RTP marker and payload type, or RTCP packet type.
    pub kind: u8,
    /// Bytes of UDP payload of the packet.
    pub size: u16,
    /// Outcome for the packet, or for its copy for one receiver.
    pub what: CopyEventKind,
}

/// The packet, or the copy of it for one receiver, that an event is about, and what happened to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEventKind {
    /// The event is about a packet that was not copied, or not to all receivers.
    Packet(Outcome),
    /// The event is about the copy for the receiver with this number.
    Copy(u32, CopyOutcome),
}

impl CopyEvent {
    /// Reads an event. Returns `None` if the number that says what happened is not known.
    fn new(raw: &intf::Event) -> Option<Self> {
        let outcome = usize::from(raw.outcome);
        let what = match raw.receiver {
            0 => CopyEventKind::Packet(*Outcome::ALL.get(outcome)?),
            receiver => CopyEventKind::Copy(receiver, *CopyOutcome::ALL.get(outcome)?),
        };
        let intf::Event { arrived_ns, time_ns, stream, ssrc, timestamp, sequence, kind, size, .. } = *raw;
        Some(Self { arrived_ns, time_ns, stream, ssrc, timestamp, sequence, kind, size, what })
    }
}

/// The ring buffer of trace events, and the filter by which the BPF program selects packets.
pub(super) struct FanoutTraceRing {
    ring: Mutex<RingReader>,
    table: MappedArray<intf::Tracing>,
}

impl FanoutTraceRing {
    /// Maps the ring buffer of events and the filter of a loaded program into this process.
    pub fn new(object: &mut LoadedObject) -> Result<Self, Error> {
        let ring = RingReader::new(object.handle("events")?, EVENTS_BYTES as usize)
            .map_err(|source| Error::Memory { what: "events", source })?;
        Ok(Self { ring: Mutex::new(ring), table: object.table(".data.tracing")? })
    }

    /// Sets the filter; `None` traces nothing.
    pub fn set(&self, tracing: Option<FanoutTraceSelection>) {
        let entry = self.table.get(0);
        // The fields of the filter are written one after the other. A packet that arrives meanwhile may be checked
        // against a mixture of the old and the new filter.
        entry.every.store(0, Ordering::SeqCst);
        let Some(tracing) = tracing else { return };
        let name = |name: Option<NonZero<u32>>| name.map_or(0, NonZero::get);
        entry.stream.store(name(tracing.stream), Ordering::Relaxed);
        entry.receiver.store(name(tracing.receiver), Ordering::Relaxed);
        entry.every.store(tracing.every.get(), Ordering::Release);
    }

    /// Passes the waiting events to `read`. Returns how many events were lost since the last call.
    pub fn drain(&self, mut read: impl FnMut(CopyEvent)) -> u64 {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).drain(|bytes| {
            if let Some(event) = intf::Event::from_bytes(bytes).and_then(|raw| CopyEvent::new(&raw)) {
                read(event);
            }
        });
        self.table.get(0).lost.swap(0, Ordering::Relaxed)
    }
}
