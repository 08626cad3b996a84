//! Events about single packets.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::Loaded;

use super::config::EVENTS_BYTES;
use super::intf;
use super::memory::{Ring, Table};
use super::outcome::{EgressOutcome, Outcome};
use super::shared::lock;

/// Which packets become events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracing {
    /// Of the packets of each upstream those whose number is a multiple of it, with all their copies.
    pub every: NonZero<u32>,
    /// Copies of this track only ([`EgressRecord::track`](super::EgressRecord::track)).
    pub track: Option<NonZero<u32>>,
    /// Copies from or to this session only, and its packets.
    pub session: Option<NonZero<u32>>,
}

/// Something that became of a packet, at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// When the packet arrived, `CLOCK_MONOTONIC`.
    pub arrived_ns: u64,
    /// When it, or the copy, had been dealt with.
    pub time_ns: u64,
    /// The upstream that the packet came on: [`UpstreamRecord::set_session`](super::UpstreamRecord::set_session).
    pub publisher: u32,
    /// The packet's number there; 0 where it could not be told, a guess where it was not authentic.
    pub received: u64,
    pub what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A packet. One that became copies, [`Outcome::Forwarded`] or [`Outcome::Continued`], is told of by their events.
    Packet {
        outcome: Outcome,
        /// UDP payload, bytes.
        size: u16,
    },
    /// A copy: one frame of the packet for one egress.
    Copy {
        outcome: EgressOutcome,
        /// [`DownstreamRecord::set_session`](super::DownstreamRecord::set_session).
        subscriber: u32,
        /// Packet number and UDP payload, where the copy got that far.
        sent: Option<(u64, u16)>,
        /// [`EgressRecord::track`](super::EgressRecord::track) and [`EgressRecord::group`](super::EgressRecord::group).
        track: u32,
        group: u64,
        /// The downstream stream, and the offset in it.
        stream_id: u64,
        offset: u64,
        len: u16,
        fin: bool,
    },
}

impl Event {
    /// `None` for an outcome that there is not.
    fn new(raw: &intf::Event) -> Option<Self> {
        let outcome = usize::from(raw.outcome);
        let what = match raw.is_copy {
            0 => What::Packet { outcome: *Outcome::ALL.get(outcome)?, size: raw.size },
            _ => {
                let outcome = *EgressOutcome::ALL.get(outcome)?;
                let drawn = matches!(outcome, EgressOutcome::Sent | EgressOutcome::Lost);
                What::Copy {
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
        entry.track.store(name(tracing.track), Ordering::Relaxed);
        entry.session.store(name(tracing.session), Ordering::Relaxed);
        entry.every.store(tracing.every.get(), Ordering::Release);
    }

    pub fn drain(&self, mut read: impl FnMut(Event)) -> u64 {
        lock(&self.ring).drain(|bytes| {
            if let Some(event) = intf::Event::from_bytes(bytes).and_then(|raw| Event::new(&raw)) {
                read(event);
            }
        });
        self.table.get(0).lost.swap(0, Ordering::Relaxed)
    }
}
