//! Streams and their receivers, in memory that the program shares.

#![allow(unsafe_code)]

use std::net::SocketAddr;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use millrace_kernel::Error;
use millrace_kernel::fan::{self, NetPath};
use millrace_kernel::memory::{Shared, Table};

use super::config::{Ssrc, StreamConfig};
use super::intf::{self, REPORTS, SSRC_KNOWN};
use super::outcome::LegOutcome;
use super::rows::Row;

/// Per nanosecond.
const TICKS: u64 = intf::BUCKET_TICKS as u64;
const SLACK: u64 = 1_000_000_000 * TICKS;
const ATTEMPTS: usize = 8;

// SAFETY: what the kernel changes is atomic; the rest is written by one owner before the program can reach it, or while it
// does not use it (an epoch of 0).
unsafe impl Shared for intf::Stream {}
// SAFETY: as above.
unsafe impl Shared for intf::Leg {}
// SAFETY: atomics only.
unsafe impl Shared for intf::Tracing {}

pub(super) struct Tables {
    pub streams: Table<intf::Stream>,
    pub legs: Table<intf::Leg>,
}

/// A stream of one sender.
pub struct Stream {
    tables: Arc<Tables>,
    index: u32,
    listen: SocketAddr,
    places: Vec<SocketAddr>,
    /// Which legs are in use, from the stream's first on.
    used: Mutex<Vec<bool>>,
}

/// What was fanned out of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Media {
    pub packets: u64,
    /// UDP payload.
    pub bytes: u64,
    /// When the latest packet arrived, `CLOCK_MONOTONIC`; 0: none.
    pub last_ns: u64,
    /// The one that is forwarded, where it is only one and known.
    pub ssrc: Option<u32>,
}

/// A sender report that passed: the middle 32 bits of its NTP time, and when, in microseconds of `CLOCK_MONOTONIC` modulo 2^32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub ntp_middle: u32,
    pub passed_us: u32,
}

/// What one receiver may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// Bits per second, with all headers from IP on; 1 at least.
    pub bits_per_s: u64,
    /// What may come at once.
    pub burst_bytes: u64,
}

impl Cap {
    /// Ticks that a byte costs, and those of a burst. Beyond some 500 Gbit/s there is no cap.
    fn ticks(self) -> (u64, u64) {
        let cost = 8 * 1_000_000_000 * TICKS / self.bits_per_s.max(1);
        (cost, cost.saturating_mul(self.burst_bytes))
    }
}

impl Stream {
    pub(super) fn new(tables: Arc<Tables>, row: Row, config: &StreamConfig) -> Self {
        let Row { index, first, .. } = row;
        let entry = tables.streams.get(index);
        // SAFETY: the program cannot reach the entry yet: no place leads to it, nor did one a moment ago (`Rows`).
        unsafe {
            *entry.sender.get() = fan::bytes(config.sender.ip()).1;
            *entry.port.get() = config.sender.port().to_be_bytes();
            *entry.rtcp_port.get() = config.sender_rtcp_port.unwrap_or(0).to_be_bytes();
        }
        let counts = [&entry.packets, &entry.bytes, &entry.last_ns, &entry.sent];
        counts.into_iter().chain(&entry.reports).for_each(|count| count.store(0, Ordering::Relaxed));
        entry.legs.store(0, Ordering::Relaxed);
        entry.number.store(index + 1, Ordering::Relaxed);
        entry.first.store(first, Ordering::Relaxed);
        entry.one_ssrc.store(u32::from(config.ssrc != Ssrc::Any), Ordering::Relaxed);
        let known = if let Ssrc::Is(ssrc) = config.ssrc { SSRC_KNOWN | u64::from(ssrc) } else { 0 };
        entry.ssrc.store(known, Ordering::Release);
        let used = Mutex::new(vec![false; config.max_receivers as usize]);
        Self { tables, index, listen: config.listen, places: config.places().collect(), used }
    }

    pub(super) fn index(&self) -> u32 {
        self.index
    }

    pub(super) fn places(&self) -> &[SocketAddr] {
        &self.places
    }

    /// For which there is room.
    pub fn receivers_max(&self) -> usize {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn entry(&self) -> &intf::Stream {
        self.tables.streams.get(self.index)
    }

    /// From 1 on: its name in events.
    pub fn number(&self) -> u32 {
        self.index + 1
    }

    pub fn media(&self) -> Media {
        let entry = self.entry();
        let ssrc = entry.ssrc.load(Ordering::Relaxed);
        Media {
            packets: entry.packets.load(Ordering::Relaxed),
            bytes: entry.bytes.load(Ordering::Relaxed),
            last_ns: entry.last_ns.load(Ordering::Relaxed),
            ssrc: (ssrc & SSRC_KNOWN != 0).then_some(ssrc as u32),
        }
    }

    /// A packet that userspace fans out: the same is counted as in the program.
    pub fn count(&self, bytes: usize, now_ns: u64) {
        let entry = self.entry();
        entry.packets.fetch_add(1, Ordering::Relaxed);
        entry.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        entry.last_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Whether packets of this SSRC are forwarded. Where the stream takes whatever comes first, this may be it.
    pub fn takes(&self, ssrc: u32) -> bool {
        let entry = self.entry();
        let known = SSRC_KNOWN | u64::from(ssrc);
        entry.one_ssrc.load(Ordering::Relaxed) == 0
            || match entry.ssrc.compare_exchange(0, known, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => true,
                Err(now) => now == known,
            }
    }

    /// Has the next SSRC be the one that is forwarded.
    pub fn forget_ssrc(&self) {
        self.entry().ssrc.store(0, Ordering::Relaxed);
    }

    /// The latest ones, newest first.
    pub fn reports(&self) -> Vec<Report> {
        let entry = self.entry();
        let sent = entry.sent.load(Ordering::Relaxed);
        let latest = (0..sent.min(REPORTS as u64)).filter_map(|back| {
            let at = (sent - 1 - back) as usize % REPORTS;
            let word = entry.reports.get(at)?.load(Ordering::Relaxed);
            Some(Report { ntp_middle: (word >> 32) as u32, passed_us: word as u32 })
        });
        latest.collect()
    }

    /// The same, of one that userspace fans out.
    pub fn note_report(&self, ntp_middle: u32, now_ns: u64) {
        let entry = self.entry();
        let at = entry.sent.fetch_add(1, Ordering::Relaxed) as usize % REPORTS;
        let word = u64::from(ntp_middle) << 32 | u64::from((now_ns / 1000) as u32);
        if let Some(report) = entry.reports.get(at) {
            report.store(word, Ordering::Relaxed);
        }
    }

    /// Has a receiver be sent the stream until then, by `CLOCK_MONOTONIC`, or until it is dropped.
    ///
    /// # Errors
    /// There is no room; or the receiver's address is of another family than any of this host's for the stream.
    pub fn add(self: &Arc<Self>, to: SocketAddr, cap: Cap, until_ns: u64) -> Result<Leg, Error> {
        let path = NetPath::new(self.listen, to)
            .ok_or(Error::Config("a receiver has an address of the stream's family"))?;
        let at = self.take()?;
        let leg = Leg { stream: self.clone(), at };
        leg.set(path, cap, until_ns);
        Ok(leg)
    }

    /// The lowest place that is free: what the program looks at ends with the highest that is not.
    fn take(&self) -> Result<u32, Error> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let at = used.iter().position(|used| !used).ok_or(Error::Full { what: "receivers" })?;
        if let Some(place) = used.get_mut(at) {
            *place = true;
        }
        self.publish(&used);
        Ok(at as u32)
    }

    fn give(&self, at: u32) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = used.get_mut(at as usize) {
            *place = false;
        }
        self.publish(&used);
    }

    fn publish(&self, used: &[bool]) {
        let legs = used.iter().rposition(|used| *used).map_or(0, |at| at + 1);
        self.entry().legs.store(legs as u32, Ordering::Release);
    }
}

/// One receiver's copy of a stream. When it is dropped nothing is sent there any more, up to runs of the program that are in
/// the middle of it.
pub struct Leg {
    stream: Arc<Stream>,
    at: u32,
}

impl Leg {
    fn entry(&self) -> &intf::Leg {
        let first = self.stream.entry().first.load(Ordering::Relaxed);
        self.stream.tables.legs.get(first + self.at)
    }

    /// The program sends by what it has read between two looks at the same epoch.
    fn set(&self, path: NetPath, cap: Cap, until_ns: u64) {
        let entry = self.entry();
        let (cost, burst) = cap.ticks();
        // SAFETY: the epoch is 0, so whoever reads this does not use it; and this handle is the only one of the entry.
        unsafe { *entry.path.get() = path };
        entry.rate.cost.store(cost, Ordering::Relaxed);
        entry.rate.burst.store(burst, Ordering::Relaxed);
        entry.full_at.store(0, Ordering::Relaxed);
        entry.until_ns.store(until_ns, Ordering::Relaxed);
        entry.number.store(self.at + 1, Ordering::Relaxed);
        entry.packets.store(0, Ordering::Relaxed);
        entry.bytes.store(0, Ordering::Relaxed);
        entry.outcomes.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        entry.epoch.store(next_epoch(), Ordering::Release);
    }

    /// From 1 on: its name in events, unique among the stream's receivers of the moment.
    pub fn number(&self) -> u32 {
        self.at + 1
    }

    pub fn renew(&self, until_ns: u64) {
        self.entry().until_ns.store(until_ns, Ordering::Relaxed);
    }

    /// Another cap from now on.
    pub fn set_cap(&self, cap: Cap) {
        let entry = self.entry();
        let (cost, burst) = cap.ticks();
        entry.rate.cost.store(cost, Ordering::Relaxed);
        entry.rate.burst.store(burst, Ordering::Relaxed);
    }

    /// Packets that were sent, and their UDP payload.
    pub fn sent(&self) -> (u64, u64) {
        let entry = self.entry();
        (entry.packets.load(Ordering::Relaxed), entry.bytes.load(Ordering::Relaxed))
    }

    pub fn copies(&self, outcome: LegOutcome) -> u64 {
        self.entry().outcomes.get(outcome as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Whether userspace may send so many bytes, headers from IP on included, for the same cap and lease as the program's
    /// copies. It is counted either way.
    pub fn admit(&self, bytes: usize, payload: usize, now_ns: u64) -> LegOutcome {
        let entry = self.entry();
        let outcome = if now_ns >= entry.until_ns.load(Ordering::Relaxed) {
            LegOutcome::Ended
        } else if !self.take(bytes as u64, now_ns) {
            LegOutcome::Rate
        } else {
            entry.packets.fetch_add(1, Ordering::Relaxed);
            entry.bytes.fetch_add(payload as u64, Ordering::Relaxed);
            LegOutcome::Sent
        };
        if let Some(count) = entry.outcomes.get(outcome as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// `is_over_at` of `bucket.h`.
    fn take(&self, bytes: u64, now_ns: u64) -> bool {
        let entry = self.entry();
        let (cost, burst) =
            (entry.rate.cost.load(Ordering::Relaxed), entry.rate.burst.load(Ordering::Relaxed));
        let now = now_ns.wrapping_mul(TICKS);
        for _ in 0..ATTEMPTS {
            let old = entry.full_at.load(Ordering::Relaxed);
            let ahead = match old.wrapping_sub(now) {
                ahead if ahead > burst.saturating_add(SLACK) => 0,
                ahead => ahead,
            };
            let ahead = ahead.saturating_add(bytes.saturating_mul(cost));
            if ahead > burst {
                return false;
            }
            let next = now.wrapping_add(ahead);
            if entry.full_at.compare_exchange(old, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
        true
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        self.entry().epoch.store(0, Ordering::SeqCst);
        // Before anything of the entry is written for the next one.
        fence(Ordering::SeqCst);
        self.stream.give(self.at);
    }
}

/// Not 0, which stands for "not in use".
fn next_epoch() -> u32 {
    use std::sync::atomic::AtomicU32;
    static EPOCHS: AtomicU32 = AtomicU32::new(1);
    match EPOCHS.fetch_add(1, Ordering::Relaxed) {
        0 => EPOCHS.fetch_add(1, Ordering::Relaxed),
        epoch => epoch,
    }
}
