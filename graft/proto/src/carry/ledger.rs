//! The unconfirmed bytes of a tunnelled connection in each direction. If the carrier that tunnels the connection ends,
//! such as a QUIC connection, the tunnelled connection continues on another carrier with these bytes.

use std::collections::VecDeque;

use bytes::{Buf as _, Bytes};

use super::{WINDOW_MAX, frame::CarryFrame};

/// The other broker sent an offset or bytes that violate the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Untrue {
    #[error("the peer confirmed bytes that were not sent, or took a confirmation back")]
    Offset,
    #[error("the peer sent more bytes than its window, or bytes after the end")]
    Beyond,
}

/// Bytes from this host's application, stored until the other broker confirms them. Offsets count from the connection's
/// first byte. They are always in the order confirmed <= next <= taken. If the end of the stream was sent or confirmed,
/// it counts as one byte behind `taken`.
#[derive(Debug, Default)]
pub struct OutgoingBytes {
    kept: VecDeque<Bytes>,
    /// Offset of the first unconfirmed byte, which is the first byte in `kept`.
    confirmed: u64,
    /// Offset of the next byte to send to the other broker.
    next: u64,
    /// Offset behind the last byte that was read from the application.
    taken: u64,
    has_ended: bool,
    /// Position of `next` in `kept`: the index of a buffer, and an offset within that buffer.
    place: (usize, usize),
}

impl OutgoingBytes {
    /// Returns how many more bytes may be read from the application, given a window of `window` bytes.
    pub fn room(&self, window: u64) -> u64 {
        match self.has_ended {
            true => 0,
            false => window.saturating_sub(self.taken - self.confirmed),
        }
    }

    /// Adds bytes that were read from the application.
    pub fn take(&mut self, bytes: Bytes) {
        debug_assert!(!self.has_ended);
        self.taken += bytes.len() as u64;
        if !bytes.is_empty() {
            self.kept.push_back(bytes);
        }
    }

    /// Notes that the application sends no more bytes.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    /// Returns whether the application sends no more bytes.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns whether the other broker has confirmed all bytes and the end of the stream.
    pub fn is_done(&self) -> bool {
        self.has_ended && self.confirmed == self.last()
    }

    /// Returns how many of the application's bytes the other broker has not confirmed.
    pub fn unconfirmed(&self) -> u64 {
        self.taken - self.confirmed.min(self.taken)
    }

    /// Returns how many of the application's bytes the other broker has confirmed.
    pub fn confirmed(&self) -> u64 {
        self.confirmed.min(self.taken)
    }

    /// Returns how many bytes were sent to the other broker and not confirmed yet.
    pub fn ahead(&self) -> u64 {
        self.next - self.confirmed
    }

    fn last(&self) -> u64 {
        // The end of the stream counts as one more byte, so it can be confirmed like a byte.
        self.taken + u64::from(self.has_ended)
    }

    /// Returns the next frame to send to the other broker, with at most `most` bytes of data. `None` means that nothing
    /// is left to send.
    pub fn give(&mut self, most: usize) -> Option<CarryFrame> {
        let (index, at) = self.place;
        let Some(bytes) = self.kept.get(index) else {
            let ends = self.has_ended && self.next == self.taken;
            self.next += u64::from(ends);
            return ends.then_some(CarryFrame::End);
        };
        let piece = bytes.slice(at..bytes.len().min(at.saturating_add(most)));
        self.next += piece.len() as u64;
        self.place = if at + piece.len() == bytes.len() { (index + 1, 0) } else { (index, at + piece.len()) };
        Some(CarryFrame::Data(piece))
    }

    /// Applies a confirmation of the other broker, which covers all bytes before `offset`.
    pub fn confirm(&mut self, offset: u64) -> Result<(), Untrue> {
        if offset < self.confirmed || offset > self.next {
            return Err(Untrue::Offset);
        }
        self.forget(offset);
        Ok(())
    }

    fn forget(&mut self, offset: u64) {
        // `offset` may include the end of the stream, which counts as one byte but has no byte in `kept`.
        let mut gone = offset.min(self.taken) - self.confirmed.min(self.taken);
        self.confirmed = offset;
        while let Some(first) = self.kept.front_mut().filter(|_| gone > 0) {
            let length = first.len() as u64;
            if gone < length {
                let gone = gone as usize;
                first.advance(gone);
                // `place` counts from the front of `kept`, so it is reduced by what is removed there.
                if self.place.0 == 0 {
                    self.place.1 -= gone;
                }
                return;
            }
            gone -= length;
            self.kept.pop_front();
            self.place.0 = self.place.0.saturating_sub(1);
        }
    }

    /// Continues on another carrier from `offset`, up to which the other broker has received bytes. Bytes that it has
    /// received but not delivered stay unconfirmed. So the limit of unconfirmed bytes also bounds memory if carriers
    /// end repeatedly.
    pub fn rewind(&mut self, offset: u64) -> Result<(), Untrue> {
        if offset < self.confirmed || offset > self.next {
            return Err(Untrue::Offset);
        }
        self.next = offset;
        let mut left = offset.min(self.taken) - self.confirmed.min(self.taken);
        self.place = (0, 0);
        for bytes in &self.kept {
            let length = bytes.len() as u64;
            if left < length {
                self.place.1 = left as usize;
                break;
            }
            left -= length;
            self.place.0 += 1;
        }
        Ok(())
    }
}

/// Bytes from the remote application to this host's application. Offsets are always in the order told <= delivered <=
/// received, where `told` is what was confirmed to the other broker.
#[derive(Debug, Default)]
pub struct IncomingBytes {
    waiting: VecDeque<Bytes>,
    received: u64,
    delivered: u64,
    /// Offset that the latest confirmation contained.
    told: u64,
    has_ended: bool,
}

impl IncomingBytes {
    /// Adds bytes that arrived from the other broker.
    pub fn receive(&mut self, bytes: Bytes) -> Result<(), Untrue> {
        let length = bytes.len() as u64;
        // A peer that sends more than its window is refused, so at most WINDOW_MAX bytes are stored.
        if self.has_ended || self.received - self.delivered + length > WINDOW_MAX {
            return Err(Untrue::Beyond);
        }
        self.received += length;
        self.waiting.push_back(bytes);
        Ok(())
    }

    /// Notes that the remote application sends no more bytes.
    ///
    /// # Errors
    /// This direction has ended before.
    pub fn end(&mut self) -> Result<(), Untrue> {
        if self.has_ended {
            return Err(Untrue::Beyond);
        }
        self.has_ended = true;
        self.received += 1;
        Ok(())
    }

    /// Returns the first buffer that waits for the application.
    pub fn front(&self) -> Option<&Bytes> {
        self.waiting.front()
    }

    /// Returns all buffers that wait for the application, in order.
    pub fn fronts(&self) -> impl Iterator<Item = &Bytes> {
        self.waiting.iter()
    }

    /// Returns how many received bytes were not delivered to the application yet.
    pub fn waiting(&self) -> u64 {
        self.received - self.delivered - u64::from(self.has_ended && self.delivered < self.received)
    }

    /// Notes that the kernel has accepted `bytes` bytes for the application.
    pub fn deliver(&mut self, mut bytes: usize) {
        while let Some(front) = self.waiting.front_mut().filter(|_| bytes > 0) {
            let some = bytes.min(front.len());
            front.advance(some);
            self.delivered += some as u64;
            bytes -= some;
            if front.is_empty() {
                self.waiting.pop_front();
            }
        }
    }

    /// Returns whether the end of the stream has to be delivered: the application has all bytes, but its socket was not
    /// shut down yet.
    pub fn end_is_due(&self) -> bool {
        self.has_ended && self.waiting.is_empty() && self.delivered < self.received
    }

    /// Notes that the end of the stream was delivered to the application.
    pub fn deliver_end(&mut self) {
        debug_assert!(self.end_is_due());
        self.delivered = self.received;
    }

    /// Returns whether all bytes and the end of the stream were delivered to the application.
    pub fn is_done(&self) -> bool {
        self.has_ended && self.delivered == self.received
    }

    /// Returns whether the remote application sends no more bytes.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns how many bytes were received, the end of the stream counted as one byte. A resumed connection continues
    /// at this offset.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns how many bytes were delivered to the application. The end of the stream does not count as a byte here.
    pub fn delivered(&self) -> u64 {
        self.delivered - u64::from(self.is_done())
    }

    /// Returns a confirmation if it would cover at least `worth` new bytes, or the end of the stream.
    pub fn confirmation(&mut self, worth: u64) -> Option<CarryFrame> {
        let news = self.delivered - self.told;
        if news == 0 || (news < worth && !self.is_done()) {
            return None;
        }
        self.told = self.delivered;
        Some(CarryFrame::Confirm { delivered: self.delivered })
    }

    /// Continues on another carrier (a connection between the brokers). The latest confirmation may be lost with the
    /// old carrier, so the offset is confirmed again.
    pub fn resume(&mut self) {
        self.told = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum LedgerStep {
        Give(usize),
        Carry(usize),
        Deliver(usize),
        /// A step of the test at which the carrier (the connection between the brokers) ends: the given number of
        /// frames in flight still arrive, and the others are lost.
        Cut(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<LedgerStep>> {
        let step = prop_oneof![
            4 => (1_usize..50).prop_map(LedgerStep::Give),
            6 => (1_usize..40).prop_map(LedgerStep::Carry),
            4 => (1_usize..60).prop_map(LedgerStep::Deliver),
            1 => (0_usize..5).prop_map(LedgerStep::Cut),
        ];
        prop::collection::vec(step, 0..200)
    }

    /// One direction of a connection in the test: an application that sends 0, 1, 2, ..., and one that receives.
    #[derive(Default)]
    struct LedgerDirection {
        out: OutgoingBytes,
        under_way: VecDeque<CarryFrame>,
        back: VecDeque<CarryFrame>,
        inn: IncomingBytes,
        given: u8,
        got: Vec<u8>,
        total: usize,
    }

    impl LedgerDirection {
        const WINDOW: u64 = 100;

        fn give(&mut self, most: usize) {
            let room = usize::try_from(self.out.room(Self::WINDOW)).unwrap_or(0).min(most);
            let bytes: Vec<u8> = (0..room).map(|at| self.given.wrapping_add(at as u8)).collect();
            self.given = self.given.wrapping_add(room as u8);
            self.total += room;
            self.out.take(bytes.into());
            assert!(self.out.ahead() <= self.out.unconfirmed() && self.out.unconfirmed() <= Self::WINDOW);
        }

        fn arrive(&mut self, frames: usize) {
            for frame in self.under_way.drain(..frames.min(self.under_way.len())) {
                match frame {
                    CarryFrame::Data(bytes) => self.inn.receive(bytes).expect("within the window"),
                    CarryFrame::End => self.inn.end().expect("once"),
                    _ => unreachable!(),
                }
            }
        }

        /// Delivers bytes to the application. Small amounts are confirmed only when nothing is left to deliver, since
        /// the test would stall otherwise.
        fn deliver(&mut self, most: usize) {
            let mut left = most;
            while let Some(front) = self.inn.front().filter(|_| left > 0) {
                let piece = &front[..front.len().min(left)];
                self.got.extend_from_slice(piece);
                left -= piece.len();
                let length = piece.len();
                self.inn.deliver(length);
            }
            if self.inn.end_is_due() {
                self.inn.deliver_end();
            }
            let worth = if self.inn.front().is_none() { 1 } else { 10 };
            self.back.extend(self.inn.confirmation(worth));
            assert!(self.inn.waiting() <= Self::WINDOW);
        }

        fn hear(&mut self) {
            for frame in self.back.drain(..) {
                let CarryFrame::Confirm { delivered } = frame else { unreachable!() };
                self.out.confirm(delivered).expect("it was sent");
            }
        }

        fn cut(&mut self, arrive: usize) {
            self.arrive(arrive);
            self.under_way.clear();
            self.back.clear();
            self.out.rewind(self.inn.received()).expect("it was sent");
            self.inn.resume();
        }

        fn step(&mut self, step: LedgerStep) {
            match step {
                LedgerStep::Give(most) => self.give(most),
                LedgerStep::Carry(most) => {
                    self.under_way.extend(self.out.give(most));
                    self.arrive(1);
                }
                LedgerStep::Deliver(most) => {
                    self.deliver(most);
                    self.hear();
                }
                LedgerStep::Cut(arrive) => self.cut(arrive),
            }
        }
    }

    proptest! {
        #[test]
        fn carried_bytes_arrive_once_in_order_although_carriers_end(steps in steps()) {
            let mut way = LedgerDirection::default();
            steps.into_iter().for_each(|step| way.step(step));
            way.out.end();
            for _ in 0..10_000 {
                way.step(LedgerStep::Carry(7));
                way.step(LedgerStep::Deliver(9));
                if way.out.is_done() {
                    break;
                }
            }
            prop_assert!(way.out.is_done() && way.inn.is_done());
            prop_assert_eq!((way.out.unconfirmed(), way.out.ahead()), (0, 0));
            prop_assert!(way.out.kept.is_empty());
            let wanted: Vec<u8> = (0..way.total).map(|at| at as u8).collect();
            prop_assert_eq!(&way.got, &wanted);
            prop_assert_eq!(way.inn.delivered(), wanted.len() as u64);
            prop_assert_eq!(way.out.confirmed(), wanted.len() as u64);
        }

        #[test]
        fn confirmation_of_unsent_bytes_is_refused(steps in steps(), more in 1_u64..1000) {
            let mut way = LedgerDirection::default();
            steps.into_iter().for_each(|step| way.step(step));
            let next = way.out.next;
            let confirmed = way.out.confirmed;
            prop_assert_eq!(way.out.confirm(next + more), Err(Untrue::Offset));
            prop_assert_eq!(way.out.rewind(next + more), Err(Untrue::Offset));
            if confirmed > 0 {
                prop_assert_eq!(way.out.confirm(confirmed - 1), Err(Untrue::Offset));
            }
        }
    }

    #[test]
    fn carried_bytes_beyond_the_receive_window_are_refused() {
        let mut inn = IncomingBytes::default();
        let much = Bytes::from(vec![0; WINDOW_MAX as usize]);
        assert_eq!(inn.receive(much), Ok(()));
        assert_eq!(inn.receive(Bytes::from_static(b"x")), Err(Untrue::Beyond));
        assert_eq!(inn.end(), Ok(()));
        assert_eq!(inn.end(), Err(Untrue::Beyond));
    }
}
