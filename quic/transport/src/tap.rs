//! Records of packets that the data planes in userspace send, for packet traces.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millrace_quic::plane::downstream::PacketFrame;
use parking_lot::Mutex;

use crate::{clock::monotonic_ns, trace::PacketFilter};

/// Largest number of records that wait to be read.
const MAX_WAITING: usize = 1 << 14;

/// A collector of records of sent packets, for all connections of the endpoints that share it. It collects only while a
/// filter is set.
#[derive(Default)]
pub struct Tap {
    on: AtomicBool,
    open: Mutex<OpenTap>,
    lost: AtomicU64,
}

#[derive(Default)]
struct OpenTap {
    filter: Option<PacketFilter>,
    pieces: Vec<SentPiece>,
}

/// A record of one frame of a packet that was sent from userspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentPiece {
    /// The time of sending on `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// The number by which traces identify the connection: see
    /// [`Connection::set_session`](crate::Connection::set_session).
    pub session: u32,
    /// The packet number.
    pub number: u64,
    /// Size of the packet's UDP payload, bytes.
    pub size: u16,
    /// The frame: a part of one stream, or one datagram.
    pub piece: PacketFrame,
}

impl Tap {
    /// Sets the filter, or stops collecting with `None`. The tap records packets whose packet number is a multiple of
    /// [`PacketFilter::every`].
    pub fn set(&self, filter: Option<PacketFilter>) {
        let mut open = self.open.lock();
        // Without a filter nobody reads the waiting records, so they are dropped.
        if filter.is_none() {
            *open = OpenTap::default();
        }
        open.filter = filter;
        self.on.store(filter.is_some(), Ordering::Relaxed);
    }

    /// Returns whether a filter is set. The load is relaxed, so a few packets may be missed after a change.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records a sealed packet, if it passes the filter.
    pub fn add(&self, session: u32, number: u64, size: usize, pieces: impl Iterator<Item = PacketFrame>) {
        let mut open = self.open.lock();
        let Some(filter) = open.filter else { return };
        let other_session = filter.session.is_some_and(|wanted| wanted.get() != session);
        if other_session || !number.is_multiple_of(u64::from(filter.every.get())) {
            return;
        }
        let time_ns = monotonic_ns();
        let size = u16::try_from(size).unwrap_or(u16::MAX);
        for piece in pieces {
            if filter.track.is_some_and(|wanted| wanted.get() != piece.label.track) {
                continue;
            }
            if open.pieces.len() >= MAX_WAITING {
                self.lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            open.pieces.push(SentPiece { time_ns, session, number, size, piece });
        }
    }

    /// Returns the records since the last call, in order for each connection, and how many were lost because too many
    /// waited.
    pub fn take(&self) -> (Vec<SentPiece>, u64) {
        let pieces = std::mem::take(&mut self.open.lock().pieces);
        (pieces, self.lost.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use millrace_quic::plane::downstream::{FrameContent, Label};

    use super::*;

    fn ping(track: u32) -> PacketFrame {
        PacketFrame { label: Label { track, group: 0 }, stream_id: None, carried: FrameContent::Ping }
    }

    fn taken(tap: &Tap) -> Vec<(u64, u32)> {
        tap.take().0.iter().map(|sent| (sent.number, sent.piece.label.track)).collect()
    }

    #[test]
    fn tap_collects_only_packets_that_pass_the_filter() {
        let tap = Tap::default();
        let add = |session, number| tap.add(session, number, 100, [ping(1), ping(2)].into_iter());
        add(7, 0);
        assert_eq!(taken(&tap), [], "no filter is set");
        let all = PacketFilter { every: NonZero::<u32>::MIN, track: None, session: None };
        tap.set(Some(all));
        add(7, 1);
        assert_eq!(taken(&tap), [(1, 1), (1, 2)]);
        tap.set(Some(PacketFilter { every: NonZero::new(3).unwrap(), track: NonZero::new(2), ..all }));
        (3..9).for_each(|number| add(7, number));
        assert_eq!(taken(&tap), [(3, 2), (6, 2)]);
        tap.set(Some(PacketFilter { session: NonZero::new(8), ..all }));
        add(7, 9);
        add(8, 10);
        assert_eq!(taken(&tap), [(10, 1), (10, 2)]);
        add(8, 11);
        tap.set(None);
        assert_eq!((taken(&tap), tap.is_on()), (vec![], false), "no record remains");
    }

    #[test]
    fn tap_records_beyond_the_limit_are_dropped_and_counted() {
        let tap = Tap::default();
        tap.set(Some(PacketFilter { every: NonZero::<u32>::MIN, track: None, session: None }));
        (0..MAX_WAITING as u64 + 5).for_each(|number| tap.add(1, number, 100, [ping(1)].into_iter()));
        let (pieces, lost) = tap.take();
        assert_eq!((pieces.len(), lost), (MAX_WAITING, 5));
        assert_eq!(tap.take(), (vec![], 0));
    }
}
