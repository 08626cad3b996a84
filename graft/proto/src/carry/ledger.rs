//! What is owed in each direction of a carried connection, so that another carrier can go on where one has ended.

use std::collections::VecDeque;

use bytes::{Buf as _, Bytes};

use super::{WINDOW_MAX, frame::Frame};

/// The other end has said what cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untrue {
    #[error("it confirms what was not sent, or takes back what it has confirmed")]
    Offset,
    #[error("it sends more than its window, or after its end")]
    Beyond,
}

/// From this end's application to the other: kept until it is confirmed.
#[derive(Debug, Default)]
pub struct Outgoing {
    kept: VecDeque<Bytes>,
    /// Offset of the first byte that is kept.
    confirmed: u64,
    /// Offset of the next byte for the carrier.
    next: u64,
    /// Offset behind the last byte that the application has given.
    taken: u64,
    has_ended: bool,
    /// Of `next`: which of those that are kept, and where in it.
    place: (usize, usize),
}

impl Outgoing {
    /// Bytes that the application may give, of a window of so many.
    pub fn room(&self, window: u64) -> u64 {
        match self.has_ended {
            true => 0,
            false => window.saturating_sub(self.taken - self.confirmed),
        }
    }

    pub fn take(&mut self, bytes: Bytes) {
        debug_assert!(!self.has_ended);
        self.taken += bytes.len() as u64;
        if !bytes.is_empty() {
            self.kept.push_back(bytes);
        }
    }

    /// The application gives no more.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// All that there will be is confirmed.
    pub fn is_done(&self) -> bool {
        self.has_ended && self.confirmed == self.last()
    }

    pub fn unconfirmed(&self) -> u64 {
        self.taken - self.confirmed.min(self.taken)
    }

    /// Bytes of the application that are confirmed.
    pub fn confirmed(&self) -> u64 {
        self.confirmed.min(self.taken)
    }

    /// What the carrier was given and the other end has not confirmed.
    pub fn ahead(&self) -> u64 {
        self.next - self.confirmed
    }

    fn last(&self) -> u64 {
        self.taken + u64::from(self.has_ended)
    }

    /// What the carrier is to have next, at most so many bytes.
    pub fn give(&mut self, most: usize) -> Option<Frame> {
        let (index, at) = self.place;
        let Some(bytes) = self.kept.get(index) else {
            let ends = self.has_ended && self.next == self.taken;
            self.next += u64::from(ends);
            return ends.then_some(Frame::End);
        };
        let piece = bytes.slice(at..bytes.len().min(at.saturating_add(most)));
        self.next += piece.len() as u64;
        self.place = if at + piece.len() == bytes.len() { (index + 1, 0) } else { (index, at + piece.len()) };
        Some(Frame::Data(piece))
    }

    /// The other end has it up to there.
    pub fn confirm(&mut self, offset: u64) -> Result<(), Untrue> {
        if offset < self.confirmed || offset > self.next {
            return Err(Untrue::Offset);
        }
        self.forget(offset);
        Ok(())
    }

    fn forget(&mut self, offset: u64) {
        let mut gone = offset.min(self.taken) - self.confirmed.min(self.taken);
        self.confirmed = offset;
        while let Some(first) = self.kept.front_mut().filter(|_| gone > 0) {
            let length = first.len() as u64;
            if gone < length {
                let gone = gone as usize;
                first.advance(gone);
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

    /// Another carrier: the other end has got it up to there, and is to have the rest. What it has not delivered stays
    /// unconfirmed, so that carriers that end again and again fill nobody's memory.
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

/// From the other application to this end's.
#[derive(Debug, Default)]
pub struct Incoming {
    waiting: VecDeque<Bytes>,
    received: u64,
    delivered: u64,
    /// What the other end was told that is delivered.
    told: u64,
    has_ended: bool,
}

impl Incoming {
    /// It has come, and waits for the application.
    pub fn receive(&mut self, bytes: Bytes) -> Result<(), Untrue> {
        let length = bytes.len() as u64;
        if self.has_ended || self.received - self.delivered + length > WINDOW_MAX {
            return Err(Untrue::Beyond);
        }
        self.received += length;
        self.waiting.push_back(bytes);
        Ok(())
    }

    pub fn end(&mut self) -> Result<(), Untrue> {
        if self.has_ended {
            return Err(Untrue::Beyond);
        }
        self.has_ended = true;
        self.received += 1;
        Ok(())
    }

    /// What the application gets next.
    pub fn front(&self) -> Option<&Bytes> {
        self.waiting.front()
    }

    /// That, and what it gets after it.
    pub fn fronts(&self) -> impl Iterator<Item = &Bytes> {
        self.waiting.iter()
    }

    pub fn waiting(&self) -> u64 {
        self.received - self.delivered - u64::from(self.has_ended && self.delivered < self.received)
    }

    /// The application's kernel has taken so many of it.
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

    /// The application has everything but the end.
    pub fn end_is_due(&self) -> bool {
        self.has_ended && self.waiting.is_empty() && self.delivered < self.received
    }

    pub fn deliver_end(&mut self) {
        debug_assert!(self.end_is_due());
        self.delivered = self.received;
    }

    /// All that there will be was delivered.
    pub fn is_done(&self) -> bool {
        self.has_ended && self.delivered == self.received
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// How far this end has come: for who resumes.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Bytes of the application that were delivered.
    pub fn delivered(&self) -> u64 {
        self.delivered - u64::from(self.is_done())
    }

    /// The news for the other end, once it is worth a frame, or the end was delivered.
    pub fn confirmation(&mut self, worth: u64) -> Option<Frame> {
        let news = self.delivered - self.told;
        if news == 0 || (news < worth && !self.is_done()) {
            return None;
        }
        self.told = self.delivered;
        Some(Frame::Confirm { delivered: self.delivered })
    }

    /// Another carrier: what was said last may not have arrived.
    pub fn resume(&mut self) {
        self.told = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Give(usize),
        Carry(usize),
        Deliver(usize),
        /// So many of the frames under way arrive, and the others do not.
        Cut(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (1_usize..50).prop_map(Step::Give),
            6 => (1_usize..40).prop_map(Step::Carry),
            4 => (1_usize..60).prop_map(Step::Deliver),
            1 => (0_usize..5).prop_map(Step::Cut),
        ];
        prop::collection::vec(step, 0..200)
    }

    /// One direction: an application that gives the numbers from 0 on, and one that gets what comes.
    #[derive(Default)]
    struct Way {
        out: Outgoing,
        under_way: VecDeque<Frame>,
        back: VecDeque<Frame>,
        inn: Incoming,
        given: u8,
        got: Vec<u8>,
        total: usize,
    }

    impl Way {
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
                    Frame::Data(bytes) => self.inn.receive(bytes).expect("within the window"),
                    Frame::End => self.inn.end().expect("once"),
                    _ => unreachable!(),
                }
            }
        }

        /// Confirms at once where there is little room, or nobody would go on.
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
                let Frame::Confirm { delivered } = frame else { unreachable!() };
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

        fn step(&mut self, step: Step) {
            match step {
                Step::Give(most) => self.give(most),
                Step::Carry(most) => {
                    self.under_way.extend(self.out.give(most));
                    self.arrive(1);
                }
                Step::Deliver(most) => {
                    self.deliver(most);
                    self.hear();
                }
                Step::Cut(arrive) => self.cut(arrive),
            }
        }
    }

    proptest! {
        #[test]
        fn nothing_is_lost_doubled_or_out_of_order(steps in steps()) {
            let mut way = Way::default();
            steps.into_iter().for_each(|step| way.step(step));
            way.out.end();
            for _ in 0..10_000 {
                way.step(Step::Carry(7));
                way.step(Step::Deliver(9));
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
        fn what_was_not_sent_cannot_be_confirmed(steps in steps(), more in 1_u64..1000) {
            let mut way = Way::default();
            steps.into_iter().for_each(|step| way.step(step));
            let (next, confirmed) = (way.out.next, way.out.confirmed);
            prop_assert_eq!(way.out.confirm(next + more), Err(Untrue::Offset));
            prop_assert_eq!(way.out.rewind(next + more), Err(Untrue::Offset));
            if confirmed > 0 {
                prop_assert_eq!(way.out.confirm(confirmed - 1), Err(Untrue::Offset));
            }
        }
    }

    #[test]
    fn who_sends_too_much_is_found_out() {
        let mut inn = Incoming::default();
        let much = Bytes::from(vec![0; WINDOW_MAX as usize]);
        assert_eq!(inn.receive(much), Ok(()));
        assert_eq!(inn.receive(Bytes::from_static(b"x")), Err(Untrue::Beyond));
        assert_eq!(inn.end(), Ok(()));
        assert_eq!(inn.end(), Err(Untrue::Beyond));
    }
}
