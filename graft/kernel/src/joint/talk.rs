//! What both ends' processes say to each other beside the data, and what the kernel tells this one.

use std::time::Duration;

use millrace_kernel::intf::Plain;
use millrace_kernel::raw;
use millrace_kernel::siphash::siphash128;

use super::known::micros;
use super::{Ends, Epoch, FRAME_BYTES, Joints, intf, key, seal, word};
use crate::Error;

const MAGIC: u8 = 0x67;
const VERSION: u8 = 2;
/// The first kind of what processes say, and how many there are.
const SAYS: u8 = 8;
const SAYINGS: u8 = 8;
/// A word that this host's own joints say: there is room.
const ROOM: u8 = 255;

/// What ends say to each other beside the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// For the packet of this number.
    Request(u32),
    /// What the next packet's number would be: for when there is none that would show that the latest were lost.
    Last(u32),
    /// Between the processes at both ends: one of eight kinds, and what it says. It is heard by [`Joints::words`].
    Says(u8, u32),
}

/// What the process at the other end has said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heard {
    pub ends: Ends,
    pub kind: u8,
    pub number: u32,
    /// That it was sent in.
    pub epoch: Epoch,
}

/// From a session's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick {
    pub ends: Ends,
    /// `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// When the latest packet went out.
    pub sent_ns: u64,
    /// Number of the next packet out.
    pub next: u32,
    /// One more than the newest number in.
    pub newest: u32,
    /// All below it have come at the other end, where a function of the list says so.
    pub acked: u32,
    /// The round trip, smoothed, where it is known.
    pub round_trip: Option<Duration>,
}

impl Joints {
    // --- Words ---

    /// The payload of a datagram by which this end itself says something of a session, instead of an application: as functions
    /// make them in the kernel.
    pub fn word(&self, ends: &Ends, word: Word) -> Result<[u8; FRAME_BYTES], Error> {
        let raw = &self.find(ends)?.raw;
        let (kind, number) = match word {
            Word::Request(number) => (1, number),
            Word::Last(next) => (2, next),
            Word::Says(kind, number) => (SAYS + kind % SAYINGS, number),
        };
        let mut frame = [0; FRAME_BYTES];
        frame[0] = MAGIC;
        frame[1] = VERSION << 5 | kind << 1 | raw.epoch;
        frame[2..4].copy_from_slice(&raw.list_ids[usize::from(raw.epoch)]);
        frame[4..8].copy_from_slice(&number.to_be_bytes());
        let key = key(ends)?;
        let empty = [0; 4];
        let message = [&frame[..8], &key.local, &key.local_port, &key.remote_port, &empty].concat();
        frame[8..].copy_from_slice(&siphash128(raw.key, &message)[..8]);
        Ok(frame)
    }

    /// Says it, from the network namespace of the calling thread.
    pub fn say(&self, ends: &Ends, word: Word) -> Result<(), Error> {
        let (paths, payload) = (self.find(ends)?.raw.paths, self.word(ends, word)?);
        word::send_by_all(ends, paths, word::word_mark(self.mark), &payload).map_err(Error::Say)
    }

    // --- Clocks, and what was heard ---

    /// Has the session's clock tick this often while it has sent nothing for so long; `ZERO`: no more.
    pub fn set_clock(&self, ends: &Ends, period: Duration) -> Result<(), Error> {
        self.set_clock_of(self.find(ends)?.raw.index, period)
    }

    pub(super) fn set_clock_of(&self, session: u32, period: Duration) -> Result<(), Error> {
        let period_ns = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX);
        with_memory(|| {
            let program = self.object.program("joint_clock")?;
            let mut call = intf::ClockCall { period_ns, session, error: 0 };
            raw::run(program, &mut call).map_err(Error::Descriptor)?;
            match nix::Error::from_raw(-call.error) {
                _ if call.error == 0 || period.is_zero() => Ok(()),
                source => Err(Error::Clock(source)),
            }
        })
    }

    /// What the clocks have said since the last call.
    pub fn ticks(&mut self) -> Result<Vec<Tick>, Error> {
        let mut raws = Vec::<intf::Tick>::new();
        self.ticks.drain(|bytes| raws.extend(intf::Tick::from_bytes(bytes)));
        let tick = |raw: intf::Tick| {
            let intf::Tick { time_ns, sent_ns, next, newest, acked, srtt_us, .. } = raw;
            let (ends, round_trip) = (self.ends_of(raw.session)?, micros(srtt_us));
            Some(Tick { ends, time_ns, sent_ns, next, newest, acked, round_trip })
        };
        Ok(raws.into_iter().filter_map(tick).collect())
    }

    /// What the processes at other ends have said, as soon as there is something, or after `patience` nothing.
    pub fn words(&mut self, patience: Duration) -> Result<Vec<Heard>, Error> {
        let mut raws = Vec::<intf::Word>::new();
        let mut key_words = Vec::new();
        self.words.wait(patience)?;
        self.words.drain(|bytes| {
            raws.extend(intf::Word::from_bytes(bytes));
            key_words.extend(seal::Heard::from_bytes(bytes));
        });
        self.key_words.extend(key_words);
        let (signs, raws): (Vec<_>, Vec<_>) = raws.into_iter().partition(|raw| raw.kind == ROOM);
        let signs: Vec<_> = signs.iter().filter_map(|raw| self.ends_of(raw.session)).collect();
        self.room_for.extend(signs);
        let heard = |raw: intf::Word| {
            let intf::Word { number, epoch, .. } = raw;
            Some(Heard { ends: self.ends_of(raw.session)?, kind: raw.kind.checked_sub(SAYS)?, number, epoch })
        };
        Ok(raws.into_iter().filter_map(heard).collect())
    }

    /// Has [`room_for`](Self::room_for) speak of this session.
    pub fn tell_room(&mut self, ends: &Ends) -> Result<(), Error> {
        self.change(ends, |raw| raw.tells_room = 1)
    }

    /// Sessions of which a full window has refused a datagram, and that have room now, as [`words`](Self::words) has heard: once for
    /// each time that one was refused, when a quarter of the window is free.
    pub fn room_for(&mut self) -> Vec<Ends> {
        std::mem::take(&mut self.room_for)
    }

    pub(super) fn ends_of(&self, session: u32) -> Option<Ends> {
        *self.by_index.get(session as usize)?
    }
}

/// Calls again, for a bounded time, what fails for want of memory that the kernel does not wait for.
fn with_memory(mut call: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    const TRIES: u32 = 100;
    const PAUSE: Duration = Duration::from_millis(1);
    for _ in 1..TRIES {
        match call() {
            Err(Error::Clock(nix::Error::ENOMEM)) => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_at_once_is_asked_for_again() {
        let mut answers = [nix::Error::ENOMEM, nix::Error::ENOMEM].into_iter();
        assert!(with_memory(|| answers.next().map_or(Ok(()), |error| Err(Error::Clock(error)))).is_ok());
        let mut calls = 0;
        let never = with_memory(|| {
            calls += 1;
            Err(Error::Clock(nix::Error::ENOMEM))
        });
        assert!(matches!(never, Err(Error::Clock(nix::Error::ENOMEM))) && calls == 100, "{calls}");
    }

    #[test]
    fn other_errors_of_the_clock_are_told_at_once() {
        let mut calls = 0;
        let refused = with_memory(|| {
            calls += 1;
            Err(Error::Clock(nix::Error::EPERM))
        });
        assert!(refused.is_err() && calls == 1, "{calls}");
    }
}
