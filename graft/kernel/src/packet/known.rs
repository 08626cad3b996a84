//! Statistics of sessions: packets by reason, progress, and processing time at each hook.

use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use millrace_kernel::intf::Plain;

use super::{PacketHooks, PacketReason, SessionEnds, intf};
use crate::Error;

/// Processing time of packets at one hook. Every 64th packet is measured, from the dispatcher to the verdict program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FunctionTimes {
    /// Number of packets that the dispatcher has handled at this hook.
    pub packets: u64,
    /// Number of packets whose processing time was measured.
    pub samples: u64,
    /// Sum of the processing times of all measured packets, ns.
    pub total_ns: u64,
    /// Longest processing time of a measured packet, ns.
    pub most_ns: u64,
    /// Number of measured packets whose processing took longer than the session's time budget.
    pub over: u64,
}

/// Progress of a session in both directions, as packet numbers that wrap at 2^32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionProgress {
    /// Packet number of the next outgoing packet.
    pub next: u32,
    /// All packets below this number were received by the peer, or are no longer expected by it.
    pub acked: u32,
    /// Number of packets that the peer has received or no longer expects, modulo 2^32.
    pub delivered: u32,
    /// Losses that the peer's acknowledgements reported; at most one is counted in each round trip.
    pub losses: u32,
    /// Smoothed round-trip time (RFC 6298); `None` if unknown.
    pub round_trip: Option<Duration>,
    /// Shortest round-trip time so far; `None` if unknown.
    pub least_round_trip: Option<Duration>,
    /// One more than the newest packet number received.
    pub newest: u32,
    /// All packets below this number were received by this host, or are no longer expected.
    pub complete: u32,
}

impl PacketHooks {
    /// Returns the number of a session's packets for each [`PacketReason`] why they were passed or dropped.
    pub fn counts(&mut self, ends: &SessionEnds) -> Result<Vec<(PacketReason, u64)>, Error> {
        let counts = self.per_cpu::<intf::Counts>("counters", ends)?;
        let of = |(at, reason)| (reason, counts.iter().map(|counts| counts.packets[at]).sum());
        Ok(PacketReason::ALL.iter().copied().enumerate().map(of).collect())
    }

    /// Returns the number of packets that the dispatcher saw and that belong to no session.
    pub fn others(&mut self) -> Result<u64, Error> {
        Ok(self.object.counters("others")?.iter().sum())
    }

    /// Returns the values that a session's entry in a per-CPU map has on the CPUs, one value for each CPU.
    fn per_cpu<T: Plain>(&mut self, name: &'static str, ends: &SessionEnds) -> Result<Vec<T>, Error> {
        let index = self.find(ends)?.raw.index;
        let values = self.object.map(name)?.lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY);
        let values = values.map_err(|source| millrace_kernel::Error::Read { what: name, source })?;
        Ok(values.iter().flatten().filter_map(|bytes| T::from_bytes(bytes)).collect())
    }

    /// Returns a session's packet numbers, losses and round trip. The call takes one system call.
    pub fn progress(&self, ends: &SessionEnds) -> Result<SessionProgress, Error> {
        let index = self.find(ends)?.raw.index;
        let error = |source| millrace_kernel::Error::Read { what: "shared", source };
        let bytes = self.shared["shared"].lookup(&index.to_ne_bytes(), MapFlags::ANY).map_err(error)?;
        let Some(raw) = bytes.and_then(|bytes| intf::Shared::from_bytes(&bytes)) else {
            return Ok(SessionProgress::default());
        };
        Ok(SessionProgress {
            next: raw.next,
            acked: raw.acked,
            delivered: raw.delivered,
            losses: raw.losses,
            round_trip: micros(raw.srtt_us),
            least_round_trip: micros(raw.min_rtt_us),
            newest: raw.newest,
            complete: raw.complete,
        })
    }

    /// Returns the processing times of a session's packets at each hook, summed over CPUs.
    pub fn times(&mut self, ends: &SessionEnds) -> Result<[FunctionTimes; intf::HOOKS], Error> {
        let mut all = [FunctionTimes::default(); intf::HOOKS];
        for of_cpu in self.per_cpu::<intf::Times>("times", ends)? {
            for (times, time) in all.iter_mut().zip(of_cpu.hooks) {
                times.packets += time.packets;
                times.samples += time.samples;
                times.total_ns += time.total_ns;
                // `most` is a maximum over all CPUs, while the other fields are sums.
                times.most_ns = times.most_ns.max(time.most_ns);
                times.over += time.over;
            }
        }
        Ok(all)
    }
}

/// Converts microseconds to a duration; 0 becomes `None`, since it means an unknown value.
pub(super) fn micros(us: u32) -> Option<Duration> {
    (us > 0).then(|| Duration::from_micros(us.into()))
}
