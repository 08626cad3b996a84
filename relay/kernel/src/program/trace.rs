//! Trace events about single packets.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::LoadedObject;
use millrace_transport::trace::{OffloadTraceEvent, OffloadTraceKind, PacketFilter};

use super::config::EVENTS_BYTES;
use super::intf;
use super::memory::{MappedArray, RingReader};
use super::outcome::{EgressOutcome, Outcome};
use super::shared::lock;

/// Converts an event from the program's ring buffer. Returns `None` if its outcome is unknown.
fn event_of(raw: &intf::Event) -> Option<OffloadTraceEvent> {
    let outcome = usize::from(raw.outcome);
    let what = match raw.is_copy {
        0 => OffloadTraceKind::Packet { outcome: Outcome::ALL.get(outcome)?.name(), size: raw.size },
        _ => {
            let outcome = *EgressOutcome::ALL.get(outcome)?;
            // Only a copy that was sent, or lost after it was encrypted, has a packet number.
            let drawn = matches!(outcome, EgressOutcome::Sent | EgressOutcome::Lost);
            OffloadTraceKind::Copy {
                outcome: outcome.name(),
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
    Some(OffloadTraceEvent { arrived_ns, time_ns, publisher, received, what })
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

    pub fn set(&self, tracing: Option<PacketFilter>) {
        let entry = self.table.get(0);
        // While the filter changes, no packet is traced.
        entry.every.store(0, Ordering::SeqCst);
        let Some(tracing) = tracing else { return };
        let name = |name: Option<NonZero<u32>>| name.map_or(0, NonZero::get);
        entry.track.store(name(tracing.track), Ordering::Relaxed);
        entry.session.store(name(tracing.session), Ordering::Relaxed);
        entry.every.store(tracing.every.get(), Ordering::Release);
    }

    pub fn drain(&self, mut read: impl FnMut(OffloadTraceEvent)) -> u64 {
        lock(&self.ring).drain(|bytes| {
            if let Some(event) = intf::Event::from_bytes(bytes).and_then(|raw| event_of(&raw)) {
                read(event);
            }
        });
        self.table.get(0).lost.swap(0, Ordering::Relaxed)
    }
}
