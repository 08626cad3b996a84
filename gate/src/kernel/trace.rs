//! Traces, which report refused packets one by one.

use std::sync::{Arc, Mutex};

use libbpf_rs::MapHandle;
use millrace_kernel::Error;
use millrace_kernel::prefix::mask;

use super::intf;
use super::maps::GateMaps;
use super::reason::Rule;
use super::rules::INTERFACE;
use super::settings::Settings;
use super::{Prefix, RefusedPacket, drain, lock, sample};

/// The filter of a trace, for packets that a rule refused or would have refused, and the largest rate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateTrace {
    /// Address prefix of the senders whose packets are traced; `None` traces those of all.
    pub client: Option<Prefix>,
    /// Names of the guarded applications (scopes) whose packets are traced; empty traces those of all.
    pub scopes: Vec<String>,
    /// A packet is traced if one of these rules refused it, or would have. Empty traces refusals by all rules.
    pub rules: Vec<Rule>,
    /// Largest number of packets per second, and largest burst: 1 to [`PER_SECOND_MAX`](Self::PER_SECOND_MAX).
    pub per_second: u32,
}

impl GateTrace {
    /// Largest number of simultaneous traces.
    pub const TRACERS: usize = intf::TRACERS;
    /// The largest rate of a trace, in packets per second.
    pub const PER_SECOND_MAX: u32 = 1000;

    fn encode(&self, settings: &Settings) -> Result<intf::Tracer, Error> {
        const SECOND: u64 = 1_000_000_000 * intf::TICKS;
        if !(1..=Self::PER_SECOND_MAX).contains(&self.per_second) {
            return Err(Error::Config("a trace may have 1 to 1000 packets per second"));
        }
        let (address, bits) = self.client.map_or(([0; 16], 0), |client| client.raw());
        let family = match self.client.map(|client| client.address().is_ipv4()) {
            Some(true) => 4,
            Some(false) => 6,
            None => 0,
        };
        let scopes = self.scope_indexes(settings)?.into_iter().fold(0, |all, index| all | 1 << index);
        let rules = self.rules.iter().fold(0, |all, rule| all | 1 << *rule as u32);
        Ok(intf::Tracer {
            mask: mask([0xff; 16], bits),
            address,
            rate: intf::Rate { cost: SECOND / u64::from(self.per_second), burst: SECOND },
            full_at: 0,
            scopes: if self.scopes.is_empty() { u64::MAX } else { scopes },
            rules: if rules == 0 { u32::MAX } else { rules },
            family,
        })
    }

    fn scope_indexes(&self, settings: &Settings) -> Result<Vec<u32>, Error> {
        let index = |name: &String| {
            let index = if name == INTERFACE { Some(0) } else { settings.index(name) };
            index.ok_or(Error::Config("there is no scope of that name"))
        };
        self.scopes.iter().map(index).collect()
    }
}

/// New samples of a trace since the last call, and totals since the trace began.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traced {
    /// The new samples, oldest first.
    pub samples: Vec<RefusedPacket>,
    /// Number of packets that match the trace. Each of these packets is in a sample, or is counted as left out or lost.
    pub matched: u64,
    /// Number of matching packets that were left out because of [`GateTrace::per_second`].
    pub left_out: u64,
    /// Number of matching packets that were lost, because they were not read in time.
    pub lost: u64,
}

/// A running trace, from [`LoadedGate::trace`](super::LoadedGate::trace). It ends when this value or the gate is
/// dropped.
pub struct PacketTracer {
    settings: Arc<Mutex<Settings>>,
    maps: Arc<GateMaps>,
    traces: Arc<Traces>,
    index: u32,
    /// The index of each scope to follow, and the number of scopes that had this index before.
    scopes: Vec<(u32, u32)>,
}

impl PacketTracer {
    pub(super) fn new(
        what: &GateTrace,
        settings: &Arc<Mutex<Settings>>,
        maps: &Arc<GateMaps>,
        traces: &Arc<Traces>,
    ) -> Result<Self, Error> {
        let mut locked = lock(settings);
        let raw = what.encode(&locked)?;
        let scopes =
            what.scope_indexes(&locked)?.into_iter().map(|index| (index, maps.turn(index))).collect();
        let index = locked.free_tracer().ok_or(Error::Full { what: "traces: 8 are running" })?;
        // Runs of the program that began earlier may still send packets to the trace that had this index before. These
        // packets are discarded first.
        maps.barrier.wait_for_runs()?;
        traces.collect(&locked.names())?;
        maps.put_tracer(index, &raw)?;
        traces.set(index, Some(TraceQueue::default()));
        locked.set_tracer(maps, index, true).inspect_err(|_| traces.set(index, None))?;
        drop(locked);
        let settings = settings.clone();
        let maps = maps.clone();
        let traces = traces.clone();
        Ok(Self { settings, maps, traces, index, scopes })
    }

    /// Returns the packets since the last call, oldest first. Call it several times a second: packets for which the
    /// buffers have no room are lost, and counted.
    pub fn take(&self) -> Result<Traced, Error> {
        if self.scopes.iter().any(|(index, turn)| self.maps.turn(*index) != *turn) {
            return Err(Error::Config("the scope does not exist any more"));
        }
        let names = lock(&self.settings).names();
        self.traces.collect(&names)?;
        let TraceQueue { samples, lost } = self.traces.take(self.index);
        let counts = self.maps.traced(self.index)?;
        let intf::Traced { matched, left_out, lost: lost_before } = counts;
        Ok(Traced { samples, matched, left_out, lost: lost_before + lost })
    }
}

impl Drop for PacketTracer {
    fn drop(&mut self) {
        let mut settings = lock(&self.settings);
        self.traces.set(self.index, None);
        // Switching the trace off fails only if the kernel is out of memory for a moment. `collect` then ignores the
        // packets that the kernel still sends.
        let _ = settings.set_tracer(&self.maps, self.index, false);
    }
}

/// The packets that the program has sent, sorted by trace.
pub(super) struct Traces {
    ring: MapHandle,
    queues: Mutex<[Option<TraceQueue>; intf::TRACERS]>,
}

/// The packets that wait to be read for a trace.
#[derive(Default)]
struct TraceQueue {
    samples: Vec<RefusedPacket>,
    /// Total number of packets that were lost because the queue was full.
    lost: u64,
}

/// Largest number of samples in a trace's queue: the largest burst plus the packets of one second at the largest rate.
const QUEUE: usize = 2 * GateTrace::PER_SECOND_MAX as usize;

impl Traces {
    pub fn new(ring: MapHandle) -> Self {
        Self { ring, queues: Mutex::default() }
    }

    fn set(&self, index: u32, queue: Option<TraceQueue>) {
        if let Some(place) = lock(&self.queues).get_mut(index as usize) {
            *place = queue;
        }
    }

    /// Moves all samples from the ring buffer to the queues of their traces. `names` are the scopes' names by index.
    fn collect(&self, names: &[String]) -> Result<(), Error> {
        let mut queues = lock(&self.queues);
        drain(&self.ring, |raw| {
            let takers = (0..).zip(queues.iter_mut()).filter(|(index, _)| raw.tracers & 1 << *index != 0);
            let takers: Vec<_> = takers.filter_map(|(_, queue)| queue.as_mut()).collect();
            let Some(sample) = sample(raw, names).filter(|_| !takers.is_empty()) else { return };
            takers.into_iter().for_each(|queue| queue.push(sample.clone()));
        })
    }

    /// Removes and returns a trace's queued samples. The number of lost packets is not reset, because it is a total
    /// since the trace began.
    fn take(&self, index: u32) -> TraceQueue {
        let mut queues = lock(&self.queues);
        let queue = queues.get_mut(index as usize).and_then(Option::as_mut);
        queue.map_or(TraceQueue::default(), |queue| TraceQueue {
            samples: std::mem::take(&mut queue.samples),
            lost: queue.lost,
        })
    }
}

impl TraceQueue {
    fn push(&mut self, sample: RefusedPacket) {
        match self.samples.len() < QUEUE {
            true => self.samples.push(sample),
            false => self.lost += 1,
        }
    }
}
