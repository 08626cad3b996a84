//! What the kernel knows of sessions: what became of packets, what has come, and how long joints took.

use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use millrace_kernel::intf::Plain;

use super::{Ends, Joints, Reason, intf};
use crate::Error;

/// How long packets took at a joint: every 64th is timed, from the dispatcher to the verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    pub packets: u64,
    pub samples: u64,
    pub total_ns: u64,
    pub most_ns: u64,
    /// Samples above the session's budget.
    pub over: u64,
}

/// What is known of a session's other end by its acknowledgements, and of what has come here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of the next packet out.
    pub next: u32,
    /// All below it have come at the other end, or were given up.
    pub acked: u32,
    /// Packets that have come there, or were given up.
    pub delivered: u32,
    /// Times that something was missing there, at most one in a round trip.
    pub losses: u32,
    /// Smoothed, as in RFC 6298.
    pub round_trip: Option<Duration>,
    pub least_round_trip: Option<Duration>,
    /// One more than the newest number in.
    pub newest: u32,
    /// All below it have come here, or are given up.
    pub complete: u32,
}

impl Joints {
    /// Packets of a session by what became of them.
    pub fn counts(&mut self, ends: &Ends) -> Result<Vec<(Reason, u64)>, Error> {
        let counts = self.per_cpu::<intf::Counts>("counters", ends)?;
        let of = |(at, reason)| (reason, counts.iter().map(|counts| counts.packets[at]).sum());
        Ok(Reason::ALL.iter().copied().enumerate().map(of).collect())
    }

    /// Packets that the joints looked at and that were of no session.
    pub fn others(&mut self) -> Result<u64, Error> {
        Ok(self.object.counters("others")?.iter().sum())
    }

    /// Of a session, what each CPU has.
    fn per_cpu<T: Plain>(&mut self, name: &'static str, ends: &Ends) -> Result<Vec<T>, Error> {
        let index = self.find(ends)?.raw.index;
        let values = self.object.map(name)?.lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY);
        let values = values.map_err(|source| millrace_kernel::Error::Read { what: name, source })?;
        Ok(values.iter().flatten().filter_map(|bytes| T::from_bytes(bytes)).collect())
    }

    pub fn progress(&self, ends: &Ends) -> Result<Progress, Error> {
        let index = self.find(ends)?.raw.index;
        let error = |source| millrace_kernel::Error::Read { what: "shared", source };
        let bytes = self.shared["shared"].lookup(&index.to_ne_bytes(), MapFlags::ANY).map_err(error)?;
        let Some(raw) = bytes.and_then(|bytes| intf::Shared::from_bytes(&bytes)) else {
            return Ok(Progress::default());
        };
        Ok(Progress {
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

    /// Of each joint.
    pub fn times(&mut self, ends: &Ends) -> Result<[Times; intf::JOINTS], Error> {
        let mut all = [Times::default(); intf::JOINTS];
        for of_cpu in self.per_cpu::<intf::Times>("times", ends)? {
            for (times, time) in all.iter_mut().zip(of_cpu.joints) {
                times.packets += time.packets;
                times.samples += time.samples;
                times.total_ns += time.total_ns;
                times.most_ns = times.most_ns.max(time.most_ns);
                times.over += time.over;
            }
        }
        Ok(all)
    }
}

/// 0: not known.
pub(super) fn micros(us: u32) -> Option<Duration> {
    (us > 0).then(|| Duration::from_micros(us.into()))
}
