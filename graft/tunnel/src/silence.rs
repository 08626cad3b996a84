//! Detects whether a pool's connection still works while it carries an application's connection. Both hosts check
//! independently: a host that has received nothing for some time sends the frame `Ask`, and its peer answers. A host
//! that has received data and has none to send acknowledges it, so that a connection with a long queue does not seem
//! dead.

use std::time::Duration;

use millrace_graft_proto::carry::frame::CarryFrame;
use tokio::time::Instant;

/// Longest time without arrivals after which this host sends `Ask`. This time starts at half of the time limit for an
/// `Answer`, and doubles each time that only `Ask` or `Answer` frames arrive.
const QUIET_MOST: Duration = Duration::from_secs(16);
/// Time after which a host that has received data, and has none to send, acknowledges it with the frame `Answer`.
const TELL: Duration = Duration::from_millis(250);

/// The action that silence on a connection requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SilenceAction {
    Nothing,
    /// This end has to ask whether the other end is still alive.
    Ask,
    /// This end has to send an acknowledgement, so that the other end knows that data has arrived.
    Tell,
    /// The other end was asked and has not answered.
    Lost,
}

/// Whether `Ask` or `Answer` frames, and whether any other frames, have arrived since `CarrierSilence` was last
/// updated.
#[derive(Debug, Default)]
pub struct BytesArrived {
    has_talk: bool,
    has_more: bool,
}

impl BytesArrived {
    pub fn on_frame(&mut self, frame: &CarryFrame) {
        match frame {
            CarryFrame::Ask | CarryFrame::Answer => self.has_talk = true,
            _ => self.has_more = true,
        }
    }

    /// Reports whether anything but `Ask` and `Answer` frames has arrived. Bytes that complete no frame are a part of a
    /// long frame.
    fn is_news(&self) -> bool {
        self.has_more || !self.has_talk
    }
}

/// Silence on one connection of a pool. If nothing arrives for the time `quiet`, this end has to send `Ask`, and
/// `asked_at` is set. Any arrival clears `asked_at`. If nothing arrives within `patience` after `Ask`, the connection
/// is lost.
#[derive(Debug)]
pub struct CarrierSilence {
    /// Time limit for the other end to answer `Ask`.
    patience: Duration,
    /// Value of the connection's counter of data arrivals when this state was last updated.
    heard: u64,
    /// Time at which something last arrived on the connection.
    heard_at: Instant,
    /// Silence after which this end sends `Ask`.
    quiet: Duration,
    /// Time at which this end has sent `Ask`, or `None` if it awaits no answer.
    asked_at: Option<Instant>,
    /// Time since which received data waits to be acknowledged by this host, or `None`.
    owes_since: Option<Instant>,
}

impl CarrierSilence {
    pub fn new(patience: Duration, heard: u64, now: Instant) -> Self {
        let quiet = patience / 2;
        Self { patience, heard, heard_at: now, quiet, asked_at: None, owes_since: None }
    }

    /// Updates the state with the present value of the counter of data arrivals, and with the kinds of frames that have
    /// arrived.
    pub fn note(&mut self, heard: u64, came: &BytesArrived, now: Instant) {
        if self.heard == heard {
            return;
        }
        (self.heard, self.heard_at, self.asked_at) = (heard, now, None);
        if came.is_news() {
            self.quiet = self.patience / 2;
            self.owes_since = self.owes_since.or(Some(now));
        } else {
            self.quiet = (2 * self.quiet).min(QUIET_MOST.max(self.patience));
        }
    }

    /// Sets the time limit for an answer to `Ask`, also for an `Ask` that was already sent.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    pub fn is_asked(&self) -> bool {
        self.asked_at.is_some()
    }

    pub fn on_sent(&mut self) {
        self.owes_since = None;
    }

    /// Returns the time at which this end next has to send `Ask` or an acknowledgement, or has to give up the
    /// connection.
    pub fn next_deadline(&self) -> Instant {
        let by_silence = match self.asked_at {
            Some(asked_at) => asked_at + self.patience,
            None => self.heard_at + self.quiet,
        };
        self.owes_since.map_or(by_silence, |since| by_silence.min(since + TELL))
    }

    /// Returns what this end has to do about the silence now. All arrivals must have been noted before the call.
    pub fn due_action(&mut self, now: Instant) -> SilenceAction {
        match self.asked_at {
            Some(asked_at) if now >= asked_at + self.patience => return SilenceAction::Lost,
            None if now >= self.heard_at + self.quiet => {
                (self.asked_at, self.owes_since) = (Some(now), None);
                return SilenceAction::Ask;
            }
            _ => {}
        }
        if self.owes_since.is_some_and(|since| now >= since + TELL) {
            self.owes_since = None;
            return SilenceAction::Tell;
        }
        SilenceAction::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);
    const TALK: BytesArrived = BytesArrived { has_talk: true, has_more: false };
    const MORE: BytesArrived = BytesArrived { has_talk: false, has_more: true };

    fn at(millis: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(Instant::now) + Duration::from_millis(millis)
    }

    #[test]
    fn silent_peer_is_lost_and_answering_peer_is_probed_less_often() {
        let mut silence = CarrierSilence::new(PATIENCE, 0, at(0));
        assert_eq!((silence.due_action(at(499)), silence.next_deadline()), (SilenceAction::Nothing, at(500)));
        assert_eq!(
            (silence.due_action(at(500)), silence.due_action(at(1499))),
            (SilenceAction::Ask, SilenceAction::Nothing)
        );
        // Only an `Answer` arrives, so the time without arrivals before the next `Ask` doubles. It doubles again with
        // each further `Answer`.
        silence.note(1, &TALK, at(1499));
        assert_eq!(
            (silence.due_action(at(2498)), silence.due_action(at(2499))),
            (SilenceAction::Nothing, SilenceAction::Ask)
        );
        silence.note(2, &TALK, at(2600));
        assert_eq!(silence.next_deadline(), at(4600));
        (3..20).for_each(|heard| silence.note(heard, &TALK, at(3000)));
        assert_eq!(silence.next_deadline(), at(3000) + QUIET_MOST);
        // Data arrives, so the time until the next `Ask` is again as short as before the first one.
        silence.note(20, &MORE, at(4000));
        silence.on_sent();
        assert_eq!((silence.next_deadline(), silence.due_action(at(4500))), (at(4500), SilenceAction::Ask));
        // The counter of data arrivals is still 20, so this call means that nothing has arrived, and the connection is
        // lost in the end.
        silence.note(20, &MORE, at(5000));
        assert_eq!(
            (silence.next_deadline(), silence.due_action(at(5499)), silence.due_action(at(5500))),
            (at(5500), SilenceAction::Nothing, SilenceAction::Lost)
        );
    }

    #[test]
    fn receiver_without_data_of_its_own_sends_keepalives() {
        let mut silence = CarrierSilence::new(PATIENCE, 0, at(0));
        silence.note(1, &MORE, at(100));
        silence.note(2, &MORE, at(300));
        assert_eq!(
            (silence.next_deadline(), silence.due_action(at(349)), silence.due_action(at(350))),
            (at(350), SilenceAction::Nothing, SilenceAction::Tell)
        );
        assert_eq!((silence.next_deadline(), silence.due_action(at(351))), (at(800), SilenceAction::Nothing));
        // Any frame that this host sends serves as an acknowledgement. `Answer` frames themselves need no
        // acknowledgement.
        silence.note(3, &MORE, at(400));
        silence.on_sent();
        silence.note(4, &TALK, at(500));
        assert_eq!(silence.due_action(at(700)), SilenceAction::Nothing);
    }

    #[test]
    fn longer_timeout_extends_the_answer_deadline_of_a_probed_peer() {
        let mut silence = CarrierSilence::new(PATIENCE / 4, 0, at(0));
        assert_eq!(
            (silence.due_action(at(125)), silence.is_asked(), silence.next_deadline()),
            (SilenceAction::Ask, true, at(375))
        );
        silence.set_patience(PATIENCE);
        assert_eq!(
            (silence.due_action(at(375)), silence.next_deadline()),
            (SilenceAction::Nothing, at(1125))
        );
        assert_eq!(silence.due_action(at(1125)), SilenceAction::Lost);
        silence.note(1, &TALK, at(1126));
        assert!(!silence.is_asked());
    }

    /// A long frame arrives in many packets, and only the last one completes it.
    #[test]
    fn partial_frame_counts_as_received_data_and_keepalive_answer_does_not() {
        let mut silence = CarrierSilence::new(PATIENCE, 0, at(0));
        (1..20).for_each(|heard| silence.note(heard, &BytesArrived::default(), at(heard)));
        assert_eq!(silence.next_deadline(), at(1 + 250), "it is told that something comes");
        silence.on_sent();
        assert_eq!(silence.next_deadline(), at(19 + 500));
        let of = |frames: &[CarryFrame]| {
            let mut came = BytesArrived::default();
            frames.iter().for_each(|frame| came.on_frame(frame));
            came.is_news()
        };
        assert!(!of(&[CarryFrame::Ask]) && !of(&[CarryFrame::Answer, CarryFrame::Answer]));
        assert!(of(&[CarryFrame::End]) && of(&[CarryFrame::Ask, CarryFrame::Confirm { delivered: 1 }]));
    }
}
