//! Events about single packets.

use std::num::NonZero;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::{Ring, Table};
use millrace_kernel::object::Loaded;

use super::config::EVENTS_BYTES;
use super::intf;
use super::outcome::{LegOutcome, Outcome};

/// Which packets become events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracing {
    /// Those whose sequence number is a multiple of it, with all their copies; RTCP as if it had number 0.
    pub every: NonZero<u32>,
    /// Of this stream only ([`Stream::number`](super::Stream::number)).
    pub stream: Option<NonZero<u32>>,
    /// Of copies, those for this receiver only ([`Leg::number`](super::Leg::number)).
    pub leg: Option<NonZero<u32>>,
}

/// Something that became of a sender's packet, at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// When the packet arrived, `CLOCK_MONOTONIC`.
    pub arrived_ns: u64,
    /// When it, or the copy, had been dealt with.
    pub time_ns: u64,
    pub stream: u32,
    pub ssrc: u32,
    /// Of RTP, as is the sequence number; 0 of RTCP.
    pub timestamp: u32,
    pub sequence: u16,
    /// Its second byte: marker and payload type, or the type of RTCP.
    pub kind: u8,
    /// UDP payload, bytes.
    pub size: u16,
    pub what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A packet that did not become copies, or not all of them.
    Packet(Outcome),
    /// A copy for this receiver.
    Copy(u32, LegOutcome),
}

impl Event {
    /// `None` for an outcome that there is not.
    fn new(raw: &intf::Event) -> Option<Self> {
        let outcome = usize::from(raw.outcome);
        let what = match raw.leg {
            0 => What::Packet(*Outcome::ALL.get(outcome)?),
            leg => What::Copy(leg, *LegOutcome::ALL.get(outcome)?),
        };
        let intf::Event { arrived_ns, time_ns, stream, ssrc, timestamp, sequence, kind, size, .. } = *raw;
        Some(Self { arrived_ns, time_ns, stream, ssrc, timestamp, sequence, kind, size, what })
    }
}

/// The program's events, and what it is told about them.
pub(super) struct Trace {
    ring: Mutex<Ring>,
    table: Table<intf::Tracing>,
}

impl Trace {
    pub fn new(object: &mut Loaded) -> Result<Self, Error> {
        let ring = Ring::new(object.handle("events")?, EVENTS_BYTES as usize)
            .map_err(|source| Error::Memory { what: "events", source })?;
        Ok(Self { ring: Mutex::new(ring), table: object.table(".data.tracing")? })
    }

    pub fn set(&self, tracing: Option<Tracing>) {
        let entry = self.table.get(0);
        // A packet in between may be in the sample of both settings or in none.
        entry.every.store(0, Ordering::SeqCst);
        let Some(tracing) = tracing else { return };
        let name = |name: Option<NonZero<u32>>| name.map_or(0, NonZero::get);
        entry.stream.store(name(tracing.stream), Ordering::Relaxed);
        entry.leg.store(name(tracing.leg), Ordering::Relaxed);
        entry.every.store(tracing.every.get(), Ordering::Release);
    }

    pub fn drain(&self, mut read: impl FnMut(Event)) -> u64 {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).drain(|bytes| {
            if let Some(event) = intf::Event::from_bytes(bytes).and_then(|raw| Event::new(&raw)) {
                read(event);
            }
        });
        self.table.get(0).lost.swap(0, Ordering::Relaxed)
    }
}
