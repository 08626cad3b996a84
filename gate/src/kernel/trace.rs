//! Following what is refused, packet by packet.

use std::sync::{Arc, Mutex};

use libbpf_rs::MapHandle;
use millrace_kernel::Error;
use millrace_kernel::prefix::mask;

use super::intf;
use super::maps::Maps;
use super::reason::Rule;
use super::rules::INTERFACE;
use super::settings::Settings;
use super::{Prefix, Sample, drain, lock, sample};

/// Which packets somebody wants to see, of those that a rule refused or would have, and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Of senders in this prefix only.
    pub client: Option<Prefix>,
    /// Of these scopes only; empty: of all.
    pub scopes: Vec<String>,
    /// What one of these rules objects to; empty: any.
    pub rules: Vec<Rule>,
    /// Packets at most; as many may come at once. 1 to [`PER_SECOND_MAX`](Self::PER_SECOND_MAX).
    pub per_second: u32,
}

impl Trace {
    /// At the same time.
    pub const TRACERS: usize = intf::TRACERS;
    pub const PER_SECOND_MAX: u32 = 1000;

    fn encode(&self, settings: &Settings) -> Result<intf::Tracer, Error> {
        const SECOND: u64 = 1_000_000_000 * intf::TICKS;
        if !(1..=Self::PER_SECOND_MAX).contains(&self.per_second) {
            return Err(Error::Config("a tracer may have 1 to 1000 packets a second"));
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

/// What came since the last look, and what became of everything since the beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traced {
    pub samples: Vec<Sample>,
    /// Packets that are followed; each is in a sample, or in one of the two below.
    pub matched: u64,
    /// Beyond [`Trace::per_second`].
    pub left_out: u64,
    /// Nobody looked in time.
    pub lost: u64,
}

/// Follows packets until it is dropped; see [`Gate::trace`](super::Gate::trace). Without effect when the gate is gone.
pub struct Tracer {
    settings: Arc<Mutex<Settings>>,
    maps: Arc<Maps>,
    traces: Arc<Traces>,
    index: u32,
    /// Scopes, and which of those that have their index.
    scopes: Vec<(u32, u32)>,
}

impl Tracer {
    pub(super) fn new(
        what: &Trace,
        settings: &Arc<Mutex<Settings>>,
        maps: &Arc<Maps>,
        traces: &Arc<Traces>,
    ) -> Result<Self, Error> {
        let mut locked = lock(settings);
        let raw = what.encode(&locked)?;
        let scopes =
            what.scope_indexes(&locked)?.into_iter().map(|index| (index, maps.turn(index))).collect();
        let index = locked.free_tracer().ok_or(Error::Full { what: "tracers: 8 follow already" })?;
        // What was on its way to the one before must not come to this one.
        maps.barrier.wait_for_runs()?;
        traces.collect(&locked.names())?;
        maps.put_tracer(index, &raw)?;
        traces.set(index, Some(Queue::default()));
        locked.set_tracer(maps, index, true).inspect_err(|_| traces.set(index, None))?;
        drop(locked);
        let (settings, maps, traces) = (settings.clone(), maps.clone(), traces.clone());
        Ok(Self { settings, maps, traces, index, scopes })
    }

    /// What came since the last call, oldest first. To be called several times a second: what does not fit into memory
    /// meanwhile is lost, and counted.
    pub fn take(&self) -> Result<Traced, Error> {
        if self.scopes.iter().any(|(index, turn)| self.maps.turn(*index) != *turn) {
            return Err(Error::Config("the scope is gone"));
        }
        let names = lock(&self.settings).names();
        self.traces.collect(&names)?;
        let Queue { samples, lost } = self.traces.take(self.index);
        let counts = self.maps.traced(self.index)?;
        let intf::Traced { matched, left_out, lost: lost_before } = counts;
        Ok(Traced { samples, matched, left_out, lost: lost_before + lost })
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let mut settings = lock(&self.settings);
        self.traces.set(self.index, None);
        // Fails only if the kernel has no memory for a moment: then nobody takes what it sends.
        let _ = settings.set_tracer(&self.maps, self.index, false);
    }
}

/// What the program has sent, by tracer.
pub(super) struct Traces {
    ring: MapHandle,
    queues: Mutex<[Option<Queue>; intf::TRACERS]>,
}

/// What waits for a tracer to look.
#[derive(Default)]
struct Queue {
    samples: Vec<Sample>,
    /// In all, for want of room.
    lost: u64,
}

/// Samples in a queue at most: what a tracer may get at once, and in a second more.
const QUEUE: usize = 2 * Trace::PER_SECOND_MAX as usize;

impl Traces {
    pub fn new(ring: MapHandle) -> Self {
        Self { ring, queues: Mutex::default() }
    }

    fn set(&self, index: u32, queue: Option<Queue>) {
        if let Some(place) = lock(&self.queues).get_mut(index as usize) {
            *place = queue;
        }
    }

    /// Empties the ring buffer. `names`: of the scopes, by index.
    fn collect(&self, names: &[String]) -> Result<(), Error> {
        let mut queues = lock(&self.queues);
        drain(&self.ring, |raw| {
            let takers = (0..).zip(queues.iter_mut()).filter(|(index, _)| raw.tracers & 1 << *index != 0);
            let takers: Vec<_> = takers.filter_map(|(_, queue)| queue.as_mut()).collect();
            let Some(sample) = sample(raw, names).filter(|_| !takers.is_empty()) else { return };
            takers.into_iter().for_each(|queue| queue.push(sample.clone()));
        })
    }

    /// The queue as it is, which begins anew but for what was lost.
    fn take(&self, index: u32) -> Queue {
        let mut queues = lock(&self.queues);
        let queue = queues.get_mut(index as usize).and_then(Option::as_mut);
        queue.map_or(Queue::default(), |queue| Queue {
            samples: std::mem::take(&mut queue.samples),
            lost: queue.lost,
        })
    }
}

impl Queue {
    fn push(&mut self, sample: Sample) {
        match self.samples.len() < QUEUE {
            true => self.samples.push(sample),
            false => self.lost += 1,
        }
    }
}
