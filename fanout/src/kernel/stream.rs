//! RTP streams and their receivers, in memory that is shared with the BPF program.

#![allow(unsafe_code)]

use std::net::SocketAddr;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use millrace_kernel::Error;
use millrace_kernel::fan::{self, NetPath};
use millrace_kernel::memory::{MappedArray, Shared};

use super::config::{Ssrc, StreamConfig};
use super::intf::{self, REPORTS, SSRC_KNOWN};
use super::outcome::CopyOutcome;
use super::rows::StreamRow;

/// Ticks of a token bucket per nanosecond.
const TICKS: u64 = intf::BUCKET_TICKS as u64;
const SLACK: u64 = 1_000_000_000 * TICKS;
const ATTEMPTS: usize = 8;

// SAFETY: fields that the kernel changes are atomic. Other fields are written by one owner, either before the program
// can reach the entry, or while the program does not use it (an epoch of 0).
unsafe impl Shared for intf::Stream {}
// SAFETY: fields that the kernel changes are atomic. Other fields are written by one owner, while the program does not
// use the entry.
unsafe impl Shared for intf::Receiver {}
// SAFETY: all fields of the type are atomic.
unsafe impl Shared for intf::Tracing {}

pub(super) struct Tables {
    pub streams: MappedArray<intf::Stream>,
    pub receivers: MappedArray<intf::Receiver>,
}

/// A stream of one sender.
pub struct SenderStream {
    tables: Arc<Tables>,
    index: u32,
    listen: SocketAddr,
    places: Vec<SocketAddr>,
    /// Whether each receiver entry of the stream is in use; index 0 is the stream's first.
    used: Mutex<Vec<bool>>,
}

/// Packets of a stream that were fanned out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FanoutMedia {
    /// Number of the sender's packets that were fanned out, even if the stream had no receivers at the time.
    pub packets: u64,
    /// Bytes of UDP payload of the sender's packets that were fanned out, even if the stream had no receivers at the
    /// time.
    pub bytes: u64,
    /// Arrival time of the latest packet, `CLOCK_MONOTONIC`; 0 if no packet has arrived.
    pub last_ns: u64,
    /// The SSRC that is forwarded, if it is a single one and is known already.
    pub ssrc: Option<u32>,
}

/// A sender report that passed this host: the middle 32 bits of its NTP time, and its arrival in microseconds of
/// `CLOCK_MONOTONIC` modulo 2^32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenderReport {
    /// The middle 32 bits of the report's NTP time.
    pub ntp_middle: u32,
    /// Time at which the report passed this host, in microseconds.
    pub passed_us: u32,
}

/// Rate limit of one receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// Bits per second, all headers from IP on included; at least 1.
    pub bits_per_s: u64,
    /// Largest burst in bytes.
    pub burst_bytes: u64,
}

impl Cap {
    /// Returns the ticks that a byte costs, and the ticks of a burst. Above some 500 Gbit/s there is no limit.
    fn ticks(self) -> (u64, u64) {
        let cost = 8 * 1_000_000_000 * TICKS / self.bits_per_s.max(1);
        (cost, cost.saturating_mul(self.burst_bytes))
    }
}

impl SenderStream {
    pub(super) fn new(tables: Arc<Tables>, row: StreamRow, config: &StreamConfig) -> Self {
        let StreamRow { index, first, .. } = row;
        let entry = tables.streams.get(index);
        // SAFETY: the program cannot reach the entry yet: no address is mapped to it, nor was one within the last
        // second (`StreamRows`).
        unsafe {
            *entry.sender.get() = fan::bytes(config.sender.ip()).1;
            *entry.port.get() = config.sender.port().to_be_bytes();
            *entry.rtcp_port.get() = config.sender_rtcp_port.unwrap_or(0).to_be_bytes();
        }
        let counts = [&entry.packets, &entry.bytes, &entry.last_ns, &entry.sent];
        counts.into_iter().chain(&entry.reports).for_each(|count| count.store(0, Ordering::Relaxed));
        entry.receivers.store(0, Ordering::Relaxed);
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

    /// Returns the largest number of receivers of the stream.
    pub fn receivers_max(&self) -> usize {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn entry(&self) -> &intf::Stream {
        self.tables.streams.get(self.index)
    }

    /// Returns the number that identifies the stream in trace events, from 1 on.
    pub fn number(&self) -> u32 {
        self.index + 1
    }

    /// Returns the counts of packets that were fanned out.
    pub fn media(&self) -> FanoutMedia {
        let entry = self.entry();
        let ssrc = entry.ssrc.load(Ordering::Relaxed);
        FanoutMedia {
            packets: entry.packets.load(Ordering::Relaxed),
            bytes: entry.bytes.load(Ordering::Relaxed),
            last_ns: entry.last_ns.load(Ordering::Relaxed),
            ssrc: (ssrc & SSRC_KNOWN != 0).then_some(ssrc as u32),
        }
    }

    /// Counts a packet that userspace fans out, in the same counters as the packets that the BPF program fans out.
    pub fn count(&self, bytes: usize, now_ns: u64) {
        let entry = self.entry();
        entry.packets.fetch_add(1, Ordering::Relaxed);
        entry.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        entry.last_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Reports whether packets of this SSRC are forwarded. If the stream forwards the first SSRC that arrives, this
    /// call may set the SSRC.
    pub fn takes(&self, ssrc: u32) -> bool {
        let entry = self.entry();
        let known = SSRC_KNOWN | u64::from(ssrc);
        entry.one_ssrc.load(Ordering::Relaxed) == 0
            || match entry.ssrc.compare_exchange(0, known, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => true,
                Err(now) => now == known,
            }
    }

    /// Forgets the SSRC, so that the next packet's SSRC is forwarded.
    pub fn forget_ssrc(&self) {
        self.entry().ssrc.store(0, Ordering::Relaxed);
    }

    /// Returns the latest sender reports, newest first.
    pub fn reports(&self) -> Vec<SenderReport> {
        let entry = self.entry();
        let sent = entry.sent.load(Ordering::Relaxed);
        let latest = (0..sent.min(REPORTS as u64)).filter_map(|back| {
            let at = (sent - 1 - back) as usize % REPORTS;
            let word = entry.reports.get(at)?.load(Ordering::Relaxed);
            Some(SenderReport { ntp_middle: (word >> 32) as u32, passed_us: word as u32 })
        });
        latest.collect()
    }

    /// Records a sender report that userspace fans out.
    pub fn note_report(&self, ntp_middle: u32, now_ns: u64) {
        let entry = self.entry();
        let at = entry.sent.fetch_add(1, Ordering::Relaxed) as usize % REPORTS;
        let word = u64::from(ntp_middle) << 32 | u64::from((now_ns / 1000) as u32);
        if let Some(report) = entry.reports.get(at) {
            report.store(word, Ordering::Relaxed);
        }
    }

    /// Adds a receiver, which is sent the stream until `until_ns` of `CLOCK_MONOTONIC`, or until the receiver is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Fails if no entry is free, or if this host has no address of the receiver's family for the stream.
    pub fn add(self: &Arc<Self>, to: SocketAddr, cap: Cap, until_ns: u64) -> Result<ReceiverCopy, Error> {
        let path = NetPath::new(self.listen, to)
            .ok_or(Error::Config("a receiver has an address of the stream's family"))?;
        let at = self.take()?;
        let receiver = ReceiverCopy { stream: self.clone(), at };
        receiver.set(path, cap, until_ns);
        Ok(receiver)
    }

    /// Allocates the lowest free entry. The program only looks at entries up to the highest one in use.
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
        let receivers = used.iter().rposition(|used| *used).map_or(0, |at| at + 1);
        self.entry().receivers.store(receivers as u32, Ordering::Release);
    }
}

/// One receiver's copy of a stream. After it is dropped nothing more is sent, except by runs of the program that are
/// in progress.
pub struct ReceiverCopy {
    stream: Arc<SenderStream>,
    at: u32,
}

impl ReceiverCopy {
    fn entry(&self) -> &intf::Receiver {
        let first = self.stream.entry().first.load(Ordering::Relaxed);
        self.stream.tables.receivers.get(first + self.at)
    }

    /// Writes the receiver's entry in the map that the BPF program reads. The program sends the receiver a copy only if
    /// it read the same `epoch` before and after the entry's other fields.
    fn set(&self, path: NetPath, cap: Cap, until_ns: u64) {
        let entry = self.entry();
        let (cost, burst) = cap.ticks();
        // SAFETY: the entry's epoch is 0, so the program does not use `path`, and no other `ReceiverCopy` has the
        // entry.
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

    /// Returns the number that identifies the receiver in trace events, from 1 on. It is unique among the stream's
    /// present receivers.
    pub fn number(&self) -> u32 {
        self.at + 1
    }

    /// Extends the lease to `until_ns` of `CLOCK_MONOTONIC`.
    pub fn renew(&self, until_ns: u64) {
        self.entry().until_ns.store(until_ns, Ordering::Relaxed);
    }

    /// Changes the receiver's rate limit.
    pub fn set_cap(&self, cap: Cap) {
        let entry = self.entry();
        let (cost, burst) = cap.ticks();
        entry.rate.cost.store(cost, Ordering::Relaxed);
        entry.rate.burst.store(burst, Ordering::Relaxed);
    }

    /// Returns the number of packets that were sent to the receiver, and the bytes of their UDP payload.
    pub fn sent(&self) -> (u64, u64) {
        let entry = self.entry();
        (entry.packets.load(Ordering::Relaxed), entry.bytes.load(Ordering::Relaxed))
    }

    /// Returns the number of copies for this receiver with this outcome.
    pub fn copies(&self, outcome: CopyOutcome) -> u64 {
        self.entry().outcomes.get(outcome as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Charges a packet of `bytes`, headers from IP on included, to the receiver, whose rate limit and lease also apply
    /// to the program's copies. Returns whether userspace may send it. The packet is counted either way.
    pub fn admit(&self, bytes: usize, payload: usize, now_ns: u64) -> CopyOutcome {
        let entry = self.entry();
        let outcome = if now_ns >= entry.until_ns.load(Ordering::Relaxed) {
            CopyOutcome::Ended
        } else if !self.take(bytes as u64, now_ns) {
            CopyOutcome::Rate
        } else {
            entry.packets.fetch_add(1, Ordering::Relaxed);
            entry.bytes.fetch_add(payload as u64, Ordering::Relaxed);
            CopyOutcome::Sent
        };
        if let Some(count) = entry.outcomes.get(outcome as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Charges `bytes` to the receiver's token bucket, as `is_over_at` of `bucket.h` does. Returns whether they fit.
    fn take(&self, bytes: u64, now_ns: u64) -> bool {
        let entry = self.entry();
        let cost = entry.rate.cost.load(Ordering::Relaxed);
        let burst = entry.rate.burst.load(Ordering::Relaxed);
        let now = now_ns.wrapping_mul(TICKS);
        for _ in 0..ATTEMPTS {
            let old = entry.full_at.load(Ordering::Relaxed);
            // The difference wraps if `full_at` is in the past: the bucket is full then.
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
        // If other CPUs have changed the token bucket at each of `ATTEMPTS` attempts, the packet is sent although the
        // bucket stays unchanged.
        true
    }
}

impl Drop for ReceiverCopy {
    fn drop(&mut self) {
        self.entry().epoch.store(0, Ordering::SeqCst);
        // The epoch of 0 has to be visible before any field is written for the next receiver.
        fence(Ordering::SeqCst);
        self.stream.give(self.at);
    }
}

/// Returns a new epoch for a receiver's entry in the BPF map. It is never 0, because 0 marks a free entry.
fn next_epoch() -> u32 {
    use std::sync::atomic::AtomicU32;
    static EPOCHS: AtomicU32 = AtomicU32::new(1);
    match EPOCHS.fetch_add(1, Ordering::Relaxed) {
        0 => EPOCHS.fetch_add(1, Ordering::Relaxed),
        epoch => epoch,
    }
}
