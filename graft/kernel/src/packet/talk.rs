//! Messages between the daemons of both hosts, sent as frames without data, and events of the BPF programs.

use std::time::Duration;

use millrace_kernel::intf::Plain;
use millrace_kernel::raw;
use millrace_kernel::siphash::siphash128;

use super::known::micros;
use super::{FRAME_BYTES, ListEpoch, PacketHooks, SessionEnds, intf, key, message};
use crate::Error;

const MAGIC: u8 = 0x67;
const VERSION: u8 = 2;
/// The first frame kind of the daemons' messages (`GRAFT_SAYS`), and the number of kinds that follow it (`enum
/// graft_kind`).
const SAYS: u8 = 8;
const SAYINGS: u8 = 8;
/// Kind of an event of this host's BPF programs (`PACKET_ROOM`): the application may send again, after a packet was
/// refused because too many were in flight.
const ROOM: u8 = 255;

/// A frame without data, which the daemon of one host sends to the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TalkMessage {
    /// Requests the packet of this number from the peer.
    Request(u32),
    /// States the number that the next packet will have, so that the peer notices if the latest packets were lost.
    Last(u32),
    /// A message between the daemons: one of eight kinds, and its value. At the peer,
    /// [`PacketHooks::receive_messages`] returns it.
    Says(u8, u32),
}

/// A message from the peer's daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedMessage {
    /// The session that the message belongs to.
    pub ends: SessionEnds,
    /// The kind of message, whose meaning the daemons define.
    pub kind: u8,
    /// The value of the message, which depends on its kind.
    pub number: u32,
    /// Epoch (0 or 1) of the peer's list of functions when it sent the message.
    pub epoch: ListEpoch,
}

/// An event of a session's BPF timer: the session has sent no packet for one period of the timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick {
    /// The session that the timer belongs to.
    pub ends: SessionEnds,
    /// Time of the event, ns (`CLOCK_MONOTONIC`).
    pub time_ns: u64,
    /// Time at which the latest packet was sent, ns (`CLOCK_MONOTONIC`).
    pub sent_ns: u64,
    /// Packet number of the next outgoing packet.
    pub next: u32,
    /// One more than the newest packet number received.
    pub newest: u32,
    /// All packets below this number were received by the peer, or are no longer expected by it. It stays 0 if no
    /// function of the session's list acknowledges packets.
    pub acked: u32,
    /// Smoothed round-trip time; `None` if it is unknown.
    pub round_trip: Option<Duration>,
}

impl PacketHooks {
    // --- Messages ---

    /// Encodes a message of a session as a graft frame. The BPF programs encode the same message to the same bytes.
    pub fn frame_message(&self, ends: &SessionEnds, talk: TalkMessage) -> Result<[u8; FRAME_BYTES], Error> {
        let raw = &self.find(ends)?.raw;
        let (kind, number) = match talk {
            TalkMessage::Request(number) => (1, number),
            TalkMessage::Last(next) => (2, next),
            TalkMessage::Says(kind, number) => (SAYS + kind % SAYINGS, number),
        };
        let mut frame = [0; FRAME_BYTES];
        frame[0] = MAGIC;
        frame[1] = VERSION << 5 | kind << 1 | raw.epoch;
        frame[2..4].copy_from_slice(&raw.list_ids[usize::from(raw.epoch)]);
        frame[4..8].copy_from_slice(&number.to_be_bytes());
        let key = key(ends)?;
        // The same fields as `struct frame_context`: local address, both ports, and a payload length of 0.
        let empty = [0; 4];
        let input = [&frame[..8], &key.local, &key.local_port, &key.remote_port, &empty].concat();
        frame[8..].copy_from_slice(&siphash128(raw.key, &input)[..8]);
        Ok(frame)
    }

    /// Sends a message to the peer's daemon by each of the session's network paths, from the calling thread's network
    /// namespace.
    pub fn say(&self, ends: &SessionEnds, message: TalkMessage) -> Result<(), Error> {
        let paths = self.find(ends)?.raw.paths;
        let payload = self.frame_message(ends, message)?;
        message::send_by_all(ends, paths, message::message_mark(self.mark), &payload).map_err(Error::Say)
    }

    // --- Timers of sessions, and received messages ---

    /// Starts a session's timer, which reports an event whenever the session has sent nothing for `period`. A period of
    /// zero stops the timer.
    pub fn set_clock(&self, ends: &SessionEnds, period: Duration) -> Result<(), Error> {
        self.set_clock_of(self.find(ends)?.raw.index, period)
    }

    pub(super) fn set_clock_of(&self, session: u32, period: Duration) -> Result<(), Error> {
        let period_ns = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX);
        with_memory(|| {
            let program = self.object.program("packet_clock")?;
            let mut call = intf::ClockCall { period_ns, session, error: 0 };
            raw::run(program, &mut call).map_err(Error::Descriptor)?;
            // Stopping a timer that was never started fails in the kernel; that error is ignored.
            match nix::Error::from_raw(-call.error) {
                _ if call.error == 0 || period.is_zero() => Ok(()),
                source => Err(Error::Clock(source)),
            }
        })
    }

    /// Returns the events of all sessions' timers that arrived since the last call.
    pub fn ticks(&mut self) -> Result<Vec<Tick>, Error> {
        let mut raws = Vec::<intf::Tick>::new();
        self.ticks.drain(|bytes| raws.extend(intf::Tick::from_bytes(bytes)));
        let tick = |raw: intf::Tick| {
            let intf::Tick { time_ns, sent_ns, next, newest, acked, srtt_us, .. } = raw;
            let ends = self.ends_of(raw.session)?;
            let round_trip = micros(srtt_us);
            Some(Tick { ends, time_ns, sent_ns, next, newest, acked, round_trip })
        };
        Ok(raws.into_iter().filter_map(tick).collect())
    }

    /// Waits up to `patience` for messages of the peers' daemons, and returns all that have arrived.
    pub fn receive_messages(&mut self, patience: Duration) -> Result<Vec<ReceivedMessage>, Error> {
        let mut raws = Vec::<intf::Message>::new();
        self.messages.wait(patience)?;
        self.messages.drain(|bytes| raws.extend(intf::Message::from_bytes(bytes)));
        // The ring buffer contains the messages of the peers' daemons, and this host's events that an application may
        // send again after a packet was refused.
        let (signs, raws): (Vec<_>, Vec<_>) = raws.into_iter().partition(|raw| raw.kind == ROOM);
        let signs: Vec<_> = signs.iter().filter_map(|raw| self.ends_of(raw.session)).collect();
        self.room_for.extend(signs);
        let heard = |raw: intf::Message| {
            let intf::Message { number, epoch, .. } = raw;
            Some(ReceivedMessage {
                ends: self.ends_of(raw.session)?,
                kind: raw.kind.checked_sub(SAYS)?,
                number,
                epoch,
            })
        };
        Ok(raws.into_iter().filter_map(heard).collect())
    }

    /// Makes [`room_for`](Self::room_for) report this session whenever its application may send again, after a packet
    /// was refused because too many were in flight.
    pub fn tell_room(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        self.change(ends, |raw| raw.tells_room = 1)
    }

    /// Returns the sessions whose application may send again, after a datagram was refused because too many were in
    /// flight. They are those known at the last call of [`receive_messages`](Self::receive_messages). A session is
    /// reported once, when its application may send at least a quarter of the packets that may be in flight.
    pub fn room_for(&mut self) -> Vec<SessionEnds> {
        std::mem::take(&mut self.room_for)
    }

    pub(super) fn ends_of(&self, session: u32) -> Option<SessionEnds> {
        *self.by_index.get(session as usize)?
    }
}

/// Repeats a call that fails for lack of memory, at most 100 times with pauses of 1 ms.
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
    fn kernel_call_that_fails_with_enomem_is_retried() {
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
    fn kernel_call_with_error_other_than_enomem_is_not_retried() {
        let mut calls = 0;
        let refused = with_memory(|| {
            calls += 1;
            Err(Error::Clock(nix::Error::EPERM))
        });
        assert!(refused.is_err() && calls == 1, "{calls}");
    }
}
